"""What can be seen of the user's objects without touching them: what fetching a batch changed, and which files it moved in.

Walked are attributes, items, closures and class attributes from the dataset, the collate function and the sampler on, and
the global names that the user's own code of fetching reads, in a fixed order, within bounds. Nothing of the user's is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import fcntl
import functools
import gc
import mmap
import os
import random
import stat
import time
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.sharedctypes import SynchronizedBase
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from autotune_loader.pipeline.inherited import IN_MEMORY, bound_to_process, handle_in
from autotune_loader.pipeline.workload import is_users

MOST_VALUES, MOST_DEPTH, MOST_S = 3000, 8, 0.02
"""A look stops after so many values, levels or seconds: most take under a millisecond."""
MOST_ITEMS, EDGE, OF_BATCH = 32, 4, 8
"""Of a longer container a few items are looked at, the last few, and the first few of the batch at hand."""
MOST_HELD, HELD_PROBES = 64, 16
"""While workers run, so many values are compared before each batch; of large arrays so many numbers."""
HELD_BYTES, HELD_ITEMS = 1 << 18, 1 << 12
"""All numbers of arrays are compared up to so many bytes in all (20 us), and of a longer container so many items."""
MOST_COPIED, PROBES = 1024, 64
"""The identities of so many items, or the bytes of so many numbers, are noted in full; of more, some evenly spaced."""
THOROUGH, MOST_THOROUGH_S = 1000, 0.1
"""A thorough look notes so many times as much: 25 ms for a million items."""
ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward", "__iter__", "__next__", "__len__")
"""Methods by which a loader enters an object; others count where these name them."""
OPAQUE = {
    "logging", "pandas", "pyarrow", "PIL", "matplotlib", "tqdm", "lightning", "pytorch_lightning", "concurrent", "asyncio",
    __name__.partition(".")[0],
}  # fmt: skip
"""Of objects of these libraries only the identity is noted: they keep notes of their own that no sample depends on."""
ANEW = "\0"
"""Begins a path anew, at a name that the user's code knows a value by; see `shown`."""
PLAIN = (type(None), bool, int, float, complex, str, bytes)
PATHS = (PosixPath, PurePosixPath, WindowsPath, PureWindowsPath)
"""They never change, but keep what they were asked for: a path that a fetch opens for the first time has a text since."""
GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
SHARED_MEMORY = (SynchronizedBase, ctypes.Array, ctypes._SimpleCData, ctypes.Structure)
WITHOUT_PARTS = (torch.Tensor, np.ndarray, *GENERATORS, SynchronizedBase, types.ModuleType, weakref.ref)
CODE = (types.FunctionType, staticmethod, classmethod, property, types.MemberDescriptorType, types.GetSetDescriptorType)
"""What of a class is no value that a method may change."""
PROCESS = ("os.environ", "the current folder", "torch's default dtype", "torch's number of threads")
"""Paths of what belongs to the whole process."""
Places = dict[tuple[int, int, int], int]
"""Positions of open files, by (descriptor, device, inode)"""
_Found = tuple[str, Any, int, list[int]]
"""Path, value, depth, and the indices by which it is asked"""


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
    files: Places = field(default_factory=dict)
    """Where open files stood, as far as that was looked at."""
    values: list[Any] = field(default_factory=list)
    """What is not plain, in the order in which it was seen."""

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
    queue: deque[_Found] = deque((name, value, 0, rows) for name, value in roots.items())
    items: deque[_Found] = deque()  # of long containers: what all samples share comes first
    while (mine := queue or items) and len(walked) < MOST_VALUES and time.perf_counter() < limit:
        path, value, depth, rows = mine.popleft()
        if type(value) in PLAIN:
            seen.tokens[path] = _plain(value)
            continue
        if id(value) in walked:
            seen.tokens.setdefault(path, _Same(value))
            continue
        walked.add(id(value))
        if type(value) in PATHS:
            seen.tokens[path] = _Same(value)
            continue
        seen.values.append(value)
        if (words := handle_in(value)) is not None:
            seen.handles.append((path, words))
            seen.bound += [(path, words)] if bound_to_process(value) else []
        if isinstance(value, GENERATORS):
            seen.generators.add(path)
        seen.tokens[path] = _Same(value), *_token(value, MOST_COPIED * scale)
        if rows and (of_batch := _of_batch(value, rows)) is not None:
            seen.tokens[f"{path}[of batch {number}]"] = of_batch
        if depth < MOST_DEPTH and words is None and not isinstance(value, WITHOUT_PARTS):
            inner = _translated(value, rows)
            kind = _container(value)
            is_long = kind is not None and kind.__len__(value) > MOST_ITEMS
            (items if is_long else mine).extend(
                (path + name, part, depth + 1, inner) for name, part in _parts(value, rows)
            )
    return seen


