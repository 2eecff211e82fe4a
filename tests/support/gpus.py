"""A stand-in for NVML: GPUs as a test describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """NVML's base error."""


class NotSupported(NVMLError):  # noqa: N818 - as in pynvml
    """NVML's answer where a device cannot do what is asked."""


class LibraryNotFound(NVMLError):  # noqa: N818
    """NVML's answer where there is no driver."""


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
    """Stands in for the module `pynvml`: the same function names and errors, over GPUs that a test describes.

    Args:
        gpus: In NVML's order.
        has_driver: False makes `nvmlInit` fail as it does on a machine without a driver.
        unsupported: NVML functions that no device answers.
    """

    NVMLError = NVMLError
    NVMLError_NotSupported = NotSupported
    NVMLError_LibraryNotFound = LibraryNotFound

    def __init__(
        self, gpus: Sequence[FakeGpu] = (), *, has_driver: bool = True, unsupported: Sequence[str] = ()
    ) -> None:
        self.gpus = tuple(gpus)
        self.calls: list[str] = []
        """Names of the functions called, in order."""
        self._has_driver, self._unsupported = has_driver, frozenset(unsupported)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def function(*arguments: Any) -> Any:
            self.calls.append(name)
            device = arguments[0] if arguments and isinstance(arguments[0], FakeGpu) else None
            if name in self._unsupported or (device is not None and name in device.unsupported):
                raise NotSupported("Not Supported")
            return ANSWERS[name](self, *arguments)

        return function

    def _init(self) -> None:
        if not self._has_driver:
            raise LibraryNotFound("NVML Shared Library Not Found")

    def _by_uuid(self, uuid: str) -> FakeGpu:
        everything = (*self.gpus, *(mig for whole in self.gpus for mig in whole.migs))
        return _found([gpu for gpu in everything if gpu.uuid == uuid], 0)

    def _samples(self, gpu: FakeGpu, kind: int, since_us: int) -> tuple[int, list[SimpleNamespace]]:
        if kind != 1:
            raise NotSupported("Not Supported")
        stamped = [(int(moment * 1e6), SimpleNamespace(uiVal=percent)) for moment, percent in gpu.samples()]
        _found(stamped, 0)
        return 1, [SimpleNamespace(timeStamp=at, sampleValue=value) for at, value in stamped if at > since_us]


def _found(things: Sequence[Any], index: int) -> Any:
    if index >= len(things):
        raise NVMLError("Not Found")
    return things[index]


ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlInit": FakeGpus._init,
    "nvmlSystemGetDriverVersion": lambda self: "570.00",
    "nvmlDeviceGetCount": lambda self: len(self.gpus),
    "nvmlDeviceGetHandleByIndex": lambda self, index: self.gpus[index],
    "nvmlDeviceGetHandleByUUID": FakeGpus._by_uuid,
    "nvmlDeviceGetUUID": lambda self, gpu: gpu.uuid,
    "nvmlDeviceGetName": lambda self, gpu: gpu.name,
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda self, gpu, index: _found(gpu.migs, index),
    "nvmlDeviceGetMemoryInfo": lambda self, gpu: SimpleNamespace(total=gpu.memory_bytes),
    "nvmlDeviceGetSamples": FakeGpus._samples,
}
