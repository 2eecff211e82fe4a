"""All loaders of one process: which of them is iterated, what is done with it, and when `tune` has seen enough."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import distributed
from torch.utils.data import get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from autotune_loader.machine.limits import rank_of_environment
from autotune_loader.pipeline.site import Site
from autotune_loader.results.result import TuningResult
from autotune_loader.scripts.batch_log import Loop
from autotune_loader.scripts.by_identity import ByIdentity
from autotune_loader.scripts.loader import ScriptLoader, why_not
from autotune_loader.scripts.plan import Plan
from autotune_loader.scripts.watched import LOOP, watched
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.lines import Line, users_line

CARRYING = (_SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter)
"""Iterators whose batches can take their times along."""
LOOK_S = 0.25
"""So often `tune` asks itself whether it is done."""
MAIN_SHARE = 0.5
"""Share of the time trained that makes a loader the training loader."""

log = logging.getLogger(__name__)


class Session:
    """The loaders of this process; `lines` says which line made one."""

    def __init__(self, plan: Plan, lines: ByIdentity[Line]) -> None:
        self.plan = plan
        self.loaders: list[ScriptLoader] = []
        self.begun = time.monotonic()
        self.stopped: str | None = None
        """Why `tune` asked the script to end."""
        self._asked_in: int | None = None
        """The training loader's epoch in which it did."""
        rank, self.ranks = rank_of_environment()
        self.rank = rank or 0
        self._lines = lines
        self._autos: ByIdentity[Any] = ByIdentity()
        self._file = None if plan.apply is None else TuningResult.load(plan.apply)
        self._next_look = 0.0
        self._between = self._look if plan.verb == "tune" else None

    @property
    def main(self) -> ScriptLoader | None:
        """The training loader: the one with which most time was spent."""
        return max(self.loaders, key=lambda each: each.log.active_s, default=None)

    @property
    def is_waiting_too_long(self) -> bool:
        """Whether the training loader was waited for longer than was allowed."""
        share = None if self.main is None else self.main.log.wait_share
        return None not in (self.plan.most_waiting, share) and share > self.plan.most_waiting  # type: ignore[operator]

    def watch(self, kind: Any, loader: Any) -> Any:
        """A new iterator of this class, which torch will initialise, for a loader; one that tells what its loop waits for."""
        if get_worker_info() is not None:
            return object.__new__(kind)
        known = self._known(loader)
        if self.plan.verb != "watch":  # `iterate` was not asked for it, or left it alone
            known.why_not = known.why_not or f"{type(loader).__name__} makes iterators of its own"
        iterator = object.__new__(watched(kind, carries=kind in CARRYING))
        vars(iterator)[LOOP] = Loop(known.log, loader, self._between)
        return iterator

    def iterate(self, loader: Any, plain: Callable[[], Any]) -> Callable[[], Any]:
        """What makes an iterator of a loader, in place of torch's own way, which is `plain`."""
        if self.plan.verb == "watch" or get_worker_info() is not None:
            return plain
        known = self._known(loader)
        known.why_not = known.why_not or why_not(loader)
        return plain if known.why_not is not None else lambda: self._served(known, loader, plain)

    def _known(self, loader: Any) -> ScriptLoader:
        if distributed.is_available() and distributed.is_initialized():  # at the end the group may be gone
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        site = Site.of(loader, self._lines.get(loader) or users_line(sys._getframe(2)))
        for known in self.loaders:
            if known.is_of(site, loader):
                return known
        self.loaders.append(ScriptLoader(site, loader, [each.name for each in self.loaders]))
        return self.loaders[-1]

    def _served(self, known: ScriptLoader, loader: Any, plain: Callable[[], Any]) -> Any:
        """An iterator of an AutoLoader of the same parts; torch's own where what was asked for is not possible with it."""
        from autotune_loader.live.loader import AutoLoader

        auto, begun = self._autos.get(loader), time.monotonic()
        if auto is None:
            start = self._start(known)
            try:
                auto = AutoLoader(loader, config=start or known.own, max_workers=self.plan.max_workers)
            except Exception as error:  # whatever it is, torch's own iterator does without
                known.why_not = str(error)
                return plain()
            if known.tuned is not None:
                auto.go_on_from(*known.tuned)
            self._autos[loader] = auto
        iterator: Any = iter(auto)
        known.tuned = auto.learnt
        if (loop := vars(iterator).get(LOOP)) is not None:  # that of kept workers
            loop.reset()
            return iterator
        loop = Loop(known.log, loader, self._between)
        loop.reset(begun)
        vars(iterator)[LOOP] = loop
        iterator.__class__ = watched(type(iterator), carries=False)
        return iterator

    def _start(self, known: ScriptLoader) -> LoaderConfig | None:
        """What `--apply` says of this loader: by its line, else what training is said to be best with."""
        if self._file is None:
            return None
        kwargs = self._file.loaders.get(known.name)
        if kwargs is not None:
            return LoaderConfig.from_dict(kwargs)
        return self._file.best if known.site.is_shuffled else None

    def _look(self, now: float) -> None:
        """Ask the script to end, as Ctrl-C would, once the training loader has settled or time is up.

        It is asked once, and in each epoch that it begins all the same.
        """
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        main, budget_s = self.main, self.plan.budget_s
        if threading.current_thread() is not threading.main_thread() or self.ranks > 1 or main is None:
            return
        if main.log.epochs == self._asked_in:
            return
        whole_s = sum(each.log.active_s for each in self.loaders)
        if main.is_settled and main.log.active_s >= MAIN_SHARE * whole_s:
            self.stopped = f"{main.name} has settled"
        if budget_s is not None and now - self.begun >= budget_s:
            self.stopped = f"the budget of {budget_s:.0f} s is spent"
        if self.stopped is not None:
            self._asked_in = main.log.epochs
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                raise KeyboardInterrupt  # a shell script has started it in the background
            signal.raise_signal(signal.SIGINT)
