"""What a run found, as one value: what to use, what was measured, what can be said of it.

Methods that show it import `report` when they are called: reading a file and deciding need none of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.results.file import SCHEMA_VERSION, config_of, differences_here, find_file, read_json
from autotune_loader.values import Interval, LoaderConfig, Measurement, RateUnit, StageTime, Trial, averaged
from autotune_loader.values.serialization import from_plain, to_plain, write_json
from autotune_loader.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from optuna import Study
    from torch.utils.data import DataLoader
    from typing_extensions import Self

    from autotune_loader.search.belief import Prediction
else:
    Study = Any  # importing Optuna takes a second, and no file holds one

_Loader = TypeVar("_Loader")
Status = Literal["complete", "undecided", "partial", "fallback"]
FoundBy = Literal["tune", "autoloader", "watch"]
NOT_IN_TRIALS = ("traces", "stages", "samples", "window_s", "read_bytes", "retryable")
"""Fields of measurements and failures that are not in `loader.json`: single batches, and what only the search needs."""
NOT_IN_FILE = ("best", "study", "parts")
"""Fields that are not in `loader.json`, or not under their name: `best` is `dataloader_kwargs` and `extras`."""
ORDER = ("shuffle", "sampler", "batch_sampler")
"""Arguments of DataLoader that decide the order of the samples."""


class Finding(str):
    """What can be said of a run: a sentence that has a name. `diagnosis.messages` has all; code decides by `kind`."""

    kind: str
    """Such as "cpu" or "larger_reads": the name of its row, in lower case."""
    gain: float | None
    """What it is worth at most, relative to the rate now: 0.5 is half as fast again. None where nothing bounds it."""

    def __new__(cls, *, kind: str, sentence: str, gain: float | None = None) -> Finding:
        self = super().__new__(cls, sentence)
        self.kind, self.gain = kind, gain
        return self

    @property
    def sentence(self) -> str:
        """For people."""
        return str(self)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]:
        return (), self.to_plain()

    def to_plain(self) -> dict[str, Any]:
        """Its entry in `loader.json`."""
        gain = {} if self.gain is None else {"gain": self.gain}
        return {"kind": self.kind, "sentence": str(self), **gain}

    @classmethod
    def from_plain(cls, raw: Any) -> Finding:
        """The inverse of `to_plain`.

        Raises:
            ValueError: `raw` is not a finding.
        """
        match raw:
            case {"kind": str(kind), "sentence": str(sentence)}:
                gain = raw.get("gain")
            case _:
                raise ValueError(f"{raw!r:.60} is not a finding with a kind and a sentence")
        if not isinstance(gain, (int, float, type(None))):
            raise ValueError(f"gain={gain!r:.60} is not a number")
        return cls(kind=kind, sentence=sentence, gain=gain)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """The result of `tune()`, of an AutoLoader, or of `run`: what was found and what it rests on.

    `TuningResult.load(path)` is the result that was saved, but for the study, the times of single batches, what only the
    search needs of a trial, and the objects of the tuned loader that `make_loader()` uses. Pictures need matplotlib;
    without it they raise `MissingExtraError`.
    """

    best: LoaderConfig
    """The cheapest configuration of those that are as fast as the fastest. All settings are for each training process."""
    status: Status
    """`complete`; `undecided` when too little was measured to choose, so that `best` is a guess; `partial` when it was
    interrupted, or training goes on; `fallback` when nothing worked and `best` is torch's defaults."""
    found_by: FoundBy = "tune"
    tuned_at: str | None = None
    """When it was found: ISO 8601, UTC."""
    baseline: LoaderConfig = field(default_factory=LoaderConfig)
    """The user's own configuration, or torch's defaults."""
    batch_size: int | None = None
    """Samples of a batch; None where the dataset or a batch_sampler makes the batches."""
    shuffle: bool | None = None
    """Whether the order was random; None for a sampler or batch_sampler of the user's, or an IterableDataset."""
    drop_last: bool = False
    rate_unit: RateUnit = "samples/s"
    """Of all rates: batches where it is not known how many samples they hold."""
    rate: Interval | None = None
    """Of the best configuration, from the paired rounds where it ran in them."""
    baseline_rate: Interval | None = None
    speedup: Interval | None = None
    """Rate of the best over that of the baseline, from paired rounds; None where none were run, or they are the same."""
    ceiling: Interval | None = None
    """Rate of training that never waits for data: on an accelerator that of the step alone, data already in memory; on a CPU,
    whose cores step and loader share, `rate / (1 - wait_share)` if that is less."""
    transfer_ceiling: Interval | None = None
    """Rate of the step on batches that lie ready in DataLoader's workers, which no number of them can exceed; None off an
    accelerator."""
    wait_share: float | None = None
    """Of the best configuration, like the three below: share of the time in which the loop waited for data."""
    memory_bytes: int | None = None
    """Of all processes together."""
    gpu_busy_share: float | None = None
    """Share of the time in which the GPU was in a step, by its own clock; gaps between kernels are included."""
    gpu_utilization: float | None = None
    """Share of the time in which any kernel of any process ran on the GPU, as NVML tells it."""
    as_fast: tuple[LoaderConfig, ...] = ()
    """Others that count as equally fast, by the rule that made the choice."""
    undecided: Finding | None = None
    """Why the choice is a guess, and what would decide it."""
    ended: Finding | None = None
    """Why nothing more was tried."""
    bottleneck: Finding | None = None
    """What limits training with the best settings; its `gain` is the most that instant data would gain."""
    advice: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    step: str = ""
    """What trials did with a batch, in words."""
    step_s: float | None = None
    """Seconds of the step alone, data already in memory."""
    step_cores: float = 1.0
    """Cores that the step keeps busy: its threads on a CPU, 1 where it only feeds an accelerator."""
    source: Finding | None = None
    """Where trials had their samples from, storage or memory, and where training will have them from."""
    stages: tuple[StageTime, ...] = ()
    """Where the time of a sample goes in a worker, the longest stage first."""
    tolerance: float = 0.02
    """Rates this close count as equally fast."""
    seconds: float = 0.0
    """Wall seconds from the call to the result."""
    machine: Fingerprint | None = None
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments for the other loaders of a script, by the line that makes each, such as "train.py:47"."""
    trials: tuple[Trial, ...] = ()
    """Every trial, alone or in a paired round."""
    study: Study | None = field(default=None, compare=False, repr=False)
    """The Optuna study, an ordinary one; None after `load()`."""
    parts: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What `make_loader()` takes over from the tuned loader: collate_fn, worker_init_fn, generator, and over the same
    `dataset` its sampler or batch_sampler."""

    def rates_of(self, config: LoaderConfig) -> dict[int, float]:
        """The rates of a configuration in A/B rounds, by the number of the round."""
        return {
            trial.round: trial.measurement.samples_per_s.value
            for trial in self.trials
            if trial.round is not None and trial.config == config and trial.measurement is not None
        }

    def measurement_of(self, config: LoaderConfig) -> Measurement | None:
        """The mean measurement of a configuration in A/B rounds, or else that of its last trial."""
        own = [trial for trial in self.trials if trial.measurement and trial.config.key() == config.key()]
        in_rounds = [trial.measurement for trial in own if trial.round is not None and trial.measurement]
        if in_rounds:
            return averaged(in_rounds)
        return own[-1].measurement if own else None

    def apply_to(self, loader: _Loader, *, device: Any = None) -> _Loader:
        """Return a loader with the settings of the result: same dataset, sampler, shuffling and class.

        Args:
            loader: A DataLoader, or a subclass such as StatefulDataLoader. It does not change.
            device: Device of the step, if `allow="device_prefetch"` chose to copy batches ahead; "cuda" by default.

        Raises:
            ValueError: A batch size was tuned, and this loader has a batch_sampler, which decides it; or its class
                keeps something that runs, such as a thread. The message names what to try.
        """
        return self.best.apply_to(loader, device=device)

    def make_loader(self, dataset: Any, *, device: Any = None, **kwargs: Any) -> DataLoader[Any]:
        """Return a DataLoader over `dataset` with the settings of the result.

        Batch size, shuffling, drop_last, collate_fn, worker_init_fn and generator are those of the tuned loader. After
        `load()`, functions and objects are unknown: pass them, or use `apply_to(loader)`.

        Args:
            dataset: Any dataset that DataLoader takes.
            device: As in `apply_to()`.
            **kwargs: Further DataLoader arguments, such as `shuffle=False`; they override the tuned ones. Those for
                workers, such as `timeout`, are used if there are workers.

        Raises:
            ValueError: The tuned loader had its own sampler or batch_sampler, which belongs to another dataset.
        """
        from autotune_loader.pipeline.batches import prefetched_as_tuned
        from autotune_loader.pipeline.build import build_loader

        parts = {**self._parts_for(dataset, kwargs), **kwargs}
        if parts.get("batch_sampler") is None:
            parts = {"batch_size": self.batch_size, "drop_last": self.drop_last, **parts}
        made: DataLoader[Any] = prefetched_as_tuned(
            build_loader(dataset, self.best, **parts), self.best, device or "cuda"
        )
        return made

    def _parts_for(self, dataset: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the tuned loader had, as far as it belongs to this dataset and is not given."""
        from torch.utils.data import IterableDataset

        parts = {name: value for name, value in self.parts.items() if name not in (*ORDER, "dataset")}
        if isinstance(dataset, IterableDataset) or not given.keys().isdisjoint(ORDER):
            return parts
        if self.shuffle is not None:
            return {**parts, "shuffle": self.shuffle}
        own = {name: self.parts[name] for name in ORDER if name in self.parts}
        if own and dataset is self.parts.get("dataset"):
            return {**parts, **own}
        name = next(iter(own), "sampler")
        raise ValueError(
            f"{name} was not given, and the tuned loader had its own. Try shuffle=True, or {name}=... for this dataset."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `loader.json`. The file is replaced at once, so a reader never sees half of it.

        If it has a traceback of the user's code, only the owner can read it; otherwise the umask decides.
        """
        has_traceback = any(trial.failure is not None and trial.failure.traceback for trial in self.trials)
        write_json(self.to_dict(), path, private=has_traceback)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Self:
        """Read the result that `save()` wrote.

        Args:
            path: The file; by default that of `load_config()`.

        Raises:
            ConfigFileError: The file is missing, corrupt, or of a newer version.
        """
        return read_json(find_file() if path is None else path, cls.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """The plain JSON values of `loader.json`. Below the first level, default values are left out."""
        kept = {each.name: _sparse(getattr(self, each.name)) for each in fields(self) if each.name not in NOT_IN_FILE}
        extras = {name: getattr(self.best, name) for name in ("device_prefetch", "batch_size")}
        plain: dict[str, Any] = to_plain(
            {
                "schema_version": SCHEMA_VERSION,
                "status": kept.pop("status"),
                "dataloader_kwargs": self.best.to_kwargs(),
                "extras": {name: value for name, value in extras.items() if value},
                **kept,
                "tuned_at": self.tuned_at or datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "created_by": f"autotune_loader {__version__}",
            }
        )
        return plain

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; keys that this release does not know are ignored.

        Raises:
            ValueError, TypeError, KeyError: the values make no result.
        """
        values = {name: value for name, value in raw.items() if name not in NOT_IN_FILE}
        return from_plain({**values, "best": config_of(raw).to_dict()}, cls)

    def predict(
        self, num_workers: int | None = None, prefetch_factor: int | None = None, *, cores: float | None = None
    ) -> Prediction:
        """Predict the rate and memory with other workers, other prefetching, or another number of cores.

        After `load()` a prediction uses the mean of each trial, because the file has no times of single batches.

        Args:
            num_workers: Worker processes; those of the best setting by default.
            prefetch_factor: Batches ahead of each worker.
            cores: Usable cores of the machine; this machine's by default.

        Raises:
            ValueError: No trial succeeded; or `cores` is not positive.
        """
        workers = self.best.num_workers if num_workers is None else num_workers
        return self.predictions([self.best.with_workers(workers, prefetch_factor)], cores=cores)[0]

    def predictions(self, configs: Sequence[LoaderConfig], *, cores: float | None = None) -> list[Prediction]:
        """`predict()` for many configurations at once, which takes little longer than for one."""
        from autotune_loader.search.belief import predict

        if self.machine is None:
            raise ValueError("predict() needs at least one successful trial. Try a result of tune() with one.")
        usable = self.machine.usable_cores
        return predict(
            self.trials, configs, cores=cores, usable_cores=usable, step_s=self.step_s, step_cores=self.step_cores
        )

    def differences(self) -> list[str]:
        """How this machine differs from the one that was tuned: sentences; those that matter come first, with "!"."""
        return [str(each) for each in differences_here(self.machine)]

    @property
    def summary(self) -> tuple[str, ...]:
        """The settings to use, the speedup, the bottleneck, why the search ended, and warnings: a sentence each."""
        from autotune_loader.report.text import sentences_of

        return tuple(sentences_of(self))

    def report(self) -> str:
        """The result as text, 80 columns wide: table, bottleneck, stages, advice, warnings."""
        from autotune_loader.report.text import report_of

        return report_of(self)

    def to_dataframe(self, of: Literal["trials", "stages"] = "trials") -> pd.DataFrame:
        """Return one row per trial, or `"stages"` for one row per stage of a sample in a worker.

        Units are in the names: `_s` seconds, `_bytes` bytes, `_share` 0 to 1. The columns are always the same.
        """
        from autotune_loader.report import frames

        return frames.stages_frame(self) if of == "stages" else frames.trials_frame(self)

    def plot_workers(self) -> Figure:
        """Plot rates over the number of workers: what ran, with intervals of A/B rounds, and what the model expects."""
        from autotune_loader.report import plots

        return plots.plot_workers(self)

    def plot_stages(self) -> Figure:
        """Plot the self time of each stage of a sample in a worker: CPU time and waiting."""
        from autotune_loader.report import plots

        return plots.plot_stages(self)

    def plot_timeline(self, trial: int | None = None) -> Figure:
        """Plot the last batches of one trial: what each worker loaded, and when the training loop waited and stepped.

        Args:
            trial: Number of the trial; by default the last one with the chosen setting.

        Raises:
            ValueError: There is no such trial, it failed, or the result was loaded from a file, which has no single
                batches.
        """
        from autotune_loader.report import plots

        return plots.plot_timeline(self, trial)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write an HTML page with the report and the pictures; it needs no other file.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from autotune_loader.report.page import page_of

        page = page_of(self)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")

    def _repr_html_(self) -> str:
        from autotune_loader.report.page import notebook_html

        return notebook_html(self)

    def __str__(self) -> str:
        from autotune_loader.report.text import summary_of

        return summary_of(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.status}: {self.best}>"


def _sparse(value: Any) -> Any:
    """A record without default values; a configuration keeps its number of workers."""
    if isinstance(value, (list, tuple)):
        return [_sparse(each) for each in value]
    if not is_dataclass(value):
        return value
    told = [(each.name, getattr(value, each.name), each.default) for each in fields(value)]
    kept = [(name, own) for name, own, default in told if own != default or name == "num_workers"]
    return {name: _sparse(own) for name, own in kept if name not in NOT_IN_TRIALS}
