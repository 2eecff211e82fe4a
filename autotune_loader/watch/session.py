"""All loaders of one process: which of them is iterated, how long its loop waits, and under `run` what tunes it."""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.utils.data import DataLoader

from autotune_loader import LoaderConfig
from autotune_loader.lines import Line, users_line
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.pipeline.loop_log import Site
from autotune_loader.watch.first_line import FirstLine
from autotune_loader.watch.run_plan import LINE, Plan, say
from autotune_loader.watch.script_loader import FEWEST_BATCHES, ScriptLoader
from autotune_loader.watch.watched import watch_iterator

MOST_FIRST_LOOKS = 3
"""Loaders of a process that are told of before its end."""


class Session:
    """The loaders of this process."""

    def __init__(self, plan: Plan, on_change: Callable[[Any], None] | None = None) -> None:
        self.plan, self.begun, self._on_change = plan, time.monotonic(), on_change
        self.loaders: list[ScriptLoader] = []
        rank, self.ranks = rank_of_environment()
        self.rank = rank or 0
        self.first_line = FirstLine(self._say_so_far)
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

    def watch(self, iterator: Any, loader: Any, begun: float) -> None:
        """An iterator has begun to be made; its loop is watched."""
        known = self._loader_of(loader, _found_of(loader))
        if self.plan.verb == "run" and known.found is None and known.kept is None:
            from autotune_loader.diagnosis import Kept  # not under `watch`, which costs nothing

            kind = type(loader)
            if kind._get_iterator is not DataLoader._get_iterator:
                known.kept = Kept.OWN_ITERATOR(kind=kind.__name__)
        watch_iterator(iterator, known, loader, begun)

    def iterator_of(self, loader: Any, torchs: Callable[[], Any]) -> Any:
        """The iterator that `run` puts in the place of the one that torch's `DataLoader` makes."""
        known, is_torchs = None, False

        def torchs_own() -> Any:
            nonlocal is_torchs
            is_torchs = True
            return torchs()

        try:
            from autotune_loader.autoloader.live import iterator_of, live_of

            known = self._loader_of(loader, None)
            live = live_of(
                loader,
                known.site.line,
                workers=True if self.plan.workers else None,
                max_workers=self.plan.max_workers,
                config=self._start(known),
                on_change=self._on_change,
            )
            if known.found is not live.found:  # the script may have set its numbers anew
                known = known if known.found is None else self._loader_of(loader, live.found)
                known.tune_by(live.found)
            return iterator_of(loader, live, torchs_own)
        except Exception as error:  # whatever it is, torch's own iterator does without
            if is_torchs:
                raise
            from autotune_loader.diagnosis import Kept

            if known is not None:
                known.kept, known.found = Kept.NOT_TUNED(error=f"{type(error).__name__}: {error}"), None
        return torchs()

    def _loader_of(self, loader: Any, found: Any) -> ScriptLoader:
        """The known loader that it is, or a new one; `found` is what tunes it, where that is known to be what it was."""
        if distributed.is_available() and distributed.is_initialized():  # at the end the group may be gone
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        known = self._by_id.get(id(loader))
        if known is not None and known.owner() is loader:
            is_same = known.settings == _settings_of(loader) if known.found is None else found in (None, known.found)
            if is_same:
                return known
        settings = _settings_of(loader if found is None else found.tuner.asked, loader)
        made_at = vars(loader).get(LINE)
        site = Site.of(loader, Line(*made_at) if made_at else users_line(sys._getframe(2)))
        alike = self._by_site[site]
        known = next((each for each in reversed(alike) if each.settings == settings and _is_free(each, loader)), None)
        if known is None:
            own = LoaderConfig.from_loader(loader) if found is None else found.tuner.asked
            known = ScriptLoader(site, self._name_of(site), own, self._look_at)
            self.loaders.append(known)
            alike.append(known)
        known.owner, known.dataset = weakref.ref(loader), _reference(getattr(loader, "dataset", None))
        known.settings, self._by_id[id(loader)] = settings, known
        if found is not None:
            known.tune_by(found)
        return known

    def _name_of(self, site: Site) -> str:
        """By its line; others that the same line makes by their data and a number, too."""
        self._names[str(site.line)] += 1
        number = self._names[str(site.line)]
        return str(site.line) if number == 1 else f"{site.line} {site.dataset} {number}"

    def _look_at(self, known: ScriptLoader) -> None:
        """Tell the first that can be said of a loader, as soon as there is something."""
        if not known.is_worth_telling:
            self.first_line.start()
            return
        self.first_line.stop()
        known.first_look = None
        self._say(known)

    def _say_so_far(self) -> None:
        """It takes long until something can be said: what the loop waits for so far."""
        known = max(self.loaders, key=lambda each: (each.waiting_since is not None, each.log.totals.active_s))
        if known.log.totals.batches >= FEWEST_BATCHES:
            known.first_look = None
        self._say(known)

    def _say(self, known: ScriptLoader) -> None:
        self._first_looks += 1
        if not self.rank and self._first_looks <= MOST_FIRST_LOOKS:
            say(f"\nautotune-loader {self.plan.verb}: {known.name}: {known}")

    def _start(self, known: ScriptLoader) -> LoaderConfig | None:
        """What `--start-with` says of this loader: by its line, else what training is said to be best with."""
        if self._file is None:
            return None
        kwargs = self._file.loaders.get(known.name)
        if kwargs is not None:
            return LoaderConfig.from_dict(kwargs)
        best: LoaderConfig = self._file.best
        return best if known.site.is_shuffled else None


def _settings_of(numbers: Any, loader: Any = None) -> tuple[Any, ...]:
    """What makes a loader another one where the script changes it; `numbers` has them as the script set them."""
    loader = numbers if loader is None else loader
    return numbers.num_workers, numbers.prefetch_factor, loader.pin_memory, loader.batch_size


def _found_of(loader: Any) -> Any:
    """What an AutoLoader, which the script itself has made, has found."""
    module = sys.modules.get("autotune_loader.autoloader.loader")
    return loader.found if module is not None and isinstance(loader, module.AutoLoader) else None


def _is_free(known: ScriptLoader, loader: Any) -> bool:
    """Whether it is this loader, or one that is gone, with its iterators and its data, and whose place this one takes."""
    owner, dataset = known.owner(), known.dataset()
    return owner is loader or (
        owner is None and not known.is_running() and (dataset is None or dataset is loader.dataset)
    )


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:  # as for a list
        return lambda: None
