"""Evidence from short bursts of real training: how long each is, which are run again, and what they say.

search     one burst; a second where the first failed and may well work the next time
compare    one burst over the samples of the round; from full queues where workers would compute more than in training
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune_loader.bursts.protocol import Probe
from autotune_loader.decision.evidence import Ask, Evidence, Kind
from autotune_loader.decision.posterior import TYPICAL_NOISE
from autotune_loader.decision.space import STARTUP_WORTH_AVOIDING, Space
from autotune_loader.pipeline.throughput import queued_share
from autotune_loader.twin.context import TwinContext
from autotune_loader.twin.model import threads_at_work
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import CEILING_BURST, BurstPlan
from autotune_loader.values.trial import Trial

SEARCH_BURST = BurstPlan(max_s=0.6, min_s=0.3, relative_error=0.015)
"""One burst of the search: it need only rank and feed the twin; the paired rounds measure."""
FINAL_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.003)
"""One burst of a paired round: long enough to average over stalls, short enough that a round sees one state of the machine.
It hardly ever ends early: a window that closes when it looks quiet has not seen the slow tail yet."""
ROUND_SEEDS = 1_000
"""Rounds read other samples than the bursts of the search: fresh samples as well as fresh bursts."""

ROUNDS_PER_BURST, LONGEST_BURST_S = 4.5, 3.0
"""A window of fewer rounds of the workers is mostly edges (studies/fidelity/README.md). A burst is
no longer than this for their sake."""
FILLING_SHARE = 0.1
"""While workers put more than this share of what they make into their queues, they compute more than in training."""
CROWDED_SHARE = 0.5
"""With more than this share of the logical cores at work some share a physical one, and slow each other down."""
LONGEST_PREFILL_S = 0.75
"""Enough for queues of eight batches a worker (studies/fidelity/README.md); slower workers fill a part of theirs."""

DEADLINE_FACTOR, SHORTEST_DEADLINE_S = 10.0, 10.0
"""A burst that takes longer than this many times the slowest successful one, and than these seconds, is taken for a hang ..."""
UNKNOWN_DEADLINE_S = 30.0
"""... or than these, before a burst with workers has shown how long they take to start ..."""
LEAST_DEADLINE_S = 20.0
"""... and sooner where that is more than half of the budget that is left, though not before these."""
FETCHES_TO_WAIT_FOR = 4
"""No burst hangs before so many times the seconds have passed that the first batch took."""

EPOCHS_PER_BURST = 2
"""A burst of long epochs runs one that is not timed, and one that is."""
EPOCH_NOISE = 0.08
"""Relative standard deviation of one epoch's rate: 6 to 11 % in 36 bursts of `tutorial`, whose step and workers share cores."""


