"""What the user's objects hold: dataset, collate function and samplers, with what they are made of.

    noted  ── fetch ──            changed()      what fetching changes: a cache, a counter
    noted  ── steps ──            changed()      what the training changes while workers run: labels, a batch size
    noted  ── the epoch ends ──   has_stayed()   may workers be kept for the next one?

Shallow: attributes are the same objects or equal values, containers have the same sizes and the same items at 64 places,
arrays the same values there. Globals and what only C code knows are not seen. Objects of installed libraries are looked
through for generators, but their attributes may change: a transform keeps what it has drawn.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from autotune_loader.pipeline.workload import is_users

MOST_FOUND, MOST_ITEMS = 256, 64
"""Objects that are looked at; items of one container that are."""
PROBES = 64
"""Places of a container or an array that are compared."""
MOST_WHOLE_BYTES, ITEM_BYTES = 1 << 24, 80
"""More is not compared as a whole: it would take over 5 ms, as long as starting a worker. What an item counts."""
ARRAYS = (np.ndarray, torch.Tensor)
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
PLAIN = (type(None), bool, int, float, complex, str, bytes, type, ModuleType)
MISSING: Any = object()


class Parts:
    """One walk over the objects, from those that people know by these names.

    Attributes:
        members: of objects, classes and small dicts that count: how these and a member of theirs are written, and their dict.
        values: containers and arrays that count.
        generators: of random numbers.
        channels: descriptors of pipes and sockets.
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self.members, self.values = dict[Any, tuple[str, str, Mapping[Any, Any]]](), list[tuple[str, Any]]()
        self.generators, self.channels = list[Any](), list[int]()
        roots, seen = {id(value) for value in named.values()}, set[int]()
        left = deque(named.items())
        while left and len(seen) < MOST_FOUND:
            path, value = left.popleft()
            if not isinstance(value, PLAIN) and id(value) not in seen:
                seen.add(id(value))
                with contextlib.suppress(Exception):  # whatever it is, it is not looked into
                    left.extend((path + name, each) for name, each in self._into(path, value, id(value) in roots))

    def _into(self, path: str, value: Any, is_root: bool) -> Iterator[tuple[str, Any]]:
        if isinstance(value, GENERATORS):
            self.generators.append(value)
        elif isinstance(value, ARRAYS):
            if not isinstance(value, np.memmap):  # whose places may lie on a disk
                self.values.append((path, value))
        elif isinstance(value, (list, dict, set, deque, tuple, frozenset)):
            if isinstance(value, dict) and len(value) <= MOST_ITEMS:
                self.members[id(value)] = path, "[{!r}]", value
            elif not isinstance(value, (tuple, frozenset)):
                self.values.append((path, value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            yield from [(f"[{key!r}]", each) for key, each in itertools.islice(items, MOST_ITEMS)]
        elif isinstance(value, MethodType):
            yield "", value.__self__
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # empty
                    yield f" ({cell!r})", cell.cell_contents
        elif isinstance(value, functools.partial):
            yield from ((".args", value.args), (".keywords", value.keywords), ("", value.func))
        else:
            yield from self._members_of(path, value, is_root)

    def _members_of(self, path: str, value: Any, is_root: bool) -> Iterator[tuple[str, Any]]:
        if callable(getattr(type(value), "fileno", None)):
            with contextlib.suppress(Exception):
                self.channels.append(value.fileno())
        own, kind = getattr(value, "__dict__", None), type(value)
        if isinstance(own, dict):
            draws = any(isinstance(each, GENERATORS) for each in own.values())  # it keeps what it has drawn
            is_users_own = is_users(kind.__module__)
            if is_root or isinstance(value, (Dataset, Sampler, SimpleNamespace)) or (is_users_own and not draws):
                self.members[id(own)] = path, ".{}", own
                if is_users_own:
                    self.members[kind] = f"the class {kind.__name__}", ".{}", vars(kind)
            yield from [(f".{name}", each) for name, each in own.items()]

    def whole(self) -> list[Any] | None:
        """All of what containers and arrays hold; None where that is too much."""
        sizes = [each.nbytes if isinstance(each, ARRAYS) else ITEM_BYTES * len(each) for _, each in self.values]
        return None if sum(sizes) > MOST_WHOLE_BYTES else [_whole(each) for _, each in self.values]


class Change(NamedTuple):
    path: str
    owner: Any
    name: Any
    was: Any
    now: Any


class Noted:
    """What the parts were at one moment; `whole` where `has_stayed` will be asked."""

    def __init__(self, parts: Parts, *, whole: bool = False) -> None:
        self._parts, self._whole = parts, parts.whole() if whole else None
        self._members = [(path, how, own, dict(own)) for path, how, own in parts.members.values()]
        self._values = [(path, each, _probes(each)) for path, each in parts.values]

    def changes(self) -> Iterator[Change]:
        """Members that are other ones now."""
        for path, how, own, then in self._members:
            if len(own) != len(then) or any(map(operator.is_not, own.values(), then.values())):
                for name in {**then, **own}:
                    was, now = then.get(name, MISSING), own.get(name, MISSING)
                    if not _is_same(was, now):
                        yield Change(path + how.format(name), own, name, was, now)

    def changed(self) -> str | None:
        """Where something is another now, as the user would write it; None where nothing is."""
        members = (change.path for change in self.changes())
        values = (path for path, value, then in self._values if not _is_same(_probes(value), then))
        return next(itertools.chain(members, values), None)

    def has_stayed(self) -> bool:
        """Whether all is as it was, so that workers that were started then cannot be told from new ones."""
        return self._whole is not None and self.changed() is None and _is_same(self._whole, self._parts.whole())


@contextlib.contextmanager
def undone(changes: Iterable[Change]) -> Iterator[None]:
    """For a while all is as it was before these changes, but for what has changed again since."""
    made = [each for each in changes if isinstance(each.owner, dict) and each.owner.get(each.name, MISSING) is each.now]
    undo(made)
    try:
        yield
    finally:
        for change in made:
            _put(change, change.now)


def undo(changes: Iterable[Change]) -> None:
    for change in changes:
        _put(change, change.was)


def _put(change: Change, value: Any) -> None:
    if value is MISSING:
        change.owner.pop(change.name, None)
    else:
        change.owner[change.name] = value


def _is_same(now: Any, then: Any) -> bool:
    try:
        return now is then or bool(type(now) is type(then) and now == then)
    except Exception:  # arrays, which have no truth, for one
        return False


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
        is_plain = value.device.type == "cpu" and value.layout is torch.strided and value.is_contiguous()
        bytes_ = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes() if is_plain else b""
        return _probes(value), zlib.crc32(bytes_)
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    return dict(value) if isinstance(value, dict) else list(value)
