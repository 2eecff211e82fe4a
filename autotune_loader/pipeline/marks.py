"""When an accelerator has done what it was given, for a loop that hands it work and goes on: nobody waits for it.

host      ask ▪── receive ▪ launch │ ask ▪── receive ▪ launch │ ask ▪─────────── receive ▪ launch
device            step ────────────────────│ step ─────────────────────│ idle ─── step ──────────

A mark (an event) is laid behind the work at each of these moments. What passes between asking and receiving on the device is
what training waits for data; what passes on the host is mostly not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

_settling = threading.Lock()
_passed: dict[Any, tuple[Any, float]] = {}
"""The mark that a device was seen to pass last, and when: of any loop, as one of an evaluation asks seldom."""


class Marks:
    """Moments of a loop, told in order with the time at which the accelerator has passed them, in seconds of the host's clock.

    Where this process uses none, or a thread takes the batches, a moment is told at once and as it is.
    """

    def __init__(self) -> None:
        self._ahead = deque[tuple[float, Any, Callable[[float], object]]]()
        self._device: tuple[Any, int] | None = None
        self.looks = 0
        """How often a device in use was looked for since a loop began."""
        self._time = 0.0

    def __len__(self) -> int:
        """Moments that the accelerator has not passed."""
        return len(self._ahead)

    def note(self, now: float, tell: Callable[[float], object]) -> None:
        if (mark := self._mark()) is None and not self._ahead:
            tell(now)
            return
        self._ahead.append((now, mark, tell))
        self.settle(now)

    def settle(self, now: float, *, is_end: bool = False) -> None:
        """Tell of the moments that have passed; at the end, of all others as if they did now."""
        if _settling.acquire(blocking=False):  # else another thread does, such as one that asks for figures
            try:
                self._settle(now, is_end)
            finally:
                _settling.release()

    def _settle(self, now: float, is_end: bool) -> None:
        while self._ahead:
            moment, mark, tell = self._ahead[0]
            last, last_s = _passed.get(self._device, (None, 0.0))
            try:
                if mark is None:
                    passed = moment
                elif mark.query():
                    passed = now if last is None else last_s + last.elapsed_time(mark) / 1e3
                elif is_end:
                    mark, passed = None, now
                else:
                    return
            except RuntimeError:  # the device is lost
                mark, passed = None, moment
            passed = max(moment, min(passed, now))
            if mark is not None:
                _passed[self._device] = mark, passed
            self._time = max(self._time, passed)
            self._ahead.popleft()
            tell(self._time)

    def _mark(self) -> Any:
        try:
            if self._device is None:
                self.looks += 1
                if self.looks & (self.looks - 1):  # ever more seldom: it takes longer than all else here
                    return None
                self._device = _device_in_use()
            if self._device is None or threading.current_thread() is not threading.main_thread():
                return None  # the main thread may capture a graph meanwhile
            module, index = self._device
            event = module.Event(enable_timing=True)
            event.record(module.current_stream(index))
        except Exception:  # whatever it is, it is no reason to end somebody's training
            return None
        return event


def _device_in_use() -> tuple[Any, int] | None:
    """Torch's module of an accelerator, and the number of a device that holds memory: the current one, if it does.

    No device is opened to see it.
    """
    for name in ("cuda", torch._C._get_privateuse1_backend_name()):
        module = vars(torch).get(name)
        if module is not None and module.is_initialized():
            indices = module.current_device(), *range(module.device_count())
            return next(((module, index) for index in indices if module.memory_reserved(index)), None)
    return None