class BurstSource:
    """Evidence from a probe.

    Args:
        probe: runs the bursts.
        space: the legal configurations, which knows what leaves too little memory.
        context: cores, and the step alone; kept up to date by the caller.
        trials: what was observed so far: how long bursts take is learnt from it. The caller goes on appending to it.
        seconds_left: of the budget.
        first_batch_s: what the very first batch took; no burst is taken for a hang before some of these have passed.
        stages: whether workers are watched in the bursts of the search; those that rates are taken from go without.
    """

    def __init__(
        self,
        probe: Probe,
        space: Space,
        context: TwinContext,
        trials: Sequence[Trial],
        seconds_left: Callable[[], float],
        first_batch_s: float = 0.0,
        stages: bool = False,
    ) -> None:
        self._probe, self._space, self._trials, self.context = probe, space, trials, context
        self._seconds_left, self._first_batch_s, self._stages = seconds_left, first_batch_s, stages
        self._prefills: dict[LoaderConfig, float] = {}
        self.bursts = 0
        """How many were run so far."""

    def gather(self, config: LoaderConfig, ask: Ask) -> Evidence:
        outcome = self._searched(config, ask) if ask.phase == "search" else self._from_full_queues(config, ask)
        if not isinstance(outcome, Failure):
            outcome = self._space.over_margin(config, outcome) or outcome
        return Evidence(config=config, outcome=outcome, kind=ask.kind, phase=ask.phase, group=ask.group)

    def round_s(self, configs: Sequence[LoaderConfig], kind: Kind = "steady") -> float:
        """Seconds that one paired round of these will take, by what earlier bursts took."""
        took = {trial.config.key(): trial.seconds for trial in self._trials if trial.measurement is not None}

        def burst_s(config: LoaderConfig) -> float:
            if kind == "steady":
                return took.get(config.key(), max(took.values(), default=0.0))
            return (startup_s(config, self._trials) or 0.0 if config.num_workers else 0.0) + self._epochs_burst_s

        return sum(map(burst_s, {each.key(): each for each in configs}.values()))

    def step_ceiling(self, batch_size: int | None = None) -> Measurement | Failure:
        """The step on one cached batch again and again: the rate that no loader can exceed."""
        self.bursts += 1
        return self._probe.step_ceiling(replace(CEILING_BURST, batch_size=batch_size))

    # Epochs

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch at the fastest rate so far; infinite where its length or every rate is unknown."""
        best, batches = fastest(self._trials), self.context.epoch_batches
        own = [trial.measurement for trial in self._trials if trial.measurement and trial.config.batch_size is None]
        if best is None or not best.samples_per_s or not own or batches is None:
            return math.inf
        return batches * own[0].batch_size / best.samples_per_s

    def noise_sd(self, kind: Kind) -> float:
        """Relative standard deviation of what a burst of a round tells."""
        if kind == "steady":
            return TYPICAL_NOISE
        timed = max(1.0, FINAL_BURST.max_s / self.epoch_s - 1)
        return max(EPOCH_NOISE / math.sqrt(timed), TYPICAL_NOISE)

    def as_trained(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with workers that persist where they may and starting them anew takes much of an epoch.

        No burst can see that, and so no belief holds it; before any worker was started they persist.
        """
        begin_s, epoch_s = startup_s(config, self._trials), self.epoch_s
        pays = begin_s is None or math.isinf(epoch_s) or begin_s > STARTUP_WORTH_AVOIDING * epoch_s
        return replace(config, persistent_workers=self._space.persistent_workers and pays and config.num_workers > 0)

    @property
    def _epochs_burst_s(self) -> float:
        """Seconds of a burst of whole epochs, once its workers are there."""
        return (
            FINAL_BURST.max_s if math.isinf(self.epoch_s) else max(EPOCHS_PER_BURST * self.epoch_s, FINAL_BURST.max_s)
        )

    # Bursts

    def _searched(self, config: LoaderConfig, ask: Ask) -> Measurement | Failure:
        plan = self._paced(config, replace(SEARCH_BURST, seed=ask.group, stages=self._stages))
        outcome = self._burst(config, plan)
        if isinstance(outcome, Failure) and outcome.retryable and config.batch_size is None:
            outcome = self._burst(config, plan)
        return outcome

    def _from_full_queues(self, config: LoaderConfig, ask: Ask) -> Measurement | Failure:
        """One burst; a second where the first shows that it, and all later ones, must begin with full queues."""
        plan = self._paced(config, replace(FINAL_BURST, seed=ROUND_SEEDS + ask.group))
        filled_s = self._prefills.get(config, 0.0)
        outcome = self._burst(config, replace(plan, prefill_s=filled_s))
        if filled_s or isinstance(outcome, Failure):
            return outcome
        filled_s = prefill_s(config, outcome, self.context)
        if not filled_s:
            return outcome
        self._prefills[config] = filled_s
        return self._burst(config, replace(plan, prefill_s=filled_s))

    def _burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.bursts += 1
        return self._probe.burst(config, plan)

    def _paced(self, config: LoaderConfig, plan: BurstPlan) -> BurstPlan:
        """The plan for one configuration: long enough for some rounds of its workers, and with a deadline."""
        least_s = self._least_window_s(config)
        longer = replace(plan, min_s=max(plan.min_s, least_s), max_s=max(plan.max_s, least_s))
        return replace(longer, deadline_s=self._deadline_s())

    def _least_window_s(self, config: LoaderConfig) -> float:
        """Seconds for some rounds of the workers, as in the trial with the most similar number of them."""
        measured = [(trial.config.num_workers, m) for trial in self._trials if (m := trial.measurement) is not None]
        seen = [each for each in measured if each[0]]
        if not seen or not config.num_workers:
            return 0.0
        workers, nearest = min(seen, key=lambda each: abs(each[0] - config.num_workers))
        crowding = max(1.0, config.num_workers / max(workers, self.context.usable_cores))
        service_s = nearest.service_s + (crowding - 1.0) * nearest.service_cpu_s  # who waits needs no core meanwhile
        return min(ROUNDS_PER_BURST * service_s, LONGEST_BURST_S)

    def _deadline_s(self) -> float:
        """Seconds after which a burst is taken for a hang: later ones shall still have half of what is left."""
        done = [trial for trial in self._trials if trial.measurement is not None]
        slowest_s = max((trial.seconds for trial in done), default=0.0)
        has_workers = any(trial.config.num_workers for trial in done)
        patient_s = max(SHORTEST_DEADLINE_S if has_workers else UNKNOWN_DEADLINE_S, DEADLINE_FACTOR * slowest_s)
        least_s = max(2 * slowest_s, FETCHES_TO_WAIT_FOR * self._first_batch_s)
        return max(min(patient_s, max(self._seconds_left() / 2, LEAST_DEADLINE_S)), least_s)


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


def prefill_s(config: LoaderConfig, measured: Measurement, context: TwinContext) -> float:
    """Seconds that the workers need to fill their queues before the loop begins; 0 where the burst was as training is.

    Workers that are enough rest in the midst of training. Until their queues are full they compute, and on few cores the loop
    gets its batches later and steps more slowly: bursts of half a second read 3 to 8 workers with a prefetch of 8 low by 5 to
    25 % (studies/fidelity/README.md). Whether the loop was slowed cannot be told by comparing it with that of too few
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
