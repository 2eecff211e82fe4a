"""Which batch is next: the index batches of one epoch, numbered, as a plain DataLoader would draw them.

    state of the generators ── iter(sampler) ── seed of the epoch ── (iter(sampler) again) ── index batches ...

A DataLoader asks its sampler for an iterator first, then draws the seed of its workers (torch calls it `_base_seed`), and
with workers it asks the sampler once more, and then for the batches that these are to begin with. All that is repeated
here, so that the order and the state of every generator afterwards are those of a plain loader.

A batch is in hand from the moment it was taken until the loop has it. What workers do not deliver is put back.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from autotune_loader.pipeline.workload import length_of

TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""They draw from torch only, so that the states of `random` and numpy (60 us) need not be noted at each epoch's start."""

Item = tuple[int, Any]
"""number of the batch in its epoch, indices (one index where the dataset makes the batches)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the order is drawn from: arguments of the loader, whatever number of workers runs."""

    sampler: Any
    """The batch sampler; the sampler of indices where the dataset makes the batches."""
    generator: torch.Generator | None
    ahead: int = 0
    """Index batches that torch draws before the first batch is asked for: with `num_workers` as asked for."""

    @property
    def samplers(self) -> list[Any]:
        """The batch sampler and the one within."""
        inner = getattr(self.sampler, "sampler", None)
        return [self.sampler] if inner is None else [self.sampler, inner]

    @property
    def is_torchs(self) -> bool:
        """Whether torch's own classes draw."""
        inner = self.sampler.sampler if type(self.sampler) is BatchSampler else self.sampler
        return type(inner) in TORCH_SAMPLERS

    @property
    def generators(self) -> list[torch.Generator]:
        """What the loader and its samplers hold, each once, in a fixed order."""
        held = [self.generator, *(getattr(sampler, "generator", None) for sampler in self.samplers)]
        return list({id(each): each for each in held if isinstance(each, torch.Generator)}.values())


class Order(Iterator[Item]):
    """One epoch's index batches; who takes one has it in hand.

    Args:
        source: what to draw from.
        seed: of the epoch, where it is known; else it is drawn, as torch does.

    Attributes:
        begun_with: states of all generators before anything was drawn.
        drew_seed: whether the seed was drawn.
        in_hand: batches that were taken and not delivered, by number.
        delivered: batches that the loop has had.
        is_over: whether the loop was told that the epoch has ended.
    """

    def __init__(self, source: Source, *, seed: int | None = None) -> None:
        self.source, self.begun_with, self.drew_seed = source, states_of(source), seed is None
        batches = iter(source.sampler)
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=source.generator).item())
            if source.ahead:
                batches = iter(source.sampler)
        self.seed = seed
        self.in_hand: dict[int, Item] = {}
        self.delivered, self.is_over = 0, False
        self._again: deque[Item] = deque()
        self._number = self._draws = 0
        # Without workers torch finds the sampler's end last of all; many a sampler draws once more there.
        self._expected = None if source.ahead else length_of(source.sampler)
        self._generators = source.generators
        self._before: deque[tuple[int, list[torch.Tensor]]] = deque()
        self._batches: Iterator[Any] = batches
        self._drawn: deque[Any] = deque()
        for _ in range(source.ahead):
            with contextlib.suppress(StopIteration):
                self._drawn.append(self._draw())

    def _draw(self) -> Any:
        if self._generators:
            self._before.append((self._draws, [each.get_state() for each in self._generators]))
        self._draws += 1
        return next(self._batches)

    def __next__(self) -> Item:
        if self._again:
            item = self._again.popleft()
        elif self._number == self._expected and self.in_hand:
            raise StopIteration
        else:
            item = (self._number, self._drawn.popleft() if self._drawn else self._draw())
            self._number += 1
        self.in_hand[item[0]] = item
        return item

    def had(self, number: int) -> None:
        del self.in_hand[number]
        self.delivered += 1
        while self._before and self._before[0][0] < self.delivered + self.source.ahead:
            self._before.popleft()

    def put_back(self, numbers: Iterable[int]) -> None:
        """Give these out again, first and in order."""
        again = [*self._again, *(self.in_hand.pop(number) for number in list(numbers))]
        self._again = deque(sorted(again, key=lambda item: item[0]))

    def batch_anew(self) -> None:
        """The batch sampler was changed: what is not in hand is batched as it says now, from torch's own."""
        sampler = self.source.sampler
        if type(sampler) is BatchSampler and not sampler.drop_last and not self.source.ahead:
            indices = itertools.chain.from_iterable([*(item[1] for item in self._again), *self._batches])
            self._number -= len(self._again)
            self._again, self._expected = deque(), None
            self._batches = iter(lambda: [*itertools.islice(indices, sampler.batch_size)], [])

    def leave(self) -> None:
        """The epoch is left early: the loader's own generators as a plain loader would have left them.

        How far ahead was drawn depends on the workers; torch's RandomSampler, for one, draws once more at its end.
        """
        if self.is_over or not self._before or not self.source.is_torchs:
            return
        for generator, state in zip(self._generators, self._before[0][1], strict=True):
            generator.set_state(state)
        self._before.clear()


def states_of(source: Source) -> dict[str, Any]:
    """The states of all that the sampler may draw from, as plain values that torch.save can take."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in source.generators],
        "samplers": [each.state_dict() for each in source.samplers if hasattr(each, "state_dict")],
    }
    if not source.is_torchs:
        states |= {"python": random.getstate(), "numpy": np.random.get_state()}
    return states


def restore_own(source: Source, states: Mapping[str, Any]) -> None:
    """Give the samplers and the generators that they hold the states that were noted."""
    for generator, state in zip(source.generators, states["generators"], strict=False):
        generator.set_state(state)
    stateful = [sampler for sampler in source.samplers if hasattr(sampler, "state_dict")]
    for sampler, state in zip(stateful, states["samplers"], strict=False):
        sampler.load_state_dict(state)


def drawn_again(source: Source, saved: Mapping[str, Any]) -> Order:
    """The order of a saved epoch, where it was left; the process' own random state is left as it is.

    Raises:
        ValueError: the sampler ends before, so it is not the one that was saved.
    """
    ours = torch.get_rng_state(), random.getstate(), np.random.get_state()
    restore_own(source, saved["begun_with"])
    try:
        _set_global(*(saved["begun_with"].get(name) for name in ("torch", "python", "numpy")))
        order = Order(source, seed=None if saved["drew_seed"] else saved["seed"])
        for number in range(saved["delivered"]):
            if next(order, None) is None:
                raise ValueError(
                    f"the saved epoch was at batch {saved['delivered']}, but this sampler ends after {number}: it is not the "
                    "one that was saved; load the state into a loader of the same dataset and batch size"
                )
            order.had(number)
    finally:
        _set_global(*ours)
    return order


def _set_global(torch_state: Any, python_state: Any, numpy_state: Any) -> None:
    torch.set_rng_state(torch_state)
    if python_state is not None:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
