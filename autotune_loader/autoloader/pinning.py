"""Batches that are pinned where they lie: the driver registers a segment once, and the device copies from it by itself.

    lease ── registered ── tensor: is_pinned() ── copied on whatever stream ── dropped ── fence ── passed ── back to the worker

A segment goes back when all that the devices had been given by the time its last tensor was dropped is done, as a copy from it
may be on its way. The driver tells by an event behind all work of a context (`cuCtxRecordEvent`, CUDA 12.5). Without it, and
without CUDA, torch's pinning thread pins by a copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

LEAST_BYTES = 1 << 20
"""Tensors that are smaller are pinned by a copy: it takes less than registering does."""
PORTABLE, BLOCKING_WITHOUT_TIMING = 1, 1 | 2
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts. CU_EVENT_BLOCKING_SYNC and CU_EVENT_DISABLE_TIMING."""


class Fence:
    """A moment that devices pass when they have done what they had been given by then."""

    def __init__(self, pinner: Pinner, events: list[tuple[Any, Any]]) -> None:
        self._pinner, self._events = pinner, events

    def is_passed(self) -> bool:
        """Whether all devices have passed it; does not wait."""
        driver = self._pinner.driver
        while self._events:
            context, event = self._events[-1]
            with self._pinner.current(context):
                if driver.cuEventQuery(event):  # not ready
                    return False
            self._pinner.idle.setdefault(context.value, []).append(self._events.pop()[1])
        return True

    def wait(self) -> None:
        """Wait until all devices have passed it."""
        for context, event in self._events:
            with self._pinner.current(context):
                self._pinner.driver.cuEventSynchronize(event)


class Pinner:
    """Registers memory with the CUDA driver, by the driver's own interface: its errors are no errors of torch's.

    Raises:
        OSError, AttributeError: there is no driver, or it cannot tell when all work of a context is done.
    """

    def __init__(self) -> None:
        self.driver: Any = ctypes.CDLL("libcuda.so.1")
        self._record = self.driver.cuCtxRecordEvent
        self._process, self._contexts = os.getpid(), dict[int, Any]()
        self.idle = dict[int, list[Any]]()
        """Events that nobody waits for, by context."""

    def pin(self, address: int, size: int) -> bool:
        """Register memory; False where the driver refuses."""
        contexts = self._active()
        if not contexts:  # training has not begun: torch makes the context that it will use
            torch.cuda.synchronize()
            contexts = self._active()
        if not contexts:
            return False
        with self.current(contexts[0]):
            status = self.driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(size), PORTABLE)
        return not status

    def unpin(self, address: int, *, is_copied: bool) -> bool:
        """Undo `pin`. Where it returns False the memory must stay mapped: the driver still takes the address for pinned.

        Args:
            address: that was pinned.
            is_copied: whether it is known that no copy is on its way, which is waited for otherwise.
        """
        if os.getpid() != self._process:  # a fork, to which the driver means nothing
            return True
        if sys.is_finalizing():
            return False
        if not is_copied:
            if (fence := self.fence()) is None:
                return False
            fence.wait()
            fence.is_passed()
        with self.current(self._active()[0]):
            return not self.driver.cuMemHostUnregister(ctypes.c_void_p(address))

    def fence(self) -> Fence | None:
        """A fence behind all work that devices were given; None where the driver does not give one now."""
        events = list[tuple[Any, Any]]()
        for context in self._active():
            event = ctypes.c_void_p()
            with self.current(context):
                try:
                    event = self.idle[context.value].pop()
                except LookupError:
                    if self.driver.cuEventCreate(ctypes.byref(event), BLOCKING_WITHOUT_TIMING):
                        return None
                if self._record(context, event):
                    return None
            events.append((context, event))
        return Fence(self, events)

    @contextlib.contextmanager
    def current(self, context: Any) -> Iterator[None]:
        """In this block the context is this thread's own."""
        self.driver.cuCtxPushCurrent_v2(context)
        try:
            yield
        finally:
            self.driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

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
    if not loader.pin_memory or device != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    if threading.current_thread() is not threading.main_thread():
        return None  # the main thread may capture a graph meanwhile, which recording a fence would end
    return _pinner(os.getpid())


@functools.lru_cache(maxsize=1)
def _pinner(_process: int) -> Pinner | None:
    try:
        return Pinner()
    except (OSError, AttributeError):
        return None
