"""Clocks of a process: what it waited for a core, and what it spent on collecting garbage. Imported by workers: it is light."""

from __future__ import annotations

import contextlib
import gc
from typing import Any


def queued_s(task: str) -> float:
    """Seconds in which a task of `/proc` was ready to run and waited for a core; 0 where the kernel does not tell.

    `schedstat` is `run queued slices`, in nanoseconds.
    """
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{task}/schedstat", "rb", 0) as file:  # noqa: PTH123 - fast
        return int(file.read(64).split()[1]) / 1e9
    return 0.0


class Garbage:
    """CPU seconds of garbage collections of this process since `watch`.

    Python calls C's `clock` when a collection begins and when it ends. A function of Python's would be where a signal that has
    come meanwhile is handled, and what its handler raises would be lost there.
    """

    def __init__(self) -> None:
        self._seconds, self._readings = 0.0, list[int]()
        self._reads: Any = None

    def read(self) -> float:
        """Those until now: of pairs of readings in microseconds, as a C int that wraps."""
        readings = self._readings
        if count := len(readings) // 2 * 2:
            pairs = zip(readings[:count:2], readings[1:count:2], strict=True)
            self._seconds += sum((end - begin) % 2**32 for begin, end in pairs) / 1e6
            del readings[:count]
        return self._seconds

    def watch(self) -> None:
        """Count them from now on, also in forked processes."""
        if self._reads is None:
            with contextlib.suppress(ImportError, OSError, AttributeError):  # else they are not counted
                import ctypes

                self._reads = ctypes.PyDLL(None).clock
                self._reads.argtypes = [ctypes.py_object, ctypes.py_object]
                self._reads.restype = self._readings.append
        if self._reads is not None and self._reads not in gc.callbacks:
            gc.callbacks.append(self._reads)

    def stop(self) -> None:
        """Count no more."""
        if self._reads in gc.callbacks:
            gc.callbacks.remove(self._reads)


garbage = Garbage()
