"""What the user's objects hold: dataset, collate function and samplers, with what they are made of.

    State.noted()                  ── fetch ──            .changed()   what fetching changes: a cache, a counter
    State.noted()   workers begin  ── steps ──            .changed()   what the training changes: labels, a batch size
    State.noted(whole=True)        ── the epoch ends ──   .changed()   may workers be kept for the next one?

Shallow: attributes are the same objects or equal values, containers have the same sizes and the same items at 64 places,
arrays the same values there; `whole` compares all of what is not too large. Globals and what only C code knows are not seen.
Objects of installed libraries are looked through for generators, but their attributes may change: a transform keeps what
it has drawn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from autotune_loader.pipeline.workload import is_users

MOST_FOUND, MOST_ITEMS, MOST_ARRAYS = 256, 64, 8
"""Objects that are looked at; items of one container that are; arrays that are probed."""
PROBES = 64
"""Places of a container or an array that are compared."""
MOST_WHOLE_ITEMS, MOST_WHOLE_BYTES = 200_000, 1 << 24
"""More than this is not compared as a whole: that would take some 5 ms, as long as starting a worker."""
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType)
SIMPLE = (bool, int, float, complex, str, bytes, tuple, frozenset, torch.Size, torch.dtype, np.generic)
"""Values that are the same where they are equal."""
MISSING: Any = object()


class Parts:
    """One walk over the objects.

    Args:
        named: where it begins, by the names that people know them by.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.objects: list[tuple[str, Any]] = []
        """How they are reached, and those whose attributes count."""
        self.containers: list[tuple[str, Any]] = []
        self.arrays: list[tuple[str, Any]] = []
        self.generators: list[Any] = []
        self.channels: list[int] = []
        """Descriptors of pipes and sockets."""
        roots, seen = {id(value) for value in named.values()}, set[int]()
        left = deque((path, value, True) for path, value in named.items())
        while left and len(seen) < MOST_FOUND:
            path, value, counts = left.popleft()
            if isinstance(value, PLAIN) or id(value) in seen:
                continue
            seen.add(id(value))
            left.extend(
                (path + name, inner, counts) for name, inner in self._into(path, value, counts, id(value) in roots)
            )

    def _into(self, path: str, value: Any, counts: bool, is_root: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, GENERATORS):
            self.generators.append(value)
        elif isinstance(value, (np.ndarray, torch.Tensor)):
            if counts and not isinstance(value, np.memmap):  # whose places may lie on a disk
                self.arrays.append((path, value))
        elif isinstance(value, (list, dict, set, deque)):
            if counts:
                self.containers.append((path, value))
            yield from _items(value)
        elif isinstance(value, (tuple, frozenset)):
            yield from _items(value)
        elif isinstance(value, MethodType):
            yield "", value.__self__
        elif isinstance(value, FunctionType):
            yield from ((f" ({cell!r})", _content(cell)) for cell in value.__closure__ or ())
        elif isinstance(value, functools.partial):
            yield from ((".args", value.args), (".keywords", value.keywords), ("", value.func))
        else:
            if callable(getattr(type(value), "fileno", None)):
                with contextlib.suppress(Exception):
                    self.channels.append(value.fileno())
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                draws = any(isinstance(each, GENERATORS) for each in own.values())  # it keeps what it has drawn
                is_users_own = is_users(type(value).__module__) and not draws
                if is_root or isinstance(value, (Dataset, Sampler, SimpleNamespace)) or is_users_own:
                    self.objects.append((path, value))
                yield from ((f".{name}", inner) for name, inner in list(own.items()))

    def noted(self, *, whole: bool = False) -> Noted:
        return Noted(self, whole=whole)


class Noted:
    """What the parts were at one moment."""

    def __init__(self, parts: Parts, *, whole: bool) -> None:
        self.attributes = [(path, vars(value), dict(vars(value))) for path, value in parts.objects]
        kinds = {type(value) for _, value in parts.objects}
        self.of_classes = [(kind, tuple(vars(kind).values())) for kind in kinds if is_users(kind.__module__)]
        self._read: list[tuple[str, Callable[[], Any], Any]] = []
        self.copies = [(each, _copied(each)) for _, each in parts.containers if len(each) <= MOST_ITEMS]
        self.is_whole = whole and sum(len(each) for _, each in parts.containers) <= MOST_WHOLE_ITEMS
        self.is_whole = self.is_whole and sum(each.nbytes for _, each in parts.arrays) <= MOST_WHOLE_BYTES
        readers = [(path, _container_reader(each, whole=whole)) for path, each in parts.containers]
        arrays = parts.arrays if whole else parts.arrays[:MOST_ARRAYS]
        if self.is_whole or not whole:
            readers += [(path, _array_reader(each, whole=whole)) for path, each in arrays]
            self._read = [(path, read, read()) for path, read in readers]

    def changed(self) -> str | None:
        """Where something is another now, as the user would write it; None where nothing is."""
        for path, now, then in self.attributes:
            if len(now) != len(then) or any(map(operator.is_not, now.values(), then.values())):
                for name in {**then, **now}:
                    if not _is_same(now.get(name, MISSING), then.get(name, MISSING)):
                        return f"{path}.{name}"
        for kind, values in self.of_classes:
            if any(map(operator.is_not, vars(kind).values(), values)):
                return f"the class {kind.__name__}"
        for path, read, what in self._read:
            if not _is_same(read(), what):
                return path
        return None


