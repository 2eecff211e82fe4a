"""What the user's objects hold: dataset, collate function and samplers, with what they are made of.

    Parts.noted()                  ── fetch ──            .changed()   what fetching changes: a cache, a counter
    Parts.noted()   workers begin  ── steps ──            .changed()   what the training changes: labels, a batch size
    Parts.noted(whole=True)        ── the epoch ends ──   .changed()   may workers be kept for the next one?

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
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from autotune_loader.pipeline.workload import is_users

MOST_FOUND, MOST_ITEMS = 256, 64
"""Objects that are looked at; items of one container that are."""
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
        self.attributes: list[tuple[str, dict[str, Any]]] = []
        """How they are reached, and those that count."""
        self.classes: set[type[Any]] = set()
        self.values: list[tuple[str, Any]] = []
        """Containers and arrays."""
        self.generators: list[Any] = []
        self.channels: list[int] = []
        """Descriptors of pipes and sockets."""
        roots, seen = {id(value) for value in named.values()}, set[int]()
        left = deque((path, value, True) for path, value in named.items())
        while left and len(seen) < MOST_FOUND:
            path, value, counts = left.popleft()
            if not isinstance(value, PLAIN) and id(value) not in seen:
                seen.add(id(value))
                inner = self._into(path, value, counts, id(value) in roots)
                left.extend((path + name, each, counts) for name, each in inner)

    def _into(self, path: str, value: Any, counts: bool, is_root: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, GENERATORS):
            self.generators.append(value)
        elif isinstance(value, (np.ndarray, torch.Tensor)):
            if counts and not isinstance(value, np.memmap):  # whose places may lie on a disk
                self.values.append((path, value))
        elif isinstance(value, (list, dict, set, deque, tuple, frozenset)):
            if counts and not isinstance(value, (tuple, frozenset)):
                self.values.append((path, value))
            names = (
                (f"[{key!r}]", each) for key, each in (value.items() if isinstance(value, dict) else enumerate(value))
            )
            yield from list(itertools.islice(names, MOST_ITEMS))
        elif isinstance(value, MethodType):
            yield "", value.__self__
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # empty
                    yield f" ({cell!r})", cell.cell_contents
        elif isinstance(value, functools.partial):
            yield from ((".args", value.args), (".keywords", value.keywords), ("", value.func))
        else:
            if callable(getattr(type(value), "fileno", None)):
                with contextlib.suppress(Exception):
                    self.channels.append(value.fileno())
            own, kind = getattr(value, "__dict__", None), type(value)
            if isinstance(own, dict):
                draws = any(isinstance(each, GENERATORS) for each in own.values())  # it keeps what it has drawn
                is_users_own = is_users(kind.__module__)
                if is_root or isinstance(value, (Dataset, Sampler, SimpleNamespace)) or (is_users_own and not draws):
                    self.attributes.append((path, own))
                    self.classes |= {kind} if is_users_own else set()
                yield from ((f".{name}", each) for name, each in list(own.items()))

    def noted(self, *, whole: bool = False) -> Noted:
        return Noted(self, whole=whole)


class Noted:
    """What the parts were at one moment."""

    def __init__(self, parts: Parts, *, whole: bool = False) -> None:
        self.attributes = [(path, own, dict(own)) for path, own in parts.attributes]
        self._classes = [(kind, tuple(vars(kind).values())) for kind in parts.classes]
        self.items = [
            (each, dict(each)) for _, each in parts.values if isinstance(each, dict) and len(each) <= MOST_ITEMS
        ]
        items = sum(len(each) for _, each in parts.values if not isinstance(each, (np.ndarray, torch.Tensor)))
        size = sum(each.nbytes for _, each in parts.values if isinstance(each, (np.ndarray, torch.Tensor)))
        self.is_whole = whole and items <= MOST_WHOLE_ITEMS and size <= MOST_WHOLE_BYTES
        read = _whole if self.is_whole else _probes
        self._values = [(path, each, read, read(each)) for path, each in parts.values]

    def changed(self) -> str | None:
        """Where something is another now, as the user would write it; None where nothing is."""
        for path, now, then in self.attributes:
            if len(now) != len(then) or any(map(operator.is_not, now.values(), then.values())):
                for name in {**then, **now}:
                    if not _is_same(now.get(name, MISSING), then.get(name, MISSING)):
                        return f"{path}.{name}"
        for kind, values in self._classes:
            if any(map(operator.is_not, vars(kind).values(), values)):
                return f"the class {kind.__name__}"
        for path, value, read, then in self._values:
            if not _is_same(read(value), then):
                return path
        return None


class Prepared:
    """What the loop's own fetches have made ready in attributes and small dicts, such as a file that was opened."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Any], tuple[dict[Any, Any], Any, Any]] = {}
        """By dict and key: the dict, what was there at first, what there was after the last fetch."""

    def add(self, before: Noted) -> None:
        """Whatever is another now than it was noted before a fetch, that fetch has made."""
        for now, then in [*((now, then) for _, now, then in before.attributes), *before.items]:
            for name in {**then, **now}:
                was, value = then.get(name, MISSING), now.get(name, MISSING)
                if not _is_same(was, value):
                    known = self._known.get((id(now), name))
                    first = known[1] if known is not None and known[2] is was else was
                    self._known[id(now), name] = now, first, value

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """While a worker is started, all of it is as before, but for what the training has changed since."""
        made = {key: each for key, each in self._known.items() if each[0].get(key[1], MISSING) is each[2]}
        _put(made, 1)
        try:
            yield
        finally:
            _put(made, 2)

    def undo(self) -> None:
        """For good."""
        _put(self._known, 1)
        self._known = {}


def _put(known: dict[tuple[int, Any], Any], which: int) -> None:
    for (_, name), states in known.items():
        if states[which] is MISSING:
            states[0].pop(name, None)
        else:
            states[0][name] = states[which]


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


def _probes(value: Any) -> Any:
    """Of a container or an array, what is compared at each batch."""
    if isinstance(value, torch.Tensor):
        return 0 if value.is_inference() else value._version  # counts what torch has written
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1) if value.flags.c_contiguous else value[:0].reshape(-1)
        return flat[:: max(1, flat.size // PROBES)][:PROBES].tobytes()
    if isinstance(value, list):
        return len(value), value[:: max(1, len(value) // PROBES)][:PROBES]
    return len(value), list(itertools.islice(value.values(), PROBES)) if isinstance(value, dict) else None


def _whole(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        is_plain = (
            value.device.type == "cpu" and value.layout is torch.strided and value.dim() and value.is_contiguous()
        )
        array = value.detach().view(torch.uint8).numpy() if is_plain else np.zeros(0)
        return _probes(value), zlib.crc32(array.tobytes())
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    return dict(value) if isinstance(value, dict) else list(value)
