"""Trees of processes: the memory and CPU they use, and an end together with the parent.

On Linux `/proc` is read directly, because a sample every quarter of a second must cost next to nothing; elsewhere
psutil answers, and what it does not know is None. A process may vanish between any two lines here: then it counts as
gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from autotune_loader.machine.host import HAS_PROC, PROC


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessUse:
    """One process at one moment."""

    parent: int
    """Its parent's process ID."""
    start_ticks: int
    """When it began, in ticks since boot: a clock that is set does not change it."""
    is_alive: bool
    """Whether it still runs; a zombie does not."""
    cpu_s: float
    """CPU seconds of the process and of every descendant that ended and was waited for."""
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeUse:
    """A process and its descendants at one moment."""

    processes: int
    """How many are alive."""
    cpu_s: float
    """CPU seconds of the tree since it began, of those that have ended too."""
    rss_bytes: int
    """Sum of the resident set sizes; shared pages count once for each process."""


def parse_process_stat(text: str, *, ticks_per_s: int, page_bytes: int) -> ProcessUse:
    """One process, from `/proc/<pid>/stat`.

    `pid (comm) state ppid ... utime stime cutime cstime ... starttime vsize rss ...`, where comm may itself contain
    spaces and parentheses (proc(5)): 4 is ppid, 14 to 17 the times in ticks, 22 the start, 24 the resident pages,
    counted from 1.

        4124 (a) b) R 4119 4119 2239 0 -1 4194304 100 0 0 0 7 1 20 4 20 0 1 0 101042 3133440 358 1844...
    """
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessUse(
        parent=int(fields[1]),
        start_ticks=int(fields[19]),
        is_alive=fields[0] not in "ZXx",
        cpu_s=sum(int(ticks) for ticks in fields[11:15]) / ticks_per_s,
        rss_bytes=int(fields[21]) * page_bytes,
    )


def parse_pss_bytes(text: str) -> int:
    """Proportional set size, from `/proc/<pid>/smaps_rollup`: the line `Pss:    406 kB` among others of that form."""
    line = next(line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


class ProcessTree:
    """A process and its descendants, cheap to look at again and again.

    Only processes that are new since the last look are asked for their parent, and one that was ever seen in the tree
    stays in it when its parent dies and init adopts it.
    """

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self.pid = pid
        self._proc = proc
        self._members = {pid}
        self._strangers: set[int] = set()
        self._cpu_s = 0.0

    def use(self) -> TreeUse | None:
        """What the tree uses now; None when nothing of it is left or the system does not tell."""
        if not HAS_PROC:
            return self._use_by_psutil()
        self._find_members()
        uses = {pid: use for pid in self._members if (use := _process_use(pid, self._proc)) is not None}
        self._members &= uses.keys()
        if not any(use.is_alive for use in uses.values()):
            return None
        # A member that died unseen by its parent (init adopted it) takes its time along: the sum must not shrink.
        self._cpu_s = max(self._cpu_s, sum(use.cpu_s for use in uses.values()))
        return TreeUse(
            processes=sum(use.is_alive for use in uses.values()),
            cpu_s=self._cpu_s,
            rss_bytes=sum(use.rss_bytes for use in uses.values()),
        )

    def pss_bytes(self) -> int | None:
        """Sum of the proportional set sizes now: shared pages count once. Slow (it walks page tables): call it rarely.

        None when a member does not let us read it or the system has no such number.
        """
        if not HAS_PROC:
            return None
        self._find_members()
        sizes = [_process_pss_bytes(pid, self._proc) for pid in self._members]
        return None if None in sizes or not any(sizes) else sum(size for size in sizes if size is not None)

    def _find_members(self) -> None:
        found = {int(name) for name in os.listdir(self._proc) if name.isdigit()}  # noqa: PTH208 - twice as fast
        self._strangers &= found
        new = found - self._members - self._strangers
        parents = {pid: use.parent for pid in new if (use := _process_use(pid, self._proc)) is not None}
        while young := {pid for pid, parent in parents.items() if parent in self._members and pid not in self._members}:
            self._members |= young
        self._strangers |= parents.keys() - self._members

    def _use_by_psutil(self) -> TreeUse | None:
        import psutil

        cpu_s, rss_bytes, processes = 0.0, 0, 0
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    times, memory = process.cpu_times(), process.memory_info()
                    cpu_s += times.user + times.system + times.children_user + times.children_system
                    rss_bytes, processes = rss_bytes + memory.rss, processes + 1
        return TreeUse(processes=processes, cpu_s=cpu_s, rss_bytes=rss_bytes) if processes else None


def process_start(pid: int) -> str | None:
    """When a process began, as a word that tells it from another one with the same ID; None when it has ended."""
    if HAS_PROC:
        use = _process_use(pid, PROC)
        return str(use.start_ticks) if use is not None and use.is_alive else None
    import psutil

    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return None


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as its parent ends, however it ends; without effect outside Linux.

    `prctl(PR_SET_PDEATHSIG, SIGKILL)`, prctl(2). Python's handlers would not run in a process that hangs.
    """
    if not HAS_PROC:
        return
    import ctypes

    pr_set_pdeathsig = 1  # linux/prctl.h
    parent, starter = multiprocessing.parent_process(), os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != starter:  # it ended before the call
        os._exit(1)
    if parent is not None and parent.pid != starter:
        # A fork server started us, and lives on as long as we do.
        threading.Thread(target=_die_after, args=(parent.sentinel,), name="parent-watch", daemon=True).start()


def _die_after(sentinel: int) -> None:
    from multiprocessing.connection import wait

    wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _process_use(pid: int, proc: Path) -> ProcessUse | None:
    try:
        with open(f"{proc}/{pid}/stat") as file:  # noqa: PTH123 - read four times a second for every process
            text = file.read()
        return parse_process_stat(text, ticks_per_s=os.sysconf("SC_CLK_TCK"), page_bytes=os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError):
        return None


def _process_pss_bytes(pid: int, proc: Path) -> int | None:
    """Zero for a process that has ended: it holds nothing."""
    try:
        return parse_pss_bytes((proc / str(pid) / "smaps_rollup").read_text())
    except ProcessLookupError:
        return 0
    except FileNotFoundError:  # gone, or a kernel before 4.14, which has no such file
        return None if (proc / str(pid)).exists() else 0
    except (OSError, StopIteration, ValueError):
        return None
