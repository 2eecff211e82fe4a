"""The Optuna study behind a search, in memory, a journal file or a database; the only file that imports Optuna.

    ask     a running trial of what the search hands over, or of what Optuna's own sampler proposes
    tell    its rate; a failure as pruned, because samplers ignore a bare FAIL and propose it again
    news    what other hosts have told; what they are running is passed over

Ask and tell, never `optimize()`: the search owns time and order. Everything is also kept as user attributes, so that a study is
readable without this package, and so that it can be resumed. A storage that fails in the midst of a run, be it a full disk or a
lost database, must not end it: the study goes on in memory.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune_loader.decision.space import Space
from autotune_loader.machine.ranks import Place
from autotune_loader.report.frames import row_of
from autotune_loader.tuning.options import Search
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import MissingExtraError
from autotune_loader.values.secrets import without_secrets
from autotune_loader.values.serialization import from_plain, to_plain
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import optuna

log = logging.getLogger(__name__)
JOB = "job"
"""Attribute of a study: whose trials it has."""
CONFIG, OWNER, SINCE = "config", "owner", "since"
"""Attributes of a trial: what it runs, who runs it, and since when in seconds of the epoch, as hosts differ in time zones."""
LOST_S = 60.0
"""A trial of another host that has run this long is taken for lost. One that is not costs a trial that is run twice."""
PAUSES_S = (0.2, 0.8, 2.0)
"""Between tries to open a database: hosts that open an empty one at once make its tables at once, and all but one fail."""
LIBPQ_S = 10
"""PostgreSQL's driver waits so long for a server to answer a connection, and for what was sent to arrive."""
GRACE_S = 3
"""A lock left by a killed writer is taken over after this; Optuna's own default of 30 s would stall a restart."""
AXES = {
    "prefetch_factor": "prefetch_factors",
    "pin_memory": "pin_memory",
    "device_prefetch": "device_prefetch",
    "in_order": "in_order",
    "multiprocessing_context": "multiprocessing_contexts",
    "sharing_strategy": "sharing_strategies",
    "batch_size": "batch_sizes",
    "drop_last": "drop_lasts",
    "consumer_threads": "consumer_threads",
}
"""Every knob besides `num_workers`, and what of a space has its values."""
ONLY_WITH_WORKERS = ("prefetch_factor", "in_order", "multiprocessing_context")


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


@dataclass(frozen=True, slots=True)
class Claim:
    """A configuration that is ours to measure, and its running Optuna trial."""

    asked: optuna.trial.Trial
    config: LoaderConfig


