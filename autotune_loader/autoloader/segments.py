"""Batches in memory that a worker and the loop have both mapped: no new pages, and no copy, for a batch like the one before.

worker   take a segment ── collate into it ── packet: the pickle, the numbers of its segments ──► loop
loop     tensors over the segments ── the last one is gone ── the number goes back with the next job

A segment is a memfd, sent once and named by its number from then on: neither /dev/shm nor TMPDIR is used. A tensor holds its
own segment only. What is no dense CPU tensor or array travels in the pickle, or as torch sends it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from autotune_loader.autoloader.pinning import LEAST_BYTES, Fence, Pinner

SMALL_BYTES = 1 << 16
"""Tensors and arrays up to this size are part of the pickle: copying them is cheaper than a segment."""
GRAIN_BYTES, SLACK = 1 << 16, 1.25
"""Sizes are multiples of the first; a segment may be larger than what lies in it by the second and a grain."""
FREE_BYTES = 1 << 26
"""Free segments beyond this, and beyond what is in use, are unmapped."""
MALLOC = ((-3, 1 << 25), (-1, 1 << 27))
"""M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: what is smaller than the first comes from a heap; so much of it stays when it is free."""
MOST_BEHIND = 4
"""Batches of a worker that devices are behind with: the loop, which is so far ahead, waits, so that memory has a bound."""
Body = bytes | tuple[int, int]
"""A pickle; or, where it is too long for a packet, number and size of a segment in which it lies."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def keep_freed_memory() -> None:
    """Let malloc of this process keep what is freed: samples of the next batch need as much (mallopt(3))."""
    for name, value in MALLOC:
        getattr(_libc, "mallopt", lambda *_: 0)(name, value)


class Segment:
    """A mapped memfd. Python's own `mmap` would hold a descriptor for each."""

    __slots__ = ("__weakref__", "address", "is_held", "is_lent", "number", "pinner", "size")

    def __init__(self, number: int, file: int, size: int) -> None:
        self.number, self.size = number, size
        self.pinner: Pinner | None = None
        self.is_lent = self.is_held = False  # whether the loop has it; whether the worker has a tensor over it
        kind = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, file, 0) or 0
        if self.address == ctypes.c_void_p(-1).value:
            self.address, error = 0, ctypes.get_errno()
            raise OSError(error, f"mmap of a batch: {os.strerror(error)}")

    def __del__(self) -> None:
        if self.pinner is not None:
            self.pinner.forget(self.address, functools.partial(_libc.munmap, self.address, self.size))
        elif self.address:
            _libc.munmap(self.address, self.size)

    def memory(self, size: int) -> Any:
        """Its first bytes; whoever has them must hold the segment, too."""
        return (ctypes.c_char * size).from_address(self.address)


