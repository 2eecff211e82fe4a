"""Limits that Linux control groups put on this process: CPU quota and memory, v2 and v1, up the whole ancestry.

A limit binds wherever it stands above us, so every visible level is read. Hierarchies are looked for where systemd and
container runtimes mount them: v2 in `/sys/fs/cgroup`, or `unified` below it; v1 in a folder for each controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# v1 says "unlimited" as the largest page-aligned int64, which depends on the page size; nothing real comes near.
_UNLIMITED = 1 << 60
# Limits, use, and the cache in memory.stat: of v2, then of v1. `memory.high` counts, because beyond it the kernel stalls us.
_MEMORY = (
    (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound and where it was found."""

    value: float
    """Cores or bytes."""
    source: str
    """A file, an environment variable or a system call."""


def cpu_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every CPU quota above this process, in cores: `cpu.max` is `50000 100000`, v1 has its two numbers in two files."""
    found = []
    for folder in _levels(root, "cpu"):
        v1 = [*_numbers(folder / "cpu.cfs_quota_us"), *_numbers(folder / "cpu.cfs_period_us")]
        for name, numbers in (("cpu.max", _numbers(folder / "cpu.max")), ("cpu.cfs_quota_us", v1)):
            quota, period = [*numbers, *(0, 100_000)[len(numbers) :]][:2]
            if quota > 0 and period > 0:
                found.append(Limit(value=quota / period, source=str(folder / name)))
    return tuple(found)


def memory_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every memory limit above this process, in bytes."""
    return tuple(limit for limit, _ in _memory(root))


def memory_available(root: Path = Path("/")) -> tuple[Limit, ...]:
    """What every memory limit above this process leaves, in bytes: the limit minus use.

    Inactive page cache does not count as used, since the kernel drops it before it kills: the definition of kubelet's
    working set. Otherwise reading a data set would look like a leak.
    """
    return tuple(
        Limit(value=max(0.0, limit.value - used), source=f"{limit.source} minus use")
        for limit, used in _memory(root)
        if used is not None
    )


def _memory(root: Path) -> Iterator[tuple[Limit, int | None]]:
    """Each limit, and what is in use of it."""
    for folder in _levels(root, "memory"):
        for limits, use, cache in _MEMORY:
            used = next(iter(_numbers(folder / use)), None)
            if used is not None:
                used = max(0, used - sum(_numbers(folder / "memory.stat", cache)))
            for name in limits:
                if len(numbers := _numbers(folder / name)) == 1:
                    yield Limit(value=numbers[0], source=str(folder / name)), used


def _numbers(path: Path, row: str = "") -> list[int]:
    """The numbers in a file, or in its row of that name; none where it has none, or the first says that there is no limit."""
    try:
        rows = [line.removeprefix(f"{row} ") for line in path.read_text().splitlines() if line.startswith(row)]
        numbers = [int(word) for line in rows for word in line.split()]
    except (OSError, ValueError):  # most levels have no such file; "max"
        return []
    return [] if numbers and numbers[0] >= _UNLIMITED else numbers


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups above this process, its own first, the topmost visible one last.

    One line of `/proc/self/cgroup` for each hierarchy, `number:controllers:path`; v2 names no controllers (cgroups(7)):

        4:memory:/docker/3f2a
        0::/kubepods/pod7/app
    """
    top = root / "sys/fs/cgroup"
    try:
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if not controllers:
            mounted = top / "unified" if (top / "unified").is_dir() else top
        elif controller in controllers.split(","):
            mounted = top / controllers if (top / controllers).is_dir() else top / controller
        else:
            continue
        below = [part for part in path.split("/") if part]
        # A container may see its path from the host's root, while only its own part of the hierarchy is mounted.
        while below and not mounted.joinpath(*below).is_dir():
            below.pop(0)
        yield from (mounted.joinpath(*below[:depth]) for depth in range(len(below), -1, -1))
