"""Random numbers of a batch: drawn from (seed of the epoch, number of the batch), whichever process makes it.

Before each batch the three global generators are seeded. In the loop these belong to the training, so there they are put back.
"""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

MASK = (1 << 64) - 1
STATE_BYTES = 4 * 625
"""Of a Mersenne Twister: 624 words and a position."""
Seed = tuple[int, int]
"""Of a batch: for the global generators, and for those that its dataset holds."""


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
    """Seed a generator by 64 bits."""
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


def put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


def states() -> tuple[Any, ...]:
    """Of the generators of `random` and `numpy.random`: in 1 us, where their own methods take 0.1 ms."""
    if _memory is None:
        name, words, *others = np.random.get_state()
        return random.getstate(), (name, tuple(words), *others)
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
    """Where they lie, with numpy's second Gaussian number; None where another Python or numpy has something else there."""
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
