"""Random numbers of a batch: drawn from (seed of the epoch, number of the batch), whichever process fetches it.

Before each batch the three global generators are seeded, and those that dataset, transforms and collate_fn hold. In the
loop the global ones belong to the training, so there they are put back afterwards; `torch.initial_seed()` stays what it is.
Saving and restoring them by copying their words takes 5 us, by their own methods 0.1 ms.
"""

from __future__ import annotations

import ctypes
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
        self.held = [seeding for each in held if (seeding := _seeding(each)) is not None]

    def begin(self, seed: int, initial_seed: int) -> None:
        """Before a batch, in a worker.

        Args:
            seed: of the batch, 64 bits.
            initial_seed: what `torch.initial_seed()` tells.
        """
        # Torch seeds its CPU generator, and numpy the same algorithm, by 32 bits: they get different ones.
        random.seed(seed)
        np.random.seed(seed >> 32)
        _seed_torch((seed >> 1) & 0x7FFFFFFF, initial_seed)
        for number, seeding in enumerate(self.held):
            seeding(mixed(seed, number))

    def fetch(self, make: Callable[[Any], Any], indices: Any, seed: int, initial_seed: int) -> Any:
        """The same in the loop, around making a batch: the training's own state is put back, also after an exception."""
        states = torch.default_generator.get_state(), PYTHON.save(), NUMPY.save()
        try:
            self.begin(seed, initial_seed)
            NUMPY.noted()
            return make(indices)
        finally:
            torch.default_generator.set_state(states[0])
            PYTHON.restore(states[1])
            NUMPY.restore(states[2])


def _seeding(generator: Any) -> Callable[[int], object] | None:
    if isinstance(generator, torch.Generator):
        return lambda seed: generator.manual_seed(seed >> 1)
    if isinstance(generator, random.Random):
        return generator.seed
    if isinstance(generator, np.random.RandomState):
        return lambda seed: generator.seed(seed & 0xFFFFFFFF)
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        return lambda seed: setattr(bits, "state", type(bits)(seed).state)
    return None


def _seed_torch(seed: int, initial_seed: int) -> None:
    """As `torch.manual_seed`, which would also look at every accelerator, for 75 us, and change the initial seed."""
    generator = torch.default_generator.manual_seed(seed)
    state = generator.get_state()
    ctypes.c_uint64.from_address(state.data_ptr()).value = initial_seed & MASK
    generator.set_state(state)


class _Python:
    """The generator behind `random`: 624 words and a position, and the second Gaussian number that is drawn with a first."""

    def __init__(self) -> None:
        self._generator: Any = random._inst
        words = (ctypes.c_char * STATE_BYTES).from_address(id(self._generator) + object.__basicsize__)
        *key, position = self._generator.getstate()[1]
        self._words = words if words.raw == struct.pack("i624I", position, *key) else None

    def save(self) -> Any:
        return random.getstate() if self._words is None else (self._words.raw, self._generator.gauss_next)

    def restore(self, state: Any) -> None:
        if self._words is None:
            random.setstate(state)
        else:
            self._words.raw, self._generator.gauss_next = state


class _Numpy:
    """The generator behind `numpy.random`, which tells where its words are.

    Whether it keeps a second Gaussian number only `get_state` tells, in 45 us. That is asked when the words have changed
    since it had none: none can be drawn without that.
    """

    def __init__(self) -> None:
        self._bits = bits = np.random.mtrand._rand._bit_generator
        address = bits.ctypes.state_address if isinstance(bits, np.random.MT19937) else None
        self._words = None if address is None else (ctypes.c_char * STATE_BYTES).from_address(address)
        self._left = self._seeded = b""

    def save(self) -> Any:
        if self._words is None:
            return np.random.get_state()
        now = self._words.raw
        if now != self._left:
            state = np.random.get_state(legacy=False)
            return state if state["has_gauss"] else now
        return now

    def noted(self) -> None:
        """It has been seeded."""
        if self._words is not None:
            self._seeded = self._words.raw

    def restore(self, state: Any) -> None:
        if self._words is None or not isinstance(state, bytes):
            self._left = b""
            np.random.set_state(state)
            return
        if self._words.raw != self._seeded:
            np.random.seed(0)  # forgets a second Gaussian number
        self._words.raw = self._left = state


PYTHON, NUMPY = _Python(), _Numpy()
