"""Limits that Linux control groups put on this process: CPU quota and memory, v1 and v2, up the whole ancestry.

A limit binds wherever it stands above us, so every visible ancestor is read. Parsers take text; readers take a root
path, so that tests point them at a directory of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNIFIED = ""
"""Name under which cgroup v2, which has no controller list, is kept beside the controllers of v1."""
# v1 says "unlimited" as the largest page-aligned int64, which depends on the page size; nothing real comes near.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound and where it was found."""

    value: float
    """Cores or bytes."""
    source: str
    """A file, an environment variable or a system call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CgroupMount:
    """One mounted control group hierarchy."""

    controllers: frozenset[str]
    """Controllers of v1; `{UNIFIED}` for v2."""
    root: str
    """The part of the hierarchy that is mounted; "/" is all of it."""
    mount_point: str


def parse_self_cgroup(text: str) -> dict[str, str]:
    """Path of this process by controller, from `/proc/self/cgroup`.

    One line per hierarchy, `hierarchy-ID:controller-list:cgroup-path`; v2 has ID 0 and no controllers (cgroups(7)):

        4:memory:/docker/3f2a
        2:cpu,cpuacct:/docker/3f2a
        0::/kubepods/pod7/app
    """
    paths: dict[str, str] = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            paths.update(dict.fromkeys(parts[1].split(","), parts[2]))
    return paths


def parse_cgroup_mounts(text: str) -> list[CgroupMount]:
    """Control group mounts, from `/proc/self/mountinfo`.

    Fields are `id parent major:minor root mount-point options [optional...] - type source super-options` (proc(5)); the
    super-options of v1 name its controllers:

        32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
        41 31 0:38 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate
    """
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        head, tail = before.split(), after.split()
        if len(head) < 6 or len(tail) < 3 or tail[0] not in ("cgroup", "cgroup2"):
            continue
        names = {UNIFIED} if tail[0] == "cgroup2" else set(tail[2].split(","))
        mounts.append(
            CgroupMount(controllers=frozenset(names), root=_unescape(head[3]), mount_point=_unescape(head[4]))
        )
    return mounts


def _unescape(path: str) -> str:
    """The kernel writes space, tab, newline and backslash in paths as octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def parse_cpu_max(text: str) -> float | None:
    """Cores allowed by v2's `cpu.max`, `$MAX $PERIOD` in microseconds: `50000 100000` is half a core, `max` none."""
    parts = text.split()
    if not parts or parts[0] == "max":
        return None
    period = int(parts[1]) if len(parts) > 1 else 100_000
    return int(parts[0]) / period


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """Cores allowed by v1's `cpu.cfs_quota_us` and `cpu.cfs_period_us`: one integer each; a quota of -1 is no limit."""
    return int(quota) / int(period) if int(quota) > 0 else None


def parse_memory_limit(text: str) -> int | None:
    """Bytes allowed by v2's `memory.max` (an integer or `max`) or v1's `memory.limit_in_bytes` (huge means none)."""
    value = text.strip()
    if value == "max":
        return None
    return int(value) if int(value) < _UNLIMITED_BYTES else None


def parse_memory_stat(text: str) -> dict[str, int]:
    """Counters of `memory.stat`: lines of `name value`, such as `inactive_file 4096`, in bytes."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def cpu_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every CPU quota above this process, in cores."""
    limits = []
    for directory in _ancestry(root, UNIFIED):
        limits += _limit(directory / "cpu.max", lambda path: parse_cpu_max(path.read_text()))
    for directory in _ancestry(root, "cpu"):
        limits += _limit(directory / "cpu.cfs_quota_us", _read_cfs)
    return tuple(limits)


def _read_cfs(path: Path) -> float | None:
    return parse_cfs_quota(path.read_text(), path.with_name("cpu.cfs_period_us").read_text())


def memory_limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Every memory limit above this process, in bytes; `memory.high` counts, because beyond it the kernel stalls us."""
    return tuple(limit for limit, _ in _memory_levels(root))


def memory_available(root: Path = Path("/")) -> tuple[Limit, ...]:
    """What every memory limit above this process leaves, in bytes: the limit minus use.

    Inactive page cache does not count as used, since the kernel drops it before it kills: the definition of kubelet's
    working set. Otherwise reading a data set would look like a leak.
    """
    left = []
    for limit, directory in _memory_levels(root):
        used = _used_bytes(directory)
        if used is not None:
            left.append(Limit(value=max(0.0, limit.value - used), source=f"{limit.source} minus use"))
    return tuple(left)


def _memory_levels(root: Path) -> Iterator[tuple[Limit, Path]]:
    for controller, names in ((UNIFIED, ("memory.max", "memory.high")), ("memory", ("memory.limit_in_bytes",))):
        for directory in _ancestry(root, controller):
            for name in names:
                for limit in _limit(directory / name, lambda path: parse_memory_limit(path.read_text())):
                    yield limit, directory


def _used_bytes(directory: Path) -> int | None:
    for use_file, cache_key in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        try:
            used = int((directory / use_file).read_text())
            stat = parse_memory_stat((directory / "memory.stat").read_text())
        except (OSError, ValueError):
            continue
        return max(0, used - stat.get(cache_key, 0))
    return None


def _limit(path: Path, read: Callable[[Path], float | None]) -> list[Limit]:
    """The limit in a file, as a list of one or none: most levels have no such file or no limit."""
    try:
        value = read(path)
    except (OSError, ValueError, IndexError, ZeroDivisionError):
        return []
    return [] if value is None else [Limit(value=value, source=str(path))]


def _ancestry(root: Path, controller: str) -> list[Path]:
    """Directories of this process in one hierarchy, its own first, the topmost visible one last."""
    try:
        path = parse_self_cgroup((root / "proc/self/cgroup").read_text()).get(controller)
        mounts = parse_cgroup_mounts((root / "proc/self/mountinfo").read_text())
    except OSError:
        return []
    mount = next((mount for mount in mounts if controller in mount.controllers), None)
    if path is None or mount is None:
        return []
    top = root / mount.mount_point.lstrip("/")
    inside = _inside_mount(path, mount.root)
    return [top.joinpath(*inside[:depth]) for depth in range(len(inside), -1, -1)]


def _inside_mount(path: str, mounted: str) -> list[str]:
    """Parts of a cgroup path below what is mounted.

    A container without a cgroup namespace sees its path from the host's root while only its own subtree is mounted; a
    path outside the mount ("/../x") leaves the mount's top as the nearest level that can be read.
    """
    parts = [part for part in path.split("/") if part]
    skip = [part for part in mounted.split("/") if part]
    if ".." in parts or parts[: len(skip)] != skip:
        return []
    return parts[len(skip) :]