class Pool:
    """The segments of a worker, which it makes, lends to the loop and gets back."""

    def __init__(self) -> None:
        self._all, self._by_address = dict[int, Segment](), dict[int, Segment]()
        self._free, self._made = list[Segment](), 0
        self._fresh, self._dropped, self._lending = dict[int, int](), list[int](), list[int]()

    def _take(self, size: int) -> Segment:
        """A free segment for so many bytes, as small as there is, or a new one."""
        # Of equal ones that which came back last, which caches still hold.
        fits = (each for each in reversed(self._free) if size <= each.size <= SLACK * size + GRAIN_BYTES)
        if (best := min(fits, key=lambda each: each.size, default=None)) is not None:
            self._free.remove(best)
            return best
        self._trim()
        whole, number = -(-size // GRAIN_BYTES) * GRAIN_BYTES, self._made
        file = os.memfd_create("batch")
        try:
            os.ftruncate(file, whole)
            segment = Segment(number, file, whole)
        except BaseException:
            os.close(file)
            raise
        self._made += 1
        self._all[number], self._by_address[segment.address], self._fresh[number] = segment, segment, file
        return segment

    def _trim(self) -> None:
        """Forget the free segments that were used longest ago, as far as there are too many."""
        free = sum(each.size for each in self._free)
        most = max(FREE_BYTES, sum(each.size for each in self._all.values()) - free)
        while free > most:
            gone = self._free.pop(0)
            free -= gone.size
            del self._all[gone.number], self._by_address[gone.address]
            if gone.number in self._fresh:
                os.close(self._fresh.pop(gone.number))
            else:
                self._dropped.append(gone.number)

    def storage(self, size: int) -> Any:
        """Storage of torch's for a batch that is about to be collated; free again when it is gone and not lent."""
        segment = self._take(size)
        memory, segment.is_held = segment.memory(size), True
        weakref.finalize(memory, self._let_go, segment).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _let_go(self, segment: Segment) -> None:
        segment.is_held = False
        if not segment.is_lent:
            self._free.append(segment)

    def lend(self, size: int, address: int = 0) -> tuple[Segment, bool]:
        """The segment that lies at an address, or another one for as many bytes; and whether it is the other one."""
        own = self._by_address.get(address)
        if is_other := own is None or own.is_lent or own.size < size:
            own = self._take(size)
        assert own is not None
        own.is_lent = True
        self._lending.append(own.number)
        return own, is_other

    def back(self, number: int) -> None:
        """The loop has no tensor over it any more."""
        segment = self._all[number]
        segment.is_lent = False
        if not segment.is_held:
            self._free.append(segment)

    def pickled(self, message: Any) -> Body:
        """A message for the loop, with what it lends.

        Raises:
            Exception: it cannot be pickled, or there is no memory; nothing is lent then.
        """
        file, self._lending = io.BytesIO(), []
        try:
            _Pickler(file, self).dump(message)
            if (size := file.tell()) <= SMALL_BYTES // 2:
                return file.getvalue()
            segment, _ = self.lend(size)
            ctypes.memmove(segment.address, file.getvalue(), size)
            return segment.number, size
        except BaseException:
            for number in self._lending:
                self.back(number)
            raise

    def news(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Number, size and file of the segments that the loop does not know yet; numbers of those that it is to unmap."""
        fresh = [(number, self._all[number].size, file) for number, file in self._fresh.items()]
        dropped, self._fresh, self._dropped = self._dropped, {}, []
        return fresh, dropped


class _Pickler(ForkingPickler):
    """Pickles as torch's workers do, but for where the bytes of tensors and arrays go."""

    def __init__(self, file: io.BytesIO, pool: Pool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._pool = pool

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor:
            return self._tensor(value)
        if kind is np.ndarray and not value.dtype.hasobject:
            if value.nbytes > SMALL_BYTES:
                return self._array(value)
            if not value.flags.writeable:  # pickle keeps that; torch's arrive writable
                return value.copy().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_nested or vars(value):
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented
        size, stride = value.nbytes, None
        if not value.is_contiguous():
            if value.permute(sorted(range(value.dim()), key=value.stride, reverse=True)).is_contiguous():
                stride = value.stride()  # without gaps: it is sent as it lies
            else:
                value = value.contiguous()
        about = value.dtype, tuple(value.shape), stride
        if size <= SMALL_BYTES:
            return small_tensor, (ctypes.string_at(value.data_ptr(), size) if size else b"", *about)
        segment, is_other = self._pool.lend(size, value.data_ptr())
        if is_other:
            ctypes.memmove(segment.address, value.data_ptr(), size)
        return large_tensor, (segment.number, size, *about)

    def _array(self, value: Any) -> Any:
        order: Any = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        segment, _ = self._pool.lend(value.nbytes)
        np.copyto(np.ndarray(value.shape, value.dtype, segment.memory(value.nbytes), order=order), value)
        return large_array, (segment.number, value.nbytes, value.dtype, value.shape, order)


class Mapped:
    """The segments of one worker, as the loop has them; with a pinner, tensors are pinned where they lie.

    Attributes:
        returned: Numbers of those that nobody has a tensor over any more.
        leased_bytes: Of the latest message.
    """

    def __init__(self, pinner: Pinner | None) -> None:
        self.returned, self.leased_bytes = deque[int](), 0
        self.all = dict[int, Segment]()
        self._pinner, self._behind = pinner, deque[tuple[Fence, list[int]]]()

    def lease(self, number: int, size: int, *, is_pinned: bool = False) -> Any:
        """The bytes of a batch; when they are gone, the segment goes back, if anybody still wants it."""
        segment = self.all[number]
        if is_pinned and self._pinner is not None and segment.pinner is None and size >= LEAST_BYTES:
            segment.pinner = self._pinner if self._pinner.pin(segment.address, segment.size) else None
        memory = segment.memory(size)
        self.leased_bytes += size
        weakref.finalize(memory, _return, weakref.ref(self), segment).atexit = False
        return memory

    def back(self) -> list[int]:
        """Numbers of the segments that the worker may write to again: no device copies from them any more."""
        free, pinned, pinner = list[int](), list[int](), self._pinner
        for _ in range(len(self.returned)):
            number = self.returned.popleft()
            (free if self.all[number].pinner is None else pinned).append(number)
        if pinner is None or not pinner.may_ask():
            self.returned.extend(pinned)  # again with the next job
            return free
        pinner.sweep()
        if pinned and (fence := pinner.fence()) is not None:
            self._behind.append((fence, pinned))
        else:
            self.returned.extend(pinned)
        if len(self._behind) > MOST_BEHIND:
            self._behind[0][0].wait()
        while self._behind and self._behind[0][0].is_passed():
            free += self._behind.popleft()[1]
        return free

    def unpickled(self, body: Body) -> Any:
        """The message that a worker has pickled."""
        _reading.mapped, self.leased_bytes = self, 0
        try:
            return pickle.loads(body if isinstance(body, bytes) else self.lease(*body))  # noqa: S301 - our worker's
        finally:
            _reading.mapped = None


def _return(mapped: Callable[[], Mapped | None], segment: Segment) -> None:
    if (owner := mapped()) is not None:
        owner.returned.append(segment.number)


_reading = threading.local()
"""`mapped`: whose message this thread unpickles. Two loaders may have a pinning thread each."""


def small_tensor(data: bytes, dtype: torch.dtype, shape: Any, stride: Any) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return _shaped(flat, shape, stride)


def large_tensor(number: int, size: int, dtype: torch.dtype, shape: Any, stride: Any) -> torch.Tensor:
    memory = _reading.mapped.lease(number, size, is_pinned=True)
    return _shaped(torch.frombuffer(memory, dtype=dtype), shape, stride)


def _shaped(flat: torch.Tensor, shape: Any, stride: Any) -> torch.Tensor:
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def large_array(number: int, size: int, dtype: Any, shape: Any, order: Any) -> Any:
    return np.ndarray(shape, dtype, _reading.mapped.lease(number, size), order=order)
