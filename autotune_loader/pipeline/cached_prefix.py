"""Samples that are made once, as far as they are the same each time; what is random is done each time, as ever.

    dataset[i] ── read ── decode ── resize ──┬── random crop ── flip ──►
                  kept when first made       └── each time

What is kept lies in files of a temporary folder, which all workers read: in memory, as far as the page cache holds them.
Each process appends to a file of its own, and an index that is mapped into all of them says where a sample is.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from autotune_loader.pipeline.transforms import (
    Members,
    is_random,
    members_of,
    on_copy,
    part_of,
    same,
    with_members,
    with_seed,
)

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
            self._prefix, self._suffix = with_seed(0, lambda: _split(dataset))
        with_seed(0, lambda: _require_same(dataset if transform is None else None, self))
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

    def _made_anew(self, number: int) -> Any:
        return self._followed(self._prefix[number])

    def _followed(self, sample: Any) -> Any:
        """The sample after what is done each time."""
        if isinstance(self._suffix, Members):
            return (self._suffix(sample[0]), *sample[1:]) if isinstance(sample, tuple) else self._suffix(sample)
        return sample if self._suffix is None else self._suffix(sample)


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
    members = members_of(dataset)
    if not members:
        return dataset, None
    first, steady = part_of(with_members(dataset, [])[0]), 0
    for member in members:
        if is_random(partial(on_copy, member, first)):
            break
        first, steady = on_copy(member, first), steady + 1
    return with_members(dataset, members[:steady]), Members(members[steady:])


def _require_same(dataset: Any, cached: CachedPrefix) -> None:
    """Raise a ValueError where samples are random before the cache, or differ behind it from those of `dataset`."""
    for number in range(min(2, len(cached._prefix))):
        if is_random(partial(cached._prefix.__getitem__, number)):
            raise ValueError(
                f"dataset={type(cached._prefix).__name__} gives another sample each time it is asked for the same index, so it "
                "cannot be cached; CachedPrefix(dataset_without_its_random_part, transform=the_random_part) would work"
            )
        if dataset is None:
            continue
        fresh, once_more = (with_seed(number, partial(dataset.__getitem__, number)) for _ in range(2))
        again = with_seed(number, partial(cached._made_anew, number))
        # Random numbers of a generator of its own cannot be drawn twice; then only what kind of sample it is can be compared.
        if not (same(fresh, again) if same(fresh, once_more) else type(fresh) is type(again)):
            raise ValueError(
                f"dataset={type(dataset).__name__} cannot be taken apart at its transform: sample {number} differs; "
                "CachedPrefix(dataset_without_transform, transform=for_a_whole_sample) would work"
            )
