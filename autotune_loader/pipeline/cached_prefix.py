"""Samples that are made once, as far as they are the same each time; what is random is done each time, as ever.

    dataset[i] ── read ── decode ── resize ──┬── random crop ── flip ──►
                  kept when first made       └── each time

What is kept lies in files of a temporary folder, which all workers read: in memory, as far as the page cache holds them.
Each process appends to a file of its own, and an index that is mapped into all of them says where a sample is.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import shutil
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

DRAWS = 4
"""So often a transform is asked for the same sample, whether it is random."""
HEAD = struct.Struct("<qq")
"""Before each sample: its index and its length, so that an index that is just being written is not believed."""
LOOK_EVERY = 64
"""Samples that are written between two looks at how much there is."""


class CachedPrefix(Dataset[Any]):
    """A map-style dataset in front of a cache: `dataset[i]` is made once, and `transform` is applied each time.

    Without `transform`, the dataset's own (`dataset.transform`) is taken apart: its first members that are not random are
    done once, with all before them, and the others each time. That a sample is the same as without the cache is checked for
    two of them, with the same random numbers.

    Args:
        dataset: a map-style dataset with a length; it is used, and not changed.
        transform: what is done with a whole sample each time; `dataset` itself must then not be random.
        max_bytes: on what is kept; further samples are made each time.
        folder: where the files lie until this process ends; None is the system's folder for temporary files. "/dev/shm" keeps
            them in memory.

    Raises:
        TypeError: not a map-style dataset with a length.
        ValueError: the dataset is random where it would be cached, or its samples cannot be taken apart.
    """

    def __init__(
        self,
        dataset: Any,
        transform: Callable[[Any], Any] | None = None,
        *,
        max_bytes: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"dataset={type(dataset).__name__} is no map-style dataset with a length; a Dataset would work"
            )
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
            raise ValueError(f"max_bytes={max_bytes!r} is not 0 bytes or more; max_bytes=8 << 30 would work")
        self._prefix, self._suffix = dataset, transform
        if transform is None:
            self._prefix, self._suffix = _with_seed(0, lambda: _split(dataset))
        _with_seed(0, lambda: _require_same(dataset if transform is None else None, self))
        self._length = len(dataset)
        self._store = _Store(self._length, max_bytes, folder)

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._prefix, name)

    def __getitem__(self, index: int) -> Any:
        number = int(index)
        number += self._length if number < 0 else 0
        if not 0 <= number < self._length:
            raise IndexError(f"index {index} is out of range for {self._length} samples")
        sample = self._store.get(number)
        if sample is None:
            made = self._prefix[number]
            self._store.put(number, made)
            return self._followed(made)
        return self._followed(sample[0])

    @property
    def cached_bytes(self) -> int:
        """Bytes that are kept so far."""
        return self._store.bytes()

    def _followed(self, sample: Any) -> Any:
        """The sample after what is done each time."""
        return _apply(self._suffix, sample) if isinstance(self._suffix, _Members) else _whole(self._suffix, sample)


class _Members:
    """Members of a container that are applied one after the other, as its own class would."""

    def __init__(self, members: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = list(members)

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class _Store:
    """Pickled samples in files, one a process, and where they are."""

    def __init__(self, length: int, max_bytes: int | None, folder: str | os.PathLike[str] | None) -> None:
        self._folder = tempfile.mkdtemp(prefix="autotune-loader-cache-", dir=folder)
        self._max_bytes, self._length = max_bytes, length
        np.memmap(self._index_path, dtype=np.int64, mode="w+", shape=(length, 2))[:] = -1
        self._open()
        weakref.finalize(self, _remove, self._folder, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_max_bytes": self._max_bytes, "_length": self._length}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    @property
    def _index_path(self) -> Path:
        return Path(self._folder, "index")

    def _open(self) -> None:
        self._index = np.memmap(self._index_path, dtype=np.int64, mode="r+", shape=(self._length, 2))
        self._files: dict[int, int] = {}
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._written, self._is_full = 0, False

    def get(self, number: int) -> tuple[Any] | None:
        """The sample, in a tuple of its own; None where it is not kept."""
        pid, offset = self._index[number]
        if pid < 0:
            return None
        file = self._file(int(pid))
        head = os.pread(file, HEAD.size, int(offset))
        if len(head) < HEAD.size:
            return None
        kept, size = HEAD.unpack(head)
        data = os.pread(file, size, int(offset) + HEAD.size) if kept == number else b""
        if kept != number or len(data) != size:
            return None
        return (pickle.loads(data),)  # noqa: S301 - our own processes wrote it

    def put(self, number: int, sample: Any) -> None:
        """Keep a sample, unless there is enough."""
        if self._owner != os.getpid():  # forked: the lock may be held by a thread that is not here
            self._lock, self._owner, self._written = threading.Lock(), os.getpid(), 0
        if self._max_bytes is not None and self._written % LOOK_EVERY == 0:
            self._is_full = self.bytes() >= self._max_bytes
        if self._is_full:
            return
        data = pickle.dumps(sample, protocol=5)
        with self._lock:
            file = self._file(self._owner)
            offset = os.fstat(file).st_size
            os.write(file, HEAD.pack(number, len(data)) + data)
        self._index[number, 1] = offset
        self._index[number, 0] = self._owner
        self._written += 1

    def bytes(self) -> int:
        return sum(each.stat().st_size for each in Path(self._folder).glob("part-*"))

    def _file(self, pid: int) -> int:
        if pid not in self._files:
            path = Path(self._folder, f"part-{pid}")
            self._files[pid] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        return self._files[pid]


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _split(dataset: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """The dataset as far as it is the same each time, and what is done with its samples each time."""
    transform = getattr(dataset, "transform", None)
    if transform is None:
        return dataset, None
    prefix = copy.copy(dataset)
    prefix.transform = _Members([])  # not None: a dataset may call it without asking
    _forget_combined(prefix)
    listed = getattr(transform, "transforms", None)
    members = list(listed) if isinstance(listed, (list, tuple)) else [transform]
    first = _part(prefix[0])
    steady = 0
    for member in members:
        if _is_random(partial(_on_copy, member, first)):
            break
        first, steady = _on_copy(member, first), steady + 1
    if steady:
        prefix.transform = _Members(members[:steady])
        _forget_combined(prefix)
    return prefix, _Members(members[steady:])


def _on_copy(member: Callable[[Any], Any], sample: Any) -> Any:
    """What a transform makes of a sample that it may change."""
    return member(copy.deepcopy(sample))


def _made_and_followed(cached: CachedPrefix, number: int) -> Any:
    return cached._followed(cached._prefix[number])


def _forget_combined(dataset: Any) -> None:
    """Torchvision keeps `transform` and `target_transform` once more, as one."""
    combined = getattr(dataset, "transforms", None)
    if combined is not None and hasattr(combined, "target_transform"):
        dataset.transforms = copy.copy(combined)
        dataset.transforms.transform = dataset.transform


def _require_same(dataset: Any, cached: CachedPrefix) -> None:
    """Raise a ValueError where samples are random before the cache, or differ behind it from those of `dataset`."""
    for number in range(min(2, len(cached._prefix))):
        if _is_random(partial(cached._prefix.__getitem__, number)):
            raise ValueError(
                f"dataset={type(cached._prefix).__name__} gives another sample each time it is asked for the same index, so it "
                "cannot be cached; CachedPrefix(dataset_without_its_random_part, transform=the_random_part) would work"
            )
        if dataset is None:
            continue
        fresh, once_more = (_with_seed(number, partial(dataset.__getitem__, number)) for _ in range(2))
        again = _with_seed(number, partial(_made_and_followed, cached, number))
        # Random numbers of a generator of its own cannot be drawn twice; then only what kind of sample it is can be compared.
        if not (same(fresh, again) if same(fresh, once_more) else type(fresh) is type(again)):
            raise ValueError(
                f"dataset={type(dataset).__name__} cannot be taken apart at its transform: sample {number} differs; "
                "CachedPrefix(dataset_without_transform, transform=for_a_whole_sample) would work"
            )


def _part(sample: Any) -> Any:
    """What a dataset's `transform` is for: the first of a tuple, or the sample itself."""
    return sample[0] if isinstance(sample, tuple) else sample


def _apply(members: _Members, sample: Any) -> Any:
    return (members(sample[0]), *sample[1:]) if isinstance(sample, tuple) else members(sample)


def _whole(transform: Callable[[Any], Any] | None, sample: Any) -> Any:
    return sample if transform is None else transform(sample)


def _states() -> tuple[Any, ...]:
    kept = np.random.get_state()  # noqa: NPY002 - transforms draw from it
    return torch.get_rng_state().tolist(), random.getstate(), [kept[0], kept[1].tolist(), *kept[2:]]  # type: ignore[index]


def _is_random(make: Callable[[], Any]) -> bool:
    """Whether it draws random numbers, or gives something else for the same."""
    before = _states()
    made = make()
    return _states() != before or not all(same(made, make()) for _ in range(DRAWS - 1))


def _with_seed(seed: int, make: Callable[[], Any]) -> Any:
    """What it makes with these random numbers; those of the caller go on as if nothing had been drawn."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as above
    try:
        return make()
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])  # noqa: NPY002 - as above


def same(one: Any, other: Any) -> bool:
    """Whether two samples hold the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes"):  # a picture
        return bool(one.tobytes() == other.tobytes())
    return pickle.dumps(one) == pickle.dumps(other)
