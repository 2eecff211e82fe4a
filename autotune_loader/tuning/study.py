"""The Optuna study behind a search: the only file that imports Optuna, and only when a study is opened.

Ask and tell, never `optimize()`: the search owns time and order. A configuration that failed is told as pruned with a
violated constraint, because samplers ignore a bare FAIL and propose the same again. Everything is also kept as user
attributes, so that a study is readable without this package, and so that it can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_loader.decision.space import MAX_WORKERS, Space
from autotune_loader.tuning.options import Search
from autotune_loader.tuning.study_storage import OWNER, is_abandoned, open_database, owner, patiently
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.secrets import without_secrets
from autotune_loader.values.serialization import from_plain, to_plain
from autotune_loader.values.trial import Trial, TrialRole

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
OBJECTIVE = "samples_per_s"
# Bounds of the integer knobs: wide and fixed, because Optuna refuses to resume a study whose bounds moved.
MOST_PREFETCH = 64
MOST_THREADS = 1024
# A lock left by a killed writer is taken over after this long; Optuna's own default of 30 s would stall a restart.
LOCK_GRACE_S = 3
# TPE's first trials are random; the twin's scouts take their place.
TPE_STARTUP_TRIALS = 4
# Axes that mean nothing without workers.
ONLY_WITH_WORKERS = ("in_order", "multiprocessing_context")
# Set on a study whose search came to its end; without it the next run goes on where this one was cut off.
FINISHED = "finished"


class OptunaStudy:
    """An Optuna study that speaks of configurations and trials, and that outlives its storage.

    Args:
        storage: None for memory, a URL (`sqlite:///...`, `postgresql://...`), or the path of a journal file.
        name: of the study; one study holds trials of one space on one kind of machine only.
        space: what may be proposed.
        search: which sampler proposes where the caller does not.
        seed: of the sampler.
        default_threads: what `consumer_threads=None` means here, so that it has a place on Optuna's scale.
        disposable: the storage is a journal that nobody asked for, kept so that a killed run can go on. A finished study
            in it is not resumed but started over, and so is a file that cannot be read.
    """

    def __init__(
        self,
        *,
        storage: str | None,
        name: str,
        space: Space,
        search: Search,
        seed: int,
        default_threads: int,
        disposable: bool = False,
    ) -> None:
        self._name = name
        self._space = space
        self._sampler = _sampler(search, seed)
        self._default_threads = default_threads
        self._seen: set[str] = set()
        self.study = self._disposable(str(storage)) if disposable and storage else self._opened(storage)
        self._drop_zombies()

    def _opened(self, storage: str | None) -> optuna.Study:
        import optuna

        with quiet_optuna():
            opened = _open_storage(storage)
            return patiently(
                lambda: optuna.create_study(
                    storage=opened,
                    study_name=self._name,
                    direction="maximize",
                    sampler=self._sampler,
                    pruner=optuna.pruners.NopPruner(),
                    load_if_exists=True,
                )
            )

    def _disposable(self, path: str) -> optuna.Study:
        """The unfinished study of a journal, or a new one; in memory where the file cannot be written."""
        try:
            study = self._opened(path)
            if not study.user_attrs.get(FINISHED):
                return study
        except Exception as error:
            log.warning("the journal %s cannot be resumed (%s) and is started over", path, without_secrets(str(error)))
        try:
            _empty(Path(path))
            return self._opened(path)
        except OSError as error:
            log.warning("%s; the study is kept in memory", without_secrets(str(error)))
            return self._opened(None)

    def ask(self, config: LoaderConfig | None = None) -> tuple[optuna.trial.Trial, LoaderConfig]:
        """A running Optuna trial of `config`, or of whatever the sampler proposes."""
        try:
            return patiently(lambda: self._asked(config), mend=self.close)
        except Exception as error:
            self._go_on_in_memory(error)
            return self._asked(config)

    def _asked(self, config: LoaderConfig | None) -> tuple[optuna.trial.Trial, LoaderConfig]:
        with quiet_optuna():
            if config is not None:
                return self._started(config), config
            trial = self.study.ask()
            trial.set_user_attr(OWNER, owner())
            return trial, self._suggest(trial)

    def _started(self, config: LoaderConfig) -> optuna.trial.Trial:
        """A running trial of just this configuration.

        It is created as it is: an enqueued one could be handed to any other process that shares the storage.
        """
        import optuna

        knobs = self._knobs(config)
        template = optuna.trial.FrozenTrial(
            number=-1,  # the storage gives number and id
            trial_id=-1,
            state=optuna.trial.TrialState.RUNNING,
            value=None,
            datetime_start=datetime.now(),
            datetime_complete=None,
            params=knobs,
            distributions={name: self._distribution(name) for name in knobs},
            user_attrs={OWNER: owner()},
            system_attrs={},
            intermediate_values={},
        )
        trial_id = self.study._storage.create_new_trial(self.study._study_id, template_trial=template)
        return optuna.trial.Trial(self.study, trial_id)

    def _distribution(self, name: str) -> optuna.distributions.BaseDistribution:
        from optuna.distributions import CategoricalDistribution, IntDistribution

        if name == "num_workers":
            return IntDistribution(0, MAX_WORKERS)
        if name == "prefetch_factor":
            return IntDistribution(1, MOST_PREFETCH, log=True)
        if name == "consumer_threads":
            return IntDistribution(1, MOST_THREADS, log=True)
        return CategoricalDistribution(self._searched()[name])

    def tell(self, asked: optuna.trial.Trial, trial: Trial) -> None:
        """Complete an asked trial: its rate as the value, everything else as attributes and constraints."""
        import optuna

        try:
            patiently(lambda: self._told(asked, trial), mend=self.close)
        except optuna.exceptions.UpdateFinishedTrialError:
            log.warning("trial %d took so long that another run of the study gave it up", trial.number)
        except Exception as error:
            self._go_on_in_memory(error)
            self._told(self._started(trial.config), trial)

    def _told(self, asked: optuna.trial.Trial, trial: Trial) -> None:
        import optuna

        attributes = _attributes(trial)
        self._seen.add(attributes["record"])
        with quiet_optuna():
            for name, value in attributes.items():
                asked.set_user_attr(name, value)
            for name, violation in _constraints(trial, self._space).items():
                _set_constraint(asked, name, violation)
            if trial.measurement is not None:
                self.study.tell(asked, trial.measurement.samples_per_s.value)
            else:
                self.study.tell(asked, state=optuna.trial.TrialState.PRUNED)

    def abandon(self, asked: optuna.trial.Trial) -> None:
        """Mark a trial that was interrupted: it carries no information."""
        import optuna

        with contextlib.suppress(Exception), quiet_optuna():
            self.study.tell(asked, state=optuna.trial.TrialState.FAIL)

    def finish(self) -> None:
        """Mark the study as searched to the end."""
        with contextlib.suppress(Exception), quiet_optuna():
            self.study.set_user_attr(FINISHED, True)
        self.close()

    def restored(self) -> list[Trial]:
        """The trials of earlier and other runs of the same study, in order, without traces; a repeated one once."""
        self._seen.clear()
        return self.news()

    def news(self) -> list[Trial]:
        """The trials that other runs of the same study have told since the last call."""
        texts = [
            frozen.user_attrs["record"]
            for frozen in patiently(lambda: self.study.get_trials(deepcopy=False), mend=self.close)
            if "record" in frozen.user_attrs and frozen.state.is_finished()
        ]
        new = [text for text in dict.fromkeys(texts) if text not in self._seen]
        self._seen.update(new)
        return [from_plain(json.loads(text), Trial) for text in new]

    def is_taken(self, config: LoaderConfig, by_now: optuna.trial.Trial | None = None) -> bool:
        """Whether another process that shares the study is running this configuration at the moment.

        Of two that began at once the first counts: with `by_now`, our own running trial, only earlier ones are looked at.
        """
        import optuna

        states, knobs = (optuna.trial.TrialState.RUNNING,), self._knobs(config)
        running = patiently(lambda: self.study.get_trials(deepcopy=False, states=states), mend=self.close)
        return any(
            frozen.params == knobs
            and not is_abandoned(frozen.user_attrs.get(OWNER), frozen.datetime_start)
            and (by_now is None or frozen.number < by_now.number)
            for frozen in running
        )

    def close(self) -> None:
        """Let go of a storage that holds connections."""
        with contextlib.suppress(Exception):
            storage = self.study._storage
            storage.remove_session()
            # Optuna leaves the pool's connections to the garbage collector, and psycopg warns of that.
            getattr(storage, "_backend", storage).engine.dispose()

    def _go_on_in_memory(self, error: Exception) -> None:
        """A full disk or a lost database must not lose the run: its study goes on without them."""
        reason = without_secrets(f"{type(error).__name__}: {error}")
        log.warning("the study's storage failed (%s); it goes on in memory", reason)
        lost, self.study = self.study, self._opened(None)
        with contextlib.suppress(Exception), quiet_optuna():
            self.study.add_trials(trial for trial in lost.get_trials(deepcopy=False) if trial.state.is_finished())

    def _drop_zombies(self) -> None:
        """Tell the trials that a killed run left running. Those of other live processes and machines stay."""
        import optuna

        states = optuna.trial.TrialState
        with quiet_optuna(), contextlib.suppress(Exception):
            for frozen in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
                if is_abandoned(frozen.user_attrs.get(OWNER), frozen.datetime_start):
                    self.study.tell(frozen.number, state=states.FAIL)

    def _knobs(self, config: LoaderConfig) -> dict[str, Any]:
        """Where a configuration lies on Optuna's scales. Beyond their ends is at their ends: `record` has the truth."""
        knobs: dict[str, Any] = {"num_workers": min(config.num_workers, MAX_WORKERS)}
        if config.prefetch_factor is not None:
            knobs["prefetch_factor"] = min(config.prefetch_factor, MOST_PREFETCH)
        for name, values in self._searched().items():
            value = getattr(config, name)
            if name in ONLY_WITH_WORKERS and not config.num_workers:
                continue
            if name == "consumer_threads":
                knobs[name] = min(value or self._default_threads, MOST_THREADS)
            elif value in values:
                knobs[name] = value
        return knobs

    def _searched(self) -> dict[str, list[Any]]:
        """The categorical knobs that have more than one value here."""
        axes: dict[str, tuple[Any, ...]] = {
            "pin_memory": self._space.pin_memory,
            "device_prefetch": self._space.device_prefetch,
            "in_order": self._space.in_order,
            "multiprocessing_context": self._space.multiprocessing_contexts,
            "sharing_strategy": self._space.sharing_strategies,
            "batch_size": self._space.batch_sizes,
            "drop_last": self._space.drop_lasts,
            "consumer_threads": self._space.consumer_threads,
        }
        return {name: list(values) for name, values in axes.items() if len(values) > 1}

    def _suggest(self, trial: optuna.trial.Trial) -> LoaderConfig:
        workers = trial.suggest_int("num_workers", 0, MAX_WORKERS)
        values: dict[str, Any] = {"num_workers": min(workers, self._space.max_workers)}
        if workers:
            prefetch = trial.suggest_int("prefetch_factor", 1, MOST_PREFETCH, log=True)
            values["prefetch_factor"] = min(self._space.prefetch_factors, key=lambda legal: abs(legal - prefetch))
            values["persistent_workers"] = self._space.persistent_workers
        for name, choices in self._searched().items():
            if name == "consumer_threads":
                threads = trial.suggest_int(name, 1, MOST_THREADS, log=True)
                legal = {count or self._default_threads: count for count in choices}
                values[name] = legal[min(legal, key=lambda count: abs(count - threads))]
            elif name not in ONLY_WITH_WORKERS or workers:
                values[name] = trial.suggest_categorical(name, choices)
        if values["num_workers"] == 0:
            values = {k: v for k, v in values.items() if k not in ("prefetch_factor", "persistent_workers")}
        return LoaderConfig(**{"drop_last": self._space.drop_lasts[0], **values})


