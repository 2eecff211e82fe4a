"""The sampler of the Optuna study: proposes every burst, alone and in paired rounds, and says when to stop.

    sampler = TwinSampler()
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, callbacks=[sampler.stop_when_safe])       # the objective returns samples/s

It reads the study's trials: their parameters and values, or what a burst measured, where the objective told it by `record`.
A record is an attribute of the trial, so that another process goes on from there; batch histories stay in this one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from autotune_loader.machine.limits import usable_cores
from autotune_loader.search.belief import Belief, rounds_of
from autotune_loader.search.rule import begin_with
from autotune_loader.search.space import SEARCHED, Context, Space, closest
from autotune_loader.search.turns import LEAST_ROUNDS, StopReason, bursts_s, in_turns, what_next
from autotune_loader.values import (
    BURSTS_DIFFER,
    TORCH_PREFETCH_FACTOR,
    Failure,
    Interval,
    LoaderConfig,
    Measurement,
    Round,
    Trial,
    log_ratios,
)
from autotune_loader.values.serialization import from_plain, to_plain

RECORD, ROUND, ORDER = "autotune_loader", "round", "order"
"""Attributes of an Optuna trial: the JSON text of its record; the paired round that it is part of, and its place in it."""
MOST_TRIED = 16
"""Configurations after which none is proposed that never ran."""
LOST_S = 60.0  # a trial of another process that runs this long is taken for lost: not every storage knows heartbeats
LOCK = threading.RLock()  # of all samplers, for studies with `n_jobs`: one of a sampler's own could not be pickled
WORKS = "Try optuna.create_study(direction='maximize', sampler=TwinSampler())."


class TwinSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """An Optuna sampler that proposes trials and A/B rounds by a model of the loader. The study must maximise samples/s.

    An objective asks for settings by the names of `LoaderConfig` and in its own way: from a list, a range, on a logarithmic
    scale. It gets the nearest value of what is proposed; other names are drawn at random.

    Args:
        space: The legal settings; by default 0 to 64 workers and 1 to 8 batches of prefetch.
        context: Cores and step; by default the cores that this process may use.
        tolerance: Relative difference that counts as equally fast.
        ceiling: Samples/s that no loader can exceed, such as those of the training step alone; None if unknown.
        first: What to propose before anything is known; by default the rule of `begin_with`.
        baseline: The setting that takes part in the rounds while it may be as fast.
    """

    def __init__(
        self,
        space: Space | None = None,
        context: Context | None = None,
        *,
        tolerance: float = 0.02,
        ceiling: float | None = None,
        first: Sequence[LoaderConfig] | None = None,
        baseline: LoaderConfig | None = None,
    ) -> None:
        self.space: Space = Space() if space is None else space
        self.context: Context = context or Context(usable_cores=usable_cores().usable)
        self.tolerance: float = tolerance
        self.ceiling: float | None = ceiling
        self.baseline: LoaderConfig | None = baseline
        self.first: list[LoaderConfig] = begin_with(self.space, self.context) if first is None else list(first)
        self.seconds_left: Callable[[], float] | None = None  # of the budget
        self.is_open: bool | None = None  # whether it proposes what never ran; None: where it is the study's sampler
        self.stop_reason: StopReason | None = None  # why it proposes nothing more; None while it does
        self.since = 0  # the first trial of this run; what earlier ones have left is looked at once more
        self._random = optuna.samplers.RandomSampler(seed=0)
        self._study: object = None

    def _turn_to(self, study: optuna.Study) -> None:
        """Forget what is of another study."""
        if self._study == _name(study):
            return
        self._study = _name(study)
        self._known: dict[int, Trial] = {}
        self._turns = deque[tuple[LoaderConfig, int | None]]()  # what is next: configuration, and its place in a round
        self._round = 0  # the latest, by the number of its first trial, which is unique in any storage
        self._proposed: dict[int, LoaderConfig] = {}
        """To each trial; none is proposed twice by itself, whatever the objective makes of it."""
        self._belief: tuple[object, Belief] | None = None

    # What is known

    def record(self, asked: optuna.trial.Trial, trial: Trial) -> None:
        """Keep what a burst measured, or how it failed; call it in the objective before it returns or prunes.

        Args:
            asked: The trial that Optuna gave the objective.
            trial: What came of it.
        """
        self._turn_to(asked.study)
        trial = self._known[asked.number] = replace(trial, number=asked.number)
        asked.set_user_attr(RECORD, _record(trial))

    def go_on_in(self, study: optuna.Study) -> None:
        """Fill an empty study with all trials that are known, by their numbers, and go on there."""
        for number in range(max(self._known, default=-1) + 1):
            trial: dict[str, Any] = {"state": TrialState.FAIL}  # what another process was at
            if (known := self._known.get(number)) is not None:
                trial["state"] = TrialState.PRUNED if known.failure else TrialState.COMPLETE
                trial["value"] = known.samples_per_s
                trial["user_attrs"] = {RECORD: _record(known), **({} if known.round is None else {ROUND: known.round})}
                if self.space.holds(known.config):
                    trial["params"] = params = self.space.params(known.config)
                    trial["distributions"] = {name: self.space.distributions()[name] for name in params}
            study.add_trial(optuna.trial.create_trial(**trial))
        self._study = _name(study)
        self._turns.clear()

    def trials(self, study: optuna.Study) -> list[Trial]:
        """All that is known: what the study has, with the histories of this process' own bursts.

        Rounds of earlier runs are one where the first of this run contradicts them.
        """
        self._turn_to(study)
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))
        # Ctrl-C after a burst, before Optuna was told of it, makes a failed trial of what was measured.
        has_records = any(RECORD in each.user_attrs for each in done)
        for each in done:
            if RECORD in each.user_attrs and each.number not in self._known and (read := self._read(each, has_records)):
                self._known[each.number] = read
        found = [self._known.get(each.number) or self._read(each, has_records) for each in done]
        # No burst sees whether workers are kept: all have it as it is decided now.
        known = [replace(each, config=self.space.as_kept(each.config)) for each in found if each is not None]
        rounds = rounds_of([each for each in known if each.log_rate is not None])
        before = {number: each for number, each in rounds.items() if number < self.since}
        after = {number: each for number, each in rounds.items() if number >= self.since}
        if not after or not _contradicts(after[min(after)], [*before.values()]):
            return known
        return [replace(each, round=min(before)) if each.round in before else each for each in known]

    def belief(self, study: optuna.Study) -> Belief:
        """What the trials say of every configuration; of those that ran alone, where another sampler proposes, or many ran."""
        done = self.trials(study)
        is_open = self._is_open(study) and len({each.config.key() for each in done}) < MOST_TRIED
        all_trials, space, asked = study.get_trials(deepcopy=False), self.space, dict[str, BaseDistribution]()
        if self.is_open is None:  # an objective of the user's asks in its own way
            for each in all_trials:
                asked.update(each.distributions)
            is_whole = any(each.params.get("num_workers") for each in all_trials)
            space = space.asked(asked, is_whole=is_whole)
        # An earlier run with the same study may have been allowed more.
        trials = [each for each in done if each.failure is not None or space.holds(each.config)]
        # And what it makes of a proposal, where it cannot ask for that, is another configuration.
        ended = {each.number for each in all_trials if each.state.is_finished()}
        barred = {config.key() for number, config in self._proposed.items() if number in ended}
        barred -= {each.config.key() for each in done}
        if (workers := asked.get("num_workers")) is not None:
            barred |= {c.key() for c in space.candidates() if closest(workers, c.num_workers) != c.num_workers}
        version = (space, self.context, is_open, tuple((each.number, each.round) for each in trials), len(barred))
        if self._belief is None or self._belief[0] != version:
            known = Belief(space, self.context, trials, tolerance=self.tolerance, is_open=is_open, barred=barred)
            self._belief = version, known
        return self._belief[1]

    # What to do next

    def upcoming(self, study: optuna.Study) -> LoaderConfig | None:
        """What to measure next, and nobody else measures at this moment; None where nothing is worth it."""
        with LOCK, np.errstate(all="ignore"):  # a script may have made an error of an underflow
            self._turn_to(study)
            if not self._turns:
                self._plan(study)
            return self._turns[0][0] if self._turns else None

    def stop_when_safe(self, study: optuna.Study, _trial: FrozenTrial) -> None:
        """A callback of `study.optimize` that ends it when the choice is safe, or no further trial is worth its time."""
        if self.upcoming(study) is None and not study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
            study.stop()

    def take(self, study: optuna.Study, number: int) -> tuple[LoaderConfig, dict[str, int]] | None:
        """As `upcoming`, for the trial of this number; and the attributes of a trial that is part of a round."""
        with LOCK:
            if self.upcoming(study) is None:
                return None
            config, place = self._turns.popleft()
            self._proposed[number] = config
            if place is None:
                return config, {}
            self._round = number if place == 0 else self._round
            return config, {ROUND: self._round, ORDER: place}

    def is_within_round(self) -> bool:
        """Whether a round has begun that is not complete."""
        return any(place for _, place in self._turns)

    def _plan(self, study: optuna.Study) -> None:
        belief, left_s = self.belief(study), math.inf if self.seconds_left is None else self.seconds_left()
        choice, most = belief.choice, belief.most_workers
        taken = {trial.config.key() for trial in belief.trials}
        elsewhere = {config.key() for config in self._proposed.values()}
        elsewhere |= set() if choice is None else self._elsewhere(study)
        first = self.first if self._is_open(study) else []
        first = [config for config in first if config.num_workers <= most]
        first += [self.space.config({"num_workers": 0})] if choice is None else []
        untried = next((config for config in first if config.key() not in taken | elsewhere), None)
        again = () if choice is None else self._looked_at_again(belief, left_s)
        if again:
            self._turns += [(config, place) for place, config in enumerate(again)]
        elif untried is not None and (left_s > 0 or len(taken) < 2):
            self._turns.append((untried, None))
        elif untried is not None:
            self.stop_reason = "BUDGET"
        elif choice is not None:
            # In a study of another sampler that is only watched nobody runs rounds.
            is_watched = self.is_open is None and study.sampler is not self
            rounds = {trial.round for trial in belief.trials if trial.round is not None}
            found = what_next(
                belief,
                baseline=self.baseline,
                ceiling=self.ceiling,
                seconds_left=left_s,
                elsewhere=elsewhere,
                least_rounds=0 if is_watched else LEAST_ROUNDS,
                rounds_before=sum(each < self.since for each in rounds),
            )
            self.stop_reason = found.stop
            self._turns += [(config, place if found.is_round else None) for place, config in enumerate(found.configs)]

    def _looked_at_again(self, belief: Belief, left_s: float) -> tuple[LoaderConfig, ...]:
        """The first round of a run that goes on with an earlier one's: the best of its rounds, its rival, the caller's own."""
        ran = [each for each in belief.trials if each.round is not None and each.config.key() in belief.configs]
        if not ran or max(each.round or 0 for each in ran) >= self.since:
            return ()
        best = belief.choice_of([each.config for each in ran])
        own = self.baseline if self.baseline is not None and self.baseline.key() in belief.configs else best
        sides = list({config.key(): config for config in (best, own, belief.rival(best) or best)}.values())
        return tuple(in_turns(sides, len(belief.rounds))) if bursts_s(belief, sides) <= left_s else ()

    # What Optuna asks of a sampler

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:  # noqa: ARG002
        return {}  # Optuna refuses an objective that asks for a part of it in another way

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """A trial takes its turn, also where each knob has one value, so that Optuna asks for none."""
        if not _maximises(study) or "num_workers" in trial.system_attrs.get("fixed_params", {}):
            return
        _, attributes = self.take(study, trial.number) or (None, {})
        for name, value in attributes.items():
            study._storage.set_trial_user_attr(trial._trial_id, name, value)  # as Optuna's own samplers do
            trial.user_attrs[name] = value

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,  # noqa: ARG002
        search_space: dict[str, BaseDistribution],  # noqa: ARG002
    ) -> dict[str, Any]:
        _refuse_several(study)
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """What the objective can ask for that is nearest to the proposal; what is no setting of it is drawn at random."""
        _refuse_several(study)
        value = None
        if param_name in SEARCHED:
            if not _maximises(study):
                raise ValueError(f"TwinSampler maximises samples/s, and this study minimises. {WORKS}")
            self._turn_to(study)
            config = self._proposed.get(trial.number) or self.belief(study).choice or LoaderConfig()
            value = getattr(config, param_name)
            if value is None and None in getattr(param_distribution, "choices", ()):
                return None  # the user's own batch size
            if param_name == "prefetch_factor" and value is None:
                value = TORCH_PREFETCH_FACTOR  # asked for also without workers
            value = closest(param_distribution, value)
        if value is None:
            return self._random.sample_independent(study, trial, param_name, param_distribution)
        return value

    def _is_open(self, study: optuna.Study) -> bool:
        return study.sampler is self if self.is_open is None else self.is_open

    def _elsewhere(self, study: optuna.Study) -> set[LoaderConfig]:
        """What other processes, or threads of this one, measure at this moment."""
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        since = datetime.datetime.now() - datetime.timedelta(seconds=LOST_S)
        recent = [each for each in running if each.datetime_start is not None and each.datetime_start > since]
        return {self.space.config(each.params).key() for each in recent if "num_workers" in each.params}

    def _read(self, done: FrozenTrial, has_records: bool) -> Trial | None:
        """What is known of a trial: its record, where this release can read it; else its value, or that it failed."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return from_plain(json.loads(done.user_attrs[RECORD]), Trial)
        if "num_workers" not in done.params or (has_records and done.state is TrialState.FAIL):
            return None
        outcome: Measurement | Failure = Failure(kind="user_exception", phase="batches", message="pruned, or an error")
        if done.state is TrialState.COMPLETE and done.value is not None and done.value > 0:
            names = ("first_batch_s", "wait_share", "service_s", "service_cpu_s", "receive_s", "step_s")
            unknown: dict[str, Any] = dict.fromkeys(names, 0.0)
            rate = Interval(value=done.value, low=-math.inf, high=math.inf, count=1)
            outcome = Measurement(samples_per_s=rate, batch_size=1.0, **unknown)
        with contextlib.suppress(ValueError, TypeError):  # what an objective asks for may be no setting, as "auto"
            return Trial.of(done.number, self.space.config(done.params), outcome, round=done.user_attrs.get(ROUND))
        return None


def _name(study: optuna.Study) -> tuple[Any, ...]:
    """What tells a study from others: its name, of which there may be several in memory."""
    return study.study_name, study._storage if isinstance(study._storage, optuna.storages.InMemoryStorage) else None


def _record(trial: Trial) -> str:
    if trial.measurement is not None:
        trial = replace(trial, measurement=replace(trial.measurement, traces=(), stages=None))
    return json.dumps(to_plain(trial))


def _maximises(study: optuna.Study) -> bool:
    return list(study.directions) == [optuna.study.StudyDirection.MAXIMIZE]


def _refuse_several(study: optuna.Study) -> None:
    if len(study.directions) > 1:
        raise ValueError(f"TwinSampler maximises one value, and this study has {len(study.directions)}. {WORKS}")


def _contradicts(new: Round, before: Sequence[Round]) -> bool:
    """Whether a ratio in a round lies beyond all that earlier rounds had of it, by more than bursts differ."""
    for a, b in combinations(new.rates, 2):
        [ratio], told = log_ratios([new], a, b), log_ratios(before, a, b)
        if told and not min(told) - math.log1p(BURSTS_DIFFER) <= ratio <= max(told) + math.log1p(BURSTS_DIFFER):
            return True
    return False


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
