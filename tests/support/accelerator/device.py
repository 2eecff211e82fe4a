"""`torch.sim`: the names of `torch.cuda` that torch and this package ask for.

This file is copied beside the compiled `simulated.so`, and torch loads it as an out-of-tree
backend (`__init__.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_settings: dict[str, Any] = {
    "bytes_per_s": 12e9,
    "pageable_slower": 2.0,
    "memory_bytes": 8 << 30,
    "devices": 1,
    "pinning_s": 0.0,
}
torch.ops.load_library(Path(__file__).with_name("simulated.so"))
_ops: Any = torch.ops.sim
Stream = torch.Stream
fail = _ops.fail
"""Has a kernel fail: from now on every call of the device raises in this process."""
hazards = _ops.hazards
"""What CUDA would have read or overwritten too early: a wait is missing."""
empty_cache, is_initialized, _is_in_bad_fork = _ops.empty_cache, _ops.is_used, _ops.is_in_bad_fork


def register() -> None:
    """Make "sim" a device of torch in this process, as `SIMULATED` in its environment says."""
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    configure(**json.loads(os.environ.get("SIMULATED", "{}")))


def configure(**settings: float) -> None:
    """Set what the hardware is, here and in processes that this one starts.

    Args:
        settings: Of copies `bytes_per_s` from pinned memory, and the factor `pageable_slower` from
            other memory; `memory_bytes` of each of so many `devices`; `pinning_s` that it takes to
            pin memory which none before had.
    """
    if unknown := settings.keys() - _settings:
        raise TypeError(f"unknown settings: {sorted(unknown)}; known are {sorted(_settings)}")
    _settings.update(settings)
    _ops.configure(*_settings.values())
    os.environ["SIMULATED"] = json.dumps(_settings)


def work(seconds: float, *reads: torch.Tensor) -> None:
    """Launch a kernel on the current stream that reads these tensors until its end."""
    _ops.work(seconds, reads)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:  # noqa: N802 - as torch.cuda has it
    return torch.Event("sim", enable_timing=enable_timing, blocking=blocking)


@contextlib.contextmanager
def stream(stream: torch.Stream) -> Iterator[None]:
    device, before = current_device(), current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_device(device: Any) -> None:
    _ops.use()
    torch.accelerator.set_device_index(_index(device))


def current_device() -> int:
    return torch.accelerator.current_device_index()


def device_count() -> int:
    return _settings["devices"]  # torch.accelerator asks here, too


def synchronize(device: Any = None) -> None:
    _ops.synchronize(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return _ops.memory(_index(device))[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    _ops.reset_peak(_index(device))


def memory_reserved(device: Any = None) -> int:
    return _ops.memory(_index(device))[2]


def mem_get_info(device: Any = None) -> tuple[int, int]:
    _, _, reserved, total = _ops.memory(_index(device))
    return total - reserved, total


def get_device_name(device: Any = None) -> str:
    return "Simulated accelerator"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    """With `SIMULATED_NVML`, a path and a UUID, NVML is that library, and knows the device."""
    found = SimpleNamespace(name=get_device_name(device), total_memory=mem_get_info(device)[1])
    if "SIMULATED_NVML" in os.environ:
        library, found.uuid = os.environ["SIMULATED_NVML"].split()
        ctypes.CDLL(library)
    return found


def is_available() -> bool:
    return True


def manual_seed_all(seed: int) -> None:
    """Random numbers of the device are the CPU's."""


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device("sim" if device is None else device).index
    return current_device() if index is None else index
