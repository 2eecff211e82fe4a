"""The machine as a whole: which system it is, and how busy its CPUs are with anyone's work, by psutil."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection
from pathlib import Path

from autotune_loader.values import PlatformError


def require_linux(what: str) -> None:
    """Refuse to go on where nothing could be measured.

    Raises:
        PlatformError: another system.
    """
    if not sys.platform.startswith("linux"):
        raise PlatformError(
            f"{what} works on Linux only, and this is {sys.platform!r}: it reads statistics of Linux. "
            "Tune on the Linux machine that trains (a container or WSL 2 is fine); load_config() and everything else "
            "that reads a loader.json work here"
        )


def host_busy_s(cpus: Collection[int] | None = None) -> list[float]:
    """Seconds since boot in which each CPU, or each of these, ran anything, for anyone; none where the system does not tell."""
    import psutil

    try:
        times = psutil.cpu_times(percpu=True)
    except (OSError, RuntimeError, psutil.Error):  # some containers hide /proc
        return []
    meant = [each for number, each in enumerate(times) if cpus is None or number in cpus]
    return [each.user + each.nice + each.system + each.irq + each.softirq for each in meant]


def cpu_model() -> str:
    """The name of the CPU, as the kernel has it; empty where it does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return ""
