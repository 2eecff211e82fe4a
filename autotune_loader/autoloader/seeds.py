"""Random numbers of a batch: whoever makes it, a worker or the loop, they come from (seed of the epoch, number of the batch).

Seeded before each batch are the global generators of torch, Python and numpy, and those that dataset, transforms and
collate_fn hold. In the loop all of them belong to the training, so there their states are put back.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import math
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from autotune_loader.machine.clones import entropy_of, is_unseeded, seed_anew
from autotune_loader.machine.parcel import global_generators

MASK, MOST_DRAWN = (1 << 64) - 1, 1 << 62
STATE_BYTES = 4 * 625
"""Of a Mersenne Twister: 624 words and a position."""
OF_TORCH_HEAD, OF_TORCH_TAIL, OF_TORCH_BYTES = 20, 28, 2624
"""Of at::CPUGeneratorImpl: what of its state lies before the words and after them, and all of it."""
QUIET = 16
"""Batches in a row that draw nothing; the next ones are looked at, and seeded once something draws: seeding takes 10 us."""
MOST_OBJECTS, MOST_ITEMS = 256, 64
"""Objects among which generators are looked for, and items of one container that are."""
GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
PLAIN = (
    random.SystemRandom,
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    ModuleType,
    np.ndarray,
    torch.Tensor,
)
Seed = tuple[int, int]
"""Of a batch: for the global generators, and for those that are held."""


def mixed(seed: int, number: int) -> int:
    """64 bits from a seed and a number, neighbours far apart (splitmix64, Steele et al. 2014)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def objects_in(loader: Any) -> list[Any]:
    """What dataset and collate_fn consist of, without generators that are global, or that the loader's order comes from."""
    sampler = loader._index_sampler
    order = [getattr(each, "generator", None) for each in (loader, sampler, getattr(sampler, "sampler", None))]
    order += global_generators().values()
    of_sampler = _walk([sampler], {id(loader.dataset)})
    seen = {id(each) for each in (*order, *of_sampler) if isinstance(each, GENERATORS)}
    return _walk([loader.dataset, loader.collate_fn], seen)


def _walk(roots: list[Any], seen: set[int]) -> list[Any]:
    left, found = deque[Any](roots), list[Any]()
    while left and len(found) < MOST_OBJECTS:
        value = left.popleft()
        if isinstance(value, PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        found.append(value)
        if isinstance(value, GENERATORS):
            continue
        inner = list[Any]()
        with suppress(Exception):  # whatever it is, it is not looked into
            inner = [each for each in _inside(value) if not isinstance(each, PLAIN)]
        # Items of containers come last: there may be many.
        left.extendleft(each for each in inner if not isinstance(each, CONTAINERS))
        left.extend(each for each in inner if isinstance(each, CONTAINERS))
    return found


def generators_here(held: list[Any], dataset: Any, collate_fn: Any) -> list[Any]:
    """The generators that a worker holds, those of the training first.

    A dataset may make one anew where it is unpickled: it takes the place of the one that came along. If of numpy and without a
    seed, it is seeded again, as it may have been made in the process that this one was cloned from.

    Args:
        held: Those of the training, which came along.
        dataset: The worker's.
        collate_fn: The worker's.
    """
    roots = [dataset, collate_fn]
    here = [each for each in _walk(roots, set(map(id, global_generators().values()))) if isinstance(each, GENERATORS)]
    came, used, seeded = set(map(id, held)), set(map(id, here)), list(map(entropy_of, held))
    new = [each for each in here if id(each) not in came]
    for each in new:
        if is_unseeded(each, seeded):
            seed_anew(each)
    found = list[Any]()
    for each in held:
        one = each if id(each) in used else next((other for other in new if type(other) is type(each)), each)
        new = [other for other in new if other is not one]
        found.append(one)
    return found + new


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, CONTAINERS):
        return itertools.islice(value.values() if isinstance(value, Mapping) else value, MOST_ITEMS)
    if isinstance(value, (MethodType, BuiltinMethodType)):
        return [value.__self__]
    if isinstance(value, FunctionType):
        return [*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ())]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def base_of(generators: Iterable[Any]) -> int:
    """A seed from the states of generators, which move on: whoever sets them back gets the same samples."""
    return functools.reduce(mixed, map(_drawn_from, generators), 0)


