"""`autotune-loader doctor`: limits of this machine, GPUs and versions in one screen, fit for a bug report."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import click

from autotune_loader.report.units import UNKNOWN, bytes_text, counted

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Machine

# Fewer cores than this hardly keep a step and a few workers busy: too few where the host has many more.
FEW_CORES = 4
# Each worker holds an interpreter with torch, some hundred MiB of it its own.
LITTLE_MEMORY = 2 << 30
# Docker's default; a few large batches fill it, and a worker dies of a bus error.
LITTLE_SHM = 64 << 20
# Each tensor in flight takes a descriptor; 16 workers with large dicts reach the usual soft limit of 1024.
FEW_FILES = 4096
_PACKAGES = ("numpy", "optuna", "psutil", "lightning", "transformers", "accelerate", "torchdata")
_CORE_FIXES = (  # by a word of the limit's source
    ("SLURM", "ask for more with sbatch --cpus-per-task=8"),
    ("affinity", "this process is pinned to few CPUs; look at taskset, numactl, or SLURM's --cpu-bind"),
    ("", "start the container with docker run --cpus=8, or raise resources.limits.cpu in Kubernetes"),
)
_SHM_FIX = "docker run --shm-size=2g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory at /dev/shm"


@click.command("doctor")
def doctor_command() -> None:
    """Print limits, GPUs and versions, fit for a bug report.

    Each limit is named with its source; LOW marks one that is too low for a DataLoader, and the next line says what to do.

    \b
    Example:
      autotune-loader doctor
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.machine.facts import inspect_machine

    click.echo(examination(inspect_machine()))


def examination(machine: Machine) -> str:
    """What doctor prints: a line for each limit, and below a low one what to do."""
    from autotune_loader.machine.facts import start_method

    cores, memory, shm, files = machine.cores, machine.memory_budget_bytes, machine.shm, machine.open_files
    most = max(limit.value for limit in cores.inputs)
    few = cores.usable < FEW_CORES and 2 * cores.usable <= most
    crowded = cores.available >= 2 * cores.usable
    raise_it = next(fix for word, fix in _CORE_FIXES if word in cores.binding.source)
    shared = f", shared by {counted(cores.ranks, 'rank')}" if cores.ranks > 1 else ""
    host = ", ".join(f"{bytes_text(limit.value)} {limit.source}" for limit in machine.memory.inputs)
    room = "no /dev/shm" if shm is None else f"{bytes_text(shm.free_bytes)} of {bytes_text(shm.total_bytes)} free"
    gpus = ", ".join(f"cuda:{gpu.cuda_index} {gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in machine.gpus)
    reason = machine.gpu_reason or "CUDA sees none"
    threads = ", ".join(f"{name}={value}" for name, value in machine.thread_env.items())
    checks = (
        ("versions", _versions(), None),
        (
            "cores",
            f"{cores.usable} usable{shared} ({', '.join(f'{each.value:g} {each.source}' for each in cores.inputs)})",
            ("start fewer ranks on this node" if crowded else raise_it) if few else None,
        ),
        (
            "memory",
            f"{bytes_text(memory)} for this process ({host})" if memory is not None else "the system does not tell",
            "fewer workers, or a higher limit such as docker run --memory=16g" if (memory or 2**63) < LITTLE_MEMORY else None,
        ),
        ("shared memory", room, _SHM_FIX if shm is not None and shm.free_bytes <= LITTLE_SHM else None),
        (
            "open files",
            "no limit" if files is None else f"{files:,} (soft RLIMIT_NOFILE)",
            "ulimit -n 65536 before starting Python" if (files or 2**63) < FEW_FILES else None,
        ),
        ("start method", start_method(), None),
        ("threads", threads or "no variable is set", None),
        ("GPUs", f"{gpus}; driver {machine.driver or UNKNOWN}" if gpus else f"none: {reason}", None),
    )  # fmt: skip
    lines = []
    for name, text, fix in checks:
        lines += [f"{'LOW' if fix else '':4}{name + ':':15}{text}", *([f"{'':19}to raise it: {fix}"] if fix else [])]
    low = [name for name, _, fix in checks if fix]
    return "\n".join([*lines, "", f"Too low: {', '.join(low)}." if low else "No limit is too low."])


def _versions() -> str:
    from importlib.metadata import PackageNotFoundError, version

    from autotune_loader.machine.facts import torch_version
    from autotune_loader.version import __version__

    found = [
        f"autotune_loader {__version__}",
        f"torch {torch_version() or UNKNOWN}",
        f"Python {platform.python_version()}",
    ]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join([*found, f"{platform.system()} {platform.release()} {platform.machine()}"])
