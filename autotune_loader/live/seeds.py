"""Random numbers of a batch: drawn from (seed of the epoch, number of the batch), whichever process fetches it.

In a worker the three generators are seeded before each batch. In the training process they are the training's own, so
there each is put back after the batch; that costs up to 0.1 ms, and is left out for a generator that the dataset was
never seen to draw from. Data that cannot draw from any need no seeds at all.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

MASK = (1 << 64) - 1
ROW = 256
"""Batches whose seeds are worked out at once."""
FIRST_BATCHES = 8
"""Batches after which a generator counts as not drawn from, where it was left alone."""
EVERY = 128
"""It is looked at again in every 128th batch."""
PLAIN_DATA = (TensorDataset, torch.Tensor, np.ndarray, list, tuple)
"""Reading a sample of these runs no code of the user's."""


def mixed(seed: int, number: int) -> int:
    """64 bits from a seed and a number, neighbours far apart (splitmix64, Steele et al. 2014)."""
    return _mixed_row(seed, number // ROW)[number % ROW]


@functools.lru_cache(maxsize=16)
def _mixed_row(seed: int, row: int) -> list[int]:
    """Those of `ROW` numbers in a row: alone, each takes up to 6 us between batches, as Python's long integers are slow."""
    numbers = np.arange(row * ROW + 1, (row + 1) * ROW + 1, dtype=np.uint64)
    values = np.uint64(seed & MASK) + numbers * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed_row: list[int] = (values ^ (values >> np.uint64(31))).tolist()
    return mixed_row


class _Generator(NamedTuple):
    """One of the process' global generators."""

    save: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]
    draw: Callable[[], float]


# Torch seeds its CPU generator, and numpy the same algorithm, by 32 bits: they get different ones.
PYTHON = _Generator(random.getstate, random.setstate, random.seed, random.random)
NUMPY = _Generator(
    np.random.get_state, np.random.set_state, lambda seed: np.random.seed(seed >> 32), np.random.random_sample
)

# torch.manual_seed also looks at every accelerator, which takes 0.2 ms; workers have none.
_torch_seed = torch.default_generator.manual_seed
TORCH = _Generator(
    torch.default_generator.get_state,
    torch.default_generator.set_state,
    lambda seed: _torch_seed((seed >> 1) & 0x7FFFFFFF),
    lambda: torch.rand(()).item(),
)


def draws_nothing(dataset: Any, collate_fn: Any) -> bool:
    """Whether it is certain that no batch needs random numbers: plain data, put together as torch does it."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) in PLAIN_DATA and collate_fn in (default_collate, default_convert)


class WorkerSeeds:
    """In a worker, whose generators belong to the batch at hand."""

    def begin(self, epoch_seed: int, number: int) -> None:
        seed = mixed(epoch_seed, number)
        PYTHON.seed(seed)
        NUMPY.seed(seed)
        TORCH.seed(seed)

    def end(self) -> None:
        """The next batch is seeded anew."""


class LoopSeeds:
    """In the training process, whose generators belong to the training; each batch is put between `begin` and `end`.

    Only in the main thread. Another one fetches while the training draws, or yet another fetches, which would draw from the
    batch's seed, and draw the same once more when its own state is put back.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._drawn: list[_Generator] = []
        """Of `random` and numpy those that the dataset was seen to draw from."""
        self._torch_state = TORCH.save()
        self._saved: list[tuple[_Generator, Any]] = []
        self._expected: list[tuple[_Generator, float]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return LoopSeeds, ()

    def begin(self, epoch_seed: int, number: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        seed = mixed(epoch_seed, number)
        looks = self._batches < FIRST_BATCHES or self._batches % EVERY == 0
        self._batches += 1
        self._torch_state = TORCH.save()
        TORCH.seed(seed)
        for each in (PYTHON, NUMPY) if looks else self._drawn:
            self._saved.append((each, each.save()))
            if looks and each not in self._drawn:
                each.seed(seed)
                self._expected.append((each, each.draw()))
            each.seed(seed)

    def end(self) -> None:
        """Put the training's own state back, also after an exception."""
        if threading.current_thread() is not threading.main_thread():
            return
        TORCH.restore(self._torch_state)
        while self._expected:
            each, first = self._expected.pop()
            if each.draw() != first:
                self._drawn.append(each)
        while self._saved:
            each, state = self._saved.pop()
            each.restore(state)
