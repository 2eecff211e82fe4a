"""The search: from the first burst to the chosen configuration. It knows the probe only as a callable, and no process.

    own configuration and torch's default ─► scouts at 0, 1 and N workers ─► largest expected gain, again and again
        ─► finals between the fastest, the cheapest as fast, and the baseline

It ends at the first of: the training step's own ceiling is reached, nothing untried is worth a burst, `max_trials`, or the
budget, of which a part is always kept for the finals.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from autotune_loader import policy
from autotune_loader.config import LoaderConfig
from autotune_loader.finals import MIN_ROUNDS, FinalsOutcome, Prior, run_finals
from autotune_loader.settings import Settings
from autotune_loader.space import Space
from autotune_loader.stats import Interval
from autotune_loader.study import Ledger, journal_beside, role_of
from autotune_loader.trial import Acceleration, BurstPlan, Failure, Measurement, Probe, Trial, TrialRole

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)

# One burst of the search: it need only rank and feed the twin; the finals measure.
SEARCH_BURST = BurstPlan(max_s=1.0, min_s=0.3, relative_error=0.015)
CEILING_BURST = BurstPlan(max_s=0.6, min_s=0.2, relative_error=0.01)
# Share of the budget that the search leaves for the finals.
FINALS_SHARE = 0.4
# Open questions between candidates within tolerance are worth this many seconds of finals, and no more of the budget.
FINALS_PATIENCE_S = 8.0
# The ceiling is reached when the rates of so many trials come this close to it.
CEILING_SHARE = 0.98
CEILING_TRIALS = 2
# A burst that takes longer than this many times the slowest successful one is taken for a hang.
DEADLINE_FACTOR = 10.0
SHORTEST_DEADLINE_S = 30.0
LONGEST_DEADLINE_S = 120.0
# Two failures at so many workers or more, and the search goes no further that way.
FAILURES_TO_STOP_GROWING = 2
# Model-free proposals: TPE's say, once in so many trials of the search, so that a wrong twin cannot trap it.
EXPLORE_EVERY = 4
# A configuration that another host is measuring is passed over for so long; then that host is taken for lost.
TAKEN_PATIENCE_S = 15.0
TAKEN_PAUSE_S = 0.05
# Why a search ends that would have gone on with more of it.
OUT_OF_BUDGET = "the rest of the budget is kept for the finals"
OUT_OF_TRIALS = "max_trials={} were run"
# The sampler may repeat itself; so many repeats in a row mean it has nothing new to say.
MOST_REPEATS = 20


class Listener(Protocol):
    """Told what happens while it happens; the tuner writes files and draws progress with it."""

    def trial(self, trial: Trial, best: Trial | None, seconds_left: float) -> None: ...

    def finals_round(self, number: int, rates: dict[LoaderConfig, float], seconds_left: float) -> None: ...


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search has found so far; the state that an interruption leaves behind."""

    trials: list[Trial] = field(default_factory=list)
    baseline: LoaderConfig
    ceilings: dict[int | None, Measurement] = field(default_factory=dict)
    """The step on a cached batch, by `consumer_threads`."""
    finals: FinalsOutcome | None = None
    inputs: policy.TwinInputs
    study: optuna.Study | None = None
    interrupted: bool = False
    bursts: int = 0
    stopped_because: str = ""
    accelerations: tuple[Acceleration, ...] = ()
    """What allowed changes of the step would bring, measured after the finals."""

    @property
    def ceiling(self) -> Interval | None:
        """Rate of the step on a cached batch with the best thread count: no loader can exceed it."""
        rates = [measured.samples_per_s for measured in self.ceilings.values()]
        return max(rates, key=lambda rate: rate.value, default=None)

    @property
    def was_cut_short(self) -> bool:
        """Whether more time or trials would have been used."""
        return self.stopped_because == OUT_OF_BUDGET or self.stopped_because.startswith(OUT_OF_TRIALS.split("{")[0])

    def fastest(self) -> Trial | None:
        """The successful trial with the highest measured rate."""
        measured = [trial for trial in self.trials if trial.measurement is not None]
        return max(measured, key=lambda trial: trial.samples_per_s or 0.0, default=None)


