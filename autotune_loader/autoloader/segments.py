"""Batches in memory that a worker and the loop have both mapped: no new pages, and no copy, for a batch like the one before.

worker   take a segment ── collate into it ── packet: the pickle, the numbers of its segments ──► loop
loop     tensors over the segments ── the last one is gone ── the number goes back with the next job

A segment is a memfd, sent once and named by its number from then on: neither /dev/shm nor TMPDIR is used. A tensor holds its
own segment only; parts of one storage share theirs. What is no plain CPU tensor or array travels as torch sends it. Of what a
fork of the loop's has inherited nothing is written again: such segments are unmapped.
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

from autotune_loader.autoloader.pinning import Fence, Pinner
from autotune_loader.machine.kernel import memfd

SMALL_BYTES = 1 << 16
"""Up to this size tensors are part of the pickle, as copying is cheaper than a segment; sizes of segments are multiples."""
SLACK = 1.25
"""A segment may be larger than what lies in it by this and `SMALL_BYTES`."""
FREE_BYTES = 1 << 26
"""Free segments beyond this, and beyond what is in use, are unmapped."""
MOST_GAPS, ALIGNED_BYTES = 4, 16
"""Parts of one storage are sent as it lies if that is at most so many times what they have; the largest element of a tensor."""
ALL_ARE_WRITABLE = pickle.DEFAULT_PROTOCOL < 5
"""Torch's queues pickle by the default protocol; that of Python 3.14 keeps arrays read-only that are."""
MOST_BEHIND = 4
"""Batches of a worker that devices are behind with: the loop, which is so far ahead, waits, so that memory has a bound."""
Body = tuple[bytes | int, int]
"""A pickle, or, where it is too long for a packet, the number of a segment in which it lies; and where its table begins."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    """A mapped memfd. Python's own `mmap` would hold a descriptor for each."""

    def __init__(self, number: int, file: int, size: int) -> None:
        self.number, self.size = number, size
        self._kind = ctypes.c_char * size  # to make this type takes 25 us
        self.pinner: Pinner | None = None
        # Whether the loop has it; whether the worker has a tensor over it; whether a fork of the loop's has it for good.
        self.is_lent = self.is_held = self.is_kept = False
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

    def memory(self, owner: Callable[[], Pool | Mapped | None]) -> Any:
        """Its bytes; when nobody has them any more, its owner is told."""
        memory: Any = self._kind.from_address(self.address)
        memory.lease = _Lease(self, owner)
        return memory


class _Lease:
    """Holds a segment for its memory, and ends with that."""

    def __init__(self, segment: Segment, owner: Callable[[], Pool | Mapped | None]) -> None:
        self._segment, self._owner = segment, owner

    def __del__(self) -> None:
        if (owner := self._owner()) is not None:
            owner.let_go(self._segment)