class OptunaStudy:
    """An Optuna study that speaks of configurations and trials, and that outlives its storage.

    Args:
        storage: None for memory, a URL (`sqlite:///...`, `postgresql://...`), or the path of a journal file.
        name: of the study.
        space: what may be proposed.
        search: which sampler proposes where the caller does not.
        seed: of the sampler.
        job: whose trials these are; one study holds those of one job only.

    Raises:
        ValueError: the storage cannot be opened, or the study is of another job.
    """

    def __init__(
        self, *, storage: str | None, name: str, space: Space, search: Search, seed: int, job: str = ""
    ) -> None:
        # In a thread: Optuna keeps errors of what is not installed, and with them the frames of `tune()` and the model.
        thread = threading.Thread(target=importlib.import_module, args=("optuna",))
        thread.start()
        thread.join()
        self._name, self._job, self._space, self._sampler = name, job, space, _sampler(search, seed)
        self._seen: set[str] = set()
        self._storage: Any = None
        self.study = self._opened(storage)
        self._end_what_died()

    @quiet_optuna()
    def ask(self, config: LoaderConfig | None = None) -> Claim:
        """A running trial of `config`, or of what the sampler proposes; first of all of what somebody has enqueued."""
        try:
            return self._ask(config)
        except Exception as error:
            self._go_on_in_memory(error)
            return self._ask(config)

    def _ask(self, config: LoaderConfig | None) -> Claim:
        import optuna

        self.study.sampler = self._sampler
        if config is not None and not self.study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.WAITING,)):
            return Claim(self._begun(config), config)
        asked = self.study.ask()
        config = _suggested(asked, self._space)
        for name, value in _claimed(config).items():
            asked.set_user_attr(name, value)
        return Claim(asked, config)

    def _begun(self, config: LoaderConfig) -> optuna.trial.Trial:
        """A running trial that is written at once: no other host ever meets one without its owner."""
        import optuna

        params = _params(config, self._space)
        begun = optuna.trial.create_trial(
            state=optuna.trial.TrialState.RUNNING,
            params=params,
            distributions={name: _distribution(name, self._space) for name in params},
            user_attrs=_claimed(config),
        )
        study = self._storage.get_study_id_from_name(self._name)
        return optuna.trial.Trial(self.study, self._storage.create_new_trial(study, begun))

    @quiet_optuna()
    def tell(self, claim: Claim, trial: Trial) -> None:
        """Complete a claimed trial: its rate as the value, everything else as attributes."""
        try:
            self._tell(claim.asked, trial)
        except Exception as error:
            self._go_on_in_memory(error)
            self._tell(self._ask(trial.config).asked, trial)

    def _tell(self, asked: optuna.trial.Trial, trial: Trial) -> None:
        import optuna

        attributes = _attributes(trial)
        self._seen.add(attributes["record"])
        for name, value in attributes.items():
            asked.set_user_attr(name, value)
        rate = trial.samples_per_s
        self.study.tell(asked, rate, None if rate is not None else optuna.trial.TrialState.PRUNED)

    def abandon(self, claim: Claim) -> None:
        """Mark a trial that was interrupted, or that another host runs: it carries no information."""
        self._fail(claim.asked)

    def restored(self) -> list[Trial]:
        """The trials of earlier and other runs of the same study, in order, without traces; a repeated one once."""
        self._seen.clear()
        return self.news()

    def news(self) -> list[Trial]:
        """The trials that other runs of the same study have told since the last call."""
        told = [each.user_attrs["record"] for each in self._trials(finished=True) if "record" in each.user_attrs]
        new = [text for text in dict.fromkeys(told) if text not in self._seen]
        self._seen.update(new)
        return [from_plain(json.loads(text), Trial) for text in new]

    def elsewhere(self, before: Claim | None = None) -> set[LoaderConfig]:
        """What other processes are running; with a claim of ours, in trials that began before it: of two the first counts."""
        return {
            LoaderConfig.from_dict(each.user_attrs[CONFIG])
            for each in self._trials(finished=False)
            if (before is None or each.number < before.asked.number) and not _is_lost(each)
        }

    def close(self) -> None:
        """Let go of a storage that holds connections: Optuna leaves them to the garbage collector, of which psycopg warns."""
        if hasattr(self._storage, "engine"):
            with contextlib.suppress(Exception):
                self._storage.remove_session()
                self._storage.engine.dispose()

    def _trials(self, *, finished: bool) -> list[optuna.trial.FrozenTrial]:
        try:
            trials = self.study.get_trials(deepcopy=False)
        except Exception as error:
            self._go_on_in_memory(error)
            trials = self.study.get_trials(deepcopy=False)
        ours = [
            trial for trial in trials if trial.state.is_finished() or OWNER in trial.user_attrs
        ]  # not enqueued ones
        return [trial for trial in ours if trial.state.is_finished() is finished]

    @quiet_optuna()
    def _opened(self, storage: str | None) -> optuna.Study:
        import optuna

        self._storage = open_storage(storage)
        study = optuna.create_study(
            storage=self._storage,
            study_name=self._name,
            direction="maximize",
            sampler=self._sampler,
            pruner=optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
        if study.user_attrs.get(JOB, self._job) != self._job:
            self.close()
            raise ValueError(
                f"study_name={self._name!r} has trials of another job (data, batch size, model, step, limits or machine); "
                "study_name=None, so that each job has a study of its own, would work"
            )
        study.set_user_attr(JOB, self._job)
        return study

    def _go_on_in_memory(self, error: Exception) -> None:
        """A full disk or a lost database must not lose the run: its study goes on without them."""
        reason = without_secrets(f"{type(error).__name__}: {error}")
        log.warning("the study's storage failed (%s); it goes on in memory", reason)
        self.close()
        lost, self.study = self.study, self._opened(None)
        with contextlib.suppress(Exception):
            self.study.add_trials(trial for trial in lost.get_trials(deepcopy=False) if trial.state.is_finished())

    def _end_what_died(self) -> None:
        """Tell the trials that a killed run of this host left running. Those of other live processes and hosts stay."""
        for frozen in self._trials(finished=False):
            if _owner(frozen).is_seen_from_here and _is_lost(frozen):
                self._fail(frozen.number)

    @quiet_optuna()
    def _fail(self, trial: optuna.trial.Trial | int) -> None:
        import optuna

        with contextlib.suppress(Exception):  # another process was quicker, or the storage is lost
            self.study.tell(trial, state=optuna.trial.TrialState.FAIL)


def _claimed(config: LoaderConfig) -> dict[str, Any]:
    """What a claim says of itself; the owner last, as a trial without one is passed over."""
    return {CONFIG: config.to_dict(), SINCE: time.time(), OWNER: to_plain(Place.here())}


def _owner(trial: optuna.trial.FrozenTrial) -> Place:
    return from_plain(trial.user_attrs[OWNER], Place)


def _is_lost(trial: optuna.trial.FrozenTrial) -> bool:
    """Whether a running trial has, as far as can be told from here, nobody who would finish it."""
    place = _owner(trial)
    if place.is_seen_from_here:
        return place.has_ended() or place == Place.here()  # what this very process left running is of an earlier run
    return time.time() - float(trial.user_attrs.get(SINCE, time.time())) > LOST_S


def _sampler(search: Search, seed: int) -> optuna.samplers.BaseSampler:
    import optuna

    if search in ("random", "grid"):  # the search itself walks the grid
        return optuna.samplers.RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Four random trials come first; the initial design takes their place.
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=4, multivariate=False, constant_liar=False)


