"""The finished run as one value: what to use, what was measured, what it rests on, and how to look at it."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, overload

from autotune_loader.machine.facts import Fingerprint
from autotune_loader.results.load import SCHEMA_VERSION, config_of, read_json
from autotune_loader.results.loader_file import (
    Advice,
    BatchSizeChoice,
    Finals,
    Measured,
    Reused,
    Spent,
    Status,
    Verdict,
)
from autotune_loader.results.views import Views
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import WITHOUT_WORKERS, LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.serialization import from_plain, to_plain, write_json
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
from autotune_loader.version import __version__

if TYPE_CHECKING:
    from optuna import Study
    from torch.utils.data import DataLoader

    from autotune_loader.pipeline.prefetch import DevicePrefetcher
    from autotune_loader.twin import Prediction
else:
    Study = Any  # importing Optuna takes a second, and no file holds one

log = logging.getLogger(__name__)
ELSEWHERE = {"best", "spent", "study", "parts"}
"""Fields that `loader.json` has by no name, or by another: `best` is `dataloader_kwargs` and `extras`, `spent` is `budget`."""
FILE_ONLY: dict[str, Any] = {
    "schema_version": str,
    "dataloader_kwargs": dict[str, Any],
    "scope": Literal["per_process"],
    "extras": dict[str, Any],
    "budget": Spent,
    "created_by": str,
}
"""Keys of `loader.json` that are no field of the result: `dataloader_kwargs` can be splatted into `DataLoader` as they stand,
and are for each training process (rank), as `scope` says."""


def _in_a_line(result: TuningResult) -> str:
    rate, ratio = result.measured.samples_per_s, result.speedup
    told = [f"{result.status}: {result.best}"]
    told += [f"{rate} {result.measured.rate_unit}"] if rate is not None else []
    told += (
        [f"{ratio} times the rate of {result.baseline}"] if ratio is not None and result.best != result.baseline else []
    )
    return f"<TuningResult {'; '.join(told)}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult(Views):
    """What `tune()` found.

    `save()` and `load()` are inverse: `TuningResult.load(saved) == result`. Not in the file, and not compared, are the study,
    which stays in memory or its storage, what single batches and watched workers showed, and `parts`.
    """

    best: LoaderConfig
    """The cheapest configuration within tolerance of the fastest. In the file: `dataloader_kwargs`, for each training process
    (rank), and `extras`."""
    status: Status
    """`complete`; `undecided` when too little, or too disturbed, was measured to choose, so that the configuration is a guess;
    `partial` when it was interrupted; `fallback` when nothing worked and torch's defaults are given."""
    baseline: LoaderConfig = field(default_factory=LoaderConfig)
    """The user's own configuration, or torch's defaults."""
    batch_size: BatchSizeChoice = field(default_factory=lambda: BatchSizeChoice(value=None))
    summary: tuple[str, ...] = ()
    """Sentences a person reads."""
    warnings: tuple[str, ...] = ()
    verdict: Verdict = field(
        default_factory=lambda: Verdict(binding="unknown", sentence="Nothing was measured, so nothing can be said.")
    )
    advice: tuple[Advice, ...] = ()
    stage_times: tuple[StageTime, ...] = ()
    """Where the time of a sample goes in a worker, the longest stage first; `stages()` has it as a frame."""
    measured: Measured = field(default_factory=Measured)
    spent: Spent = field(default_factory=lambda: Spent(seconds=0.0, bursts=0))
    """What finding it cost; in the file: `budget`."""
    tuned_at: str | None = None
    """When it was found, ISO 8601, UTC; None where it was not kept for the next call."""
    fingerprint: Fingerprint | None = None
    tolerance: float | None = None
    """Rates this close counted as equally fast; None where the file that was loaded does not tell."""
    reused: Reused | None = None
    """Set where an earlier result was checked and used instead of a new search."""
    origin: Literal["tune", "live"] = "tune"
    """`live` where an AutoLoader found it while it trained."""
    loaders: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments for the other loaders of a script, by the line that makes each, such as "train.py:47"."""
    finals: Finals = field(default_factory=Finals)
    trials: tuple[Trial, ...] = ()
    twin: TwinContext | None = None
    study: Study | None = field(default=None, compare=False, repr=False)
    """The Optuna study, an ordinary one; None after `load()`, and where an earlier result was used."""
    parts: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What `make_loader()` takes over from the tuned loader: collate_fn, worker_init_fn, generator, drop_last, and over the
    same dataset a sampler or batch_sampler of its own."""

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

        Raises:
            ValueError: the tuned loader had a sampler or batch_sampler of its own, which belongs to another dataset.
        """
        from autotune_loader.pipeline.build import build_loader
        from autotune_loader.pipeline.prefetch import prefetched_as_tuned

        parts = _parts_for(dataset, self.parts, kwargs)
        if "batch_size" not in kwargs and "batch_sampler" not in {**parts, **kwargs}:
            kwargs["batch_size"] = self.batch_size.value
        loader: DataLoader[Any] = build_loader(dataset, self.best, **{**parts, **kwargs})
        return loader if device is None else prefetched_as_tuned(loader, self.best, device)

    def save(self, path: str | os.PathLike[str], *, private: bool = False) -> None:
        """Write `loader.json`: to a temporary file beside it, then renamed, so that a reader never sees half of it.

        One that holds a traceback of yours, or is `private`, is readable by you alone; for others the umask decides.
        """
        private = private or any(trial.failure is not None and trial.failure.traceback for trial in self.trials)
        write_json(self.to_dict(), path, private=private)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TuningResult:
        """The result that `save()` wrote.

        Raises:
            ConfigFileError: missing, corrupt, or of a newer major version.
        """
        return read_json(path, cls.from_dict)

    def to_dict(self) -> dict[str, Any]:
        """The plain JSON values of `loader.json`."""
        finals = replace(self.finals, measurements=tuple(_without_raw(each) for each in self.finals.measurements))
        trials = tuple(replace(trial, measurement=_without_raw(trial.measurement)) for trial in self.trials)
        plain = to_plain(replace(self, trials=trials, finals=finals, study=None, parts={}))
        kept = {name: value for name, value in plain.items() if name not in ELSEWHERE}
        return {
            "schema_version": SCHEMA_VERSION,
            "status": kept.pop("status"),
            "dataloader_kwargs": self.best.to_kwargs(),
            "scope": "per_process",
            "extras": self.best.to_extras(),
            "budget": plain["spent"],
            **kept,
            "created_by": f"autotune_loader {__version__}",
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> TuningResult:
        """The inverse of `to_dict`; keys that this release does not know are ignored, with a line in the log.

        Raises:
            ValueError, TypeError, KeyError: the values make no result.
        """
        known = {each.name for each in fields(cls)} - ELSEWHERE
        if unknown := sorted(raw.keys() - known - FILE_ONLY.keys()):
            log.info("keys that this release does not use are ignored: %s", ", ".join(unknown))
        values = {name: raw[name] for name in known & raw.keys()}
        values |= {"spent": raw["budget"]} if "budget" in raw else {}
        return from_plain({**values, "best": config_of(raw).to_dict()}, cls)

    def predict(
        self,
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        *,
        cores: float | None = None,
        stages: Mapping[str, float] | None = None,
        **knobs: Any,
    ) -> Prediction:
        """What if: the rate and memory expected of another configuration, of another number of cores, or of cheaper stages.

        After `load()` the twin rests on each burst's means, as the histories of single batches are not in the file.

        Args:
            num_workers: worker processes; the best configuration's where it is not given, like every other knob.
            prefetch_factor: batches ahead per worker.
            cores: usable cores of the machine asked about; this one's where it is not given.
            stages: what stages would take of what they take, by their names in `stages()`: `{"decode": 0.5}` is half.
            **knobs: other fields of `LoaderConfig`, such as `in_order=False` or `consumer_threads=2`.

        Raises:
            TypeError: a knob that `LoaderConfig` does not have.
            ValueError: no burst succeeded, so there is nothing to predict from; `cores` is not positive; or a stage is none.
        """
        named = {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
        knobs |= {name: value for name, value in named.items() if value is not None}
        return self.predict_all([_changed(self.best, knobs)], cores=cores, stages=stages)[0]

    def predict_all(
        self, configs: Sequence[LoaderConfig], *, cores: float | None = None, stages: Mapping[str, float] | None = None
    ) -> list[Prediction]:
        """`predict()` for many whole configurations at once, which takes little longer than for one.

        Raises:
            ValueError: as in `predict()`.
        """
        from autotune_loader.decision.belief import fit_twin
        from autotune_loader.twin.memory import MemoryModel
        from autotune_loader.twin.what_if import with_stages

        if cores is not None and not cores > 0:
            raise ValueError(f"cores={cores!r} must be more than 0, such as cores=2")
        context = self.twin
        observed = [(each.config, each.measurement) for each in self.trials if each.measurement is not None]
        if context is None or (twin := fit_twin(observed, context)) is None:
            raise ValueError(
                "nothing was measured, so nothing can be predicted; a result of tune() with a trial would work"
            )
        twin = with_stages(twin, self.stage_times, stages) if stages else twin
        memory = MemoryModel.fit(observed)
        return [
            replace(prediction, pss_bytes=None if memory is None else memory.peak_bytes(prediction.config))
            for prediction in twin.predict_all(configs, epoch_batches=context.epoch_batches, cores=cores)
        ]

    __repr__ = _in_a_line

    def __str__(self) -> str:
        return "\n".join(self.summary) or f"{self.status}: {self.best}"


def _changed(best: LoaderConfig, changes: dict[str, Any]) -> LoaderConfig:
    known = [each.name for each in fields(LoaderConfig)]
    for name in changes.keys() - known:
        near = difflib.get_close_matches(name, known, n=1) or known
        raise TypeError(f"{name}={changes[name]!r} is no knob; {' or '.join(near)} would work")
    if changes.get("num_workers") == 0:  # what only workers have goes with them
        changes = {**WITHOUT_WORKERS, **changes, "multiprocessing_context": None}
    return replace(best, **changes)


def _without_raw(measurement: Measurement | None) -> Measurement | None:
    return None if measurement is None else replace(measurement, traces=(), stages=None)


def _parts_for(dataset: Any, own_parts: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What is taken over where these arguments are given."""
    parts = dict(own_parts)
    tuned_on = parts.pop("dataset", None)
    order = "batch_sampler" if "batch_sampler" in parts else "sampler"
    if order not in parts or (order == "sampler" and "batch_sampler" in given):
        return parts
    own = parts.pop(order)
    if order in given or (order == "sampler" and "shuffle" in given):
        return parts
    if dataset is not tuned_on or (order == "batch_sampler" and not given.keys().isdisjoint(("batch_size", "sampler"))):
        raise ValueError(
            f"{order} was not given, and it was tuned with a {type(own).__name__}, which decides what is in a batch; "
            f"{order}=... for this dataset would work"
        )
    return {**parts, order: own}
