"""Which batch is next: the index batches of one epoch, numbered, as a plain DataLoader would draw them.

    state of the generators ── iter(sampler) ── seed of the epoch ── (iter(sampler) again) ── index batches ...

A DataLoader asks its sampler for an iterator first, then draws the seed of its workers (torch calls it `_base_seed`), and
with workers it asks the sampler once more. A sampler that is a generator draws only when its first index is wanted, so that
the seed of the workers comes before the seed of the order. All that is repeated here, so that the order and the state of
every generator afterwards are those of a plain loader.

A batch is in hand from the moment a pool has taken it until the loop has it. What is in hand when a pool is lost is given
out again, and an order that was saved in mid-epoch is drawn once more and passes over what the loop had.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from collections.abc import Iterator, Mapping
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

from autotune_loader.live.numbered import Item
from autotune_loader.live.trust import sampler_refusal
from autotune_loader.pipeline.look import Held, Look
from autotune_loader.pipeline.workload import length_of

TORCH_SAMPLERS = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""They draw from torch only, so that the states of `random` and numpy (60 us) need not be noted at each epoch's start."""

GLOBAL = (torch.default_generator, random._inst, np.random.mtrand._rand)
"""Generators of the process."""
MOST_WATCHED = 64
"""Draws of an epoch that are watched, at some 0.1 ms each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the order is drawn from: the arguments of the loader, whatever configuration it runs with."""

    sampler: Any
    """The batch sampler; the sampler of indices where the dataset makes the batches."""
    generator: torch.Generator | None
    workers: int = 0
    """`num_workers` as the loader was asked for: torch draws earlier with workers."""
    ahead: int = 0
    """Index batches that such a loader draws before the first batch is asked for."""


class Order(Iterator[Item]):
    """One epoch's index batches as (number, seed of the epoch, indices); who takes one has it in hand.

    Args:
        source: what to draw from.
        seed: of the epoch, where it is known; else it is drawn, as torch does.

    Attributes:
        seed: of the epoch.
        begun_with: states of the generators before anything was drawn.
        drew_seed: whether the seed was drawn.
        in_hand: batches that were taken and not delivered, by number.
        is_ended: whether the sampler has said that there is no more.
        is_over: whether the loop was told that the epoch has ended.
        is_settled: whether its generators are as a plain loader would have left them.
        received: batches that the loop has had of an IterableDataset, where nothing is numbered.
        workers: with which it began.
        source: what it was drawn from.
        skip: batches of one that are to be fetched and dropped first.
        worker_state: state of the generator just before the seed was drawn: a pool that draws from it gets this seed.
    """

    def __init__(self, source: Source, *, seed: int | None = None) -> None:
        self.source, self.begun_with = source, states_of(source)
        batches = iter(source.sampler)
        generator = source.generator or torch.default_generator
        self.worker_state = generator.get_state()
        self.drew_seed = seed is None
        if seed is None:
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=source.generator).item())
            if source.workers:
                batches = iter(source.sampler)
        self.seed = seed
        self.in_hand: dict[int, Item] = {}
        self.is_ended = self.is_over = self.is_settled = False
        self.received = self.skip = self.workers = 0
        self._again: deque[Item] = deque()
        self._number = 0
        self._ahead = source.ahead if source.workers else 0
        # Any other sampler is drawn from directly: nothing of ours stands between two batches.
        is_watched = source.workers > 0 and sampler_refusal(source.sampler) is not None
        self._heard = _Heard(batches, source) if is_watched else None
        self._batches = self._heard or batches
        # With workers torch asks a sampler ahead for its end, too, where many draw once more; without, last of all.
        self._expected = None if source.workers else length_of(source.sampler)
        self._drawn: deque[Any] = deque(itertools.islice(self._batches, self._ahead))

    def __next__(self) -> Item:
        if self._again:
            item = self._again.popleft()
        elif self._number == self._expected and self.in_hand:
            raise StopIteration
        else:
            try:
                item = (self._number, self.seed, self._draw())
            except StopIteration:
                self.is_ended = True
                raise
            self._number += 1
        self.in_hand[item[0]] = item
        return item

    def _draw(self) -> Any:
        return self._drawn.popleft() if self._drawn else next(self._batches)

    @property
    def listens(self) -> bool:
        """Whether the sampler was seen to depend on what the training does between two batches."""
        return self._heard is not None and self._heard.listens

    @property
    def has_more(self) -> bool:
        """Whether there is a batch left to be taken; the sampler is asked for one where that is not known."""
        if not self._again and not self.is_ended:
            try:
                self._again.append(next(self))
            except StopIteration:
                return False
            del self.in_hand[self._again[0][0]]
        return bool(self._again)

    @property
    def delivered(self) -> int:
        """Batches that the loop has had."""
        return self._number - len(self.in_hand) - len(self._again)

    @property
    def drawn(self) -> int:
        """How often the sampler was asked for an index batch."""
        return max(self._ahead, self._number + self.is_ended)

    def put_back(self) -> int:
        """Give out again, first and in order, what is in hand; returns how many batches that are."""
        again = sorted([*self.in_hand.values(), *self._again], key=lambda item: item[0])
        self.in_hand.clear()
        self._again = deque(again)
        return len(again)

    def position(self) -> tuple[int, list[int]]:
        """Batches before this number were delivered, except for those listed (only where order is not kept)."""
        waiting = sorted([*self.in_hand, *(item[0] for item in self._again)])
        first = self._number
        while waiting and waiting[-1] == first - 1:
            first = waiting.pop()
        return first, waiting

    def pass_over(self, first: int, except_for: list[int]) -> None:
        """Take up a position again: index batches are drawn, nothing is fetched.

        Raises:
            ValueError: the sampler ends before the position, so it is not the one that was saved.
        """
        kept = set(except_for)
        for number in range(first):
            try:
                indices = self._draw()
            except StopIteration:
                raise ValueError(
                    f"the saved epoch was at batch {first}, but this sampler ends after {number}: it is not the one that "
                    "was saved; load the state into a loader of the same dataset and batch size"
                ) from None
            if number in kept:
                self._again.append((number, self.seed, indices))
        self._number = first


