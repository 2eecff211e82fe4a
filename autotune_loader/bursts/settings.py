"""What a script has set in its process: read there, and set in the fresh process of the bursts, so that they train alike.

Before anything of the user's is imported: arguments, start method, threads, what is set in torch. Once the workload is
unpickled: values of modules and classes that differ from those of a fresh import, functions that the script has put there, and
what it has registered with libraries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import itertools
import math
import multiprocessing
import operator
import reprlib
import sys
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import cloudpickle
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader.bursts.packing import pickled
from autotune_loader.bursts.step import AUTOCAST
from autotune_loader.pipeline.equal import is_equal
from autotune_loader.pipeline.workload import Workload, is_users, wrapped_datasets

MAIN = ("__main__", "__mp_main__")
NOT_PATCHED = {*sys.stdlib_module_names, "autotune_loader", *MAIN}
"""Modules whose functions are not looked at: what the script has put there, such as `sys.excepthook`, is for itself."""
MOST_ITEMS, DEEPEST = 10_000, 4
"""A container that is larger, or nested deeper, is not carried: comparing it takes longer than a burst."""
MOST_BYTES, MOST_S = 1 << 20, 0.5
"""Of the pickle of an object, and the time after which no other one is pickled: settings are small, also on a busy machine."""
CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
PARTS = (*CODE, torch.nn.Module, Dataset, DataLoader)
"""Kinds of objects that are no settings: code, and parts of a training."""
LACKS = "The trials run without"
"""How a note begins that may be why they fail."""
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
    values: dict[str, dict[str, Any]]
    """Plain values by module, or class of one (`module:Class`), and name."""
    objects: list[tuple[list[tuple[str, str]], bytes]]
    """Modules and names of other objects of the user's, with their pickles; empty where settings cannot be pickled."""
    functions: dict[str, tuple[str, bytes]]
    """What the script has put or registered, by words for the place: its owner, and name or key with the function, pickled;
    empty where it cannot be."""

    @classmethod
    def read(cls, workload: Workload) -> Settings:
        functions = {f"{_dotted(owner)}.{name}": (owner, name, own) for owner, name, own in read_patches(workload)}
        functions |= {f"{_dotted(owner)}[{key!r}]": (owner, key, own) for owner, key, own in read_entries()}
        return cls(
            argv=list(sys.argv),
            start_method=multiprocessing.get_start_method(allow_none=True),
            threads=torch.get_num_threads(),
            torch=read_torch(),
            values=read_values(),
            objects=list(read_objects()),
            functions={place: (owner, _pickled((key, own))) for place, (owner, key, own) in functions.items()},
        )

    def set_process(self) -> list[str]:
        """Make this process as that one was, before anything of the user's is imported; a note of what differs in torch."""
        sys.argv[:] = self.argv
        multiprocessing.set_start_method(self.start_method, force=True)
        torch.set_num_threads(self.threads)
        changed = set_torch(self.torch)
        return [f"The trials use the settings of this process: {', '.join(changed)}."] if changed else []

    def set_modules(self, but: Collection[str] = ()) -> list[str]:
        """Set what differs in the modules that were imported meanwhile, `but` these; notes of what is the user's."""
        changed, kept = [], []
        for name, values in self.values.items():
            owner = None if name.partition(":")[0] in but else _owner(name)
            for key, value in {} if owner is None else values.items():
                present = _members(owner).get(key)
                if type(present) is not type(value) or present != value:
                    _put(owner, key, value)
                    if is_users(name.partition(":")[0]):
                        changed.append(f"{_dotted(name)}.{key}={reprlib.repr(value)}")
        for places, data in self.objects:
            places = [(name, key) for name, key in places if name in sys.modules and name not in but]
            names = [f"{name}.{key}" for name, key in places]
            is_set = _set_object(places, data) if places else None  # unpickling imports what the trials have no use for
            changed += names if is_set else []
            kept += names if is_set is False else []
        put = {
            place: _put_function(owner, data)
            for place, (owner, data) in self.functions.items()
            if owner.partition(":")[0] not in but
        }
        told = {
            "with values that this process set in modules": changed,
            "without what this process may have set in": kept,
        }
        for has, words in ((True, "with"), (False, "without")):
            for is_entry, verb in ((False, "replaced"), (True, "registered")):
                told[f"{words} functions that this process {verb}"] = [
                    place for place, is_put in put.items() if is_put is has and place.endswith("]") is is_entry
                ]
        return [f"The trials run {words}: {_listed(names)}." for words, names in told.items() if names]


