"""The Optuna study of a tuning run: opened, run, and told what was chosen.

    enqueue what arithmetic suggests ─► optimize: suggest ─► veto ─► burst ─► record ─► callbacks that stop ─► rounds ─► choice

The study is Optuna's and the user's: any storage, any sampler, several processes at once. A failure is pruned, with its reason,
because samplers ignore a bare FAIL and propose it again.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from autotune_loader.bursts.protocol import Probe
from autotune_loader.diagnosis.tables import Ended
from autotune_loader.report.progress import Progress
from autotune_loader.search.rounds import Rounds, RoundsOutcome
from autotune_loader.search.rule import begin_with
from autotune_loader.search.sampler import TwinSampler, quiet_optuna
from autotune_loader.tuning.bursting import Budget, Bursts, run_rounds
from autotune_loader.tuning.run import Run
from autotune_loader.values import LoaderConfig, Measurement, Trial, what_works

if TYPE_CHECKING:
    import optuna

JOB, CHOSEN, ROUNDS = "job", "chosen", "rounds"
"""Attributes of a study: whose trials it has, the configuration that was chosen, and the rates of each round."""
ROUNDS_SHARE = 0.5
"""Share of the budget that is left for the rounds."""
LEAST_ROUNDS = 3
"""For so many rounds time is kept, also where that is more than the share."""
MOST_REPEATS = 5
"""A sampler that proposes so often in a row what it has proposed before has nothing new to say."""
MOST_OVERRUN_S = 2.0
"""A first round that would overrun the budget by more than this is not begun."""


def open_study(storage: str | None = None, name: str = "autotune_loader") -> optuna.Study:
    """A study for `tune(study=...)`, gone on with where it is there already.

    Args:
        storage: URL of a database, or the path of a journal file, which is readable by its owner alone; None for memory.
        name: of the study in its storage.

    Raises:
        ValueError: the storage cannot be opened.
    """
    optuna = _imported_optuna()
    kept: Any = storage
    with quiet_optuna():
        try:
            if storage is not None and "://" not in storage:
                from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

                Path(storage).parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(storage, os.O_CREAT | os.O_RDWR, 0o600))
                # The lock of a writer that was killed is taken over after 3 s; Optuna's default is 30.
                lock = JournalFileSymlinkLock(storage, grace_period=3)
                kept = optuna.storages.JournalStorage(JournalFileBackend(storage, lock_obj=lock))
            return optuna.create_study(
                storage=kept,
                study_name=name,
                direction="maximize",
                pruner=optuna.pruners.NopPruner(),
                load_if_exists=True,
            )
        except Exception as error:
            # Neither the URL nor what databases and their drivers say of it is quoted: it may have a password.
            works = what_works("storage", "study.journal")
            raise ValueError(f"storage cannot be opened ({type(error).__name__}){works}") from None


def _imported_optuna() -> Any:
    """Optuna, imported in a thread: it keeps errors of what is not installed, and with them the frames of `tune()`."""
    thread = threading.Thread(target=importlib.import_module, args=("optuna",))
    thread.start()
    thread.join()
    return importlib.import_module("optuna")


class Search:
    """One search: what it tries, what it knows, and why it ended.

    Args:
        run: the job.
        probe: runs the bursts.
        study: is told every trial; None for one in memory.
        sampler: proposes; None for the twin.
        budget: of bursts, from when their process is warm.
        progress: told what happens.
        suggestions: tried after the user's own configuration, such as an earlier run's best.

    Raises:
        ValueError: the study has trials of another job.
    """

    def __init__(
        self,
        run: Run,
        probe: Probe,
        study: optuna.Study | None = None,
        sampler: optuna.samplers.BaseSampler | None = None,
        *,
        budget: Budget,
        progress: Progress,
        suggestions: Iterable[LoaderConfig] = (),
    ) -> None:
        self.run, self._sampler, self._progress = run, sampler, progress
        self.budget, self._suggestions, self._repeats = budget, list(suggestions), 0
        self.study = open_study() if study is None else study
        if self.study.user_attrs.get(JOB, run.identity) != run.identity:
            raise ValueError(
                f"study={self.study.study_name!r} has trials of another job ({self.study.user_attrs[JOB]}); "
                "a study of its own for each job would work"
            )
        self.bursts = Bursts(probe, run.context, budget, run.warmup.first_batch_s)
        self.twin: TwinSampler = TwinSampler(run.space, run.context, tolerance=run.tolerance)
        self.ceiling: Measurement | None = None
        self.rounds: Rounds | None = None
        self.ended: Ended | None = None

    @property
    def trials(self) -> list[Trial]:
        """All trials of the study that were told, and those of the rounds, in order."""
        return self.twin.trials(self.study)

    @property
    def outcome(self) -> RoundsOutcome | None:
        """What the rounds say; None where none was completed."""
        return None if self.rounds is None else self.rounds.outcome()

    def decide(self) -> None:
        """Search until there is a reason to stop, then run the rounds; on Ctrl-C what was found so far is kept.

        Raises:
            KeyboardInterrupt: nothing was measured yet.
        """
        with quiet_optuna():
            try:
                self._time_step()
                self.study.set_user_attr(JOB, self.run.identity)
                self._explore()
                self._race()
            except KeyboardInterrupt:
                if self.fastest() is None:
                    raise
                self.ended = Ended.INTERRUPTED

    def tell(self, chosen: LoaderConfig) -> None:
        """Write the choice, and the rounds that it rests on, into the study."""
        outcome = self.outcome
        told = () if outcome is None else outcome.rounds
        self.study.set_user_attr(CHOSEN, chosen.to_dict())
        self.study.set_user_attr(ROUNDS, [{str(side): rate for side, rate in each.rates.items()} for each in told])

    def fastest(self) -> Trial | None:
        """The successful trial with the highest measured rate."""
        return max(self._measured(), key=lambda trial: trial.samples_per_s or 0.0, default=None)

    def _measured(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.measurement is not None]

    # The search

    def _time_step(self) -> None:
        """The step alone: the ceiling, and what the twin needs of it."""
        if self.run.workload.has_step:
            measured = self.bursts.step_alone()
            self.ceiling = measured if isinstance(measured, Measurement) else None
        self.twin.ceiling, self.twin.context = self._ceiling_rate(), self.bursts.context

    def _ceiling_rate(self) -> float | None:
        """Samples/s of the step alone; None where batches of another size, with another ceiling, are searched as well."""
        has_one_size = len(self.run.space.batch_sizes) == 1
        return self.ceiling.samples_per_s.value if self.ceiling is not None and has_one_size else None

    def _explore(self) -> None:
        run, warmup = self.run, self.run.warmup
        own, *others = begin_with(
            run.space,
            self.bursts.context,
            own=run.baseline,
            fetch_s=warmup.first_fetch_s,
            fetch_cpu_s=warmup.first_fetch_cpu_s,
        )
        suggested = [each for each in self._suggestions if run.space.veto(each) is None]
        self.twin.first = list(dict.fromkeys([own, *suggested, *others]))
        self.study.sampler = self._sampler or self.twin
        for config in self.twin.first if self._sampler is not None else ():
            self.study.enqueue_trial(run.space.params(config), skip_if_exists=True)
        safe = [self.twin.stop_when_safe] if self._sampler is None else []
        stops: list[Any] = [self._stop_in_time, self._stop_repeating, *safe]
        if self._sampler is not None or self.twin.wants_more(self.study):
            self.study.optimize(self._objective, callbacks=stops)
        if self.ended is None:
            reason = self.twin.stop_reason if self._sampler is None else None
            self.ended = Ended[reason or "ASKED"]

    def _objective(self, asked: optuna.Trial) -> float:
        """One trial: samples/s of the configuration that the sampler proposes."""
        import optuna

        run, begun = self.run, self.budget.clock()
        config = run.space.suggest(asked)
        known = next((each for each in reversed(self.trials) if each.config == config), None)
        self._repeats = 0 if known is None else self._repeats + 1
        failure = run.space.veto(config) if known is None else known.failure
        if failure is None:
            trial = self.bursts.search(config, asked.number, self.twin.belief(self.study).predicted(config))
            if trial.measurement is not None and (margin := run.space.over_margin(config, trial.measurement)):
                trial = replace(trial, measurement=None, failure=margin)
        else:
            trial = Trial(number=asked.number, config=config, failure=failure, seconds=self.budget.clock() - begun)
        self.twin.record(asked, trial)
        self._progress.trial(trial, self.fastest(), self.budget.left())
        if trial.failure is not None:
            raise optuna.TrialPruned(trial.failure.message)
        assert trial.samples_per_s is not None
        return trial.samples_per_s

    def _stop_in_time(self, study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
        """A callback: what is left is kept for the rounds."""
        trials = [each for each in self.trials if each.round is None]
        measured = [each for each in trials if each.measurement is not None]
        next_s, kept_s, fastest = median([each.seconds for each in measured] or [0.0]), 0.0, self.fastest()
        if fastest is not None:
            # What failures took is lost to search and rounds alike: a hang must not end the search before it looked below.
            lost_s = sum(each.seconds for each in trials if each.measurement is None)
            kept_s = round_s = self._round_s([fastest.config, self.run.baseline])
            if len({each.config.key() for each in measured}) > 1:
                kept_s = max((self.budget.seconds - lost_s) * ROUNDS_SHARE, LEAST_ROUNDS * round_s)
        if self.budget.left() - next_s < kept_s:
            self.ended = Ended.BUDGET
            study.stop()

    def _stop_repeating(self, study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
        """A callback: the sampler repeats itself."""
        if self._repeats >= MOST_REPEATS:
            self.ended = Ended.SAMPLER
            study.stop()

    # The rounds

    def _race(self) -> None:
        """Rounds between the best few and the baseline, as time allows; a baseline that failed would only fail again."""
        run = self.run
        sides = self.twin.belief(self.study).shortlist()
        outcomes = [each for each in self.trials if each.config == run.baseline]
        beside = [] if outcomes and outcomes[-1].measurement is None else [run.baseline]
        while len(sides) > 1 and self._round_s([*sides, *beside]) > self.budget.left():
            sides.pop()
        if not sides or self._round_s([*sides, *beside]) - self.budget.left() > MOST_OVERRUN_S:
            return
        self.rounds = Rounds(
            sides,
            beside[0] if beside else sides[0],
            tolerance=run.tolerance,
            cost=run.space.cost,
            believe=lambda: self.twin.belief(self.study),
            ceiling=self._ceiling_rate(),
        )
        run_rounds(self.rounds, self._in_round, self.budget, self._after_round)

    def _in_round(self, config: LoaderConfig, number: int) -> Trial:
        trials = self.trials
        trial = self.bursts.in_round(config, number, 1 + max((each.number for each in trials), default=-1))
        self.twin.rounds.append(trial)
        return trial

    def _after_round(self, rates: dict[LoaderConfig, float]) -> None:
        assert self.rounds is not None
        self._progress.round(self.rounds.number, rates, self.budget.left())
        self.rounds.admit(lambda: self.twin.belief(self.study).shortlist())

    def _round_s(self, configs: Iterable[LoaderConfig]) -> float:
        return sum(map(self.bursts.burst_s, {each.key(): each for each in configs}.values()))
