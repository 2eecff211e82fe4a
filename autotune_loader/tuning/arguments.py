"""From what the caller passed to a `Workload`: every mistake that can be seen without running anything is named here."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload, is_iterable_dataset
from autotune_loader.report.units import counted
from autotune_loader.tuning.unwrapping import makes_batches, neither, own_iteration_notes, parts_of_type, unwrapped
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.validation import require_bool, require_count

if TYPE_CHECKING:
    import torch

# What a bare dataset is measured with when no batch size is given; said aloud, because nobody trains with torch's 1.
ASSUMED_BATCH_SIZE = 32
# What people know from `DataLoader` and give to `tune()`.
LOADER_ARGUMENTS = (
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "in_order",
    "pin_memory_device",
)
OTHER_NAMES = {
    "criterion": "loss_fn",
    "loss": "loss_fn",
    "workers": "max_workers",
    "step": "train_step",
    "time": "budget",
}
"""What others call arguments of `tune()`."""
LOADER_PARTS = ("collate_fn", "sampler", "batch_sampler", "worker_init_fn", "generator", "drop_last")
"""What `tune()` takes over into a DataLoader as it is."""
MOST_COLUMNS = 16
"""More arrays of equally many rows are samples."""
NO_MODELS = ("batch", "x", "xb", "inputs", "input", "data", "images")
"""What the first parameter of a step is called where it is not the model."""
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def answers_loader_arguments(tune: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`tune`, with an answer for arguments of `DataLoader` that it does not have."""
    known = inspect.signature(tune).parameters

    @functools.wraps(tune)
    def answering(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if "shuffle" in kwargs:
            raise TypeError(
                f"shuffle={kwargs['shuffle']!r} is not an argument of tune(), where a dataset is shuffled unless a sampler is "
                "given; sampler=torch.utils.data.SequentialSampler(dataset) would read it in order"
            )
        for name in LOADER_ARGUMENTS:
            if name in kwargs:
                raise TypeError(
                    f"{name}={kwargs[name]!r} is not an argument of tune(); tune(DataLoader(dataset, {name}={kwargs[name]!r}, "
                    "...), model) would work, and be compared with what is found"
                )
        if len(args) > 2:
            raise TypeError(
                f"{args[2]!r:.60} is the third argument of tune(); what follows dataset and model is given by name: "
                "tune(dataset, model, loss_fn=..., optimizer=...) would work"
            )
        for name in kwargs.keys() - known.keys():
            if near := [OTHER_NAMES[name]] if name in OTHER_NAMES else difflib.get_close_matches(name, known, n=1):
                raise TypeError(f"{name}={kwargs[name]!r:.60} is not an argument of tune(); {near[0]}=... would work")
        return tune(*args, **kwargs)

    return answering


def make_workload(dataset_or_loader: Any, model: Any = None, **given: Any) -> tuple[Workload, list[str]]:
    """The workload and what the user should be told about how the arguments were read.

    Args:
        dataset_or_loader: as in `tune()`, like `model`.
        model: what the step trains.
        **given: what else `tune()` takes, of which `batch_size`, the step (`loss_fn`, `train_step`, `optimizer`, `device`) and
            the loader's parts (`LOADER_PARTS`) count here; None, or nothing, where it is not given.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and one that would work.
    """
    _check_order(dataset_or_loader, model)
    parts = {name: given.get(name) for name in LOADER_PARTS}
    batch_size = given.get("batch_size")
    if isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool):
        batch_size = int(batch_size)  # numpy's
    require_count("batch_size", batch_size, minimum=1)
    given["train_step"] = _as_step_time(given.get("train_step"))
    for name in ("loss_fn", "train_step", "collate_fn", "worker_init_fn"):
        value = given.get(name)
        if value is not None and not callable(value):
            raise TypeError(f"{name}={value!r} is not callable; {name}=None would work")
    training = _training(model, given)
    dataset_or_loader, unwrapping = unwrapped(dataset_or_loader)
    if _is_loader(dataset_or_loader):
        data, notes = _data_of_loader(dataset_or_loader, batch_size, parts)
        workload = Workload(data=data, training=training, own_config=LoaderConfig.from_loader(dataset_or_loader))
    else:
        data, notes = _data_of_dataset(dataset_or_loader, batch_size, parts)
        workload = Workload(data=data, training=training)
    notes += [*unwrapping, *_check_epoch(data)]
    if training.compiled:
        notes.append("model.compile() is called anew in the bursts, with its defaults: copies of a model forget it")
    return workload, notes


