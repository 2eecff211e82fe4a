"""The sampler of the Optuna study: proposes the configuration of which one more burst teaches most, and says when to stop.

    sampler = TwinSampler()
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, callbacks=[sampler.stop_when_safe])       # the objective returns samples/s

What it knows it reads from the study's trials: their parameters and values, or, where the objective told more by `record`,
what a burst measured. Batch histories stay in this process; the rest of a record is an attribute of the trial, so that another
process or host goes on from there.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune_loader.search.belief import Belief
from autotune_loader.search.rule import begin_with
from autotune_loader.search.space import Context, Space
from autotune_loader.values import Failure, Interval, LoaderConfig, Measurement, Trial, from_plain, to_plain

RECORD = "autotune_loader"
"""Attribute of an Optuna trial: the JSON text of its record."""
LOST_S = 60.0
"""A trial of another process that has run this long is taken for lost: not every storage knows heartbeats."""
CEILING_SHARE, CEILING_TRIALS = 0.98, 2
"""The ceiling is reached when the rates of so many trials come this close to it; one alone may have been lucky."""


class TwinSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Proposes the configuration of which one more burst teaches most. Its study must maximise samples/s.

    Args:
        space: what is legal; the default has 0 to 64 workers and 1 to 8 batches of prefetch.
        context: cores and step; the cores of this process where it is not given.
        tolerance: relative difference that counts as equally fast.
        ceiling: samples/s of the training step alone, which no loader can exceed; None where it is unknown.
        first: what to propose before anything is known; the rule of `begin_with` where it is not given.
    """

    def __init__(
        self,
        space: Space | None = None,
        context: Context | None = None,
        *,
        tolerance: float = 0.02,
        ceiling: float | None = None,
        first: Sequence[LoaderConfig] | None = None,
    ) -> None:
        self.space = Space() if space is None else space
        self.context = context or Context(usable_cores=len(os.sched_getaffinity(0)))
        self.tolerance, self.ceiling = tolerance, ceiling
        self.first = begin_with(self.space, self.context) if first is None else list(first)
        self.rounds: list[Trial] = []
        """Bursts of paired rounds: what is believed rests on them too."""
        self.stop_reason: Literal["SAFE", "CEILING"] | None = None
        """No untried configuration is worth a burst, or they are as fast as the training step alone; None while it asks on."""
        self._own: dict[int, Trial] = {}
        self._belief: tuple[object, Belief] | None = None
        self._random = optuna.samplers.RandomSampler(seed=0)

    # What is known

    def record(self, asked: optuna.trial.Trial, trial: Trial) -> None:
        """Keep what a burst measured, or how it failed; call it in the objective before it returns or prunes.

        Args:
            asked: the trial that Optuna gave the objective.
            trial: what came of it.
        """
        self._own[asked.number] = replace(trial, number=asked.number)
        asked.set_user_attr(RECORD, json.dumps(to_plain(_without_history(self._own[asked.number]))))

    def trials(self, study: optuna.Study) -> list[Trial]:
        """All that is known: what the study has, with the histories of this process' own bursts, then the rounds."""
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
        # Ctrl-C after a burst, before Optuna was told of it, makes a failed trial of what was measured.
        found = [self._own.get(each.number) or read_record(each) or self._from_params(each) for each in done]
        return [*(each for each in found if each is not None), *self.rounds]

    def belief(self, study: optuna.Study) -> Belief:
        """What these trials say of every configuration."""
        trials = self.trials(study)
        version = (self.space, self.context, tuple((each.number, each.round) for each in trials))
        if self._belief is None or self._belief[0] != version:
            self._belief = version, Belief(self.space, self.context, trials, tolerance=self.tolerance)
        return self._belief[1]

    # What to do next

    def proposal(self, study: optuna.Study) -> LoaderConfig | None:
        """What to measure next; None where nothing is worth it. Passes over what failed, and what others measure just now."""
        belief, elsewhere = self.belief(study), self._elsewhere(study)
        taken = {trial.config.key() for trial in belief.trials} | {config.key() for config in elsewhere}
        limit = belief.most_workers
        # A study of another sampler is only watched: what that one never proposes must not keep it going.
        first: Sequence[LoaderConfig] = self.first if study.sampler is self else ()
        for config in first:
            if config.key() not in taken and (limit is None or config.num_workers <= limit):
                return config
        proposed = None if (at_ceiling := self._is_at_ceiling(belief.trials)) else belief.proposal(elsewhere)
        self.stop_reason = "CEILING" if at_ceiling else "SAFE" if proposed is None else None
        return proposed

    def wants_more(self, study: optuna.Study) -> bool:
        """Whether something is enqueued or proposed: ask before `study.optimize`, as callbacks come after a trial only."""
        waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return bool(waiting) or self.proposal(study) is not None

    def stop_when_safe(self, study: optuna.Study, _trial: FrozenTrial) -> None:
        """A callback of `study.optimize`: ends it when the choice is safe, or when no burst is worth its time."""
        if not self.wants_more(study):
            study.stop()

    # What Optuna asks of a sampler

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return self.space.distributions()

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        proposed = self.proposal(study) or self.belief(study).choice or LoaderConfig()
        return {name: value for name, value in self.space.params(proposed).items() if name in search_space}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What was enqueued in part, or what an objective asks beside the space, is drawn at random."""
        return self._random.sample_independent(study, trial, param_name, param_distribution)

    def _elsewhere(self, study: optuna.Study) -> list[LoaderConfig]:
        """What other processes, or threads of this one, measure at this moment."""
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        since = datetime.datetime.now() - datetime.timedelta(seconds=LOST_S)
        recent = [each for each in running if each.datetime_start is not None and each.datetime_start > since]
        return [self.space.config(each.params) for each in recent if "num_workers" in each.params]

    def _is_at_ceiling(self, trials: Sequence[Trial]) -> bool:
        rates = [each.samples_per_s for each in trials if each.samples_per_s is not None]
        return sum(rate >= CEILING_SHARE * (self.ceiling or float("inf")) for rate in rates) >= CEILING_TRIALS

    def _from_params(self, done: FrozenTrial) -> Trial | None:
        """The record of a trial whose objective told nothing but its value."""
        if "num_workers" not in done.params or done.state is TrialState.FAIL:
            return None
        config = self.space.config(done.params)
        if done.state is TrialState.COMPLETE and done.value is not None and done.value > 0:
            return Trial(number=done.number, config=config, measurement=_of_rate(done.value))
        failure = Failure(kind="user_exception", phase="batches", message="the objective pruned it")
        return Trial(number=done.number, config=config, failure=failure)


def read_record(done: FrozenTrial) -> Trial | None:
    """What an objective recorded of a trial, without histories; None where it recorded nothing that this release reads."""
    import msgspec

    text = done.user_attrs.get(RECORD)
    with contextlib.suppress(msgspec.ValidationError, ValueError, TypeError):
        return from_plain(json.loads(text), Trial) if isinstance(text, str) else None
    return None


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna without its chatter and experimental warnings; its verbosity is global, so it is put back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def _without_history(trial: Trial) -> Trial:
    measured = trial.measurement
    return trial if measured is None else replace(trial, measurement=replace(measured, traces=(), stages=None))


def _of_rate(samples_per_s: float) -> Measurement:
    """A burst of which nothing but its rate is known."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("window_s", "first_batch_s", "wait_share", "service_s", "service_cpu_s", "receive_s", "step_s"), 0.0
    )
    rate = Interval(value=samples_per_s, low=float("-inf"), high=float("inf"), count=1)
    return Measurement(samples_per_s=rate, samples=0, batch_size=1.0, **unknown)
