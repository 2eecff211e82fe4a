"""Trees of processes: the memory and CPU they use, by psutil, and an end together with the parent.

A process may vanish between any two lines here: then it counts as gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUse:
    """A process and its descendants at one moment."""

    processes: int
    """How many are alive."""
    cpu_s: float
    """CPU seconds of the tree since it began, of those that have ended and were waited for, too."""
    rss_bytes: int
    """Sum of the resident set sizes; shared pages count once for each process."""


def tree_use(members: Sequence[psutil.Process]) -> TreeUse | None:
    """What the processes of a tree use now; None when nothing of it is left."""
    cpu_s, rss_bytes, processes = 0.0, 0, 0
    for process in members:
        with contextlib.suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            cpu_s += times.user + times.system + times.children_user + times.children_system
            if process.status() != psutil.STATUS_ZOMBIE:
                rss_bytes, processes = rss_bytes + process.memory_info().rss, processes + 1
    return TreeUse(processes=processes, cpu_s=cpu_s, rss_bytes=rss_bytes) if processes else None


def tree_pss(members: Sequence[psutil.Process]) -> int | None:
    """Sum of the proportional set sizes, where shared pages count once. Slow (it walks page tables): call it rarely.

    None when a member does not let us read it or the system has no such number.
    """
    total = 0
    for process in members:
        try:
            total += int(getattr(process.memory_full_info(), "pss", 0))
        except psutil.NoSuchProcess:  # a zombie, too: they hold nothing
            continue
        except psutil.Error:
            return None
    return total or None


def tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants. Reads the parent of every process of the machine: 10 us for each."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def process_start(pid: int) -> str | None:
    """When a process began, as a word that tells it from another one with the same ID; None when it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None


def process_group_members(leader: int) -> tuple[int, ...]:
    """Processes of the group or session that `leader` began, whether or not it still lives; never ourselves.

    Workers that a dead process left to init are found in this way, where a walk down from the process finds nothing.
    """
    return tuple(pid for pid in psutil.pids() if pid != os.getpid() and _belongs_to(pid, leader))


def _belongs_to(pid: int, leader: int) -> bool:
    try:
        return leader in (os.getpgid(pid), os.getsid(pid))
    except OSError:
        return False


def die_with_parent() -> None:
    """Have this process killed as soon as its parent ends, however it ends; without effect outside Linux."""
    if not sys.platform.startswith("linux"):
        return
    from autotune_loader.machine.sandbox import die_with_starter

    parent, starter = multiprocessing.parent_process(), os.getppid()
    die_with_starter()
    if parent is not None and parent.pid != starter:
        # A fork server started us, and lives on as long as we do.
        threading.Thread(target=_die_after, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _die_after(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