def _check_parts(parts: Mapping[str, Any]) -> None:
    """A class in place of an object, and what torch would only say from within a DataLoader, or not at all."""
    import torch

    for name in ("sampler", "batch_sampler"):
        value = parts[name]
        if isinstance(value, type):
            raise TypeError(f"{name}={value.__name__} is a class; {name}={value.__name__}(...) would work")
        if value is not None and not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
            raise TypeError(f"{name}={value!r} gives no indices; {name}=None would work")
    if not isinstance(generator := parts["generator"], (torch.Generator, type(None))):
        raise TypeError(
            f"generator={generator!r} is not a torch.Generator; generator=torch.Generator().manual_seed(0) would work"
        )
    if parts["drop_last"] is not None:
        require_bool("drop_last", parts["drop_last"])


def _training(model: Any, given: Mapping[str, Any]) -> TrainingSide:
    """The training step, of what was given for it."""
    train_step, optimizer, loss_fn = (given.get(name) for name in ("train_step", "optimizer", "loss_fn"))
    if isinstance(train_step, StepTime):
        return TrainingSide(train_step=train_step)
    _check_model(model, train_step)
    if train_step is not None and not _takes(train_step, 2):
        raise TypeError(
            f"train_step={_shown(train_step)} is called as train_step(model, batch), which its signature does not allow; "
            "train_step=lambda model, batch: ... would work"
        )
    if (first := _first_parameter(train_step)) in NO_MODELS:
        raise TypeError(
            f"train_step={_shown(train_step)} is called as train_step(model, batch), and its first parameter is {first!r}; "
            "train_step=lambda model, batch: ... would work"
        )
    if (
        optimizer is not None
        and not callable(optimizer)
        and not (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad"))
    ):
        raise TypeError(
            f"optimizer={optimizer!r:.60} has no step() and zero_grad(), and makes no optimizer; "
            "optimizer=torch.optim.AdamW, or one over the model's parameters, would work"
        )
    return TrainingSide(
        model=model,
        train_step=train_step,
        loss_fn=_loss_of(loss_fn) if isinstance(loss_fn, type) else loss_fn,
        optimizer=optimizer,
        device=_device_name(given.get("device") or "auto", model),
        compiled=_compiled_parts(model),
    )


def _as_step_time(train_step: Any) -> Any:
    """A number of seconds as the wait that it stands for; all else as it is."""
    if isinstance(train_step, bool) or not isinstance(train_step, (int, float)):
        return train_step
    if not 0 < train_step < math.inf:
        raise ValueError(f"train_step={train_step!r} is not the seconds of a step; train_step=0.05 would work")
    return StepTime(float(train_step))


def _check_order(dataset: Any, model: Any) -> None:
    """What stands where something else belongs: a path, or the model first."""
    if isinstance(dataset, (str, bytes, os.PathLike)):
        raise TypeError(
            f"dataset_or_loader={dataset!r} is a path, not a dataset; "
            f"dataset_or_loader=torchvision.datasets.ImageFolder({os.fspath(dataset)!r}) would work"
        )
    if isinstance(dataset, type):
        name = dataset.__name__
        raise TypeError(f"dataset_or_loader={name} is a class; dataset_or_loader={name}(...) would work")
    if _is_module(dataset):
        raise TypeError(
            f"dataset_or_loader={_shown(dataset)} is a model, which comes second; tune(dataset, model) would work"
        )
    if _is_loader(model) or _is_dataset(model):
        raise TypeError(f"model={_shown(model)} holds data, which comes first; tune(dataset, model) would work")


def _check_model(model: Any, train_step: object) -> None:
    if isinstance(model, type):
        raise TypeError(f"model={model.__name__} is a class; model={model.__name__}(...) would work")
    if model is not None and train_step is None and not callable(model):
        raise TypeError(f"model={_shown(model)} is not callable; train_step=lambda model, batch: ... would work")
    if _is_module(model) and _is_sharded(model):
        raise TypeError(
            f"model={_shown(model)} is sharded over ranks (FSDP, DTensor), and no copy of it trains alone; the model as it is "
            "before it is sharded would work, or model=None for the loader alone"
        )


def _is_sharded(model: Any) -> bool:
    parts = [*model.modules(), *model.parameters()]
    names = {cls.__name__ for part in parts for cls in type(part).__mro__}
    return bool(names & {"FullyShardedDataParallel", "FSDPModule", "DTensor"})


def _compiled_parts(model: Any) -> tuple[str, ...]:
    if not _is_module(model):
        return ()
    return tuple(name for name, part in model.named_modules() if getattr(part, "_compiled_call_impl", None) is not None)


def _loss_of(loss_class: type) -> Any:
    try:
        return loss_class()
    except TypeError as error:
        raise TypeError(
            f"loss_fn={loss_class.__name__} is a class that cannot be made without arguments ({error}); "
            f"loss_fn={loss_class.__name__}(...) would work"
        ) from error


def _first_parameter(function: Any) -> str | None:
    try:
        return next(iter(inspect.signature(function).parameters), None) if function is not None else None
    except (TypeError, ValueError):  # written in C
        return None


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def _shown(value: Any) -> str:
    return getattr(value, "__qualname__", type(value).__name__)


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _is_dataset(value: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(value, Dataset)


def _is_loader(value: Any) -> bool:
    from torch.utils.data import DataLoader

    return isinstance(value, DataLoader)


def _data_of_loader(loader: Any, batch_size: int | None, parts: dict[str, Any]) -> tuple[DataSide, list[str]]:
    for name, value in {"batch_size": batch_size, **parts}.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r} was given together with an existing DataLoader, which has its own; "
                f"{name}=None would work, or pass loader.dataset instead of the loader"
            )
    _check_again("dataset_or_loader", loader.dataset)
    _check_shared_memory(loader.dataset)
    if type(loader.sampler).__name__ in ("RandomSampler", "SequentialSampler"):
        _check_length(loader.dataset)
    data = DataSide.from_loader(loader)
    for name in ("sampler", "batch_sampler"):
        _check_again(name, getattr(data, name))
    return data, own_iteration_notes(loader)


