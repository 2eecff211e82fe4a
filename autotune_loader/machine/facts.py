"""The machine as one value, read before anything is tried: what holds now, with the source of every bound."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune_loader.machine.fingerprint import NO_GPU, Fingerprint
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
    "this process is a daemon of multiprocessing, which cannot start worker processes; daemon=False, or "
    "concurrent.futures.ProcessPoolExecutor, would work"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process may use, with the source of every bound."""

    cores: Cores
    memory: MemoryBudget
    """Shared by all ranks on this node."""
    shm: SharedMemory | None
    """Shared by all ranks on this node; None without `/dev/shm`."""
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
        """Whether this much data can stay in memory from one epoch to the next; None where memory is not known.

        What is not taken by processes keeps files that were read (the page cache); ranks on a node share it.
        """
        total = self.memory.total_bytes
        return None if total is None else data_bytes <= CACHE_SHARE * total

    def fingerprint(self, *, dataset: str = "", gpu: str | None = None) -> Fingerprint:
        """The part of this that a measurement depends on.

        Args:
            dataset: What identifies the data, such as its class and length.
            gpu: Name of the device that was measured on; None asks torch, where it is imported.
        """
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
    """What this process may use here and now.

    Args:
        root: Where `/proc`, `/sys` and `/dev` are looked up.
        environ: Where variables are looked up.
    """
    return Machine(
        cores=usable_cores(root, environ),
        memory=memory_budget(root),
        shm=shared_memory(root),
        open_files=open_files_limit(),
        world_size=local_world_size(environ),
        why_no_workers=DAEMONIC if multiprocessing.current_process().daemon else None,
    )


def start_method() -> str:
    """How `multiprocessing` starts processes here, without settling it: asking plainly would fix the default."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
