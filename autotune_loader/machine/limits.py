"""How much of the machine this process may use: cores, memory, shared memory, descriptors.

Every bound that was found is kept beside the number that follows from it, so that `doctor` can show why 104 CPUs came out as 23
usable cores. A limit of a control group (v2) binds wherever it stands above this process, so every visible level is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MEMORY_LIMITS = ("memory.max", "memory.high")
"""Of a control group; `memory.high` counts, because beyond it the kernel stalls us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound and where it was found."""

    value: float
    """Cores or bytes."""
    source: str
    """A file, an environment variable or a system call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """How many cores one rank may count on, and every bound that says so."""

    usable: int
    """For this rank, at least 1: the tightest bound divided among the ranks that share it."""
    available: float
    """For all ranks together: the tightest bound; a quota may be a fraction."""
    ranks: int
    """Ranks on this node that share these cores."""
    inputs: tuple[Limit, ...]
    """Every bound, in cores."""

    @property
    def binding(self) -> Limit:
        """The tightest bound."""
        return min(self.inputs, key=lambda limit: limit.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How much host memory all ranks together may still take, and every bound that says so."""

    available_bytes: int | None
    """The tightest of what is left now; None where the system does not tell."""
    total_bytes: int | None
    """The tightest limit, whatever is in use now."""
    inputs: tuple[Limit, ...]
    """Every bound on what is left, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """The file system through which workers hand over batches."""

    free_bytes: int
    total_bytes: int


def usable_cores(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Cores:
    """The cores this rank may count on: the least of affinity, counts, quotas and SLURM, divided among the ranks."""
    counts: list[tuple[str, float | None]] = [("os.cpu_count()", os.cpu_count() or 1)]
    if (cpus := affinity()) is not None:
        counts.append(("os.sched_getaffinity()", len(cpus)))
    if hasattr(os, "process_cpu_count"):  # Python 3.13; also obeys PYTHON_CPU_COUNT
        counts.append(("os.process_cpu_count()", os.process_cpu_count()))
    of_task = _positive_int(environ.get("SLURM_CPUS_PER_TASK"))
    counts += [("SLURM_CPUS_PER_TASK", of_task), *((limit.source, limit.value) for limit in _cpu_limits(root))]
    inputs = tuple(Limit(value=float(count), source=source) for source, count in counts if count)
    ranks = local_world_size(environ)
    if of_task is not None:  # the cores of a task are shared by the ranks that it starts
        tasks = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
        ranks = max(1, ranks // (_positive_int(tasks) or 1))
    available = min(limit.value for limit in inputs)
    return Cores(usable=max(1, int(available / ranks + 1e-9)), available=available, ranks=ranks, inputs=inputs)


def affinity() -> tuple[int, ...] | None:
    """CPUs the scheduler may run this process on; None where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def local_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of this job on this node, from `LOCAL_WORLD_SIZE`, which torchrun sets; 1 where it is not set."""
    return _positive_int(environ.get("LOCAL_WORLD_SIZE")) or 1


def rank_of_environment(environ: Mapping[str, str] = os.environ) -> tuple[int | None, int]:
    """This process' rank, None where nothing says so, and how many there are, as torchrun and Accelerate say it."""
    rank, ranks = (environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() else None, int(ranks) if ranks.isdecimal() else 1


def _positive_int(text: str | None) -> int | None:
    """The leading integer of a value such as "8" or SLURM's "4(x2)"; None for anything else."""
    match = re.match(r"\s*(\d+)", text or "")
    return (int(match[1]) or None) if match else None


def memory_budget(root: Path = Path("/")) -> MemoryBudget:
    """What the host and every control group above this process leave of memory."""
    import psutil

    limits = _memory_limits(root)
    inputs = [left for _, left in limits if left is not None]
    totals = [int(limit.value) for limit, _ in limits]
    with contextlib.suppress(OSError, RuntimeError):  # some containers hide /proc
        host = psutil.virtual_memory()
        inputs.insert(0, Limit(value=float(host.available), source="available on the host"))
        totals.append(host.total)
    return MemoryBudget(
        available_bytes=min((int(limit.value) for limit in inputs), default=None),
        total_bytes=min(totals, default=None),
        inputs=tuple(inputs),
    )


def shared_memory(root: Path = Path("/")) -> SharedMemory | None:
    """Room in `/dev/shm`, where batches lie while they travel; None on systems without it."""
    try:
        room = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return None
    return SharedMemory(free_bytes=room.free, total_bytes=room.total)


def open_files_limit() -> int | None:
    """Descriptors this process may hold (the soft `RLIMIT_NOFILE`); None where there is no limit or none is told."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _cpu_limits(root: Path) -> tuple[Limit, ...]:
    """Every CPU quota above this process, in cores: `cpu.max` is `50000 100000`, or `50000` of a period of 100,000."""
    found = []
    for folder in _levels(root):
        quota, period = [*(numbers := _numbers(folder / "cpu.max")), *(0, 100_000)[len(numbers) :]][:2]
        if quota > 0 and period > 0:
            found.append(Limit(value=quota / period, source=str(folder / "cpu.max")))
    return tuple(found)


def _memory_limits(root: Path) -> tuple[tuple[Limit, Limit | None], ...]:
    """Every memory limit above this process in bytes, and what it leaves; None where its use is not told.

    Inactive page cache does not count as used, since the kernel drops it before it kills: the definition of kubelet's
    working set. Otherwise reading a data set would look like a leak.
    """
    found = []
    for folder in _levels(root):
        used = next(iter(_numbers(folder / "memory.current")), None)
        if used is not None:
            used = max(0, used - sum(_numbers(folder / "memory.stat", "inactive_file")))
        for name in MEMORY_LIMITS:
            if len(numbers := _numbers(folder / name)) == 1:
                limit = Limit(value=numbers[0], source=str(folder / name))
                left = None if used is None else max(0, numbers[0] - used)
                found.append((limit, None if left is None else Limit(value=left, source=f"{limit.source} minus use")))
    return tuple(found)


def _numbers(path: Path, row: str = "") -> list[int]:
    """The numbers in a file, or in its row of that name; none where it has none, or says that there is no limit."""
    try:
        rows = [line.removeprefix(f"{row} ") for line in path.read_text().splitlines() if line.startswith(row)]
        return [int(word) for line in rows for word in line.split()]
    except (OSError, ValueError):  # most levels have no such file; "max"
        return []


def _levels(root: Path) -> Iterator[Path]:
    """Folders of the control groups above this process, its own first, the topmost visible one last.

    The line of v2 in `/proc/self/cgroup` is `0::path` (cgroups(7)): `0::/kubepods/pod7/app`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for path in (line.removeprefix("0::") for line in lines if line.startswith("0::")):
        below = [part for part in path.split("/") if part]
        # A container may see its path from the host's root, while only its own part of the hierarchy is mounted.
        while below and not mounted.joinpath(*below).is_dir():
            below.pop(0)
        yield from (mounted.joinpath(*below[:depth]) for depth in range(len(below), -1, -1))
