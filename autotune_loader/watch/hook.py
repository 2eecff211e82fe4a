"""Where torch makes loaders and iterators, once it has been imported: three methods that every loader goes through.

    DataLoader.__new__            which line makes it, also where a subclass does not call `__init__`
    DataLoader._get_iterator      under `run` another iterator may be made
    _BaseDataLoaderIter.__init__  an iterator is made, by whatever class of loader: it is one that is watched

They are put in once for a process and stay; while no hook is installed they only call torch's own. What was seen is told at
the end of the process, or where SIGTERM ends it. Nothing heavy is imported here: a script may set what torch reads when it is
imported.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what the script sees of it is another one
import contextlib
import functools
import gc
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune_loader.lines import users_line
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.watch.run_plan import ASKED, LINE, VARIABLE, Plan, Verb, say

if TYPE_CHECKING:
    from autotune_loader.report.script import ScriptReport
    from autotune_loader.watch.session import Session

active: list[Hook] = []
"""The hook that is installed in this process, if any; the last one counts."""
TORCH_MODULE = "torch.utils.data.dataloader"
HOOKED = "_autotune_loader_hooked"
"""Attribute of what was replaced here."""
BURST = "AUTOTUNE_LOADER_BURST"
"""Of the environment of `tune()`'s own processes, whose loaders are nobody's business."""

log = logging.getLogger(__name__)
_told_at_end_of: list[int] = []
"""The process whose end is looked after."""
_telling: list[bool] = []
"""While something is told anyway: whether SIGTERM came meanwhile."""


class Hook:
    """What `enable()` returns: it finds the loaders of this process until `close()`, or the end of a `with` block."""

    def __init__(self, plan: Plan, within: Hook | None = None) -> None:
        self.plan: Plan = plan
        self._within = within  # one that goes on when this one is closed
        self._begun: Session | None = None
        self._told: ScriptReport | None = None  # at the end
        self._others: list[Any] = []  # what other processes saw, as far as it was gathered

    @property
    def _session(self) -> Session:
        """The loaders of this process, from the first one on."""
        if self._begun is None:
            with _without_collections():  # of all that torch has made, 70 ms here, which the script may not need yet
                from autotune_loader.watch.session import Session

            self._begun = Session(self.plan, self._changed)
            if _told_at_end_of != [os.getpid()]:
                from multiprocessing.util import Finalize

                _told_at_end_of[:] = [os.getpid()]
                # multiprocessing's processes run this, unlike atexit, and others do once their children are gone
                Finalize(None, _tell, exitpriority=-1000)
        return self._begun

    @property
    def has_batches(self) -> bool:
        """Whether a loader of this process gave any."""
        return self._begun is not None and bool(self._begun.known)

    @property
    def report(self) -> ScriptReport | None:
        """The loaders of this process as of now, or as of `close()`; None if none of them has given a batch."""
        if self._told is None and self._within is not None:
            return self._within.report
        if self._told is not None or not self.has_batches:
            return self._told
        from autotune_loader.watch.report import seen_of

        return seen_of(self._session).report

    def metrics(self, loader: Any, prefix: str = "") -> dict[str, float]:
        """Return a loader's figures since the last call, as `AutoLoader.metrics()` does; nothing if it is not watched."""
        session = (self._within or self)._begun
        known = None if session is None else session.known_as(loader)
        if known is None:
            return {}
        return {f"{prefix}num_workers": float(loader.num_workers), **known.log.recent(prefix)}

    @property
    def is_waiting_too_long(self) -> bool:
        """Whether the training loader of a process was waited for longer than was allowed."""
        return self.plan.most_waiting is not None and any(each.too_long(self.plan) for each in self._seen())

    def install(self) -> None:
        """Find loaders from now on."""
        active.append(self)
        if (module := sys.modules.get(TORCH_MODULE)) is not None:
            _hook_into(module)
        elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenImported())

    def tell(self, *, flushes: bool = True) -> None:
        """Print the report of what was seen, and write it where it was asked for; or leave it to the command's process."""
        with _told_to_the_end():
            if seen := self._seen():
                from autotune_loader.watch.report import tell

                self._told = tell(seen, self.plan, flushes=flushes)
            elif self.plan.pid in (None, os.getpid()) and not rank_of_environment()[0]:
                nothing = "No PyTorch DataLoader was iterated: nothing to report."
                say(f"\nautotune-loader {self.plan.verb}: {nothing}", flushes=flushes)

    def _seen(self) -> list[Any]:
        """What this process saw, and what others have left."""
        own = []
        if self.has_batches:
            from autotune_loader.watch.report import seen_of

            self._session.first_line.stop()
            own = [seen_of(self._session)]
        if self.plan.folder is not None and self.plan.pid == os.getpid() and os.path.isdir(self.plan.folder):  # noqa: PTH112
            from autotune_loader.watch.others import gathered

            self._others += gathered(self.plan.folder)
        return own + self._others

    def _changed(self, _found: Any) -> None:
        """Another configuration is best: what was found is there, however the script ends."""
        from autotune_loader.watch.report import write_result

        write_result(self._session)

    def close(self) -> None:
        """Leave loaders alone from now on, and print the report on stderr. Loops that have begun go on."""
        if self in active:
            active.remove(self)
            self.tell()
            if self._begun is not None:
                self._begun.close()
        elif self._told is None:
            self._told = self.report

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def enable(
    verb: Verb = "watch",
    *,
    allow_workers: bool = False,
    output: str | os.PathLike[str] | None = None,
) -> Hook:
    """Watch or tune every DataLoader that this process iterates from now on, also those of Lightning or a Trainer.

    Under `autotune-loader watch` and `run` it does nothing.

    Args:
        verb: "watch" measures and changes nothing; "run" tunes workers during training, as `AutoLoader` does.
        allow_workers: Whether loaders with `num_workers=0` may use workers: their data may be read from other processes.
        output: Path of the `loader.json` that is written at the end.

    Returns:
        A `Hook`: `report` is a `ScriptReport`, in a `with` block and after it, and `metrics(loader)` is for loggers.
        Leaving the block, or `close()`, ends it and prints the report; otherwise it ends with the process.

    Raises:
        ValueError: `verb` is unknown; or another verb is enabled and not closed.
    """
    if verb not in ("watch", "run"):
        raise ValueError(f"verb={verb!r} is not 'watch' or 'run'. Try verb='watch'.")
    if active:
        hook = active[-1]
        if hook.plan.script is None and hook.plan.verb != verb:
            raise ValueError(f"verb={verb!r}: {hook.plan.verb!r} is enabled already. Call its close() first.")
        return Hook(hook.plan, hook)  # it is not installed: that one goes on when this is closed
    path = None if output is None else str(Path(output).absolute())
    hook = Hook(Plan(verb=verb, allow_workers=allow_workers, output=path))
    hook.install()
    return hook


