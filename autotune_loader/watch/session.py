"""All loaders of one process: which of them is iterated, how long its loop waits, and under `run` what takes its place."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from autotune_loader import LoaderConfig
from autotune_loader.lines import Line, users_line
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.pipeline.site import Site
from autotune_loader.watch.run_plan import LINE, Plan, say
from autotune_loader.watch.script_loader import ScriptLoader
from autotune_loader.watch.watched import watch_iterator

AUTO = "_autotune_loader_auto"
"""Attribute of a loader: the AutoLoader in its place. Kept there, it goes when the loader does."""
MOST_FIRST_LOOKS = 3
"""Loaders of a process that are told of before its end."""


class Session:
    """The loaders of this process."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.begun = plan, time.monotonic()
        self.loaders: list[ScriptLoader] = []
        rank, self.ranks = rank_of_environment()
        self.rank = rank or 0
        self._by_id: dict[int, ScriptLoader] = {}
        self._by_site = defaultdict[Site, list[ScriptLoader]](list)
        self._names, self._first_looks = Counter[str](), 0
        self._file: Any = None
        if plan.start_with is not None:
            from autotune_loader import TuningResult

            self._file = TuningResult.load(plan.start_with)

    @property
    def main(self) -> ScriptLoader | None:
        """The training loader: the one with which most time was spent."""
        return max(self.loaders, key=lambda each: each.log.totals.active_s, default=None)

    @property
    def is_waiting_too_long(self) -> bool:
        """Whether the training loader was waited for longer than was allowed."""
        share, most = None if self.main is None else self.main.log.totals.wait_share, self.plan.most_waiting
        return share is not None and most is not None and share > most

    def watch(self, iterator: Any, loader: Any, begun: float) -> None:
        """An iterator of torch's has begun to be made; its loop is watched. Workers read loaders of their own."""
        if get_worker_info() is None:
            known = self._loader_of(loader)
            if self.plan.verb == "run" and known.kept is None:
                known.kept = why_not(loader)
            watch_iterator(iterator, known, loader, begun)

    def iterate(self, loader: Any, plain: Callable[[Any], Any]) -> Any:
        """An iterator of a loader; `plain` is torch's way, whose iterators come to `watch` by themselves."""
        if get_worker_info() is not None:
            return plain(loader)
        begun, known, auto = time.monotonic(), None, None
        try:
            known = self._loader_of(loader)
            auto = self._auto_of(loader, known)
        except Exception as error:  # whatever it is, torch's own iterator does without
            from autotune_loader.diagnosis import Kept

            if known is not None:
                known.kept = Kept.NOT_TUNED(error=f"{type(error).__name__}: {error}")
        if known is None or auto is None:
            return plain(loader)
        iterator = plain(auto)
        known.found = auto.found
        watch_iterator(iterator, known, loader, begun).started()
        return iterator

    def _loader_of(self, loader: Any) -> ScriptLoader:
        if distributed.is_available() and distributed.is_initialized():  # at the end the group may be gone
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        settings = loader.num_workers, loader.prefetch_factor, loader.pin_memory, loader.batch_size
        known = self._by_id.get(id(loader))
        if known is not None and known.owner() is loader and known.settings == settings:
            return known
        made_at = vars(loader).get(LINE)
        site = Site.of(loader, Line(*made_at) if made_at else users_line(sys._getframe(2)))
        alike = self._by_site[site]
        known = next((each for each in reversed(alike) if each.settings == settings and each.is_free_for(loader)), None)
        if known is None:
            known = ScriptLoader(site, self._name_of(site), LoaderConfig.from_loader(loader), self._look_at)
            self.loaders.append(known)
            alike.append(known)
        known.owner, known.settings, self._by_id[id(loader)] = weakref.ref(loader), settings, known
        return known

    def _name_of(self, site: Site) -> str:
        """By its line; others that the same line makes by their data and a number, too."""
        self._names[str(site.line)] += 1
        number = self._names[str(site.line)]
        return str(site.line) if number == 1 else f"{site.line} {site.dataset} {number}"

    def _look_at(self, known: ScriptLoader) -> None:
        """Tell the first that can be said of a loader."""
        self._first_looks += 1
        if not self.rank and self._first_looks <= MOST_FIRST_LOOKS:
            say(f"\nautotune-loader {self.plan.verb}: {known.name}: {known}")

    def _auto_of(self, loader: Any, known: ScriptLoader) -> Any:
        """What takes the place of a loader, which may be an AutoLoader itself; None where torch's own iterator is needed."""
        from autotune_loader import AutoLoader

        if isinstance(loader, AutoLoader):
            return loader
        if why_not(loader) is not None:
            return None
        kept = vars(loader).get(AUTO)
        if kept is None or kept.owner() is not loader:
            auto: Any = AutoLoader(
                loader,
                config=self._start(known),
                max_workers=self.plan.max_workers,
                workers=True if self.plan.workers else None,
            )
            vars(loader)[AUTO] = kept = _Kept(loader, auto)
        return kept.auto

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


def why_not(loader: Any) -> Any:
    """Why torch's own iterator is needed for a loader, a `Finding`; None where an AutoLoader can take its place."""
    from autotune_loader.diagnosis import Kept  # not under `watch`, which costs nothing

    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return Kept.OWN_ITERATOR(kind=kind.__name__)
    return Kept.ITERABLE() if isinstance(loader.dataset, IterableDataset) else None
