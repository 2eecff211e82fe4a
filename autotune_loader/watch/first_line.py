"""The first line that is said of a loader: by a thread of our own, where no batch comes soon enough to say it with.

The thread is none of `threading`'s, does nothing but wait, and is gone while the process forks: a forked process is warned
of threads. It begins with the first batch that is asked for, and ends with the first line.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

SPEAK_AFTER_S = 9.5
"""From the first batch that is asked for until something is said: within 10 s."""


class FirstLine:
    """Calls `speak` once, after a while, unless `stop` comes first."""

    def __init__(self, speak: Callable[[], None], seconds: float = SPEAK_AFTER_S) -> None:
        self._speak, self._seconds = speak, seconds
        self._due_s: float | None = None
        self._ended: _thread.LockType | None = None
        self._id = 0

    def start(self) -> None:
        """Wait, if nobody does and nothing was said."""
        if self._ended is not None or self._seconds < 0:
            return
        self._due_s = self._due_s or time.monotonic() + self._seconds
        self._ended, self._id = _thread.allocate_lock(), 0
        self._ended.acquire()
        waiting.append(self)
        _thread.start_new_thread(self._wait, (self._ended, self._due_s))

    def stop(self, *, for_good: bool = True) -> None:
        """The thread is gone afterwards."""
        if for_good:
            self._seconds = -1.0
        ended, self._ended = self._ended, None
        if ended is not None:
            waiting.remove(self)
            ended.release()
            while not self._id or (
                self._id != _thread.get_native_id() and Path(f"/proc/self/task/{self._id}").exists()
            ):
                time.sleep(0.0001)

    def _wait(self, ended: _thread.LockType, due_s: float) -> None:
        self._id = _thread.get_native_id()
        if not ended.acquire(timeout=max(0.0, due_s - time.monotonic())) and self._seconds >= 0:
            self._seconds = -1.0
            with contextlib.suppress(Exception):  # whatever it is, it is no reason to say it
                self._speak()


waiting: list[FirstLine] = []
"""Those that have a thread."""


_resting: list[FirstLine] = []


def _rest() -> None:
    for each in list(waiting):
        each.stop(for_good=False)
        _resting.append(each)


def _go_on() -> None:
    while _resting:
        _resting.pop().start()


os.register_at_fork(before=_rest, after_in_parent=_go_on, after_in_child=_resting.clear)
