"""Torch's shared-memory files: finding and removing those that dead workers left behind.

Torch names a segment `/dev/shm/torch_<pid>_<random>_<counter>`. With the default strategy it is unlinked at once, but a
worker killed between the two calls, or one under `file_system`, leaves it there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108 - this is the kernel's shared-memory file system, not a place for our own files


def remove_segments_of(pids: Iterable[int], root: Path = SHM) -> int:
    """Unlink the segments of processes that are ours and gone; returns how many there were."""
    removed = 0
    for pid in pids:
        for path in root.glob(f"torch_{pid}_*"):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                path.unlink()
                removed += 1
    return removed
