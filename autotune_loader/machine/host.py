"""The machine as a whole: which system it is, and how busy its CPUs are with anyone's work, by psutil."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass

from autotune_loader.values import PlatformError


def require_linux(what: str) -> None:
    """Refuse to go on where nothing could be measured.

    Raises:
        PlatformError: another system.
    """
    if not sys.platform.startswith("linux"):
        raise PlatformError(
            f"{what} works on Linux only, and this is {sys.platform!r}: it measures by what Linux tells of processes and "
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


def host_cpu(cpus: Collection[int] | None = None) -> HostCpu | None:
    """CPU time of the machine, or of some of its CPUs, since boot; None where the system does not tell."""
    import psutil

    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError, psutil.Error):  # some containers hide /proc
        return None
    meant = [each for number, each in enumerate(times) if cpus is None or number in cpus]
    busy_s = sum(getattr(each, name, 0.0) for each in meant for name in ("user", "nice", "system", "irq", "softirq"))
    return HostCpu(cpus=len(meant), busy_s=busy_s)