class Pool:
    """The segments of a worker, which it makes, lends to the loop and gets back."""

    def __init__(self) -> None:
        self._all, self._by_address = dict[int, Segment](), dict[int, Segment]()
        self._free, self._made, self._own = list[Segment](), 0, weakref.ref(self)
        self._fresh, self._dropped, self._lending = dict[int, int](), list[int](), list[int]()

    def _take(self, size: int) -> Segment:
        """A free segment for so many bytes, as small as there is, or a new one."""
        # Of equal ones that which came back last, which caches still hold.
        fits = (each for each in reversed(self._free) if size <= each.size <= SLACK * size + SMALL_BYTES)
        if (best := min(fits, key=lambda each: each.size, default=None)) is not None:
            self._free.remove(best)
            return best
        free = sum(each.size for each in self._free)
        most = max(FREE_BYTES, sum(each.size for each in self._all.values()) - free)
        while free > most:  # those that were used longest ago are forgotten
            gone = self._free.pop(0)
            free -= gone.size
            del self._all[gone.number], self._by_address[gone.address]
            if gone.number in self._fresh:
                os.close(self._fresh.pop(gone.number))
            else:
                self._dropped.append(gone.number)
        number, whole = self._made, -(-size // SMALL_BYTES) * SMALL_BYTES
        file = memfd("batch")
        try:
            os.ftruncate(file, whole)
            segment = Segment(number, file, whole)
        except BaseException:
            os.close(file)
            raise
        self._made += 1
        self._all[number], self._by_address[segment.address], self._fresh[number] = segment, segment, file
        return segment

    def flat(self, size: int) -> torch.Tensor:
        """Memory for what is about to be made; free again when it is gone and not lent."""
        segment = self._take(size)
        segment.is_held = True
        return torch.frombuffer(segment.memory(self._own), dtype=torch.uint8, count=size)

    def let_go(self, segment: Segment) -> None:
        """The worker has no tensor over it any more."""
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
        """The loop has no tensor over it any more; where it says `~number`, it has unmapped it."""
        if number < 0:
            del self._by_address[self._all.pop(~number).address]
            return
        segment = self._all[number]
        segment.is_lent = False
        if not segment.is_held:
            self._free.append(segment)

    def pickled(self, message: Any) -> Body:
        """A message for the loop, with what it lends: nothing where that fails."""
        file, self._lending = io.BytesIO(), []
        runs: list[Any] = []
        try:
            pickler = _Pickler(file, self)
            pickler.dump(message)
            begin, (memory, places) = file.tell(), pickler.gathered()
            for address, size in memory:
                if size <= SMALL_BYTES:
                    file.write(ctypes.string_at(address, size))
                    runs.append(size)
                    continue
                segment, is_other = self.lend(size, address)
                if is_other:
                    ctypes.memmove(segment.address, address, size)
                runs.append((segment.number, size))
            table = file.tell()
            pickle.dump((begin, runs, places), file, pickle.HIGHEST_PROTOCOL)
            if (size := file.tell()) <= SMALL_BYTES // 2:
                return file.getvalue(), table
            segment, _ = self.lend(size)
            ctypes.memmove(segment.address, file.getvalue(), size)
            return segment.number, table
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
    """Pickles as torch's workers do, but for the bytes of tensors and arrays, which are gathered beside."""

    def __init__(self, file: io.BytesIO, pool: Pool) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._pool = pool
        self._parts: list[torch.Tensor] = []
        self._storages: dict[
            int, list[Any]
        ] = {}  # where parts of each begin and end, how much they have, their numbers

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor and _is_plain(value):
            return self._tensor(value) if value.nbytes else small(value)
        if kind is np.ndarray and not value.dtype.hasobject:
            if value.nbytes > SMALL_BYTES:
                order: Any = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
                flat = self._pool.flat(value.nbytes)
                np.copyto(array(flat, value.dtype, value.shape, order), value)
                return array, (flat, value.dtype, value.shape, order, value.flags.writeable or ALL_ARE_WRITABLE)
            if not value.flags.writeable and ALL_ARE_WRITABLE:
                return value.copy().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented

    def _tensor(self, value: torch.Tensor) -> Any:
        number, begin, size = len(self._parts), value.data_ptr(), _extent(value)
        end, needed, storage = (
            begin + size,
            min(size, value.nbytes),
            begin - int(value.storage_offset()) * value.itemsize,
        )
        if (group := self._storages.get(storage)) is None:
            self._storages[storage] = [begin, end, needed, [number]]
        else:
            group[:3] = min(group[0], begin), max(group[1], end), group[2] + needed
            group[3].append(number)
        self._parts.append(value)
        return tensor, (number, value.dtype, tuple(value.shape))

    def gathered(self) -> tuple[list[tuple[int, int]], list[Any]]:
        """Addresses and sizes of what is sent, and of each tensor which it is; or in which it lies, where, and its strides.

        Parts of one storage share theirs, unless most of that would be nobody's.
        """
        runs = list[tuple[int, int]]()
        places: list[Any] = [None] * len(self._parts)
        for storage, (begin, end, needed, numbers) in self._storages.items():
            if is_shared := end - begin <= MOST_GAPS * needed:
                begin -= (begin - storage) % ALIGNED_BYTES  # parts may be of several dtypes
                runs.append((begin, end - begin))
            for number in numbers:
                part = self._parts[number]
                if not is_shared:
                    if _extent(part) > MOST_GAPS * part.nbytes:
                        part = self._parts[number] = part.contiguous()  # which lives until it is sent
                    begin = part.data_ptr()
                    runs.append((begin, _extent(part)))
                places[number] = len(runs) - 1
                if part.nbytes != runs[-1][1] or not part.is_contiguous():
                    places[number] = len(runs) - 1, (part.data_ptr() - begin) // part.itemsize, part.stride()
        return runs, places


class JobPickler(ForkingPickler):
    """Pickles as torch's queues do, but a slice of a tensor of indices without what it is a slice of."""

    def reducer_override(self, value: Any) -> Any:
        return small(value) if type(value) is torch.Tensor and _is_plain(value) else NotImplemented


def small(value: torch.Tensor) -> Any:
    """How a tensor is pickled with its bytes."""
    own = value.contiguous()
    return copy_of, (ctypes.string_at(own.data_ptr(), own.nbytes) if own.nbytes else b"", own.dtype, tuple(own.shape))


def _is_plain(value: torch.Tensor) -> bool:
    if value.layout is not torch.strided or not value.is_cpu or value.is_nested or vars(value):
        return False
    return not (value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized)


def _extent(value: torch.Tensor) -> int:
    """Bytes from where it begins to where it ends."""
    if value.is_contiguous():
        return value.nbytes
    last = sum((length - 1) * stride for length, stride in zip(value.shape, value.stride(), strict=True))
    return value.itemsize * (last + 1)


class Mapped:
    """The segments of one worker, as the loop has them; with a pinner, tensors are pinned where they lie."""

    def __init__(self, pinner: Pinner | None) -> None:
        self.returned = deque[int]()  # numbers; `~number` where a fork may still have it
        self.all, self._own = dict[int, Segment](), weakref.ref(self)
        self._pinner, self._behind = pinner, deque[tuple[Fence, list[int]]]()

    def let_go(self, segment: Segment) -> None:
        """The loop has no tensor over it any more: it goes back, or is unmapped."""
        segment.is_lent = False
        self.returned.append(~segment.number if segment.is_kept else segment.number)

    def keep(self) -> None:
        """This process forks: what it has of batches is never written again."""
        for segment in list(self.all.values()):
            segment.is_kept = segment.is_lent

    def leave(self) -> None:
        """In a fork: only tensors that it has inherited stay mapped."""
        for segment in self.all.values():
            segment.pinner = None  # which is the other process's
        self.all.clear()

    def back(self) -> list[int]:
        """What the worker is told: `~number`, or numbers of segments that it may write to again: no device copies from them."""
        free, pinned, pinner = list[int](), list[int](), self._pinner
        for _ in range(len(self.returned)):
            number = self.returned.popleft()
            if number < 0:
                self.all.pop(~number, None)
            (pinned if number >= 0 and self.all[number].pinner is not None else free).append(number)
        fence = None
        if pinner is not None and pinner.may_ask():
            pinner.sweep()
            if pinned and (fence := pinner.fence()) is not None:
                self._behind.append((fence, pinned))
            if len(self._behind) > MOST_BEHIND:
                self._behind[0][0].wait()
            while self._behind and self._behind[0][0].is_passed():
                free += self._behind.popleft()[1]
        if fence is None:
            self.returned.extend(pinned)  # again with the next job
        return free

    def unpickled(self, body: Body) -> tuple[Any, int]:
        """The message that a worker has pickled, and how many bytes it has lent; they go back where that fails, too."""
        data, table = body
        view, lent = (memoryview(data), 0) if isinstance(data, bytes) else (memoryview(self._lease(data)), table)
        at, runs, places = pickle.loads(view[table:])  # noqa: S301 - our worker's
        memory: list[Any] = []
        for run in runs:
            if isinstance(run, int):
                memory.append((bytearray(view[at : at + run]), run))
                at += run
            else:
                memory.append((self._lease(run[0], is_pinned=True), run[1]))
                lent += run[1]
        _reading.message = memory, places, {}
        try:
            return pickle.loads(view), lent  # noqa: S301
        finally:
            _reading.message = None

    def _lease(self, number: int, *, is_pinned: bool = False) -> Any:
        segment = self.all[number]
        segment.is_lent = True
        if is_pinned and self._pinner is not None and segment.pinner is None:
            segment.pinner = self._pinner if self._pinner.pin(segment.address, segment.size) else None
        return segment.memory(self._own)


_reading = threading.local()
"""`message`: what this thread unpickles, its memory, places, and flat tensors. Two loaders may have a pinning thread each."""


def tensor(number: int, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    memory, places, flats = _reading.message
    if isinstance(place := places[number], int):
        flat = _flat(memory[place], dtype)
        return flat if len(shape) == 1 else flat.view(shape)  # which takes 1 us
    run, offset, stride = place
    if (flat := flats.get((run, dtype))) is None:
        flat = flats[run, dtype] = _flat(memory[run], dtype)
    return flat.as_strided(shape, stride, offset)


def copy_of(data: bytes, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    return (_flat((bytearray(data), len(data)), dtype) if data else torch.empty(0, dtype=dtype)).view(shape)


def array(flat: torch.Tensor, dtype: Any, shape: Any, order: Any, is_writable: bool = True) -> Any:
    made: Any = np.ndarray(shape, dtype, flat.numpy(), order=order)
    made.flags.writeable = is_writable
    return made


def _flat(run: tuple[Any, int], dtype: torch.dtype) -> torch.Tensor:
    memory, size = run
    return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize)
