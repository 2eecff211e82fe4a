"""How the budget is divided, and how long a burst may take: arithmetic on what bursts so far took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune_loader.decision.posterior import TYPICAL_NOISE
from autotune_loader.decision.space import STARTUP_WORTH_AVOIDING, Space
from autotune_loader.pipeline.throughput import queued_share
from autotune_loader.twin.context import TwinContext
from autotune_loader.twin.model import threads_at_work
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trial import Trial

SEARCH_BURST = BurstPlan(max_s=0.6, min_s=0.3, relative_error=0.015)
"""One burst of the search: it need only rank and feed the twin; the paired rounds measure."""
FINAL_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.003)
"""One burst of a paired round: long enough to average over stalls, short enough that a round sees one state of the machine.
It hardly ever ends early: a window that closes when it looks quiet has not seen the slow tail yet."""

FINALS_SHARE = 0.5
"""Share of the budget that exploring leaves for the paired rounds."""
MUCH_FOR_EPOCHS = 0.4
"""Where rounds of whole epochs want more than this share, exploring ends with the initial design: a few more rounds of such
slow epochs tell more than bursts of steady rates."""
FINALS_PATIENCE_S = 7.0
"""Open questions are worth this many seconds of rounds, and some more where these do not agree with the choice."""
VARIANTS_SHARE = 0.15
"""Share of the budget that is kept for variants of the best, where the user allows what the twin knows nothing of."""

ROUNDS_PER_BURST, LONGEST_BURST_S = 4.5, 3.0
"""A window of fewer rounds of the workers is mostly edges (`studies.fidelity.compare few_rounds`). A burst is
no longer than this for their sake."""
FILLING_SHARE = 0.1
"""While workers put more than this share of what they make into their queues, they compute more than in training."""
CROWDED_SHARE = 0.5
"""With more than this share of the logical cores at work some share a physical one, and slow each other down."""
LONGEST_PREFILL_S = 0.75
"""Enough for queues of eight batches a worker (`studies.fidelity.compare filling`); slower workers fill a part of theirs."""
DEADLINE_FACTOR, SHORTEST_DEADLINE_S, LONGEST_DEADLINE_S = 10.0, 10.0, 120.0
"""A burst that takes longer than this many times the slowest successful one is taken for a hang, within these bounds."""
UNKNOWN_DEADLINE_S = 30.0
"""Before a burst with workers has shown how long these take to start."""
LEAST_DEADLINE_S = 20.0
"""However little of the budget is left, a burst that may take longer may take this long, and twice the slowest so far."""
FETCHES_TO_WAIT_FOR = 4
"""No burst hangs before so many times the seconds have passed that the first batch took."""

SHORT_EPOCH_S = 1.0
"""Epochs that are shorter are run whole: start-up and the gaps between epochs are then much of them."""
FIRST_BATCH_SHARE = 0.05
"""So are longer ones where fetching the first batch takes more than this share of them, if `FEWEST_BURSTS` of them fit."""
FEWEST_BURSTS, WANTED_BURSTS = 6, 9
"""Two rounds of three, which must fit; and three rounds of three, for which exploring leaves time."""
MOST_OF_BUDGET = 0.6
"""And no more than this share of the budget is left for them."""
EPOCHS_PER_BURST = 2
"""A burst of long epochs runs one that is not timed, and one that is."""
EPOCH_NOISE = 0.08
"""Relative standard deviation of one epoch's rate: 6 to 11 % in 36 bursts of `tutorial`, whose step and workers share cores."""
ROUNDS = (1, 2)
"""Workers that fetch an epoch in this many rounds are raced: they are done early, and leave the cores to the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLength:
    """How long an epoch is, by the fastest burst so far."""

    seconds: float
    first_fetch_s: float = 0.0
    """Seconds in which workers that are there fetch its first batch."""

    @classmethod
    def of(cls, trials: Sequence[Trial], batches: int | None) -> EpochLength | None:
        """The length of an epoch of this many batches; None where that, or every rate, is unknown."""
        own = [trial.measurement for trial in trials if trial.measurement and trial.config.batch_size is None]
        best = fastest(trials)
        if not own or best is None or best.measurement is None or batches is None or not best.samples_per_s:
            return None
        first_fetch_s = best.measurement.service_s if best.config.num_workers else 0.0
        return cls(seconds=batches * own[0].batch_size / best.samples_per_s, first_fetch_s=first_fetch_s)

    @property
    def burst_s(self) -> float:
        """Seconds of a burst of whole epochs."""
        return max(EPOCHS_PER_BURST * self.seconds, FINAL_BURST.max_s)

    def is_short(self, seconds_left: float) -> bool:
        """Whether epochs are to be run whole, with so much time left for it."""
        is_affordable = FEWEST_BURSTS * self.burst_s <= seconds_left
        is_uneven = self.first_fetch_s > FIRST_BATCH_SHARE * self.seconds
        return self.seconds <= SHORT_EPOCH_S or (is_affordable and is_uneven)

    def kept_s(self, budget_s: float) -> float:
        """Seconds that exploring leaves for running epochs whole; 0 where they are not short."""
        most_s = MOST_OF_BUDGET * budget_s
        return min(WANTED_BURSTS * self.burst_s, most_s) if self.is_short(most_s) else 0.0

    @property
    def noise_sd(self) -> float:
        """Relative standard deviation of what a burst of whole epochs tells; never less than of any burst."""
        timed = max(1.0, FINAL_BURST.max_s / self.seconds - 1)
        return max(EPOCH_NOISE / math.sqrt(timed), TYPICAL_NOISE)


def fastest(trials: Sequence[Trial]) -> Trial | None:
    """The successful trial with the highest measured rate."""
    measured = [trial for trial in trials if trial.measurement is not None]
    return max(measured, key=lambda trial: trial.samples_per_s or 0.0, default=None)


def startup_s(config: LoaderConfig, trials: Sequence[Trial]) -> float | None:
    """Seconds in which workers start, measured with the number of them that is nearest; None before any was started."""
    started = [
        (abs(trial.config.num_workers - config.num_workers), trial.measurement)
        for trial in trials
        if trial.measurement is not None
        and trial.config.num_workers
        and trial.config.multiprocessing_context == config.multiprocessing_context
    ]
    if not started:
        return None
    nearest = min(started, key=lambda each: each[0])[1]
    # The first batch's own fetch: later ones share the cores with the step.
    first_fetch_s = nearest.traces[0].service_s if nearest.traces else nearest.service_s
    return max(0.0, nearest.first_batch_s - first_fetch_s)


def as_planned(config: LoaderConfig, space: Space) -> LoaderConfig:
    """The configuration with what no burst can see, and so no belief holds, set as it is expected to pay."""
    return replace(config, persistent_workers=space.persistent_workers and config.num_workers > 0)


def as_trained(config: LoaderConfig, space: Space, trials: Sequence[Trial], epoch_batches: int | None) -> LoaderConfig:
    """The configuration with workers that persist where they may and starting them anew takes much of an epoch."""
    begin_s, epoch = startup_s(config, trials), EpochLength.of(trials, epoch_batches)
    if begin_s is None or epoch is None or not config.num_workers:
        return as_planned(config, space)
    keeps = space.may_keep_workers and begin_s > STARTUP_WORTH_AVOIDING * epoch.seconds
    return replace(config, persistent_workers=keeps)


def with_fewer_rounds(config: LoaderConfig, epoch_batches: int, max_workers: int) -> list[LoaderConfig]:
    """As many workers as fetch an epoch in one round, and in two, where these are more; the step has its own threads again."""
    more = [math.ceil(epoch_batches / rounds) for rounds in ROUNDS]
    return [
        replace(config, num_workers=workers, consumer_threads=None)
        for workers in more
        if 0 < config.num_workers < workers <= max_workers
    ]


def least_window_s(config: LoaderConfig, trials: Sequence[Trial], usable_cores: int) -> float:
    """Seconds that a burst needs for some rounds of its workers, as in the trial with the most similar number of them."""
    measured = [trial for trial in trials if trial.measurement is not None and trial.config.num_workers]
    nearest = min(measured, key=lambda t: abs(t.config.num_workers - config.num_workers), default=None)
    if nearest is None or nearest.measurement is None or not config.num_workers:
        return 0.0
    crowding = max(1.0, config.num_workers / max(nearest.config.num_workers, usable_cores))
    fetch_s, fetch_cpu_s = nearest.measurement.service_s, nearest.measurement.service_cpu_s
    service_s = fetch_s + (crowding - 1.0) * fetch_cpu_s  # who waits needs no core meanwhile
    return min(ROUNDS_PER_BURST * service_s, LONGEST_BURST_S)


def prefill_s(config: LoaderConfig, measured: Measurement, context: TwinContext) -> float:
    """Seconds that the workers need to fill their queues before the loop begins; 0 where the burst was as training is.

    Workers that are enough rest in the midst of training. Until their queues are full they compute, and on few cores the loop
    gets its batches later and steps more slowly: bursts of half a second read 3 to 8 workers with a prefetch of 8 low by 5 to
    25 % (`studies.fidelity.compare filling`). Whether the loop was slowed cannot be told by comparing it with that of too few
    workers: receiving takes as long after a wait.
    """
    computing = config.num_workers * measured.service_cpu_s / max(measured.service_s, 1e-9)
    stepping = threads_at_work(config.consumer_threads, context.consumer_cores)
    if computing + stepping <= CROWDED_SHARE * context.usable_cores:
        return 0.0
    if queued_share(measured.traces, workers=config.num_workers) <= FILLING_SHARE:
        return 0.0
    others_s = ((config.prefetch_factor or 1) - 1) * measured.service_s
    return min(measured.first_batch_s + others_s, LONGEST_PREFILL_S)


def deadline_s(
    trials: Sequence[Trial], seconds_left: float, first_batch_s: float = 0.0, config: LoaderConfig | None = None
) -> float:
    """Seconds after which a burst is taken for a hang.

    Args:
        trials: so far.
        seconds_left: of the budget.
        first_batch_s: what the very first batch took.
        config: what is run.
    """
    done = [trial for trial in trials if trial.measurement]
    longest = max((trial.seconds for trial in done), default=0.0)
    workers = max((trial.config.num_workers for trial in done), default=0)
    shortest = SHORTEST_DEADLINE_S if workers else UNKNOWN_DEADLINE_S
    # Many more workers than were seen to start take as much longer to start.
    more = config.num_workers / max(workers, 1) if config is not None else 0.0
    if not done:  # the next may be quicker: some of the budget is left for it
        seconds_left /= 2
    patient = min(LONGEST_DEADLINE_S, max(shortest, max(DEADLINE_FACTOR, more) * longest))
    return max(min(patient, max(seconds_left, LEAST_DEADLINE_S)), 2 * longest, FETCHES_TO_WAIT_FOR * first_batch_s)