class Seeds:
    """The generators of one process; `torch.initial_seed()` tells `initial_seed` during each batch."""

    def __init__(self, initial_seed: int, held: list[Any]) -> None:
        self._initial_seed, self._held = initial_seed & MASK, held
        self._quiet = 0
        """Batches in a row that drew nothing; negative once some did after that."""

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
            _seed(generator, mixed(of_held, number))

    def around(self, make: Callable[[Any], Any], indices: Any, seed: Callable[[], Seed]) -> Any:
        """Make a batch in the loop: the training's own states are put back, also after an exception.

        Where no batch has drawn anything so far none is seeded. The first one that draws is made again, seeded.
        """
        before = states()
        if self._quiet >= QUIET:
            try:
                batch = make(indices)
            except BaseException:
                put_back(before)
                raise
            if states() == before:
                return batch
            put_back(before)
            self._quiet = -1
        held = [(generator, _state_of(generator)) for generator in self._held]
        try:
            self.begin(seed())
            if self._held or self._quiet < 0:
                return make(indices)
            seeded = states()
            batch = make(indices)
            self._quiet = self._quiet + 1 if states() == seeded else 0
            return batch
        finally:
            put_back(before)
            for generator, state in held:
                _put_state(generator, state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed >> 1)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF if isinstance(generator, np.random.RandomState) else seed)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _drawn_from(generator: Any) -> int:
    """A number that depends on the state of a generator, which moves on."""
    if isinstance(generator, torch.Generator):
        return int(torch.randint(MOST_DRAWN, (), generator=generator, device=generator.device))
    draw = generator.integers if isinstance(generator, np.random.Generator) else generator.randint
    return int(draw(0, MOST_DRAWN))


def _put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def states() -> tuple[Any, ...]:
    """Of the global generators of torch, Python and numpy, in less than 1 us: their own methods take 0.3 ms."""
    if _memory is None:
        known: Any = np.random.get_state()
        numpys = known[0], tuple(known[1].tolist()), *known[2:]
        return random.getstate(), numpys, torch.default_generator.get_state().numpy().tobytes()
    python, numpy, gauss, torchs = _memory
    return python.raw, numpy.raw, gauss.raw, torchs.raw, random._inst.gauss_next  # type: ignore[attr-defined]


def put_back(before: tuple[Any, ...]) -> None:
    """Make the global generators what they were."""
    if _memory is None:
        python, numpys, torchs = before
        random.setstate(python)
        np.random.set_state(numpys)
        torch.default_generator.set_state(torch.frombuffer(bytearray(torchs), dtype=torch.uint8))
        return
    *others, random._inst.gauss_next = before  # type: ignore[attr-defined]
    for each, value in zip(_memory, others, strict=True):
        each.raw = value


def _in_memory() -> list[Any] | None:
    """Where the states lie, with second Gaussian numbers; None where a Python, numpy or torch has something else there."""
    python, numpy, state = random._inst, np.random.mtrand._rand, np.random.get_state(legacy=False)
    words = _bytes(id(python) + object.__basicsize__, STATE_BYTES)
    *key, position = python.getstate()[1]
    np.random.set_state({**state, "has_gauss": 1, "gauss": math.pi})
    known = struct.pack("id", 1, math.pi)
    place = ctypes.string_at(id(numpy), type(numpy).__basicsize__).find(known)
    np.random.set_state(state)
    torchs = _of_torch()
    if place < 0 or torchs is None or words.raw != struct.pack("i624I", position, *key):
        return None
    numpys = _bytes(numpy._bit_generator.ctypes.state_address, STATE_BYTES)
    return [words, numpys, _bytes(id(numpy) + place, len(known)), torchs]


def _of_torch() -> Any:
    """Its CPU generator: seed, position and 624 words of a Mersenne Twister, then the second numbers of two normal ones."""
    generator: Any = torch.default_generator
    before = generator.get_state()
    address, words = generator._cdata, before.numpy()[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
    place = ctypes.string_at(address, OF_TORCH_BYTES).find(words.tobytes())
    if place < OF_TORCH_HEAD:
        return None
    memory = _bytes(address + place - OF_TORCH_HEAD, OF_TORCH_HEAD + words.nbytes + OF_TORCH_TAIL)

    def drawn() -> list[float]:
        normal = [
            torch.randn((), dtype=kind, **how).item() for kind in (torch.float32, torch.float64) for _ in range(2)
        ]
        return normal + torch.rand(700, **how).tolist()

    how: dict[str, Any] = {"generator": generator, "device": "cpu"}  # whatever the script has made the default
    torch.randn((), **how)  # of which a second one is left
    state, first = memory.raw, drawn()
    memory.raw = state
    is_right = drawn() == first
    generator.set_state(before)
    return memory if is_right else None


def _bytes(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


_memory = _in_memory()
