"""A value as a file without a name: its pickle, and behind it the memory of its tensors and arrays, each byte once.

    pickle ── extents of memory ── table: where each buffer of the pickle lies ── where pickle and table end

However many tensors are views of one storage, and arrays of one array, their memory is in the file once; what is a memory map
of a file already is named, not copied. The process that wrote it holds no copy of its own. The process that reads it maps it:
copy on write, so that every reading has memory of its own that costs nothing until it is written to.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import mmap
import os
import pickle
import struct
import tempfile
import weakref
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import IO, Any

import cloudpickle
import numpy as np
import torch

from autotune_loader.pipeline.by_value import put_classes_into_modules

# A buffer smaller than this stays in the pickle: its place in the table would cost as much.
SMALLEST_BUFFER = 256
# What kernels for tensors like their memory to be aligned to.
ALIGNMENT = 64
# Lengths of the pickle and of the file up to the table, at its end.
TRAILER = struct.Struct("<2q")
# linux/mman.h: fill in the page tables, without a copy; Python has no name for it yet.
MADV_POPULATE_READ = 22


class TooLargeError(Exception):
    """A value takes more memory than it may."""


class Archive:
    """A value in a file in memory that has no name: it is gone with the last process that has it open."""

    def __init__(self) -> None:
        self.fd = _nameless_file()
        self._finalizer = weakref.finalize(self, os.close, self.fd)

    def write(self, value: Any, max_bytes: int) -> None:
        """Fill the file, once; any process that has inherited it may.

        Args:
            value: anything that cloudpickle takes; it is read, never changed.
            max_bytes: most bytes of the file.

        Raises:
            TooLargeError: it would be larger. That is known before any buffer is copied.
        """
        with open(self.fd, "wb", buffering=1 << 20, closefd=False) as file:
            _write(value, file, max_bytes)

    def read(self) -> Any:
        """The value, in memory of its own."""
        return read_archive(self.fd)

    def close(self) -> None:
        """Free the file. Safe to call twice, and done at the latest when nobody refers to it."""
        self._finalizer()


def read_archive(fd: int, keep: Callable[[Any], object] = lambda unpickler: None) -> Any:
    """The value that a process has written; its large buffers are mapped, and copied only where they are written to.

    Args:
        fd: of the file.
        keep: given what holds every object that is read, also where reading fails half-way.
    """
    mapped, memory, table = _mapped(fd)
    unpickler = pickle.Unpickler(mapped, buffers=(memory[begin : begin + size] for begin, size in table))
    keep(unpickler)
    value = unpickler.load()
    put_classes_into_modules()
    return value


def size_of(value: Any, max_bytes: int | None = None, shared: dict[int, Any] | None = None) -> int:
    """Bytes of an archive of a value, without making one.

    Args:
        value: anything that cloudpickle takes.
        max_bytes: what it may take.
        shared: objects by id that do not count, and need not be picklable.

    Raises:
        TooLargeError: it takes more than `max_bytes`.
    """
    buffers, counter = _Buffers(), _Counter(max_bytes)
    ArchivePickler(counter, buffers, shared).dump(value)
    counter.write_bytes(buffers.total_bytes())
    return counter.total


class ArchivePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, so that classes of a notebook cell travel too; the memory of tensors and arrays is handed to `buffers`."""

    def __init__(self, file: Any, buffers: _Buffers, shared: dict[int, Any] | None = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffers.takes)
        self._shared = shared or {}
        self._layouts: dict[Any, Any] = {}

    def persistent_id(self, value: Any) -> int | None:
        return id(value) if self._shared and id(value) in self._shared else None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_plain(value):
            # As torch does it, but with less for pickle to remember: a dataset may be a list of a million tensors.
            layout = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad)
            layout = self._layouts.setdefault(layout, layout)
            return _tensor, (value.untyped_storage(), value.storage_offset(), layout)
        if isinstance(value, torch.storage.TypedStorage):
            return _typed_storage, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage) and value.device.type != "meta":
            return _storage, (pickle.PickleBuffer(_memory_of(value)), value.nbytes(), str(value.device))
        if isinstance(value, SharedMemory):
            raise pickle.PicklingError(f"shared memory {value.name!r}, which another process would remove at its end")
        if isinstance(value, np.memmap) and (place := _place_in_file(value)) is not None:
            return np.memmap, place
        return super().reducer_override(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    has_more = tensor.__dict__ or tensor._backward_hooks or tensor.grad_fn is not None
    return is_dense and not has_more and not tensor.is_conj() and not tensor.is_neg()


def _tensor(storage: torch.UntypedStorage, offset: int, layout: tuple[Any, ...]) -> torch.Tensor:
    dtype, shape, strides, requires_grad = layout
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides).requires_grad_(requires_grad)


def _memory_of(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage.cpu()).numpy()


