"""What a script has set in its process: read there, and set in the fresh process of the bursts, so that they train alike.

Before anything of the user's is imported: arguments, start method, threads, what is set in torch. Once the workload is
unpickled: plain values of modules that differ from those of a fresh import, and functions that the script has put there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import multiprocessing
import operator
import reprlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import torch

from autotune_loader.bursts.step import AUTOCAST
from autotune_loader.pipeline.workload import Workload, is_users, wrapped_datasets

MAIN = ("__main__", "__mp_main__")
NOT_PATCHED = {*sys.stdlib_module_names, "autotune_loader", *MAIN}
"""Modules whose functions are not looked at: what the script has put there, such as `sys.excepthook`, is for itself."""
MOST_ITEMS, DEEPEST = 10_000, 4
"""A container that is larger, or nested deeper, is not carried: comparing it takes longer than a burst."""
MOST_TOLD = 6
"""Names in a note."""
NOT_READ = {*NOT_PATCHED, "torch", "numpy", "cloudpickle"}
"""Modules whose values are not looked at: torch's have a table, and functions of `__main__` bring theirs."""
PLAIN = (bool, int, float, str, bytes, types.NoneType)
BACKENDS = (
    *("cudnn.benchmark", "cudnn.deterministic", "cudnn.enabled", "cudnn.allow_tf32", "cuda.matmul.allow_tf32"),
    *("cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_fp16_reduced_precision_reduction"),
    "cuda.matmul.fp32_precision",
)
"""Attributes of `torch.backends`; the last since torch 2.9."""
ATTENTION = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")
"""Kernels that attention may take: `torch.backends.cuda.enable_flash_sdp(False)`."""
_Setting: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], Any]]"  # how it is read and how it is written


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Those of one process. Folder and environment are inherited; the path comes with the command."""

    argv: list[str]
    start_method: str | None
    threads: int
    torch: dict[str, Any]
    modules: dict[str, dict[str, Any]]
    """Plain values by module and name."""
    patches: dict[str, bytes]
    """Functions that the script has put there, pickled, by place (`module:Class.method`); empty where they cannot be."""

    @classmethod
    def read(cls, workload: Workload) -> Settings:
        return cls(
            argv=list(sys.argv),
            start_method=multiprocessing.get_start_method(allow_none=True),
            threads=torch.get_num_threads(),
            torch=read_torch(),
            modules=read_modules(),
            patches={place: _pickled(function) for place, function in read_patches(workload)},
        )

    def set_process(self) -> list[str]:
        """Make this process as that one was, before anything of the user's is imported; a note of what differs in torch."""
        sys.argv[:] = self.argv
        multiprocessing.set_start_method(self.start_method, force=True)
        torch.set_num_threads(self.threads)
        changed = set_torch(self.torch)
        return [f"The trials use the settings of this process: {', '.join(changed)}."] if changed else []

    def set_modules(self) -> list[str]:
        """Set what differs in the modules that were imported meanwhile; notes of what is the user's."""
        changed = []
        for name, values in self.modules.items():
            module = sys.modules.get(name)
            for key, value in {} if module is None else values.items():
                present = vars(module).get(key)
                if type(present) is not type(value) or present != value:
                    _put(module, key, value)
                    changed += [f"{name}.{key}={reprlib.repr(value)}"] if is_users(name) else []
        put = {place: _put_function(place, data) for place, data in self.patches.items()}
        told = {"with values that this process set in modules": changed}
        for has, words in ((True, "with"), (False, "without")):
            places = [place.replace(":", ".") for place, is_put in put.items() if is_put is has]
            told[f"{words} functions that this process replaced"] = places
        return [f"The trials run {words}: {_listed(names)}." for words, names in told.items() if names]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return f"{', '.join(names[:MOST_TOLD])}{more}"


