"""A stand-in for NVML: GPUs as a test describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace


class NVMLError(Exception):
    """NVML's base error, as `FakeGpus` raises it."""


class NVMLErrorNotSupported(NVMLError):  # noqa: N818 - as in pynvml
    """NVML's answer where a device cannot do what is asked."""

    def __init__(self) -> None:
        super().__init__("Not Supported")


class NVMLErrorLibraryNotFound(NVMLError):  # noqa: N818
    """NVML's answer where there is no driver."""

    def __init__(self) -> None:
        super().__init__("NVML Shared Library Not Found")


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
    NVMLError_NotSupported = NVMLErrorNotSupported
    NVMLError_LibraryNotFound = NVMLErrorLibraryNotFound

    def __init__(
        self, gpus: Sequence[FakeGpu] = (), *, has_driver: bool = True, unsupported: Sequence[str] = ()
    ) -> None:
        self.gpus = tuple(gpus)
        self.calls: list[str] = []
        """Names of the functions called, in order."""
        self._has_driver = has_driver
        self._unsupported = frozenset(unsupported)

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        self.calls.append("nvmlInit")
        if not self._has_driver:
            raise NVMLErrorLibraryNotFound

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        self._check("nvmlSystemGetDriverVersion")
        return "570.00"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._check("nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        self._check("nvmlDeviceGetHandleByIndex")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:  # noqa: N802
        self._check("nvmlDeviceGetHandleByUUID")
        for gpu in (*self.gpus, *(mig for whole in self.gpus for mig in whole.migs)):
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError("Not Found")

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:  # noqa: N802
        self._check("nvmlDeviceGetUUID", gpu)
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:  # noqa: N802
        self._check("nvmlDeviceGetName", gpu)
        return gpu.name

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeGpu:  # noqa: N802
        self._check("nvmlDeviceGetMigDeviceHandleByIndex", gpu)
        if index >= len(gpu.migs):
            raise NVMLError("Not Found")
        return gpu.migs[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:  # noqa: N802
        self._check("nvmlDeviceGetMemoryInfo", gpu)
        return SimpleNamespace(total=gpu.memory_bytes)

    def nvmlDeviceGetSamples(  # noqa: N802
        self, gpu: FakeGpu, kind: int, since_us: int
    ) -> tuple[int, list[SimpleNamespace]]:
        self._check("nvmlDeviceGetSamples", gpu)
        if kind != 1:
            raise NVMLErrorNotSupported
        stamped = [(int(moment * 1e6), percent) for moment, percent in gpu.samples()]
        if not stamped:
            raise NVMLError("Not Found")
        return 1, [
            SimpleNamespace(timeStamp=stamp, sampleValue=SimpleNamespace(uiVal=percent))
            for stamp, percent in stamped
            if stamp > since_us
        ]

    def _check(self, function: str, gpu: FakeGpu | None = None) -> None:
        self.calls.append(function)
        if function in self._unsupported or (gpu is not None and function in gpu.unsupported):
            raise NVMLErrorNotSupported
