"""The machine as one value, read before anything is tried; and what a measurement depends on of it, as a file carries it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from autotune_loader.machine.limits import (
    Cores,
    MemoryBudget,
    SharedMemory,
    local_world_size,
    memory_budget,
    open_files_limit,
    shared_memory,
    usable_cores,
)

CACHE_SHARE = 0.8
"""Of the memory, which files that were read can take in the best case."""
DAEMONIC = (
    "this process is a daemon of multiprocessing, which cannot start worker processes. Try daemon=False, or "
    "concurrent.futures.ProcessPoolExecutor."
)
ALIKE = 0.05
"""Kernels of one machine type differ in what they keep for themselves."""
NO_GPU = "none"
COMPARED = {
    "usable_cores": ("usable cores", "its workers may be too many", "more workers may be faster"),
    "memory_bytes": ("memory", "its workers may not fit", ""),
    "shm_bytes": ("shared memory", "batches in flight may not fit", ""),
    "gpu": ("GPU", "the step takes a different time", ""),
    "dataset": ("dataset", "a sample takes a different time", ""),
}
"""What a field is called, what a difference that matters does, and what another one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process may use. Memory and shared memory are shared by all ranks on this node."""

    cores: Cores
    memory: MemoryBudget
    shm: SharedMemory | None
    """None without `/dev/shm`."""
    open_files: int | None
    """Descriptors a process may hold; None without a limit."""
    world_size: int
    """Ranks of this job on this node."""
    why_no_workers: str | None = None
    """Why this process cannot start workers; None where it can."""

    @property
    def usable_cores(self) -> int:
        """Cores this rank may count on, at least 1."""
        return self.cores.usable

    @property
    def memory_budget_bytes(self) -> int | None:
        """Host memory this rank may still take: an equal share of what is left now."""
        left = self.memory.available_bytes
        return None if left is None else left // self.world_size

    @property
    def shm_budget_bytes(self) -> int | None:
        """Room in `/dev/shm` for this rank: an equal share of what is free now."""
        return None if self.shm is None else self.shm.free_bytes // self.world_size

    def holds(self, data_bytes: int) -> bool | None:
        """Whether this much data stays in the page cache from one epoch to the next; None where memory is not known."""
        total = self.memory.total_bytes
        return None if total is None else data_bytes <= CACHE_SHARE * total

    def fingerprint(self, *, dataset: str = "", gpu: str | None = None) -> Fingerprint:
        """The part of this that a measurement depends on; without the name of a GPU torch is asked, where it is imported."""
        torch = sys.modules.get("torch")  # who measures has imported it
        if gpu is None and torch is not None:  # CUDA is not opened: no process that is forked afterwards could use it
            name = torch.cuda.get_device_name() if torch.cuda.is_initialized() else None
            gpu = name if torch.cuda.device_count() else NO_GPU
        return Fingerprint(
            usable_cores=self.usable_cores,
            memory_bytes=self.memory.total_bytes,
            shm_bytes=self.shm.total_bytes if self.shm else None,
            gpu=gpu,
            dataset=dataset,
            torch=None if torch is None else str(torch.__version__),
        )


def inspect_machine(*, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """What this process may use here and now; `/proc`, `/sys` and `/dev` are looked up below `root`."""
    return Machine(
        cores=usable_cores(root, environ),
        memory=memory_budget(root),
        shm=shared_memory(root),
        open_files=open_files_limit(),
        world_size=local_world_size(environ),
        why_no_workers=DAEMONIC if multiprocessing.current_process().daemon else None,
    )


def start_method(asked: str | None = None) -> str:
    """How `multiprocessing` starts processes here, unless it is asked for another method.

    The default stays unsettled: asking plainly would fix it.
    """
    return asked or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def cpu_model() -> str:
    """The name of the CPU, as the kernel has it; empty where it does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What a measurement depends on, as plain JSON values; None means not known."""

    usable_cores: int
    """Cores one rank may count on."""
    memory_bytes: int | None = None
    """The tightest limit, not what happened to be free."""
    shm_bytes: int | None = None
    """Size of `/dev/shm`."""
    gpu: str | None = NO_GPU
    """Name of the GPU that steps run on."""
    dataset: str = ""
    """Class and length."""
    torch: str | None = None
    """Its version, which is told and not compared."""


class Difference(NamedTuple):
    """One thing in which two machines differ."""

    sentence: str
    """With both values, the tuned machine's first."""
    matters: bool
    """Whether the configuration may be slow or fail here; False is worth knowing only."""


def differences(tuned: Fingerprint, here: Fingerprint) -> list[Difference]:
    """Where `here` differs from the machine that was `tuned` on; what either side does not know is no difference."""
    found = []
    for name, (what, worse, better) in COMPARED.items():
        before, now = getattr(tuned, name), getattr(here, name)
        if before in (None, "") or now in (None, "") or before == now:
            continue
        if name.endswith("_bytes") and abs(now - before) <= ALIKE * before:
            continue
        matters = isinstance(now, str) or now < before
        effect = worse if matters else better
        sentence = f"{what}: {_text(before)} then, {_text(now)} here" + (f"; {effect}" if effect else "")
        found.append(Difference(sentence, matters))
    return found


def _text(value: Any) -> str:
    return f"{value / 2**20:.0f} MiB" if isinstance(value, int) and value >= 1 << 20 else str(value)
