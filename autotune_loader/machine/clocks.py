"""Clocks of a process: what it waited for a core, and what it spent on collecting garbage. Imported by workers: it is light."""

from __future__ import annotations

import contextlib
import gc
import time


def queued_s(task: str) -> float:
    """Seconds in which a task of `/proc` was ready to run and waited for a core; 0 where the kernel does not tell.

    `schedstat` is `run queued slices`, in nanoseconds.
    """
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{task}/schedstat", "rb", 0) as file:  # noqa: PTH123 - fast
        return int(file.read(64).split()[1]) / 1e9
    return 0.0


class Garbage:
    """CPU seconds of garbage collections of this process since `watch`."""

    def __init__(self) -> None:
        self.seconds, self.full = 0.0, 0
        self._begun = 0.0

    def watch(self) -> None:
        """Count them from now on, also in forked processes."""
        if self._collects not in gc.callbacks:
            gc.callbacks.append(self._collects)

    def stop(self) -> None:
        """Count no more."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._begun
            self.full += info["generation"] == 2


garbage = Garbage()
