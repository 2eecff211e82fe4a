"""All loaders of one process: which of them is iterated, what is done with it, and when `tune` has seen enough."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed
from torch.utils.data import get_worker_info

from autotune_loader.live.loader import AutoLoader
from autotune_loader.live.ranks import is_one_of_many
from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.results.loader_file import LoaderFile, config_in, read_loader_file
from autotune_loader.scripts.plan import Plan
from autotune_loader.scripts.serving import ON_A_DEVICE, Served, why_not
from autotune_loader.scripts.site import Contents, Site
from autotune_loader.scripts.watching import RECORD, can_carry_history, carrying_history, is_part_of_us, watch
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.lines import Line, users_line

LOOK_S = 0.25
"""So often `tune` asks itself whether it is done."""
MAIN_SHARE = 0.5
"""Share of the time trained that makes a loader the training loader."""

log = logging.getLogger(__name__)


class Session:
    """The loaders of this process; `lines` says which line made one."""

    def __init__(self, plan: Plan, lines: Mapping[Any, Line]) -> None:
        self.plan = plan
        self.sites: list[Site] = []
        self.begun = time.monotonic()
        self.stopped: str | None = None
        """Why `tune` ended the script."""
        rank, self.ranks = rank_of_environment()
        self.rank = rank or 0
        self._lines = lines
        self._autos: weakref.WeakKeyDictionary[Any, AutoLoader[Any]] = weakref.WeakKeyDictionary()
        self._file: LoaderFile | None = None if plan.apply is None else read_loader_file(plan.apply)
        self._next_look = 0.0

    @property
    def main(self) -> Site | None:
        """The training loader: the one with which most time was spent."""
        return max(self.sites, key=lambda site: site.tally.active_s, default=None)

    def iterate(self, loader: Any, iterated: Callable[[Any], Any]) -> Any:
        """An iterator of a loader, in place of `iter(loader)`; `iterated` is torch's own way to make one."""
        if not self._concerns(loader):
            return iterated(loader)
        site = self._site_of(loader)
        site.why_not = site.why_not or why_not(loader)
        if self.plan.verb != "watch" and site.why_not is None and (served := self._served(site, loader)) is not None:
            return served
        if not can_carry_history(loader):
            return iterated(loader)  # `watch_from_outside` sees it
        begun = time.monotonic()
        with carrying_history(loader):
            iterator = iterated(loader)
        is_new = RECORD not in vars(iterator)
        record = site.record(loader) if is_new else vars(iterator)[RECORD]
        watch(iterator, record)
        record.begin(time.monotonic() - begun, is_new=is_new)
        return iterator

    def watch_from_outside(self, iterator: Any, loader: Any) -> None:
        """An iterator of torch's that was made: if nobody else does, see what the loop waits for it."""
        if not self._concerns(loader):
            return
        site = self._site_of(loader)
        site.why_not = site.why_not or f"{type(loader).__name__} makes iterators of its own"
        record = site.record(None)
        watch(iterator, record)
        record.begin(0.0, is_new=True)

    def _concerns(self, loader: Any) -> bool:
        return get_worker_info() is None and not isinstance(loader, AutoLoader) and not is_part_of_us(loader)

    def _site_of(self, loader: Any) -> Site:
        if is_one_of_many():  # at the end the group may be gone
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        line = self._lines.get(loader) or users_line(sys._getframe(2)) or Line("?", 0)
        contents = Contents.of(loader)
        for site in self.sites:
            if (site.line, site.contents) == (line, contents) and site.is_of(loader):
                return site
        self.sites.append(Site(line, loader, [site.name for site in self.sites]))
        return self.sites[-1]

    def _served(self, site: Site, loader: Any) -> Served | None:
        """Its batches, tuned; None where what was asked for is not possible with it."""
        auto = self._autos.get(loader)
        if auto is None:
            try:
                auto = AutoLoader(loader, config=self._start(site), max_workers=self.plan.max_workers)
            except ValueError as error:
                site.why_not = str(error)
                return None
            if site.state is not None and site.tuning is not None:
                auto.go_on_from(site.state, site.tuning)
            self._autos[loader] = auto
        between = self._look if self.plan.verb == "tune" else (lambda now: None)
        served = Served(auto, site.tally, between, on_device=lambda: setattr(site, "why_not", ON_A_DEVICE))
        site.state, site.tuning = auto.learnt
        site.is_tuned = True
        return served

    def _start(self, site: Site) -> LoaderConfig | None:
        """What `--apply` says of this loader: by its line, else what training is said to be best with."""
        file = self._file
        if file is None:
            return None
        kwargs = file.loaders.get(site.name)
        if kwargs is not None:
            return LoaderConfig.from_dict(kwargs)
        return config_in(file) if site.contents.is_shuffled else None

    def _look(self, now: float) -> None:
        """End the script, as Ctrl-C would, once the training loader has settled or time is up."""
        if now < self._next_look or self.stopped is not None:
            return
        self._next_look = now + LOOK_S
        site, budget_s = self.main, self.plan.budget_s
        if threading.current_thread() is not threading.main_thread() or self.ranks > 1 or site is None:
            return
        spent_s = now - self.begun
        whole_s = sum(each.tally.active_s for each in self.sites)
        if site.tuning is not None and site.is_tuned and site.tally.active_s >= MAIN_SHARE * whole_s:
            tuner = site.tuning.tuner
            if tuner.is_settled and tuner.is_confirmed:
                self.stopped = f"{site.name} has settled"
        if budget_s is not None and spent_s >= budget_s:
            self.stopped = f"the budget of {budget_s:.0f} s is spent"
        if self.stopped is not None:
            signal.raise_signal(signal.SIGINT)
