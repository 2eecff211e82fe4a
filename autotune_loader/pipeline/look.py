"""What can be seen of the user's objects without touching them: what fetching a batch changed, and which files it moved in.

Walked are attributes, items, closures and class attributes from the dataset, the collate function and the sampler on, and
the global names that the user's own code of fetching reads, in a fixed order, within bounds. Nothing of the user's is called.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import random
import stat
import sys
import sysconfig
import time
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from autotune_loader.pipeline.inherited import IN_MEMORY, bound_to_process, handle_in

MOST_VALUES, MOST_DEPTH, MOST_S = 3000, 8, 0.02
"""A look stops after so many values, levels or seconds: most take under a millisecond."""
MOST_ITEMS, EDGE, OF_BATCH = 32, 4, 8
"""Of a longer container the first and last few items are looked at, and the first few of the batch at hand."""
MOST_HELD, HELD_PROBES = 64, 16
"""While workers run, the first so many values are compared before each batch, of arrays so many numbers."""
MOST_COPIED, PROBES = 1024, 64
"""The identities of so many items, or the bytes of so many numbers, are noted in full; of more, some evenly spaced."""
THOROUGH, MOST_THOROUGH_S = 1000, 0.1
"""A thorough look notes so many times as much: 25 ms for a million items."""
ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward", "__iter__", "__next__", "__len__")
"""Methods by which a loader enters an object; others count where these name them."""
OPAQUE = (
    "logging",
    "pandas",
    "pyarrow",
    "PIL",
    "matplotlib",
    "tqdm",
    "lightning",
    "pytorch_lightning",
    "concurrent",
    "asyncio",
)
"""Of objects of these libraries only the identity is noted: they keep notes of their own that no sample depends on."""
ANEW = "\0"
"""Begins a path anew, at a name that the user's code knows a value by; see `shown`."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)
GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")})


