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
    """Stands in for the module `pynvml`: the same function names and error, over GPUs that a test describes.

    Args:
        gpus: what there is.
        has_driver: whether NVML can be opened.
        unsupported: functions that no device answers.
    """

    NVMLError = NVMLError

    def __init__(
        self, gpus: Sequence[FakeGpu] = (), *, has_driver: bool = True, unsupported: Sequence[str] = ()
    ) -> None:
        self.gpus, self.has_driver, self.unsupported = tuple(gpus), has_driver, frozenset(unsupported)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in ANSWERS:
            raise AttributeError(name)
        if name in self.unsupported:
            return lambda *_: _refuse("Not Supported")
        return lambda *arguments: ANSWERS[name](self, *arguments)


def _refuse(message: str) -> None:
    raise NVMLError(message)


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda nvml: None if nvml.has_driver else _refuse("NVML Shared Library Not Found"),
    "nvmlDeviceGetCount": lambda nvml: len(nvml.gpus),
    "nvmlDeviceGetHandleByIndex": lambda nvml, index: nvml.gpus[index],
    "nvmlDeviceGetUUID": lambda nvml, gpu: gpu.uuid,
    "nvmlDeviceGetName": lambda nvml, gpu: gpu.name,
    "nvmlDeviceGetMemoryInfo": lambda nvml, gpu: SimpleNamespace(total=gpu.memory_bytes),
}
