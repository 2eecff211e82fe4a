"""Random numbers of a batch: drawn from (seed of the epoch, number of the batch), whichever process fetches it.

Before each batch the three global generators are seeded, and those that dataset, transforms and collate_fn hold. In the
loop the global ones belong to the training, so there they are put back afterwards; `torch.initial_seed()` stays what it is.
Saving and restoring them by copying their words takes 5 us, by their own methods 0.1 ms.
"""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

MASK = (1 << 64) - 1
STATE_BYTES = 4 * 625
"""Of a Mersenne Twister: 624 words and a position."""
PLAIN_DATA = (TensorDataset, torch.Tensor, np.ndarray, list, tuple)
"""Reading a sample of these runs no code of the user's."""


def mixed(seed: int, number: int) -> int:
    """64 bits from a seed and a number, neighbours far apart (splitmix64, Steele et al. 2014)."""
    value = (seed + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """Whether it is certain that no batch needs random numbers: plain data, put together as torch does it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in PLAIN_DATA and collate_fn in (default_collate, default_convert)


class Seeds:
    """Of one loader, in one process.

    Args:
        held: generators of the dataset, transforms and collate_fn.
    """

    def __init__(self, held: Sequence[Any] = ()) -> None:
        self.held = [_seeding(each) for each in held]

    def begin(self, seed: int, initial_seed: int) -> None:
        """Before a batch, in a worker.

        Args:
            seed: of the batch, 64 bits.
            initial_seed: what `torch.initial_seed()` tells.
        """
        # Torch seeds its CPU generator, and numpy the same algorithm, by 32 bits: they get different ones.
        random.seed(seed)
        np.random.seed(seed >> 32)
        # As `torch.manual_seed`, which would also look at every accelerator, for 75 us, and change the initial seed.
        state = torch.default_generator.manual_seed((seed >> 1) & 0x7FFFFFFF).get_state()
        ctypes.c_uint64.from_address(state.data_ptr()).value = initial_seed & MASK
        torch.default_generator.set_state(state)
        for number, seeding in enumerate(self.held):
            seeding(mixed(seed, number))

    def fetch(self, make: Callable[[Any], Any], indices: Any, seed: int, initial_seed: int) -> Any:
        """The same in the loop, around making a batch: the training's own state is put back, also after an exception."""
        state, of_python, of_numpy = torch.default_generator.get_state(), _python.save(), _numpy.save()
        try:
            self.begin(seed, initial_seed)
            return make(indices)
        finally:
            torch.default_generator.set_state(state)
            _python.restore(of_python)
            _numpy.restore(of_numpy)


def _seeding(generator: Any) -> Callable[[int], object]:
    if isinstance(generator, torch.Generator):
        return lambda seed: generator.manual_seed(seed >> 1)
    if isinstance(generator, random.Random):
        return generator.seed
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed & 0xFFFFFFFF)
    bits = generator.bit_generator
    return lambda seed: setattr(bits, "state", type(bits)(seed).state)


def _words(address: int) -> Any:
    return (ctypes.c_char * STATE_BYTES).from_address(address)


class _Python:
    """The generator behind `random`: 624 words and a position, and the second Gaussian number that is drawn with a first."""

    def __init__(self) -> None:
        self._generator: Any = random._inst
        words, (*key, position) = _words(id(self._generator) + object.__basicsize__), self._generator.getstate()[1]
        self._words = words if words.raw == struct.pack("i624I", position, *key) else None

    def save(self) -> Any:
        return random.getstate() if self._words is None else (self._words.raw, self._generator.gauss_next)

    def restore(self, state: Any) -> None:
        if self._words is None:
            random.setstate(state)
        else:
            self._words.raw, self._generator.gauss_next = state


class _Numpy:
    """The generator behind `numpy.random`, which tells where its words are; its second Gaussian number lies in the object."""

    def __init__(self) -> None:
        generator, state = np.random.mtrand._rand, np.random.get_state(legacy=False)
        self._words = _words(generator._bit_generator.ctypes.state_address)
        np.random.set_state({**state, "has_gauss": 1, "gauss": math.pi})
        known, size = struct.pack("id", 1, math.pi), type(generator).__basicsize__
        place = ctypes.string_at(id(generator), size).find(known)
        np.random.set_state(state)
        self._gauss = (ctypes.c_char * len(known)).from_address(id(generator) + place) if place >= 0 else None

    def save(self) -> Any:
        return np.random.get_state() if self._gauss is None else (self._words.raw, self._gauss.raw)

    def restore(self, state: Any) -> None:
        if self._gauss is None:
            np.random.set_state(state)
        else:
            self._words.raw, self._gauss.raw = state


_python, _numpy = _Python(), _Numpy()
