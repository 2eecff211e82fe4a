"""`max_cores`: bursts run on so many cores, so that what is measured is what will be."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import tune
from autotune_loader.decision.space import consumer_thread_counts
from autotune_loader.machine.affinity import confined_to

CORES = sorted(os.sched_getaffinity(0))


class Cores(Dataset[Any]):
    """How many cores a process may use, in the first column, and in one that only the wrong number has no value for."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if len(os.sched_getaffinity(0)) != 1:
            raise RuntimeError("more than one core")
        return torch.zeros(4)


def on_one_core(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if len(os.sched_getaffinity(0)) != 1:
        raise RuntimeError("more than one core")
    return model(batch).sum()


@pytest.mark.process
@pytest.mark.parametrize("isolation", ["process", "inline"])
def test_bursts_their_workers_and_the_baseline_run_on_as_many_cores(isolation: str) -> None:
    # GIVEN a job that fails on more than one core, with a step that binds
    result = tune(
        Cores(),
        torch.nn.Linear(4, 2),
        train_step=on_one_core,
        batch_size=8,
        max_cores=1,
        budget=8,
        isolation=isolation,
        reuse=False,
        progress=False,
    )
    # THEN everything worked, the baseline too, and the step is given no more threads
    assert result.status != "fallback"
    assert all(trial.failure is None for trial in result.trials)
    assert {trial.config.num_workers > 0 for trial in result.trials} == {False, True}
    assert (result.best.consumer_threads or 1) == 1
    assert result.twin is not None
    assert result.twin.usable_cores == 1
    # AND afterwards this process has all of its cores again
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_the_cores_are_given_back_whatever_happens() -> None:
    def fail() -> None:
        with confined_to(1):
            assert sorted(os.sched_getaffinity(0)) == CORES[:1]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert sorted(os.sched_getaffinity(0)) == CORES


@pytest.mark.parametrize("cores", [None, len(CORES), 10_000])
def test_as_many_as_there_are_change_nothing(cores: int | None) -> None:
    with confined_to(cores):
        assert sorted(os.sched_getaffinity(0)) == CORES


@pytest.mark.parametrize(
    ("cores", "most", "counts"),
    [(8, float("inf"), (None, 4, 2, 1)), (8, 8, (None, 4, 2, 1)), (4, 4, (4, 2, 1)), (2, 2, (2, 1)), (1, 1, (1,))],
)
def test_the_steps_threads_fit_into_the_cores(cores: int, most: float, counts: tuple[int | None, ...]) -> None:
    assert consumer_thread_counts(cores, 8, most) == counts
