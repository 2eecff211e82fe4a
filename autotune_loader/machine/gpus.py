"""NVIDIA GPUs through NVML: which ones CUDA shows, their names and memory, without opening CUDA.

NVML counts devices in PCI order and does not know `CUDA_VISIBLE_DEVICES`. Any of its calls may be unsupported (WSL2, Jetson):
then its value is None.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDevice:
    """One device as CUDA counts it."""

    cuda_index: int
    """Ordinal in this process, as in `cuda:0`."""
    name: str
    memory_bytes: int | None
    """Memory of the device; None when NVML does not tell."""


class Gpus:
    """The GPUs of this process; touches NVML at the first question and never raises for what NVML cannot do.

    Args:
        nvml: The module `pynvml`, or a stand-in; imported when needed if None.
        environ: Where `CUDA_VISIBLE_DEVICES` is looked up.
    """

    def __init__(self, nvml: Any = None, *, environ: Mapping[str, str] = os.environ) -> None:
        self._nvml, self._environ = nvml, environ
        self._reason: str | None = ""
        """Not asked yet where it is empty."""

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
        """The devices that CUDA can see, in its order; empty without a driver."""
        gpus = [self._ask("nvmlDeviceGetHandleByIndex", index) for index in range(self._ask("nvmlDeviceGetCount") or 0)]
        mask = self._environ.get("CUDA_VISIBLE_DEVICES")
        return tuple(self._device(*each) for each in enumerate(gpus if mask is None else self._shown(gpus, mask)))

    def _shown(self, gpus: list[Any], mask: str) -> list[Any]:
        """By index or by the beginning of a UUID, up to the first entry that means no device, as CUDA does it."""
        shown: list[Any] = []
        for entry in map(str.strip, mask.split(",")):
            if entry.isdecimal():
                meant = gpus[int(entry) :][:1]
            else:
                uuids = [_text(self._ask("nvmlDeviceGetUUID", gpu)) or "" for gpu in gpus]
                meant = [gpu for gpu, uuid in zip(gpus, uuids, strict=True) if entry and uuid.startswith(entry)]
            if len(meant) != 1:
                break
            shown += meant
        return shown

    def _device(self, index: int, handle: Any) -> GpuDevice:
        memory = self._ask("nvmlDeviceGetMemoryInfo", handle)
        return GpuDevice(
            cuda_index=index,
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


def _text(value: str | bytes | None) -> str | None:
    """Old bindings answer in bytes."""
    return value.decode() if isinstance(value, bytes) else value