class _Same:
    """Equal to itself in another look; it keeps the object, so that no other one gets its identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = object.__hash__


@dataclass(slots=True)
class Look:
    """What was seen, by path (`dataset.transform.count`)."""

    tokens: dict[str, Any] = field(default_factory=dict)
    handles: list[tuple[str, str]] = field(default_factory=list)
    """Paths and words of what workers that are forked would share, or lack."""
    bound: list[tuple[str, str]] = field(default_factory=list)
    """Those of them that no fork at all may carry."""
    generators: set[str] = field(default_factory=set)
    """Paths of random generators."""

    def changed(self, later: Look) -> list[str]:
        """Paths that both looks have and that differ, outermost first."""
        return [path for path, token in self.tokens.items() if path in later.tokens and later.tokens[path] != token]


def look(roots: Mapping[str, Any], item: Sequence[Any] = (), number: int = 0, *, scale: int = 1) -> Look:
    """Walk from some objects on.

    Args:
        roots: objects by the name that the user knows them by.
        item: indices of the batch at hand: samples that it changes are looked for there.
        number: of that batch.
        scale: so many times as much of long containers is noted; `THOROUGH`, for once.
    """
    seen, walked, limit = Look(), set[int](), time.perf_counter() + (MOST_S if scale == 1 else MOST_THOROUGH_S)
    rows = [index for index in item[:OF_BATCH] if type(index) is int and index >= 0]
    queue: deque[tuple[str, Any, int, list[int]]] = deque((name, value, 0, rows) for name, value in roots.items())
    while queue and len(walked) < MOST_VALUES and time.perf_counter() < limit:
        path, value, depth, rows = queue.popleft()
        if type(value) in PLAIN:
            seen.tokens[path] = _plain(value)
            continue
        if id(value) in walked:
            seen.tokens.setdefault(path, _Same(value))
            continue
        walked.add(id(value))
        if (words := handle_in(value)) is not None:
            seen.handles.append((path, words))
            seen.bound += [(path, words)] if bound_to_process(value) else []
        if isinstance(value, GENERATORS):
            seen.generators.add(path)
        seen.tokens[path] = _Same(value), *_token(value, MOST_COPIED * scale)
        if rows and (of_batch := _rows(value, rows)) is not None:
            seen.tokens[f"{path}[of batch {number}]"] = of_batch
        if depth < MOST_DEPTH and words is None:
            inner = _translated(value, rows)
            queue.extend((path + name, part, depth + 1, inner) for name, part in _parts(value, rows))
    return seen


def shown(path: str) -> str:
    """A path as the user would write it."""
    return f"`{path.rpartition(ANEW)[2]}`"


def process_state() -> dict[str, Any]:
    """What belongs to the whole process, and a worker would change for itself only."""
    return {
        "os.environ": hash(frozenset(os.environ.items())),
        "the current folder": os.getcwd(),  # noqa: PTH109 - a few microseconds
        "torch's default dtype": torch.get_default_dtype(),
        "torch's number of threads": torch.get_num_threads(),
    }


def positions() -> dict[tuple[int, int, int], int]:
    """Where each open regular file that can be read stands, by (descriptor, device, inode)."""
    found: dict[tuple[int, int, int], int] = {}
    standard = [(status.st_dev, status.st_ino) for number in (1, 2) if (status := _status(number)) is not None]
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - before and after each batch
        try:
            status = os.fstat(int(name))
            if not stat.S_ISREG(status.st_mode) or (status.st_dev, status.st_ino) in standard:
                continue
            info = dict(
                line.split(b":", 1) for line in _contents(f"/proc/self/fdinfo/{name}").splitlines() if b":" in line
            )
            if int(info[b"flags"], 8) & os.O_ACCMODE != os.O_WRONLY:
                found[int(name), status.st_dev, status.st_ino] = int(info[b"pos"])
        except (OSError, KeyError, ValueError):
            continue  # closed meanwhile
    return found


def _status(number: int) -> os.stat_result | None:
    try:
        return os.fstat(number)
    except OSError:  # closed, as in a daemon
        return None


def _contents(path: str) -> bytes:
    number = os.open(path, os.O_RDONLY)
    try:
        return os.read(number, 4096)
    finally:
        os.close(number)


def moved(before: Mapping[tuple[int, int, int], int], after: Mapping[tuple[int, int, int], int]) -> str | None:
    """The path of a file that was open before and has moved; its number where it has no name."""
    for key, position in before.items():
        if after.get(key, position) != position:
            try:
                return str(Path(f"/proc/self/fd/{key[0]}").readlink())
            except OSError:
                return f"descriptor {key[0]}"
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, (str, bytes)) and len(value) > 200:
        return type(value), len(value), hash(value)
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def _token(value: Any, most: int) -> tuple[Any, ...]:
    """What of a value can change while it stays the same object."""
    if isinstance(value, torch.Tensor):
        array = _as_array(value)
        return _version(value), tuple(value.shape), None if array is None else _bytes(array, most)
    if isinstance(value, np.ndarray):
        return value.shape, _bytes(value, most)
    if isinstance(value, (list, tuple, deque)):
        return len(value), hash(_identities(value, most))
    if isinstance(value, dict):
        return dict.__len__(value), hash(tuple(map(id, _some(value, most))))
    if isinstance(value, (set, frozenset)):
        return (len(value),)
    if isinstance(value, bytearray):
        return len(value), hash(bytes(value[:MOST_COPIED]))
    if isinstance(value, GENERATORS):
        return (_state(value),)
    if isinstance(value, SynchronizedBase):
        return (bytes(memoryview(value.get_obj()).cast("B")[:MOST_COPIED]),)
    if isinstance(value, (ctypes.Array, ctypes._SimpleCData, ctypes.Structure)):
        return (bytes(memoryview(value).cast("B")[:MOST_COPIED]),)
    if isinstance(value, (*IN_MEMORY, mmap.mmap)):
        return () if getattr(value, "closed", False) else (value.tell(),)
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.cache_info().currsize,)
    return (tuple(_attributes(value)),)


def _version(tensor: torch.Tensor) -> Any:
    return None if tensor.is_inference() else tensor._version


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
        try:
            return value.detach().numpy()
        except (RuntimeError, TypeError):  # a type that numpy lacks; its version is noted
            return None
    return None


def _bytes(array: np.ndarray[Any, Any], most: int = MOST_COPIED) -> bytes | None:
    if array.dtype.hasobject or not array.flags.writeable or not array.size:
        return None  # an array that nobody can write to is not read, as it may be on disk
    few = PROBES // 4 if isinstance(array, np.memmap) else PROBES
    return array.flat[:: 1 if array.size <= most else max(1, array.size // few)].tobytes()


def _identities(values: Any, most: int) -> tuple[int, ...]:
    count = len(values)
    if count <= most:
        return tuple(map(id, values))
    step = count // PROBES
    return tuple(id(values[index]) for index in range(0, count, step)) if not isinstance(values, deque) else ()


def _some(values: dict[Any, Any], most: int) -> list[Any]:
    """Values of a dict: all of a short one, else of the first and the last keys."""
    if dict.__len__(values) <= most:
        return list(dict.values(values))
    return [dict.__getitem__(values, key) for key in _edge_keys(values)]


def _edge_keys(values: dict[Any, Any]) -> list[Any]:
    first = [key for key, _ in zip(dict.keys(values), range(EDGE), strict=False)]
    return [*first, *(key for key, _ in zip(dict.__reversed__(values), range(EDGE), strict=False))]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        # SystemRandom has no state
        return None if isinstance(generator, random.SystemRandom) else hash(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        name, keys, position, has_gauss, gauss = generator.get_state(legacy=True)
        return name, hash(keys.tobytes()), position, has_gauss, gauss  # type: ignore[union-attr]
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return hash(generator.get_state().numpy().tobytes())


def _rows(value: Any, rows: list[int]) -> Any:
    """The bytes or identities of the samples at hand, where a value has one for each sample."""
    array = _as_array(value)
    if array is not None:
        if not array.ndim or array.dtype.hasobject or not array.flags.writeable or array.shape[0] <= max(rows):
            return None
        return b"".join(_bytes(np.atleast_1d(array[row])) or b"" for row in rows)
    if isinstance(value, (list, tuple)) and len(value) > max(rows):
        return tuple(id(value[row]) for row in rows)
    if isinstance(value, dict):
        return tuple(id(dict.get(value, row)) for row in rows)
    return None


def _translated(value: Any, rows: list[int]) -> list[int]:
    """The indices by which a wrapped dataset is asked."""
    if type(value) is not Subset or not rows:
        return rows
    inner = [value.indices[row] for row in rows if row < len(value.indices)]
    return [index for index in map(_as_int, inner) if index >= 0]


def _as_int(index: Any) -> int:
    return int(index) if isinstance(index, (int, np.integer)) else -1


def _parts(value: Any, rows: list[int]) -> Iterator[tuple[str, Any]]:
    """What a value refers to, by the end of its path."""
    if isinstance(value, (torch.Tensor, np.ndarray, *GENERATORS, SynchronizedBase, types.ModuleType, weakref.ref)):
        return
    if isinstance(value, (list, tuple, deque)):
        yield from _items(value, rows)
    if isinstance(value, dict):
        keys = list(dict.keys(value)) if dict.__len__(value) <= MOST_ITEMS else _edge_keys(value)
        keys += [row for row in rows if dict.__contains__(value, row)]
        yield from ((f"[{_shown(key)}]", dict.get(value, key)) for key in keys)
    if type(value).__module__.partition(".")[0] == "pandas":  # its blocks, which a fetch may write to
        blocks = getattr(getattr(value, "_mgr", None), "arrays", ())
        yield from ((f".values[{index}]", block) for index, block in enumerate(blocks[:MOST_ITEMS]))
    yield from _parts_of_code(value)
    if not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _shown(key: Any) -> str:
    return repr(key) if type(key) in PLAIN else type(key).__name__


def _items(values: Any, rows: list[int]) -> Iterator[tuple[str, Any]]:
    count = len(values)
    chosen = list(range(count)) if count <= MOST_ITEMS else [*range(EDGE), *range(count - EDGE, count)]
    if count > MOST_ITEMS and type(values[0]) in PLAIN and not isinstance(values, deque):
        return  # their identities are noted
    for index in dict.fromkeys([*chosen, *(row for row in rows if row < count)]):
        yield f"[{index}]", values[index]


def _attributes(value: Any) -> dict[str, Any]:
    """Those that an object has itself; read past its own code."""
    found = dict(_own(value) or {})
    for kind in type(value).__mro__:
        if "__slots__" in kind.__dict__:
            members = (n for n, m in kind.__dict__.items() if isinstance(m, types.MemberDescriptorType))
            found.update((name, kind.__dict__[name].__get__(value)) for name in members if _has(kind, name, value))
    return found


def _own(value: Any) -> Any:
    """The dict of an object's attributes; None where it has none, or its library keeps notes there."""
    if (type(value).__module__ or "").partition(".")[0] in OPAQUE:
        return None
    try:
        return object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None


