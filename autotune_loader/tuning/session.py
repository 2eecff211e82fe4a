"""The loop of a tuning run: ask the policy, observe, tell, until there is nothing left that is worth its time.

    the step alone ─► explore ─► variants of the best ─► paired rounds

What to do next is decided in `decision`; here it is done, told to Optuna, and kept within the budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol

from autotune_loader.bursts.bench import SLOW_FETCH_S
from autotune_loader.bursts.protocol import Probe
from autotune_loader.decision.acquisition import initial_design
from autotune_loader.decision.belief import CORES_OF_A_SERIAL_STEP, Beliefs
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.policy import Goal, Stop, explore
from autotune_loader.decision.race import MIN_ROUNDS
from autotune_loader.decision.stopping import StopReason
from autotune_loader.decision.variants import count_variants, faster_variants, may_grow_to, right_sized, variants
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.finals import run_finals
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.state import RunContext, SearchState, twin_context
from autotune_loader.tuning.study import Claim, OptunaStudy
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.trial import Trial, role_of

log = logging.getLogger(__name__)

FINALS_SHARE = 0.5
"""Share of the budget that is left for the paired rounds."""
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
        run: what is known of the job and the machine.
        options: how to search.
        clock: seconds; a fake one in tests.
        started: when the user's budget began, on that clock.
        listener: told what happens.
        suggestions: tried right after the user's own configuration and torch's default, such as an earlier run's best.
        job: of which a study may have trials; it names the study where the options do not.
    """

    def __init__(
        self,
        probe: Probe,
        run: RunContext,
        options: TuneOptions,
        *,
        clock: Callable[[], float],
        started: float,
        listener: Listener,
        suggestions: Sequence[LoaderConfig] = (),
        job: str = "",
    ) -> None:
        self._options, self._listener, self._suggestions = options, listener, suggestions
        self._clock, self._started, self._repeats = clock, started, 0
        self._run = run = replace(run, tolerance=options.tolerance)
        context, trials = twin_context(run.workload, run.warmup, run.usable_cores), list[Trial]()
        self._source = BurstSource(
            probe, run.space, context, trials, self.seconds_left, run.warmup.first_batch_s, options.stages
        )
        self._beliefs = Beliefs(run.space, context)
        name = options.study_name or f"autotune-{job}"
        self._study = OptunaStudy(
            storage=options.storage, name=name, space=run.space, search=options.search, seed=options.seed, job=job
        )
        self.state = SearchState(run=run, source=self._source, beliefs=self._beliefs, trials=trials)

    def run(self) -> SearchState:
        """Search until there is a reason to stop; on Ctrl-C what was found so far, if anything, is returned, marked as such."""
        try:
            self._adopt(self._study.restored())
            if self._run.workload.has_step:
                self._measure_step()
            for config in self._proposals():
                self._try(config)
            on_round = self._listener.finals_round
            run_finals(self.state, self.seconds_left, on_round, self._options.seed)
        except KeyboardInterrupt:
            if self.state.fastest() is None:
                raise
            self.state.stop_reason = StopReason.INTERRUPTED
        finally:
            self.state.study = self._study.study
            self._study.close()
        return self.state

    def seconds_left(self) -> float:
        return self._options.budget_s - (self._clock() - self._started)

    def _measure_step(self) -> None:
        """The step alone, with each number of threads: the ceiling, and what the twin needs of it."""
        context = self.state.context
        for threads in self._run.space.consumer_threads:
            measured = self._source.step_ceiling()
            if isinstance(measured, Failure):
                log.warning("the step on a cached batch failed: %s", measured.message)
                continue
            self.state.ceilings[threads] = measured
            context = context.with_step(threads, measured.step_s)
            if threads is None and self._run.workload.on_cpu and measured.cpu_share is not None:
                # A step that sleeps or waits for a device keeps no core busy, whatever its threads.
                busy = min(context.consumer_cores, measured.cpu_share * self._run.usable_cores)
                context = replace(context, consumer_cores=busy)
                if busy < CORES_OF_A_SERIAL_STEP:
                    self._beliefs.space = replace(self._run.space, consumer_threads=(None,))
                    break
        self._beliefs.context = self._source.context = context

    # What to try

    def _proposals(self) -> Iterator[LoaderConfig | None]:
        """One configuration after the other; None lets Optuna's sampler propose."""
        begin_with = self._begin_with()
        grid = self._beliefs.space.configs() if self._options.search == "grid" else None
        while not isinstance(todo := explore(self._beliefs, self._goal(begin_with, grid)), Stop):
            config = todo.config
            yield config if config is None or config in begin_with else self._source.as_trained(config)
            self._adopt(self._study.news())
        self.state.stop_reason = todo.reason
        for config in self._variants():
            if any(trial.config == config for trial in self.state.trials):
                continue
            if self._is_out_of_trials() or self.seconds_left() < self._options.budget_s * FINALS_SHARE:
                self.state.stop_reason = StopReason.OUT_OF_BUDGET
                return
            yield config

    def _begin_with(self) -> list[LoaderConfig]:
        space = self._beliefs.space
        suggested = [config for config in self._suggestions if space.veto(config) is None]
        design = initial_design(space, self._run.usable_cores) if self._options.search == "auto" else ()
        begin_with = list(dict.fromkeys([self._run.baseline, LoaderConfig(), *suggested, *design]))
        if self._run.warmup.first_fetch_s > SLOW_FETCH_S:
            # There may be time for one or two, and those without workers say the least.
            begin_with.sort(key=lambda config: -config.num_workers)
        return begin_with

    def _goal(self, begin_with: Sequence[LoaderConfig], grid: Sequence[LoaderConfig] | None) -> Goal:
        trials = self.state.trials
        seconds = [trial.seconds for trial in trials if trial.measurement is not None]
        next_s, variants_kept, fastest = median(seconds or [0.0]), self._count_variants(), self.state.fastest()
        kept_s = 0.0  # where everything so far has failed there is nothing to compare
        if fastest is not None:
            # What failures took is lost to exploring and rounds alike: a hang must not end the search before it looked below.
            lost_s = sum(trial.seconds for trial in trials if trial.measurement is None)
            rounds_s = MIN_ROUNDS * self._source.round_s([fastest.config, self.state.baseline])
            kept_s = max((self._options.budget_s - lost_s) * FINALS_SHARE, rounds_s) + variants_kept * next_s
        return Goal(
            tolerance=self._options.tolerance,
            explore_s=self.seconds_left() - kept_s,
            next_s=next_s,
            has_trials_left=not self._is_out_of_trials(kept=variants_kept),
            begin_with=begin_with,
            queue=grid,
            elsewhere=self._study.elsewhere(),
            by_belief=self._options.search == "auto",
            repeats=self._repeats,
            ceiling=None if self.state.ceiling is None else self.state.ceiling.value,
        )

    def _variants(self) -> Iterator[LoaderConfig]:
        """The best with each change that the user allows and the twin knows nothing of, then those with fewer workers."""
        if self._count_variants():
            for config in variants(self._beliefs.space, self.state.fastest):
                if may_grow_to(config.batch_size, self.state.trials):
                    yield config
        for config in faster_variants(self.state.trials, self._beliefs.space, self._options.tolerance):
            burst = next(t.measurement for t in self.state.trials if t.config == config and t.measurement is not None)
            yield right_sized(config, burst)

    def _count_variants(self) -> int:
        """How many trials variants take; searches by sampler or grid propose them like any other knob."""
        return count_variants(self._beliefs.space) if self._options.search == "auto" else 0

    def _is_out_of_trials(self, kept: int = 0) -> bool:
        most = self._options.max_trials
        return most is not None and len(self.state.trials) >= max(most - kept, min(most, LEAST_TRIALS))

    # One trial

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
        config, number, begun = claim.config, len(self.state.trials), self._clock()
        predicted = self._beliefs.predicted(config) if self._options.search == "auto" else None
        outcome: Measurement | Failure | None = self._beliefs.feasible(config)
        if outcome is None:
            try:
                outcome = self._source.gather(config, Ask(phase="search", group=number)).outcome
            except BaseException:
                self._study.abandon(claim)
                raise
        return Trial(
            number=number,
            config=config,
            role=role_of(config, self._run.workload.own_config),
            measurement=outcome if isinstance(outcome, Measurement) else None,
            failure=outcome if isinstance(outcome, Failure) else None,
            predicted_samples_per_s=predicted,
            seconds=self._clock() - begun,
        )

    def _adopt(self, trials: Sequence[Trial]) -> None:
        """Take over trials of an earlier run, or of other hosts that share the study."""
        for trial in trials:
            self._keep(replace(trial, number=len(self.state.trials)))

    def _keep(self, trial: Trial) -> None:
        self.state.trials.append(trial)
        outcome = trial.measurement or trial.failure
        assert outcome is not None
        self._beliefs.log.add(Evidence(config=trial.config, outcome=outcome, group=trial.number))
