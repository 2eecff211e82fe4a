"""From what the caller passed to a `Workload`: every mistake that can be seen without running anything is named here.

A wrapper of a library around a DataLoader is unwrapped. Nothing here knows a library: a wrapper is told by the DataLoader that
it holds, anything else by what it can do.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from autotune_loader.diagnosis.units import counted
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload, is_iterable_dataset
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.validation import require_bool, require_count

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader

ASSUMED_BATCH_SIZE = 32
"""What a bare dataset is measured with when no batch size is given; said aloud, because nobody trains with torch's 1."""
LOADER_PARTS = ("collate_fn", "sampler", "batch_sampler", "worker_init_fn", "generator", "drop_last")
"""What `tune()` takes over into a DataLoader as it is."""
SHARDED = {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
SEARCH_DEPTH, MOST_PARTS = 3, 64
"""How deep in attributes, lists and dicts of a wrapper a DataLoader is looked for, and in how many of them."""
AS_TORCH = ("StatefulDataLoader", "DataLoaderShard", "AutoLoader")
"""Loaders whose own `__iter__` yields what torch's would; Accelerate's bring it to the device, as the step does."""
STEP_FOR_REST = "pass a train_step that takes"
ANSWERS = {
    "get_train_dataloader": "autotune_loader.integrations.transformers.tune_trainer(trainer)",
    "fit_loop": "trainer.fit(model, datamodule=autotune_loader.integrations.lightning.tuned(model, datamodule or loader))",
    "train_dataloader": "tune(datamodule.train_dataloader(), model), or inside of Lightning "
    "trainer.fit(model, datamodule=autotune_loader.integrations.lightning.tuned(model, datamodule))",
}
"""What an object that is neither dataset nor loader can do, and the call for it; the first that it can do decides."""
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Part = TypeVar("_Part")


def refuse(applies: bool, wrong: str, works: str, kind: type[Exception] = TypeError) -> None:
    """Complain, where that applies: what is wrong, and what would work."""
    if applies:
        raise kind(f"{wrong}; {works} would work")


def answers_loader_arguments(tune: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`tune`, with an answer for arguments that it does not have."""
    known = inspect.signature(tune).parameters

    @functools.wraps(tune)
    def answering(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        from torch.utils.data import DataLoader

        for name in kwargs.keys() - known.keys():
            works = [f"{near}=..." for near in difflib.get_close_matches(name, known, n=1)]
            if name in inspect.signature(DataLoader).parameters:
                works = [f"tune(DataLoader(dataset, {name}=..., ...), model), which compares it with what is found,"]
            refuse(bool(works), f"{name}={kwargs[name]!r:.60} is not an argument of tune()", "".join(works))
        return tune(*args, **kwargs)

    return answering


def make_workload(dataset_or_loader: Any, model: Any = None, **given: Any) -> Workload:
    """The workload, and in its notes how the arguments were read.

    Args:
        dataset_or_loader: as in `tune()`, like `model`.
        model: what the step trains.
        **given: what else `tune()` takes, of which `batch_size`, the step (`loss_fn`, `train_step`, `optimizer`, `device`) and
            the loader's parts (`LOADER_PARTS`) count here; None, or nothing, where it is not given.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and one that would work.
        RuntimeError: this is no call of the user's: a spawned process imports the script.
    """
    refuse(
        getattr(current_process(), "_inheriting", False),
        "a process that this script has started imports it, and tunes once more",
        "the script's own code below `if __name__ == '__main__':`",
        RuntimeError,
    )
    _check_order(dataset_or_loader, model)
    parts = {name: given.get(name) for name in ("batch_size", *LOADER_PARTS)}
    if isinstance(size := parts["batch_size"], numbers.Integral) and not isinstance(size, bool):
        parts["batch_size"] = int(size)  # numpy's
    require_count("batch_size", parts["batch_size"], minimum=1)
    given["train_step"] = _as_step_time(given.get("train_step"))
    for name in ("loss_fn", "train_step", "collate_fn", "worker_init_fn"):
        value = given.get(name)
        instead = "0.05 (seconds) or train_step=lambda model, batch: ..." if name == "train_step" else "None"
        refuse(value is not None and not callable(value), f"{name}={value!r} is not callable", f"{name}={instead}")
    training = _training(model, given)
    data_of, notes = _unwrapped(dataset_or_loader)
    own_config = LoaderConfig.from_loader(data_of) if _kind(data_of) == "loader" else None
    if own_config is not None:
        data, notes = _data_of_loader(data_of, parts), [*_own_iteration(data_of), *notes]
    else:
        notes = [*_fill_batch_size(data_of, parts), *notes]
        data = DataSide.from_dataset(data_of, **{**parts, "drop_last": bool(parts["drop_last"])})
    notes += _check_epoch(data)
    if training.compiled:
        notes.append("model.compile() is called anew in the bursts, with its defaults: copies of a model forget it")
    return Workload(data=data, training=training, own_config=own_config, notes=tuple(notes))


def _check_order(dataset: Any, model: Any) -> None:
    """What stands where something else belongs: a path, or the model first."""
    of, given, in_order = "dataset_or_loader", _shown(dataset), "tune(dataset, model)"
    if isinstance(dataset, (str, bytes, os.PathLike)):
        folder = f"{of}=torchvision.datasets.ImageFolder({os.fspath(dataset)!r})"
        refuse(True, f"{of}={dataset!r} is a path, not a dataset", folder)
    refuse(isinstance(dataset, type), f"{of}={given} is a class", f"{of}={given}(...)")
    refuse(_kind(dataset) == "module", f"{of}={given} is a model, which comes second", in_order)
    refuse(_kind(model) in ("loader", "dataset"), f"model={_shown(model)} holds data, which comes first", in_order)


# The step


def _as_step_time(train_step: Any) -> Any:
    """A number of seconds as the wait that it stands for; all else as it is."""
    if isinstance(train_step, bool) or not isinstance(train_step, (int, float)):
        return train_step
    wrong = f"train_step={train_step!r} is not the seconds of a step"
    refuse(not 0 < train_step < math.inf, wrong, "train_step=0.05", ValueError)
    return StepTime(float(train_step))


def _training(model: Any, given: Mapping[str, Any]) -> TrainingSide:
    """The training step, of what was given for it."""
    train_step, optimizer, loss_fn = (given.get(name) for name in ("train_step", "optimizer", "loss_fn"))
    if isinstance(train_step, StepTime):
        return TrainingSide(train_step=train_step)
    shown, a_step = f"model={_shown(model)}", "train_step=lambda model, batch: ..."
    refuse(isinstance(model, type), f"{shown} is a class", f"{shown}(...)")
    refuse(model is not None and train_step is None and not callable(model), f"{shown} is not callable", a_step)
    parts = [*model.modules(), *model.parameters()] if _kind(model) == "module" else []
    refuse(
        bool({cls.__name__ for part in parts for cls in type(part).__mro__} & SHARDED),
        f"{shown} is sharded over ranks (FSDP, DTensor), and no copy of it trains alone",
        "the model as it is before it is sharded, or model=None for the loader alone,",
    )
    called = (
        f"train_step={_shown(train_step)} is called as train_step(model, batch), which its signature does not allow"
    )
    refuse(train_step is not None and not _takes_two(train_step), called, a_step)
    refuse(
        not (
            optimizer is None or callable(optimizer) or (hasattr(optimizer, "step") and hasattr(optimizer, "zero_grad"))
        ),
        f"optimizer={optimizer!r:.60} has no step() and zero_grad(), and makes no optimizer",
        "optimizer=torch.optim.AdamW, or one over the model's parameters,",
    )
    refuse(
        train_step is None and _needs_closure(optimizer),
        f"optimizer={_shown(optimizer)} steps with a closure, which is the whole step",
        "train_step=lambda model, batch: optimizer.step(...)",
    )
    named = model.named_modules() if _kind(model) == "module" else ()
    return TrainingSide(
        model=model,
        train_step=train_step,
        loss_fn=_loss_of(loss_fn) if isinstance(loss_fn, type) else loss_fn,
        optimizer=optimizer,
        device=_device_name(given.get("device") or "auto", model),
        precision=getattr(getattr(model, "_trainer", None), "precision_plugin", None),
        compiled=tuple(name for name, part in named if getattr(part, "_compiled_call_impl", None) is not None),
    )


def _loss_of(loss_class: type) -> Any:
    try:
        return loss_class()
    except TypeError as error:
        name = f"loss_fn={loss_class.__name__}"
        raise TypeError(
            f"{name} is a class that cannot be made without arguments ({error}); {name}(...) would work"
        ) from error


def _needs_closure(optimizer: Any) -> bool:
    """Whether `step()` cannot be called without one, as LBFGS's."""
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (AttributeError, TypeError, ValueError):
        return False
    return closure is not None and closure.default is closure.empty


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
    refuse(is_missing, f"device={device!r} is not there ({seen})", "device='auto'", ValueError)
    return _current_cuda() if chosen == torch.device("cuda") else str(chosen)


def _auto_device(model: Any) -> str:
    """Where the model is already, or where this process puts things by default; else CUDA where there is one."""
    import torch

    used = [parameter.device for parameter in model.parameters()] if _kind(model) == "module" else []
    for device in (*used, torch.get_default_device()):
        if device.type not in ("cpu", "meta"):
            return str(device)
    # Not is_available(): it opens the driver, after which no child that this process forks could use CUDA. This asks NVML.
    return _current_cuda() if torch.cuda.device_count() else "cpu"


def _current_cuda() -> str:
    """The device that this process has set, which another process would not have; "cuda" where it has set none."""
    import torch

    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return f"cuda:{chosen}" if chosen else "cuda"


# The data


def _data_of_loader(loader: Any, parts: Mapping[str, Any]) -> DataSide:
    for name, value in parts.items():
        refuse(
            value is not None,
            f"{name}={value!r:.60} was given together with an existing DataLoader (and not its dataset), which has its own",
            f"{name}=None",
            ValueError,
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
    import torch

    is_iterable, has_batches = is_iterable_dataset(dataset), parts["batch_sampler"] is not None
    for name in ("sampler", "batch_sampler"):
        value, given = parts[name], f"{name}={_shown(parts[name])}"
        refuse(isinstance(value, type), f"{given} is a class", f"{given}(...)")
        gives_indices = value is None or hasattr(value, "__iter__") or hasattr(value, "__getitem__")
        refuse(not gives_indices, f"{name}={value!r} gives no indices", f"{name}=None")
        _check_again(name, value)
    is_one = isinstance(generator := parts["generator"], (torch.Generator, type(None)))
    refuse(
        not is_one, f"generator={generator!r} is not a torch.Generator", "generator=torch.Generator().manual_seed(0)"
    )
    require_bool("drop_last", parts["drop_last"] or False)
    _check_dataset(dataset)
    if not is_iterable:
        _check_map_style(dataset, has_order=has_batches or parts["sampler"] is not None)
    excluded = {"sampler": is_iterable or has_batches, "batch_sampler": is_iterable}
    for name, no_meaning in {**excluded, "batch_size": has_batches, "drop_last": has_batches}.items():
        why = "has no meaning for an IterableDataset" if is_iterable else "cannot be given together with batch_sampler"
        is_given = parts[name] is not None and no_meaning
        refuse(is_given, f"{name}={parts[name]!r:.60} {why}", f"{name}=None", ValueError)
    if parts["batch_size"] is not None or has_batches:
        return []
    if is_iterable and _makes_batches(dataset):
        return ["the dataset makes its own batches, so the DataLoader makes none (batch_size=None)"]
    parts["batch_size"] = ASSUMED_BATCH_SIZE
    return [f"batch_size was not given: measured with {ASSUMED_BATCH_SIZE}; pass the one you train with"]


def _check_dataset(dataset: Any) -> None:
    _check_again("dataset_or_loader", dataset)
    if not is_iterable_dataset(dataset):
        return
    # A stream that coordinates its workers through named shared memory: a copy of it would move the original on.
    from multiprocessing.shared_memory import SharedMemory

    for path, _ in _parts_of_type(dataset, SharedMemory):
        refuse(
            True,
            f"dataset_or_loader={_shown(dataset)} coordinates its workers by shared memory ({path}), which bursts would "
            "change under your hands",
            "a map-style dataset over the same files (for MosaicML streaming: LocalDataset(folder)), whose configuration "
            "serves this one,",
        )


def _check_map_style(dataset: Any, has_order: bool) -> None:
    """As torch has it: a length is only asked for where no sampler says which indices there are."""
    of, name = "dataset_or_loader", type(dataset).__name__
    if not hasattr(dataset, "__getitem__") or not (has_order or hasattr(dataset, "__len__")):
        raise _neither(dataset)
    tensors = "TensorDataset(torch.tensor(df[features].values), torch.tensor(df[target].values))"
    refuse(hasattr(type(dataset), "iloc"), f"{of}={name} looks up columns, not samples", tensors)
    if has_order:
        return
    is_empty = _length(dataset) == 0
    refuse(is_empty, f"{of} is empty (len(dataset) == 0)", "a dataset with at least one sample", ValueError)
    if isinstance(dataset, dict) and 0 not in dataset:
        first = next(iter(dataset))
        refuse(True, f"{of}={name} looks up {first!r}, not sample 0", f"{of}=data[{first!r}]")


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except Exception as error:
        raise TypeError(
            f"dataset_or_loader={type(dataset).__name__} has no length: len() raises {type(error).__name__}: {error}; "
            "sampler=..., which says which indices there are, would work"
        ) from error


def _check_again(name: str, value: Any) -> None:
    """Refuse what can be read only once. An IterableDataset that is its own iterator may start over; the probe tries it."""
    if isinstance(value, Iterator) and not is_iterable_dataset(value):
        anew = (
            "an IterableDataset whose __iter__ makes a new iterator" if name == "dataset_or_loader" else "a list of it"
        )
        refuse(True, f"{name}={value!r} can be read only once, and tuning would use it up", anew)


def _check_epoch(data: DataSide) -> list[str]:
    samples, size = data.samples_per_epoch(), data.batch_size
    none = "dataset_or_loader delivers no sample in an epoch"
    refuse(samples == 0, none, "a sampler with at least one index", ValueError)
    if samples is None or size is None or samples >= size or data.is_iterable:
        return []
    dropped = f"batch_size={size} is more than the {samples} samples of an epoch, and drop_last=True drops what is left"
    refuse(data.drop_last, dropped, f"batch_size={samples}", ValueError)
    return [f"an epoch has {counted(samples, 'sample')}, less than one batch of {size}"]


def _makes_batches(dataset: Any) -> bool:
    """Whether an iterable dataset is a pipeline of stages (webdataset) of which the last that is about batches makes them."""
    stages = getattr(dataset, "pipeline", None)
    functions = [getattr(stage, "f", stage) for stage in stages] if isinstance(stages, list) else []
    names = [str(getattr(each, "__name__", type(each).__name__)).strip("_").lower() for each in functions]
    batching = [name for name in names if "batch" in name]
    return bool(batching) and not batching[-1].startswith("un")


# What libraries hand out


def _unwrapped(given: Any) -> tuple[Any, list[str]]:
    """A DataLoader or dataset as it is, or the DataLoader that a wrapper holds, with a note on what is left out.

    Raises:
        TypeError: it is neither, and holds no DataLoader or several; the message names a call that would work.
    """
    from torch.utils.data import DataLoader

    for ability, answer in ANSWERS.items():
        if hasattr(type(given), ability) or ability in getattr(given, "__dict__", {}):
            raise _neither(given, answer)
    is_group, is_stream = isinstance(given, (list, tuple, Mapping)), is_iterable_dataset(given)
    if isinstance(given, DataLoader) or (hasattr(given, "__getitem__") and not is_group and not is_stream):
        return given, []
    name, parts = type(given).__name__, _parts_of_type(given, DataLoader, depth=1 if is_group else SEARCH_DEPTH)
    found = dict({id(part): (path, part) for path, part in parts}.values())
    if len(found) == 1:
        ((path, loader),) = found.items()
        return loader, [
            f"dataset_or_loader={name} holds a DataLoader ({path}), which is what was tuned: give the configuration to "
            f"that. What {name} itself does to batches is no part of the measurement; {STEP_FOR_REST} them without"
        ]
    if is_stream or (not found and (is_group or isinstance(given, Iterator))):
        return given, []
    held = f"dataset_or_loader={name} holds {len(found)} DataLoaders ({', '.join(found)})"
    refuse(bool(found), held, "one at a time, tune(loader, model),")
    raise _neither(given)


def _neither(given: Any, answer: str | None = None) -> TypeError:
    """An object is no dataset and no loader: the error, with the call, or the kind of argument, that would work."""
    if answer is None and hasattr(getattr(given, "dataset", None), "__getitem__"):
        answer = f"its dataset, tune({type(given).__name__.lower()}.dataset, model, batch_size=..., collate_fn=...),"
    elif answer is None:
        answer = "the dataset that it reads, in a DataLoader," if hasattr(given, "__iter__") else "a list of samples"
    return TypeError(
        f"dataset_or_loader={given!r:.60} is neither a DataLoader, nor an IterableDataset, nor a map-style dataset with "
        f"__getitem__ and __len__; {answer} would work"
    )


@contextlib.contextmanager
def told_beside_errors(notes: Sequence[str]) -> Iterator[None]:
    """What the bursts leave out of a loader is most likely why a step fails on its very first batch."""
    try:
        yield
    except WorkloadError as error:
        left_out = [note for note in notes if STEP_FOR_REST in note]
        if not left_out:
            raise
        raise WorkloadError("; ".join([error.message, *left_out]), error.user_traceback) from error


def _own_iteration(loader: DataLoader[Any]) -> list[str]:
    """A note where the loader's class does something of its own with batches, which the bursts do not run."""
    own = next(cls for cls in type(loader).__mro__ if "__iter__" in vars(cls) or "_get_iterator" in vars(cls))
    if own.__module__.startswith("torch.") or own.__name__ in AS_TORCH:
        return []
    return [
        f"{own.__name__} has an __iter__ of its own, which the bursts leave out: the step gets what the workers make; "
        f"{STEP_FOR_REST} those, or let the workers do all of it (PyTorch Geometric: filter_per_worker=True)"
    ]


def _parts_of_type(
    value: Any, kind: type[_Part], path: str = "", depth: int = SEARCH_DEPTH
) -> Iterator[tuple[str, _Part]]:
    """What an object holds of a kind, in attributes, lists and dicts, with its path."""
    if isinstance(value, kind):
        yield path, value
    elif depth:
        held: Mapping[Any, Any] = getattr(value, "__dict__", {})
        if is_group := isinstance(value, (Mapping, list, tuple)):
            held = value if isinstance(value, Mapping) else dict(enumerate(value))
        for name, part in islice(dict(held).items(), MOST_PARTS):
            step = f"[{name!r}]" if is_group else f".{name}" if path else name
            yield from _parts_of_type(part, kind, path + step, depth - 1)


def _shown(value: Any) -> str:
    """The name of a class or function, else of its class: a value's own text may be long, slow, or raise."""
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return str(named.__qualname__)


def _kind(value: Any) -> Literal["module", "loader", "dataset", ""]:
    """Which of torch's a value is."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    if isinstance(value, torch.nn.Module):
        return "module"
    return "loader" if isinstance(value, DataLoader) else "dataset" if isinstance(value, Dataset) else ""
