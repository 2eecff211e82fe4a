"""The machine as one value, read before anything is tried; and what a measurement depends on of it, as a file carries it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
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
from autotune_loader.values.units import bytes_text

CACHE_SHARE = 0.8
"""Of the memory, which files that were read can take in the best case."""
DAEMONIC = (
    "this process is a daemon of multiprocessing, which cannot start worker processes. Try daemon=False, or "
    "concurrent.futures.ProcessPoolExecutor."
)
ALIKE = 0.05
"""Kernels of one machine type differ in what they keep for themselves."""
NO_GPU = "none"
OTHER_GPUS = ("kfd", "dxg")
"""Devices of AMD's driver, and of Windows' in WSL, whose GPUs have no name there."""
_OR = " or "
"""Between the names of several models of GPUs."""
COMPARED = {
    "usable_cores": ("usable cores", "it may use too many workers", "more workers may be faster"),
    "memory_bytes": ("memory", "its workers may not fit", ""),
    "shm_bytes": ("shared memory", "batches in flight may not fit", ""),
    "gpu": ("GPU", "the step takes a different time", ""),
    "dataset": ("dataset", "a sample takes a different time", ""),
    "torch": ("torch", "", ""),
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
        return Fingerprint(
            usable_cores=self.usable_cores,
            memory_bytes=self.memory.total_bytes,
            shm_bytes=self.shm.total_bytes if self.shm else None,
            gpu=opened_gpu() if gpu is None else gpu,
            dataset=dataset,
            torch=_torch_version(),
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


def opened_gpu() -> str | None:
    """The name of torch's current GPU, NO_GPU where torch finds none; None where torch is not imported, or has opened none.

    CUDA is not opened: no process that is forked afterwards could use it.
    """
    if (torch := sys.modules.get("torch")) is None:
        return None
    if not torch.cuda.device_count():
        return NO_GPU
    return str(torch.cuda.get_device_name()) if torch.cuda.is_initialized() else None


def visible_gpu(*, root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of the GPU here, without opening it; None where it is not known, and all names where there are several models.

    NVIDIA's driver has a folder for each GPU, whose `/proc/driver/nvidia/gpus/0000:18:00.0/information` begins, with tabs,

        Model:           NVIDIA H100 80GB HBM3
        IRQ:             18

    with the name that torch has, too. Which of several are visible is not looked up. A container that has none still sees
    the folders, but no `/dev/nvidia0`: there is none, unless another maker's driver is there.
    """
    if (opened := opened_gpu()) is not None:
        return opened
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return NO_GPU
    if not any(root.glob("dev/nvidia[0-9]*")):
        return None if any((root / "dev" / name).exists() for name in OTHER_GPUS) else NO_GPU
    models = set[str]()
    for path in root.glob("proc/driver/nvidia/gpus/*/information"):
        with contextlib.suppress(OSError):
            models.update(re.findall(r"^Model:\s*(.*\S)", path.read_text(errors="replace"), re.MULTILINE))
    return _OR.join(sorted(models - {"Unknown"})) or None


def _torch_version() -> str | None:
    """Of the torch that is imported or installed."""
    with contextlib.suppress(PackageNotFoundError):
        return str(getattr(sys.modules.get("torch"), "__version__", None) or version("torch"))
    return None


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
    """Its version."""


class Difference(NamedTuple):
    """One thing in which two machines differ."""

    sentence: str
    """With both values, the tuned machine's first."""
    matters: bool
    """Whether the configuration may be slow or fail here; False is worth knowing only."""

    def __str__(self) -> str:
        return f"{'!' if self.matters else '~'} {self.sentence}"


def differences(tuned: Fingerprint, here: Fingerprint) -> list[Difference]:
    """Where `here` differs from the machine that was `tuned` on, those that matter first; the unknown is no difference."""
    found = []
    for name, (what, worse, better) in COMPARED.items():
        before, now = getattr(tuned, name), getattr(here, name)
        if before in (None, "") or now in (None, "") or _is_alike(name, before, now):
            continue
        matters = name != "torch" and (isinstance(now, str) or now < before)
        effect = worse if matters else better
        text = bytes_text if name.endswith("_bytes") else str
        sentence = f"{what}: {text(before)} when tuned, {text(now)} here" + (f"; {effect}" if effect else "")
        found.append(Difference(sentence, matters))
    return sorted(found, key=lambda each: not each.matters)


def _is_alike(name: str, before: Any, now: Any) -> bool:
    if name.endswith("_bytes"):
        return bool(abs(now - before) <= ALIKE * before)
    if name == "gpu":  # the driver's name has no part of a GPU, such as " MIG 1g.10gb"
        return any(before == each or before.startswith(f"{each} MIG ") for each in now.split(_OR))
    if name == "torch":  # a wheel's own version may lack "+cu124"
        return bool(before.partition("+")[0] == now.partition("+")[0])
    return bool(before == now)
