"""Limits that Linux control groups (v2) put on this process: CPU quota and memory, up the whole ancestry.

A limit binds wherever it stands above us, so every visible level is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMORY_LIMITS = ("memory.max", "memory.high")
"""`memory.high` counts, because beyond it the kernel stalls us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound and where it was found."""

    value: float
    """Cores or bytes."""
    source: str
    """A file, an environment variable or a system call."""


def cpu_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every CPU quota above this process, in cores: `cpu.max` is `50000 100000`, or `50000` of a period of 100,000."""
    found = []
    for folder in _levels(root):
        quota, period = [*(numbers := _numbers(folder / "cpu.max")), *(0, 100_000)[len(numbers) :]][:2]
        if quota > 0 and period > 0:
            found.append(Limit(value=quota / period, source=str(folder / "cpu.max")))
    return tuple(found)


def memory_limits(root: Path = Path("/")) -> tuple[tuple[Limit, Limit | None], ...]:
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
