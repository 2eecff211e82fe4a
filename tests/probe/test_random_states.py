"""Bursts seed generators so that configurations read equal indices; afterwards each is in the state that it was in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Subset

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.opening import open_probe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

QUICK = BurstPlan(max_s=0.05, min_s=0.02, relative_error=0.5)


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
        own = (
            torch.rand((), generator=self.torch).item()
            + self.numpy.random()
            + self.legacy.rand()
            + self.python.random()
        )
        return float(own + torch.rand(()).item() + np.random.rand() + random.random())  # noqa: NPY002


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


def held_by(dataset: Drawing) -> list[Any]:
    return [dataset.torch, dataset.numpy, dataset.legacy, dataset.python]


def parts_of_order(order: str, dataset: Any) -> tuple[dict[str, Any], list[Any]]:
    """Arguments of the data side, and the generators in them."""
    generator = torch.Generator().manual_seed(21)
    if order == "generator":
        return {"batch_size": 4, "generator": generator}, [generator]
    if order == "sampler":
        return {"batch_size": 4, "sampler": RandomSampler(dataset, generator=generator)}, [generator]
    batches = Batches(dataset, generator)
    return {"batch_size": None, "batch_sampler": batches}, [generator, batches.generator, batches.numpy]


CASES = [
    *(("inline", kind, order) for kind in ("drawing", "subset") for order in ("generator", "sampler", "batch_sampler")),
    ("inline", "stream", "generator"),  # it has no order of indices
    ("process", "drawing", "batch_sampler"),
]


@pytest.mark.parametrize(("isolation", "kind", "order"), CASES)
def test_every_random_state_is_as_it_was(kind: str, order: str, isolation: Any) -> None:
    # GIVEN generators wherever a user may keep them
    drawing = Stream() if kind == "stream" else Drawing()
    dataset: Any = Subset(drawing, range(32)) if kind == "subset" else drawing
    parts, generators = parts_of_order(order, dataset)
    workload = Workload(data=DataSide.from_dataset(dataset, **parts), training=TrainingSide())
    before = states([*generators, *held_by(drawing)])
    # WHEN bursts run without and with a worker
    with open_probe(workload, inspect_machine(), isolation, None) as opened:
        for workers in (0, 1):
            assert isinstance(opened.probe.burst(LoaderConfig(num_workers=workers), QUICK), Measurement)
    # THEN
    assert states([*generators, *held_by(drawing)]) == before
