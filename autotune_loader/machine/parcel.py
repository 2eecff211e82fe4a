"""Objects on their way to another process: pickled once, as `multiprocessing` does for `spawn`, with the files that go along.

    parcel ── a pickle, whose key is equal where the same would be sent
           └─ what it refers to, pickled only to be sent: large lists, which are compared item by item

Locks, queues and shared tensors can be sent, and errors are those of `spawn`, as a parcel stands in for its start of a process.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import mmap
import operator
import os
import pickle
import socket
import stat
import sys
import weakref
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen, set_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

from autotune_loader.machine.kernel import memfd

MOST_FILES = 250
"""Descriptors in one packet: the kernel takes 253 (unix(7))."""
LARGE = 1000
"""Items of a list that is compared by its items."""
CHUNK = 10_000
"""Items that are pickled at once, in 3 ms: whoever else needs the interpreter meanwhile need not wait for a whole list."""
ATOMS = {type(None), bool, int, float, complex, str, bytes}
"""Kinds of items that cannot change."""
GLOBAL_GENERATORS = ("random", "_inst"), ("numpy.random.mtrand", "_rand"), ("torch", "default_generator")
"""Module and name of what each process has one of."""
GIVEN, LIST, APART, GLOBAL = "given", "list", "apart", "global"
"""What a pickle refers to: something that the other process has, a large list, something that does not count, or a global
generator, which is the other process's own there."""


class Lists:
    """Large lists that were sent, each with a number that is another one as soon as the list has another item.

    To compare 1.2 million strings takes 22 ms, to pickle them 406 ms.
    """

    def __init__(self) -> None:
        self._before = dict[int, tuple[Any, Any, int]]()
        self._now = dict[int, tuple[Any, Any, int]]()
        self._latest = 0

    def begin(self) -> None:
        """Lists that are not met again before the next call are forgotten."""
        self._before, self._now = self._now, {}

    def number(self, value: Any) -> int | None:
        """The number of a list or tuple; None where an item may change."""
        known = self._now.get(id(value)) or self._before.get(id(value))  # it is kept, so that nothing else has its id
        if known is None or len(known[1]) != len(value) or not all(map(operator.is_, known[1], value)):
            if not _cannot_change(value):
                return None
            self._latest += 1
            known = value, value[:], self._latest
        self._now[id(value)] = known
        return known[2]

    def items(self) -> dict[int, Any]:
        """The items of the lists that were met since `begin`, by number."""
        return {number: items for _, items, number in self._now.values()}


def _cannot_change(items: Any) -> bool:
    kinds = set(map(type, items))
    if tuple in kinds:  # such as (path, label)
        inner = itertools.chain.from_iterable(each for each in items if type(each) is tuple)
        kinds = kinds - {tuple} | set(map(type, inner))
    return kinds <= ATOMS


