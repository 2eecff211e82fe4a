"""What a script has set in its process: read there, and set in the process of the bursts, so that they train as it would.

    before anything of the user's is imported     arguments, start method, threads, what is set in torch
    once the workload is unpickled                plain values of modules that differ from those of a fresh import

A fork has all of it anyway. What differs from a fresh process is told.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

Value: TypeAlias = "bool | int | str"
MODES = ("off", "warn", "on")
"""Of deterministic algorithms."""
MOST_ITEMS = 100_000
"""A table of a module with more items is not carried: comparing it takes longer than a burst."""
MOST_TOLD = 6
"""Modules' values that a note names."""
OURS = ("autotune_loader", "torch", "numpy", "cloudpickle", "__main__", "__mp_main__")
"""Modules whose values are not looked at: torch's have a table, and functions of `__main__` bring theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Those of one process. Folder and environment are inherited; the path comes with the command."""

    argv: list[str]
    start_method: str | None
    threads: int
    torch: dict[str, Value]
    modules: dict[str, dict[str, Any]]
    """Plain values by module and name."""

    @classmethod
    def read(cls) -> Settings:
        """The settings of this process."""
        return cls(
            argv=list(sys.argv),
            start_method=multiprocessing.get_start_method(allow_none=True),
            threads=torch.get_num_threads(),
            torch=read_torch(),
            modules=read_modules(),
        )

    def set_process(self) -> list[str]:
        """Make this process as that one was, before anything of the user's is imported; a note of what is set in torch."""
        sys.argv[:] = self.argv
        multiprocessing.set_start_method(self.start_method, force=True)
        torch.set_num_threads(self.threads)
        set_torch(self.torch)
        table = _table()
        changed = [f"{name}={value}" for name, value in self.torch.items() if value != table[name].default]
        return [f"The bursts train with what this process has set: {', '.join(changed)}."] if changed else []

    def set_modules(self) -> list[str]:
        """Set what differs in the modules that were imported meanwhile; a note of it, if there is any."""
        changed = []
        for name, values in self.modules.items():
            module = sys.modules.get(name)
            for key, value in {} if module is None else values.items():
                present = vars(module).get(key)
                if type(present) is not type(value) or present != value:
                    _put(module, key, value)
                    changed.append(f"{name}.{key}={reprlib.repr(value)}")
        more = f" and {len(changed) - MOST_TOLD} more" if len(changed) > MOST_TOLD else ""
        told = ", ".join(changed[:MOST_TOLD])
        return [f"The bursts run with what this process has set in modules: {told}{more}."] if changed else []


# Modules


def read_modules() -> dict[str, dict[str, Any]]:
    """Plain values of the modules of this process: all of the user's, and those in capitals of libraries."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        file = getattr(module, "__file__", None)
        if root in sys.stdlib_module_names or root in OURS or not isinstance(file, str):
            continue
        is_users = "site-packages" not in file and "dist-packages" not in file
        values = {
            key: value
            for key, value in list(vars(module).items())
            if (not key.startswith("__") if is_users else key.isupper() and key[0] != "_")
            and _is_plain(value, MOST_ITEMS)[0]
        }
        if values:
            found[name] = values
    return found


def _is_plain(value: Any, left: int) -> tuple[bool, int]:
    """Whether a value is made of numbers, texts and containers of them only, and how many more items may be looked at."""
    kind, left = type(value), left - 1
    if kind in (bool, int, str, bytes, types.NoneType) or (kind is float and not math.isnan(value)):
        return left >= 0, left
    if kind not in (list, tuple, dict, set, frozenset) or len(value) > left:
        return False, left
    for each in [*value, *value.values()] if kind is dict else value:
        is_plain, left = _is_plain(each, left)
        if not is_plain:
            return False, left
    return True, left


def _put(module: Any, key: str, value: Any) -> None:
    """Set a value; a container in place, since others may have imported it."""
    present = vars(module).get(key)
    if type(present) is type(value) and isinstance(value, (dict, set)):
        present.clear()
        present.update(value)
    elif type(present) is type(value) and isinstance(value, list):
        present[:] = value
    else:
        setattr(module, key, value)


# torch


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    default: Value
    """What a fresh process has, at least where nothing in the environment says otherwise."""


def read_torch() -> dict[str, Value]:
    """What is set in torch, by the names a user knows; what cannot be read here is left out."""
    return {name: value for name, setting in _table().items() if (value := _read(setting)) is not None}


def set_torch(values: Mapping[str, Value]) -> None:
    """Set what differs; what this torch, or this machine, does not know stays as it is."""
    if "cv2.threads" in values:
        with contextlib.suppress(ImportError):
            importlib.import_module("cv2")  # the caller has it imported; only then is there such a setting
    table = _table()
    for name, value in values.items():
        if name in table and _read(table[name]) != value:
            with contextlib.suppress(
                RuntimeError, ValueError
            ):  # an older name of a setting that was given by its newer one
                table[name].write(value)


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except (RuntimeError, AttributeError):  # torch refuses the older name of a setting that was given by its newer one
        return None


def _table() -> dict[str, _Setting]:
    sharing, cudnn, cuda, matmul = (
        torch.multiprocessing,
        torch.backends.cudnn,
        torch.backends.cuda,
        torch.backends.cuda.matmul,
    )
    strategy = "file_descriptor" if "file_descriptor" in sharing.get_all_sharing_strategies() else "file_system"
    mode, set_mode = torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    table = {
        "grad_mode": _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled, True),
        "float32_matmul_precision": _Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"
        ),
        "deterministic_algorithms": _Setting(lambda: MODES[mode()], lambda name: set_mode(MODES.index(name)), MODES[0]),
        "default_device": _Setting(lambda: str(torch.get_default_device()), torch.set_default_device, "cpu"),
        "default_dtype": _Setting(
            lambda: _name(torch.get_default_dtype()),
            lambda name: torch.set_default_dtype(getattr(torch, name)),
            "float32",
        ),
        "sharing_strategy": _Setting(sharing.get_sharing_strategy, sharing.set_sharing_strategy, strategy),
        "cudnn.benchmark": _attribute(cudnn, "benchmark", False),
        "cudnn.deterministic": _attribute(cudnn, "deterministic", False),
        "cudnn.enabled": _attribute(cudnn, "enabled", True),
        "cudnn.allow_tf32": _attribute(cudnn, "allow_tf32", True),
        "cuda.matmul.allow_tf32": _attribute(matmul, "allow_tf32", False),
        # Since torch 2.9; a setting that was given by this name cannot be read by the older ones.
        "cuda.matmul.fp32_precision": _attribute(matmul, "fp32_precision", "none"),
        "autocast.cpu": _autocast("cpu"),
        "autocast.cuda": _autocast("cuda"),
    }
    for kernel in ("flash", "mem_efficient", "math", "cudnn"):
        if (is_on := getattr(cuda, f"{kernel}_sdp_enabled", None)) is not None:
            table[f"{kernel}_sdp"] = _Setting(is_on, getattr(cuda, f"enable_{kernel}_sdp"), True)
    cv2 = sys.modules.get("cv2")  # OpenCV makes threads of its own, in the main process and in every worker
    if cv2 is not None and hasattr(cv2, "setNumThreads"):
        table["cv2.threads"] = _Setting(cv2.getNumThreads, cv2.setNumThreads, cv2.getNumberOfCPUs())
    return table


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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