def shown(path: str) -> str:
    """A path as the user would write it."""
    return f"`{path.rpartition(ANEW)[2]}`"


def process_state() -> dict[str, Any]:
    """What belongs to the whole process, and a worker would change for itself only."""
    here = os.getcwd()  # noqa: PTH109 - a few microseconds
    values = hash(frozenset(os.environ.items())), here, torch.get_default_dtype(), torch.get_num_threads()
    return dict(zip(PROCESS, values, strict=True))


def positions() -> Places:
    """Where each open regular file that can be read stands; standard output and errors are left out."""
    found: Places = {}
    standard = set[tuple[int, int]]()
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):  # noqa: PTH208 - before and after each batch
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(number)
            if number in (1, 2):
                standard.add((status.st_dev, status.st_ino))
            elif stat.S_ISREG(status.st_mode) and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                found[number, status.st_dev, status.st_ino] = os.lseek(number, 0, os.SEEK_CUR)
    return {key: position for key, position in found.items() if key[1:] not in standard}


def moved(before: Places, after: Places) -> str | None:
    """The path of a file that was open before and has moved; its number where it has no name."""
    for key, position in before.items():
        if after.get(key, position) != position:
            try:
                name = str(Path(f"/proc/self/fd/{key[0]}").readlink())
                return name.removeprefix("/memfd:").removesuffix(" (deleted)")  # a fork's own copy has the file's name
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
        version = None if value.is_inference() else value._version
        return version, tuple(value.shape), _bytes(_as_array(value), most)
    if isinstance(value, np.ndarray):
        return value.shape, _bytes(value, most)
    if (kind := _container(value)) is not None:
        count = kind.__len__(value)
        if count > most:
            return count, hash(tuple(id(part) for _, part in _elements(kind, value, most)))
        return count, hash(tuple(map(id, dict.values(value) if kind is dict else kind.__iter__(value))))
    if isinstance(value, (set, frozenset)):
        return (len(value),)
    if isinstance(value, bytearray):
        return len(value), hash(bytes(value[:MOST_COPIED]))
    if isinstance(value, GENERATORS):
        return (_state(value),)
    if isinstance(value, SHARED_MEMORY):
        return (_memory(value),)
    if isinstance(value, (*IN_MEMORY, mmap.mmap)):
        return () if getattr(value, "closed", False) else (value.tell(),)
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.cache_info().currsize,)
    return (tuple(_attributes(value)),)


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, np.ndarray):
        return value.view(np.ndarray)
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    if is_plain and value.device.type == "cpu" and value.layout is torch.strided:
        with contextlib.suppress(RuntimeError, TypeError):  # a type that numpy lacks; its version is noted
            array: np.ndarray[Any, Any] = value.detach().numpy()
            return array
    return None


