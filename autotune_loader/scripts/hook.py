"""Where torch makes and iterates loaders, once it has been imported: three methods that every loader goes through.

    DataLoader.__new__           which line makes it
    DataLoader.__iter__          under `run` its batches come from an AutoLoader
    _BaseDataLoaderIter.__new__  an iterator is made, by whatever class of loader: it is one that is watched

None of them is on the stack while code of torch or of the user runs. They are put in once for a process and stay; while no
hook is installed they do nothing. Nothing heavy is imported here: a script may set what torch reads when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import logging
import os
import shutil
import signal
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.scripts.by_identity import ByIdentity
from autotune_loader.scripts.nothing import say, tell_nothing
from autotune_loader.scripts.plan import Plan
from autotune_loader.values.lines import Line, is_ours, users_line

if TYPE_CHECKING:
    from autotune_loader.scripts.session import Session

active: list[Hook] = []
"""The hook that is installed in this process, if any; the last one counts."""
TORCH_MODULE = "torch.utils.data.dataloader"
HOOKED = "_autotune_loader_hooked"

log = logging.getLogger(__name__)
_lines: ByIdentity[Line] = ByIdentity()
_told_at_end_of: list[int] = []
"""The process whose end is looked after."""


class Hook:
    """Finds the loaders of this process, until it is removed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._session: Session | None = None
        self._is_told = False

    @property
    def session(self) -> Session:
        """The loaders of this process, from the first one on; from then on they are told of when it ends."""
        if self._session is None:
            from autotune_loader.scripts.session import Session

            self._session = Session(self.plan, _lines)
            _look_after_the_end()
        return self._session

    @property
    def has_batches(self) -> bool:
        """Whether a loader gave any."""
        return self._session is not None and any(each.log.batches for each in self._session.loaders)

    def tell(self, *more: str, or_nothing: bool = False) -> None:
        """Report, once, what was seen, and `more` sentences; with `or_nothing` also that it was nothing."""
        if self._is_told:
            return
        if self.has_batches:
            self._is_told = True
            from autotune_loader.scripts.report import tell

            tell(self.session, more)
        elif or_nothing:
            tell_nothing(self.plan, more)

    def install(self) -> None:
        """Find loaders from now on."""
        active.append(self)
        if self.plan.script is not None:  # which logs what it would without us
            logging.getLogger("autotune_loader").propagate = False
        if (module := sys.modules.get(TORCH_MODULE)) is not None:
            _hook_into(module)
        elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenImported())

    def remove(self) -> None:
        """Leave loaders alone; what runs already goes on."""
        active.remove(self)

    def forget(self) -> None:
        """A forked process has loaders of its own."""
        self._session, self._is_told = None, False


class End:
    """The last that happens in the script's own process, also where it went on as another program (`os.execv`)."""

    def __init__(self, hook: Hook) -> None:
        self.hook, self.is_interrupted = hook, False

    def __call__(self, *more: str) -> None:
        """Tell what there is to tell, of its other processes first, and end by SIGINT where Python does."""
        plan = self.hook.plan
        if os.getpid() != plan.pid:
            return
        folder = Path(plan.folder or "")
        told = sorted(folder.glob("told-*"), key=os.path.getmtime)
        for each in told:
            say(each.read_text())
        self.hook.tell(*more, or_nothing=not told)
        if not rank_of_environment()[0]:  # other ranks leave what rank 0 reads
            shutil.rmtree(folder, ignore_errors=True)
        if self.is_interrupted:
            # Python does so for a script, though not for a module, which is what runs here, perhaps.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)


def begin_as_handed_on() -> None:
    """Find the loaders of a process that a script has started, as the script's own plan says; `sitecustomize` calls it."""
    plan = Plan.handed_on()
    if plan is not None:
        hook = Hook(plan)
        hook.install()
        atexit.register(End(hook))


def _forget() -> None:
    for hook in active:
        hook.forget()


os.register_at_fork(after_in_child=_forget)


def _look_after_the_end() -> None:
    """Tell at the end of the process: multiprocessing's run this, unlike atexit, and others do once their children are gone."""
    if _told_at_end_of != [os.getpid()]:
        from multiprocessing.util import Finalize

        _told_at_end_of[:] = [os.getpid()]
        Finalize(None, _tell, exitpriority=-1000)


def _tell() -> None:
    for hook in active:
        hook.tell()


def _hook_into(module: ModuleType) -> None:
    loaders, iterators = module.DataLoader, module._BaseDataLoaderIter
    if HOOKED in vars(loaders):
        return
    setattr(loaders, HOOKED, True)
    made, begun = loaders.__new__, iterators.__new__

    @functools.wraps(loaders.__init__)
    def new_loader(kind: Any, *args: Any, **arguments: Any) -> Any:
        loader = _plain(made, loaders, kind, *args, **arguments)
        if active and (line := users_line(sys._getframe(1))) is not None:
            _lines[loader] = line
        return loader

    @functools.wraps(iterators.__init__)
    def new_iterator(kind: Any, *args: Any, **arguments: Any) -> Any:
        if active and (args or "loader" in arguments) and not _is_made_by_us(sys._getframe(1)):
            try:
                return active[-1].session.watch(kind, args[0] if args else arguments["loader"])
            except Exception:  # whatever it is, it is no reason to end somebody's training
                log.debug("an iterator is not watched", exc_info=True)
        return _plain(begun, iterators, kind, *args, **arguments)

    loaders.__new__, iterators.__new__ = new_loader, new_iterator
    loaders.__iter__ = _Iterate(vars(loaders)["__iter__"])


def _plain(made: Any, kind: Any, actual: Any, *args: Any, **arguments: Any) -> Any:
    """What `actual.__new__` would be without us: that of the next class, which may want the arguments."""
    following = super(kind, actual).__new__ if made is object.__new__ else made
    return following(actual) if following is object.__new__ else following(actual, *args, **arguments)


class _Iterate:
    """`DataLoader.__iter__`: torch's own, or what takes its place."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __get__(self, loader: Any, kind: Any = None) -> Any:
        plain = self._plain.__get__(loader, kind)
        if loader is None or not active or active[-1].plan.verb == "watch" or _is_made_by_us(sys._getframe(1)):
            return plain
        try:
            return active[-1].session.iterate(loader, plain)
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("a loader is not looked at", exc_info=True)
            return plain


def _is_made_by_us(frame: FrameType | None) -> bool:
    """Whether the nearest code outside of torch's loaders is this package's: a pool of AutoLoader's, a probe."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch.utils.data"):
        frame = frame.f_back
    return frame is not None and is_ours(frame.f_code.co_filename)


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