def _data_of_dataset(dataset: Any, batch_size: int | None, parts: dict[str, Any]) -> tuple[DataSide, list[str]]:
    _check_parts(parts)
    _check_again("dataset_or_loader", dataset)
    _check_shared_memory(dataset)
    for name in ("sampler", "batch_sampler"):
        _check_again(name, parts[name])
    if not is_iterable_dataset(dataset) and not _is_map_style(dataset, parts):
        raise neither(dataset)
    if not is_iterable_dataset(dataset):
        _check_map_style(dataset, parts)
    for name in ("sampler", "batch_sampler"):
        if parts[name] is not None and is_iterable_dataset(dataset):
            raise ValueError(f"{name}={parts[name]!r} has no meaning for an IterableDataset; {name}=None would work")
    if parts["batch_sampler"] is not None:
        for name, value in (
            ("batch_size", batch_size),
            ("sampler", parts["sampler"]),
            ("drop_last", parts["drop_last"]),
        ):
            if value is not None:
                raise ValueError(
                    f"{name}={value!r} cannot be given together with batch_sampler; {name}=None would work"
                )
    notes = []
    if is_iterable_dataset(dataset) and batch_size is None and makes_batches(dataset):
        notes.append("the dataset makes its own batches, so the DataLoader makes none (batch_size=None)")
    elif batch_size is None and parts["batch_sampler"] is None:
        batch_size = ASSUMED_BATCH_SIZE
        notes.append(f"batch_size was not given: measured with {batch_size}; pass the one you train with")
    return DataSide.from_dataset(
        dataset, batch_size=batch_size, **{**parts, "drop_last": bool(parts["drop_last"])}
    ), notes


def _is_map_style(dataset: Any, parts: dict[str, Any]) -> bool:
    """As torch has it: a length is only asked for where no sampler says which indices there are."""
    has_sampler = parts["sampler"] is not None or parts["batch_sampler"] is not None
    return hasattr(dataset, "__getitem__") and (has_sampler or hasattr(dataset, "__len__"))