def _dotted(place: str) -> str:
    return place.replace(":", ".")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_TOLD} more" if len(names) > MOST_TOLD else ""
    return f"{', '.join(names[:MOST_TOLD])}{more}"


def _members(owner: Any) -> dict[str, Any]:
    """A copy of what a module, a class or an object has, which runs no code of its own: a lazy module stays as it is."""
    with contextlib.suppress(Exception):
        return dict(object.__getattribute__(owner, "__dict__"))
    return {}


def _owner(place: str) -> Any:
    """The module or class that is named, or a dict there; None where its module was not imported."""
    name, _, path = place.partition(":")
    owner = sys.modules.get(name)
    for each in filter(None, path.split(".")):
        owner = _members(owner).get(each)
    return owner


def _modules(but: Collection[str]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Names of modules, what they have, and whether they are the user's; without these packages."""
    for name, module in list(sys.modules.items()):
        members = {} if name.partition(".")[0] in but else _members(module)
        if isinstance(members.get("__file__"), str):
            yield name, members, is_users(name)


def _with_classes(place: str, members: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A module or a class, and the classes that are defined in it; an Enum never changes."""
    yield place, members
    for key, value in members.items():
        if issubclass(type(value), type) and not issubclass(value, enum.Enum):
            inner = f"{place}{'.' if ':' in place else ':'}{key}"
            if f"{value.__module__}:{value.__qualname__}" == inner:
                yield from _with_classes(inner, _members(value))


def read_values() -> dict[str, dict[str, Any]]:
    """Plain values of modules: all of the user's and of their classes, and those in capitals of libraries."""
    found: dict[str, dict[str, Any]] = {}
    for name, members, is_own in _modules(NOT_READ):
        for place, values in _with_classes(name, members) if is_own else [(name, members)]:
            found[place] = {
                key: value
                for key, value in values.items()
                if (not key.startswith("__") if is_own else key.isupper() and key[0] != "_") and _is_plain(value)
            }
    return {place: values for place, values in found.items() if values}


def read_objects() -> Iterator[tuple[list[tuple[str, str]], bytes]]:
    """Where the objects of the user's modules are, and their pickles; without what is large, or holds files, locks, threads."""
    places, objects, until = dict[int, list[tuple[str, str]]](), dict[int, Any](), time.monotonic() + MOST_S
    for name, members, is_own in _modules(NOT_READ):
        for key, value in members.items() if is_own else ():
            if not key.startswith("__") and _may_be_settings(type(value)) and not _is_plain(value):
                places.setdefault(id(value), []).append((name, key))
                objects[id(value)] = value
    for each, value in objects.items():
        data = _pickled(value, MOST_BYTES) if time.monotonic() < until else b""
        holds_settings = issubclass(type(value), (dict, types.SimpleNamespace)) or dataclasses.is_dataclass(type(value))
        if data or (holds_settings and type(value) is not dict):
            yield places[each], data


def _may_be_settings(kind: type) -> bool:
    """Whether objects of a class are, by themselves or with others in them: other objects of libraries may be anything."""
    is_known = kind.__module__.partition(".")[0] in (*sys.stdlib_module_names, "torch", "numpy") or is_users(
        kind.__module__
    )
    return not issubclass(kind, PARTS) and (is_known or hasattr(kind, "keys") or dataclasses.is_dataclass(kind))


def read_entries() -> Iterator[tuple[str, Any, Any]]:
    """Dicts of libraries, keys and entries that are the user's functions and classes: in a module, or in an object there."""
    seen = set[int]()
    for name, members, is_own in _modules(NOT_PATCHED):
        for key, value in () if is_own else members.items():
            if type(value) in CODE or key.startswith("__"):
                continue
            tables = (
                {key: value} if type(value) is dict else {f"{key}.{each}": own for each, own in _members(value).items()}
            )
            for path, table in tables.items():
                if type(table) is dict and id(table) not in seen and len(table) <= MOST_ITEMS:
                    seen.add(id(table))
                    own = [each for each in list(table.items()) if _is_registered(each[1])]
                    yield from (
                        (f"{name}:{path}", key, entry) for key, entry in own if issubclass(type(key), (str, type))
                    )


def _is_registered(entry: Any) -> bool:
    """Whether it is a function or a class of the user's, or a tuple with one."""
    if type(entry) is tuple:
        return any(map(_is_registered, entry))
    if type(entry) is types.FunctionType:
        return is_users(entry.__globals__.get("__name__"))
    return issubclass(type(entry), type) and is_users(entry.__module__)


def read_patches(workload: Workload) -> Iterator[tuple[str, str, Any]]:
    """Owners, names and functions that the script has put into those modules and classes that model and dataset use."""
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
                yield from ((f"{name}:{key}", each, own) for each, own in methods if _is_put(own, name))
            elif _is_put(value, name):
                yield name, key, value


def _is_put(value: Any, module: str) -> bool:
    """Whether it is a function of the script's in a module, or of any module of the user's in a library's."""
    function = value.__func__ if type(value) in (staticmethod, classmethod) else value
    if type(function) is not types.FunctionType:
        return False
    own = function.__globals__.get("__name__")
    return own in MAIN or (own != module and is_users(own) and not is_users(module))


def _pickled(value: Any, most_bytes: float = math.inf) -> bytes:
    with contextlib.suppress(Exception):
        return pickled(value, most_bytes)
    return b""


def _put_function(place: str, data: bytes) -> bool | None:
    """Whether a function could be put there; None where it is there already, as its module does so, or another one is."""
    try:
        key, function = cloudpickle.loads(data)
        importlib.import_module(place.partition(":")[0])
        owner = _owner(place)
        if key in owner if type(owner) is dict else _members(owner).get(key) is function:
            return None
        owner.update({key: function}) if type(owner) is dict else setattr(owner, key, function)
    except Exception:
        return False
    return True


def _set_object(places: list[tuple[str, str]], data: bytes) -> bool | None:
    """Whether an object could be set in these modules; None where it is as a fresh import has it."""
    try:
        known, value = [(sys.modules[name], key) for name, key in places], cloudpickle.loads(data)
        stale = [(module, key) for module, key in known if not _is_same(_members(module).get(key), value)]
        for module, key in stale:
            _put(module, key, value)
            if not _is_same(_members(module)[key], value):  # not all of it is in what Python sees of it
                setattr(module, key, value)
    except Exception:
        return False
    return True if stale else None


def _is_same(one: Any, other: Any) -> bool:
    with contextlib.suppress(Exception):  # whatever cannot be compared is set
        return is_equal(one, other)
    return False


def _is_plain(value: Any, deepest: int = DEEPEST) -> bool:
    kind = type(value)
    if kind in PLAIN:
        return bool(value == value)
    if kind not in (list, tuple, dict, set, frozenset) or len(value) > MOST_ITEMS or not deepest:
        return False
    items = itertools.chain(value, value.values()) if kind is dict else value
    return all(_is_plain(each, deepest - 1) for each in items)


def _put(owner: Any, key: str, value: Any) -> None:
    """Set a value; what can be is changed in place, past what a frozen one forbids, since others may have imported it."""
    present, is_set = _members(owner).get(key), False
    if type(present) is type(value):
        kinds: list[tuple[Any, Any]] = [(OrderedDict, OrderedDict.update), (dict, dict.update), (set, set.update)]
        for kind, fill in [*kinds, (list, list.extend)]:
            if isinstance(present, kind) and not is_set:
                kind.clear(present)
                fill(present, value)
                is_set = True
        if (state := _members(value)) or _members(present):
            members = object.__getattribute__(present, "__dict__")
            members.clear()
            members.update(state)
            is_set = True
    if not is_set:
        setattr(owner, key, value)


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
