"""Batches that are pinned where they lie: the driver registers a segment once, and the device copies from it by itself.

    lease ── registered ── tensor: is_pinned() ── copied on whatever stream ── dropped ── fence ── passed ── back to the worker

A segment goes back when all that the devices had been given by the time its last tensor was dropped is done, as a copy from it
may be on its way. The driver tells by an event behind all work of a context (`cuCtxRecordEvent`, CUDA 12.5). Without it, and
before CUDA is in use, torch's pinning thread pins by a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

LEAST_BYTES = 1 << 20
"""Tensors that are smaller are pinned by a copy: it takes less than registering does."""
MOST_REFUSALS = 8
"""After so many fences in a row that the driver has refused no more is pinned: nothing would ever go back."""
PORTABLE, BLOCKING_WITHOUT_TIMING = 1, 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts. CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING."""


class Fence:
    """A moment that devices pass when they have done what they had been given by then."""

    def __init__(self, pinner: Pinner) -> None:
        self._pinner, self.events = pinner, list[tuple[Any, Any]]()

    def is_passed(self) -> bool:
        """Whether all devices have passed it; does not wait."""
        for context, event in self.events:
            with self._pinner.current(context):
                if self._pinner.driver.cuEventQuery(event):  # not ready
                    return False
        return True

    def wait(self) -> None:
        """Wait until all devices have passed it, or the driver says why not."""
        for context, event in self.events:
            with self._pinner.current(context):
                self._pinner.driver.cuEventSynchronize(event)

    def __del__(self) -> None:  # its events are recorded again
        for context, event in self.events:
            self._pinner.idle.setdefault(context.value, []).append(event)


class Pinner:
    """Registers memory with the CUDA driver, by the driver's own interface: its errors are no errors of torch's.

    Raises:
        OSError, AttributeError: no driver; or it cannot tell when all work of a context is done, or refuses to register memory.
    """

    def __init__(self) -> None:
        self.driver: Any = ctypes.CDLL("libcuda.so.1")
        self._contexts, self._refusals = dict[int, Any](), 0
        self._gone, self._going = deque[Any](), deque[tuple[Fence, list[Any]]]()
        self.idle = dict[int, list[Any]]()
        """Events that nobody waits for, by context."""
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # registered as long as this lives, to see whether it works
        if self.fence() is None or not self.pin(ctypes.addressof(ctypes.c_char.from_buffer(self._page)), mmap.PAGESIZE):
            raise OSError("memory cannot be registered")

    def pin(self, address: int, size: int) -> bool:
        """Register memory; False where the driver refuses, or may not be asked."""
        contexts = self._active()
        if self._refusals >= MOST_REFUSALS or not self.may_ask() or not contexts:
            return False
        with self.current(contexts[0]):
            return not self.driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), PORTABLE)

    @staticmethod
    def may_ask() -> bool:
        """Whether the driver may be asked now: a fence would end the capture of a graph.

        In the main thread only, since that may capture while another thread takes batches; and not where the device is lost.
        """
        try:
            return (
                threading.current_thread() is threading.main_thread() and not torch.cuda.is_current_stream_capturing()
            )
        except RuntimeError:
            return False

    def forget(self, address: int, unmap: Callable[[], object]) -> None:
        """Have memory that was pinned unmapped, by `sweep`; may be called at any moment, such as by the garbage collector."""
        self._gone.append((address, unmap))

    def sweep(self) -> None:
        """Unmap what was forgotten, as far as no copy from it can be on its way; does not wait. Where `may_ask`."""
        if gone := [self._gone.popleft() for _ in range(len(self._gone))]:  # before the fence is recorded
            if (fence := self.fence()) is None:
                self._gone.extend(gone)
            else:
                self._going.append((fence, gone))
        while self._going and self._going[0][0].is_passed():
            for address, unmap in self._going.popleft()[1]:
                if self._unpin(address):  # else the driver still takes the address for pinned
                    unmap()

    def fence(self) -> Fence | None:
        """A fence behind all work that devices were given; None where the driver does not give one. Where `may_ask`."""
        fence = Fence(self)
        for context in self._active():
            event = ctypes.c_void_p()
            with self.current(context):
                try:
                    event = self.idle[context.value].pop()
                except LookupError:
                    if self.driver.cuEventCreate(ctypes.byref(event), BLOCKING_WITHOUT_TIMING):
                        return None
                fence.events.append((context, event))
                if self.driver.cuCtxRecordEvent(context, event):
                    self._refusals += 1
                    return None
        self._refusals = 0
        return fence

    @contextlib.contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """In this block the context is this thread's own."""
        is_refused = self.driver.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            if not is_refused:
                self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _unpin(self, address: int) -> bool:
        with self.current(self._active()[0]):
            return not self.driver.cuMemHostUnregister(ctypes.c_void_p(address))

    def _active(self) -> list[Any]:
        """The contexts that torch works in, one for each device that is in use."""
        flags, is_active, device, context = ctypes.c_uint(), ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        for number in range(torch.cuda.device_count()):
            if number in self._contexts or self.driver.cuDeviceGet(ctypes.byref(device), number):
                continue
            state = self.driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
            if state or not is_active.value:
                continue
            if not self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
                self._contexts[number] = ctypes.c_void_p(context.value)
        return list(self._contexts.values())


def pinner_for(loader: Any) -> Pinner | None:
    """What pins the batches of a loader where they lie; None where they are not to be pinned, or torch's thread does it."""
    device = torch.device(getattr(loader, "pin_memory_device", "") or "cuda").type
    if not loader.pin_memory or device != "cuda" or torch.version.hip is not None:
        return None
    if not torch.cuda.is_initialized() or not Pinner.may_ask() or (pinner := _pinner(os.getpid())) is None:
        return None
    pinner.sweep()
    return pinner


@functools.lru_cache(maxsize=1)
def _pinner(_process: int) -> Pinner | None:
    try:
        torch.cuda.synchronize()  # which makes the context that training is going to use, where there is none yet
        return Pinner()
    except (OSError, AttributeError, RuntimeError):
        return None