def _has(kind: type, name: str, value: Any) -> bool:
    try:
        kind.__dict__[name].__get__(value)
    except AttributeError:
        return False
    return True


def _parts_of_code(value: Any) -> Iterator[tuple[str, Any]]:
    """What functions close over, and what the user's own code reads."""
    if isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield ".__wrapped__", value.__wrapped__
    elif isinstance(value, types.FunctionType):
        named = f"{ANEW}{value.__name__}.__defaults__"
        yield from ((f"{named}[{index}]", part) for index, part in enumerate(value.__defaults__ or ()))
        yield from ((f"{named}[{name!r}]", part) for name, part in (value.__kwdefaults__ or {}).items())
    for function in functions_of(value):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if name != "__class__" and _is_full(cell):
                yield f"{ANEW}{name}", cell.cell_contents
        yield from _globals(function)
    yield from ((f"{ANEW}{kind.__name__}.{name}", part) for kind, name, part in class_attributes(value))


def functions_of(value: Any) -> list[types.FunctionType]:
    """The user's own functions by which a loader enters a value, and the methods that they name."""
    if isinstance(value, types.FunctionType):
        return [value] if is_users(value.__module__) or value.__closure__ else []
    kind = value if isinstance(value, type) else type(value)
    spaces = [vars(each) for each in kind.__mro__ if is_users(each.__module__)]
    wanted, known, found = list(ENTRIES) if spaces else [], set[str](), list[types.FunctionType]()
    while wanted:
        name = wanted.pop()
        functions = [f for space in spaces if name not in known and (f := _function(space.get(name))) is not None]
        known.add(name)
        found += functions
        wanted += [each for function in functions for each in names_of(function.__code__)]
    return found