def _values(name: str, space: Space) -> list[Any]:
    return list(getattr(space, AXES[name]))


def _distribution(name: str, space: Space) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    if name == "num_workers":
        return IntDistribution(0, space.max_workers)
    return CategoricalDistribution(_values(name, space))


def _params(config: LoaderConfig, space: Space) -> dict[str, Any]:
    """What of a configuration Optuna can be told: not what lies outside of the space. `record` has all of it."""
    knobs = {name: getattr(config, name) for name in AXES if config.num_workers or name not in ONLY_WITH_WORKERS}
    legal = {name: _values(name, space) for name in knobs}
    known = {name: value for name, value in knobs.items() if len(legal[name]) > 1 and value in legal[name]}
    return {"num_workers": min(config.num_workers, space.max_workers), **known}


def _suggested(trial: optuna.trial.Trial, space: Space) -> LoaderConfig:
    workers = trial.suggest_int("num_workers", 0, space.max_workers)
    workers = min(space.worker_counts(), key=lambda count: abs(count - workers))
    knobs = {}
    for name in AXES:
        first, *others = values = _values(name, space)
        if workers or name not in ONLY_WITH_WORKERS:
            knobs[name] = trial.suggest_categorical(name, values) if others else first
    return LoaderConfig(num_workers=workers, persistent_workers=space.persistent_workers and workers > 0, **knobs)


def _attributes(trial: Trial) -> dict[str, Any]:
    """What a person or a dashboard wants to know, as in `to_dataframe()`, and all that a resumed run needs; JSON values."""
    lean = replace(trial, measurement=trial.measurement and replace(trial.measurement, traces=()))
    shown: dict[str, Any] = to_plain(row_of(trial))
    return {**shown, "record": json.dumps(to_plain(lean), allow_nan=False)}


# Storages


def open_storage(storage: str | None) -> Any:
    """None for memory, a URL as it is, a path as a journal file that is readable by its owner alone."""
    from optuna.storages import InMemoryStorage, JournalStorage

    if storage is None:
        return InMemoryStorage()
    if "://" in storage:
        return open_database(storage)
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

    path = Path(storage)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    lock = JournalFileSymlinkLock(storage, grace_period=GRACE_S)
    lock.acquire()
    try:
        # After a kill in the middle of a write Optuna loads such a file, but its next append joins the torn line and is lost.
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            log.warning("%s ended in the middle of a line; the last %d bytes were dropped", path, len(data) - whole)
            os.truncate(path, whole)
    finally:
        lock.release()
    return JournalStorage(JournalFileBackend(storage, lock_obj=lock))


def open_database(url: str) -> Any:
    """Optuna's storage for a database URL; connections that the server has dropped are replaced before use.

    Raises:
        ValueError: the URL names nothing that can be opened, or nothing answers there.
        MissingExtraError: the database's driver is not installed.
    """
    from optuna.storages import RDBStorage
    from sqlalchemy.exc import ArgumentError

    # A network that is lost would be waited for as long as the kernel does.
    is_libpq = url.startswith(("postgresql://", "postgresql+psycopg"))
    patience = {"connect_timeout": LIBPQ_S, "tcp_user_timeout": 1000 * LIBPQ_S} if is_libpq else {}
    options = {} if url.startswith("sqlite") else {"pool_pre_ping": True, "connect_args": patience}
    # What SQLAlchemy and drivers say may quote the URL or pieces of it, and so do the causes of their errors.
    why = "needs a driver that is not installed"
    for pause_s in (*PAUSES_S, None):
        try:
            _make_private(url)
            return RDBStorage(url, engine_kwargs=options)
        except (ArgumentError, ValueError):
            why = "names no database that can be opened"
            break
        except ImportError:
            if is_libpq:
                raise MissingExtraError("storage='postgresql+psycopg://...'", "psycopg[binary]") from None
            break
        except Exception as error:
            why = f"cannot be opened ({_cause(error)})"
            if pause_s is not None:
                time.sleep(pause_s)
    raise ValueError(f"storage={without_secrets(url)!r} {why}; storage='study.journal' would work")


def _cause(error: Exception) -> str:
    origin = getattr(error, "orig", error)
    text = without_secrets(str(origin).splitlines()[0])
    # The end of a password that holds an @ is taken for the beginning of a host.
    return type(origin).__name__ if "@" in text else text


def _make_private(url: str) -> None:
    """Create the file of an SQLite database, which SQLite would let others read: it will hold the user's tracebacks."""
    from sqlalchemy.engine import make_url

    parsed = make_url(url)
    name = parsed.database if parsed.get_backend_name() == "sqlite" else None
    if name and not name.startswith((":memory:", "file:")):
        with contextlib.suppress(OSError):  # SQLite says better what is wrong with it
            os.close(os.open(name, os.O_CREAT | os.O_RDWR, 0o600))
