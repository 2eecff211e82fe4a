"""Which batch is next: the index batches of one epoch, numbered, as a plain DataLoader would draw them.

    state of the generators ── iter(sampler) ── seed of the epoch ── (iter(sampler) again) ── index batches ...

A DataLoader asks its sampler for an iterator, then draws the seed of its workers (torch's `_base_seed`); with workers it asks
the sampler once more, and for the batches that these begin with. All that is repeated here, so that the order and the state of
every generator afterwards are those of a plain loader. What workers do not deliver is put back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler

from autotune_loader.pipeline.workload import length_of

Item = tuple[int, Any]
"""number of the batch in its epoch, indices (one index where the dataset makes the batches)"""


class Order(Iterator[Item]):
    """One epoch's index batches; who takes one has it in hand.

    Args:
        sampler: the batch sampler; the sampler of indices where the dataset makes the batches.
        generator: of the loader.
        ahead: index batches that torch draws before the first one is asked for: with `num_workers` as asked for.
        seed: of the epoch, where it is known; else it is drawn, as torch does.

    Attributes:
        is_torchs: whether the sampler is one of torch's, which draw an epoch at once, or from a generator that is held.
        in_hand: indices of the batches that were taken and that the loop has not had, by number.
        is_over: whether the loop was told that the epoch has ended.
        failed: what the sampler has raised while workers were given work; it is the loop's, at the batch that it comes to.
    """

    def __init__(
        self, sampler: Any, generator: torch.Generator | None = None, *, ahead: int = 0, seed: int | None = None
    ) -> None:
        self._sampler, self._ahead, inner = sampler, ahead, getattr(sampler, "sampler", None)
        is_plain = type(sampler) is BatchSampler
        self.is_torchs = type(inner if is_plain else sampler).__module__.startswith("torch.utils.data.")
        self._batch_size = sampler.batch_size if is_plain and not (sampler.drop_last or ahead) else None
        held = (generator, getattr(sampler, "generator", None), getattr(inner, "generator", None))
        self._generators = list({id(each): each for each in held if isinstance(each, torch.Generator)}.values())
        batches = iter(sampler)
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
            if ahead:
                batches = iter(sampler)
        self.seed = seed
        self.in_hand, self._again, self._drawn = dict[int, Any](), list[Item](), deque[Any]()
        self._delivered, self.is_over, self._number, self._draws = 0, False, 0, 0
        # Without workers torch finds the sampler's end last of all; many a sampler draws once more there.
        self._expected = None if ahead else length_of(sampler)
        self.failed: Exception | None = None
        self._before: deque[tuple[int, list[torch.Tensor]]] = deque()
        self._batches: Iterator[Any] = batches
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
        elif self.failed is not None:
            error, self.failed = self.failed, None
            raise error
        else:
            item = (self._number, self._drawn.popleft() if self._drawn else self._draw())
            self._number += 1
        self.in_hand[item[0]] = item[1]
        return item

    def had(self, number: int) -> None:
        del self.in_hand[number]
        self._delivered += 1
        while self._before and self._before[0][0] < self._delivered + self._ahead:
            self._before.popleft()

    def put_back(self, numbers: Iterable[int]) -> None:
        """Give these out again, first and in order."""
        self._again += [(number, self.in_hand.pop(number)) for number in numbers]
        self._again.sort(key=lambda item: item[0])
        sampler = self._sampler
        if self._batch_size not in (None, getattr(sampler, "batch_size", None)):
            # Torch's batch sampler was changed: what was drawn ahead is batched as it says now.
            self._batch_size = sampler.batch_size
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
