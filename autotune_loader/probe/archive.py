"""A value as a file without a name: its pickle, and behind it the memory of its tensors and arrays.

    pickle ── memory ── table: where each buffer of the pickle lies ── where the table begins

However many tensors are views of one storage, and arrays of one array, their memory is in the file once; what is a memory map
of a file already is named, not copied. The process that wrote it holds no copy of its own. The process that reads it maps it:
copy on write, so that every reading has memory of its own that costs nothing until it is written to.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
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
# Length of the file up to the table, at its end.
TRAILER = struct.Struct("<q")


class TooLargeError(Exception):
    """A value takes more memory than it may."""


class Archive:
    """A value in a file in memory that has no name: it is gone with the last process that has it open."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("autotune-loader")
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
            limited = _Limited(max_bytes, file)
            buffers = _pickled(value, limited)
            try:
                table = [limited.write_aligned(buffer) for buffer in buffers]
                end = limited.total
                file.write(np.array(table, dtype=np.int64).tobytes() + TRAILER.pack(end))
                file.flush()
            except OSError as error:
                raise TooLargeError(f"larger than there is room for ({error.strerror})") from error

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
    mapped = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    memory = memoryview(mapped)
    (end,) = TRAILER.unpack(memory[-TRAILER.size :])
    table = np.frombuffer(memory[end : len(memory) - TRAILER.size], np.int64).reshape(-1, 2).tolist()
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
    limited = _Limited(max_bytes)
    return sum((view.nbytes for view in _pickled(value, limited, shared)), limited.total)


def _pickled(value: Any, file: _Limited, shared: dict[int, Any] | None = None) -> list[memoryview]:
    """Write the pickle; the memory that it refers to, in the order in which it does."""
    views: list[memoryview] = []

    def is_copied(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= SMALLEST_BUFFER:
            views.append(view)
            file.expect(view.nbytes)
        return view.nbytes < SMALLEST_BUFFER

    ArchivePickler(file, is_copied, shared).dump(value)
    return views


class ArchivePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, so that classes of a notebook cell travel too; the memory of tensors and arrays stays out of the pickle."""

    def __init__(
        self, file: Any, is_copied: Callable[[pickle.PickleBuffer], bool], shared: dict[int, Any] | None
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=is_copied)
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
        if type(value) is np.ndarray and (base := _whole_of(value)) is not None:
            return _view, (base, value.dtype, _address(value) - _address(base), value.shape, value.strides)
        return super().reducer_override(value)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    has_more = tensor.__dict__ or tensor._backward_hooks or tensor.grad_fn is not None
    return is_dense and not has_more and not tensor.is_conj() and not tensor.is_neg()


def _tensor(storage: torch.UntypedStorage, offset: int, layout: tuple[Any, ...]) -> torch.Tensor:
    dtype, shape, strides, requires_grad = layout
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, strides).requires_grad_(requires_grad)


def _memory_of(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu()).numpy()


def _storage(buffer: Any, size: int, device: str) -> torch.UntypedStorage:
    bytes_ = torch.frombuffer(buffer, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8, device="cpu")
    if size < SMALLEST_BUFFER:
        bytes_ = bytes_.clone()  # may be resized, as small state sometimes is
    return bytes_.to(device).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.storage.TypedStorage:
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _whole_of(array: Any) -> Any:
    """The array whose memory this one is a view of; None where it has its own, or cannot be made from the other."""
    base = array.base
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    is_whole = isinstance(base, np.ndarray) and base.flags.c_contiguous and base.size
    return base if is_whole and not (array.dtype.hasobject or base.dtype.hasobject) else None


def _view(base: Any, dtype: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return np.ndarray(shape, dtype, base, offset, strides)


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


class _Limited(io.RawIOBase):
    """A file that refuses more than a limit, so that no 100 GB are pickled in vain; without a file it only counts."""

    def __init__(self, max_bytes: int | None, file: IO[bytes] | None = None) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._file = file
        self._expected = 0
        self.total = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.total += size
        self.expect(0)
        if self._file is not None:
            self._file.write(data)
        return size

    def expect(self, size: int) -> None:
        """So many bytes are still to be written."""
        self._expected += size
        if self._max_bytes is not None and self.total + self._expected > self._max_bytes:
            raise TooLargeError(f"larger than {self._max_bytes / 2**20:,.0f} MiB")

    def write_aligned(self, view: memoryview) -> tuple[int, int]:
        """Where memory that was expected begins now, and its size."""
        self._expected -= view.nbytes
        self.write(bytes(-self.total % ALIGNMENT))
        self.write(view)
        return self.total - view.nbytes, view.nbytes


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
