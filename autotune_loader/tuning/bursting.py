"""How each burst is run, how long it is, when it is taken for a hang; and what came of it.

search     short: it need only rank, and feed the twin
round      a little longer, and from full queues where workers would compute more than in training
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune_loader.bursts.protocol import Probe
from autotune_loader.machine.facts import start_method
from autotune_loader.pipeline.throughput import queued_share
from autotune_loader.search.space import Context
from autotune_loader.values import BurstPlan, Failure, LoaderConfig, Measurement, Trial

CEILING_BURST = BurstPlan(max_s=0.6, min_s=0.2, relative_error=0.01)
"""The step alone, on a batch that lies ready: more exact than a burst of the search, because it bounds them all."""
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
DEADLINE_FACTOR, SHORTEST_DEADLINE_S = 10.0, 10.0
"""A burst that takes longer than this many times the slowest successful one, and than these seconds, is taken for a hang ..."""
UNKNOWN_DEADLINE_S = 30.0
"""... or than these, before a burst with workers has shown how long they take to start ..."""
LEAST_DEADLINE_S = 20.0
"""... and sooner where that is more than half of the budget that is left, though not before these."""
STARTING_COUNTS = 0.005
"""Of an epoch: where workers may take more than this to start, they start as in training, so that it is known."""
CLONED_S = 0.2
"""A worker that is cloned begins with its first batch in this time, in which it copies 200 MB."""
FETCHES_TO_WAIT_FOR = 4
"""No burst hangs before so many times the seconds have passed that the first batch took."""


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

    def run(
        self, config: LoaderConfig, number: int, round_: int | None = None, predicted: float | None = None
    ) -> Trial:
        """A burst of the search, or of the round of this number; one of the search that failed by chance runs once more."""
        begun, plan = self._budget.clock(), self._plan(config, round_)
        outcome = self._probe.burst(config, plan)
        if isinstance(outcome, Failure) and outcome.retryable and round_ is None:
            outcome = self._probe.burst(config, plan)
        seconds = self._budget.clock() - begun
        return Trial.of(number, config, outcome, seconds=seconds, round=round_, predicted_samples_per_s=predicted)

    def _plan(self, config: LoaderConfig, round_: int | None) -> BurstPlan:
        """Long enough for some turns of the workers, and with a deadline; in a round from queues as full as in training."""
        trials, plan = self._trials(), SEARCH_BURST
        if round_ is not None:
            last = trials[-1] if trials and trials[-1].round == round_ else None
            # A side reads what the one before it has read, where that did not come from storage.
            again = last is not None and last.measurement is not None and last.measurement.read_bytes == 0
            plan = replace(ROUND_BURST, prefill_s=self._prefill_s(config, trials), again=again)
        least_s = self._least_window_s(config, trials)
        return replace(
            plan,
            min_s=max(plan.min_s, least_s),
            max_s=max(plan.max_s, least_s),
            seed=len(trials),
            anew=self._starts_anew(config, trials),
            deadline_s=self._deadline_s(trials),
        )

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
        """Whether workers start as in training, which takes spawned ones seconds: once, and where that counts in an epoch."""
        measured = [(each.config, m) for each in trials if each.config.num_workers and (m := each.measurement)]
        begun = [(each, m, m.first_batch_s) for each, m in measured if m.first_batch_s is not None]
        if any((each.num_workers, each.batch_size) == (config.num_workers, config.batch_size) for each, *_ in begun):
            return False
        if not begun:  # more workers than cores start one after the other: 64 of them may take minutes
            return config.num_workers <= self.context.usable_cores
        if config.persistent_workers or not self.context.epoch_batches:
            return False
        nearest, of, first_batch_s = min(begun, key=lambda each: abs(each[0].num_workers - config.num_workers))
        starting_s = first_batch_s * config.num_workers / nearest.num_workers
        return starting_s * of.samples_per_s.value > STARTING_COUNTS * self.context.epoch_batches * of.batch_size

    def _least_window_s(self, config: LoaderConfig, trials: Sequence[Trial]) -> float:
        """Seconds for some turns of the workers, as in the burst with the most similar number of them."""
        seen = [(each.config.num_workers, m) for each in trials if each.config.num_workers and (m := each.measurement)]
        if not seen or not config.num_workers:
            return 0.0
        workers, nearest = min(seen, key=lambda each: abs(each[0] - config.num_workers))
        crowding = max(1.0, config.num_workers / max(workers, self.context.usable_cores))
        service_s = nearest.service_s + (crowding - 1.0) * nearest.service_cpu_s  # who waits needs no core meanwhile
        return min(ROUNDS_PER_BURST * service_s, LONGEST_BURST_S)

    def _deadline_s(self, trials: Sequence[Trial]) -> float:
        """Seconds after which a burst is taken for a hang: later ones shall still have half of what is left."""
        done = [each for each in trials if each.measurement is not None]
        slowest_s = max((each.seconds for each in done), default=0.0)
        has_workers = any(each.config.num_workers for each in done)
        patient_s = max(SHORTEST_DEADLINE_S if has_workers else UNKNOWN_DEADLINE_S, DEADLINE_FACTOR * slowest_s)
        least_s = max(2 * slowest_s, FETCHES_TO_WAIT_FOR * self._first_batch_s)
        return max(min(patient_s, max(self._budget.left() / 2, LEAST_DEADLINE_S)), least_s)
