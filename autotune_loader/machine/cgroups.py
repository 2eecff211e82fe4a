"""Limits that Linux control groups put on this process: CPU quota and memory, v2 and v1, up the whole ancestry.

A limit binds wherever it stands above us, so every visible level is read. Hierarchies are looked for where systemd and
container runtimes mount them: v2 in `/sys/fs/cgroup`, or `unified` below it; v1 in a folder for each controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# v1 says "unlimited" as the largest page-aligned int64, which depends on the page size; nothing real comes near.
_UNLIMITED_BYTES = 1 << 60
# v2's names, then v1's. `memory.high` counts, because beyond it the kernel stalls us.
_MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_MEMORY_USES = (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound and where it was found."""

    value: float
    """Cores or bytes."""
    source: str
    """A file, an environment variable or a system call."""


def cpu_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every CPU quota above this process, in cores."""
    return tuple(
        limit
        for folder in _levels(root, "cpu")
        for limit in (*_limit(folder / "cpu.max", _cores), *_limit(folder / "cpu.cfs_quota_us", _cores_of_v1))
    )


def memory_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every memory limit above this process, in bytes."""
    return tuple(limit for folder in _levels(root, "memory") for limit in _memory_limits(folder))


def memory_available(root: Path = Path("/")) -> tuple[Limit, ...]:
    """What every memory limit above this process leaves, in bytes: the limit minus use.

    Inactive page cache does not count as used, since the kernel drops it before it kills: the definition of kubelet's
    working set. Otherwise reading a data set would look like a leak.
    """
    left = []
    for folder in _levels(root, "memory"):
        used = _used_bytes(folder)
        if used is not None:
            left += [
                Limit(value=max(0.0, limit.value - used), source=f"{limit.source} minus use")
                for limit in _memory_limits(folder)
            ]
    return tuple(left)


def _memory_limits(folder: Path) -> list[Limit]:
    return [limit for name in _MEMORY_LIMITS for limit in _limit(folder / name, _bytes)]


def _cores(path: Path) -> float | None:
    """`cpu.max` of v2 is `$MAX $PERIOD` in microseconds: `50000 100000` is half a core, `max` no limit."""
    quota, period = [*path.read_text().split(), "100000"][:2]
    return None if quota == "max" else int(quota) / int(period)


def _cores_of_v1(path: Path) -> float | None:
    """`cpu.cfs_quota_us` of v1 has its period in a file beside it; -1 is no limit."""
    quota, period = int(path.read_text()), int(path.with_name("cpu.cfs_period_us").read_text())
    return quota / period if quota > 0 else None


def _bytes(path: Path) -> int | None:
    text = path.read_text().strip()
    return None if text == "max" or int(text) >= _UNLIMITED_BYTES else int(text)


def _used_bytes(folder: Path) -> int | None:
    for use, cache in _MEMORY_USES:
        try:
            counters = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
            return max(0, int((folder / use).read_text()) - int(counters.get(cache, 0)))
        except (OSError, ValueError):
            continue
    return None


def _limit(path: Path, read: Callable[[Path], float | None]) -> list[Limit]:
    """The limit in a file, as a list of one or none: most levels have no such file or no limit."""
    try:
        value = read(path)
    except (OSError, ValueError, ZeroDivisionError):
        return []
    return [] if value is None else [Limit(value=value, source=str(path))]


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
