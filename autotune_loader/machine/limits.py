"""How much of the machine this process may use: cores, memory, shared memory, descriptors.

Every bound that was found is kept beside the number that follows from it, so that `doctor` can show why 104 CPUs came out as 23
usable cores. A limit of a control group (v2) binds wherever it stands above this process, so every visible level is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from autotune_loader.values import PlatformError

LAUNCHERS = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""Where a launcher says how many ranks it has started on this node: torchrun and Ray, DeepSpeed, Open MPI, MPICH and Intel."""


class Limit(NamedTuple):
    """One bound, in cores or bytes, and where it was found: a file, an environment variable or a system call."""

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """How many cores one rank may count on, and every bound that says so."""

    usable: int
    """For this rank, at least 1: the tightest bound divided among the ranks that share it."""
    ranks: int
    """Ranks on this node that share these cores."""
    inputs: tuple[Limit, ...]
    """Every bound, in cores, for all ranks together; a quota may be a fraction."""

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


class SharedMemory(NamedTuple):
    """The file system through which workers hand over batches."""

    free_bytes: int
    total_bytes: int


def require_linux(what: str) -> None:
    """Refuse to go on where nothing could be measured.

    Raises:
        PlatformError: another system.
    """
    if not sys.platform.startswith("linux"):
        raise PlatformError(
            f"{what} works on Linux only, and this is {sys.platform!r}: it relies on /proc. "
            "Tune on the Linux machine that trains (a container or WSL 2 is fine); load_config() and everything else "
            "that reads a loader.json work here"
        )