def begin_as_handed_on() -> None:
    """Find the loaders of this process as its environment says; `sitecustomize` calls it.

    That is the plan of the script that has started it, or what the user asks for, which is handed on from here.
    """
    if (text := os.environ.pop(ASKED, None)) and VARIABLE not in os.environ:
        try:
            Plan.asked(text).hand_on()
        except ValueError as error:
            say(f"autotune-loader: {error}")
            return
    Hook(Plan(**json.loads(os.environ[VARIABLE]))).install()


def _hook_here() -> Hook | None:
    """The hook that looks at what happens here and now, if any."""
    return active[-1] if active and BURST not in os.environ else None


def _hook_into(module: ModuleType) -> None:
    loaders, iterators, worker = module.DataLoader, module._BaseDataLoaderIter, module.get_worker_info
    if HOOKED in vars(loaders):
        return
    setattr(loaders, HOOKED, True)
    get, begin = loaders._get_iterator, iterators.__init__

    @functools.wraps(loaders.__init__)  # whose signature it has
    def make_loader(kind: Any, *args: Any, **arguments: Any) -> Any:
        make = super(loaders, kind).__new__
        loader = make(kind) if make is object.__new__ else make(kind, *args, **arguments)
        if _hook_here() and (line := users_line(sys._getframe(1))) is not None:
            vars(loader)[LINE] = tuple(line)
        return loader

    @functools.wraps(get)
    def get_iterator(loader: Any) -> Any:
        if not active or active[-1].plan.verb == "watch" or (hook := _hook_here()) is None or worker() is not None:
            return get(loader)
        return hook._session.iterator_of(loader, functools.partial(get, loader))

    @functools.wraps(begin)
    def begin_iterator(iterator: Any, loader: Any, *args: Any, **arguments: Any) -> None:
        begun = time.monotonic()
        begin(iterator, loader, *args, **arguments)
        if (hook := _hook_here()) is not None and worker() is None:  # workers read loaders of their own
            try:
                real = vars(loader).get("watched_as", loader)  # an iterator of ours is made of something like a loader
                if real is not None:
                    hook._session.watch(iterator, real, begun)
                    if hook.plan.script is not None:
                        _tell_at_sigterm()
            except Exception:  # whatever it is, it is no reason to end somebody's training
                log.debug("an iterator is not watched", exc_info=True)

    loaders.__new__, loaders._get_iterator, iterators.__init__ = make_loader, get_iterator, begin_iterator


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


