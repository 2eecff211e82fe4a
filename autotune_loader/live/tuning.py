"""What ties a loader to its tuner: the loader as a training run that can be changed, and what came of it as a result."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autotune_loader.decision.space import STARTUP_WORTH_AVOIDING
from autotune_loader.live.epoch import LoaderState
from autotune_loader.live.ranks import Follower, LeaderSource, is_one_of_many, job_link
from autotune_loader.live.result import result_of
from autotune_loader.live.traces import LiveTraces, start_s
from autotune_loader.live.tuner import Event, Job, Tuner
from autotune_loader.machine.limits import usable_cores
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure


@dataclass(slots=True)
class LoaderRun:
    """A loader's running training, as the tuner sees it; it does not keep the loader alive."""

    state: LoaderState
    change: weakref.WeakMethod[Callable[[LoaderConfig], None]]
    keeps_workers: bool

    @property
    def traces(self) -> LiveTraces:
        return self.state.traces

    @property
    def config(self) -> LoaderConfig:
        return self.state.config

    @property
    def failures(self) -> Mapping[LoaderConfig, Failure]:
        return self.state.failures

    def change_to(self, config: LoaderConfig) -> None:
        change = self.change()
        if change is not None:
            change(config)


class LiveTuning:
    """The tuner of one loader, from its first epoch on.

    Args:
        state: of the loader, which calls the tuner.
        change: changes the loader's configuration; a bound method.
        job: the loader.
        may_keep_workers: whether workers may live on after an epoch.
        on_change: told when the loader has settled on a configuration.
    """

    def __init__(
        self,
        state: LoaderState,
        change: Callable[[LoaderConfig], None],
        job: Job,
        *,
        may_keep_workers: bool,
        on_change: Callable[[Event], None],
    ) -> None:
        self.job, self.on_change = job, on_change
        self._state, self._may_keep = state, may_keep_workers
        self._run = LoaderRun(state, weakref.WeakMethod(change), state.config.persistent_workers)
        link = None if job.is_fixed else job_link()
        has_others = link is None and not job.is_fixed and is_one_of_many()
        if has_others or (link is not None and link.rank):
            self.job = job = replace(job, is_fixed=True)
        like = state.config if state.config.num_workers else job.start
        self.tuner = Tuner(
            self._run,
            job,
            lambda most: state.budgets.search_space(most, like, state.shape),
            source=LeaderSource(self._run, link) if link is not None and not link.rank else None,
            on_change=lambda event: self.on_change(event),
        )
        follower = Follower(self._run, link) if link is not None and link.rank else None
        state.look, state.wake = self.tuner.look if follower is None else follower.look, 0.0

    def freeze(self) -> None:
        """Change and observe nothing any more."""
        self._state.wake = math.inf

    def follow(self, change: Callable[[LoaderConfig], None]) -> None:
        """From now on it is another loader, which does the same work, whose configuration is changed."""
        self._run.change = weakref.WeakMethod(change)

    def begin_epoch(self) -> None:
        """Called before each epoch: from the second on it is known what starting workers anew costs."""
        run, traces = self._run, self._state.traces
        config = run.config
        if run.keeps_workers or not self._may_keep or not config.num_workers or self.job.is_fixed:
            return
        starts = [change for change in traces.changes if change.reason in ("start", "epoch")]
        rows = traces.block(max(starts[-1].batch, traces.end - 256)) if starts else []
        if len(rows) < 2:
            return
        epoch_s = (rows[-1].step_end - rows[0].requested) / len(rows) * (traces.end - starts[-1].batch)
        if (start_s(traces, starts[-1]) or starts[-1].blocked_s) > STARTUP_WORTH_AVOIDING * epoch_s:
            run.keeps_workers = True
            run.change_to(replace(config, persistent_workers=True))

    def result(self, **facts: Any) -> TuningResult:
        """What is known now."""
        return result_of(self.tuner, self.job, **facts)


def cores_within(max_cores: int | None) -> int:
    """Cores that this process may count on; the ranks of a node share them."""
    cores = usable_cores().usable
    return cores if max_cores is None else max(1, min(cores, max_cores))
