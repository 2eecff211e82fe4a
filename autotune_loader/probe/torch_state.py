"""What the caller has set in torch for the whole process: read there, set in the probe, put back where a burst ran inline.

A burst that multiplied in full precision, or without the caller's autocast, would time another training.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Value: TypeAlias = "bool | int | str"
TorchState: TypeAlias = "dict[str, Value]"
"""Values by the names a user knows them by; what cannot be read here is left out."""
DETERMINISTIC = ("off", "warn", "on")


@dataclass(frozen=True, slots=True)
class _Setting:
    """One global setting."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    default: Value
    """What a fresh process has, at least where nothing in the environment says otherwise."""


def read_torch_state() -> TorchState:
    """The settings of this process."""
    return {name: value for name, setting in _settings().items() if (value := _read(setting)) is not None}


def set_torch_state(state: Mapping[str, Value]) -> None:
    """Set what differs; what this torch, or this machine, does not know stays as it is."""
    if "cv2.threads" in state:
        with contextlib.suppress(ImportError):
            importlib.import_module("cv2")  # the caller has it imported; only then is there such a setting
    settings = _settings()
    for name, value in state.items():
        if name in settings and _read(settings[name]) != value:
            try:
                settings[name].write(value)
            except (RuntimeError, ValueError):  # an older name of a setting that was given by its newer one
                continue


def note_of(state: Mapping[str, Value]) -> list[str]:
    """What differs from a fresh process, as a note for the result; nothing where nothing does."""
    settings = _settings()
    changed = [f"{name}={value}" for name, value in state.items() if value != settings[name].default]
    return [f"the bursts train with what this process has set: {', '.join(changed)}"] if changed else []


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except (RuntimeError, AttributeError):  # torch refuses the older name of a setting that was given by its newer one
        return None


def _settings() -> dict[str, _Setting]:
    sharing = torch.multiprocessing
    settings = {
        "float32_matmul_precision": _Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"
        ),
        "deterministic_algorithms": _Setting(
            lambda: DETERMINISTIC[torch.get_deterministic_debug_mode()],
            lambda mode: torch.set_deterministic_debug_mode(DETERMINISTIC.index(mode)),
            "off",
        ),
        "default_device": _Setting(lambda: str(torch.get_default_device()), torch.set_default_device, "cpu"),
        "default_dtype": _Setting(
            lambda: _name(torch.get_default_dtype()),
            lambda name: torch.set_default_dtype(getattr(torch, name)),
            "float32",
        ),
        "sharing_strategy": _Setting(
            sharing.get_sharing_strategy, sharing.set_sharing_strategy, _default_sharing_strategy()
        ),
        "cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark", False),
        "cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic", False),
        "cudnn.enabled": _attribute(torch.backends.cudnn, "enabled", True),
        "cudnn.allow_tf32": _attribute(torch.backends.cudnn, "allow_tf32", True),
        "cuda.matmul.allow_tf32": _attribute(torch.backends.cuda.matmul, "allow_tf32", False),
        # Since torch 2.9; a setting that was given by this name cannot be read by the older ones.
        "cuda.matmul.fp32_precision": _attribute(torch.backends.cuda.matmul, "fp32_precision", "none"),
    }
    for device in ("cpu", "cuda"):
        settings[f"autocast.{device}"] = _autocast(device)
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        is_on = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled", None)
        if is_on is not None:
            settings[f"{kernel}_sdp"] = _Setting(is_on, getattr(torch.backends.cuda, f"enable_{kernel}_sdp"), True)
    cv2 = sys.modules.get("cv2")  # OpenCV makes threads of its own, in the main process and in every worker
    if cv2 is not None and hasattr(cv2, "setNumThreads"):
        settings["cv2.threads"] = _Setting(cv2.getNumThreads, cv2.setNumThreads, cv2.getNumberOfCPUs())
    return settings


def _attribute(owner: Any, name: str, default: Value) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value), default)


def _autocast(device: str) -> _Setting:
    def read() -> str:
        return _name(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"

    def write(name: str) -> None:
        torch.set_autocast_enabled(device, name != "off")
        if name != "off":
            torch.set_autocast_dtype(device, getattr(torch, name))

    return _Setting(read, write, "off")


def _default_sharing_strategy() -> str:
    has_descriptors = "file_descriptor" in torch.multiprocessing.get_all_sharing_strategies()
    return "file_descriptor" if has_descriptors else "file_system"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
