"""The machine as one value, read before anything is tried: what holds now, with the source of every bound."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune_loader.machine.fingerprint import Fingerprint
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
    "this process was started by multiprocessing as a daemon, which may have no children and so no workers; daemon=False, or "
    "concurrent.futures.ProcessPoolExecutor, would give it some"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One device that CUDA sees."""

    name: str
    memory_bytes: int


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
    gpus: tuple[GpuDevice, ...]
    """What CUDA sees, in its order: the second is `cuda:1`."""
    gpu_reason: str | None
    """Why nothing is known about GPUs."""
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

    def fingerprint(self, *, dataset: str = "") -> Fingerprint:
        """The part of this that a measurement depends on.

        Args:
            dataset: What identifies the data, such as its class and length.
        """
        torch = sys.modules.get("torch")  # who measures has imported it
        return Fingerprint(
            usable_cores=self.usable_cores,
            memory_bytes=self.memory.total_bytes,
            shm_bytes=self.shm.total_bytes if self.shm else None,
            gpus=tuple(gpu.name for gpu in self.gpus),
            dataset=dataset,
            torch=None if torch is None else str(torch.__version__),
        )


def inspect_machine(*, root: Path = Path("/"), environ: Mapping[str, str] = os.environ, nvml: Any = None) -> Machine:
    """What this process may use here and now.

    Args:
        root: Where `/proc`, `/sys` and `/dev` are looked up.
        environ: Where variables are looked up.
        nvml: As `visible_gpus` takes it. CUDA is never initialised here: a process that forks workers afterwards could not
            use it in them.
    """
    gpus, gpu_reason = visible_gpus(nvml, environ)
    return Machine(
        cores=usable_cores(root, environ),
        memory=memory_budget(root),
        shm=shared_memory(root),
        open_files=open_files_limit(),
        world_size=local_world_size(environ),
        gpus=gpus,
        gpu_reason=gpu_reason,
        why_no_workers=DAEMONIC if multiprocessing.current_process().daemon else None,
    )


def start_method() -> str:
    """How `multiprocessing` starts processes here, without settling it: asking plainly would fix the default."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def visible_gpus(nvml: Any = None, environ: Mapping[str, str] = os.environ) -> tuple[tuple[GpuDevice, ...], str | None]:
    """The devices that CUDA shows, and why nothing is known of any; None where it is.

    Args:
        nvml: the module `pynvml`, or a stand-in; imported if None.
        environ: where `CUDA_VISIBLE_DEVICES` is looked up, which NVML does not know.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as error:
            return (), f"nvidia-ml-py is not installed ({error})"
    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        mask = environ.get("CUDA_VISIBLE_DEVICES")
        uuids = [nvml.nvmlDeviceGetUUID(gpu) for gpu in gpus]
        shown = [gpus[position] for position in (range(len(gpus)) if mask is None else _masked(mask, uuids))]
        sizes = [(nvml.nvmlDeviceGetName(gpu), int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)) for gpu in shown]
    except nvml.NVMLError as error:  # no driver; or a call that WSL2 or a Jetson does not have
        return (), f"NVML: {error}"
    return tuple(GpuDevice(name=name, memory_bytes=size) for name, size in sizes), None


def _masked(mask: str, uuids: Sequence[str]) -> list[int]:
    """By index or by the beginning of a UUID, up to the first entry that means no device, as CUDA does it."""
    shown: list[int] = []
    for entry in map(str.strip, mask.split(",")):
        if entry.isdecimal():
            meant = [int(entry)] if int(entry) < len(uuids) else []
        else:
            meant = [position for position, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(meant) != 1:
            break
        shown += meant
    return shown
