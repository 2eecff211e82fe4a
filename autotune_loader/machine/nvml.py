"""How busy a GPU is as NVML tells it, and `nvidia-smi`: the whole device, everybody's work. Nothing else imports `pynvml`.

NVML's samples  ─ ─ ─│─ ─ ─ ─ ─│█████████│█████████│█████████│─ ─ ─ ─ ─│    each the mean of 1/6 to 1 s
window                   │────────────────────────────────────────│         before it the device had no steps
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import torch

SAMPLE_S = 0.1  # so often a window is looked at: for its memory, and for NVML's latest mean where NVML keeps no samples
LONGEST_MEAN_S = 1.0  # a mean that is read so long after a window has opened is of that window alone


class GpuUse(NamedTuple):
    utilization: float | None = None  # mean share of the time, 0 to 1, in which any kernel ran
    used_bytes: int | None = None  # the most at a time


class GpuMeter:
    """Reads the GPU that torch calls `device`, and opens CUDA for it; `why_none` says why NVML tells nothing, or is empty."""

    def __init__(self, device: str | torch.device) -> None:
        self._device, self.ended, self.why_none = None, threading.Event(), ""
        self._seen = list[tuple[float, Any, Any]]()
        try:
            properties = torch.get_device_module(device).get_device_properties(device)
            if uuid := getattr(properties, "uuid", None):  # others are not NVIDIA's, and nobody misses anything
                import pynvml

                pynvml.nvmlInit()
                self._nvml, self._device = pynvml, _device_of(pynvml, uuid)
                self.now()
        except Exception as error:  # whatever it is, it is no reason to end a burst
            why = f"{error}. Try pip install nvidia-ml-py." if isinstance(error, ImportError) else error
            self._device, self.why_none = None, f"NVML does not tell the utilization of {device}: {why}."

    def now(self) -> GpuUse:
        """NVML's latest mean, and the memory in use."""
        if self._device is None:
            return GpuUse()
        utilization, used_bytes = self._nvml.nvmlDeviceGetUtilizationRates(self._device).gpu / 100, None
        with suppress(self._nvml.NVMLError_NotSupported):  # where CPU and GPU share their memory
            used_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)
        return GpuUse(utilization, used_bytes)

    def begin(self) -> None:
        """From now on a thread looks at the device, until `end`, or until `ended` is set."""
        self.ended.set()
        seen, ended = self._seen, self.ended = list[tuple[float, Any, Any]](), threading.Event()

        def look() -> None:
            due = time.monotonic()
            while self._device is not None and not ended.wait(max(0.0, due - time.monotonic())):
                with suppress(self._nvml.NVMLError):  # this time it does not tell
                    seen.append((time.monotonic(), *self.now()))
                due = max(due + SAMPLE_S, time.monotonic())

        threading.Thread(target=look, daemon=True).start()

    def end(self, start: float, end: float) -> GpuUse:
        """What the device did between two moments of `time.monotonic`; without `begin`, by NVML's samples alone."""
        self.ended.set()
        if self._device is None:
            return GpuUse()
        shares = [share for at, share, _ in self._seen if start + LONGEST_MEAN_S <= at <= end]
        with suppress(self._nvml.NVMLError):  # it keeps no samples, or has none yet
            to_wall_s, kind = time.time() - time.monotonic(), self._nvml.NVML_GPU_UTILIZATION_SAMPLES
            _, found = self._nvml.nvmlDeviceGetSamples(self._device, kind, int((start + to_wall_s) * 1e6))
            told = sorted((each.timeStamp / 1e6 - to_wall_s, each.sampleValue.uiVal / 100) for each in found)
            shares = [share for at, share in told[1:] if at <= end] or shares  # the first has begun before the window
        used_bytes = max((used for at, _, used in self._seen if at <= end and used is not None), default=None)
        return GpuUse(sum(shares) / len(shares) if shares else None, used_bytes)


def _device_of(nvml: Any, uuid: object) -> Any:
    """The device with a UUID as CUDA has it, which counts only visible devices, and in another order than NVML."""
    for kind in ("GPU", "MIG"):
        with suppress(nvml.NVMLError_NotFound, nvml.NVMLError_InvalidArgument):
            device = nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
            with suppress(nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):  # older devices and drivers
                if kind == "MIG" or nvml.nvmlDeviceGetMigMode(device)[0]:
                    raise RuntimeError("it tells none of MIG instances")
            return device
    raise LookupError(f"it has no device GPU-{uuid}")
