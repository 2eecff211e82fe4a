"""What runs in a worker: torch's own worker loop over a channel, with the random numbers of each batch.

given (pickled once for all workers) ── work ── torch's worker loop ── job ── seeds ── fetch, collate ── batch

A batch is drawn from (seed of the epoch, its number), whichever process makes it: the three global generators are seeded before
each. In the loop these belong to the training, so there they are put back.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import pickle
import random
import struct
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import numpy as np
import torch

from autotune_loader.autoloader import torchs
from autotune_loader.autoloader.channel import WorkerEnd

LOOKED = "looked"
"""What a worker notes whose dataset has asked for its number, or for how many workers there are."""
MASK, MOST_DRAWN = (1 << 64) - 1, 1 << 62
STATE_BYTES = 4 * 625
"""Of a Mersenne Twister: 624 words and a position."""
Seed = tuple[int, int]
"""Of a batch: for the global generators, and for those that its dataset holds."""


class Given:
    """What the workers of one iterator are given.

    Args:
        arguments: Of torch's worker loop, by name, but for those that differ between workers.
        is_seeded: Whether each batch is seeded.
        initial_seed: What `torch.initial_seed()` returns then; None for torch's own.
        prepare: Called first in a forked process, with a descriptor to keep.
        held: Generators that the dataset holds.

    Under `spawn` and `forkserver` it is pickled when the first worker starts, and the others get the same bytes: in a file of
    memory, so that no worker is waited for until it reads them.
    """

    def __init__(
        self, arguments: dict[str, Any], is_seeded: bool, initial_seed: int | None, prepare: Any, held: list[Any]
    ) -> None:
        self._parts: Any = (arguments, is_seeded, initial_seed, prepare, held)
        self._file, self._files = -1, list[int]()

    def prepare(self, keep: int) -> None:
        if (prepare := self._parts[3]) is not None:
            prepare(keep)

    def taken(self) -> Any:
        """All of it, which this process drops."""
        parts, self._parts = self._parts, None
        return parts

    def __reduce__(self) -> Any:
        popen: Any = get_spawning_popen()
        if self._file < 0:
            before, data = len(popen._fds), memoryview(ForkingPickler.dumps(self._parts))
            self._file = os.memfd_create("dataset")
            weakref.finalize(self, os.close, self._file)
            while data:
                data = data[os.write(self._file, data) :]
            self._files = popen._fds[before:]
        else:
            for file in self._files:  # of shared memory in the pickle, in the same places
                popen.duplicate_for_child(file)
        return _given, (DupFd(self._file),)


def _given(file: Any) -> Given:
    number = file.detach()
    with mmap.mmap(number, 0, prot=mmap.PROT_READ) as data:  # a position would be shared with other workers
        parts = pickle.loads(data)  # noqa: S301 - the loop's own
    os.close(number)
    return Given(*parts)


def work(given: Given, end: WorkerEnd, number: int, count: int) -> None:
    """The life of a worker; `number` and `count` are `id` and `num_workers` of its `get_worker_info()`."""
    end.begin()
    given.prepare(end.socket.fileno())
    arguments, is_seeded, initial_seed, _, held = given.taken()

    def first() -> None:
        end.seed = Seeds(torch.initial_seed() if initial_seed is None else initial_seed, held).begin
        _note_looks(end)

    end.first = first if is_seeded else None
    own = {"index_queue": end, "data_queue": end, "worker_id": number, "num_workers": count}
    torchs.worker_loop(**arguments, **own)


def _note_looks(end: WorkerEnd) -> None:
    kind: Any = type(info := torchs.worker_info())

    class Noted(kind):  # type: ignore[misc]
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            if name in ("id", "num_workers"):
                end.note = LOOKED
            return super().__getattribute__(name)

    Noted.__name__, Noted.__qualname__, Noted.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    object.__setattr__(info, "__class__", Noted)


class Threaded:
    """A dataset whose items are fetched by threads in each worker, of which it is the `worker_init_fn` too."""

    def __init__(self, dataset: Any, threads: int, init_fn: Callable[[int], object] | None) -> None:
        self._dataset, self._threads, self._init_fn = dataset, threads, init_fn
        self._pool: ThreadPoolExecutor | None = None

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "fetch")
        return list(self._pool.map(self._dataset.__getitem__, indices))

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __call__(self, worker: int) -> None:
        object.__setattr__(torchs.worker_info(), "dataset", self._dataset)
        if self._init_fn is not None:
            self._init_fn(worker)


def mixed(seed: int, number: int) -> int:
    """64 bits from a seed and a number, neighbours far apart (splitmix64, Steele et al. 2014)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