class SearchRun:
    """One search over one space with one probe.

    Args:
        probe: runs configurations.
        space: the legal ones.
        settings: how to search.
        own_config: the user's own configuration, where there is one.
        usable_cores: cores the workers and the step share.
        default_threads: intra-op threads of the untouched training process.
        step_uses_cores: whether the step computes on the CPU.
        clock: seconds; a fake one in tests.
        started: when the user's budget began, on that clock.
        listener: told what happens.
        name: of the Optuna study.
        has_step: whether anything is done with a batch.
        suggestions: tried right after the user's own configuration and torch's default, such as an earlier run's best.
    """

    def __init__(
        self,
        probe: Probe,
        space: Space,
        settings: Settings,
        *,
        own_config: LoaderConfig | None,
        usable_cores: int,
        default_threads: int,
        step_uses_cores: bool,
        clock: Callable[[], float],
        started: float,
        listener: Listener,
        name: str = "autotune",
        has_step: bool = True,
        suggestions: Sequence[LoaderConfig] = (),
    ) -> None:
        self._probe = probe
        self._space = space
        self._settings = settings
        self._own_config = own_config
        self._usable_cores = usable_cores
        self._clock = clock
        self._started = started
        self._listener = listener
        self._has_step = has_step
        self._suggestions = tuple(config for config in suggestions if space.veto(config) is None)
        self._repeats = 0
        self._passed_over: dict[LoaderConfig, float] = {}
        consumer_cores = float(min(default_threads, usable_cores)) if step_uses_cores else 1.0
        self.found = Found(
            baseline=own_config or LoaderConfig(),
            inputs=policy.TwinInputs(usable_cores=usable_cores, consumer_cores=consumer_cores, step_s_by_threads={}),
        )
        self._ledger = Ledger(
            storage=settings.storage or journal_beside(settings.output),
            disposable=settings.storage is None,
            name=name,
            space=space,
            search=settings.search,
            seed=settings.seed,
            default_threads=default_threads,
        )
        self.found.study = self._ledger.study

    def run(self) -> Found:
        """Search until there is a reason to stop; on Ctrl-C what was found so far is returned, marked `interrupted`."""
        try:
            self._resume()
            if self._has_step:
                self._measure_ceilings()
            self._search()
            self._race()
        except KeyboardInterrupt:
            self.found.interrupted = True
            self.found.stopped_because = "interrupted"
        finally:
            self.found.study = self._ledger.study
            self._ledger.close()
        return self.found

    def finish(self) -> None:
        """The result is safe: nobody needs to go on from here, unless the search was interrupted."""
        if not self.found.interrupted:
            self._ledger.finish()

    def seconds_left(self) -> float:
        return self._settings.budget_s - (self._clock() - self._started)

    def _resume(self) -> None:
        self.found.trials = [replace(trial, number=number) for number, trial in enumerate(self._ledger.restored())]
        if self.found.trials:
            log.info("resumed a study of %d trials", len(self.found.trials))

    def _adopt_news(self) -> list[Trial]:
        """Take over what other hosts have told a shared study since."""
        first = len(self.found.trials)
        news = [replace(trial, number=number) for number, trial in enumerate(self._ledger.news(), start=first)]
        self.found.trials += news
        return news

    def _is_others(self, config: LoaderConfig, asked: optuna.trial.Trial | None = None) -> bool:
        """Whether another host that shares the study has measured `config` in the meantime, or is measuring it now."""
        if any(trial.config == config for trial in self._adopt_news()):
            return True
        if not self._ledger.is_taken(config, asked):
            return False
        now = self._clock()
        if now - self._passed_over.setdefault(config, now) > TAKEN_PATIENCE_S:
            return False
        time.sleep(TAKEN_PAUSE_S)
        return True

    def _measure_ceilings(self) -> None:
        for threads in self._space.consumer_threads:
            measured = self._probe.step_ceiling(threads, CEILING_BURST)
            self.found.bursts += 1
            if isinstance(measured, Failure):
                log.warning("the step on a cached batch failed: %s", measured.message)
                continue
            self.found.ceilings[threads] = measured
            self.found.inputs.step_s_by_threads[threads] = measured.step_s

    def _search(self) -> None:
        for config in self._proposals():
            self._try(config)
            reason = self._reason_to_stop()
            if reason:
                self.found.stopped_because = reason
                return
        self.found.stopped_because = self.found.stopped_because or "nothing untried is worth a burst"

    def _proposals(self) -> Iterator[LoaderConfig | None]:
        """Configurations in the order they are to be tried; None asks the sampler."""
        tried = {trial.config for trial in self.found.trials}
        first = [self._own_config] if self._own_config is not None else []
        scouts = policy.scouts(self._space, self._usable_cores) if self._settings.search == "auto" else ()
        for config in dict.fromkeys([*first, LoaderConfig(), *self._suggestions, *scouts]):
            if config not in tried:
                yield config
        if self._settings.search == "auto":
            yield from self._by_expected_gain()
        elif self._settings.search == "grid":
            yield from (config for config in self._space.configs() if not self._is_tried(config))
        else:
            yield from itertools.repeat(None)

    def _is_tried(self, config: LoaderConfig) -> bool:
        return any(trial.config == config for trial in self.found.trials)

    def _by_expected_gain(self) -> Iterator[LoaderConfig | None]:
        for count in itertools.count(1):
            belief = policy.next_config(
                self._space, self.found.trials, self.found.inputs, self._settings.tolerance, self._settings.seed
            )
            if belief is None:
                return
            yield self._as_used(belief.config)
            if count % EXPLORE_EVERY == 0:
                yield None

    def _try(self, config: LoaderConfig | None) -> None:
        if config is not None and self._is_others(config):
            return
        asked, proposed = self._ledger.ask(config)
        if self._is_others(proposed, asked):
            self._ledger.abandon(asked)
            return
        known = next((trial for trial in self.found.trials if trial.config == proposed), None)
        if known is not None and config is None:
            self._repeats += 1
            self._ledger.tell(asked, known)
            return
        self._repeats = 0
        begun, predicted = self._clock(), self._prediction(proposed)
        try:
            outcome = (
                self._space.veto(proposed) or self._too_many_workers(proposed) or self._confirmed(proposed, predicted)
            )
        except BaseException:
            self._ledger.abandon(asked)
            raise
        trial = Trial(
            number=len(self.found.trials),
            config=proposed,
            role=self._role(proposed),
            measurement=outcome if isinstance(outcome, Measurement) else None,
            failure=outcome if isinstance(outcome, Failure) else None,
            predicted_samples_per_s=predicted,
            seconds=self._clock() - begun,
        )
        self._ledger.tell(asked, trial)
        self.found.trials.append(trial)
        self._listener.trial(trial, self.found.fastest(), self.seconds_left())

    def _role(self, config: LoaderConfig) -> TrialRole:
        return role_of(config, self._own_config)

    def _confirmed(self, config: LoaderConfig, predicted: float | None) -> Measurement | Failure:
        """A burst; a surprising one is repeated, and the faster of the two believed: disturbances only slow down."""
        first = self._burst(config)
        if isinstance(first, Failure) or not policy.is_surprising(config, first, predicted, self.found.inputs):
            return first
        second = self._burst(config)
        if isinstance(second, Failure):
            return first
        return max(first, second, key=lambda measurement: measurement.samples_per_s.value)

    def _burst(self, config: LoaderConfig) -> Measurement | Failure:
        plan = replace(SEARCH_BURST, seed=len(self.found.trials), deadline_s=self._deadline_s())
        self.found.bursts += 1
        outcome = self._probe.burst(config, plan)
        if isinstance(outcome, Failure) and outcome.retryable:
            self.found.bursts += 1
            return self._probe.burst(config, plan)
        return outcome

    def _deadline_s(self) -> float:
        longest = max((trial.seconds for trial in self.found.trials if trial.measurement), default=0.0)
        return min(LONGEST_DEADLINE_S, max(SHORTEST_DEADLINE_S, DEADLINE_FACTOR * longest))

    def _too_many_workers(self, config: LoaderConfig) -> Failure | None:
        """A veto learnt from failures: two at or below this many workers, and more of them are not tried."""
        resource = ("oom_killed", "out_of_memory", "memory_guard", "shared_memory", "descriptors")
        fell = [
            trial.config.num_workers
            for trial in self.found.trials
            if trial.failure is not None and trial.failure.kind in resource and trial.config.num_workers > 0
        ]
        if len(fell) < FAILURES_TO_STOP_GROWING or config.num_workers < sorted(fell)[FAILURES_TO_STOP_GROWING - 1]:
            return None
        return Failure(
            kind="infeasible",
            phase="plan",
            message=f"{config.num_workers} workers were not tried: {len(fell)} trials with {min(fell)} or more ran out of "
            "memory or descriptors",
        )

    def _prediction(self, config: LoaderConfig) -> float | None:
        twin = policy.fit_twin(self.found.trials, self.found.inputs, self._settings.seed)
        return None if twin is None else twin.predict_all([config])[0].samples_per_s.value

    def _reason_to_stop(self) -> str:
        if self._settings.max_trials is not None and len(self.found.trials) >= self._settings.max_trials:
            return OUT_OF_TRIALS.format(self._settings.max_trials)
        if self.seconds_left() < max(self._settings.budget_s * FINALS_SHARE, self._least_finals_s()):
            return OUT_OF_BUDGET
        if self._repeats >= MOST_REPEATS:
            return "the sampler repeats itself"
        if self._settings.search == "auto" and self._at_ceiling():
            return "the training step's own ceiling is reached"
        return ""

    def _at_ceiling(self) -> bool:
        """Whether enough trials reach the ceiling; one alone may have been lucky."""
        ceiling = self.found.ceiling
        if ceiling is None:
            return False
        rates = [trial.measurement.samples_per_s for trial in self.found.trials if trial.measurement is not None]
        reaching = sum(rate.value >= CEILING_SHARE * ceiling.value for rate in rates)
        return reaching >= CEILING_TRIALS

    def _race(self) -> None:
        believed = policy.beliefs(self._space, self.found.trials, self.found.inputs, self._settings.seed)
        candidates = self._finalists(believed)
        while len(candidates) > 1 and self._expected_round_s(candidates) > self.seconds_left():
            candidates.pop()
        if not candidates:
            return
        self.found.finals = run_finals(
            self._probe,
            candidates,
            self.found.baseline,
            cost=lambda config: policy.cost(config, self._space),
            tolerance=self._settings.tolerance,
            time_left=self.seconds_left,
            patience_s=FINALS_PATIENCE_S,
            seed=self._settings.seed,
            deadline_s=self._deadline_s(),
            prior=self._prior(believed),
            on_round=lambda number, rates: self._listener.finals_round(number, rates, self.seconds_left()),
        )
        if self.found.finals is not None:
            self.found.bursts += sum(len(each.rates) for each in self.found.finals.rounds)

    def _least_finals_s(self) -> float:
        """Seconds of the fewest rounds between the fastest so far and the baseline."""
        fastest = self.found.fastest()
        return MIN_ROUNDS * self._expected_round_s([fastest.config]) if fastest else 0.0

    def _expected_round_s(self, candidates: Sequence[LoaderConfig]) -> float:
        """Seconds that one round will take, from what the candidates' trials took."""
        seconds = {policy.modelled(trial.config): trial.seconds for trial in self.found.trials}
        longest = max(seconds.values(), default=0.0)
        entrants = {policy.modelled(config) for config in (*candidates, self.found.baseline)}
        return sum(seconds.get(config, longest) for config in entrants)

    def _finalists(self, believed: Sequence[policy.Belief]) -> list[LoaderConfig]:
        chosen = policy.finalists(believed, self.found.trials, self._space, self._settings.tolerance)
        return [self._as_used(config) for config in chosen]

    def _prior(self, believed: Sequence[policy.Belief]) -> Prior:
        known = {belief.config: (math.log(belief.samples_per_s), belief.log_sd) for belief in believed}
        entrants = [*map(self._as_used, known), self.found.baseline]
        return {config: known[plain] for config in entrants if (plain := policy.modelled(config)) in known}

    def _as_used(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with what no burst can see, and so no belief holds, set as the job will have it."""
        return replace(config, persistent_workers=self._space.persistent_workers and config.num_workers > 0)