def _bytes(array: np.ndarray[Any, Any] | None, most: int) -> bytes | None:
    if array is None or array.dtype.hasobject or not array.flags.writeable or not array.size:
        return None  # an array that nobody can write to is not read, as it may be on disk
    few = PROBES // 4 if isinstance(array, np.memmap) else PROBES
    return array.flat[:: 1 if array.size <= most else max(1, array.size // few)].tobytes()


def _container(value: Any) -> Any:
    """The built-in class of a container, by which it is read past what the user's own class makes of it; None for others."""
    return next((kind for kind in (dict, list, tuple, deque) if issubclass(type(value), kind)), None)


def _elements(kind: Any, values: Any, most: int, rows: Sequence[int] = ()) -> list[tuple[Any, Any]]:
    """Keys and values of a container: all of a short one; of a longer one some, and those of the batch at hand."""
    count = kind.__len__(values)
    if kind is dict:
        names = dict.keys(values)
        keys = list(names) if count <= most else [*islice(names, EDGE), *islice(reversed(names), EDGE)]
        return [(key, dict.get(values, key)) for key in dict.fromkeys([*keys, *(row for row in rows if row in names)])]
    spaced = 1 if count <= most else count // min(PROBES, most // 2 // EDGE)
    few = [*range(0, count, spaced), *range(max(0, count - EDGE), count)]
    chosen = dict.fromkeys([*few, *(row for row in rows if row < count)])
    return [(index, kind.__getitem__(values, index)) for index in chosen]


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        # SystemRandom has no state
        return None if isinstance(generator, random.SystemRandom) else hash(generator.getstate())
    if isinstance(generator, torch.Generator):
        return hash(generator.get_state().numpy().tobytes())
    return repr(generator.bit_generator.state) if isinstance(generator, np.random.Generator) else _legacy(generator)


def _legacy(generator: np.random.RandomState) -> Any:
    name, keys, *rest = generator.get_state(legacy=True)
    return name, hash(keys.tobytes()), *rest  # type: ignore[union-attr]


def _of_batch(value: Any, rows: list[int]) -> Any:
    """The bytes or identities of the samples at hand, where a value has one for each sample."""
    array = _as_array(value)
    if array is not None:
        if not array.ndim or array.dtype.hasobject or not array.flags.writeable or array.shape[0] <= max(rows):
            return None
        return b"".join(_bytes(np.atleast_1d(array[row]), MOST_COPIED) or b"" for row in rows)
    kind = _container(value)
    if kind is dict:
        return tuple(id(dict.get(value, row)) for row in rows)
    if kind is not None and kind.__len__(value) > max(rows):
        return tuple(id(kind.__getitem__(value, row)) for row in rows)
    return None


def _translated(value: Any, rows: list[int]) -> list[int]:
    """The indices by which a wrapped dataset is asked."""
    if type(value) is not Subset or not rows:
        return rows
    inner = [value.indices[row] for row in rows if row < len(value.indices)]
    return [int(index) for index in inner if isinstance(index, (int, np.integer)) and index >= 0]


def _parts(value: Any, rows: list[int]) -> Iterator[tuple[str, Any]]:
    """What a value refers to, by the end of its path."""
    if (kind := _container(value)) is not None:
        for key, part in _elements(kind, value, MOST_ITEMS, rows):
            yield f"[{key!r}]" if type(key) in PLAIN else f"[{type(key).__name__}]", part
    if type(value).__module__.partition(".")[0] == "pandas":  # its blocks, which a fetch may write to
        blocks = getattr(getattr(value, "_mgr", None), "arrays", ())
        yield from ((f".values[{index}]", block) for index, block in enumerate(blocks[:MOST_ITEMS]))
    if isinstance(value, types.MethodType):
        yield from ((".__self__", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield ".__wrapped__", value.__wrapped__
        name = f"{ANEW}{getattr(value, '__name__', 'lru_cache')}(...)"
        yield from ((f".{id(part)}{name}", part) for part in _cached(value))
    elif isinstance(value, types.FunctionType):
        defaults = [*enumerate(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        yield from ((f"{ANEW}{value.__name__}.__defaults__[{key!r}]", part) for key, part in defaults)
    for function in functions_of(value):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # an empty one
                if name != "__class__":
                    yield f"{ANEW}{name}", cell.cell_contents
    for path, space, name in _names(value):
        if not isinstance(space[name], types.ModuleType):
            yield f"{ANEW}{path}", space[name]
    if not isinstance(value, type):
        yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _cached(function: Any) -> list[Any]:
    """What `functools.lru_cache` keeps, of a connection most often just that: a dict, or keys and values in turn."""
    if function.cache_info().currsize > MOST_COPIED:
        return []
    return [each for each in gc.get_referents(function) if each is not vars(function) and not isinstance(each, type)]


def _attributes(value: Any) -> dict[str, Any]:
    """Those that an object has itself; read past its own code."""
    return {} if _is_opaque(value) else {**(_own(value) or {}), **slots_of(value)}


def _is_opaque(value: Any) -> bool:
    return (type(value).__module__ or "").partition(".")[0] in OPAQUE


def slots_of(value: Any) -> dict[str, Any]:
    """Attributes that its classes have slots for."""
    found = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):
                    found[name] = member.__get__(value)
    return found


def _own(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes; None where it has none, or its library keeps notes there."""
    with contextlib.suppress(AttributeError, TypeError):
        if not _is_opaque(value):
            own: dict[str, Any] = object.__getattribute__(value, "__dict__")
            return own
    return None


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


def _function(value: Any) -> types.FunctionType | None:
    inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    inner = value.fget if isinstance(value, property) else inner
    return inner if isinstance(inner, types.FunctionType) else None


def names_of(code: types.CodeType) -> list[str]:
    """The names that a function's code reads, inner functions included."""
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in names_of(each)]
    return list(dict.fromkeys([*code.co_names, *inner]))


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Those of them that are no attributes: a script's `data` has nothing to do with `self.data`."""
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _global_names(each)]
    own = [step.argval for step in dis.get_instructions(code) if step.opname.endswith(("_GLOBAL", "_NAME"))]
    return tuple(dict.fromkeys([*own, *inner]))


def _names(value: Any) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """What the user's code reads by name, as path, space and name: global names, names in modules, class attributes."""
    for function in functions_of(value):
        code, space = function.__code__, function.__globals__
        for name in _global_names(code) if is_users(function.__module__) else ():
            if name in space:
                yield name, space, name
            held = space.get(name)
            if isinstance(held, types.ModuleType) and is_users(held.__name__):
                yield from ((f"{name}.{each}", vars(held), each) for each in names_of(code) if each in vars(held))
    kind = value if isinstance(value, type) else type(value)
    for each in kind.__mro__:
        if is_users(each.__module__):
            for name, part in list(vars(each).items()):
                if not name.startswith("__") and not isinstance(part, CODE):
                    yield f"{each.__name__}.{name}", vars(each), name


class Held:
    """What workers see: the first values of a look, compared in microseconds with what they were.

    Args:
        seen: of the dataset and the collate function, as the workers that begin now see them.
        counts_shared: whether it counts as a change what is written to memory that processes share. Workers see it, but not
            those batches that they have made already; they may write to it themselves.
    """

    def __init__(self, seen: Look, *, counts_shared: bool = False) -> None:
        named = {(id(space), name): space for value in seen.values[:MOST_HELD] for _, space, name in _names(value)}
        self._named = [(space, name, space[name]) for (_, name), space in named.items()]
        self._noted: list[tuple[Callable[[Any], Any], Any, Any]] = []
        bytes_left = HELD_BYTES
        for value in seen.values:
            if len(self._noted) >= MOST_HELD:
                break
            array = value if isinstance(value, np.ndarray) else _as_array(value)
            is_shared = isinstance(value, SHARED_MEMORY) or (isinstance(value, torch.Tensor) and value.is_shared())
            if counts_shared or not is_shared:
                if array is not None:
                    part = _compared(array, bytes_left)
                    bytes_left -= part.nbytes
                    self._noted += [(np.ndarray.tobytes, part, part.tobytes())] if part.size else []
                self._noted += _noted(value)

    def is_unchanged(self) -> bool:
        """Whether all that is held is what it was."""
        try:
            return all(space.get(name) is value for space, name, value in self._named) and all(
                read(value) == then for read, value, then in self._noted
            )
        except Exception:  # values that cannot be compared are others
            return False


def _compared(array: np.ndarray[Any, Any], most_bytes: int) -> np.ndarray[Any, Any]:
    """What of an array is compared: all of it, or some of its numbers, evenly spaced; nothing where nobody can write to it."""
    plain = array.view(np.ndarray)
    if plain.flags.writeable and not plain.dtype.hasobject:
        if plain.nbytes <= most_bytes and not isinstance(array, np.memmap):
            return plain
        if plain.flags.c_contiguous:
            return plain.reshape(-1)[:: max(1, plain.size // HELD_PROBES)]
    return np.empty(0)


def _noted(value: Any) -> Iterator[tuple[Callable[[Any], Any], Any, Any]]:
    """How to read what may change of a value, from what, and what it is now."""
    if isinstance(value, torch.Tensor):
        if not value.is_inference():
            yield _version, value, value._version
        return
    kind = _container(value)
    if isinstance(value, SHARED_MEMORY):
        yield _memory, value, _memory(value)
    elif isinstance(value, GENERATORS):
        yield _state, value, _state(value)
    elif issubclass(type(value), (set, deque)):
        yield len, value, len(value)
    elif issubclass(type(value), (list, bytearray)) or (kind is dict and dict.__len__(value) > MOST_ITEMS):
        yield _some_items, value, _some_items(value)
    space = value if kind is dict and dict.__len__(value) <= MOST_ITEMS else _own(value)
    if space is not None and not isinstance(value, (types.ModuleType, type)):
        yield _itself, space, dict(space)
    if is_users(type(value).__module__) and any(vars(kind).get("__slots__") for kind in type(value).__mro__):
        yield slots_of, value, slots_of(value)


def _version(tensor: torch.Tensor) -> int:
    return tensor._version


def _itself(value: Any) -> Any:
    return value


def _some_items(values: Any) -> tuple[int, Any]:
    """All of them, or some, evenly spaced: compared by identity first, which takes 2 ns an item."""
    kind = _container(values) or bytearray
    count = kind.__len__(values)
    if kind is dict:
        return count, list(islice(dict.values(values), HELD_ITEMS))
    return count, kind.__getitem__(values, slice(None, None, max(1, count // HELD_ITEMS)))


def _memory(value: Any) -> bytes:
    memory: Any = value.get_obj() if isinstance(value, SynchronizedBase) else value
    return bytes(memoryview(memory).cast("B")[:MOST_COPIED])
