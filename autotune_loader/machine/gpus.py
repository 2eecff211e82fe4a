"""NVIDIA GPUs through NVML: which one CUDA means by an ordinal, and what it is doing.

NVML counts devices in PCI order and does not know `CUDA_VISIBLE_DEVICES`; CUDA by default puts the fastest first. So a
device is matched by its UUID where CUDA's list is given, and by the mask where it is not. Any NVML call may be
unsupported (MIG, WSL2, Jetson): then that value is None and the reason is kept. Without a driver there is one reason
for everything.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune_loader.machine.ordinals import PhysicalGpu, match_uuids, visible_uuids

logger = logging.getLogger(__name__)
# NVML's constants, so that a stand-in needs none.
GPU_UTILIZATION_SAMPLES, COMPUTEMODE_EXCLUSIVE_PROCESS = 1, 3


def _since_boot() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


STAMP_CLOCKS: tuple[Callable[[], float], ...] = (time.time, _since_boot)
"""Drivers differ in the clock of their samples' stamps: seconds since 1970 or since the machine was booted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One device as CUDA counts it."""

    cuda_index: int
    """Ordinal in this process, as in `cuda:0`."""
    uuid: str
    """As NVML writes it, `GPU-...` or `MIG-...`."""
    name: str
    memory_bytes: int | None
    """Memory of the device; None when NVML does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """What one device was doing; a value that is None has its reason in `reasons`."""

    util: float | None = None
    """Share of NVML's last period (1/6 to 1 s) in which any kernel ran, 0 to 1."""
    memory_bytes: int | None = None
    """Memory in use, by anyone."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a value is missing, by field."""