def _tell(*, flushes: bool = True) -> None:
    """What this process saw; `launch` does it for the process of the command, once the others are gone."""
    for hook in active:
        if hook.has_batches and (not flushes or hook.plan.pid != os.getpid()):
            hook.tell(flushes=flushes)


def _tell_at_sigterm() -> None:
    """Tell before SIGTERM ends this process; nothing where the script handles it, or this is not the main thread."""
    is_main = threading.get_ident() == threading.main_thread().ident
    if is_main and _signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not _is_caught_in_c(os.getpid()):
        if not hasattr(signal.getsignal, HOOKED):
            _hide_our_handler()
        _signal.signal(signal.SIGTERM, _tell_and_end)


@functools.lru_cache(maxsize=1)
def _is_caught_in_c(_pid: int) -> bool:
    """Whether SIGTERM has a handler that Python does not know, such as one of `faulthandler`, by the time of the first loader.

    A line of `status` (proc_pid_status(5)) is `SigCgt: 0000000100004002`, a bit for each signal.
    """
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123 - light
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


def _tell_and_end(number: int, _frame: Any) -> None:
    if _telling:
        _telling[:] = [True] * len(_telling)
        return
    _signal.signal(number, _signal.SIG_DFL)
    try:
        _tell(flushes=False)
    finally:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def _told_to_the_end() -> Iterator[None]:
    """SIGTERM ends this process after the block, and not in the midst of it."""
    _telling.append(False)
    try:
        yield
    finally:
        if _telling.pop():
            _signal.signal(signal.SIGTERM, _signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """In this block no garbage is collected."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _hide_our_handler() -> None:
    """`signal` tells the script what it would see without us: by it libraries decide whether to set handlers of their own."""

    def hiding(function: Any) -> Any:
        @functools.wraps(function)
        def hides(*args: Any, **arguments: Any) -> Any:
            handler = function(*args, **arguments)
            return signal.SIG_DFL if handler is _tell_and_end else handler

        vars(hides)[HOOKED] = True
        return hides

    vars(signal).update(getsignal=hiding(signal.getsignal), signal=hiding(signal.signal))


def _forget() -> None:
    """A forked process has no handler until it has a loader, and loaders of its own."""
    if _signal.getsignal(signal.SIGTERM) is _tell_and_end:
        _signal.signal(signal.SIGTERM, _signal.SIG_DFL)
    for hook in active:
        hook._begun = None


os.register_at_fork(after_in_child=_forget)
