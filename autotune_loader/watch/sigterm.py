"""SIGTERM, where the script leaves it alone: what was seen is told, and then it does what it always does.

A handler of ours is there from the first loader on. `signal.getsignal` and `signal.signal` tell the script what it would
see without us, since libraries decide by it whether they set one of their own; theirs then takes the place of ours.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what the script sees of it is another one
import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_tell: list[Callable[[], None]] = []
_telling: list[bool] = []
"""While something is told anyway: whether SIGTERM came meanwhile."""


@contextlib.contextmanager
def told_to_the_end() -> Iterator[None]:
    """SIGTERM ends this process after the block, and not in the midst of it."""
    _telling.append(False)
    try:
        yield
    finally:
        if _telling.pop():
            _signal.signal(signal.SIGTERM, _signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


def tell_at_sigterm(tell: Callable[[], None]) -> None:
    """Call `tell` before SIGTERM ends this process; nothing where the script handles it, or this is not the main thread."""
    is_main = threading.get_ident() == threading.main_thread().ident
    if is_main and _signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        if not hasattr(signal.getsignal, "hides"):
            _hide()
        _tell[:] = [tell]
        _signal.signal(signal.SIGTERM, _end)


def forget() -> None:
    """A forked process has no handler, until it has a loader."""
    _tell.clear()
    if _signal.getsignal(signal.SIGTERM) is _end:
        _signal.signal(signal.SIGTERM, _signal.SIG_DFL)


def _end(number: int, _frame: Any) -> None:
    if _telling:
        _telling[:] = [True] * len(_telling)
        return
    _signal.signal(number, _signal.SIG_DFL)
    try:
        for tell in _tell:
            tell()
    finally:
        os.kill(os.getpid(), number)


def _hide() -> None:
    get, put = signal.getsignal, signal.signal

    @functools.wraps(get)
    def getsignal(signalnum: Any) -> Any:
        found = get(signalnum)
        return signal.SIG_DFL if found is _end else found

    @functools.wraps(put)
    def set_signal(signalnum: Any, handler: Any) -> Any:
        before = put(signalnum, handler)
        return signal.SIG_DFL if before is _end else before

    vars(getsignal)["hides"] = True
    vars(signal).update(getsignal=getsignal, signal=set_signal)
