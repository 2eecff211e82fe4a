"""How each burst is run, how long it is, when it is taken for a hang; and what came of it.

search     short: it need only rank, and feed the twin
round      a little longer, and from full queues where workers would compute more than in training
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune_loader.bursts.protocol import Probe
from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.throughput import queued_share
from autotune_loader.search.belief import starting_s
from autotune_loader.search.rule import COMPUTING_SHARE
from autotune_loader.search.space import Context
from autotune_loader.values import BurstPlan, Failure, LoaderConfig, Measurement, Trial

CEILING_BURST = BurstPlan(max_s=0.6, min_s=0.2, relative_error=0.01)
"""The step alone, on a batch that lies ready: more exact than a burst of the search, because it bounds them all."""
HAND_OVER_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01)
"""Copies of the first batch, as fast as workers can hand them over."""
HAND_OVER_WORKERS = 4
"""Writing a copy is quick: with so many the loop hardly waits for it, and with more it would for their locks."""
SEARCH_BURST = BurstPlan(max_s=0.6, min_s=0.3, relative_error=0.015, stages=True)
"""One burst of the search: it need only rank and feed the twin; the rounds measure."""
ROUND_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.003)
"""One burst of a round: long enough to average over stalls, short enough that a round sees one state of the machine.
It hardly ever ends early: a window that closes when it looks quiet has not seen the slow tail yet."""
ROUNDS_PER_BURST, LONGEST_BURST_S = 4.5, 3.0
"""A window of fewer turns of all workers is mostly edges (studies/fidelity/README.md). No burst is longer for their sake."""
FILLING_SHARE = 0.1
"""While workers put more than this share of what they make into their queues, they compute more than in training."""
CROWDED_SHARE = 0.5
"""With more than this share of the logical cores busy some share a physical one, and slow each other down."""
LONGEST_PREFILL_S = 0.75
"""Enough for queues of eight batches a worker (studies/fidelity/README.md); slower workers fill a part of theirs."""
DEADLINE_FACTOR, LEAST_FACTOR, SHORTEST_DEADLINE_S = 10.0, 2.0, 5.0
"""A burst that takes longer than ten times what it should is taken for a hang, and than these seconds, ..."""
DEADLINES_SHARE = 1 / 3
"""... or than this share of the budget, but not before it has had twice as long as it should take."""
FORKED_S = 0.05
"""A forked worker begins in this time, in which 5 GB of page tables are copied."""
STARTING_COUNTS = 0.005
"""Of an epoch: where workers may take more than this to start, they start as in training, so that it is known."""
CLONED_S = 0.2
"""A worker that is cloned begins with its first batch in this time, in which it copies 200 MB."""
FIRST_BATCHES = 2
"""A burst needs so many of each worker, and the first ones are slow."""


class Budget:
    """Wall seconds that may be spent from now on."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self.seconds, self.clock, self._started = seconds, clock, clock()

    def left(self) -> float:
        """Seconds; less than 0 once it is overrun."""
        return self.seconds - (self.clock() - self._started)


