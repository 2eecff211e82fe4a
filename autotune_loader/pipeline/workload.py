"""What is to be tuned: the user's parts of a DataLoader (`DataSide`) and what the training step needs (`TrainingSide`)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)

from autotune_loader.lines import is_library
from autotune_loader.values import LoaderConfig

EPOCH_NAMES = ("set_epoch", "epoch", "current_epoch", "_epoch", "_current_epoch")
"""How datasets are told the epoch, or keep it."""
WRAPPED_NAMES = ("base", "inner", "source", "wrapped")
"""Attributes in which a wrapper keeps what it wraps, where that need not be of torch's class."""
MOST_WRAPPED = 1000
"""A dataset of more parts than this is not looked through to the end."""
PLAIN_DATA = (TensorDataset, torch.Tensor, np.ndarray, list, tuple)
"""Reading a sample of these runs no code of the user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSide:
    """The parts of a DataLoader that are the user's and are never tuned."""

    dataset: Any
    batch_size: int | None
    """Samples per batch; None where the dataset or a batch_sampler makes the batches."""
    sampler: Any = None
    """Sampler of indices; None for an IterableDataset or where `batch_sampler` is given."""
    batch_sampler: Any = None
    drop_last: bool = False
    collate_fn: Callable[[Any], Any] | None = None
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    multiprocessing_context: str | None = None
    """How workers start; None is as `multiprocessing` starts processes here."""

    @classmethod
    def from_dataset(cls, dataset: Any, **parts: Any) -> DataSide:
        """The data side of a bare dataset: shuffled, as training is, unless a sampler says otherwise."""
        side = cls(dataset=dataset, **parts)
        if side.sampler is None and not side.is_iterable:
            return replace(side, sampler=RandomSampler(dataset, generator=side.generator))
        return side

    @classmethod
    def from_loader(cls, loader: DataLoader[Any]) -> DataSide:
        """The data side of an existing loader, which is only read, never iterated."""
        iterable = isinstance(loader.dataset, IterableDataset)
        own_batches = not iterable and loader.batch_size is None and loader.batch_sampler is not None
        context: Any = loader.multiprocessing_context
        return cls(
            dataset=loader.dataset,
            batch_size=loader.batch_size,
            sampler=None if iterable or own_batches else loader.sampler,
            batch_sampler=loader.batch_sampler if own_batches else None,
            drop_last=bool(loader.drop_last),
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
            multiprocessing_context=None if context is None else context.get_start_method(),
        )

    @property
    def is_batched(self) -> bool:
        """Whether the DataLoader makes the batches, and not the dataset."""
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def collate(self) -> Callable[[Any], Any]:
        """What makes a batch of samples, or of what the dataset gives as one: the user's, or torch's own."""
        return self.collate_fn or (default_collate if self.is_batched else default_convert)

    @property
    def has_batched_fetch(self) -> bool:
        """Whether the dataset fetches the samples of a batch in one call."""
        return bool(getattr(self.dataset, "__getitems__", None))

    @property
    def has_own_order(self) -> bool:
        """Whether a sampler of the user's decides which samples there are, and not just whether they are shuffled."""
        if self.batch_sampler is not None:
            return True
        if self.is_shuffled:
            return bool(self.sampler.replacement or getattr(self.sampler, "_num_samples", None) is not None)
        return self.sampler is not None and type(self.sampler).__name__ != "SequentialSampler"

    @property
    def is_shuffled(self) -> bool:
        """Whether torch's sampler draws the samples, or torchdata's of the same name."""
        return type(self.sampler).__name__ == "RandomSampler"

    @property
    def is_iterable(self) -> bool:
        return isinstance(self.dataset, IterableDataset)

    @property
    def has_epochs(self) -> bool:
        """Whether the dataset, or one that it wraps, is told the epoch; persistent workers would keep the first."""
        return any(_has_any(each, EPOCH_NAMES) for each in wrapped_datasets(self.dataset))

    @property
    def shards(self) -> int | None:
        """How many workers an IterableDataset can feed, where it says so (Hugging Face datasets do)."""
        shards = getattr(self.dataset, "num_shards", getattr(self.dataset, "n_shards", None))
        return shards if isinstance(shards, int) else None

    @property
    def description(self) -> str:
        """What identifies the data in a fingerprint: the dataset's class and length."""
        kind, length = type(self.dataset), length_of(self.dataset)
        return f"{kind.__module__}.{kind.__qualname__}" + ("" if length is None else f"[{length}]")

    @property
    def parts(self) -> dict[str, Any]:
        """What a loader that is made anew takes over."""
        names = ["collate_fn", "worker_init_fn", "generator"]
        if self.has_own_order:
            names += ["dataset", "sampler" if self.batch_sampler is None else "batch_sampler"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def samples_per_epoch(self) -> int | None:
        """Samples that one epoch delivers; None where the dataset or sampler does not tell."""
        return length_of(self.sampler if self.sampler is not None else self.dataset)

    def batches_per_epoch(self, batch_size: int | None = None) -> int | None:
        """Batches of one epoch for this or another batch size; None where that cannot be known without iterating."""
        if self.batch_sampler is not None:
            return length_of(self.batch_sampler)
        samples, size = self.samples_per_epoch(), batch_size or self.batch_size
        if samples is None or size is None:
            return samples
        return samples // size if self.drop_last else -(-samples // size)


@dataclass(frozen=True, slots=True)
class StepTime:
    """A `train_step` that waits as long as a step takes, where the step itself cannot run beside the caller's."""

    seconds: float

    def __call__(self, *_model_and_batch: Any) -> None:
        time.sleep(self.seconds)

    def __str__(self) -> str:
        return f"a wait of {self.seconds * 1e3:.3g} ms in place of the step"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSide:
    """The training step and what it needs; pickled as one, so that an optimizer keeps pointing at the model's parameters."""

    model: Any = None
    train_step: Callable[[Any, Any], Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    optimizer: Any = None
    """A `torch.optim.Optimizer` over the model's parameters, a callable that makes one of them, or None."""
    device: str = "cpu"
    compiled: tuple[str, ...] = ()
    """Names of the submodules on which `compile()` was called ("" is the model), which copies and pickles forget."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """What a step needs of the Trainer that a Lightning module is attached to, by the Trainer's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What `tune()` was called with, in one value."""

    data: DataSide
    training: TrainingSide
    own_config: LoaderConfig | None = None
    """The configuration of the user's own loader, where one was given."""
    notes: tuple[str, ...] = ()
    """What the user should be told about how the arguments were read."""

    @property
    def shuffles(self) -> bool | None:
        """Whether the user's loader shuffles; None for an order of its own, or that of a stream; False of a bare dataset."""
        if self.data.is_iterable or self.data.has_own_order:
            return None
        return self.own_config is not None and self.data.is_shuffled

    @property
    def has_step(self) -> bool:
        """Whether anything is done with a batch."""
        return self.training.model is not None or self.training.train_step is not None

    @property
    def on_cpu(self) -> bool:
        """Whether the step computes on the CPU."""
        return self.training.device.startswith("cpu") and not isinstance(self.training.train_step, StepTime)


def length_of(value: Any) -> int | None:
    """Its length; None where it has none, or does not know: streams raise anything they like."""
    try:
        return len(value)
    except Exception:
        return None


def wrapped_datasets(dataset: Any) -> Iterator[Any]:
    """A dataset and those that it is made of: what `Subset`, `ConcatDataset` and wrappers like them hold, at any depth."""
    waiting, seen = [dataset], set[int]()
    while waiting and len(seen) < MOST_WRAPPED:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += _directly_in(each)


def _directly_in(dataset: Any) -> Iterator[Any]:
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        is_named = "dataset" in name or name.strip("_") in WRAPPED_NAMES
        many = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
        for each in list(islice(many, MOST_WRAPPED)):
            if isinstance(each, Dataset) or _has_any(each, ("set_epoch",)) or (is_named and hasattr(each, "__dict__")):
                yield each


def is_users(module: str | None) -> bool:
    """Whether a module is the user's own: no part of Python, of an installed package, or of this one."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module in ("__main__", "__mp_main__") or (file is not None and not is_library(file))


def _has_any(value: Any, names: tuple[str, ...]) -> bool:
    with contextlib.suppress(Exception):  # `__getattr__` of a wrapper may raise anything
        return any(hasattr(value, name) for name in names)
    return False


def draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """Whether it is certain that no batch needs random numbers: plain data, put together as torch does it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in PLAIN_DATA and collate_fn in (default_collate, default_convert)
