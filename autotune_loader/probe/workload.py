"""What is to be tuned, in two halves that travel separately.

`DataSide` is everything a DataLoader is made of; `TrainingSide` is everything the training step needs. They are pickled
apart because the data side is unpickled afresh for every burst that fetches in the main process: a dataset that caches, or
that opens a file on first use, must not hand its filled cache or its open handle to the workers of the next burst.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autotune_loader.config import LoaderConfig

if TYPE_CHECKING:
    import torch
    from torch.utils.data import DataLoader


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

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        *,
        batch_size: int | None,
        sampler: Any = None,
        batch_sampler: Any = None,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        generator: torch.Generator | None = None,
    ) -> DataSide:
        """The data side of a bare dataset: shuffled, as training is, unless a sampler says otherwise."""
        if sampler is None and batch_sampler is None and not is_iterable_dataset(dataset):
            from torch.utils.data import RandomSampler

            sampler = RandomSampler(dataset, generator=generator)
        return cls(
            dataset=dataset,
            batch_size=None if batch_sampler is not None else batch_size,
            sampler=None if batch_sampler is not None else sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            collate_fn=collate_fn,
            worker_init_fn=worker_init_fn,
            generator=generator,
        )

    @classmethod
    def from_loader(cls, loader: DataLoader[Any]) -> DataSide:
        """The data side of an existing loader, which is only read, never iterated."""
        iterable = is_iterable_dataset(loader.dataset)
        own_batches = not iterable and loader.batch_size is None and loader.batch_sampler is not None
        return cls(
            dataset=loader.dataset,
            batch_size=loader.batch_size,
            sampler=None if iterable or own_batches else loader.sampler,
            batch_sampler=loader.batch_sampler if own_batches else None,
            drop_last=bool(loader.drop_last),
            collate_fn=loader.collate_fn,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
        )

    @property
    def is_iterable(self) -> bool:
        return is_iterable_dataset(self.dataset)

    @property
    def has_epochs(self) -> bool:
        """Whether the dataset is told the epoch; persistent workers would keep their copy of the first one."""
        return hasattr(self.dataset, "set_epoch") or hasattr(self.dataset, "epoch")

    @property
    def shards(self) -> int | None:
        """How many workers an IterableDataset can feed, where it says so (Hugging Face datasets do)."""
        for name in ("num_shards", "n_shards"):
            value = getattr(self.dataset, name, None)
            if isinstance(value, int):
                return value
        return None

    def samples_per_epoch(self) -> int | None:
        """Samples that one epoch delivers; None where the dataset or sampler does not tell."""
        source = self.sampler if self.sampler is not None else self.dataset
        try:
            return len(source)
        except (TypeError, NotImplementedError):
            return None

    def batches_per_epoch(self, batch_size: int | None = None) -> int | None:
        """Batches of one epoch for this or another batch size; None where that cannot be known without iterating."""
        if self.batch_sampler is not None:
            try:
                return len(self.batch_sampler)
            except (TypeError, NotImplementedError):
                return None
        samples, size = self.samples_per_epoch(), batch_size or self.batch_size
        if samples is None or size is None:
            return samples
        return samples // size if self.drop_last else -(-samples // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSide:
    """The training step and what it needs; pickled as one, so that an optimizer keeps pointing at the model's parameters."""

    model: Any = None
    train_step: Callable[[Any, Any], Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    optimizer: Any = None
    """A `torch.optim.Optimizer` over the model's parameters, a callable that makes one of them, or None."""
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A dataset and a training step: what `tune()` was called with, in one value."""

    data: DataSide
    training: TrainingSide
    own_config: LoaderConfig | None = None
    """The configuration of the user's own loader, where one was given."""


def is_iterable_dataset(dataset: Any) -> bool:
    from torch.utils.data import IterableDataset

    return isinstance(dataset, IterableDataset)


class UnpicklableError(Exception):
    """A part of the workload cannot travel to the probe process; `part` names it."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part} cannot be pickled: {reason}")
        self.part = part


class PayloadTooLargeError(Exception):
    """The workload is larger than it is sensible to copy to the probe process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A workload as bytes: cloudpickle, so that classes of a notebook cell or an unguarded script travel too."""

    data: bytes
    training: bytes

    @classmethod
    def of(cls, workload: Workload, max_bytes: int) -> Payload:
        """Pickle both halves.

        Raises:
            UnpicklableError: naming the attribute at fault, such as `dataset.lock`.
            PayloadTooLargeError: the pickle passed `max_bytes`; it was given up there.
        """
        return cls(
            data=_pickled(workload.data, ("dataset", "collate_fn", "sampler", "batch_sampler"), max_bytes),
            training=_pickled(workload.training, ("model", "train_step", "loss_fn", "optimizer"), max_bytes),
        )


class _BoundedBuffer(io.BytesIO):
    """A buffer that refuses to grow past a limit, so that a 100 GB dataset is not pickled only to be thrown away."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_bytes:
            raise PayloadTooLargeError(f"larger than {self._max_bytes} bytes")
        return super().write(data)


def _pickled(side: DataSide | TrainingSide, parts: tuple[str, ...], max_bytes: int) -> bytes:
    import cloudpickle

    buffer = _BoundedBuffer(max_bytes)
    with _unimportable_modules_by_value(getattr(side, part) for part in parts):
        try:
            cloudpickle.dump(side, buffer)
        except PayloadTooLargeError:
            raise
        except Exception as error:
            raise UnpicklableError(_part_at_fault(side, parts), str(error)) from error
    return buffer.getvalue()


@contextlib.contextmanager
def _unimportable_modules_by_value(parts: Iterable[Any]) -> Iterator[None]:
    """Let cloudpickle send classes by value whose module another process could not import (a plugin, a test file)."""
    import cloudpickle

    names = {getattr(part, "__module__", None) or type(part).__module__ for part in parts if part is not None}
    modules = [sys.modules[name] for name in names if name in sys.modules and not _is_importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    module: ModuleType | None = sys.modules.get(name)
    if name == "__main__" or module is None:
        return True  # cloudpickle sends __main__ by value on its own
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def _part_at_fault(side: object, parts: tuple[str, ...]) -> str:
    """The dotted path of the deepest attribute that does not pickle by itself, such as `dataset.reader.lock`."""
    for part in parts:
        value = getattr(side, part)
        if value is not None and not _pickles(value):
            return _deepest_fault(part, value, depth=4)
    return type(side).__name__


def _deepest_fault(path: str, value: Any, depth: int) -> str:
    if depth == 0:
        return path
    attributes = getattr(value, "__dict__", None)
    for name, attribute in (attributes or {}).items():
        if not _pickles(attribute):
            return _deepest_fault(f"{path}.{name}", attribute, depth - 1)
    return path


def _pickles(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dump(value, _BoundedBuffer(max_bytes=1 << 26))
    except PayloadTooLargeError:
        return True  # large is not at fault
    except Exception:
        return False
    return True