class Bursts:
    """How the next burst of one job is run, by what earlier ones have shown: what `tune()` and `compare()` share.

    Args:
        probe: runs them.
        context: the cores, which the step shares.
        budget: of the run.
        trials: gives the bursts so far, in order, with their traces.
        first_batch_s: what the very first batch took.
    """

    def __init__(
        self,
        probe: Probe,
        context: Context,
        budget: Budget,
        trials: Callable[[], Sequence[Trial]],
        first_batch_s: float,
    ) -> None:
        self._probe, self.context, self._trials = probe, context, trials
        self._budget, self._first_batch_s = budget, first_batch_s

    def step_alone(self) -> Measurement | None:
        """The step on one cached batch again and again, which no loader can exceed; the context learns what it takes."""
        measured = self._probe.step_ceiling(CEILING_BURST)
        if isinstance(measured, Failure):
            return None
        cores = self.context.step_cores
        if measured.cpu_share is not None:
            # A step that sleeps or waits for a device keeps no core busy, whatever its threads.
            cores = min(cores, measured.cpu_share * self.context.usable_cores)
        self.context = replace(self.context, step_s=measured.step_s, step_cores=cores)
        return measured

    def hand_over(self, config: LoaderConfig) -> Measurement | None:
        """Batches that lie ready, through the workers and the device of this configuration; None where that fails."""
        plan = replace(HAND_OVER_BURST, deadline_s=self._deadline_s(config, HAND_OVER_BURST, self._trials()))
        measured = self._probe.hand_over(config, plan)
        return None if isinstance(measured, Failure) else measured

    def read_memory(self, trial: Trial) -> bool:
        """Whether its samples came from no storage: FUSE, for one, does not count what is read, but who waits for it computes
        little.
        """
        computes = self.context.fetch_cpu_s > COMPUTING_SHARE * (self.context.fetch_s or 0.0)
        return computes and trial.measurement is not None and trial.measurement.read_bytes == 0

    def run(
        self,
        config: LoaderConfig,
        number: int,
        round_: int | None = None,
        predicted: float | None = None,
        place: int | None = None,
    ) -> Trial:
        """A burst of the search, or of the round of this number; one of the search that failed by chance runs once more."""
        begun, plan = self._budget.clock(), replace(self._plan(config, round_), place=place)
        outcome = self._probe.burst(config, plan)
        if isinstance(outcome, Failure) and outcome.retryable and round_ is None:
            outcome = self._probe.burst(config, plan)
        seconds = self._budget.clock() - begun
        return Trial.of(number, config, outcome, seconds=seconds, round=round_, predicted_samples_per_s=predicted)

    def _plan(self, config: LoaderConfig, round_: int | None) -> BurstPlan:
        """Long enough for some turns of the workers, and with a deadline; in a round from queues as full as in training."""
        trials, plan = self._trials(), SEARCH_BURST
        if round_ is not None:
            plan = replace(ROUND_BURST, prefill_s=self._prefill_s(config, trials))
        least_s = self._least_window_s(config, trials)
        plan = replace(
            plan,
            min_s=max(plan.min_s, least_s),
            max_s=max(plan.max_s, least_s),
            anew=self._starts_anew(config, trials),
        )
        return replace(plan, deadline_s=self._deadline_s(config, plan, trials))

    def _prefill_s(self, config: LoaderConfig, trials: Sequence[Trial]) -> float:
        """Seconds that the workers need to fill their queues before the loop begins, as the first traced burst has it.

        Workers that are enough rest in the midst of training. Until their queues are full they compute, and on few cores the
        loop gets its batches later and steps more slowly: bursts of half a second read 3 to 8 workers with a prefetch of 8 low
        by 5 to 25% (studies/fidelity/README.md). 0 where the burst was as training is.
        """
        bursts = (each.measurement for each in trials if each.measurement and each.config.key() == config.key())
        measured = next((each for each in bursts if each.traces), None)
        if measured is None or queued_share(measured.traces, workers=config.num_workers) <= FILLING_SHARE:
            return 0.0
        computing = config.num_workers * measured.service_cpu_s / max(measured.service_s, 1e-9)
        if computing + self.context.step_cores <= CROWDED_SHARE * self.context.usable_cores:
            return 0.0
        others_s = ((config.prefetch_factor or 1) - 1) * measured.service_s
        is_forked = start_method(config.multiprocessing_context) == "fork"
        first_s = measured.first_batch_s if is_forked else CLONED_S + measured.service_s
        return min((first_s or 0.0) + others_s, LONGEST_PREFILL_S)

    def _starts_anew(self, config: LoaderConfig, trials: Sequence[Trial]) -> bool:
        """Whether workers start as in training, which takes spawned ones seconds: once, and where that counts in an epoch.

        More of them than cores start one after the other, 64 in minutes: what that takes is scaled from fewer.
        """
        if config.num_workers > self.context.usable_cores and start_method(config.multiprocessing_context) != "fork":
            return False
        measured = [(each.config, m) for each in trials if each.config.num_workers and (m := each.measurement)]
        begun = [(each, m, m.first_batch_s) for each, m in measured if m.first_batch_s is not None]
        if any((each.num_workers, each.batch_size) == (config.num_workers, config.batch_size) for each, *_ in begun):
            return False
        if not begun:
            return True
        if config.persistent_workers or not self.context.epoch_batches:
            return False
        _, of, _ = min(begun, key=lambda each: abs(each[0].num_workers - config.num_workers))
        samples = starting_s(trials, config.num_workers, self.context) * of.samples_per_s.value
        return samples > STARTING_COUNTS * self.context.epoch_batches * of.batch_size

    def _least_window_s(self, config: LoaderConfig, trials: Sequence[Trial]) -> float:
        """Seconds for some turns of the workers, as in the burst with the most similar number of them."""
        seen = [(each.config.num_workers, m) for each in trials if each.config.num_workers and (m := each.measurement)]
        if not seen or not config.num_workers:
            return 0.0
        workers, nearest = min(seen, key=lambda each: abs(each[0] - config.num_workers))
        crowding = max(1.0, config.num_workers / max(workers, self.context.usable_cores))
        service_s = nearest.service_s + (crowding - 1.0) * nearest.service_cpu_s  # who waits needs no core meanwhile
        return min(ROUNDS_PER_BURST * service_s, LONGEST_BURST_S)

    def _deadline_s(self, config: LoaderConfig, plan: BurstPlan, trials: Sequence[Trial]) -> float:
        """Seconds after which a burst is taken for a hang."""
        crowding = max(1.0, config.num_workers / self.context.usable_cores)
        first_s = self._first_batch_s + (crowding - 1.0) * self.context.fetch_cpu_s
        usual_s = self._starting_s(config, plan) + FIRST_BATCHES * first_s + plan.prefill_s + plan.max_s
        usual_s = max([usual_s, *(each.seconds for each in trials if each.measurement is not None)])
        most_s = max(DEADLINES_SHARE * self._budget.seconds, SHORTEST_DEADLINE_S)
        return max(min(max(DEADLINE_FACTOR * usual_s, SHORTEST_DEADLINE_S), most_s), LEAST_FACTOR * usual_s)

    def _starting_s(self, config: LoaderConfig, plan: BurstPlan) -> float:
        """Seconds in which the workers of a burst start, as many at once as there are cores: anew, each imports torch."""
        crowding = max(1.0, config.num_workers / self.context.usable_cores)
        if start_method(config.multiprocessing_context) == "fork":
            return FORKED_S * config.num_workers
        return self.context.start_s * crowding if plan.anew else self.context.start_s + CLONED_S * crowding


def startable(method: str, start_s: float, cores: int, budget_s: float) -> float:
    """Workers that start before a burst is taken for a hang; `start_s` are those of one that starts anew."""
    room_s = DEADLINES_SHARE * budget_s / LEAST_FACTOR - start_s
    return math.inf if method == "fork" else max(1.0, room_s / CLONED_S) * cores
