"""NVIDIA GPUs through NVML: which ones CUDA shows, their names and memory, and the share of time in which they worked.

NVML counts devices in PCI order and does not know `CUDA_VISIBLE_DEVICES`; CUDA by default puts the fastest first. So a
device is found by its UUID where CUDA's list is given, and by the mask where it is not. Any NVML call may be unsupported
(MIG, WSL2, Jetson): then its value is None.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

logger = logging.getLogger(__name__)
# NVML's constants, so that a stand-in needs none.
GPU_UTILIZATION_SAMPLES = 1

COVERED_SHARE = 0.5
"""Of a stretch of time that samples must tell of."""
LONGEST_PERIOD_S = 1.2
"""NVML samples once a second at least; further apart there were none in between, as while a GPU is idle."""


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


class Gpus:
    """The GPUs of this process; touches NVML at the first question and never raises for what NVML cannot do.

    Args:
        nvml: The module `pynvml`, or a stand-in; imported when needed if None.
        cuda_uuids: UUIDs in CUDA's order (`str(torch.cuda.get_device_properties(i).uuid)`), where CUDA is up already.
        environ: Where `CUDA_VISIBLE_DEVICES` is looked up.
    """

    def __init__(
        self, nvml: Any = None, *, cuda_uuids: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
    ) -> None:
        self._nvml, self._cuda_uuids, self._environ = nvml, cuda_uuids, environ
        self._reason: str | None = ""
        """Not asked yet where it is empty."""
        self._devices: tuple[GpuDevice, ...] | None = None

    @property
    def reason(self) -> str | None:
        """Why NVML tells nothing at all; None when it does."""
        if self._reason == "":
            self._reason = self._start()
            if self._reason is not None:
                logger.debug("No GPU figures: %s", self._reason)
        return self._reason

    @property
    def driver(self) -> str | None:
        """Version of the driver; None without one."""
        return _text(self._ask("nvmlSystemGetDriverVersion"))

    def devices(self) -> tuple[GpuDevice, ...]:
        """The devices that CUDA can see, in CUDA's order; empty without a driver."""
        if self._devices is None:
            known = self._cuda_uuids
            # Torch writes UUIDs without the prefix that NVML puts before them.
            handles = (
                self._visible() if known is None else [self._named(f"GPU-{each}", f"MIG-{each}") for each in known]
            )
            self._devices = tuple(self._device(*each) for each in enumerate(handles) if each[1] is not None)
        return self._devices

    def recent_use(self, device: GpuDevice) -> list[tuple[float, float]]:
        """NVML's own samples of one of `devices()`: how many seconds ago each was taken, and the share of the time since the
        one before in which any kernel ran. Oldest first; empty where NVML keeps none, as of a GPU that is idle.
        """
        answer = self._ask("nvmlDeviceGetSamples", self._named(device.uuid), GPU_UTILIZATION_SAMPLES, 0)
        samples = sorted((each.timeStamp / 1e6, each.sampleValue.uiVal / 100) for each in (answer or (0, ()))[1])
        if not samples:
            return []
        now = min((clock() for clock in STAMP_CLOCKS), key=lambda now: abs(now - samples[-1][0]))
        return [(now - moment, share) for moment, share in samples]

    def _visible(self) -> list[Any]:
        """`CUDA_VISIBLE_DEVICES` by index or UUID, up to the first invalid entry; of a split GPU its first part."""
        gpus = [self._ask("nvmlDeviceGetHandleByIndex", index) for index in range(self._ask("nvmlDeviceGetCount") or 0)]
        shown = [self._ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu, 0) or gpu for gpu in gpus]
        mask = self._environ.get("CUDA_VISIBLE_DEVICES")
        if mask is None:
            return shown
        found: list[Any] = []
        for entry in map(str.strip, mask.split(",")):
            if entry.startswith("MIG-"):
                meant = [self._named(entry)]
            elif entry.startswith("GPU-"):  # or the beginning of one
                meant = [
                    part for part, gpu in zip(shown, gpus, strict=True) if (self._uuid(gpu) or "").startswith(entry)
                ]
            else:
                meant = shown[int(entry) :][:1] if entry.isdecimal() else []
            if len(meant) != 1 or meant[0] is None:
                break
            if meant[0] in found:  # as CUDA
                return []
            found += meant
        return found

    def _named(self, *uuids: str) -> Any:
        """The handle of the first UUID that NVML knows."""
        handles = (self._ask("nvmlDeviceGetHandleByUUID", uuid) for uuid in uuids)
        return next((handle for handle in handles if handle is not None), None)

    def _uuid(self, handle: Any) -> str | None:
        return _text(self._ask("nvmlDeviceGetUUID", handle))

    def _device(self, index: int, handle: Any) -> GpuDevice:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return GpuDevice(
            cuda_index=index,
            uuid=self._uuid(handle) or "",
            name=_text(self._ask("nvmlDeviceGetName", handle)) or "unknown GPU",
            memory_bytes=None if memory is None else int(memory.total),
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        """The answer of one NVML call; None where there is none, or one argument is None."""
        if self.reason is not None or None in arguments:
            return None
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):  # or an old pynvml, which does not have it
            return None

    def _start(self) -> str | None:
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
        except ImportError as error:
            return f"nvidia-ml-py is not installed ({error})"
        except self._nvml.NVMLError as error:
            return f"nvmlInit: {error}"
        return None


def use_of_current_device() -> list[tuple[float, float]]:
    """As `Gpus.recent_use`, of the device that CUDA uses; empty where CUDA is not in use, which this does not change."""
    import torch

    if not torch.cuda.is_initialized():
        return []
    gpus = _gpus_of(torch.cuda.current_device())
    return [sample for device in gpus.devices() for sample in gpus.recent_use(device)]


@functools.lru_cache(maxsize=8)  # kept, since NVML counts how often it was started
def _gpus_of(index: int) -> Gpus:
    import torch

    return Gpus(cuda_uuids=[str(torch.cuda.get_device_properties(index).uuid)])


def busy_within(samples: Sequence[tuple[float, float]], start: float, end: float) -> tuple[float, float]:
    """Seconds of a window in which any kernel of anyone ran, and of how many of its seconds samples tell.

    Args:
        samples: times in seconds and shares, each of the time since the one before, oldest first.
        start: of the window, in the same seconds.
        end: of the window.
    """
    busy_s = covered_s = 0.0
    for (before, _), (moment, share) in pairwise(samples):
        inside_s = max(0.0, min(moment, end) - max(before, start)) * (moment - before <= LONGEST_PERIOD_S)
        busy_s, covered_s = busy_s + inside_s * share, covered_s + inside_s
    return busy_s, covered_s


def known_share(busy_s: float, covered_s: float, of_s: float) -> float | None:
    """Share of a stretch of `of_s` seconds in which any kernel ran, 0 to 1; None where samples cover less than half of it."""
    return busy_s / covered_s if covered_s and covered_s >= COVERED_SHARE * of_s else None


def _text(value: str | bytes | None) -> str | None:
    """Old bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
