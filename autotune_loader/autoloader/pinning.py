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
from collections.abc import Callable
from typing import Any

import torch

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
        return not any(self._pinner.ask(context, "cuEventQuery", event) for context, event in self.events)

    def wait(self) -> None:
        """Wait until all devices have passed it, or the driver says why not."""
        for context, event in self.events:
            self._pinner.ask(context, "cuEventSynchronize", event)

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
        self.idle = dict[int, list[Any]]()  # events that nobody waits for, by context
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # registered as long as this lives, to see whether it works
        if self.fence() is None or not self.pin(ctypes.addressof(ctypes.c_char.from_buffer(self._page)), mmap.PAGESIZE):
            raise OSError("memory cannot be registered")

    def pin(self, address: int, size: int) -> bool:
        """Register memory; False where the driver refuses, or may not be asked."""
        contexts = self._active()
        if self._refusals >= MOST_REFUSALS or not self.may_ask() or not contexts:
            return False
        return not self.ask(
            contexts[0], "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), PORTABLE
        )

    @staticmethod
    def may_ask() -> bool:
        """Whether the driver may be asked: in the main thread, unless that captures a graph, whose end a fence would be."""
        if threading.current_thread() is not threading.main_thread():
            return False
        try:
            return not torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # the device is lost
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
                if not self.ask(self._active()[0], "cuMemHostUnregister", ctypes.c_void_p(address)):
                    unmap()  # else the driver still takes the address for pinned

    def fence(self) -> Fence | None:
        """A fence behind all work that devices were given; None where the driver does not give one. Where `may_ask`."""
        fence = Fence(self)
        for context in self._active():
            if idle := self.idle.get(context.value):
                event = idle.pop()
            elif self.ask(context, "cuEventCreate", ctypes.byref(event := ctypes.c_void_p()), BLOCKING_WITHOUT_TIMING):
                return None
            fence.events.append((context, event))
            if self.ask(context, "cuCtxRecordEvent", context, event):
                self._refusals += 1
                return None
        self._refusals = 0
        return fence

    def ask(self, context: Any, name: str, *arguments: Any) -> int:
        """What the driver answers to a call while the context is this thread's own: 0 is yes."""
        is_refused = self.driver.cuCtxPushCurrent_v2(context)
        try:
            answer: int = getattr(self.driver, name)(*arguments)
            return answer
        finally:
            if not is_refused:
                self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _active(self) -> list[Any]:
        """The contexts that torch works in, one for each device that is in use."""
        driver, device, context = self.driver, ctypes.c_int(), ctypes.c_void_p()
        for number in range(torch.cuda.device_count()):
            if number in self._contexts or driver.cuDeviceGet(ctypes.byref(device), number):
                continue
            flags, is_active = ctypes.c_uint(), ctypes.c_int()
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
            if is_active.value and not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
                self._contexts[number] = ctypes.c_void_p(context.value)
        return list(self._contexts.values())


def pinner_for(loader: Any) -> Pinner | None:
    """What pins the batches of a loader where they lie; None where they are not to be pinned, or torch's thread does it."""
    device = torch.device(getattr(loader, "pin_memory_device", "") or "cuda").type
    if not loader.pin_memory or device != "cuda" or torch.version.hip or not torch.cuda.is_initialized():
        return None
    if Pinner.may_ask():
        with contextlib.suppress(
            OSError, AttributeError, RuntimeError
        ):  # such as no context yet: the next loop asks again
            pinner = _pinner(os.getpid())
            pinner.sweep()
            return pinner
    return None


@functools.lru_cache(maxsize=1)
def _pinner(_process: int) -> Pinner:
    return Pinner()
