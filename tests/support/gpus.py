"""A stand-in for NVML: GPUs as a test describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """NVML's base error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """One GPU of a `FakeGpus`."""

    uuid: str
    name: str = "Fake GPU"
    memory_bytes: int = 16 << 30


class FakeGpus:
    """Stands in for the module `pynvml`: the same function names and error, over GPUs that a test describes."""

    NVMLError = NVMLError

    def __init__(
        self, gpus: Sequence[FakeGpu] = (), *, has_driver: bool = True, unsupported: Sequence[str] = ()
    ) -> None:
        self.gpus, self.has_driver = tuple(gpus), has_driver
        self.unsupported = frozenset(unsupported)
        """Functions that no device answers."""
        self.calls: list[str] = []
        """Names of the functions called, in order."""


def _init(nvml: FakeGpus) -> None:
    if not nvml.has_driver:
        raise NVMLError("NVML Shared Library Not Found")


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": _init,
    "nvmlDeviceGetCount": lambda nvml: len(nvml.gpus),
    "nvmlDeviceGetHandleByIndex": lambda nvml, index: nvml.gpus[index],
    "nvmlDeviceGetUUID": lambda nvml, gpu: gpu.uuid,
    "nvmlDeviceGetName": lambda nvml, gpu: gpu.name,
    "nvmlDeviceGetMemoryInfo": lambda nvml, gpu: SimpleNamespace(total=gpu.memory_bytes),
}


def _function(name: str) -> Callable[..., Any]:
    def function(nvml: FakeGpus, *arguments: Any) -> Any:
        nvml.calls.append(name)
        if name in nvml.unsupported:
            raise NVMLError("Not Supported")
        return ANSWERS[name](nvml, *arguments)

    return function


for name in ANSWERS:
    setattr(FakeGpus, name, _function(name))
