"""Bursts seed generators so that configurations read equal indices; afterwards each is in the state that it was in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Subset

from tests.support.bursts import ALONE, ONE_WORKER, measured, opened, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Drawing(Dataset[Any]):
    """Draws from every kind of generator that it can hold, and from the global ones."""

    def __init__(self) -> None:
        self.torch = torch.Generator().manual_seed(11)
        self.numpy = np.random.default_rng(12)
        self.legacy = np.random.RandomState(13)
        self.python = random.Random(14)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        own = self.numpy.random() + self.legacy.rand() + self.python.random()
        drawn = torch.rand((), generator=self.torch) + torch.rand(())
        return float(drawn) + own + np.random.rand() + random.random()  # noqa: NPY002


class Stream(Drawing, IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        return (self[index] for index in range(64))


class Batches(BatchSampler):
    def __init__(self, dataset: Any, generator: torch.Generator) -> None:
        super().__init__(RandomSampler(dataset, generator=generator), 4, drop_last=False)
        self.generator = torch.Generator().manual_seed(15)
        self.numpy = np.random.default_rng(16)

    def __iter__(self) -> Iterator[list[int]]:
        self.numpy.random()
        torch.rand((), generator=self.generator)
        return super().__iter__()


def state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    if isinstance(generator, torch.Generator):
        return repr(generator.get_state().tolist())
    return repr(generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state())


def states(generators: list[Any]) -> list[str]:
    global_ones = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()]  # noqa: NPY002
    return [*map(state_of, generators), *map(repr, global_ones)]


def parts_of_order(order: str, dataset: Any) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of the data side, and the generators in them."""
    generator = torch.Generator().manual_seed(21)
    if order == "generator":
        return {"generator": generator}, [generator]
    batches = Batches(dataset, generator)
    return {"batch_size": None, "batch_sampler": batches}, [generator, batches.generator, batches.numpy]


@pytest.mark.parametrize(
    ("isolation", "kind", "order"),
    [
        ("inline", "drawing", "generator"),
        ("inline", "subset", "batch_sampler"),
        ("inline", "stream", "generator"),
        ("process", "drawing", "batch_sampler"),
    ],
)
def test_every_random_state_is_as_it_was(kind: str, order: str, isolation: str) -> None:
    # GIVEN generators wherever a user may keep them
    drawing = Stream() if kind == "stream" else Drawing()
    dataset: Any = Subset(drawing, range(32)) if kind == "subset" else drawing
    parts, generators = parts_of_order(order, dataset)
    generators += [drawing.torch, drawing.numpy, drawing.legacy, drawing.python]
    before = states(generators)
    # WHEN bursts run without and with a worker
    with opened(workload(dataset, **parts), isolation) as probe:
        for config in (ALONE, ONE_WORKER):
            measured(probe.probe, config)
    # THEN
    assert states(generators) == before
