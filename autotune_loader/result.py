"""The finished run as one value, and `loader.json`, the file it is kept in.

`LoaderFile` and the dataclasses below it are the only definition of the file: it is written, validated and described (JSON
Schema) from them. The file is data only: nothing in it is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import math
import os
import secrets
import warnings as python_warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from autotune_loader.config import LoaderConfig
from autotune_loader.errors import ConfigFileError, MachineMismatchError
from autotune_loader.lookup import find_loader_file
from autotune_loader.machine.facts import Fingerprint, differences, inspect_machine
from autotune_loader.prefetch import DevicePrefetcher, prefetched_as_tuned
from autotune_loader.stats import Interval
from autotune_loader.trial import Acceleration, Trial
from autotune_loader.version import __version__

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from matplotlib.figure import Figure
    from torch.utils.data import DataLoader

    from autotune_loader.policy import TwinInputs
    from autotune_loader.twin import Prediction

# 1.0  first release
SCHEMA_VERSION = "1.0"
# What a warning says of a file that was asked for.
NOT_WRITTEN = "could not be written"
# No honest loader.json comes near this; a file that does is refused before it is parsed.
MAX_FILE_BYTES = 32 << 20

_Kind = TypeVar("_Kind")
_INTERVAL_KEYS = {field.name for field in fields(Interval)}

Status = Literal["complete", "partial", "fallback"]
OnMismatch = Literal["warn", "clamp", "raise"]
Binding = Literal["step", "cpu", "wait", "transport", "pinning", "memory", "startup", "in_memory", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeChoice:
    """Samples per batch, and whether the tuner chose them."""

    value: int | None
    tuned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured of the best configuration; null means not measured."""

    samples_per_s: Interval | None = None
    """Rate of the best configuration, from the finals where they were run."""
    baseline_samples_per_s: Interval | None = None
    speedup: Interval | None = None
    """Best over baseline, from paired rounds."""
    ceiling_samples_per_s: Interval | None = None
    """Rate of the training step on a cached batch: no loader can exceed it."""
    wait_share: float | None = None
    """Share of the time in which the training loop waited for data."""
    first_batch_s: float | None = None
    cpu_share: float | None = None
    gpu_util: float | None = None
    gpu_util_reason: str | None = None
    """Why GPU utilisation is null."""
    gpu_memory_bytes: int | None = None
    rss_bytes: int | None = None
    pss_bytes: int | None = None
    pss_slope_bytes_per_s: float | None = None
    shm_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the twin says of the best configuration; null where it could not say."""

    samples_per_s: Interval | None = None
    epoch_s: float | None = None
    """Seconds of one epoch, worker start-up included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What finding it cost."""

    seconds: float
    """Wall seconds from call to result."""
    bursts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which resource binds the best configuration, and how far its ceiling is."""

    binding: Binding
    sentence: str
    """The verdict for a person, with the evidence in numbers."""
    headroom: float | None = None
    """Ceiling over rate, minus one: what a loader that took neither time nor cores would still gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One concrete next step."""

    action: str
    """What to do, as a sentence."""
    reason: str
    """The measured evidence for it."""
    expected_gain: float | None = None
    """Estimated relative gain in samples/s; None where there is no estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finals:
    """The interleaved paired rounds between the last candidates: fresh bursts that took no part in the search."""

    configs: tuple[LoaderConfig, ...] = ()
    rounds: tuple[tuple[float | None, ...], ...] = ()
    """Samples/s of each configuration in each round; null where its burst failed."""
    whole_epochs: bool = False
    """Whether whole epochs were run, as these are short: the rates include start-up and the gaps between epochs."""

    def __post_init__(self) -> None:
        if any(len(rates) != len(self.configs) for rates in self.rounds):
            raise ValueError(f"every round of the finals needs {len(self.configs)} rates, one for each configuration")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinBasis:
    """What the twin needs besides the trials, so that `predict()` answers also after `load()`."""

    usable_cores: int
    consumer_cores: float
    """Cores that the step keeps busy."""
    step_s: tuple[tuple[int | None, float], ...] = ()
    """Seconds of the step on a cached batch, by consumer_threads."""
    epoch_batches: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """An earlier result that was checked and used instead of a new search."""

    tuned_at: str
    """When it was found: ISO 8601, UTC."""
    samples_per_s: float
    """Rate of the best configuration in the check."""
    speedup: float | None
    """Best over the configuration it was paired with; null where it is that configuration itself."""
    rounds: int
    """Paired rounds of the check."""
    seconds: float
    """Wall seconds that the search took then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFile:
    """`loader.json`, field by field."""

    schema_version: str
    status: Status
    """`complete`; `partial` when it was interrupted; `fallback` when nothing worked and torch's defaults are given."""
    dataloader_kwargs: dict[str, Any]
    """Arguments for `torch.utils.data.DataLoader`, splat-able as they stand."""
    scope: Literal["per_process"] = "per_process"
    """`num_workers` is for each training process (rank)."""
    extras: dict[str, Any] = field(default_factory=dict)
    batch_size: BatchSizeChoice = field(default_factory=lambda: BatchSizeChoice(value=None))
    summary: tuple[str, ...] = ()
    """Sentences a person reads."""
    warnings: tuple[str, ...] = ()
    verdict: Verdict | None = None
    advice: tuple[Advice, ...] = ()
    accelerations: tuple[Acceleration, ...] = ()
    """What `allow=("compile", "amp")` asked about the step: measured where the step binds, else with the reason why not."""
    measured: Measured = field(default_factory=Measured)
    predicted: Predicted = field(default_factory=Predicted)
    budget: Spent = field(default_factory=lambda: Spent(seconds=0.0, bursts=0))
    space_hash: str | None = None
    fingerprint: Fingerprint | None = None
    baseline: LoaderConfig | None = None
    trials: tuple[Trial, ...] = ()
    finals: Finals = field(default_factory=Finals)
    twin: TwinBasis | None = None
    tolerance: float | None = None
    """Rates this close counted as equally fast; null in files of before it was kept."""
    reused: Reused | None = None
    """Set where the result is an earlier one that was found to hold still."""
    created_by: str = f"autotune_loader {__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """What `tune()` found. `save()` and `load()` are inverse, but for the study, which stays in memory or its storage."""

    best: LoaderConfig
    """The cheapest configuration within tolerance of the fastest."""
    status: Status
    baseline: LoaderConfig
    """The user's own configuration, or torch's defaults."""
    trials: tuple[Trial, ...] = ()
    batch_size: BatchSizeChoice = field(default_factory=lambda: BatchSizeChoice(value=None))
    measured: Measured = field(default_factory=Measured)
    predicted: Predicted = field(default_factory=Predicted)
    verdict: Verdict = field(
        default_factory=lambda: Verdict(binding="unknown", sentence="Nothing was measured, so nothing can be said.")
    )
    advice: tuple[Advice, ...] = ()
    accelerations: tuple[Acceleration, ...] = ()
    """What `allow=("compile", "amp")` asked about the step: measured where the step binds, else with the reason why not."""
    summary: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    finals: Finals = field(default_factory=Finals)
    spent: Spent = field(default_factory=lambda: Spent(seconds=0.0, bursts=0))
    space_hash: str | None = None
    fingerprint: Fingerprint | None = None
    twin: TwinBasis | None = None
    tolerance: float | None = None
    """Rates this close counted as equally fast; None where the file that was loaded does not tell."""
    reused: Reused | None = None
    """Set where an earlier result was checked and used instead of a new search."""
    study: optuna.Study | None = field(default=None, compare=False, repr=False)
    """The Optuna study, an ordinary one; None after `load()`."""
    parts: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What `make_loader()` takes over from the tuned loader: collate_fn, worker_init_fn, generator, drop_last."""

    @property
    def speedup(self) -> Interval | None:
        """Best over baseline in samples/s, from paired rounds; None when they could not be run."""
        return self.measured.speedup

    @property
    def ceiling(self) -> Interval | None:
        """Samples/s of the training step on a cached batch: no loader can exceed it."""
        return self.measured.ceiling_samples_per_s

    @overload
    def make_loader(self, dataset: Any, *, device: None = None, **kwargs: Any) -> DataLoader[Any]: ...
    @overload
    def make_loader(self, dataset: Any, *, device: Any, **kwargs: Any) -> DataLoader[Any] | DevicePrefetcher: ...
    def make_loader(self, dataset: Any, *, device: Any = None, **kwargs: Any) -> DataLoader[Any] | DevicePrefetcher:
        """A DataLoader over `dataset` with the best configuration.

        Args:
            dataset: any dataset that DataLoader takes.
            device: where the step runs. On CUDA, and where copying ahead was found to pay, the loader comes inside a
                `DevicePrefetcher`, whose batches lie on the device already; without it, plain.
            **kwargs: further DataLoader arguments, such as `shuffle=True`; they win over the tuned ones. Without
                `batch_size`, the batch size that was tuned with.
        """
        from torch.utils.data import DataLoader

        tuned = self.best.to_kwargs()
        if kwargs.get("num_workers") == 0:
            tuned = {name: value for name, value in tuned.items() if name in ("pin_memory", "drop_last")}
        arguments = {**self.parts, **tuned, **kwargs}
        if "batch_size" not in kwargs and "batch_sampler" not in kwargs:
            arguments["batch_size"] = self.batch_size.value
        if arguments.get("batch_sampler") is not None or arguments.get("batch_size", 1) is None:
            arguments.pop("drop_last", None)
        loader: DataLoader[Any] = DataLoader(dataset, **arguments)
        return loader if device is None else prefetched_as_tuned(loader, self.best, device)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json`: to a temporary file beside it, then renamed, so that a reader never sees half of it."""
        write_json(self.to_file(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TuningResult:
        """The result that `save()` wrote.

        Raises:
            ConfigFileError: missing, corrupt, or of a newer major version.
        """
        return cls.from_file(read_loader_file(path))

    def to_file(self) -> LoaderFile:
        return LoaderFile(
            schema_version=SCHEMA_VERSION,
            status=self.status,
            dataloader_kwargs=self.best.to_kwargs(),
            extras=self.best.to_extras(),
            batch_size=self.batch_size,
            summary=self.summary,
            warnings=self.warnings,
            verdict=self.verdict,
            advice=self.advice,
            accelerations=self.accelerations,
            measured=self.measured,
            predicted=self.predicted,
            budget=self.spent,
            space_hash=self.space_hash,
            fingerprint=self.fingerprint,
            baseline=self.baseline,
            trials=tuple(_without_traces(trial) for trial in self.trials),
            finals=self.finals,
            twin=self.twin,
            tolerance=self.tolerance,
            reused=self.reused,
        )

    @classmethod
    def from_file(cls, file: LoaderFile) -> TuningResult:
        return cls(
            best=config_in(file),
            status=file.status,
            baseline=file.baseline or LoaderConfig(),
            trials=file.trials,
            batch_size=file.batch_size,
            measured=file.measured,
            predicted=file.predicted,
            verdict=file.verdict or Verdict(binding="unknown", sentence="The file holds no verdict."),
            advice=file.advice,
            accelerations=file.accelerations,
            summary=file.summary,
            warnings=file.warnings,
            finals=file.finals,
            spent=file.budget,
            space_hash=file.space_hash,
            fingerprint=file.fingerprint,
            twin=file.twin,
            tolerance=file.tolerance,
            reused=file.reused,
        )

    def predict(
        self,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        *,
        cores: float | None = None,
        **knobs: Any,
    ) -> Prediction:
        """What if: the rate and memory expected of another configuration, or of another number of cores.

        After `load()` the twin rests on each burst's means, as the histories of single batches are not in the file.

        Args:
            num_workers: worker processes; the best configuration's where it is not given, like every other knob.
            prefetch_factor: batches ahead per worker.
            cores: usable cores of the machine asked about; this one's where it is not given.
            **knobs: other fields of `LoaderConfig`, such as `in_order=False` or `consumer_threads=2`.

        Raises:
            TypeError: a knob that `LoaderConfig` does not have.
            ValueError: no burst succeeded, so there is nothing to predict from.
        """
        given = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        changes = {**{name: value for name, value in given.items() if value is not None}, **knobs}
        return self.predict_all([_changed(self.best, changes)], cores=cores)[0]

    def predict_all(self, configs: Sequence[LoaderConfig], *, cores: float | None = None) -> list[Prediction]:
        """`predict()` for many whole configurations at once, which takes little longer than for one.

        Raises:
            ValueError: no burst succeeded, so there is nothing to predict from.
        """
        from autotune_loader.policy import fit_twin  # numpy, which a training job that loads a file need not wait for
        from autotune_loader.twin.memory import MemoryModel

        basis = self.twin
        twin = None if basis is None else fit_twin(self.trials, _inputs_of(basis))
        if basis is None or twin is None:
            raise ValueError(
                "nothing was measured, so nothing can be predicted; a result of tune() with a trial would work"
            )
        memory = MemoryModel.fit(
            (each.config, each.measurement) for each in self.trials if each.measurement is not None
        )
        return [
            replace(prediction, pss_bytes=None if memory is None else memory.peak_bytes(prediction.config))
            for prediction in twin.predict_all(configs, epoch_batches=basis.epoch_batches, cores=cores)
        ]

    def to_dataframe(self) -> pd.DataFrame:
        """One row per trial: configuration, rates, waits, memory, failure."""
        from autotune_loader.report.frame import trials_frame

        return trials_frame(self)

    def report(self) -> str:
        """The whole result as text: table, verdict, advice."""
        from autotune_loader.report.tables import render_report

        return render_report(self)

    def plot_workers(self) -> Figure:
        """Samples/s over workers with intervals, plateau, ceiling and the twin's predictions."""
        from autotune_loader.report.plots import plot_workers

        return plot_workers(self)

    def plot_heatmap(self) -> Figure:
        """Samples/s over workers and prefetch_factor."""
        from autotune_loader.report.plots import plot_heatmap

        return plot_heatmap(self)

    def plot_memory(self) -> Figure:
        """Samples/s against the memory of the process tree."""
        from autotune_loader.report.plots import plot_memory

        return plot_memory(self)

    def plot_history(self) -> Figure:
        """The trials in their order, and the best so far."""
        from autotune_loader.report.plots import plot_history

        return plot_history(self)

    def plot_timeline(self, trial: int | None = None) -> Figure:
        """One burst, batch by batch: what each worker fetched, and when the loop waited and stepped.

        Args:
            trial: number of the trial; None takes the fastest.
        """
        from autotune_loader.report.plots import plot_timeline

        return plot_timeline(self, trial)

    def plot_failures(self) -> Figure:
        """What failed, and why."""
        from autotune_loader.report.plots import plot_failures

        return plot_failures(self)

    def plot_speedup(self) -> Figure:
        """The paired rounds of the finals behind the speed-up."""
        from autotune_loader.report.plots import plot_speedup

        return plot_speedup(self)

    def __str__(self) -> str:
        return "\n".join(self.summary) or f"{self.status}: {self.best}"


def _changed(best: LoaderConfig, changes: dict[str, Any]) -> LoaderConfig:
    known = [each.name for each in fields(LoaderConfig)]
    for name in changes:
        if name not in known:
            raise TypeError(f"{name}={changes[name]!r} is no knob; one of {', '.join(known)} would work")
    if changes.get("num_workers") == 0:  # what only workers have goes with them
        changes = {"prefetch_factor": None, "persistent_workers": False, "in_order": True, **changes}
        changes["multiprocessing_context"] = None
    return replace(best, **changes)


def _inputs_of(basis: TwinBasis) -> TwinInputs:
    from autotune_loader.policy import TwinInputs

    return TwinInputs(
        usable_cores=basis.usable_cores,
        consumer_cores=basis.consumer_cores,
        step_s_by_threads=dict(basis.step_s),
    )


def _without_traces(trial: Trial) -> Trial:
    if trial.measurement is None or not trial.measurement.traces:
        return trial
    return replace(trial, measurement=replace(trial.measurement, traces=()))


def write_json(file: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write a dataclass as JSON, through a temporary one in the same folder and a rename; `private` for the owner alone."""
    import msgspec

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(to_plain(file)), indent=2)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        # Not tempfile: its files are private, and the training job may run as somebody else. The umask decides.
        mode = 0o600 if private else 0o666
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(text + b"\n")
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def require_writable(name: str, path: str | os.PathLike[str]) -> None:
    """Find out now, not after a minute of measuring, whether a file can be written.

    Raises:
        ValueError: it cannot.
    """
    target = Path(path)
    trial = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        trial.touch(exist_ok=False)
        trial.unlink()
    except OSError as error:
        raise ValueError(
            f"{name}={os.fspath(path)!r} cannot be written ({error.strerror}); {name}='loader.json' would work"
        ) from error


def to_plain(value: Any) -> Any:
    """Plain JSON values of a dataclass. What JSON cannot say is replaced: an interval's infinite bound becomes null."""
    import msgspec

    return _sayable(msgspec.to_builtins(value))


def from_plain(raw: Any, kind: type[_Kind]) -> _Kind:
    """The inverse of `to_plain`: null bounds of intervals become infinite again.

    Raises:
        msgspec.ValidationError: the values do not make a `kind`.
    """
    import msgspec

    return msgspec.convert(_with_infinities(raw), kind)


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):  # the name of an unreadable file may hold bytes that are no text
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_sayable(key): _sayable(each) for key, each in value.items()}
    return [_sayable(each) for each in value] if isinstance(value, (list, tuple)) else value


def _with_infinities(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_infinities(each) for each in value]
    if not isinstance(value, dict):
        return value
    restored = {key: _with_infinities(each) for key, each in value.items()}
    if restored.keys() >= _INTERVAL_KEYS:
        for bound, unbounded in (("low", -math.inf), ("high", math.inf)):
            restored[bound] = unbounded if restored[bound] is None else restored[bound]
    return restored


def read_loader_file(path: str | os.PathLike[str]) -> LoaderFile:
    """Read and validate `loader.json`; unknown keys are ignored.

    Raises:
        ConfigFileError: missing, too large, not JSON, wrong types, or of a newer major version.
    """

    def parse(raw: Any) -> LoaderFile:
        file = from_plain(raw, LoaderFile)
        config_in(file)
        return file

    return read_loader_json(path, parse)


def read_loader_json(path: str | os.PathLike[str], parse: Callable[[Any], _Kind]) -> _Kind:
    """What `parse` makes of a JSON file of ours, after its size and version were checked.

    Raises:
        ConfigFileError: missing, too large, not JSON, of a newer major version, or nothing that `parse` takes.
    """
    import msgspec

    source = Path(path)
    data = _bounded_bytes(source)
    try:
        raw = msgspec.json.decode(data)
        _check_version(raw, source)
        return parse(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
        raise ConfigFileError(
            f"path={str(source)!r} is not a valid loader.json: {error}. Write a new one with result.save({source.name!r})"
        ) from error


def _bounded_bytes(source: Path) -> bytes:
    try:
        size = source.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ConfigFileError(
                f"path={str(source)!r} has {size} bytes, more than any loader.json ({MAX_FILE_BYTES})"
            )
        return source.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ConfigFileError(
            f"path={str(source)!r} cannot be read ({getattr(error, 'strerror', error)}); "
            "write it with tune(..., output='loader.json') or result.save('loader.json')"
        ) from error


def _check_version(raw: object, source: Path) -> None:
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    major = str(version).split(".", 1)[0]
    if not isinstance(version, str) or not major.isdecimal():
        raise ConfigFileError(
            f"path={str(source)!r} has schema_version={version!r}; this release writes {SCHEMA_VERSION!r}"
        )
    if int(major) > int(SCHEMA_VERSION.split(".", 1)[0]):
        raise ConfigFileError(
            f"path={str(source)!r} has schema_version={version!r}, newer than {SCHEMA_VERSION!r}, which this release reads; "
            "upgrade with: pip install -U autotune-loader"
        )


def config_in(file: LoaderFile) -> LoaderConfig:
    """The configuration that a file describes."""
    size = {"batch_size": file.batch_size.value} if file.batch_size.tuned else {}
    return LoaderConfig.from_dict({**file.dataloader_kwargs, **file.extras, **size})


def loader_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `loader.json`, generated from the dataclasses."""
    import msgspec

    schema = msgspec.json.schema(LoaderFile)
    for bound in ("low", "high"):
        schema["$defs"]["Interval"]["properties"][bound] = {
            "anyOf": [{"type": "number"}, {"type": "null"}],
            "description": "null: the data do not bound it",
        }
    schema["$defs"]["LoaderFile"]["properties"]["created_by"].pop("default")  # changes with every release
    for each in schema["$defs"].values():
        if "description" in each:
            each["description"] = inspect.cleandoc(each["description"])  # Python 3.13 has done so already
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "loader.json", **schema}


def load_config(path: str | os.PathLike[str] | None = None, *, on_mismatch: OnMismatch = "warn") -> LoaderConfig:
    """The configuration of a `loader.json`, checked against the machine it is loaded on.

    Args:
        path: the file that `tune()` or `result.save()` wrote, or a collection (see `fleet`), of which the entry nearest to
            this machine is taken. Without it: what `AUTOTUNE_LOADER_CONFIG` names, else `./loader.json`, else the user's own.
        on_mismatch: what to do when this machine differs from the one it was tuned on in a way that matters. `"warn"` about
            it; where it has fewer cores, and fewer than there are workers or step threads, these are reduced as well, and the
            warning says so. `"clamp"` also takes away what needs an accelerator where there is none. `"raise"`.

    Raises:
        ConfigFileError: the file cannot be read, or none was found; the message names the places.
        MachineMismatchError: the machines differ and `on_mismatch="raise"`.
        ValueError: `on_mismatch` is none of the three.
    """
    if on_mismatch not in ("warn", "clamp", "raise"):
        raise ValueError(
            f"on_mismatch={on_mismatch!r} is not 'warn', 'clamp' or 'raise'; on_mismatch='warn' would work"
        )
    from autotune_loader.fleet import entry_for  # it reads what is defined here

    path, machine = find_loader_file() if path is None else path, inspect_machine()
    file = entry_for(path, machine)
    config = config_in(file)
    if file.fingerprint is None:
        return config
    here = machine.fingerprint(dataset=file.fingerprint.dataset, storage=file.fingerprint.storage)
    found = [difference.sentence for difference in differences(file.fingerprint, here) if difference.matters]
    if not found:
        return config
    text = f"{os.fspath(path)} was tuned on another machine: {'; '.join(found)}"
    if on_mismatch == "raise":
        raise MachineMismatchError(f"{text}. Tune again here, or load with on_mismatch='clamp'")
    clamped = (clamp if on_mismatch == "clamp" else within_cores)(config, file.fingerprint, here)
    if clamped != config:
        text += f"; clamped to {clamped}"
    elif on_mismatch == "clamp":
        text += "; nothing had to be clamped"
    python_warnings.warn(text, stacklevel=2)
    return clamped


def within_cores(config: LoaderConfig, tuned_on: Fingerprint, here: Fingerprint) -> LoaderConfig:
    """The configuration with fewer workers and step threads where it was made for more cores than there are here.

    Workers that wait may outnumber the cores as they did there; no fewer are left than there are cores to use.
    """
    workers, threads = config.num_workers, config.consumer_threads
    if here.usable_cores < tuned_on.usable_cores:
        scaled = workers * here.usable_cores // tuned_on.usable_cores
        workers = max(scaled, min(workers, here.usable_cores))
        threads = None if threads is None else min(threads, max(1, here.usable_cores))
    return replace(config, num_workers=workers, consumer_threads=threads)


def clamp(config: LoaderConfig, tuned_on: Fingerprint, here: Fingerprint) -> LoaderConfig:
    """The configuration scaled down to a machine with fewer cores or without the accelerator; never scaled up."""
    config = within_cores(config, tuned_on, here)
    return config if here.gpus else replace(config, pin_memory=False, device_prefetch=0)
