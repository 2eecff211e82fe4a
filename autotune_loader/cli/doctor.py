"""`autotune-loader doctor`: limits of this machine, GPUs and versions in one screen, fit for a bug report."""

from __future__ import annotations

import contextlib
import platform
import textwrap
from collections.abc import Iterator
from typing import Any

FEW_CORES = 4
"""Fewer hardly keep a step and a few workers busy: too few where the host has many more."""
LITTLE_MEMORY = 2 << 30
"""Each worker holds an interpreter with torch, some hundred MiB of it its own."""
LITTLE_SHM = 64 << 20
"""Docker's default; a few large batches fill it, and a worker dies of a bus error."""
FEW_FILES = 4096
"""Each tensor in flight takes a descriptor; 16 workers with large dicts reach the usual soft limit of 1024."""
_PACKAGES = ("torch", "numpy", "optuna", "psutil", "lightning", "transformers", "accelerate", "torchdata")
_CORE_FIXES = {  # by a word of the limit's source
    "SLURM": "ask for more with sbatch --cpus-per-task=8",
    "affinity": "this process is pinned to few CPUs; look at taskset, numactl, or SLURM's --cpu-bind",
    "": "start the container with docker run --cpus=8, or raise resources.limits.cpu in Kubernetes",
}
_SHM_FIX = "docker run --shm-size=2g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"


def doctor_command() -> None:
    """Print limits, GPUs and versions, for example for a bug report.

    Each limit has its source. LOW marks a limit that is too low for a
    DataLoader; the next line says how to raise it.

    Example:
      autotune-loader doctor
    """
    from autotune_loader.machine import facts

    print(examination(facts.inspect_machine()))


def examination(machine: Any) -> str:
    """What doctor prints: a line for each limit, and below a low one what to do."""
    lines, low = [], []
    for name, text, fix in _checks(machine):
        told = [f"{'LOW' if fix else '':4}{name + ':':15}{text}", *([f"{'':19}to raise it: {fix}"] if fix else [])]
        fill = {"width": 80, "subsequent_indent": " " * 19, "break_long_words": False, "break_on_hyphens": False}
        lines += [textwrap.fill(line, **fill) for line in told]  # type: ignore[arg-type]
        low += [name] if fix else []
    return "\n".join([*lines, "", f"Too low: {', '.join(low)}." if low else "No limit is too low."])


def _checks(machine: Any) -> Iterator[tuple[str, str, str | None]]:
    """Name and text of each line, and what to do where its limit is low."""
    from autotune_loader.machine import facts
    from autotune_loader.values.units import bytes_text

    cores, memory, shm, files = machine.cores, machine.memory_budget_bytes, machine.shm, machine.open_files
    yield "versions", _versions(), None
    raise_it = next(fix for word, fix in _CORE_FIXES.items() if word in cores.binding.source)
    is_few = cores.usable < FEW_CORES and 2 * cores.usable <= max(limit.value for limit in cores.inputs)
    fix = "start fewer ranks on this node" if cores.binding.value >= 2 * cores.usable else raise_it
    shared = f", shared by {cores.ranks} ranks" if cores.ranks > 1 else ""
    sources = ", ".join(f"{each.value:g} {each.source}" for each in cores.inputs)
    yield "cores", f"{cores.usable} usable{shared} ({sources})", fix if is_few else None
    host = ", ".join(f"{bytes_text(limit.value)} {limit.source}" for limit in machine.memory.inputs)
    text = "unknown" if memory is None else f"{bytes_text(memory)} for this process ({host})"
    fix = "fewer workers, or a higher limit such as docker run --memory=16g"
    yield "memory", text, fix if memory is not None and memory < LITTLE_MEMORY else None
    text = "no /dev/shm" if shm is None else f"{bytes_text(shm.free_bytes)} of {bytes_text(shm.total_bytes)} free"
    yield "shared memory", text, _SHM_FIX if shm is not None and shm.free_bytes <= LITTLE_SHM else None
    text = "no limit" if files is None else f"{files:,} (soft RLIMIT_NOFILE)"
    fix = "ulimit -n 65536 before starting Python"
    yield "open files", text, fix if files is not None and files < FEW_FILES else None
    yield "start method", facts.start_method(), None
    yield "GPUs", _gpus(), None


def _gpus() -> str:
    """The devices that torch can use, and how busy they are now."""
    from autotune_loader.values.units import bytes_text

    told = list[str]()
    try:
        import torch

        from autotune_loader.machine.nvml import GpuMeter

        for at in range(torch.cuda.device_count()):
            gpu, meter = torch.cuda.get_device_properties(at), GpuMeter(f"cuda:{at}")
            share, used_bytes = meter.now()
            used = "" if used_bytes is None else f", {bytes_text(used_bytes)} in use"
            now = f": {meter.why_none.rstrip('.')}" if share is None else f"{used}, {share:.0%} busy"
            told.append(f"cuda:{at} {gpu.name} ({bytes_text(gpu.total_memory)}){now}")
    except Exception as error:  # no torch, or a driver that does not answer
        return f"could not query torch ({type(error).__name__}: {error})"
    return "; ".join(told) or "none"


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from autotune_loader import __version__

    found = []
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return ", ".join([f"autotune_loader {__version__}", f"Python {platform.python_version()}", *found, system])
