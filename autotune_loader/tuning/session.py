"""The search: from the first burst to the chosen configuration. It knows the probe only as a callable, and no process.

    own configuration and torch's default ─► scouts at 0, 1 and N workers ─► the burst that teaches most, again and again
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
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Protocol

from autotune_loader.decision.acquisition import initial_design, shortlist, suggest
from autotune_loader.decision.belief import (
    CORES_OF_A_SERIAL_STEP,
    TwinInputs,
    fit_twin,
    learn,
    looks_disturbed,
    over_epochs,
)
from autotune_loader.decision.posterior import Posterior
from autotune_loader.decision.selection import cost, modelled
from autotune_loader.decision.space import UNMODELLED, Space
from autotune_loader.probe.protocol import CountedProbe, Probe
from autotune_loader.tuning.epochs import (
    WholeEpochs,
    are_short,
    kept_for_epochs_s,
    noise_of_epochs,
    round_of_epochs_s,
    with_fewer_rounds,
)
from autotune_loader.tuning.finals import LEAST_OF_WINNER, MIN_ROUNDS, TYPICAL_NOISE, run_finals
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.schedule import deadline_s, filling_s, finals_round_s, paced
from autotune_loader.tuning.state import OUT_OF_BUDGET, OUT_OF_TRIALS, SearchState
from autotune_loader.tuning.study import OptunaStudy, journal_beside, role_of
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trial import Trial, TrialRole

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
# One burst of the search: it need only rank and feed the twin; the finals measure.
SEARCH_BURST = BurstPlan(max_s=0.6, min_s=0.3, relative_error=0.015)
CEILING_BURST = BurstPlan(max_s=0.6, min_s=0.2, relative_error=0.01)
# Share of the budget that the search leaves for the finals.
FINALS_SHARE = 0.5
# Where finals of whole epochs want more than this, the search ends with its scouts: a few more rounds of such slow epochs tell
# more than bursts of steady rates.
MUCH_FOR_EPOCHS = 0.4
# Share of the budget that patience with open questions of steady rates leaves unspent.
UNSPENT_SHARE = 0.25
# Open questions are worth this many seconds of finals, and some more where these do not bear out the choice.
FINALS_PATIENCE_S = 7.0
# The ceiling is reached when the rates of so many trials come this close to it.
CEILING_SHARE = 0.98
CEILING_TRIALS = 2
# Share of the budget that is kept for variants of the best, where the user allows what the twin knows nothing of.
VARIANTS_SHARE = 0.15
# Model-free proposals: TPE's say, once in so many trials of the search, so that a wrong twin cannot trap it.
EXPLORE_EVERY = 6
# Persistent workers are proposed when starting workers anew would take more than this share of an epoch.
STARTUP_WORTH_AVOIDING = 0.005
# Workers of a right-sized configuration are busy for no more than this share of their time.
BUSY_SHARE = 0.9
# So many trials come before any variant of the best: two to compare.
LEAST_TRIALS = 2
# A configuration that another host is measuring is passed over for so long; then that host is taken for lost.
TAKEN_PATIENCE_S = 15.0
TAKEN_PAUSE_S = 0.05
# The sampler may repeat itself; so many repeats in a row mean it has nothing new to say.
MOST_REPEATS = 20


class Listener(Protocol):
    """Told what happens while it happens; the tuner writes files and draws progress with it."""

    def trial(self, trial: Trial, best: Trial | None, seconds_left: float) -> None: ...

    def finals_round(self, number: int, rates: dict[LoaderConfig, float], seconds_left: float) -> None: ...


class TuningSession:
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
        epoch_batches: batches of an epoch that a burst may run to its end; None where that is unknown.
    """

    def __init__(
        self,
        probe: Probe,
        space: Space,
        settings: TuneOptions,
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
        epoch_batches: int | None = None,
    ) -> None:
        self._probe = CountedProbe(probe)
        self._space = space
        self._settings = settings
        self._own_config = own_config
        self._usable_cores = usable_cores
        self._step_uses_cores = step_uses_cores
        self._clock = clock
        self._started = started
        self._listener = listener
        self._has_step = has_step
        self._suggestions = tuple(config for config in suggestions if space.veto(config) is None)
        self._repeats = 0
        self._passed_over: dict[LoaderConfig, float] = {}
        consumer_cores = float(min(default_threads, usable_cores)) if step_uses_cores else 1.0
        self.found = SearchState(
            baseline=own_config or LoaderConfig(),
            epoch_batches=epoch_batches,
            inputs=TwinInputs(usable_cores=usable_cores, consumer_cores=consumer_cores, step_s_by_threads={}),
        )
        self._study = OptunaStudy(
            storage=settings.storage or journal_beside(settings.output),
            disposable=settings.storage is None,
            name=name,
            space=space,
            search=settings.search,
            seed=settings.seed,
            default_threads=default_threads,
        )
        self.found.study = self._study.study

    def run(self) -> SearchState:
        """Search until there is a reason to stop; on Ctrl-C what was found so far is returned, marked `interrupted`."""
        try:
            self._resume()
            if self._has_step:
                self._measure_ceilings()
            self._search()
            self._try_variants()
            self._race()
        except KeyboardInterrupt:
            self.found.interrupted = True
            self.found.stopped_because = "interrupted"
        finally:
            self.found.bursts = self._probe.count
            self.found.study = self._study.study
            self._study.close()
        return self.found

    def finish(self) -> None:
        """The result is safe: nobody needs to go on from here, unless the search was interrupted."""
        if not self.found.interrupted:
            self._study.finish()

    def seconds_left(self) -> float:
        return self._settings.budget_s - (self._clock() - self._started)

    def _resume(self) -> None:
        self.found.trials = [replace(trial, number=number) for number, trial in enumerate(self._study.restored())]
        if self.found.trials:
            log.info("resumed a study of %d trials", len(self.found.trials))

    def _adopt_news(self) -> list[Trial]:
        """Take over what other hosts have told a shared study since."""
        first = len(self.found.trials)
        news = [replace(trial, number=number) for number, trial in enumerate(self._study.news(), start=first)]
        self.found.trials += news
        return news

    def _is_others(self, config: LoaderConfig, asked: optuna.trial.Trial | None = None) -> bool:
        """Whether another host that shares the study has measured `config` in the meantime, or is measuring it now."""
        if any(trial.config == config for trial in self._adopt_news()):
            return True
        if not self._study.is_taken(config, asked):
            return False
        now = self._clock()
        if now - self._passed_over.setdefault(config, now) > TAKEN_PATIENCE_S:
            return False
        time.sleep(TAKEN_PAUSE_S)
        return True

    def _measure_ceilings(self) -> None:
        for threads in self._space.consumer_threads:
            measured = self._probe.step_ceiling(threads, CEILING_BURST)
            if isinstance(measured, Failure):
                log.warning("the step on a cached batch failed: %s", measured.message)
                continue
            self.found.ceilings[threads] = measured
            self.found.inputs.step_s_by_threads[threads] = measured.step_s
            if threads is None and self._step_uses_cores and measured.cpu_share is not None:
                # A step that sleeps or waits for a device keeps no core busy, whatever its threads.
                busy = min(self.found.inputs.consumer_cores, measured.cpu_share * self._usable_cores)
                self.found.inputs = replace(self.found.inputs, consumer_cores=busy)
                if busy < CORES_OF_A_SERIAL_STEP:
                    self._space = replace(self._space, consumer_threads=(None,))
                    return

    def _search(self) -> None:
        if self._is_out_of_trials():  # a resumed study
            self.found.stopped_because = OUT_OF_TRIALS.format(self._settings.max_trials)
            return
        for config in self._proposals():
            self._try(config)
            reason = self._reason_to_stop()
            if reason:
                self.found.stopped_because = reason
                return
        self.found.stopped_because = self.found.stopped_because or "nothing untried is worth a burst"

    def _try_variants(self) -> None:
        """The best with each change that the user allows and the twin knows nothing of, one knob after the other."""
        if self._settings.search == "auto":  # the others propose them like any other knob
            self._walk_variants()
        self._right_size_variant()

    def _walk_variants(self) -> None:
        for name in UNMODELLED:
            fastest = self.found.fastest()
            if fastest is None:
                return
            for config in self._space.variants(fastest.config, name):
                if self._is_tried(config):
                    continue
                if self._is_out_of_trials() or self.seconds_left() < self._settings.budget_s * FINALS_SHARE:
                    self.found.stopped_because = OUT_OF_BUDGET
                    return
                if config.batch_size is not None and not self._may_grow_to(config.batch_size):
                    continue
                self._try(config)

    def _right_size_variant(self) -> None:
        """A faster variant was tried with the workers of the fastest; where its burst shows that fewer do, with them too."""
        for config in self._faster_variants():
            self._measure_ceiling_of_batch(config)
            burst = next(t.measurement for t in self.found.trials if t.config == config and t.measurement is not None)
            busy = burst.samples_per_s.value / burst.batch_size * burst.service_s
            fewer = replace(config, num_workers=math.ceil(busy / BUSY_SHARE)) if config.num_workers else config
            enough = self.seconds_left() > self._settings.budget_s * FINALS_SHARE and not self._is_out_of_trials()
            if fewer.num_workers < config.num_workers and enough and not self._is_tried(fewer):
                self._try(fewer)

    def _may_grow_to(self, batch_size: int) -> bool:
        """Whether no smaller batch failed yet: what took a device's memory at twice the size takes it at four times."""
        fell = [trial.config.batch_size for trial in self.found.trials if trial.failure is not None]
        return all(size is None or size > batch_size for size in fell)

    def _measure_ceiling_of_batch(self, config: LoaderConfig) -> None:
        size = config.batch_size
        if size is None or not self._has_step:
            return
        plan = replace(CEILING_BURST, batch_size=size)
        measured = self._probe.step_ceiling(config.consumer_threads, plan)
        if not isinstance(measured, Failure):
            self.found.ceilings_by_batch[size] = measured

    def _variants(self) -> int:
        """How many trials the variants of one configuration take."""
        if self._settings.search != "auto":
            return 0
        return sum(len(getattr(self._space, axis)) - 1 for axis in UNMODELLED.values())

    def _is_out_of_trials(self, kept: int = 0) -> bool:
        most = self._settings.max_trials
        return most is not None and len(self.found.trials) >= max(most - kept, min(most, LEAST_TRIALS))

    def _proposals(self) -> Iterator[LoaderConfig | None]:
        """Configurations in the order they are to be tried; None asks the sampler."""
        tried = {trial.config for trial in self.found.trials}
        first = [self._own_config] if self._own_config is not None else []
        design = initial_design(self._space, self._usable_cores) if self._settings.search == "auto" else ()
        for config in dict.fromkeys([*first, LoaderConfig(), *self._suggestions, *design]):
            if config not in tried:
                yield config
        if self._settings.search == "auto":
            yield from self._by_information()
        elif self._settings.search == "grid":
            yield from (config for config in self._space.configs() if not self._is_tried(config))
        else:
            yield from itertools.repeat(None)

    def _is_tried(self, config: LoaderConfig) -> bool:
        return any(trial.config == config for trial in self.found.trials)

    def _by_information(self) -> Iterator[LoaderConfig | None]:
        for count in itertools.count(1):
            if self._kept_for_epochs_s() > self._settings.budget_s * MUCH_FOR_EPOCHS:
                self.found.stopped_because = OUT_OF_BUDGET
                return
            known = self._knowledge()
            config = known and suggest(known, self._space, self.found.trials, self._settings.tolerance)
            if not config:
                return
            yield self._as_used(config)
            if count % EXPLORE_EVERY == 0:
                yield None

    def _knowledge(self) -> Posterior | None:
        return learn(self._space, self.found.trials, self.found.inputs, self._settings.seed)

    def _try(self, config: LoaderConfig | None) -> None:
        if config is not None and self._is_others(config):
            return
        asked, proposed = self._study.ask(config)
        if self._is_others(proposed, asked):
            self._study.abandon(asked)
            return
        known = next((trial for trial in self.found.trials if trial.config == proposed), None)
        if known is not None and config is None:
            self._repeats += 1
            self._study.tell(asked, known)
            return
        self._repeats = 0
        begun, predicted = self._clock(), self._prediction(proposed)
        try:
            outcome = (
                self._space.veto(proposed)
                or self.found.too_many_workers(proposed)
                or self._confirmed(proposed, predicted)
            )
        except BaseException:
            self._study.abandon(asked)
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
        self._study.tell(asked, trial)
        self.found.trials.append(trial)
        self._listener.trial(trial, self.found.fastest(), self.seconds_left())

    def _role(self, config: LoaderConfig) -> TrialRole:
        return role_of(config, self._own_config)

    def _confirmed(self, config: LoaderConfig, predicted: float | None) -> Measurement | Failure:
        """A burst; a suspiciously slow one is repeated, and the faster of the two believed: disturbances only slow down."""
        first = self._burst(config)
        if isinstance(first, Failure) or not looks_disturbed(config, first, predicted, self.found.inputs):
            return first
        second = self._burst(config)
        if isinstance(second, Failure):
            return first
        return max(first, second, key=lambda measurement: measurement.samples_per_s.value)

    def _burst(self, config: LoaderConfig) -> Measurement | Failure:
        plan = self._paced(config, replace(SEARCH_BURST, seed=len(self.found.trials)))
        outcome = self._probe.burst(config, plan)
        if isinstance(outcome, Failure) and outcome.retryable and config.batch_size is None:
            outcome = self._probe.burst(config, plan)
        return outcome if isinstance(outcome, Failure) else self._space.over_margin(config, outcome) or outcome

    def _prediction(self, config: LoaderConfig) -> float | None:
        """The twin's, in samples/s; None in a search that does without it, and for batches of another size."""
        if config.batch_size is not None or self._settings.search != "auto":
            return None
        twin = fit_twin(self.found.trials, self.found.inputs, self._settings.seed)
        return None if twin is None else twin.predict_all([config])[0].samples_per_s.value

    def _reason_to_stop(self) -> str:
        variants = self._variants()
        if self._is_out_of_trials(kept=variants):
            return OUT_OF_TRIALS.format(self._settings.max_trials)
        share = FINALS_SHARE + (VARIANTS_SHARE if variants else 0.0)
        next_s = median(trial.seconds for trial in self.found.trials) if self.found.trials else 0.0
        kept_s = max(self._settings.budget_s * share, self._least_finals_s(), self._kept_for_epochs_s())
        if self.seconds_left() - next_s < kept_s:
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
        known = self._knowledge()
        if known is None:
            return
        tolerance = self._settings.tolerance
        self.found.whole_epochs = self._epochs_are_short()
        if self.found.whole_epochs:
            known = self._known_over_epochs(known)
        candidates = [
            *self._faster_variants(),
            *shortlist(known, self._space, tolerance),
            *self._fastest_burst(),
        ]
        least_rounds = 1
        if self.found.whole_epochs:
            # Of these the search's bursts, which know steady rates alone, tell least; and no belief decides between them.
            candidates[1:1] = with_fewer_rounds(candidates[0], self.found.epoch_batches or 1, self._space.max_workers)
            least_rounds = LEAST_OF_WINNER
        while len(candidates) > 1 and least_rounds * self._round_s(candidates) > self.seconds_left():
            candidates.pop()
        self.found.finals = run_finals(
            WholeEpochs(self._probe) if self.found.whole_epochs else self._probe,
            list(dict.fromkeys(map(self._as_in_training, candidates))),
            self.found.baseline,
            # Workers that live on keep their memory between epochs.
            cost=lambda config: (*cost(config, self._space), config.persistent_workers),
            tolerance=tolerance,
            time_left=self.seconds_left,
            patience_s=FINALS_PATIENCE_S,
            unspent_s=0.0 if self.found.whole_epochs else UNSPENT_SHARE * self._settings.budget_s,
            seed=self._settings.seed,
            # An epoch takes what it takes.
            plan_of=self._with_deadline if self.found.whole_epochs else self._paced,
            pause_of=self._pause_s if not self.found.whole_epochs else lambda config, measured: 0.0,
            # What is believed is believed of steady rates.
            believe=self._believed_after if not self.found.whole_epochs else lambda bursts: None,
            nominate=lambda after: shortlist(after, self._space, tolerance),
            ceiling=self._ceiling_rate(),
            typical_noise=self._typical_noise(),
            on_round=lambda number, rates: self._listener.finals_round(number, rates, self.seconds_left()),
        )

    def _epochs_are_short(self) -> bool:
        epoch_s = self.found.epoch_s()
        return epoch_s is not None and are_short(epoch_s, self.found.first_fetch_s(), self.seconds_left())

    def _typical_noise(self) -> float:
        """Of a burst of the finals."""
        return noise_of_epochs(self.found.epoch_s() or math.inf) if self.found.whole_epochs else TYPICAL_NOISE

    def _kept_for_epochs_s(self) -> float:
        epoch_s = self.found.epoch_s()
        if epoch_s is None:
            return 0.0
        return kept_for_epochs_s(epoch_s, self.found.first_fetch_s(), self._settings.budget_s)

    def _ceiling_rate(self) -> float | None:
        """Samples/s of the step alone; not where epochs have gaps, or another batch size another ceiling."""
        if self.found.whole_epochs or self.found.ceilings_by_batch or self.found.ceiling is None:
            return None
        return self.found.ceiling.value

    def _as_in_training(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with workers that persist where they may and starting them anew takes much of an epoch."""
        startup_s, epoch_s = self.found.startup_s(config), self.found.epoch_s()
        if startup_s is None or epoch_s is None or not config.num_workers:
            return self._as_used(config)
        keeps = self._space.may_keep_workers and startup_s > STARTUP_WORTH_AVOIDING * epoch_s
        return replace(config, persistent_workers=keeps)

    def _known_over_epochs(self, known: Posterior) -> Posterior:
        return over_epochs(
            known,
            self._space,
            self.found.trials,
            self.found.inputs,
            epoch_batches=self.found.epoch_batches or 1,
            as_run=self._as_in_training,
            seed=self._settings.seed,
        )

    def _faster_variants(self) -> list[LoaderConfig]:
        """Of what the twin knows nothing of, the fastest and the cheapest as fast, where they beat what it knows."""
        rates = {trial.config: trial.samples_per_s or 0.0 for trial in self.found.trials}
        plain = max((rate for config, rate in rates.items() if self._space.is_modelled(config)), default=0.0)
        others = [config for config in rates if not self._space.is_modelled(config)]
        fastest = max(others, key=lambda config: rates[config], default=None)
        if fastest is None or rates[fastest] <= plain * (1 + self._settings.tolerance / 2):
            return []
        near = [config for config in others if rates[config] >= rates[fastest] * (1 - self._settings.tolerance)]
        cheapest = min(near, key=lambda config: cost(config, self._space))
        return list(dict.fromkeys([fastest, cheapest]))

    def _fastest_burst(self) -> list[LoaderConfig]:
        """The fastest trial, believed or not, where the twin errs most: a step with threads of its own, or none at all."""
        fastest = self.found.fastest()
        if fastest is None or not self._space.is_modelled(fastest.config):
            return []
        return [fastest.config] if len(self._space.consumer_threads) > 1 or not self._has_step else []

    def _believed_after(self, bursts: Sequence[tuple[LoaderConfig, Measurement]]) -> Posterior | None:
        """What is known after these bursts of the finals, under the names that the entrants run by."""
        more = [Trial(number=0, config=config, role="search", measurement=burst) for config, burst in bursts]
        known = learn(self._space, [*self.found.trials, *more], self.found.inputs, self._settings.seed)
        if known is None:
            return None
        return replace(known, configs=tuple(self._name_of(config) for config in known.configs))

    def _name_of(self, config: LoaderConfig) -> LoaderConfig:
        baseline = self.found.baseline
        return baseline if config == modelled(baseline) else self._as_in_training(config)

    def _least_finals_s(self) -> float:
        """Seconds of the fewest rounds between the fastest so far and the baseline."""
        fastest = self.found.fastest()
        return MIN_ROUNDS * self._round_s([fastest.config]) if fastest else 0.0

    def _round_s(self, candidates: Sequence[LoaderConfig]) -> float:
        """Seconds that one round of these and the baseline will take."""
        entrants = [*candidates, self.found.baseline]
        if not self.found.whole_epochs:
            return finals_round_s(entrants, self.found.trials)
        startups_s = [(self.found.startup_s(config) or 0.0) if config.num_workers else 0.0 for config in entrants]
        return round_of_epochs_s(self.found.epoch_s() or 0.0, startups_s)

    def _paced(self, config: LoaderConfig, plan: BurstPlan) -> BurstPlan:
        left = self.seconds_left()
        return paced(plan, config, self.found.trials, usable_cores=self._usable_cores, seconds_left=left)

    def _pause_s(self, config: LoaderConfig, measured: Measurement) -> float:
        return filling_s(config, measured, self.found.inputs)

    def _with_deadline(self, _: LoaderConfig, plan: BurstPlan) -> BurstPlan:
        return replace(plan, deadline_s=deadline_s(self.found.trials, self.seconds_left()))

    def _as_used(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with what no burst can see, and so no belief holds, set as the job will have it."""
        return replace(config, persistent_workers=self._space.persistent_workers and config.num_workers > 0)
