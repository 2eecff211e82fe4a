"""What a dataset holds that no fork may carry, as far as attributes and containers lead to it.

A thread is not there in a fork; two processes that talk over one socket or pipe read each other's answers; SQLite, HDF5 and
LMDB forbid it.
"""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LIBRARIES = ("h5py", "lmdb", "psycopg", "psycopg2", "pymysql", "redis")
"""Whose handles are known by the module of their class, since they need not be installed."""
HANDLES = ("File", "Environment", "Connection", "Cursor", "Transaction", "Redis")
"""Names of these classes, in lower case or not."""
MOST_OBJECTS = 10_000
"""A dataset of more is not looked through to the end."""
MOST_OF_ONE = 64
"""So many items of one container; a list of a million file names is one of strings."""
PLAIN = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType, types.FunctionType)


def bound_to_process(value: Any) -> bool:
    """Whether an object works in the process that made it only."""
    if isinstance(value, threading.Thread):
        return value.is_alive()
    if isinstance(value, (socket.socket, subprocess.Popen, sqlite3.Connection)):
        return True
    if type(value).__name__ == "_MultiProcessingDataLoaderIter":  # its workers are children of that process
        return True
    return type(value).__module__.partition(".")[0] in LIBRARIES and type(value).__name__.capitalize() in HANDLES


def held_by(name: str, value: Any, is_meant: Callable[[Any], bool]) -> tuple[str, Any] | None:
    """The path of the first object within `value` that is meant, such as `dataset.pool`, and the object itself.

    Args:
        name: what the path begins with.
        value: where to look.
        is_meant: tells it.
    """
    waiting, seen = deque([(name, value)]), {id(value)}
    while waiting and len(seen) < MOST_OBJECTS:
        path, each = waiting.popleft()
        if is_meant(each):
            return path, each
        for part, inner in _parts_of(each):
            if id(inner) not in seen and not isinstance(inner, PLAIN):
                seen.add(id(inner))
                waiting.append((f"{path}{part}", inner))
    return None


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in list(value.items())[:MOST_OF_ONE])
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(list(value)[:MOST_OF_ONE]))
    yield from ((f".{name}", inner) for name, inner in dict(getattr(value, "__dict__", {})).items())
    for cls in type(value).__mro__:
        for name in _names(cls.__dict__.get("__slots__", ())):
            if hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _names(slots: Any) -> tuple[str, ...]:
    return (
        (slots,) if isinstance(slots, str) else tuple(name for name in slots if name not in ("__dict__", "__weakref__"))
    )