class _Heard(Iterator[Any]):
    """What a sampler of the user's gives, for as long as it shares its random numbers and attributes with nobody else."""

    def __init__(self, batches: Iterator[Any], source: Source) -> None:
        self._batches, self._samplers, self.listens = batches, _samplers(source), False
        self._held: Held | None = None
        self._left = MOST_WATCHED

    def __next__(self) -> Any:
        if self.listens or not self._left:
            return next(self._batches)
        self._left -= 1
        generators, held = Held(Look(values=[*GLOBAL])), self._held
        is_changed = held is not None and not held.is_unchanged()
        drawn = next(self._batches)
        if held is not None:  # a whole order may be drawn with its first batch
            self.listens = is_changed or not generators.is_unchanged()
        if held is None or not held.is_unchanged():
            parts = [(each, *getattr(each, "__dict__", {}).values()) for each in self._samplers]
            self._held = Held(Look(values=[*itertools.chain(*parts)]))
        return drawn


def states_of(source: Source) -> dict[str, Any]:
    """The states of all that the sampler may draw from, as plain values that torch.save can take."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in _generators(source)],
        "samplers": [sampler.state_dict() for sampler in _samplers(source) if hasattr(sampler, "state_dict")],
        "epochs": [sampler.epoch for sampler in _told_epochs(source)],
    }
    if type(_innermost(source)) not in TORCH_SAMPLERS:
        states |= {"python": random.getstate(), "numpy": np.random.get_state()}
    return states


def restore_own(source: Source, states: Mapping[str, Any]) -> None:
    """Give the samplers and the generators that they hold the states that were noted."""
    for generator, state in zip(_generators(source), states["generators"], strict=False):
        generator.set_state(state)
    stateful = [sampler for sampler in _samplers(source) if hasattr(sampler, "state_dict")]
    for sampler, state in zip(stateful, states["samplers"], strict=False):
        sampler.load_state_dict(state)
    for sampler, epoch in zip(_told_epochs(source), states["epochs"], strict=False):
        sampler.set_epoch(epoch)


def drawn_again(source: Source, state: Mapping[str, Any]) -> Order:
    """The order of a saved epoch at its position; the process' own random state is left as it is.

    Raises:
        ValueError: as `Order.pass_over`.
    """
    with _as_then(source, state["begun_with"]):
        order = Order(source, seed=None if state["draws_seed"] else state["seed"])
        order.seed = state["seed"]
        order.pass_over(state["delivered"], state["missing"])
        order.skip = state.get("stream", 0)
    return order


def settle(order: Order) -> None:
    """After an epoch that was left early: the loader's own generators as a plain loader would have left them.

    How far ahead a pool has drawn depends on its workers; torch's RandomSampler, for one, draws once more at its end. Only
    for torch's samplers, which may be asked again without harm, and where nobody has seeded a generator since.
    """
    source = order.source
    generators, plain = _generators(source), order.delivered + (source.ahead if source.workers else 0)
    is_as_plain = order.is_over or order.is_settled or order.drawn == plain
    if is_as_plain or not generators or type(_innermost(source)) not in TORCH_SAMPLERS:
        return
    order.is_settled = True
    now = [generator.get_state() for generator in generators]
    left, wanted = (_states_after(source, order, count) for count in (order.drawn, plain))
    is_untouched = all(torch.equal(a, b) for a, b in zip(left, now, strict=True))
    for generator, state in zip(generators, wanted if is_untouched else now, strict=True):
        generator.set_state(state)


def _states_after(source: Source, order: Order, draws: int) -> list[torch.Tensor]:
    with _as_then(source, {**order.begun_with, "samplers": [], "epochs": []}):
        again = Order(source, seed=None if order.drew_seed else order.seed)
        for _ in range(draws):
            again.in_hand.clear()
            next(again, None)
    return [generator.get_state() for generator in _generators(source)]


@contextlib.contextmanager
def _as_then(source: Source, begun_with: Mapping[str, Any]) -> Iterator[None]:
    """Draw as when an epoch began; afterwards the process' global state is its own again."""
    ours = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    restore_own(source, begun_with)
    try:
        _set_global(begun_with["torch"], begun_with.get("python"), begun_with.get("numpy"))
        yield
    finally:
        _set_global(*ours)


def _set_global(torch_state: torch.Tensor, python_state: Any, numpy_state: Any) -> None:
    torch.set_rng_state(torch_state)
    if python_state is not None:
        random.setstate(python_state)
    if numpy_state is not None:
        np.random.set_state(numpy_state)


def _innermost(source: Source) -> Any:
    return source.sampler.sampler if type(source.sampler) is BatchSampler else source.sampler


def _samplers(source: Source) -> list[Any]:
    inner = getattr(source.sampler, "sampler", None)
    return [source.sampler] if inner is None else [source.sampler, inner]


def _told_epochs(source: Source) -> list[Any]:
    """The samplers that keep which epoch they were told; mmengine's has but the method."""
    return [each for each in _samplers(source) if hasattr(each, "set_epoch") and hasattr(each, "epoch")]


def _generators(source: Source) -> list[torch.Generator]:
    """The generators that the loader and its samplers hold, each once, in a fixed order."""
    held = [source.generator, *(getattr(sampler, "generator", None) for sampler in _samplers(source))]
    unique = {id(generator): generator for generator in held if isinstance(generator, torch.Generator)}
    return list(unique.values())