def _sampler(search: Search, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    if search in ("random", "grid"):  # the search itself walks the grid and enqueues it
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=TPE_STARTUP_TRIALS, multivariate=False, constant_liar=False
        )


def journal_beside(output: str | None) -> str | None:
    """Where the study of a run that writes `output` is kept."""
    return None if output is None else f"{output}.journal"


def _open_storage(storage: str | None) -> Any:
    """None for memory, an URL as it is, a path as a journal file that is readable by its owner alone."""
    if storage is None:
        return None
    if "://" in storage:
        return open_database(storage)
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    path = Path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    lock = _locked(path, _mend_torn_tail)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _locked(path: Path, change: Callable[[Path], None]) -> Any:
    """Change a journal file under its lock; the lock."""
    from optuna.storages.journal import JournalFileSymlinkLock

    lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_GRACE_S)
    lock.acquire()
    try:
        change(path)
    finally:
        lock.release()
    return lock


def _empty(path: Path) -> None:
    _locked(path, lambda journal: os.truncate(journal, 0))


def _mend_torn_tail(path: Path) -> None:
    """Cut a journal back to its last whole line.

    After a kill in the middle of a write Optuna loads such a file, but its next append joins the torn line and is lost.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        log.warning("%s ended in the middle of a line; the last %d bytes were dropped", path, len(data) - whole)
        with path.open("r+b") as stream:
            stream.truncate(whole)


def _attributes(trial: Trial) -> dict[str, Any]:
    """What a person, a dashboard or a resumed run wants to know; plain JSON values only."""
    values: dict[str, Any] = {"role": trial.role, "config": trial.config.to_dict(), "seconds": round(trial.seconds, 3)}
    lean = trial
    if trial.measurement is not None:
        values |= _metrics(trial.measurement)
        lean = replace(trial, measurement=replace(trial.measurement, traces=()))
    if trial.failure is not None:
        values |= _failure(trial.failure)
    if trial.predicted_samples_per_s is not None:
        values["predicted_samples_per_s"] = float(trial.predicted_samples_per_s)
    plain: dict[str, Any] = to_plain(values)
    return {**plain, "record": json.dumps(to_plain(lean), allow_nan=False)}


def _metrics(measurement: Measurement) -> dict[str, Any]:
    rate, memory = measurement.samples_per_s, measurement.memory
    return {
        "samples_per_s": rate.value,
        "samples_per_s_low": rate.low,
        "samples_per_s_high": rate.high,
        "wait_share": measurement.wait_share,
        "first_batch_s": measurement.first_batch_s,
        "cpu_share": measurement.cpu_share,
        "rss_bytes": memory.rss_bytes if memory else None,
        "pss_bytes": memory.pss_bytes if memory else None,
        "gpu_util": measurement.gpu.util,
    }


def _failure(failure: Failure) -> dict[str, Any]:
    return {"failure_kind": failure.kind, "failure_phase": failure.phase, "failure_message": failure.message}


def _constraints(trial: Trial, space: Space) -> dict[str, float]:
    """Optuna's convention: a positive value violates. A failed trial violates by 1, so that no sampler returns there."""
    values = {"failed": 0.0 if trial.failure is None else 1.0}
    if space.limits.memory_bytes:
        values["memory"] = space.memory_need(trial.config) / space.limits.memory_bytes - 1.0
    return values


def _set_constraint(trial: optuna.trial.Trial, name: str, violation: float) -> None:
    trial.set_user_attr(f"constraint_{name}", violation)  # optuna-dashboard does not show the real ones yet
    if hasattr(trial, "set_constraint"):  # Optuna 5
        trial.set_constraint(name, violation)


def role_of(config: LoaderConfig, own: LoaderConfig | None) -> TrialRole:
    if own is not None and config == own:
        return "baseline"
    return "default" if config == LoaderConfig() else "search"


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna without its chatter and experimental warnings; its verbosity is global, so it is put back."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
