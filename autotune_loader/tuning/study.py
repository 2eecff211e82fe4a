"""The Optuna study behind a search: the only file that imports Optuna, and only when a study is opened.

Ask and tell, never `optimize()`: the search owns time and order. A configuration that failed is told as pruned with a
violated constraint, because samplers ignore a bare FAIL and propose the same again. Everything is also kept as user
attributes, so that a study is readable without this package, and so that it can be resumed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import Fingerprint
from autotune_loader.tuning.options import Search
from autotune_loader.tuning.study_knobs import Knobs
from autotune_loader.tuning.study_storage import OWNER, is_abandoned, open_database, owner, patiently
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.secrets import without_secrets
from autotune_loader.values.serialization import from_plain, to_plain
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
# Set on a study whose search came to its end; without it the next run goes on where this one was cut off.
FINISHED = "finished"

# A configuration that another host is measuring is passed over this long; then that host counts as lost.
TAKEN_PATIENCE_S = 15.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A configuration that is ours to measure, and its running Optuna trial."""

    asked: optuna.trial.Trial
    config: LoaderConfig


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
        self._knobs = Knobs(space, default_threads)
        self._seen: set[str] = set()
        self._arrived: list[Trial] = []
        self._passed_over: dict[LoaderConfig, float] = {}
        self.study = self._disposable(str(storage)) if disposable and storage else self._opened(storage)
        _drop_zombies(self.study)

    def _opened(self, storage: str | None) -> optuna.Study:
        with quiet_optuna():
            import optuna

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
            _locked(Path(path), lambda journal: os.truncate(journal, 0))
            return self._opened(path)
        except OSError as error:
            log.warning("%s; the study is kept in memory", without_secrets(str(error)))
            return self._opened(None)

    def claim(self, config: LoaderConfig | None, now: float) -> Claim | None:
        """The configuration, or what the sampler proposes, if nobody else has measured it or is about to; else None.

        Args:
            config: None lets the sampler propose.
            now: seconds, on the caller's clock.
        """
        if config is not None and self._is_others(config, now):
            return None
        claim = self.ask(config)
        if self._is_others(claim.config, now, by_now=claim.asked):
            self.abandon(claim)
            return None
        return claim

    def arrived(self) -> list[Trial]:
        """What other hosts have told since the last call."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def passed_over(self, now: float) -> set[LoaderConfig]:
        """What other hosts were seen to be measuring a moment ago."""
        return {config for config, since in self._passed_over.items() if now - since <= TAKEN_PATIENCE_S}

    def _is_others(self, config: LoaderConfig, now: float, by_now: optuna.trial.Trial | None = None) -> bool:
        self._arrived += (news := self.news())
        if any(trial.config == config for trial in news):
            return True
        if not self.is_taken(config, by_now) or now - self._passed_over.setdefault(config, now) > TAKEN_PATIENCE_S:
            return False
        time.sleep(0.05)  # the search asks again at once
        return True

    @contextlib.contextmanager
    def abandoning(self, claim: Claim) -> Iterator[None]:
        """Gives the claim up where measuring is interrupted."""
        try:
            yield
        except BaseException:
            self.abandon(claim)
            raise

    def ask(self, config: LoaderConfig | None = None) -> Claim:
        """A running Optuna trial of `config`, or of whatever the sampler proposes."""
        try:
            return patiently(lambda: self._asked(config), mend=self.close)
        except Exception as error:
            self._go_on_in_memory(error)
            return self._asked(config)

    def _asked(self, config: LoaderConfig | None) -> Claim:
        with quiet_optuna():
            if config is not None:
                return Claim(self._started(config), config)
            trial = self.study.ask()
            trial.set_user_attr(OWNER, owner())
            return Claim(trial, self._knobs.suggest(trial))

    def _started(self, config: LoaderConfig) -> optuna.trial.Trial:
        """A running trial of just this configuration.

        It is created as it is: an enqueued one could be handed to any other process that shares the storage.
        """
        import optuna

        knobs = self._knobs.of(config)
        template = optuna.trial.FrozenTrial(
            number=-1,  # the storage gives number and id
            trial_id=-1,
            state=optuna.trial.TrialState.RUNNING,
            value=None,
            datetime_start=datetime.now(),
            datetime_complete=None,
            params=knobs,
            distributions={name: self._knobs.distribution(name) for name in knobs},
            user_attrs={OWNER: owner()},
            system_attrs={},
            intermediate_values={},
        )
        trial_id = self.study._storage.create_new_trial(self.study._study_id, template_trial=template)
        return optuna.trial.Trial(self.study, trial_id)

    def tell(self, claim: Claim, trial: Trial) -> None:
        """Complete a claimed trial: its rate as the value, everything else as attributes and constraints."""
        import optuna

        try:
            patiently(lambda: self._told(claim.asked, trial), mend=self.close)
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

    def abandon(self, claim: Claim) -> None:
        """Mark a trial that was interrupted: it carries no information."""
        import optuna

        with contextlib.suppress(Exception), quiet_optuna():
            self.study.tell(claim.asked, state=optuna.trial.TrialState.FAIL)

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

        states, knobs = (optuna.trial.TrialState.RUNNING,), self._knobs.of(config)
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


def _drop_zombies(study: optuna.Study) -> None:
    """Tell the trials that a killed run left running. Those of other live processes and machines stay."""
    import optuna

    states = optuna.trial.TrialState
    with quiet_optuna(), contextlib.suppress(Exception):
        for frozen in study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if is_abandoned(frozen.user_attrs.get(OWNER), frozen.datetime_start):
                study.tell(frozen.number, state=states.FAIL)


def _sampler(search: Search, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    if search in ("random", "grid"):  # the search itself walks the grid and enqueues it
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.samplers.TPESampler(
            seed=seed,
            n_startup_trials=4,  # random ones; the initial design takes their place
            multivariate=False,
            constant_liar=False,
        )


def name_of_study(space: Space, fingerprint: Fingerprint) -> str:
    """One study holds trials of one space on one kind of machine with one dataset only."""
    text = repr(replace(fingerprint, driver=None))
    return f"autotune-{space.hash}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


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

    # A lock left by a killed writer is taken over after 3 s; Optuna's own default of 30 s would stall a restart.
    lock = JournalFileSymlinkLock(str(path), grace_period=3)
    lock.acquire()
    try:
        change(path)
    finally:
        lock.release()
    return lock


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
    if (measured := trial.measurement) is not None:
        rate, memory = measured.samples_per_s, measured.memory
        values |= {
            "samples_per_s": rate.value,
            "samples_per_s_low": rate.low,
            "samples_per_s_high": rate.high,
            "wait_share": measured.wait_share,
            "first_batch_s": measured.first_batch_s,
            "cpu_share": measured.cpu_share,
            "rss_bytes": memory.rss_bytes if memory else None,
            "pss_bytes": memory.pss_bytes if memory else None,
            "gpu_busy_share": measured.gpu.busy_share,
            "gpu_util": measured.gpu.util,
        }
        trial = replace(trial, measurement=replace(measured, traces=()))
    if trial.failure is not None:
        values |= {f"failure_{name}": getattr(trial.failure, name) for name in ("kind", "phase", "message")}
    if trial.predicted_samples_per_s is not None:
        values["predicted_samples_per_s"] = float(trial.predicted_samples_per_s)
    plain: dict[str, Any] = to_plain(values)
    return {**plain, "record": json.dumps(to_plain(trial), allow_nan=False)}


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


@contextlib.contextmanager
def quiet_optuna() -> Iterator[None]:
    """Optuna without its chatter and experimental warnings; its verbosity is global, so it is put back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")  # tqdm's, in notebooks without ipywidgets
        import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", category=optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
