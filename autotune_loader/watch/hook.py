"""Where torch makes and iterates loaders, once it has been imported: three methods that every loader goes through.

    DataLoader.__new__            which line makes it, also where a subclass does not call `__init__`
    DataLoader.__iter__           under `run` its batches come from an AutoLoader
    _BaseDataLoaderIter.__init__  an iterator is made, by whatever class of loader: it is one that is watched

They are put in once for a process and stay; while no hook is installed they only call torch's own. Nothing heavy is imported
here: a script may set what torch reads when it is imported.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import sys
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune_loader.lines import users_line
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.watch.run_plan import LINE, Plan, Verb, say

if TYPE_CHECKING:
    from autotune_loader.watch.session import Session

active: list[Hook] = []
"""The hook that is installed in this process, if any; the last one counts."""
TORCH_MODULE = "torch.utils.data.dataloader"
NOTHING = "Nothing can be told: no PyTorch DataLoader gave a batch in this process."
HOOKED = "_autotune_loader_hooked"
BURST = "AUTOTUNE_LOADER_BURST"
"""Of the environment of `tune()`'s own processes, whose loaders are nobody's business."""

log = logging.getLogger(__name__)
_told_at_end_of: list[int] = []
"""The process whose end is looked after."""


class Hook:
    """Finds the loaders of this process, until `close`, the end of a `with` block, or the end of the process.

    Args:
        plan: what is to be done with them.
        session: of another hook, which goes on when this one is closed.
    """

    def __init__(self, plan: Plan, session: Session | None = None) -> None:
        self.plan, self._session = plan, session

    @property
    def session(self) -> Session:
        """The loaders of this process, from the first one on."""
        if self._session is None:
            from autotune_loader.watch.session import Session

            self._session = Session(self.plan)
            _look_after_the_end()
        return self._session

    @property
    def has_batches(self) -> bool:
        """Whether a loader gave any."""
        return self._session is not None and any(each.log.totals.batches for each in self._session.loaders)

    def install(self) -> None:
        """Find loaders from now on."""
        active.append(self)
        if (module := sys.modules.get(TORCH_MODULE)) is not None:
            _hook_into(module)
        elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenImported())

    def report(self) -> str:
        """What is known now."""
        from autotune_loader.watch.report import report_of

        return str(report_of(self.session))

    def tell(self) -> None:
        """Print the report of what was seen, and write it where it was asked for."""
        from autotune_loader.watch.report import tell

        if self.has_batches:
            tell(self.session)

    def forget(self) -> None:
        """A forked process has loaders of its own."""
        self._session = None

    def close(self) -> None:
        """Leave loaders alone from now on, and print the report on stderr. What is iterated already goes on."""
        if self in active:
            active.remove(self)
            self.tell()
            tell_nothing(self)

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def enable(
    verb: Verb = "watch",
    *,
    workers: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> Hook:
    """Look at every DataLoader that this process iterates from now on, whoever makes it: Lightning, a Trainer, Accelerate.

    Under `autotune-loader watch` and `run`, which do so already, it changes nothing.

    Args:
        verb: "watch" measures and changes nothing; "run" tunes workers while training, as `AutoLoader` does.
        workers: whether loaders that ask for no workers may have some: their data may be read from other processes.
        output: where `loader.json` is written at the end.

    Returns:
        A context manager whose end is that of the looking; without `with`, that is the process' end.

    Raises:
        ValueError: another verb; or another one was enabled and not closed.
    """
    if verb not in ("watch", "run"):
        raise ValueError(f"verb={verb!r} is not 'watch' or 'run'; verb='watch' would work")
    if active:
        hook = active[-1]
        if hook.plan.script is None and hook.plan.verb != verb:
            raise ValueError(f"verb={verb!r}: {hook.plan.verb!r} is enabled already; its close() would end it")
        return Hook(hook.plan, hook.session)
    path = None if output is None else str(Path(output).absolute())
    hook = Hook(Plan(verb=verb, workers=workers, output=path))
    hook.install()
    return hook


def tell_nothing(hook: Hook) -> None:
    """Say so where no loader was seen; ranks other than 0, for which rank 0 may load, are silent."""
    if not hook.has_batches and not rank_of_environment()[0]:
        say(f"\nautotune-loader {hook.plan.verb}: {NOTHING}")


def begin_as_handed_on() -> None:
    """Find the loaders of a process that a script has started, as the script's own plan says; `sitecustomize` calls it."""
    plan = Plan.handed_on()
    if plan is not None:
        Hook(plan).install()


def hook_here() -> Hook | None:
    """The hook that looks at what happens here and now, if any."""
    return active[-1] if active and BURST not in os.environ else None


def _look_after_the_end() -> None:
    """Tell at the end of the process: multiprocessing's run this, unlike atexit, and others do once their children are gone."""
    if _told_at_end_of != [os.getpid()]:
        from multiprocessing.util import Finalize

        _told_at_end_of[:] = [os.getpid()]
        Finalize(None, _tell, exitpriority=-1000)


def _tell() -> None:
    for hook in active:
        hook.tell()


def _forget() -> None:
    for hook in active:
        hook.forget()


os.register_at_fork(after_in_child=_forget)


def _hook_into(module: ModuleType) -> None:
    loaders, iterators = module.DataLoader, module._BaseDataLoaderIter
    if HOOKED in vars(loaders):
        return
    setattr(loaders, HOOKED, True)
    iterate, begin = loaders.__iter__, iterators.__init__

    @functools.wraps(loaders.__init__)  # whose signature it has
    def make_loader(kind: Any, *args: Any, **arguments: Any) -> Any:
        make = super(loaders, kind).__new__
        loader = make(kind) if make is object.__new__ else make(kind, *args, **arguments)
        if hook_here() and (line := users_line(sys._getframe(1))) is not None:
            vars(loader)[LINE] = tuple(line)
        return loader

    @functools.wraps(iterate)
    def iterate_loader(loader: Any) -> Any:
        hook = hook_here()
        if hook is None or (hook.plan.verb == "watch" and not is_auto(loader)):
            return iterate(loader)  # whose iterator begins below
        return hook.session.iterate(loader, iterate)

    @functools.wraps(begin)
    def begin_iterator(iterator: Any, loader: Any, *args: Any, **arguments: Any) -> None:
        begun = time.monotonic()
        begin(iterator, loader, *args, **arguments)
        if (hook := hook_here()) is not None:
            try:
                hook.session.watch(iterator, loader, begun)
            except Exception:  # whatever it is, it is no reason to end somebody's training
                log.debug("an iterator is not watched", exc_info=True)

    loaders.__new__, loaders.__iter__, iterators.__init__ = make_loader, iterate_loader, begin_iterator


def is_auto(loader: Any) -> bool:
    """Whether it is an AutoLoader, which the script itself has made."""
    module = sys.modules.get("autotune_loader.autoloader.loader")
    return module is not None and isinstance(loader, module.AutoLoader)


class _WhenImported(MetaPathFinder):
    """Hooks into torch's module of loaders as soon as it has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - Python's signature
        if name != TORCH_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _hook_into(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec
