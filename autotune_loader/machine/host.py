"""The machine as a whole: its memory, how busy its CPUs are with anyone's work, and which processes belong together.

On Linux `/proc` is read, elsewhere psutil answers; what is not told is None.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from autotune_loader.values.errors import PlatformError

PROC = Path("/proc")
"""Tests read another folder."""
HAS_PROC = sys.platform.startswith("linux")
"""Whether `/proc` has the Linux format."""


def require_linux(what: str, platform: str = sys.platform) -> None:
    """Refuse to go on where nothing could be measured.

    Raises:
        PlatformError: another system.
    """
    if not platform.startswith("linux"):
        raise PlatformError(
            f"{what} works on Linux only, and this is {platform!r}: it measures by what Linux tells of processes and "
            "memory. Tune on the Linux machine that trains (a container or WSL 2 will do); load_config(), and all that reads a "
            "loader.json, works here"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCpu:
    """CPU time of the machine since it booted."""

    cpus: int
    """CPUs that were added up."""
    busy_s: float
    """Seconds in which they ran anything, for anyone."""
    steal_s: float
    """Seconds in which a hypervisor ran someone else although we wanted to run."""


def parse_host_cpu(text: str, *, ticks_per_s: int, cpus: Collection[int] | None = None) -> HostCpu:
    """CPU time of the machine, or of some of its CPUs, from `/proc/stat`.

    `cpuN user nice system idle iowait irq softirq steal guest guest_nice` in ticks (proc(5)); user contains guest:

        cpu  4624 0 720 267311 178 0 68 1 0 0
        cpu0 1124 0 180 66811 58 0 17 1 0 0
    """
    busy = steal = count = 0
    for line in text.splitlines():
        name, *values = line.split()
        if not name.startswith("cpu") or not name[3:].isdigit() or (cpus is not None and int(name[3:]) not in cpus):
            continue
        user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(value) for value in values[:8])
        busy, steal, count = busy + user + nice + system + irq + softirq, steal + stolen, count + 1
    return HostCpu(cpus=count, busy_s=busy / ticks_per_s, steal_s=steal / ticks_per_s)


def host_cpu(cpus: Collection[int] | None = None, proc: Path = PROC) -> HostCpu | None:
    """CPU time of the machine, or of some of its CPUs, since boot; None where the system does not tell."""
    if HAS_PROC:
        try:
            return parse_host_cpu((proc / "stat").read_text(), ticks_per_s=os.sysconf("SC_CLK_TCK"), cpus=cpus)
        except (OSError, ValueError):
            return None
    import psutil

    times = psutil.cpu_times()
    busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return HostCpu(cpus=psutil.cpu_count() or 1, busy_s=busy, steal_s=getattr(times, "steal", 0.0))


def process_group_members(leader: int) -> tuple[int, ...]:
    """Processes of the group or session that `leader` began, whether or not it still lives; never ourselves.

    Workers that a dead process left to init are found in this way, where a walk down from the process finds nothing.
    """
    import psutil

    if not hasattr(os, "getsid"):  # Windows
        return ()
    return tuple(pid for pid in psutil.pids() if pid != os.getpid() and _belongs_to(pid, leader))


def _belongs_to(pid: int, leader: int) -> bool:
    try:
        return leader in (os.getpgid(pid), os.getsid(pid))
    except OSError:
        return False
