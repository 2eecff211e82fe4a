"""Torch's shared-memory files: finding and removing those that dead workers left behind.

Torch names a segment `/dev/shm/torch_<pid>_<random>_<counter>`. With the default strategy it is unlinked at once, but a
worker killed between the two calls, or one under `file_system`, leaves it there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108 - this is the kernel's shared-memory file system, not a place for our own files
# What was killed may hold its segments for a moment longer.
PATIENCE_S, PAUSE_S = 0.5, 0.02


def segments(root: Path = SHM) -> frozenset[str]:
    """The names of all of torch's segments that there are now."""
    return frozenset(path.name for path in root.glob("torch_*"))


def remove_segments_of(pids: Iterable[int], before: frozenset[str], root: Path = SHM) -> int:
    """Unlink the segments that processes of ours, which are gone, have left; returns how many there were.

    A process ID in a name is no proof: the system gives IDs out again, and a container that shares the folder counts from
    1 as well. So a segment stays if it was there before our processes were, or if anybody has it open or mapped.

    Args:
        pids: processes that were started after `before` was taken, and have ended.
        before: the segments that there were then.
        root: the folder.
    """
    removed = 0
    deadline = time.monotonic() + PATIENCE_S
    for pid in pids:
        for path in root.glob(f"torch_{pid}_*"):
            if path.name in before:
                continue
            while _is_in_use(path) and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if not _is_in_use(path):
                    path.unlink()
                    removed += 1
    return removed


def _is_in_use(path: Path) -> bool:
    """Whether another process has a file open or mapped, be it in a container that we cannot look into.

    The kernel grants a write lease only to one that is alone with the file: fcntl(2), F_SETLEASE.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:  # somebody else's
        return True
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return False
    except OSError as error:  # EINVAL: this file system has no leases, and nothing is known
        return error.errno in (errno.EAGAIN, errno.EACCES)
    finally:
        os.close(descriptor)