def read_modules() -> dict[str, dict[str, Any]]:
    """Plain values of the modules of this process: all of the user's, and those in capitals of libraries."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in NOT_READ or not isinstance(getattr(module, "__file__", None), str):
            continue
        values = {
            key: value
            for key, value in list(vars(module).items())
            if (not key.startswith("__") if is_users(name) else key.isupper() and key[0] != "_") and _is_plain(value)
        }
        if values:
            found[name] = values
    return found


def read_patches(workload: Workload) -> Iterator[tuple[str, Any]]:
    """Places and functions that the script has put into modules and classes: those that model and dataset are of, or import."""
    training, data = workload.training, workload.data
    parts = [training.model, training.train_step, training.loss_fn, data.collate_fn, *wrapped_datasets(data.dataset)]
    parts += training.model.modules() if isinstance(training.model, torch.nn.Module) else []
    owners = {*(kind for part in parts for kind in type(part).__mro__), *filter(inspect.isroutine, parts)}
    modules = {name: sys.modules[name] for name in {each.__module__ for each in owners} & sys.modules.keys()}
    values = [value for module in modules.values() for value in vars(module).values()]
    for name, module in ({each.__name__: each for each in values if type(each) is types.ModuleType} | modules).items():
        for key, value in {} if name.partition(".")[0] in NOT_PATCHED else list(vars(module).items()):
            if issubclass(type(value), type) and value.__module__ == name:
                methods = list(vars(value).items())
                yield from ((f"{name}:{key}.{each}", own) for each, own in methods if _is_put(own, name))
            elif _is_put(value, name):
                yield f"{name}:{key}", value


def _is_put(value: Any, module: str) -> bool:
    """Whether it is a function of the script's in a module, or of any module of the user's in a library's."""
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    if type(function) is not types.FunctionType:
        return False
    own = function.__globals__.get("__name__")
    return own in MAIN or (own != module and is_users(own) and not is_users(module))


def _pickled(function: Any) -> bytes:
    with contextlib.suppress(Exception):
        return bytes(cloudpickle.dumps(function))
    return b""


def _put_function(place: str, data: bytes) -> bool | None:
    """Whether a function could be put there; None where it is there already, as its module does so."""
    name, _, path = place.partition(":")
    try:
        function, (*outer, last) = cloudpickle.loads(data), path.split(".")
        owner = functools.reduce(getattr, outer, importlib.import_module(name))
        if vars(owner).get(last) is function:
            return None
        setattr(owner, last, function)
    except Exception:
        return False
    return True


def _is_plain(value: Any, deepest: int = DEEPEST) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return bool(value == value)
    if kind not in (list, tuple, dict, set, frozenset) or len(value) > MOST_ITEMS or not deepest:
        return False
    items = itertools.chain(value, value.values()) if kind is dict else value
    return all(_is_plain(each, deepest - 1) for each in items)


def _put(module: Any, key: str, value: Any) -> None:
    """Set a value; a container in place, since others may have imported it."""
    present = vars(module).get(key)
    if type(present) is not type(value) or not isinstance(value, (dict, set, list)):
        setattr(module, key, value)
        return
    present.clear()
    present.extend(value) if isinstance(value, list) else present.update(value)


def read_torch() -> dict[str, Any]:
    """What is set in torch, by the names a user knows; what cannot be read here is left out."""
    return {name: value for name, setting in _table().items() if (value := _read(setting)) is not None}


def set_torch(values: Mapping[str, Any]) -> list[str]:
    """Set what differs, which is returned in words; what this torch, or this machine, does not know stays as it is."""
    if "cv2.threads" in values:
        with contextlib.suppress(ImportError):
            importlib.import_module("cv2")  # the caller has it imported; only then is there such a setting
    changed, table = [], _table()
    for name, value in values.items():
        if name in table and _read(table[name]) != value:
            with contextlib.suppress(RuntimeError, ValueError):  # an older name
                table[name][1](value)
                changed.append(f"{name}={value}")
    return changed


def _read(setting: _Setting) -> Any:
    with contextlib.suppress(RuntimeError, AttributeError):  # an older name
        return setting[0]()
    return None


def _table() -> dict[str, _Setting]:
    sharing = torch.multiprocessing
    table: dict[str, _Setting] = {
        "grad_mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "deterministic_debug_mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        "default_device": (torch.get_default_device, torch.set_default_device),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "sharing_strategy": (sharing.get_sharing_strategy, sharing.set_sharing_strategy),
        "detect_anomaly": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "autocast_cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    }
    for kind in AUTOCAST:
        table[f"autocast.{kind}"] = functools.partial(_autocast, kind), functools.partial(_set_autocast, kind)
    for name in ATTENTION:
        cuda = torch.backends.cuda
        table[f"cuda.{name}_enabled"] = getattr(cuda, f"{name}_enabled"), getattr(cuda, f"enable_{name}")
    for name in BACKENDS:
        place, _, last = name.rpartition(".")
        owner = operator.attrgetter(place)(torch.backends)
        table[name] = functools.partial(getattr, owner, last), functools.partial(setattr, owner, last)
    cv2 = sys.modules.get("cv2")  # OpenCV makes threads of its own, in the main process and in every worker
    if cv2 is not None and hasattr(cv2, "setNumThreads"):
        table["cv2.threads"] = cv2.getNumThreads, cv2.setNumThreads
    return table


def _autocast(kind: str) -> Any:
    """The type that autocast computes in; False where it is off."""
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)


def _set_autocast(kind: str, dtype: Any) -> None:
    torch.set_autocast_enabled(kind, bool(dtype))
    if dtype:
        torch.set_autocast_dtype(kind, dtype)
