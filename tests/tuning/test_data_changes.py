"""`tune(allow=("cache",))`: what a cache would bring is measured where fetching binds, and said why not elsewhere."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import TuningResult, tune
from autotune_loader.tuning.experiments import budget_of_search, measured_change
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

TWO = LoaderConfig(num_workers=2)


class Cached:
    """A machine whose bursts take a third of the CPU from the cache; notes the order of what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.asked.append("fresh" if plan.is_before else str(plan.change))
        machine = SimulatedMachine(cores=4, cpu_s=0.06 if plan.is_before else 0.02)
        return SimulatedProbe(machine, FakeClock()).burst(config, plan)

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        raise AssertionError("not asked for")


def test_the_gain_is_that_of_paired_rounds_which_take_turns() -> None:
    probe = Cached()
    found = measured_change("uint8", probe, TWO, 1000, seconds_left=60)
    assert found.speedup is not None
    assert found.speedup.value == pytest.approx(3, rel=0.1)
    assert found.speedup.count == 4
    assert found.config == TWO
    assert probe.asked[:4] == ["uint8", "fresh", "fresh", "uint8"]


def test_a_cache_may_do_with_fewer_workers_and_is_then_measured_with_them() -> None:
    class Cheap(Cached):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
            cpu_s = 0.06 if plan.is_before else 0.0005
            return SimulatedProbe(SimulatedMachine(cores=4, cpu_s=cpu_s, receive_s=0.005), FakeClock()).burst(
                config, plan
            )

    found = measured_change("cache", Cheap(), TWO, 1000, seconds_left=60)
    assert found.config == LoaderConfig()
    assert found.speedup is not None
    assert found.speedup.value > 2


def test_samples_that_cannot_be_cached_are_told() -> None:
    class Refusing(Cached):
        def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
            return Failure(kind="user_exception", phase="first_batch", message="Photos gives another sample each time")

    found = measured_change("cache", Refusing(), TWO, 1000, seconds_left=60)
    assert found.speedup is None
    assert found.note == "not measured: Photos gives another sample each time"


def test_the_search_leaves_it_its_share_of_the_budget() -> None:
    assert budget_of_search(60, {"cache"}) == 50
    assert budget_of_search(10, {"cache"}) == 6


class Photos(Dataset[Any]):
    """4 ms of computing that is the same each time, and noise that is not."""

    def __init__(self) -> None:
        self.transform = noisy

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return self.transform(torch.full((64,), float(index))), index % 2


def noisy(picture: torch.Tensor) -> torch.Tensor:
    return picture + torch.rand(1)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_cache_is_measured_and_is_the_first_advice(tmp_path: Path) -> None:
    path = tmp_path / "loader.json"
    result = tune(Photos(), batch_size=8, allow=("cache",), budget=25, output=path, reuse=False, progress=False)
    (cache,) = result.data_changes
    if result.verdict.binding not in ("cpu", "wait"):
        pytest.skip(f"other processes disturb the bursts: {result.verdict.sentence}")
    assert cache.speedup is not None, cache.note
    assert cache.speedup.value > 1.5
    assert cache.sample_bytes is not None
    assert 64 * 4 < cache.sample_bytes < 4096
    assert cache.dataset_bytes == pytest.approx(10_000 * cache.sample_bytes)
    assert "CachedPrefix(dataset)" in result.advice[0].action
    assert "from the second epoch on" in result.advice[0].reason
    assert "; all samples take" in result.advice[0].reason
    assert TuningResult.load(path).data_changes == result.data_changes