class _File:
    """A descriptor in a pickle: which of the parcel's files it is."""

    opening: Sequence[int] = ()
    """Files of the parcel that this process is opening."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        return self.opening[self._number]


class Parcel:
    """A value for another process.

    Args:
        value: Anything that `multiprocessing` can send to a process that it spawns.
        given: Objects that the other process has already: the pickle refers to them by their places.
        lists: Large lists that were sent before; None pickles all lists with the rest.
        apart: Objects in the value that may differ where the key is equal.

    Attributes:
        key: Equal where the same would be sent; None where that cannot be told, as pipes or sockets go along.

    Raises:
        Exception: As `multiprocessing` raises where something cannot be pickled.
        OSError: The kernel has no memory for it.
    """

    method, DupFd = "spawn", _File
    """Read by reducers, as they find the parcel in the place of a process that `multiprocessing` spawns."""

    def __init__(
        self, value: Any, given: Sequence[Any] = (), lists: Lists | None = None, apart: Sequence[Any] = ()
    ) -> None:
        self._places: dict[int, tuple[str, Any]]
        self._places = {id(each): (GLOBAL, place) for place, each in global_generators().items()}
        self._places |= {id(each): (GIVEN, place) for place, each in enumerate(given)}
        self._places |= {id(each): (APART, place) for place, each in enumerate(apart)}
        self._lists, self._apart, self._items = lists, apart, dict[int, Any]()
        self._digest, self._size = hashlib.sha256(), 0
        if lists is not None:
            lists.begin()
        self._file = memfd("parcel")
        self._files = [self._file]
        weakref.finalize(self, _close, self._files)
        outer = get_spawning_popen()
        set_spawning_popen(self)  # type: ignore[arg-type]
        try:
            _ParcelPickler(self).dump(value)
        finally:
            set_spawning_popen(outer)
        if lists is not None:
            self._items = lists.items()
        passed = [os.fstat(each) for each in self._files[1:]]
        can_compare = all(stat.S_ISREG(each.st_mode) for each in passed)
        self.key = (self._digest.digest(), *((each.st_dev, each.st_ino) for each in passed)) if can_compare else None

    def duplicate_for_child(self, file: int) -> int:
        """As of a process that `multiprocessing` spawns."""
        self._files.append(os.dup(file))
        return len(self._files) - 1

    def place_of(self, value: Any) -> tuple[str, Any] | None:
        """What the pickle has in the place of a value; None for the value itself."""
        if (place := self._places.get(id(value))) is not None:
            return place
        if self._lists is not None and type(value) in (list, tuple) and len(value) >= LARGE:
            number = self._lists.number(value)
            return None if number is None else (LIST, number)
        return None

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._size += (size := self._write(data))
        return size

    def _write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = left.nbytes
        while left:
            left = left[os.write(self._file, left) :]
        return size

    def close(self) -> tuple[list[int], int]:
        """Its files, and the size of its pickle: all that `unpack` needs. Nothing is added afterwards; to be called once."""
        with open(self._file, "wb", buffering=1 << 20, closefd=False) as file:
            pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
            pickler.dump(self._apart)
            for number, items in self._items.items():
                for at in range(0, len(items), CHUNK):
                    pickler.dump((number, items[at : at + CHUNK]))
            pickler.dump(None)
        return self._files, self._size

    def send(self, to: socket.socket) -> None:
        """Close it, and send it to whoever calls `receive` at the other end."""
        files, size = self.close()
        data = pickle.dumps((len(files), size))
        for at in range(0, len(files), MOST_FILES):
            socket.send_fds(to, [data], files[at : at + MOST_FILES])


class Posted:
    """A value for processes that `multiprocessing` starts: pickled once for all, and sent to each as files.

    A start that writes more than 64 KiB waits for the new process, and for ever if that is killed before it has read them.
    """

    _closed: tuple[list[int], int] | None = None

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> Any:
        if self._closed is None:
            self._parcel = Parcel(self._value)
            self._closed = self._parcel.close()
        files, size = self._closed
        return _unpacked, ([DupFd(each) for each in files], size)


def _unpacked(files: list[Any], size: int) -> Any:
    return unpack([each.detach() for each in files], size)


class _ParcelPickler(ForkingPickler):
    def __init__(self, parcel: Parcel) -> None:
        super().__init__(parcel, pickle.HIGHEST_PROTOCOL)
        self._parcel = parcel

    def persistent_id(self, value: Any) -> tuple[str, Any] | None:
        return self._parcel.place_of(value)


class _ParcelUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, known: dict[str, Any], modules: set[str]) -> None:
        super().__init__(file)
        self._known, self._modules = known, modules

    def find_class(self, module: str, name: str) -> Any:
        self._modules.add(module)
        return super().find_class(module, name)

    def persistent_load(self, place: tuple[str, Any]) -> Any:
        kind, where = place
        if kind == GLOBAL:
            module, name = where
            return getattr(importlib.import_module(module), name)
        return self._known[kind][where]


def global_generators() -> dict[tuple[str, str], Any]:
    """Those of Python, and of numpy and torch where these are imported, by module and name."""
    imported = [place for place in GLOBAL_GENERATORS if place[0] in sys.modules]
    return {(module, name): getattr(sys.modules[module], name) for module, name in imported}


def receive(by: socket.socket) -> tuple[list[int], int]:
    """The files of a parcel, and the size of its pickle.

    Raises:
        EOFError: Nobody sends one any more.
    """
    files = list[int]()
    while True:
        try:
            data, more, _, _ = socket.recv_fds(by, 64, MOST_FILES)
        except ConnectionError:
            data, more = b"", []
        if not data:
            raise EOFError
        files += more
        count, size = pickle.loads(data)  # noqa: S301
        if len(files) >= count:
            return files, size


def unpack(files: list[int], size: int, given: Sequence[Any] = (), modules: set[str] | None = None) -> Any:
    """The value of a parcel that was received; `modules` gets the names of those that its pickle refers to."""
    _File.opening = files
    with mmap.mmap(files[0], 0, prot=mmap.PROT_READ) as data:
        data.seek(size)
        rest, parts = pickle.Unpickler(data), defaultdict[int, list[Any]](list)  # noqa: S301 - the training's own
        apart = rest.load()
        while (part := rest.load()) is not None:
            number, items = part
            parts[number].append(items)
        lists = {number: type(each[0])(itertools.chain.from_iterable(each)) for number, each in parts.items()}
        data.seek(0)
        known = {GIVEN: given, LIST: lists, APART: apart}
        value = _ParcelUnpickler(data, known, set() if modules is None else modules).load()
    os.close(files[0])
    return value


def _close(files: list[int]) -> None:
    for each in files:
        os.close(each)
