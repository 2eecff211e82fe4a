"""The Optuna study of a tuning run, opened and run: any storage, any sampler, several processes at once.

optimize: propose ─► veto ─► burst ─► record ─► is it decided?
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import optuna
from optuna.storages import BaseStorage

from autotune_loader.bursts.protocol import Probe
from autotune_loader.diagnosis.messages import Caution, Ended
from autotune_loader.report.progress import Progress
from autotune_loader.search.belief import Belief, starting_s
from autotune_loader.search.rule import begin_with
from autotune_loader.search.sampler import ROUND, TwinSampler, quiet_optuna
from autotune_loader.tuning.arguments import in_a_loader, refuse
from autotune_loader.tuning.bursting import HAND_OVER_WORKERS, Budget, Bursts
from autotune_loader.tuning.run import Run
from autotune_loader.values import TORCH_PREFETCH_FACTOR, LoaderConfig, Measurement, Trial
from autotune_loader.values.serialization import what_works

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)

JOB, BATCH_BYTES, CHOSEN = "job", "batch_bytes", "chosen"
"""Attributes of a study: whose trials it has, how large their batches are, and the configuration that was chosen."""
BATCHES_DIFFER = 2.0
"""Batches of one job that are padded differ, though not by so many times; those of other transforms may."""
LONG_START = 0.05
"""Of an epoch: where workers take more than this to start, they are kept, although they keep the dataset as it was."""
SAMPLERS_SHARE = 0.5
"""Share of the budget in which another sampler proposes; rounds of the best that it has found need the rest."""
HAND_OVER_FROM_S = 10.0
"""A shorter budget has no room to measure what can be handed over; then batches are pinned."""
MOST_REPEATS = 5
"""Another sampler that repeats itself so often in a row has seen all of a small space."""


def check_study(study: Any, sampler: Any) -> None:
    """Check the study and the sampler of the user.

    Raises:
        TypeError, ValueError: one is not Optuna's, or the study does not maximise one value.
    """
    works = "study=optuna.create_study(direction='maximize')"
    refuse(not isinstance(study, (optuna.Study, type(None))), f"study={study!r:.60} is not an optuna.Study", works)
    is_sampler = sampler is None or isinstance(sampler, optuna.samplers.BaseSampler)
    of_torch = hasattr(sampler, "__iter__") and not isinstance(sampler, str)
    works_instead = in_a_loader("sampler") if of_torch else "sampler=optuna.samplers.TPESampler()"
    refuse(not is_sampler, f"sampler={sampler!r:.60} is not an Optuna sampler", works_instead)
    if study is not None:
        wanted = [optuna.study.StudyDirection.MAXIMIZE]
        refuse(study.directions != wanted, "study= must maximise one value, the samples/s", works, ValueError)


def open_study(storage: str | None = None, name: str = "autotune_loader") -> optuna.Study:
    """A study for `tune(study=...)`, which is continued if its storage has it.

    Args:
        storage: URL of a database, or the path of a journal file, which only its owner can read; None for memory.
        name: of the study in its storage.

    Raises:
        ValueError: the storage cannot be opened.
    """
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


class Search:
    """One search: what it tries, what it knows, and why it ended.

    Args:
        run: the job.
        probe: runs the bursts.
        study: gets every trial; None for one in memory.
        sampler: proposes; None for the twin.
        budget: of the bursts.
        progress: shows every trial and round.
        suggestions: tried first, such as an earlier run's best.

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
        self.run, self.budget, self._sampler, self._progress = run, budget, sampler, progress
        progress.unit = run.warmup.rate_unit
        self._suggestions, self._repeats = list(suggestions), 0
        self.study, self._is_theirs = open_study() if study is None else study, study is not None
        if (job := self.study.user_attrs.get(JOB, run.identity)) != run.identity:
            wrong = f"study={self.study.study_name!r} has trials of another job ({job})"
            raise ValueError(f"{wrong}. Try a separate study for each job.")
        own = max(run.warmup.batch_bytes, 1)
        theirs = self.study.user_attrs.get(BATCH_BYTES, own)
        if not theirs / BATCHES_DIFFER <= own <= theirs * BATCHES_DIFFER:
            wrong = f"study={self.study.study_name!r} has trials with batches of {theirs:,} bytes, and this job's have {own:,}"
            raise ValueError(f"{wrong}. Try a separate study for each job.")
        self.twin = TwinSampler(run.space, run.context, tolerance=run.tolerance, baseline=run.baseline, first=())
        self.twin.since = len(self.study.get_trials(deepcopy=False))
        self.bursts = Bursts(probe, run.context, budget, lambda: self.trials, run.warmup.first_batch_s)
        self._expecting = self.belief
        """What the bursts of this round were proposed by."""
        self.ceiling: Measurement | None = None
        """The step alone; None without one."""
        self.handed_over: Measurement | None = None
        """Batches that lie ready through DataLoader to an accelerator; None without one."""
        self.ended = Ended.ASKED

    @property
    def trials(self) -> list[Trial]:
        """All trials of the study that were told, in order."""
        return self._kept(lambda: self.twin.trials(self.study))

    @property
    def belief(self) -> Belief:
        """What the trials say."""
        return self._kept(lambda: self.twin.belief(self.study))

    @property
    def least_ceiling(self) -> Measurement | None:
        """What no configuration can exceed: copies ahead of the step may, where these are allowed, exceed the transfer."""
        is_ahead = len(self.run.space.device_prefetch) > 1
        return self.ceiling if is_ahead or self.handed_over is None else self.handed_over

    def decide(self) -> None:
        """Run bursts until there is a reason to stop; on Ctrl-C what was found so far is kept.

        Where the study's storage fails, the search goes on in memory with what was measured.

        Raises:
            KeyboardInterrupt: nothing was measured yet.
        """
        theirs, before = self.study, self.study.sampler
        with quiet_optuna():
            try:
                if self.run.workload.has_step:
                    self.ceiling = self.bursts.step_alone()
                self._hand_over()
                self._kept(self._search)
            except (KeyboardInterrupt, UnboundLocalError) as error:
                # Optuna's `_run_trial` answers a Ctrl-C within its `tell` with an UnboundLocalError.
                if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__context__, KeyboardInterrupt):
                    raise
                if self.fastest() is None:
                    raise KeyboardInterrupt from None
                self.ended = Ended.INTERRUPTED
            finally:
                if self._is_theirs:
                    theirs.sampler = before

    def fastest(self) -> Trial | None:
        """The successful trial with the highest measured rate."""
        measured = [trial for trial in self.trials if trial.measurement is not None]
        return max(measured, key=lambda trial: trial.samples_per_s or 0.0, default=None)

    def keep_workers_of(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with workers that outlive an epoch where their start takes much of one, and all others alike."""
        if self.run.may_keep_workers:
            self.run = replace(
                self.run, space=replace(self.run.space, persistent_workers=self._starting_share(config) > LONG_START)
            )
            self.twin.space = self.run.space
        return self.run.space.as_kept(config)

    def tell(self, chosen: LoaderConfig) -> None:
        """Note in the study what was chosen."""
        try:
            self.study.set_user_attr(CHOSEN, chosen.to_dict())
        except Exception as error:
            if _of_storage(error) is None:
                raise
            log.warning("The choice is not noted in study=%r (%s).", self.study.study_name, type(error).__name__)

    def _starting_share(self, config: LoaderConfig) -> float:
        """The seconds in which its workers start, as a share of an epoch without them; 0 where they are not known."""
        measured = [(each.config, m) for each in self.trials if (m := each.measurement)]
        rates = [m.samples_per_s.value / m.batch_size for of, m in measured if of.key() == config.key()]
        context = self.run.context
        if not rates or not context.epoch_batches:
            return 0.0
        return starting_s(self.trials, config.num_workers, context) * rates[-1] / context.epoch_batches

    def _kept(self, call: Callable[[], Answer]) -> Answer:
        """The answer of a call that asks the study; where its storage fails, that of a study in memory with the same trials."""
        try:
            return call()
        except Exception as error:
            if (cause := _of_storage(error)) is None:
                raise
            lost = Caution.STORAGE_LOST(name=self.study.study_name, why=type(cause).__name__).sentence
            log.warning("%s", lost)
            self.run, self.study = replace(self.run, notes=(*self.run.notes, lost)), open_study()
            self.twin.go_on_in(self.study)
            return call()

    def _hand_over(self) -> None:
        """Measure what any number of workers can hand over to an accelerator; that decides whether batches are pinned."""
        run, space = self.run, self.run.space
        if self.ceiling is None or run.workload.on_cpu or run.warmup.on_accelerator or not space.max_workers:
            return
        workers = min(HAND_OVER_WORKERS, run.context.usable_cores, space.max_workers)
        config = space.as_set(LoaderConfig().with_workers(workers, TORCH_PREFETCH_FACTOR))
        # The first, which is kept unless another is faster, runs once more: what disturbs one burst shall not decide.
        kinds = (*space.pin_memory, *space.pin_memory[:1]) if len(space.pin_memory) > 1 else space.pin_memory
        if self.budget.seconds < HAND_OVER_FROM_S:
            kinds = ()
        tried = [(pinned, self.bursts.hand_over(replace(config, pin_memory=pinned))) for pinned in kinds]
        measured = [(each.samples_per_s.value, pinned, each) for pinned, each in tried if each is not None]
        best = space.pin_memory[0]
        if measured:
            _, best, self.handed_over = max(measured, key=lambda each: each[0])
        values = tuple(dict.fromkeys([best, *(own.pin_memory for own in space.also)]))
        self.run = replace(run, space=replace(space, pin_memory=values, is_pinning_decided=True))
        self.twin.space = self.run.space

    def _search(self) -> None:
        """The twin proposes everything; or another sampler for a while, and then the twin rounds of the best of it."""
        run, study, twin = self.run, self.study, self.twin
        study.set_user_attr(JOB, run.identity)
        study.set_user_attr(BATCH_BYTES, max(run.warmup.batch_bytes, 1))
        twin.context, twin.seconds_left, twin.is_open = self.bursts.context, self.budget.left, self._sampler is None
        ceiling = self.least_ceiling
        if ceiling is not None and len(run.space.batch_size) == 1:  # batches of another size have another ceiling
            twin.ceiling = ceiling.samples_per_s.value
        twin.first = begin_with(run.space, twin.context, own=run.baseline, suggested=self._suggestions)
        study.sampler = self._sampler or twin
        if self._sampler is None:
            if twin.upcoming(study) is not None:
                study.optimize(self._objective, callbacks=[self._show_round, twin.stop_when_safe])
        else:
            for config in twin.first:
                study.enqueue_trial(run.space.params(config), skip_if_exists=True)
            study.optimize(self._objective, callbacks=[self._stop_sampling])
            while (turn := twin.take(study, len(study.get_trials(deepcopy=False)))) is not None:
                config, attributes = turn
                study.enqueue_trial(run.space.params(config), user_attrs=attributes)
                study.optimize(self._objective, n_trials=1, callbacks=[self._show_round])
        self.ended = Ended[twin.stop_reason or "ASKED"]

    def _objective(self, asked: optuna.Trial) -> float:
        """One trial: samples/s of the configuration that the sampler proposes."""
        run, begun, trials = self.run, self.budget.clock(), self.trials
        config, number = run.space.suggest(asked), asked.user_attrs.get(ROUND)
        known = next((each for each in reversed(trials) if each.config == config), None)
        self._repeats = 0 if known is None else self._repeats + 1
        failure = run.space.veto(config) if known is None or number is not None else known.failure
        if number in (None, asked.number):
            self._expecting = self.belief
        if failure is None:
            expected = self._expecting.predicted(config)
            # Sides of a round read the same, where none of it comes from storage and so from memory for the next.
            latest = next((each for each in reversed(trials) if each.measurement), None)
            place = number if latest is None or self.bursts.read_memory(latest) else None
            trial = self.bursts.run(config, asked.number, number, predicted=expected, place=place)
            if trial.measurement is not None and (margin := run.space.over_margin(config, trial.measurement)):
                trial = replace(trial, measurement=None, failure=margin)
        else:
            trial = Trial(number=asked.number, config=config, failure=failure, seconds=self.budget.clock() - begun)
        self.twin.record(asked, trial)
        fastest = self.fastest()
        if fastest is not None and trial.measurement is not None and not run.space.persistent_workers:
            self.keep_workers_of(fastest.config)
            fastest = self.fastest()  # told as it is kept
        self._progress.trial(trial, fastest, self.budget.left())
        if trial.failure is not None:  # samplers ignore a bare FAIL and propose it again
            raise optuna.TrialPruned(trial.failure.message)
        assert trial.samples_per_s is not None
        return trial.samples_per_s

    def _show_round(self, _: optuna.Study, done: optuna.trial.FrozenTrial) -> None:
        """Show a round once its last side has run."""
        if done.user_attrs.get(ROUND) is not None and not self.twin.is_within_round():
            rounds = self.belief.rounds
            self._progress.round(len(rounds), rounds[-1].rates if rounds else {}, self.budget.left())

    def _stop_sampling(self, study: optuna.Study, _: optuna.trial.FrozenTrial) -> None:
        """End the proposals of another sampler that has had its share of the budget, or repeats itself."""
        if self._repeats >= MOST_REPEATS or self.budget.left() < SAMPLERS_SHARE * self.budget.seconds:
            study.stop()


def _of_storage(error: Exception) -> BaseException | None:
    """What a storage of Optuna's has raised, whose database is locked or gone; None of another error, and of a wrong value."""
    # So Optuna's `_run_trial` answers an error of its `tell`.
    raised = error.__context__ if isinstance(error, (UnboundLocalError, AssertionError)) else error
    if type(raised) in (ValueError, TypeError) or not isinstance(raised, Exception):  # a broken journal is a subclass
        return None
    frames = [frame for frame, _ in traceback.walk_tb(raised.__traceback__)]
    return raised if any(isinstance(frame.f_locals.get("self"), BaseStorage) for frame in frames) else None
