"""Trees of processes: the CPU, memory and storage that they use, as `/proc` tells it in one short file for each.

A process may vanish between any two lines here: then it counts as gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUse:
    """A process and its descendants at one moment."""

    cpu_s: float
    """CPU seconds of the tree since it began, of those that have ended and were waited for, too."""
    rss_bytes: int
    """Sum of the resident set sizes; shared pages count once for each process."""
    read_bytes: int | None = None
    """Bytes that were read from storage so far, not from memory; None where the system does not tell."""


def tree(pid: int) -> tuple[int, ...]:
    """A process and its descendants. Reads the parent of every process of the machine: 10 us for each."""
    try:
        root = psutil.Process(pid)
        return (pid, *(child.pid for child in root.children(recursive=True)))
    except psutil.Error:
        return ()


def tree_use(members: Iterable[int], root: Path = PROC) -> TreeUse | None:
    """What the processes of a tree have used until now, in 30 us for each; None when nothing of it is left."""
    uses = [use for pid in members if (use := process_use(root / str(pid))) is not None]
    if not any(use.rss_bytes for use in uses):
        return None
    read = [use.read_bytes for use in uses]
    return TreeUse(
        cpu_s=sum(use.cpu_s for use in uses),
        rss_bytes=sum(use.rss_bytes for use in uses),
        read_bytes=None if None in read else sum(each or 0 for each in read),
    )


def queued_s(task: str, root: Path = PROC) -> float:
    """Seconds in which a thread was ready to run and waited for a core; `task` is a process, its main thread, or `thread-self`.

    `schedstat`: `run queued slices`, in nanoseconds. 0 where the kernel does not tell, or it is gone.
    """
    try:
        return int((root / task / "schedstat").read_bytes().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def process_use(folder: Path) -> TreeUse | None:
    """What one process has used, by its folder in `/proc`; None when it is gone.

    `stat` (proc_pid_stat(5)): `pid (name, which may hold anything) state ppid ...`; of the fields after the name the 12th to
    15th are CPU ticks, those of waited-for children included, and the 22nd resident pages. A zombie holds no memory.
    `io` (proc_pid_io(5)): a line `read_bytes: 4096`; only for processes of the same user.
    """
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks, pages = sum(map(int, fields[11:15])), int(fields[21])
    except (OSError, ValueError, IndexError):
        return None
    read_bytes = None
    with contextlib.suppress(OSError, ValueError, IndexError):
        read_bytes = int((folder / "io").read_text().split("read_bytes: ")[1].split()[0])
    return TreeUse(cpu_s=ticks / TICKS_PER_S, rss_bytes=pages * PAGE_BYTES, read_bytes=read_bytes)


def tree_pss(members: Iterable[int], root: Path = PROC) -> int | None:
    """Sum of the proportional set sizes, where shared pages count once. Slow (it walks page tables): call it rarely.

    None when a member does not let us read it or the system has no such number.
    """
    total = 0
    for pid in members:
        try:
            text = (root / str(pid) / "smaps_rollup").read_text()
            total += 1024 * int(text.partition("\nPss:")[2].split()[0])
        except (FileNotFoundError, ProcessLookupError):  # gone; a zombie holds nothing
            continue
        except (OSError, ValueError, IndexError):
            return None
    return total or None