class Gpus:
    """The GPUs of this process; touches NVML at the first question and never raises for what NVML cannot do.

    Args:
        nvml: The module `pynvml`, or a stand-in such as `testing.FakeGpus`; imported when needed if None.
        cuda_uuids: UUIDs in CUDA's order (`str(torch.cuda.get_device_properties(i).uuid)`), where CUDA is up already.
        environ: Where `CUDA_VISIBLE_DEVICES` is looked up.
    """

    def __init__(
        self, nvml: Any = None, *, cuda_uuids: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._nvml = nvml
        self._cuda_uuids = cuda_uuids
        self._environ = environ
        self._started_in: int | None = None
        self._reason: str | None = None
        self._devices: tuple[GpuDevice, ...] | None = None

    @property
    def reason(self) -> str | None:
        """Why NVML tells nothing at all; None when it does."""
        self._start()
        return self._reason

    @property
    def driver(self) -> str | None:
        """Version of the driver; None without one."""
        version: str | None = self._ask("nvmlSystemGetDriverVersion", _text)[0]
        return version

    def devices(self) -> tuple[GpuDevice, ...]:
        """The devices that CUDA can see, in CUDA's order; empty without a driver."""
        if self._devices is None:
            physical = self._physical()
            if self._cuda_uuids is not None:
                uuids = match_uuids(self._cuda_uuids, physical)
            else:
                mask = self._environ.get("CUDA_VISIBLE_DEVICES")
                uuids = dict(enumerate(visible_uuids(mask, physical)))
            self._devices = tuple(self._device(index, uuid) for index, uuid in uuids.items())
        return self._devices

    def sample(self, device: GpuDevice) -> GpuSample:
        """What one of `devices()` is doing now."""
        handle, lost = self._ask("nvmlDeviceGetHandleByUUID", None, device.uuid)
        if lost is not None:
            return GpuSample(reasons={"util": lost, "memory_bytes": lost})
        util, no_util = self._ask("nvmlDeviceGetUtilizationRates", lambda rates: rates.gpu / 100, handle)
        memory, no_memory = self._ask("nvmlDeviceGetMemoryInfo", lambda memory: int(memory.used), handle)
        reasons = {"util": no_util, "memory_bytes": no_memory}
        return GpuSample(
            util=util, memory_bytes=memory, reasons={name: why for name, why in reasons.items() if why is not None}
        )

    def recent_use(self, device: GpuDevice) -> list[tuple[float, float]]:
        """NVML's own samples of one of `devices()`: how many seconds ago each was taken, and the share of the time since the
        one before in which any kernel ran. Oldest first; empty where NVML keeps none, as of a GPU that is idle.
        """
        handle = self._ask("nvmlDeviceGetHandleByUUID", None, device.uuid)[0]
        answer = self._ask("nvmlDeviceGetSamples", None, handle, GPU_UTILIZATION_SAMPLES, 0)[0]
        samples = sorted((each.timeStamp / 1e6, each.sampleValue.uiVal / 100) for each in (answer or (0, ()))[1])
        if not samples:
            return []
        newest = samples[-1][0]
        now = min((clock() for clock in STAMP_CLOCKS), key=lambda now: abs(now - newest))
        return [(now - moment, share) for moment, share in samples]

    def is_exclusive(self, device: GpuDevice) -> bool:
        """Whether one process at a time may use one of `devices()` (nvidia-smi -c EXCLUSIVE_PROCESS)."""
        handle = self._ask("nvmlDeviceGetHandleByUUID", None, device.uuid)[0]
        return bool(self._ask("nvmlDeviceGetComputeMode", None, handle)[0] == COMPUTEMODE_EXCLUSIVE_PROCESS)

    def close(self) -> None:
        """Release NVML; the next question starts it again."""
        if self._started_in == os.getpid() and self._reason is None:
            self._call("nvmlShutdown")
        self._started_in = None

    def _device(self, index: int, uuid: str) -> GpuDevice:
        handle = self._ask("nvmlDeviceGetHandleByUUID", None, uuid)[0]
        return GpuDevice(
            cuda_index=index,
            uuid=uuid,
            name=self._ask("nvmlDeviceGetName", _text, handle)[0] or "unknown GPU",
            memory_bytes=self._ask("nvmlDeviceGetMemoryInfo", lambda memory: int(memory.total), handle)[0],
        )

    def _physical(self) -> list[PhysicalGpu]:
        found = []
        for index in range(self._ask("nvmlDeviceGetCount", None)[0] or 0):
            handle, _ = self._ask("nvmlDeviceGetHandleByIndex", None, index)
            uuid, _ = self._ask("nvmlDeviceGetUUID", _text, handle)
            # A lost GPU keeps its place: the ordinals of the others must not shift.
            found.append(PhysicalGpu(uuid=uuid or f"GPU-unknown-{index}", migs=self._migs(handle)))
        return found

    def _migs(self, handle: Any) -> tuple[str, ...]:
        uuids = []
        for index in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", None, handle)[0] or 0):
            mig, reason = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", None, handle, index)
            uuid = None if reason else self._ask("nvmlDeviceGetUUID", _text, mig)[0]
            if uuid:
                uuids.append(uuid)
        return tuple(uuids)

    def _ask(self, function: str, read: Callable[[Any], Any] | None, *args: Any) -> tuple[Any, str | None]:
        """The answer of one NVML call, or None and why there is none."""
        self._start()
        if self._reason is not None:
            return None, self._reason
        answer, reason = self._call(function, *args)
        return (answer if read is None or reason else read(answer)), reason

    def _call(self, function: str, *args: Any) -> tuple[Any, str | None]:
        try:
            return getattr(self._nvml, function)(*args), None
        except self._nvml.NVMLError as error:
            return None, f"{function}: {error}"
        except AttributeError:
            return None, f"{function}: this pynvml does not have it"

    def _start(self) -> None:
        """Load NVML once for each process: a forked child cannot use its parent's handles."""
        if self._started_in == os.getpid():
            return
        self._started_in = os.getpid()
        self._devices = None
        self._reason = self._import() or self._call("nvmlInit")[1]
        if self._reason is not None:
            logger.debug("No GPU figures: %s", self._reason)

    def _import(self) -> str | None:
        if self._nvml is None:
            try:
                import pynvml
            except ImportError as error:
                return f"nvidia-ml-py is not installed ({error})"
            self._nvml = pynvml
        return None


def _text(value: str | bytes) -> str:
    """Old bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