class Seeds:
    """The generators of one process; `held` are those that a dataset, its transforms or its collate_fn hold.

    `torch.initial_seed()` tells `initial_seed` during each batch.
    """

    def __init__(self, initial_seed: int, held: list[Any]) -> None:
        self._initial_seed, self._held = initial_seed & MASK, held

    def begin(self, seed: Seed) -> None:
        """Seed all of them for a batch."""
        own, of_held = seed
        # Torch seeds its CPU generator, and numpy the same algorithm, by 32 bits: they get different ones.
        random.seed(own)
        np.random.seed(own >> 32)
        # As `torch.manual_seed`, which would also look at every accelerator, for 75 us, and change the initial seed.
        state = torch.default_generator.manual_seed((own >> 1) & 0x7FFFFFFF).get_state()
        ctypes.c_uint64.from_address(state.data_ptr()).value = self._initial_seed
        torch.default_generator.set_state(state)
        for number, generator in enumerate(self._held):
            seed_one(generator, mixed(of_held, number))

    def around(self, make: Callable[[Any], Any], indices: Any, seed: Seed) -> Any:
        """Make a batch in the loop: the training's own state is put back, also after an exception."""
        before, torchs = states(), torch.default_generator.get_state()
        held = [(generator, state_of(generator)) for generator in self._held]
        try:
            self.begin(seed)
            return make(indices)
        finally:
            torch.default_generator.set_state(torchs)
            _put_back(*before)
            for generator, state in held:
                put_state(generator, state)


def seed_one(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF if isinstance(generator, np.random.RandomState) else seed)


def state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def drawn_from(generator: Any) -> int:
    """A number that depends on the state of a generator, which moves on."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(MOST_DRAWN, (), generator=generator, device=generator.device))
    draw = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return int(draw(0, MOST_DRAWN))


def put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def states() -> tuple[Any, ...]:
    """Of the generators of `random` and `numpy.random`, in 1 us: their own methods take 0.3 ms."""
    if _memory is None:
        return random.getstate(), np.random.get_state()
    return random._inst.gauss_next, *[each.raw for each in _memory]  # type: ignore[attr-defined]


def _put_back(python: Any, *others: Any) -> None:
    if _memory is None:
        random.setstate(python)
        np.random.set_state(others[0])
        return
    random._inst.gauss_next = python  # type: ignore[attr-defined]
    for each, value in zip(_memory, others, strict=True):
        each.raw = value


def _in_memory() -> list[Any] | None:
    """Where the states lie, with numpy's second Gaussian number; None where a Python or numpy has something else there."""
    python, numpy, state = random._inst, np.random.mtrand._rand, np.random.get_state(legacy=False)
    words = _bytes(id(python) + object.__basicsize__, STATE_BYTES)
    *key, position = python.getstate()[1]
    np.random.set_state({**state, "has_gauss": 1, "gauss": math.pi})
    known = struct.pack("id", 1, math.pi)
    place = ctypes.string_at(id(numpy), type(numpy).__basicsize__).find(known)
    np.random.set_state(state)
    if place < 0 or words.raw != struct.pack("i624I", position, *key):
        return None
    numpys = _bytes(numpy._bit_generator.ctypes.state_address, STATE_BYTES)
    return [words, numpys, _bytes(id(numpy) + place, len(known))]


def _bytes(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


_memory = _in_memory()
