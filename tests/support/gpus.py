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
    """One GPU, or one MIG instance, of a `FakeGpus`."""

    uuid: str
    name: str = "Fake GPU"
    memory_bytes: int = 16 << 30
    samples: Callable[[], Sequence[tuple[float, int]]] = tuple
    """NVML's own samples of the moment: stamps in seconds, and percent."""
    migs: tuple[FakeGpu, ...] = ()
    unsupported: frozenset[str] = frozenset()
    """NVML functions that this device refuses."""


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


def _samples(nvml: FakeGpus, gpu: FakeGpu, kind: int, since_us: int) -> tuple[int, list[SimpleNamespace]]:
    stamped = [(int(moment * 1e6), SimpleNamespace(uiVal=percent)) for moment, percent in gpu.samples()]
    found = [SimpleNamespace(timeStamp=at, sampleValue=value) for at, value in stamped if at > since_us]
    return kind, [_found(found, 0), *found[1:]]


def _found(things: Sequence[Any], index: int) -> Any:
    if index >= len(things):
        raise NVMLError("Not Found")
    return things[index]


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": _init,
    "nvmlSystemGetDriverVersion": lambda nvml: "570.00",
    "nvmlDeviceGetCount": lambda nvml: len(nvml.gpus),
    "nvmlDeviceGetHandleByIndex": lambda nvml, index: nvml.gpus[index],
    "nvmlDeviceGetHandleByUUID": lambda nvml, uuid: _found(
        [gpu for whole in nvml.gpus for gpu in (whole, *whole.migs) if gpu.uuid == uuid], 0
    ),
    "nvmlDeviceGetUUID": lambda nvml, gpu: gpu.uuid,
    "nvmlDeviceGetName": lambda nvml, gpu: gpu.name,
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda nvml, gpu, index: _found(gpu.migs, index),
    "nvmlDeviceGetMemoryInfo": lambda nvml, gpu: SimpleNamespace(total=gpu.memory_bytes),
    "nvmlDeviceGetSamples": _samples,
}


def _function(name: str) -> Callable[..., Any]:
    def function(nvml: FakeGpus, *arguments: Any) -> Any:
        nvml.calls.append(name)
        refusals = [nvml.unsupported, *(each.unsupported for each in arguments if isinstance(each, FakeGpu))]
        if any(name in each for each in refusals):
            raise NVMLError("Not Supported")
        return ANSWERS[name](nvml, *arguments)

    return function


for name in ANSWERS:
    setattr(FakeGpus, name, _function(name))
