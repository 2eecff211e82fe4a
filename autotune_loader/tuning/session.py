"""The loop of a tuning run: ask the policy, observe, record, until there is nothing left that is worth its time.

    the step alone ─► explore ─► variants of the best ─► paired rounds

What to do next is decided in `decision`; here it is done, told to Optuna, and kept within the budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from autotune_loader.decision.acquisition import initial_design
from autotune_loader.decision.belief import CORES_OF_A_SERIAL_STEP, Beliefs
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.policy import Goal, Stop, explore
from autotune_loader.decision.race import MIN_ROUNDS
from autotune_loader.decision.space import Space
from autotune_loader.decision.stopping import StopReason
from autotune_loader.decision.variants import count_variants, faster_variants, may_grow_to, right_sized, variants
from autotune_loader.probe.bench import SLOW_FETCH_S
from autotune_loader.probe.protocol import Probe
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.finals import Finals, round_s
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.schedule import (
    FINALS_SHARE,
    MUCH_FOR_EPOCHS,
    VARIANTS_SHARE,
    EpochLength,
    as_planned,
)
from autotune_loader.tuning.state import Job, SearchState
from autotune_loader.tuning.study import Claim, OptunaStudy, journal_beside
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.trial import Trial, role_of

log = logging.getLogger(__name__)

LEAST_TRIALS = 2
"""This many trials come before any variant of the best: two to compare."""


class Listener(Protocol):
    """Told what happens while it happens; the tuner writes files and draws progress with it."""

    def trial(self, state: SearchState, trial: Trial, seconds_left: float) -> None: ...

    def finals_round(self, number: int, rates: dict[LoaderConfig, float], seconds_left: float) -> None: ...


class TuningSession:
    """One search over one space with one probe.

    Args:
        probe: runs configurations.
        space: the legal ones.
        options: how to search.
        job: what is known of the training job.
        clock: seconds; a fake one in tests.
        started: when the user's budget began, on that clock.
        listener: told what happens.
    """

    def __init__(
        self,
        probe: Probe,
        space: Space,
        options: TuneOptions,
        job: Job,
        *,
        clock: Callable[[], float],
        started: float,
        listener: Listener,
    ) -> None:
        self._options = options
        self._job = job
        self._clock = clock
        self._started = started
        self._listener = listener
        self._repeats = 0
        context = job.context()
        self.state = SearchState(baseline=job.own_config or LoaderConfig(), context=context)
        self._beliefs = Beliefs(space, context, seed=options.seed)
        self._source = BurstSource(
            probe, space, context, self.state.trials, self.seconds_left, job.first_batch_s, options.stages
        )
        self._study = OptunaStudy(
            storage=options.storage or journal_beside(options.output),
            disposable=options.storage is None,
            name=job.study_name,
            space=space,
            search=options.search,
            seed=options.seed,
        )
        self.state.study = self._study.study

    @property
    def _space(self) -> Space:
        return self._beliefs.space

    def run(self) -> SearchState:
        """Search until there is a reason to stop; on Ctrl-C what was found so far is returned, marked as interrupted."""
        try:
            self._resume()
            if self._job.has_step:
                self._measure_step()
            self._explore()
            self._try_variants()
            self._race()
        except KeyboardInterrupt:
            self.state.stop_reason = StopReason.INTERRUPTED
        finally:
            self.state.bursts = self._source.bursts
            self.state.study = self._study.study
            self._study.close()
        return self.state

    def finish(self) -> None:
        """The result is safe: nobody needs to go on from here, unless the search was interrupted."""
        if not self.state.interrupted:
            self._study.finish()

    def seconds_left(self) -> float:
        return self._options.budget_s - (self._clock() - self._started)

    def _resume(self) -> None:
        self._adopt(self._study.restored())
        if self.state.trials:
            log.info("resumed a study of %d trials", len(self.state.trials))

    def _adopt(self, trials: Sequence[Trial]) -> None:
        """Take over trials of an earlier run, or of other hosts that share the study."""
        for trial in trials:
            self._keep(replace(trial, number=len(self.state.trials)))

    def _keep(self, trial: Trial) -> None:
        self.state.trials.append(trial)
        outcome = trial.measurement or trial.failure
        assert outcome is not None
        self._beliefs.log.add(Evidence(config=trial.config, outcome=outcome, group=trial.number))

    def _measure_step(self) -> None:
        """The step alone, with each number of threads: the ceiling, and what the twin needs of it."""
        context = self.state.context
        for threads in self._space.consumer_threads:
            measured = self._source.step_ceiling(threads)
            if isinstance(measured, Failure):
                log.warning("the step on a cached batch failed: %s", measured.message)
                continue
            self.state.ceilings[threads] = measured
            context = context.with_step(threads, measured.step_s)
            if threads is None and self._job.step_uses_cores and measured.cpu_share is not None:
                # A step that sleeps or waits for a device keeps no core busy, whatever its threads.
                busy = min(context.consumer_cores, measured.cpu_share * self._job.usable_cores)
                context = replace(context, consumer_cores=busy)
                if busy < CORES_OF_A_SERIAL_STEP:
                    self._beliefs.space = replace(self._space, consumer_threads=(None,))
                    break
        self.state.context = self._beliefs.context = self._source.context = context

    def _explore(self) -> None:
        is_auto = self._options.search == "auto"
        own = [self._job.own_config] if self._job.own_config is not None else []
        suggested = [config for config in self._job.suggestions if self._space.veto(config) is None]
        design = initial_design(self._space, self._job.usable_cores) if is_auto else ()
        begin_with = list(dict.fromkeys([*own, LoaderConfig(), *suggested, *design]))
        if self._job.fetch_s > SLOW_FETCH_S:
            # There may be time for one or two, and those without workers say the least.
            begin_with.sort(key=lambda config: -config.num_workers)
        grid = self._space.configs() if self._options.search == "grid" else None
        while True:
            self._adopt(self._study.news())
            todo = explore(self._beliefs, self._goal(begin_with, grid))
            if isinstance(todo, Stop):
                self.state.stop_reason = todo.reason
                return
            config = todo.config
            if config is not None and config not in begin_with:
                config = as_planned(config, self._space)
            self._try(config)

    def _goal(self, begin_with: Sequence[LoaderConfig], grid: Sequence[LoaderConfig] | None) -> Goal:
        variants_kept = self._count_variants()
        # What failures took is lost to exploring and rounds alike: a hang must not end the search before it has looked below.
        budget_s = self._options.budget_s - sum(
            trial.seconds for trial in self.state.trials if trial.measurement is None
        )
        share = FINALS_SHARE + (VARIANTS_SHARE if variants_kept else 0.0)
        epoch = EpochLength.of(self.state.trials, self._job.epoch_batches)
        epochs_s = 0.0 if epoch is None else epoch.kept_s(budget_s)
        fastest = self.state.fastest()
        if fastest is None:  # nothing to compare yet, be it that everything so far has failed
            share, finals_s = 0.0, 0.0
        else:
            finals_s = MIN_ROUNDS * round_s(self._source, [fastest.config, self.state.baseline])
        seconds = [trial.seconds for trial in self.state.trials if trial.measurement is not None]
        return Goal(
            tolerance=self._options.tolerance,
            explore_s=self.seconds_left() - max(budget_s * share, finals_s, epochs_s),
            next_s=median(seconds) if seconds else 0.0,
            has_trials_left=not self._is_out_of_trials(kept=variants_kept),
            begin_with=begin_with,
            queue=grid,
            elsewhere=self._study.elsewhere(),
            by_belief=self._options.search == "auto",
            may_refine=epochs_s <= budget_s * MUCH_FOR_EPOCHS,
            repeats=self._repeats,
            ceiling=None if self.state.ceiling is None else self.state.ceiling.value,
        )

    def _is_out_of_trials(self, kept: int = 0) -> bool:
        most = self._options.max_trials
        return most is not None and len(self.state.trials) >= max(most - kept, min(most, LEAST_TRIALS))

    def _try(self, config: LoaderConfig | None) -> None:
        """One trial of a configuration, or of what the sampler proposes."""
        claim = self._study.ask(config)
        self._adopt(arrived := self._study.news())
        if claim.config in self._study.elsewhere(before=claim) or any(each.config == claim.config for each in arrived):
            self._study.abandon(claim)
            return
        known = next((trial for trial in self.state.trials if trial.config == claim.config), None)
        if known is not None and config is None:
            self._repeats += 1
            self._study.tell(claim, known)
            return
        self._repeats = 0
        trial = self._observed(claim)
        self._study.tell(claim, trial)
        self._keep(trial)
        self._listener.trial(self.state, trial, self.seconds_left())

    def _observed(self, claim: Claim) -> Trial:
        config, begun = claim.config, self._clock()
        predicted = self._beliefs.predicted(config) if self._options.search == "auto" else None
        outcome: Measurement | Failure | None = self._beliefs.feasible(config)
        if outcome is None:
            try:
                outcome = self._source.gather(config, Ask(phase="search", group=len(self.state.trials))).outcome
            except BaseException:
                self._study.abandon(claim)
                raise
        return Trial(
            number=len(self.state.trials),
            config=config,
            role=role_of(config, self._job.own_config),
            measurement=outcome if isinstance(outcome, Measurement) else None,
            failure=outcome if isinstance(outcome, Failure) else None,
            predicted_samples_per_s=predicted,
            seconds=self._clock() - begun,
        )

    def _try_variants(self) -> None:
        """The best with each change that the user allows and the twin knows nothing of, one knob after the other."""
        if self._count_variants():
            for config in variants(self._space, self.state.fastest):
                if self._is_tried(config) or not may_grow_to(config.batch_size, self.state.trials):
                    continue
                if not self._has_time_for_variants():
                    self.state.stop_reason = StopReason.OUT_OF_BUDGET
                    break
                self._try(config)
        for config in faster_variants(self.state.trials, self._space, self._options.tolerance):
            self._measure_step_of_batch(config)
            burst = next(t.measurement for t in self.state.trials if t.config == config and t.measurement is not None)
            fewer = right_sized(config, burst)
            if self._has_time_for_variants() and not self._is_tried(fewer):
                self._try(fewer)

    def _has_time_for_variants(self) -> bool:
        return not self._is_out_of_trials() and self.seconds_left() >= self._options.budget_s * FINALS_SHARE

    def _count_variants(self) -> int:
        """How many trials variants take; searches by sampler or grid propose them like any other knob."""
        return count_variants(self._space) if self._options.search == "auto" else 0

    def _is_tried(self, config: LoaderConfig) -> bool:
        return any(trial.config == config for trial in self.state.trials)

    def _measure_step_of_batch(self, config: LoaderConfig) -> None:
        """The step alone on a batch of another size."""
        if config.batch_size is None or not self._job.has_step:
            return
        measured = self._source.step_ceiling(config.consumer_threads, config.batch_size)
        if not isinstance(measured, Failure):
            self.state.ceilings_by_batch[config.batch_size] = measured

    def _race(self) -> None:
        finals = Finals(self._source, self._beliefs, self.state, self._options, self._job)
        self.state.finals = finals.run(self.seconds_left, self._listener.finals_round)