def usable_cores(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Cores:
    """The cores this rank may count on: the least of affinity, counts, quotas and SLURM, divided among the ranks."""
    ranks, own, whole = local_world_size(environ), affinity(), os.cpu_count() or 1
    counts: list[tuple[str, float | None]] = [("os.cpu_count()", whole)]
    if own is not None:  # where each rank is bound to CPUs of its own, all ranks together have those of their launcher
        whole = len(own) if ranks == 1 else max(len(own), _cpus_of_launcher(environ))
        counts.append(("os.sched_getaffinity()", whole))
    if hasattr(os, "process_cpu_count"):  # Python 3.13; also obeys PYTHON_CPU_COUNT
        count = os.process_cpu_count()
        counts.append(("os.process_cpu_count()", whole if own is not None and count == len(own) else count))
    of_task = _positive_int(environ.get("SLURM_CPUS_PER_TASK"))
    counts.append(("SLURM_CPUS_PER_TASK", of_task))
    for path in (folder / "cpu.max" for folder in _levels(root)):
        if numbers := _numbers(path):  # `50000 100000`, or `50000` of a period of 100,000
            quota, period = (*numbers, 100_000)[:2]
            counts.append((str(path), quota / period if period else None))
    inputs = tuple(Limit(float(count), source) for source, count in counts if count)
    if of_task is not None:  # the cores of a task are shared by the ranks that it starts
        ranks = max(1, ranks // (_slurm_tasks(environ) or 1))
    usable = int(min(inputs).value / ranks + 1e-9)
    if own is not None:
        usable = min(usable, len(own))
    return Cores(usable=max(1, usable), ranks=ranks, inputs=inputs)


def affinity() -> tuple[int, ...] | None:
    """CPUs the scheduler may run this process on; None where the system does not tell."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def _cpus_of_launcher(environ: Mapping[str, str]) -> int:
    """CPUs of what has started this rank, of which a rank may have a part: those of the parent, and of a step of SLURM."""
    of_step = environ.get("SLURM_CPUS_ON_NODE") if "SLURM_STEP_ID" in environ else None
    try:
        of_parent = len(os.sched_getaffinity(os.getppid()))
    except OSError:  # it has ended
        of_parent = 0
    return max(of_parent, _positive_int(of_step) or 0)


def local_world_size(environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of this job on this node, as their launcher says it; 1 where nothing says that there are more.

    Lightning's launcher only says how many there are on all nodes, and `mp.spawn` nothing before the process group is up.
    Those are divided among the nodes where SLURM says how many these are; else as many are here as there are devices.
    """
    for name in LAUNCHERS:
        if count := _positive_int(environ.get(name)):
            return count
    # Only srun's steps start a process for each task; and a step of one task may start ranks by other means.
    if "SLURM_STEP_ID" in environ and (tasks := _slurm_tasks(environ) or 1) > 1:
        return tasks
    ranks = _world_size(environ)
    nodes = _positive_int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES"))
    if nodes:
        return -(-ranks // nodes)
    return min(ranks, _devices() or ranks) if ranks > 1 else 1


def _world_size(environ: Mapping[str, str]) -> int:
    """Ranks of this job on all nodes, where a launcher has started this process or a process group is up; else 1."""
    dist: Any = sys.modules.get("torch.distributed")  # whose group is up has imported it
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return _positive_int(environ.get("WORLD_SIZE") if "LOCAL_RANK" in environ else None) or 1


def _devices() -> int:
    """GPUs that this process may use, as NVML tells; 0 as long as nothing has imported torch."""
    torch: Any = sys.modules.get("torch")
    return 0 if torch is None else int(torch.cuda.device_count())


def _slurm_tasks(environ: Mapping[str, str]) -> int | None:
    """Tasks of this step, or of this job, on this node.

    SLURM says them as "2(x3),1" (srun(1)): two on each of three nodes, one on the fourth, of which this is number SLURM_NODEID.
    """
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = next(filter(None, map(environ.get, names)), "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    of_nodes = [int(tasks) for tasks, times in found for _ in range(int(times or 1))]
    node = environ.get("SLURM_NODEID", "")
    at = int(node) if node.isdecimal() and int(node) < len(of_nodes) else 0
    return of_nodes[at] if of_nodes else None


def rank_of_environment() -> tuple[int | None, int]:
    """This process' rank, None where nothing says so, and how many there are, as torchrun and Accelerate say it."""
    rank, ranks = (os.environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdecimal() else None, int(ranks) if ranks.isdecimal() else 1


def _positive_int(text: str | None) -> int | None:
    """The leading integer of a value such as "8" or SLURM's "4(x2)"; None for anything else."""
    match = re.match(r"\s*(\d+)", text or "")
    return (int(match[1]) or None) if match else None


def memory_budget(root: Path = Path("/")) -> MemoryBudget:
    """What the host and every control group above this process leave of memory.

    Inactive page cache does not count as used, since the kernel drops it before it kills: the definition of kubelet's
    working set. Otherwise reading a data set would look like a leak.
    """
    import psutil

    inputs, totals = list[Limit](), list[int]()
    with contextlib.suppress(OSError, RuntimeError):  # some containers hide /proc
        host = psutil.virtual_memory()
        inputs.append(Limit(host.available, "available on the host"))
        totals.append(host.total)
    for folder in _levels(root):
        cache = sum(_numbers(folder / "memory.stat", "inactive_file"))
        for path in (folder / "memory.max", folder / "memory.high"):  # beyond the second the kernel stalls us
            for limit in _numbers(path):
                totals.append(limit)
                for used in _numbers(folder / "memory.current"):
                    inputs.append(Limit(max(0, limit - max(0, used - cache)), f"{path} minus use"))
    available = int(min(inputs).value) if inputs else None
    return MemoryBudget(available_bytes=available, total_bytes=min(totals, default=None), inputs=tuple(inputs))


def shared_memory(root: Path = Path("/")) -> SharedMemory | None:
    """Room in `/dev/shm`, where batches lie while they travel; None on systems without it."""
    try:
        room = shutil.disk_usage(root / "dev/shm")
    except OSError:
        return None
    return SharedMemory(room.free, room.total)


def open_files_limit() -> int | None:
    """Descriptors this process may hold (the soft `RLIMIT_NOFILE`); None where there is no limit or none is told."""
    try:
        import resource
    except ImportError:  # Windows, where `load_config` works
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


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