def class_attributes(value: Any) -> Iterator[tuple[type, str, Any]]:
    """Values that the user's own classes hold, by class and name, where the object has none of that name."""
    kind = value if isinstance(value, type) else type(value)
    for each in kind.__mro__:
        if is_users(each.__module__):
            for name, part in list(vars(each).items()):
                if not name.startswith("__") and not isinstance(part, _CODE):
                    yield each, name, part


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


_CODE = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
)


def _function(value: Any) -> types.FunctionType | None:
    inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    inner = value.fget if isinstance(value, property) else inner
    return inner if isinstance(inner, types.FunctionType) else None


def names_of(code: types.CodeType) -> list[str]:
    """The names that a function's code reads, inner functions included."""
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in names_of(each)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The user's own global names that a function reads; of the user's modules those names that it reads of them."""
    if not is_users(function.__module__):
        return
    names, space = names_of(function.__code__), function.__globals__
    for name in names:
        value = space.get(name, _MISSING)
        if isinstance(value, types.ModuleType):
            if is_users(value.__name__):
                held = vars(value)
                yield from ((f"{ANEW}{name}.{each}", held[each]) for each in names if each in held)
        elif value is not _MISSING:
            yield f"{ANEW}{name}", value


_MISSING = object()


@functools.lru_cache(maxsize=4096)
def is_users(module: str | None) -> bool:
    """Whether a module is the user's own: no part of Python, of an installed package, or of this one."""
    if module is None or module.partition(".")[0] == __name__.partition(".")[0]:
        return False
    if module in ("__main__", "__mp_main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not os.path.realpath(file).startswith(LIBRARIES)


class Held:
    """What workers see: a look that is compared in microseconds, with what changes most often.

    Args:
        seen: of the dataset and the collate function, as the workers that begin now see them.
    """

    def __init__(self, seen: Look) -> None:
        self._spaces: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._numbers: list[tuple[Any, bytes]] = []
        values = [token[0].value for token in seen.tokens.values() if type(token) is tuple and type(token[0]) is _Same]
        for value in values[:MOST_HELD]:
            self._hold(value)

    def _hold(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if not value.is_inference():
                self._versions.append((value, value._version))
        elif isinstance(value, np.ndarray) and value.flags.writeable and not value.dtype.hasobject:
            flat = value.view(np.ndarray).reshape(-1) if value.flags.c_contiguous else value.view(np.ndarray)
            probes = flat[:: max(1, flat.shape[0] // HELD_PROBES)] if flat.size and flat.ndim == 1 else None
            if probes is not None:
                self._numbers.append((probes, probes.tobytes()))
        elif isinstance(value, (list, dict, set, deque)):
            self._lengths.append((value, len(value)))
            if isinstance(value, dict) and len(value) <= MOST_ITEMS:
                self._spaces.append((value, dict(value)))
        elif not isinstance(value, (types.ModuleType, type)) and (own := _own(value)) is not None:
            self._spaces.append((own, dict(own)))
        self._names += [(vars(kind), name, part) for kind, name, part in class_attributes(value)]
        for function in functions_of(value):
            space = function.__globals__
            self._names += [(space, name, space[name]) for name in names_of(function.__code__) if name in space]

    def is_unchanged(self) -> bool:
        """Whether all that is held is what it was."""
        try:
            return (
                all(now == then for now, then in self._spaces)
                and all(space.get(name) is value for space, name, value in self._names)
                and all(len(value) == length for value, length in self._lengths)
                and all(tensor._version == version for tensor, version in self._versions)
                and all(probes.tobytes() == data for probes, data in self._numbers)
            )
        except Exception:  # values that cannot be compared are others
            return False
