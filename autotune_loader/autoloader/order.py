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
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

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
"""They draw an epoch at once, or from a generator that is held."""

Item = tuple[int, Any]
"""number of the batch in its epoch, indices (one index where the dataset makes the batches)"""


class Order(Iterator[Item]):
    """One epoch's index batches; who takes one has it in hand.

    Args:
        sampler: the batch sampler; the sampler of indices where the dataset makes the batches.
        generator: of the loader.
        ahead: index batches that torch draws before the first batch is asked for: with `num_workers` as asked for.
        seed: of the epoch, where it is known; else it is drawn, as torch does.

    Attributes:
        is_torchs: whether the sampler is one of torch's, which draw nothing between two batches.
        in_hand: indices of the batches that were taken and not delivered, by number.
        delivered: batches that the loop has had.
        is_over: whether the loop was told that the epoch has ended.
    """

    def __init__(
        self, sampler: Any, generator: torch.Generator | None = None, *, ahead: int = 0, seed: int | None = None
    ) -> None:
        self._sampler, self._ahead = sampler, ahead
        inner = getattr(sampler, "sampler", None)
        self.is_torchs = type(inner if type(sampler) is BatchSampler else sampler) in TORCH_SAMPLERS
        held = (generator, getattr(sampler, "generator", None), getattr(inner, "generator", None))
        self._generators = list({id(each): each for each in held if isinstance(each, torch.Generator)}.values())
        batches = iter(sampler)
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
            if ahead:
                batches = iter(sampler)
        self.seed = seed
        self.in_hand: dict[int, Any] = {}
        self.delivered, self.is_over = 0, False
        self._again = list[Item]()
        self._number = self._draws = 0
        # Without workers torch finds the sampler's end last of all; many a sampler draws once more there.
        self._expected = None if ahead else length_of(sampler)
        self._before: deque[tuple[int, list[torch.Tensor]]] = deque()
        self._batches: Iterator[Any] = batches
        self._drawn: deque[Any] = deque()
        for _ in range(ahead):
            with contextlib.suppress(StopIteration):
                self._drawn.append(self._draw())

    def _draw(self) -> Any:
        if self._generators:
            self._before.append((self._draws, [each.get_state() for each in self._generators]))
        self._draws += 1
        return next(self._batches)

    def __next__(self) -> Item:
        if self._again:
            item = self._again.pop(0)
        elif self._number == self._expected and self.in_hand:
            raise StopIteration
        else:
            item = (self._number, self._drawn.popleft() if self._drawn else self._draw())
            self._number += 1
        self.in_hand[item[0]] = item[1]
        return item

    def had(self, number: int) -> None:
        del self.in_hand[number]
        self.delivered += 1
        while self._before and self._before[0][0] < self.delivered + self._ahead:
            self._before.popleft()

    def put_back(self, numbers: Iterable[int]) -> None:
        """Give these out again, first and in order."""
        self._again += [(number, self.in_hand.pop(number)) for number in list(numbers)]
        self._again.sort(key=lambda item: item[0])

    def batch_anew(self) -> None:
        """The batch sampler was changed: what is not in hand is batched as it says now, from torch's own."""
        sampler = self._sampler
        if type(sampler) is BatchSampler and not sampler.drop_last and not self._ahead:
            indices = itertools.chain.from_iterable([*(item[1] for item in self._again), *self._batches])
            self._number -= len(self._again)
            self._again, self._expected = [], None
            self._batches = iter(lambda: [*itertools.islice(indices, sampler.batch_size)], [])

    def leave(self) -> None:
        """The epoch is left early: the loader's own generators as a plain loader would have left them.

        How far ahead was drawn depends on the workers; torch's RandomSampler, for one, draws once more at its end.
        """
        if not self.is_over and self._before and self.is_torchs:
            for generator, state in zip(self._generators, self._before[0][1], strict=True):
                generator.set_state(state)
            self._before.clear()