def _storage(buffer: Any, size: int, device: str) -> torch.UntypedStorage:
    bytes_ = torch.frombuffer(buffer, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    if size < SMALLEST_BUFFER:
        bytes_ = bytes_.clone()  # may be resized, as small state sometimes is
    return bytes_.to(device).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _place_in_file(array: np.memmap[Any, Any]) -> tuple[Any, ...] | None:
    """The arguments of `np.memmap` for the same elements of the same file; None where they must be copied."""
    contiguous = array.flags.c_contiguous or array.flags.f_contiguous
    memory, name = getattr(array, "_mmap", None), array.filename
    # What was written to a copy-on-write map is not in its file.
    if array.mode == "c" or memory is None or name is None or not array.size or not contiguous or array.dtype.hasobject:
        return None
    if not os.path.isfile(name):  # noqa: PTH113 - numpy keeps names of any kind
        return None
    begin = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    offset = begin + _address(array) - _address(np.frombuffer(memory, np.uint8))
    # A burst must not write to the user's file.
    mode = "r" if array.mode == "r" else "c"
    return os.fspath(name), array.dtype, mode, offset, array.shape, "C" if array.flags.c_contiguous else "F"


class _Buffers:
    """The memory that a pickle refers to, in the order in which it does."""

    def __init__(self) -> None:
        self._views: list[memoryview] = []
        self._begins: list[int] = []

    def takes(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether a buffer is to be copied into the pickle, as pickle asks; if not, it is kept here, alive."""
        view = buffer.raw()
        if view.nbytes < SMALLEST_BUFFER:
            return True
        self._views.append(view)
        self._begins.append(_address(np.frombuffer(view, np.uint8)))
        return False

    def extents(self) -> tuple[Any, Any, Any]:
        """Where memory that is referred to begins and ends, disjoint, and the extent that each buffer lies in."""
        begins = np.array(self._begins, dtype=np.int64)
        ends = begins + np.array([view.nbytes for view in self._views], dtype=np.int64)
        order = np.argsort(begins, kind="stable")
        reach = np.maximum.accumulate(ends[order])
        is_first = np.ones(len(order), dtype=bool)
        is_first[1:] = begins[order][1:] > reach[:-1]
        extent = np.empty(len(order), dtype=np.int64)
        extent[order] = np.cumsum(is_first) - 1
        return begins[order][is_first], reach[np.append(is_first[1:], True)] if len(order) else reach, extent

    def total_bytes(self) -> int:
        begins, ends, _ = self.extents()
        return int((ends - begins).sum())

    def write(self, file: IO[bytes]) -> Any:
        """Write every extent; where each buffer begins in the file, and its size."""
        begins, ends, extent = self.extents()
        places = np.empty(len(begins), dtype=np.int64)
        at = file.tell()
        for number, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
            gap = (begin - at) % ALIGNMENT  # what was aligned stays so
            file.write(bytes(gap))
            file.write((ctypes.c_char * (end - begin)).from_address(begin))
            places[number] = at + gap
            at += gap + end - begin
        starts = np.array(self._begins, dtype=np.int64)
        sizes = np.array([view.nbytes for view in self._views], dtype=np.int64)
        return np.stack([places[extent] + starts - begins[extent], sizes], axis=1)


class _Counter(io.RawIOBase):
    """Counts what is written, and passes it on; refuses more than a limit, so that no 100 GB are pickled in vain."""

    def __init__(self, max_bytes: int | None, file: IO[bytes] | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._file = file
        self.total = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.write_bytes(size)
        if self._file is not None:
            self._file.write(data)
        return size

    def write_bytes(self, size: int) -> None:
        self.total += size
        if self._max_bytes is not None and self.total > self._max_bytes:
            raise TooLargeError(f"larger than {self._max_bytes / 2**20:,.0f} MiB")


def _write(value: Any, file: IO[bytes], max_bytes: int) -> None:
    buffers, counter = _Buffers(), _Counter(max_bytes, file)
    ArchivePickler(counter, buffers).dump(value)
    pickled = counter.total
    counter.write_bytes(buffers.total_bytes())
    try:
        table = buffers.write(file)
        end = file.tell()
        file.write(table.tobytes())
        file.write(TRAILER.pack(pickled, end))
        file.flush()
    except OSError as error:
        raise TooLargeError(f"larger than there is room for ({error.strerror})") from error


def _mapped(fd: int) -> tuple[mmap.mmap, memoryview, list[list[int]]]:
    """An archive as a file that begins with its pickle, its memory and its table."""
    mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # an older kernel; then pages come when they are read
        mapped.madvise(MADV_POPULATE_READ)
    memory = memoryview(mapped)
    _, end = TRAILER.unpack(memory[-TRAILER.size :])
    table = np.frombuffer(memory[end : len(memory) - TRAILER.size], np.int64).reshape(-1, 2)
    return mapped, memory, table.tolist()


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("autotune-loader")
    with tempfile.TemporaryFile() as file:  # pragma: no cover - not on Linux
        return os.dup(file.fileno())


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
