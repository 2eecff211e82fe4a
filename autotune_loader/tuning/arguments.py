"""From what the caller passed to a `Workload`: every mistake that can be seen without running anything is named here.

A library's wrapper around a DataLoader is recognised by the DataLoader that it holds, any other object by what it can do.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from multiprocessing import current_process
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autotune_loader.pipeline.batches import accelerator
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload
from autotune_loader.values import LoaderConfig, nearest, require_int

ASSUMED_BATCH_SIZE = 32
"""For a dataset without a batch size, with a note: hardly anybody trains with torch's default of 1."""
SEARCH_DEPTH, MOST_PARTS = 3, 64
"""How deep a DataLoader is looked for in attributes, lists and dicts of a wrapper (Lightning's CombinedLoader: 2), and in
how many of them: a list of samples is one too."""
OF_TRAINER = (
    *("precision_plugin", "datamodule", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
    *("max_epochs", "max_steps"),
)
"""What Lightning's Trainer says that changes a step, and does not change in training."""
AS_TORCH = ("StatefulDataLoader", "DataLoaderShard", "AutoLoader")
"""Loaders whose own `__iter__` yields what torch's would; Accelerate's bring it to the device, as the step does."""
ANSWERS = {
    "get_train_dataloader": "autotune_loader.integrations.transformers.tune_trainer(trainer)",
    "iloc": "a TensorDataset of its columns",
    "fit_loop": "trainer.fit(model, datamodule=autotune_loader.integrations.lightning.tuned(model, datamodule or loader))",
    "train_dataloader": "tune(datamodule.train_dataloader(), model), or inside of Lightning "
    "trainer.fit(model, datamodule=autotune_loader.integrations.lightning.tuned(model, datamodule))",
}
"""What an object that is neither dataset nor loader can do, and the call for it; the first that it can do decides."""
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def refuse(applies: bool, wrong: str, works: str, kind: type[Exception] = TypeError) -> None:
    """Raise, where that applies: what is wrong, and what to try."""
    if applies:
        raise kind(f"{wrong}. Try {works}.")


def answers_unknown_arguments(tune: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`tune`, with an answer for arguments that it does not have: a DataLoader says what it does not."""
    known, of_loader = (inspect.signature(each).parameters for each in (tune, DataLoader))

    @functools.wraps(tune)
    def answering(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        for name in kwargs.keys() - known.keys():
            works = f"{near}=..." if (near := nearest(name, known)) else f"one of {', '.join(known)}"
            works = in_a_loader(name) if name in of_loader else works
            refuse(True, f"{name}={kwargs[name]!r:.60} is not an argument of tune()", works)
        return tune(*args, **kwargs)

    return answering


def in_a_loader(name: str) -> str:
    """The call that gives `tune()` what it has no argument for."""
    return f"tune(DataLoader(dataset, {name}=..., ...), model)"


def make_workload(  # noqa: PLR0913 - what tune() is given
    data: Any,
    model: Any = None,
    *,
    batch_size: int | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], Any] | None = None,
    train_step: Any = None,
    loss_fn: Any = None,
    optimizer: Any = None,
    device: str | torch.device = "auto",
) -> Workload:
    """The workload that these arguments of `tune()` make, and in its notes how they were read.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and one to try.
        RuntimeError: this is no call of the user's: a spawned process imports the script.
    """
    is_spawned = getattr(current_process(), "_inheriting", False)
    again = "a process that this script has started imports it, and tunes once more"
    refuse(is_spawned, again, "the script's own code below `if __name__ == '__main__':`", RuntimeError)
    _check_order(data, model)
    if isinstance(batch_size, numbers.Integral) and not isinstance(batch_size, bool):
        batch_size = int(batch_size)  # numpy's
    require_int("batch_size", batch_size, minimum=1, or_none=True)
    of_loader = {"collate_fn": collate_fn, "worker_init_fn": worker_init_fn}
    _check_callable(**of_loader)
    training = _training(model, train_step, loss_fn, optimizer, device)
    found, notes = _unwrapped(data)
    own_config = None
    if isinstance(found, DataLoader):
        own_config = LoaderConfig.from_loader(found)
        for name, value in {"batch_size": batch_size, **of_loader}.items():
            twice = f"{name}={value!r:.60} was given together with a DataLoader that has its own"
            refuse(value is not None, twice, f"{name}=None", ValueError)
        side, notes = DataSide.from_loader(found), [*_own_iteration(found), *notes]
        _check_again(data=side.dataset, sampler=side.sampler, batch_sampler=side.batch_sampler)
    else:
        _check_dataset(found)
        if batch_size is None:
            batch_size = ASSUMED_BATCH_SIZE
            notes.append(f"batch_size was not given: trials use {batch_size}; pass the batch size you train with")
        side = DataSide.from_dataset(found, batch_size=batch_size, **of_loader)
    notes += _check_epoch(side)
    if training.compiled:
        notes.append(
            "model.compile() is called again in the trials, with its defaults: a copy of a model is not compiled"
        )
    if training.model is not None and training.model is not model:
        notes.append("the step is timed without DistributedDataParallel's all-reduce")
    return Workload(data=side, training=training, own_config=own_config, notes=tuple(notes))


def make_workloads(sides: object, model: Any, **shared: Any) -> dict[str, Workload]:
    """The sides of a comparison as workloads, by name: loaders, or tuples of one and what is its own in training.

    Raises:
        TypeError, ValueError: one is neither; the message names it.
    """
    works, tuples = 'sides={"now": loader, "then": other_loader}', "(loader, train_step) or (loader, model, train_step)"
    if not isinstance(sides, Mapping):
        raise TypeError(f"sides={sides!r:.60} is not a dict of loaders by name. Try {works}.")
    refuse(len(sides) < 2, f"sides={dict(sides)!r:.60} has fewer than two sides", works, ValueError)
    found = dict[str, Workload]()
    for name, side in sides.items():
        refuse(not (isinstance(name, str) and name), f"sides has the name {name!r}, which is not a string", works)
        parts = side if isinstance(side, tuple) else (side,)
        no_pair = isinstance(side, tuple) and len(parts) not in (2, 3)
        refuse(no_pair, f"sides[{name!r}] is a tuple of {len(parts)}", tuples)
        if len(parts) == 2 and not isinstance(parts[1], torch.nn.Module):
            parts = (parts[0], model, parts[1])
        given = {"model": model, **shared} | dict(zip(("data", "model", "train_step"), parts, strict=False))
        try:
            found[name] = make_workload(**given)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sides[{name!r}]: {error}") from error
    return found


def _check_order(data: Any, model: Any) -> None:
    given, in_order = _shown(data), "tune(data, model)"
    if isinstance(data, (str, bytes, os.PathLike)):
        folder = f"data=torchvision.datasets.ImageFolder({os.fspath(data)!r})"
        refuse(True, f"data={data!r} is a path, not a dataset", folder)
    refuse(isinstance(data, type), f"data={given} is a class", f"data={given}(...)")
    refuse(isinstance(data, torch.nn.Module), f"data={given} is a model, which is the second argument", in_order)
    holds_data = isinstance(model, (DataLoader, Dataset))
    refuse(holds_data, f"model={_shown(model)} holds data, which is the first argument", in_order)


# The step


def _training(model: Any, train_step: Any, loss_fn: Any, optimizer: Any, device: str | torch.device) -> TrainingSide:
    if isinstance(train_step, (int, float)) and not isinstance(train_step, bool):
        no_time = f"train_step={train_step!r} is not the seconds of a step"
        refuse(not 0 < train_step < math.inf, no_time, "train_step=0.05", ValueError)
        return TrainingSide(train_step=StepTime(float(train_step)))
    _check_callable(loss_fn=loss_fn, train_step=train_step)
    shown, a_step = f"model={_shown(model)}", "train_step=lambda model, batch: ..."
    refuse(isinstance(model, type), f"{shown} is a class", f"{shown}(...)")
    refuse(model is not None and train_step is None and not callable(model), f"{shown} is not callable", a_step)
    called = f"train_step={_shown(train_step)} cannot be called as train_step(model, batch)"
    refuse(train_step is not None and not _takes_two(train_step), called, a_step)
    steps = optimizer is None or callable(optimizer) or all(hasattr(optimizer, name) for name in ("step", "zero_grad"))
    no_optimizer = f"optimizer={optimizer!r:.60} has no step() and zero_grad(), and does not create an optimizer"
    refuse(not steps, no_optimizer, "optimizer=torch.optim.AdamW, or one over the model's parameters")
    if isinstance(loss_fn, type):
        try:
            loss_fn = loss_fn()
        except TypeError as error:
            named = f"loss_fn={_shown(loss_fn)}"
            refuse(True, f"{named} is a class that cannot be made without arguments ({error})", f"{named}(...)")
    model = _without_ranks(model)
    parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
    return TrainingSide(
        model=model,
        train_step=train_step,
        loss_fn=loss_fn,
        optimizer=optimizer,
        device=_device_name(device, model),
        trainer=_of_trainer(getattr(model, "_trainer", None)),
        compiled=tuple(name for name, part in parts if getattr(part, "_compiled_call_impl", None) is not None),
    )


def _of_trainer(trainer: Any) -> dict[str, Any]:
    """What a step needs of the Trainer that a Lightning module is attached to, by the Trainer's names.

    Its data module comes without datasets and loaders, each of which would be there once more, and without what `tuned()`
    has put into it.
    """
    facts = {name: value for name in OF_TRAINER if (value := getattr(trainer, name, None)) is not None}
    if (whole := facts.get("datamodule")) is not None:
        facts["datamodule"] = data = copy.copy(whole)
        data.trainer = None
        for name, value in vars(whole).items():
            if name == "train_dataloader" or isinstance(value, (DataLoader, Dataset)):
                del vars(data)[name]
    return facts


def _check_callable(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and not callable(value):
            instead = "0.05 (seconds) or train_step=lambda model, batch: ..." if name == "train_step" else "None"
            refuse(True, f"{name}={value!r} is not callable", f"{name}={instead}")


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind("model", "batch")
    except TypeError:
        return False
    except ValueError:  # written in C
        pass
    return True


def _device_name(device: str | torch.device, model: Any) -> str:
    """The device that is asked for; "auto" is where the model is, or this process puts things by default, else CUDA if any."""
    if device == "auto":
        used = [parameter.device for parameter in model.parameters()] if isinstance(model, torch.nn.Module) else []
        placed = [each for each in (*used, torch.get_default_device()) if each.type not in ("cpu", "meta")]
        # Not is_available(): it opens the driver, after which no child that this process forks could use CUDA. This asks NVML.
        device = placed[0] if placed else "cuda" if torch.cuda.device_count() else "cpu"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is not a torch device. Try device='auto'.") from error
    refuse(chosen.type == "meta", "device='meta' computes nothing", "device='auto'", ValueError)
    module = accelerator(chosen)
    if module is None or chosen.index is not None:
        return str(chosen)
    # What this process has set, which another one would not have; where it has set none, as launchers mean it.
    rank = int(os.environ.get("LOCAL_RANK", 0)) % module.device_count()
    number = module.current_device() if module.is_initialized() else rank
    return f"{chosen.type}:{number}" if number else chosen.type


def _without_ranks(model: Any) -> Any:
    """The model inside `DistributedDataParallel`, whose process group is only here; compiled again if it was."""
    inner = getattr(model, "_orig_mod", model)
    if type(inner).__name__ != "DistributedDataParallel":
        return model
    return model.module if inner is model else torch.compile(inner.module)


# The data


def _check_dataset(dataset: Any) -> None:
    _check_again(data=dataset)
    if not isinstance(dataset, IterableDataset):
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise _neither(dataset)
        refuse(not len(dataset), "data is empty (len(data) == 0)", "a dataset with at least one sample", ValueError)


def _check_again(**parts: Any) -> None:
    """Refuse what can be read only once. An IterableDataset that is its own iterator may start over; the probe tries it."""
    for name, value in parts.items():
        if isinstance(value, Iterator) and not isinstance(value, IterableDataset):
            anew = "an IterableDataset whose __iter__ makes a new iterator" if name == "data" else "a list of it"
            refuse(True, f"{name}={value!r} can be read only once, and tuning would consume it", anew)


def _check_epoch(side: DataSide) -> list[str]:
    """A note on an epoch of less than one batch; one without a batch is refused."""
    samples, size = side.samples_per_epoch(), side.batch_size
    refuse(samples == 0, "data has no sample in an epoch", "a sampler with at least one index", ValueError)
    if samples is None or size is None or samples >= size or side.is_iterable:
        return []
    dropped = f"batch_size={size} is more than the {samples} samples of an epoch, and drop_last=True drops what is left"
    refuse(side.drop_last, dropped, f"batch_size={samples}", ValueError)
    return [f"an epoch has {samples} samples, less than one batch of {size}"]


# What libraries hand out


def _unwrapped(given: Any) -> tuple[Any, list[str]]:
    """A DataLoader or dataset as it is, or the DataLoader that a wrapper holds, with a note on what is left out.

    Raises:
        TypeError: it is neither, and holds no DataLoader or several; the message suggests a call.
    """
    for ability, answer in ANSWERS.items():
        if hasattr(type(given), ability) or ability in getattr(given, "__dict__", {}):
            raise _neither(given, answer)
    is_stream, is_batched = isinstance(given, IterableDataset), hasattr(given, "__getitems__")  # as a TensorDict is
    is_group = isinstance(given, (list, tuple)) or (isinstance(given, Mapping) and not is_batched)
    if isinstance(given, DataLoader) or (hasattr(given, "__getitem__") and not is_group and not is_stream):
        return given, []
    name, parts = type(given).__name__, _loaders_in(given, depth=1 if is_group else SEARCH_DEPTH)
    found = dict({id(part): (path, part) for path, part in parts}.values())
    if len(found) == 1:
        ((path, loader),) = found.items()
        return loader, [
            f"data={name} holds a DataLoader ({path}), which was tuned: apply the configuration to it. What {name} itself "
            "does to batches is not measured; pass a train_step that takes them without"
        ]
    if isinstance(given, Mapping) and given and not found:
        keys = ", ".join(map(repr, given))
        no_index = f"data={name} has the keys {keys:.60}, and a dataset 0, 1, 2"
        refuse(0 not in given, no_index, f"data[{next(iter(given))!r}]")
    if is_stream or (not found and (is_group or isinstance(given, Iterator))):
        return given, []
    held = f"data={name} holds {len(found)} DataLoaders ({', '.join(found)})"
    refuse(bool(found), held, "tune(loader, model) with one at a time")
    raise _neither(given)


def _neither(given: Any, answer: str | None = None) -> TypeError:
    """The error for what is no dataset and no loader, with the call, or the kind of argument, to try."""
    if answer is None:
        answer = "the dataset that it reads, in a DataLoader" if hasattr(given, "__iter__") else "a list of samples"
    return TypeError(
        f"data={given!r:.60} is neither a DataLoader, nor an IterableDataset, nor a map-style dataset with "
        f"__getitem__ and __len__. Try {answer}."
    )


def _own_iteration(loader: DataLoader[Any]) -> list[str]:
    """A note if the loader's class does something of its own with batches, which the bursts do not run."""
    own = next(cls for cls in type(loader).__mro__ if "__iter__" in vars(cls) or "_get_iterator" in vars(cls))
    if own.__module__.startswith("torch.") or own.__name__ in AS_TORCH:
        return []
    return [
        f"{own.__name__} has its own __iter__, which the trials do not run: the step gets what the workers return; "
        "pass a train_step that takes those, or let the workers do all of it (PyTorch Geometric: filter_per_worker=True)"
    ]


def _loaders_in(value: Any, path: str = "", depth: int = SEARCH_DEPTH) -> Iterator[tuple[str, DataLoader[Any]]]:
    """The DataLoaders that an object holds, in attributes, lists and dicts, with their paths."""
    if isinstance(value, DataLoader):
        yield path, value
    elif depth:
        held: Mapping[Any, Any] = getattr(value, "__dict__", {})
        if is_group := isinstance(value, (Mapping, list, tuple)):
            held = value if isinstance(value, Mapping) else dict(enumerate(value))
        for name, part in islice(dict(held).items(), MOST_PARTS):
            step = f"[{name!r}]" if is_group else f".{name}" if path else name
            yield from _loaders_in(part, path + step, depth - 1)


def _shown(value: Any) -> str:
    """The name of a class or function, else of its class: a value's own text may be long, slow, or raise."""
    named = value if isinstance(value, type) or inspect.isroutine(value) else type(value)
    return str(named.__qualname__)
