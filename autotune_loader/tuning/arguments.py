"""From what the caller passed to a `Workload`: every mistake that can be seen without running anything is named here."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload, is_iterable_dataset
from autotune_loader.report.units import counted
from autotune_loader.tuning.unwrapping import makes_batches, neither, own_iteration_notes, parts_of_type, unwrapped
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.validation import require_bool, require_count

if TYPE_CHECKING:
    import torch

ASSUMED_BATCH_SIZE = 32
"""What a bare dataset is measured with when no batch size is given; said aloud, because nobody trains with torch's 1."""
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
"""What people know from `DataLoader` and give to `tune()`."""
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
SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def refuse(rows: Iterable[tuple[bool, str, str]], kind: type[Exception] = TypeError) -> None:
    """Raise the first complaint that applies: (does it?, what is wrong, what would work)."""
    for applies, wrong, instead in rows:
        if applies:
            raise kind(f"{wrong}; {instead} would work")


def answers_loader_arguments(tune: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`tune`, with an answer for arguments that it does not have."""
    known = inspect.signature(tune).parameters

    def answer(name: str) -> str | None:
        if name == "shuffle":
            return "sampler=torch.utils.data.SequentialSampler(dataset), as a dataset is shuffled unless a sampler is given,"
        if name in LOADER_ARGUMENTS:
            return f"tune(DataLoader(dataset, {name}=..., ...), model), which compares it with what is found,"
        near = [OTHER_NAMES[name]] if name in OTHER_NAMES else difflib.get_close_matches(name, known, n=1)
        return f"{near[0]}=..." if near else None

    @functools.wraps(tune)
    def answering(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs.keys() - known.keys():
            if (instead := answer(name)) is not None:
                refuse([(True, f"{name}={kwargs[name]!r:.60} is not an argument of tune()", instead)])
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
    parts = {name: given.get(name) for name in ("batch_size", *LOADER_PARTS)}
    if isinstance(size := parts["batch_size"], numbers.Integral) and not isinstance(size, bool):
        parts["batch_size"] = int(size)  # numpy's
    require_count("batch_size", parts["batch_size"], minimum=1)
    given["train_step"] = _as_step_time(given.get("train_step"))
    for name in ("loss_fn", "train_step", "collate_fn", "worker_init_fn"):
        value = given.get(name)
        refuse([(value is not None and not callable(value), f"{name}={value!r} is not callable", f"{name}=None")])
    training = _training(model, given)
    dataset_or_loader, notes = unwrapped(dataset_or_loader)
    own_config = None
    if _is_loader(dataset_or_loader):
        own_config = LoaderConfig.from_loader(dataset_or_loader)
        data, notes = _data_of_loader(dataset_or_loader, parts), [*own_iteration_notes(dataset_or_loader), *notes]
    else:
        notes = [*_fill_batch_size(dataset_or_loader, parts), *notes]
        data = DataSide.from_dataset(dataset_or_loader, **{**parts, "drop_last": bool(parts["drop_last"])})
    notes += _check_epoch(data)
    if training.compiled:
        notes.append("model.compile() is called anew in the bursts, with its defaults: copies of a model forget it")
    return Workload(data=data, training=training, own_config=own_config), notes


def _check_order(dataset: Any, model: Any) -> None:
    """What stands where something else belongs: a path, or the model first."""
    of = "dataset_or_loader"
    if isinstance(dataset, (str, bytes, os.PathLike)):
        folder = f"{of}=torchvision.datasets.ImageFolder({os.fspath(dataset)!r})"
        refuse([(True, f"{of}={dataset!r} is a path, not a dataset", folder)])
    given, second, in_order = _shown(dataset), _shown(model), "tune(dataset, model)"
    refuse(
        [
            (isinstance(dataset, type), f"{of}={given} is a class", f"{of}={given}(...)"),
            (_is_module(dataset), f"{of}={given} is a model, which comes second", in_order),
            (_is_loader(model) or _is_dataset(model), f"model={second} holds data, which comes first", in_order),
        ]
    )


# The step


def _as_step_time(train_step: Any) -> Any:
    """A number of seconds as the wait that it stands for; all else as it is."""
    if isinstance(train_step, bool) or not isinstance(train_step, (int, float)):
        return train_step
    wrong = f"train_step={train_step!r} is not the seconds of a step"
    refuse([(not 0 < train_step < math.inf, wrong, "train_step=0.05")], ValueError)
    return StepTime(float(train_step))


def _training(model: Any, given: Mapping[str, Any]) -> TrainingSide:
    """The training step, of what was given for it."""
    train_step, optimizer, loss_fn = (given.get(name) for name in ("train_step", "optimizer", "loss_fn"))
    if isinstance(train_step, StepTime):
        return TrainingSide(train_step=train_step)
    a_step = "train_step=lambda model, batch: ..."
    called = f"train_step={_shown(train_step)} is called as train_step(model, batch)"
    steps = callable(optimizer) or (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad"))
    shown = f"model={_shown(model)}"
    refuse(
        [
            (isinstance(model, type), f"{shown} is a class", f"{shown}(...)"),
            (model is not None and train_step is None and not callable(model), f"{shown} is not callable", a_step),
            (
                _is_module(model) and _is_sharded(model),
                f"{shown} is sharded over ranks (FSDP, DTensor), and no copy of it trains alone",
                "the model as it is before it is sharded, or model=None for the loader alone,",
            ),
            (
                train_step is not None and not _takes_two(train_step),
                f"{called}, which its signature does not allow",
                a_step,
            ),
            (
                optimizer is not None and not steps,
                f"optimizer={optimizer!r:.60} has no step() and zero_grad(), and makes no optimizer",
                "optimizer=torch.optim.AdamW, or one over the model's parameters,",
            ),
        ]
    )
    return TrainingSide(
        model=model,
        train_step=train_step,
        loss_fn=_loss_of(loss_fn) if isinstance(loss_fn, type) else loss_fn,
        optimizer=optimizer,
        device=_device_name(given.get("device") or "auto", model),
        compiled=_compiled_parts(model),
    )


def _is_sharded(model: Any) -> bool:
    parts = [*model.modules(), *model.parameters()]
    return bool({cls.__name__ for part in parts for cls in type(part).__mro__} & SHARDED)


def _compiled_parts(model: Any) -> tuple[str, ...]:
    named = model.named_modules() if _is_module(model) else ()
    return tuple(name for name, part in named if getattr(part, "_compiled_call_impl", None) is not None)


def _loss_of(loss_class: type) -> Any:
    try:
        return loss_class()
    except TypeError as error:
        name = f"loss_fn={loss_class.__name__}"
        raise TypeError(
            f"{name} is a class that cannot be made without arguments ({error}); {name}(...) would work"
        ) from error


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind("model", "batch")
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def _device_name(device: str | torch.device, model: Any = None) -> str:
    import torch

    if device == "auto":
        return _auto_device(model)
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a torch device; device='auto' would work") from error
    count = torch.cuda.device_count() if chosen.type == "cuda" else 0
    is_missing = chosen.type == "cuda" and (chosen.index or 0) >= count
    seen = f"torch sees {counted(count, 'CUDA device')}"
    refuse([(is_missing, f"device={device!r} is not there ({seen})", "device='auto'")], ValueError)
    return str(chosen)


def _auto_device(model: Any) -> str:
    """Where the model is already, or where this process puts things by default; else CUDA where there is one."""
    import torch

    used = [parameter.device for parameter in model.parameters()] if _is_module(model) else []
    for device in (*used, torch.get_default_device()):
        if device.type not in ("cpu", "meta"):
            return str(device)
    # Not is_available(): it opens the driver, after which no child that this process forks could use CUDA. This asks NVML.
    if not torch.cuda.device_count():
        return "cpu"
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return f"cuda:{chosen}" if chosen else "cuda"


# The data


def _data_of_loader(loader: Any, parts: Mapping[str, Any]) -> DataSide:
    for name, value in parts.items():
        if value is not None:
            raise ValueError(
                f"{name}={value!r:.60} was given together with an existing DataLoader, which has its own; {name}=None would "
                "work, or loader.dataset in place of the loader"
            )
    _check_dataset(loader.dataset)
    if type(loader.sampler).__name__ in ("RandomSampler", "SequentialSampler"):
        _length(loader.dataset)
    data = DataSide.from_loader(loader)
    for name in ("sampler", "batch_sampler"):
        _check_again(name, getattr(data, name))
    return data


def _fill_batch_size(dataset: Any, parts: dict[str, Any]) -> list[str]:
    """Check a dataset and what was given with it; a batch size that is missing is filled in, with a note."""
    _check_parts(parts)
    _check_dataset(dataset)
    is_iterable, has_batches = is_iterable_dataset(dataset), parts["batch_sampler"] is not None
    has_order = has_batches or parts["sampler"] is not None
    if not is_iterable:
        _check_map_style(dataset, has_order)
    for name, value in parts.items():
        has_no_meaning = is_iterable and name in ("sampler", "batch_sampler")
        if value is not None and (has_no_meaning or (has_batches and name in ("batch_size", "sampler", "drop_last"))):
            why = (
                "has no meaning for an IterableDataset"
                if has_no_meaning
                else "cannot be given together with batch_sampler"
            )
            raise ValueError(f"{name}={value!r:.60} {why}; {name}=None would work")
    if parts["batch_size"] is not None or has_batches:
        return []
    if is_iterable and makes_batches(dataset):
        return ["the dataset makes its own batches, so the DataLoader makes none (batch_size=None)"]
    parts["batch_size"] = ASSUMED_BATCH_SIZE
    return [f"batch_size was not given: measured with {ASSUMED_BATCH_SIZE}; pass the one you train with"]


def _check_parts(parts: Mapping[str, Any]) -> None:
    """A class in place of an object, and what torch would only say from within a DataLoader, or not at all."""
    import torch

    for name in ("sampler", "batch_sampler"):
        value = parts[name]
        refuse([(isinstance(value, type), f"{name}={_shown(value)} is a class", f"{name}={_shown(value)}(...)")])
        if value is not None and not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
            raise TypeError(f"{name}={value!r} gives no indices; {name}=None would work")
        _check_again(name, value)
    is_one = isinstance(parts["generator"], (torch.Generator, type(None)))
    wrong = f"generator={parts['generator']!r} is not a torch.Generator"
    refuse([(not is_one, wrong, "generator=torch.Generator().manual_seed(0)")])
    if parts["drop_last"] is not None:
        require_bool("drop_last", parts["drop_last"])


def _check_dataset(dataset: Any) -> None:
    _check_again("dataset_or_loader", dataset)
    if not is_iterable_dataset(dataset):
        return
    # A stream that coordinates its workers through named shared memory: a copy of it would move the original on.
    from multiprocessing.shared_memory import SharedMemory

    found = next(parts_of_type(dataset, SharedMemory), None)
    if found is not None:
        raise TypeError(
            f"dataset_or_loader={type(dataset).__name__} coordinates its workers by shared memory ({found[0]}), which "
            "bursts would change under your hands; a map-style dataset over the same files would work (for MosaicML streaming: "
            "LocalDataset(folder)), and its configuration serves this one"
        )


def _check_map_style(dataset: Any, has_order: bool) -> None:
    """As torch has it: a length is only asked for where no sampler says which indices there are."""
    of, name = "dataset_or_loader", type(dataset).__name__
    if not hasattr(dataset, "__getitem__") or not (has_order or hasattr(dataset, "__len__")):
        raise neither(dataset)
    tensors = "TensorDataset(torch.tensor(df[features].values), torch.tensor(df[target].values))"
    refuse([(hasattr(dataset, "iloc"), f"{of}={name} looks up columns, not samples", tensors)])
    if has_order:
        return
    is_empty = _length(dataset) == 0
    refuse([(is_empty, f"{of} is empty (len(dataset) == 0)", "a dataset with at least one sample")], ValueError)
    if (rows := _rows_of_columns(dataset)) is not None:
        values = ".values()" if isinstance(dataset, dict) else ""
        wrong = f"{of}={name} holds {len(dataset)} arrays of {rows} rows"
        refuse([(True, wrong, f"TensorDataset(*map(torch.as_tensor, data{values}))")])
    if isinstance(dataset, dict) and 0 not in dataset:
        first = next(iter(dataset))
        refuse([(True, f"{of}={name} looks up {first!r}, not sample 0", f"{of}=data[{first!r}]")])


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception as error:
        raise TypeError(
            f"dataset_or_loader={type(dataset).__name__} has no length: len() raises {type(error).__name__}: {error}; "
            "sampler=..., which says which indices there are, would work"
        ) from error


def _rows_of_columns(dataset: Any) -> int | None:
    """Rows of `(X, y)` or `{"x": X, "y": y}`: arrays with a row for each sample, where a list of samples is meant."""
    columns = list(dataset.values()) if isinstance(dataset, dict) else dataset
    if not isinstance(columns, (tuple, list)) or not 1 < len(columns) <= MOST_COLUMNS:
        return None
    shapes = {tuple(getattr(each, "shape", ())) for each in columns}
    rows = {shape[:1] for shape in shapes}
    is_meant = len(rows) == 1 and rows != {()} and (len(shapes) > 1 or isinstance(dataset, dict))
    return int(next(iter(rows))[0]) if is_meant else None


def _check_again(name: str, value: Any) -> None:
    """Refuse what can be read only once. An IterableDataset that is its own iterator may start over; the probe tries it."""
    if isinstance(value, Iterator) and not is_iterable_dataset(value):
        anew = (
            "an IterableDataset whose __iter__ makes a new iterator" if name == "dataset_or_loader" else "a list of it"
        )
        raise TypeError(f"{name}={value!r} can be read only once, and tuning would use it up; {anew} would work")


def _check_epoch(data: DataSide) -> list[str]:
    samples, size = data.samples_per_epoch(), data.batch_size
    none = "dataset_or_loader delivers no sample in an epoch"
    refuse([(samples == 0, none, "a sampler with at least one index")], ValueError)
    if samples is None or size is None or samples >= size or data.is_iterable:
        return []
    dropped = f"batch_size={size} is more than the {samples} samples of an epoch, and drop_last=True drops what is left"
    refuse([(data.drop_last, dropped, f"batch_size={samples}")], ValueError)
    return [f"an epoch has {counted(samples, 'sample')}, less than one batch of {size}"]


def _shown(value: Any) -> str:
    """The name of a class or function, else of its class: a value's own text may be long, slow, or raise."""
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return str(named.__qualname__)


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _is_dataset(value: Any) -> bool:
    from torch.utils.data import Dataset

    return isinstance(value, Dataset)


def _is_loader(value: Any) -> bool:
    from torch.utils.data import DataLoader

    return isinstance(value, DataLoader)
