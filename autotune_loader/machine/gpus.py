"""The NVIDIA GPUs that CUDA shows, by NVML: their names and memory, without opening CUDA."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One device as CUDA counts it."""

    cuda_index: int
    """Ordinal in this process, as in `cuda:0`."""
    name: str
    memory_bytes: int


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
        names = [nvml.nvmlDeviceGetName(gpu) for gpu in shown]
        sizes = [int(nvml.nvmlDeviceGetMemoryInfo(gpu).total) for gpu in shown]
    except nvml.NVMLError as error:  # no driver; or a call that WSL2 or a Jetson does not have
        return (), f"NVML: {error}"
    found = enumerate(zip(names, sizes, strict=True))
    return tuple(GpuDevice(cuda_index=index, name=name, memory_bytes=size) for index, (name, size) in found), None


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
