"""Loaders that trace and loaders that do not, for `studies.fidelity.compare`.

Two loaders differ by more than tracing costs: where their workers' processes and pages happen to lie. So in `pairs_of_blocks`
one loader traces some blocks of batches and not others, in its workers and in the loop. What its plain blocks still pay is the
call of the wrapper and the count of the batches, about 0.3 us each.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, default_collate

from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.tracing import EndlessBatches, TracedCollate, TracedDataset, TracedWorkerInit
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.burst_loop import Run
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from studies.fidelity.measure import workload_of
from studies.workloads import WORKLOADS, SpinDataset

BLOCK = 100
"""Batches of one block of the parts."""
LEFT_OUT = 8
"""Batches at the start of a switched block: those asked for earlier, with two workers and prefetch 2, and as many again."""
ENDLESS = BurstPlan(max_s=1e6, min_s=0.1, relative_error=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A workload whose tracing is switched on and off."""

    workload: str
    workers: int
    block: int
    """Batches a block."""
    pairs: int
    """Pairs of a traced and a plain block."""

    def __str__(self) -> str:
        return f"{self.workload}, {self.workers} workers"


CASES = (
    Case("cpu_10ms", 0, 20, 80),
    Case("cpu_10ms", 2, 40, 100),
    Case("in_memory", 0, 200, 600),
    Case("in_memory", 2, 200, 200),
)


class NoStep:
    """Nothing: a step on several threads varies by more than tracing costs."""

    def __call__(self, model: Any, batch: Any) -> None:
        return None


class Switch:
    """Whether the next batch of this process is to be traced; a worker counts its own and knows how many others there are."""

    def __init__(self, block: int, workers: int) -> None:
        self.block, self.stride, self.number = block, max(1, workers), 0

    def is_on(self) -> bool:
        return self.number // self.block % 4 in (0, 3)

    def next(self) -> None:
        self.number += self.stride


class SwitchedDataset(TracedDataset):
    def __init__(self, dataset: Any, switch: Switch) -> None:
        super().__init__(dataset)
        object.__setattr__(self, "_switch", switch)

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        if self._switch.is_on():
            return super().__getitems__(indices)
        inner = self._inner
        return [inner[index] for index in indices]


class SwitchedCollate(TracedCollate):
    def __init__(self, switch: Switch) -> None:
        super().__init__(default_collate, batched=True)
        self._switch = switch

    def __call__(self, samples: Any) -> Any:
        on = self._switch.is_on()
        self._switch.next()
        return super().__call__(samples) if on else default_collate(samples)


class SwitchedInit(TracedWorkerInit):
    def __init__(self, switch: Switch) -> None:
        super().__init__(None)
        self._switch = switch

    def __call__(self, worker: int) -> None:
        super().__call__(worker)
        self._switch.number = worker


def pairs_of_blocks(case: Case) -> Iterator[tuple[float, float]]:
    """Seconds per batch of a traced block and of the plain one beside it: traced, plain, plain, traced, ..."""
    data, step = _without_step(case.workload)
    switch = Switch(case.block, case.workers)
    loader = DataLoader(
        SwitchedDataset(data.dataset, switch),
        batch_sampler=_endless(data),
        collate_fn=SwitchedCollate(switch),
        worker_init_fn=SwitchedInit(switch),
        multiprocessing_context="fork" if case.workers else None,  # the switch is shared by being copied
        **LoaderConfig(num_workers=case.workers, prefetch_factor=2 if case.workers else None).to_kwargs(),
    )
    iterator, run = iter(loader), Run(ENDLESS, case.workers, time.monotonic())

    def seconds(deliver: Callable[[], object]) -> float:
        for _ in range(LEFT_OUT):
            deliver()
        begun = time.perf_counter()
        for _ in range(case.block - LEFT_OUT):
            deliver()
        return (time.perf_counter() - begun) / (case.block - LEFT_OUT)

    def traced() -> float:
        return seconds(lambda: (run.deliver(iterator, step), run.knows_enough()))

    def plain() -> float:
        return seconds(lambda: step.run(next(iterator)))

    for number in range(case.pairs):
        if number % 2 == 0:
            first = traced()
            yield first, plain()
        else:
            first = plain()
            yield traced(), first
    run.measurement()  # fails if the loop and the workers were not of one mind about which batches are traced


def _without_step(name: str) -> tuple[DataSide, TrainingStep]:
    if name == "cpu_10ms":
        study = replace(WORKLOADS["cpu_bound"](), dataset=SpinDataset(4096, rounds=20), train_step=NoStep())
    else:
        study = replace(WORKLOADS[name](), train_step=NoStep())
    workload = workload_of(study)
    batch, _ = next(iter(make_traced_loader(workload.data, LoaderConfig(), seed=0)))
    return workload.data, build_step(workload.training, batch)


def _endless(data: DataSide) -> Any:
    assert data.batch_size is not None
    return EndlessBatches(BatchSampler(data.sampler, data.batch_size, data.drop_last))


class Constant(Dataset[Any]):
    """The same sample each time."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        return 1.0


class ConstantBatches(Constant):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return indices


def unchanged(samples: list[Any]) -> list[Any]:
    return samples


def parts() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """What delivers one batch in three ways, by dataset, and what pickles a record.

    "loader" has the wrappers of the dataset and of the collate function, "traced" the burst's loop and its checks besides.
    """
    torch.set_num_threads(1)
    data, step = _without_step("in_memory")
    yield "TensorDataset", _ways(data, step)
    yield "constant samples", _ways(replace(data, dataset=Constant(), collate_fn=unchanged), step)
    yield "__getitems__", _ways(replace(data, dataset=ConstantBatches(), collate_fn=unchanged), step)
    record = (1, time.monotonic(), time.monotonic(), time.monotonic(), 0.0123, 64)
    things = {"plain": (7, [1, 2]), "traced": (7, ([1, 2], record))}
    # The pickled record alone: the batch's tensors take the same road with and without it.
    yield (
        "travel",
        {name: lambda thing=thing: pickle.loads(ForkingPickler.dumps(thing)) for name, thing in things.items()},
    )


def _ways(data: DataSide, step: TrainingStep) -> dict[str, Callable[[], object]]:
    looped, unlooped = (iter(make_traced_loader(data, LoaderConfig(), 0)) for _ in range(2))
    bare = iter(DataLoader(data.dataset, batch_sampler=_endless(data), collate_fn=data.collate_fn))
    run = Run(replace(ENDLESS, min_s=1e6), 0, time.monotonic())
    return {
        "plain": lambda: step.run(next(bare)),
        "loader": lambda: step.run(next(unlooped)[0]),
        "traced": lambda: (run.deliver(looped, step), run.knows_enough()),
    }
