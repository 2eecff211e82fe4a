"""`autotune-loader doctor`: every limit of this machine with its source, and what to do about those that are too low."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import click

from autotune_loader.report.units import bytes_text, counted

if TYPE_CHECKING:
    from autotune_loader.machine.facts import Machine
    from autotune_loader.machine.limits import Cores

State = Literal["ok", "low", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: State
    text: str
    """What holds, with its source."""
    fix: str | None = None
    """What to do, where it is too low."""


@click.command("doctor")
def doctor_command() -> None:
    """Show this machine's limits and how to raise low ones.

    Every limit that matters to a DataLoader is named with its source.

    \b
    Example:
      autotune-loader doctor
    """  # noqa: D301 - click's mark is the character itself
    from autotune_loader.machine.facts import inspect_machine

    click.echo(render_checks(examine(inspect_machine())))


def examine(machine: Machine) -> tuple[Check, ...]:
    """All checks of a machine."""
    return (
        _versions(),
        _cores(machine.cores),
        _memory(machine),
        _shm(machine),
        _open_files(machine),
        _start_method(),
        _threads(machine),
        _gpus(machine),
    )


def render_checks(checks: tuple[Check, ...]) -> str:
    """One paragraph per check, and a sentence at the end."""
    lines, marks = [], {"ok": "ok  ", "low": "LOW ", "note": "    "}
    for check in checks:
        lines.append(f"{marks[check.state]} {check.name}: {check.text}")
        lines += [f"     fix: {check.fix}"] if check.fix else []
    low = [check.name for check in checks if check.state == "low"]
    verdict = f"Too low: {', '.join(low)}." if low else "Nothing here stands in a DataLoader's way."
    return "\n".join([*lines, "", verdict])


def _judged(name: str, text: str, *, enough: bool, fix: str) -> Check:
    return Check(name=name, state="ok" if enough else "low", text=text, fix=None if enough else fix)


def _versions() -> Check:
    from autotune_loader.machine.facts import torch_version
    from autotune_loader.version import __version__

    parts = (
        f"autotune_loader {__version__}",
        f"torch {torch_version() or 'not installed'}",
        f"Python {platform.python_version()}",
        f"{platform.system()} {platform.machine()}",
    )
    return Check(name="versions", state="note", text=", ".join(parts))


def _cores(cores: Cores) -> Check:
    inputs = ", ".join(f"{limit.value:g} from {limit.source}" for limit in cores.inputs)
    shared = f", shared by {counted(cores.ranks, 'rank')}" if cores.ranks > 1 else ""
    most = max(limit.value for limit in cores.inputs)
    text = f"{cores.usable} usable{shared} ({inputs})"
    if cores.available < most:
        text += f"; {cores.binding.source} allows {cores.available:g} of the {most:g} this host has"
    # Fewer than four hardly keep a step and a few workers busy: too few, where the host has many more.
    return _judged("cores", text, enough=cores.usable >= 4 or 2 * cores.usable > most, fix=_core_fix(cores))


def _core_fix(cores: Cores) -> str:
    source = cores.binding.source
    if cores.available >= 2 * cores.usable:
        return "start fewer ranks on this node"
    if "SLURM" in source:
        return "ask for more with sbatch --cpus-per-task=8"
    if "affinity" in source:
        return "this process is pinned to few CPUs; look at taskset, numactl, or SLURM's --cpu-bind"
    return f"{source} is the bound; start the container with docker run --cpus=8, or raise resources.limits.cpu in Kubernetes"


def _memory(machine: Machine) -> Check:
    left = machine.memory_budget_bytes
    if left is None:
        return Check(name="memory", state="note", text="the system does not tell")
    inputs = ", ".join(f"{bytes_text(limit.value)} from {limit.source}" for limit in machine.memory.inputs)
    text = f"{bytes_text(left)} left for each process ({inputs}; {bytes_text(machine.memory.total_bytes)} in all)"
    fix = "fewer workers; a smaller prefetch_factor; or a higher limit, as with docker run --memory=16g"
    # Each worker holds an interpreter with torch, some hundred MiB of it its own.
    return _judged("memory", text, enough=left >= 2 << 30, fix=fix)


def _shm(machine: Machine) -> Check:
    if machine.shm is None:
        return Check(name="shared memory", state="note", text="there is no /dev/shm here")
    text = f"{bytes_text(machine.shm.free_bytes)} of {bytes_text(machine.shm.total_bytes)} free in /dev/shm (statvfs)"
    fix = (
        "docker run --shm-size=2g (or --ipc=host); in Kubernetes an emptyDir with medium: Memory mounted at /dev/shm; "
        "as root: mount -o remount,size=2G /dev/shm"
    )
    # 64 MiB is Docker's default: a few large batches fill it, and a worker dies of a bus error.
    return _judged("shared memory", text, enough=machine.shm.free_bytes > 64 << 20, fix=fix)


def _open_files(machine: Machine) -> Check:
    if machine.open_files is None:
        return Check(name="open files", state="ok", text="no limit")
    text = f"{machine.open_files:,} (soft RLIMIT_NOFILE)"
    fix = "ulimit -n 65536 before starting Python, or tune with --allow sharing_strategy"
    # Each tensor in flight takes a descriptor; 16 workers with large dicts reach the usual soft limit of 1024.
    return _judged("open files", text, enough=machine.open_files >= 4096, fix=fix)


def _start_method() -> Check:
    from autotune_loader.machine.facts import start_method

    method = start_method()
    meaning = {
        "fork": "workers start fast; CUDA and threads of the training process must not be used in them",
        "forkserver": "workers start from a clean process; dataset and collate_fn have to be picklable",
        "spawn": "workers start slowly, with all imports; dataset and collate_fn have to be picklable",
    }
    return Check(name="start method", state="note", text=f"{method}: {meaning.get(method, 'unknown')}")


def _threads(machine: Machine) -> Check:
    text = "nothing is set; torch uses one thread in a worker, other libraries (OpenCV, numpy's BLAS) one for each core"
    if machine.thread_env:
        settings = ", ".join(f"{name}={value}" for name, value in machine.thread_env.items())
        text = f"{settings}; the training process and its workers inherit them"
    return Check(name="threads", state="note", text=text)


def _gpus(machine: Machine) -> Check:
    if not machine.gpus:
        reason = machine.gpu_reason or "CUDA sees none"
        return Check(name="GPUs", state="note", text=f"none: {reason}; GPU use is reported as null")
    names = ", ".join(f"cuda:{gpu.cuda_index} {gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in machine.gpus)
    driver = f"driver {machine.driver}" if machine.driver else "no driver"
    return Check(name="GPUs", state="ok", text=f"{names}; {driver}, NVML answers")