def _check_map_style(dataset: Any, parts: dict[str, Any]) -> None:
    name, has_order = type(dataset).__name__, parts["sampler"] is not None or parts["batch_sampler"] is not None
    if hasattr(dataset, "iloc"):
        raise TypeError(
            f"dataset_or_loader={name} looks up columns, not samples; "
            "TensorDataset(torch.tensor(df[features].values), torch.tensor(df[target].values)) would work"
        )
    if not has_order:
        if _check_length(dataset) == 0:
            raise ValueError(
                "dataset_or_loader is empty (len(dataset) == 0); a dataset with at least one sample would work"
            )
        _check_columns(dataset)
    if isinstance(dataset, dict) and not has_order and 0 not in dataset:
        first = next(iter(dataset))
        raise TypeError(
            f"dataset_or_loader={name} looks up {first!r}, not sample 0; dataset_or_loader=data[{first!r}] would work"
        )


def _check_length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception as error:
        raise TypeError(
            f"dataset_or_loader={type(dataset).__name__} has no length: len() raises {type(error).__name__}: {error}; "
            "sampler=..., which says which indices there are, would work"
        ) from error


def _check_columns(dataset: Any) -> None:
    """`(X, y)` and `{"x": X, "y": y}`: arrays with a row for each sample, where a list of samples is meant."""
    columns = list(dataset.values()) if isinstance(dataset, dict) else dataset
    if not isinstance(columns, (tuple, list)) or not 1 < len(columns) <= MOST_COLUMNS:
        return
    shapes = {tuple(getattr(each, "shape", ())) for each in columns}
    rows = {shape[:1] for shape in shapes}
    if len(rows) == 1 and rows != {()} and (len(shapes) > 1 or isinstance(dataset, dict)):
        raise TypeError(
            f"dataset_or_loader={type(dataset).__name__} holds {len(columns)} arrays of {next(iter(rows))[0]} rows; "
            f"TensorDataset(*map(torch.as_tensor, data{'.values()' if isinstance(dataset, dict) else ''})) would work"
        )


def _check_shared_memory(dataset: Any) -> None:
    """Refuse a stream that coordinates its workers through named shared memory: a copy of it would move the original on."""
    if not is_iterable_dataset(dataset):
        return
    from multiprocessing.shared_memory import SharedMemory

    found = next(parts_of_type(dataset, SharedMemory), None)
    if found is not None:
        raise TypeError(
            f"dataset_or_loader={type(dataset).__name__} coordinates its workers by shared memory ({found[0]}), which "
            "bursts would change under your hands; a map-style dataset over the same files would work (for MosaicML streaming: "
            "LocalDataset(folder)), and its configuration serves this one"
        )


def _check_again(name: str, value: Any) -> None:
    """Refuse what can be read only once. An IterableDataset that is its own iterator may start over; the probe tries it."""
    if not isinstance(value, Iterator) or is_iterable_dataset(value):
        return
    instead = (
        "a list of it" if name != "dataset_or_loader" else "an IterableDataset whose __iter__ makes a new iterator"
    )
    raise TypeError(f"{name}={value!r} can be read only once, and tuning would use it up; {instead} would work")


def _check_epoch(data: DataSide) -> list[str]:
    samples, size = data.samples_per_epoch(), data.batch_size
    if samples == 0:
        raise ValueError(
            "dataset_or_loader delivers no sample in an epoch; a sampler with at least one index would work"
        )
    if samples is None or size is None or samples >= size or data.is_iterable:
        return []
    if data.drop_last:
        raise ValueError(
            f"batch_size={size} is more than the {samples} samples of an epoch, and drop_last=True drops what is left; "
            f"batch_size={samples} would work"
        )
    return [f"an epoch has {counted(samples, 'sample')}, less than one batch of {size}"]


def _device_name(device: str | torch.device, model: Any = None) -> str:
    import torch

    if device == "auto":
        return _auto_device(model)
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a torch device; device='auto' would work") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r} is not there ({_cuda_devices()}); device='auto' would work")
    return str(chosen)


def _auto_device(model: Any) -> str:
    """Where the model is already, or where this process puts things by default; else CUDA where there is one."""
    import torch

    if _is_module(model):
        used = [parameter.device for parameter in model.parameters() if parameter.device.type not in ("cpu", "meta")]
        if used:
            return str(used[0])
    default = torch.get_default_device()
    if default.type not in ("cpu", "meta"):
        return str(default)
    # Not is_available(): it opens the driver, after which no child that this process forks could use CUDA. This asks NVML.
    if not torch.cuda.device_count():
        return "cpu"
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return f"cuda:{chosen}" if chosen else "cuda"


def _cuda_devices() -> str:
    import torch

    count = torch.cuda.device_count()
    return f"torch sees {count} CUDA device{'' if count == 1 else 's'}"