class Undo:
    """What the loop's own fetches have made ready, such as a file that was opened: workers begin without it."""

    def __init__(self) -> None:
        self._attributes: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}
        self._contents: dict[int, tuple[Any, Any, Any]] = {}

    def add(self, before: Noted) -> None:
        """Whatever is another now than it was noted before a fetch, that fetch has made."""
        for _, now, then in before.attributes:
            for name in {**then, **now}:
                was, value = then.get(name, MISSING), now.get(name, MISSING)
                if not _is_same(was, value):
                    known = self._attributes.get((id(now), name))
                    first = known[1] if known is not None and known[2] is was else was
                    self._attributes[id(now), name] = now, first, value
        for container, was in before.copies:
            if not _is_same(_copied(container), was):
                known = self._contents.get(id(container))
                first = known[1] if known is not None and _is_same(known[2], was) else was
                self._contents[id(container)] = container, first, _copied(container)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """While a process is started: all of it is as before, but for what the training has changed since."""
        attributes = [each for each in self._attributes.items() if each[1][0].get(each[0][1], MISSING) is each[1][2]]
        contents = [each for each in self._contents.values() if _is_same(_copied(each[0]), each[2])]
        self._put(attributes, contents, 1)
        try:
            yield
        finally:
            self._put(attributes, contents, 2)

    def undo(self) -> None:
        """For good."""
        self._put([*self._attributes.items()], [*self._contents.values()], 1)
        self._attributes, self._contents = {}, {}

    @staticmethod
    def _put(attributes: Any, contents: Any, which: int) -> None:
        for (_, name), states in attributes:
            if states[which] is MISSING:
                states[0].pop(name, None)
            else:
                states[0][name] = states[which]
        for states in contents:
            states[0].clear()
            (states[0].extend if isinstance(states[0], (list, deque)) else states[0].update)(states[which])


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        return ((f"[{key!r}]", inner) for key, inner in itertools.islice(list(value.items())[:MOST_ITEMS], MOST_ITEMS))
    return ((f"[{number}]", inner) for number, inner in enumerate(list(itertools.islice(value, MOST_ITEMS))))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _is_same(now: Any, then: Any) -> bool:
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (list, tuple)):
        if len(now) != len(then):
            return False
        return not any(map(operator.is_not, now, then)) or all(map(_is_same, now, then))
    if isinstance(now, dict):
        return now.keys() == then.keys() and all(_is_same(now[key], then[key]) for key in now)
    return isinstance(now, SIMPLE) and (now == then or now != now)


def _copied(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _container_reader(container: Any, *, whole: bool) -> Callable[[], Any]:
    """What reads the items that are compared."""
    length = len(container)
    if whole:
        return lambda: _copied(container)
    if length <= 1 or isinstance(container, (set, deque)):
        return lambda: len(container)
    places = range(0, length, max(1, length // PROBES))[:PROBES]
    read = operator.itemgetter(*(itertools.islice(container, PROBES) if isinstance(container, dict) else places))

    def probes() -> Any:
        try:
            return read(container) if len(container) == length else None
        except LookupError:
            return None

    return probes


def _array_reader(array: Any, *, whole: bool) -> Callable[[], Any]:
    if isinstance(array, torch.Tensor):
        is_counted = not array.is_inference()
        version = (lambda: array._version) if is_counted else (lambda: 0)  # of what torch has written
        if not whole or array.device.type != "cpu" or array.layout is not torch.strided:
            return version
        array = array.detach().view(torch.uint8).numpy() if array.dim() and array.is_contiguous() else np.zeros(0)
    if whole:
        return lambda: zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
    flat = array.reshape(-1)
    if not np.shares_memory(flat, array):
        return lambda: 0
    probes = flat[:: max(1, flat.size // PROBES)][:PROBES]
    read: Callable[[], Any] = probes.tobytes
    return read
