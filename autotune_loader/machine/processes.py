"""Trees of processes: the CPU, memory and storage that they use, by one short file of `/proc` each.

An alarm rings before a tree takes too much memory: somebody else's process may be the one that the system kills. A process may
vanish between any two lines here: then it counts as gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from autotune_loader.machine.clocks import queued_s

TICKS_PER_S, PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
PROC = Path("/proc")
PERIOD_S = 0.25
"""Between looks: 4 Hz, below the 5 Hz at which reading RSS begins to cost."""
MEMBERS_S = 1.0
"""Between looks for new processes of the tree, which read the parents of all processes there are."""
GUARDED_SHARE = 0.9
"""Of the budget: the rest is for what is allocated between two looks."""
SUSPICION_S = 1.0
"""Where RSS, which counts shared pages once for each process, raises suspicion, PSS decides, as often as this: reading it walks
page tables and stalls the processes."""

logger = logging.getLogger(__name__)


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
    uses = list(filter(None, (process_use(root / str(pid)) for pid in members)))
    if not any(use.rss_bytes for use in uses):
        return None
    read = [use.read_bytes for use in uses]
    return TreeUse(
        cpu_s=sum(use.cpu_s for use in uses),
        rss_bytes=sum(use.rss_bytes for use in uses),
        read_bytes=None if None in read else sum(each or 0 for each in read),
    )


class CpuTimes(NamedTuple):
    """Seconds on a core, and seconds in which something was ready to run and waited for one."""

    cpu_s: float
    queued_s: float

    @classmethod
    def of_thread(cls) -> CpuTimes:
        """Of the calling thread, in 10 us."""
        return cls(time.thread_time(), queued_s("thread-self"))

    @classmethod
    def of_process(cls, pid: int) -> CpuTimes:
        """Of a process, with all of its threads."""
        use, threads = process_use(PROC / str(pid)), list[str]()
        with contextlib.suppress(OSError):  # it is gone
            threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names are wanted
        return cls(0.0 if use is None else use.cpu_s, sum(queued_s(f"{pid}/task/{thread}") for thread in threads))


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
    """Sum of the proportional set sizes, where shared pages count once; None where that cannot be read. Walks page tables."""
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


def private_bytes(pid: int, root: Path = PROC) -> int | None:
    """Memory of one process that no other process maps: what its end would free. None where it is gone or cannot be read.

    `smaps_rollup` (proc_pid_smaps(5)) has rows such as these; of those of a zombie there are none, and it holds nothing:

        Private_Clean:         0 kB
        Private_Dirty:      1468 kB

    A page that a fork still shares with its parent is not private. Walks page tables: 20 ms for 256 MiB in pages of 4 KiB.
    """
    try:
        rows = (root / str(pid) / "smaps_rollup").read_text().splitlines()
        found = [int(row.split()[1]) for row in rows if row.startswith(("Private_Clean:", "Private_Dirty:"))]
    except (OSError, ValueError, IndexError):
        return None
    return 1024 * sum(found) if found else None


def copied_bytes(pid: int, shared_bytes: int, root: Path = PROC) -> int | None:
    """Memory that a fork shared with its parent first, and has copied since. None where it is gone or cannot be read.

    Pages that it has written are `Private_Dirty`; those that it has allocated itself are what its `Anonymous` memory exceeds
    the `shared_bytes` by that its parent had when it was forked. Reading takes as long as for `private_bytes`.
    """
    try:
        rows = _rollup(root / str(pid))
        return max(0, rows["Private_Dirty"] - max(0, rows["Anonymous"] - shared_bytes))
    except (OSError, ValueError, KeyError):
        return None


def without_nursery(workers: Sequence[int], nursery: Sequence[int], root: Path = PROC) -> tuple[int, int] | None:
    """What RSS and PSS of a tree would be more had its workers not been cloned; None where that cannot be read.

    Workers that have memory of their own lack pages of libraries alone, which the nursery, the first of some processes, has
    in their place.
    """
    try:
        rows = {pid: _rollup(root / str(pid)) for pid in (*workers, *nursery)}
    except (OSError, ValueError):
        return None
    libraries = {pid: each["Rss"] - each["Anonymous"] for pid, each in rows.items()}
    rss = sum(libraries[nursery[0]] - libraries[pid] for pid in workers) - sum(rows[pid]["Rss"] for pid in nursery)
    return rss, -sum(rows[pid]["Pss_Anon"] for pid in nursery)


def borrowed_bytes(pids: Sequence[int], root: Path = PROC) -> int:
    """What the PSS of other processes would be more without these, which are forks of one of them, or it: their shared memory.

    Pages of files, such as libraries, have so many sharers that one more is no matter. Of what has ended nothing is shared.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, KeyError):
            rows = _rollup(root / str(pid))
            total += max(0, rows["Pss_Anon"] - rows["Private_Dirty"])
    return total


def _rollup(process: Path) -> dict[str, int]:
    """Rows of `smaps_rollup` in bytes."""
    rows = (row.split() for row in (process / "smaps_rollup").read_text().splitlines()[1:])
    return {name[:-1]: 1024 * int(size) for name, size, _ in rows}


def host_busy_s(cpus: Collection[int] | None = None) -> list[float]:
    """Seconds since boot in which each CPU, or each of these, ran anything, for anyone; none where the system does not tell."""
    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError, psutil.Error):  # some containers hide /proc
        return []
    meant = [each for number, each in enumerate(times) if cpus is None or number in cpus]
    return [each.user + each.nice + each.system + each.irq + each.softirq for each in meant]


@contextlib.contextmanager
def memory_guarded(pid: int, budget_bytes: int | None, on_limit: Callable[[], None]) -> Iterator[None]:
    """Call `on_limit` once, on a thread of its own, when the process tree outgrows 90% of the budget while the block runs."""
    if budget_bytes is None:
        yield
        return
    stopped, limit_bytes = threading.Event(), GUARDED_SHARE * budget_bytes

    def watch() -> None:
        next_members = next_pss = 0.0
        while not stopped.wait(PERIOD_S):
            now = time.monotonic()
            if now >= next_members:
                members, next_members = tree(pid), now + MEMBERS_S
            if (use := tree_use(members)) is None:
                return
            if now < next_pss or use.rss_bytes <= limit_bytes:
                continue
            next_pss = now + SUSPICION_S
            if (used := tree_pss(members) or use.rss_bytes) > limit_bytes:
                logger.warning("Memory guard: %d bytes in use, %d allowed", used, limit_bytes)
                on_limit()
                return

    thread = threading.Thread(target=watch, name="autotune-loader-memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
