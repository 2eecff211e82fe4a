"""All loaders of one process: which of them is iterated, how long its loop waits, and under `run` what takes its place."""

from __future__ import annotations

import functools
import logging
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader, get_worker_info

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.pipeline.site import Site
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.lines import users_line
from autotune_loader.watch.hook import line_of
from autotune_loader.watch.plan import Plan
from autotune_loader.watch.stderr import say
from autotune_loader.watch.tally import Loop, Tally

LOOP = "_autotune_loader_loop"
"""Attribute of an iterator that is watched."""
AUTO = "_autotune_loader_auto"
"""Attribute of a loader: what takes its place. Kept there, it goes when the loader does."""
MOST_FIRST_LOOKS = 3
"""Loaders of a process that are told of before its end."""

log = logging.getLogger(__name__)


class ScriptLoader:
    """A loader as people know it: by the line that makes it, however often it is made anew; it is not kept alive."""

    def __init__(self, site: Site, name: str, own: LoaderConfig, tally: Tally) -> None:
        self.site, self.name, self.own, self.tally = site, name, own, tally
        self.tuned: Any = None
        """What the latest AutoLoader of this loader has found out, without its data; None where there was none."""
        self.why_watched: str | None = None
        """Why no AutoLoader takes its place; None where one does, or might."""
        self._owner: Callable[[], Any] = lambda: None
        self._loop: Callable[[], Loop | None] = lambda: None

    def is_for(self, loader: Any) -> bool:
        """Whether this is the loader that it was, or takes its place, which nobody else has."""
        owner, loop = self._owner(), self._loop()
        if owner is not loader:
            if owner is not None or (loop is not None and loop.is_running):
                return False
            self._owner = weakref.ref(loader)
        return True

    def watch(self, iterator: Any, loader: Any, begun: float) -> Loop:
        """From now on the iterator tells when it is asked for a batch, and when it has one."""
        loop: Loop | None = vars(iterator).get(LOOP)
        if loop is None:
            vars(iterator)[LOOP] = loop = Loop(self.tally, loader, begun)
            iterator.__class__ = _watched(type(iterator))
        self._loop = weakref.ref(loop)
        return loop


class Session:
    """The loaders of this process."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.begun = plan, time.monotonic()
        self.loaders: list[ScriptLoader] = []
        self.rank, self.ranks = rank_of_environment()
        self._by_site: dict[tuple[Site, LoaderConfig], list[ScriptLoader]] = {}
        self._names = Counter[str]()
        self._first_looks = 0
        self._file: Any = None
        if plan.start_with is not None:
            from autotune_loader.results.result import TuningResult

            self._file = TuningResult.load(plan.start_with)

    @property
    def main(self) -> ScriptLoader | None:
        """The training loader: the one with which most time was spent."""
        return max(self.loaders, key=lambda each: each.tally.active_s, default=None)

    @property
    def is_waiting_too_long(self) -> bool:
        """Whether the training loader was waited for longer than was allowed."""
        share, most = None if self.main is None else self.main.tally.wait_share, self.plan.most_waiting
        return share is not None and most is not None and share > most

    def watch(self, iterator: Any, loader: Any, begun: float) -> None:
        """An iterator of torch's has begun to be made; its loop is watched. Workers read loaders of their own."""
        if get_worker_info() is None:
            self._known(loader).watch(iterator, loader, begun)

    def iterate(self, loader: Any, plain: Callable[[Any], Any]) -> Any:
        """An iterator of a loader; `plain` is torch's way, whose iterators come to `watch` by themselves."""
        is_auto = _is_auto(loader)
        if get_worker_info() is not None or (self.plan.verb == "watch" and not is_auto):
            return plain(loader)
        begun, known = time.monotonic(), self._known(loader)
        try:
            auto = loader if is_auto else self._auto_of(loader, known)
        except Exception as error:  # whatever it is, torch's own iterator does without
            auto, known.why_watched = None, str(error)
        if auto is None:
            return plain(loader)
        iterator = plain(auto)
        loop = known.watch(iterator, loader, begun)
        loop.made()
        return iterator

    def _known(self, loader: Any) -> ScriptLoader:
        if distributed.is_available() and distributed.is_initialized():  # at the end the group may be gone
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        line = line_of(loader) or users_line(sys._getframe(2))
        site, own = Site.of(loader, line), LoaderConfig.from_loader(loader)
        alike = self._by_site.setdefault((site, own), [])
        for known in alike:
            if known.is_for(loader):
                return known
        name, self._names[str(site.line)] = str(site.line), self._names[str(site.line)] + 1
        if (number := self._names[name]) > 1:
            name = f"{name} ({site.dataset} {number})"
        known = ScriptLoader(site, name, own, Tally())
        known.tally.first_look = lambda: self._look_at(known)
        known.is_for(loader)
        alike.append(known)
        self.loaders.append(known)
        return known

    def _look_at(self, known: ScriptLoader) -> None:
        """Tell the first that can be said of a loader."""
        self._first_looks += 1
        if not self.rank and self._first_looks <= MOST_FIRST_LOOKS:
            say(f"\nautotune-loader {self.plan.verb}: {known.name}: {known.tally}")

    def _auto_of(self, loader: Any, known: ScriptLoader) -> Any:
        """The AutoLoader that takes the place of a loader; None where it makes iterators of its own."""
        from autotune_loader.autoloader.loader import AutoLoader

        kept = vars(loader).get(AUTO)
        if kept is not None and kept.owner() is loader:
            return kept.auto
        kind = type(loader)
        if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
            known.why_watched = f"{kind.__name__} makes iterators of its own"
            return None
        auto = AutoLoader(loader, config=self._start(known) or known.own, max_workers=self.plan.max_workers)
        vars(loader)[AUTO] = _Kept(loader, auto)
        return auto

    def _start(self, known: ScriptLoader) -> LoaderConfig | None:
        """What `--start-with` says of this loader: by its line, else what training is said to be best with."""
        if self._file is None:
            return None
        kwargs = self._file.loaders.get(known.name)
        if kwargs is not None:
            return LoaderConfig.from_dict(kwargs)
        best: LoaderConfig = self._file.best
        return best if known.site.is_shuffled else None


class _Kept:
    """An AutoLoader beside the loader whose place it takes; copies of that loader, and what is sent, go without."""

    def __init__(self, loader: Any, auto: Any) -> None:
        self.owner, self.auto = weakref.ref(loader), auto

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _is_auto(loader: Any) -> bool:
    """Whether the script itself made an AutoLoader."""
    module = sys.modules.get("autotune_loader.autoloader.loader")
    return module is not None and isinstance(loader, module.AutoLoader)


@functools.lru_cache(maxsize=64)
def _watched(kind: Any) -> Any:
    """A class of iterators, of the same name, whose loop is watched."""

    class Watched(kind):
        def __next__(self) -> Any:
            loop = self.__dict__[LOOP]
            loop.ask()
            try:
                batch = kind.__next__(self)
            except StopIteration:
                loop.end()
                raise
            loop.receive(batch)
            return batch

        def _reset(self, *args: Any, **arguments: Any) -> Any:
            loop = self.__dict__[LOOP]
            loop.begin()
            done = kind._reset(self, *args, **arguments)
            loop.workers = getattr(self, "_workers", ())
            loop.made()
            return done

    Watched.__name__, Watched.__qualname__, Watched.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Watched
