"""One loader's tuner: what it begins with, whom it tells, and what it has found, for people and for the next job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune_loader.diagnosis import Caution
from autotune_loader.live.prospects import Job
from autotune_loader.live.ranks import Follower, Leader
from autotune_loader.live.result import result_of
from autotune_loader.live.state import LoaderState
from autotune_loader.live.trust import Refusal
from autotune_loader.live.tuner import Event, Tuner
from autotune_loader.machine.limits import usable_cores
from autotune_loader.machine.ranks import RankLostError, is_one_of_many, job_link
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("samples_per_s", "low", "high", "waiting", "failure")

log = logging.getLogger("autotune_loader.live")


class LiveTuning:
    """The tuner of one loader, or of several that do the same work one after the other, from the first epoch on.

    Args:
        state: of the loader, which calls the tuner.
        job: the loader.
        on_change: of the user; told what the loader has settled on.
    """

    def __init__(self, state: LoaderState, job: Job, *, on_change: Callable[[Event], None] | None) -> None:
        self.on_change = on_change
        self._state = state
        link = None
        if not job.is_fixed and is_one_of_many():
            try:
                link = job_link(job.site)
            except RankLostError as error:
                log.warning("%s, so this loader is only watched", error)
        follows = link is not None and link.rank > 0
        if follows or (link is None and is_one_of_many()):
            job = replace(job, is_fixed=True)
        self.job = job
        self.tuner = Tuner(
            state,
            job,
            lambda most: state.budgets.search_space(most, state.config, state.shape),
            ranks=Leader(state, link) if link is not None and not follows else None,
            on_change=self._settled,
        )
        state.look = Follower(state, link).look if link is not None and follows else self.tuner.look
        state.wake = 0.0

    def result(self, **facts: Any) -> TuningResult:
        """What is known now; `facts` are of the loader: see `result_of`."""
        tuner, best = self.tuner, self.tuner.best
        gain = tuner.gain if tuner.gain is not None and tuner.gain.config.key() == best.key() else None
        refusal = self._state.refusal
        said = [Caution.NOTE(text=self._standing())]
        said += [] if refusal is None else [Caution.NOTE(text=not_tried(refusal))]
        return result_of(
            tuner.beliefs,
            asked=self.job.start,
            best=best,
            seconds=tuner.spending.trained_s,
            said=said,
            speedup=None if gain is None else gain.ratio,
            is_settled=tuner.is_settled,
            **facts,
        )

    def _standing(self) -> str:
        kinds = [event.kind for event in self.tuner.history]
        settled = next((event for event in reversed(self.tuner.history) if event.kind == "settled"), None)
        if settled is None:
            return f"Not settled yet: {self._state.config} runs now."
        shifts = f"; the rate has shifted {kinds.count('shift')} time(s)" if "shift" in kinds else ""
        return (
            f"Chosen: {self.tuner.best}, settled after {settled.seconds:.0f} s of training ({kinds.count('block')} blocks "
            f"observed{shifts})."
        )

    def _settled(self, event: Event) -> None:
        self._state.settled = self._state.config
        log.info("settled on %s after %.0f s of training", event.config, event.seconds)
        if self.on_change is not None:
            self.on_change(event)


def not_tried(refusal: Refusal) -> str:
    """Why the number of workers stays, and what would change that."""
    return f"No other number of workers is tried: {refusal.reason}. What would change that: {refusal.mend}."


def history_frame(events: Sequence[Event]) -> pd.DataFrame:
    """One row for each block, settlement and shift: when, with which configuration, how fast."""
    import pandas as pd

    columns = ["event", "seconds", "batch", "num_workers", "prefetch_factor", *FIGURES]
    frame: pd.DataFrame = pd.DataFrame([_row(event) for event in events], columns=columns)
    return frame


def _row(event: Event) -> tuple[object, ...]:
    config, seen = event.config, event.evidence
    rate = None if seen is None or seen.measurement is None else seen.measurement.samples_per_s
    figures = (None, None, None) if rate is None else (rate.value, rate.low, rate.high)
    failure = None if seen is None or seen.failure is None else seen.failure.message
    where = (event.kind, event.seconds, event.batch, config.num_workers, config.prefetch_factor)
    return (*where, *figures, event.waiting, failure)


def first_proposal(loader: Any, saved: Mapping[str, Any] | None) -> LoaderConfig | None:
    """What is tried first: what a saved state found best; None where there is none.

    Args:
        loader: an AutoLoader, whose pinning and life of workers stay as they are.
        saved: a state that it was given.
    """
    if saved is None or "config" not in saved:
        return None
    found, like = LoaderConfig.from_dict(saved["config"]), LoaderConfig.from_loader(loader)
    threads = found.consumer_threads if loader.step_threads else None
    return replace(like.with_workers(found.num_workers, found.prefetch_factor), consumer_threads=threads)


def cores_within(max_cores: int | None) -> int:
    """Cores that this process may count on; the ranks of a node share them."""
    cores = usable_cores().usable
    return cores if max_cores is None else max(1, min(cores, max_cores))
