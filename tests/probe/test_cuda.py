"""Bursts and tuning on a real GPU; `sh studies/gpu/run.sh` runs these and the studies. Skipped where there is no CUDA.

The logic is tested on any machine with a fake device (tests/probe/test_device.py); here is what only a device can say.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import tune
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.device import timeline_of
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ALONE, ONE_WORKER, measured, opened, warm_bench, workload

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

PLAN = BurstPlan(max_s=0.5, min_s=0.2, relative_error=0.05, deadline_s=60.0)
PINNED = LoaderConfig(num_workers=2, pin_memory=True)
# About 10 ms on a GPU of 1 to 2 GHz.
STEP_CYCLES = 15_000_000


class Rows(Dataset[torch.Tensor]):
    """Rows of so many floats, from memory."""

    def __init__(self, floats: int = 16) -> None:
        self.row = torch.arange(floats, dtype=torch.float32)

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.row


def slow_step(model: Any, batch: torch.Tensor) -> None:
    torch.cuda._sleep(STEP_CYCLES)


def train(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def on_gpu(dataset: Any = None, isolation: str = "process", **training: Any) -> Any:
    side = TrainingSide(**{"device": "cuda", "train_step": train, **training})
    return opened(workload(dataset or Rows(), 8, side), isolation)


def test_a_mark_is_passed_when_the_device_has_come_there_and_not_before() -> None:
    # GIVEN a timeline, and work of about 70 ms
    timeline = timeline_of(torch.device("cuda"))
    assert timeline is not None
    timeline.open()
    handed_over = timeline.now()
    torch.cuda._sleep(100_000_000)
    # WHEN a mark is laid behind it
    mark = timeline.mark()
    seen_at_once = timeline.passed(mark)
    timeline.wait(mark)
    # THEN it is passed only after the wait, at a time of the host's own clock between handing over and now
    passed = timeline.passed(mark)
    assert seen_at_once is None
    assert passed is not None
    assert handed_over < passed < timeline.now() + 0.001


def test_a_burst_is_timed_by_the_device_and_knows_its_memory() -> None:
    # GIVEN a step of which the host sees only the launch
    with on_gpu(train_step=slow_step) as probe:
        ceiling = probe.probe.step_ceiling(None, PLAN)
        burst = measured(probe.probe, PINNED, PLAN)
    # THEN ceiling and burst have the device's time, and the burst the copy's
    assert isinstance(ceiling, Measurement)
    assert burst.step_s == pytest.approx(ceiling.step_s, rel=0.2)
    assert burst.step_s > 0.002
    assert burst.gpu.copy_s is not None
    assert burst.gpu.copy_s < burst.step_s
    assert burst.gpu.memory_bytes is not None
    # THEN the device was at work for the share of its step in its cycle
    assert burst.gpu.busy_share == pytest.approx(1 - burst.wait_share, abs=0.05)
    assert all(t.requested <= t.received <= t.step_end for t in burst.traces)


@pytest.mark.parametrize("ahead", [1, 2])
def test_copying_ahead_hides_the_copy_in_a_burst(ahead: int) -> None:
    # GIVEN batches of 32 MiB, whose copy takes a good part of the step
    with on_gpu(Rows(1 << 20), train_step=slow_step) as probe:
        plain = measured(probe.probe, PINNED, PLAN)
        config = LoaderConfig(num_workers=2, pin_memory=True, device_prefetch=ahead)
        hidden = measured(probe.probe, config, PLAN)
    # THEN the copy is known in the loop and ahead of it, and the step as long
    assert plain.gpu.copy_s is not None
    assert hidden.gpu.copy_s is not None
    assert hidden.gpu.copy_s > 0.0
    assert hidden.step_s == pytest.approx(plain.step_s, rel=0.3)


def allocated_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("isolation", ["process", "inline"])
def test_a_parent_on_the_gpu_keeps_its_model_and_its_memory(isolation: str) -> None:
    # GIVEN a parent whose model has trained on the GPU already
    model = torch.nn.Linear(1024, 1024).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, torch.ones(8, 1024, device="cuda")).backward()
    optimizer.step()
    weights, before = model.weight.detach().clone(), allocated_bytes()
    # WHEN a burst trains it
    with on_gpu(Rows(1024), isolation, model=model, optimizer=optimizer) as probe:
        measured(probe.probe, ONE_WORKER, PLAN)
    del probe
    # THEN here nothing changed, and no copy is left
    assert torch.equal(model.weight, weights)
    assert allocated_bytes() == before


def test_a_model_and_an_optimizer_from_the_host_are_both_moved() -> None:
    # GIVEN an optimizer with momenta on the host
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, torch.ones(2, 16)).backward()
    optimizer.step()
    # WHEN they are warmed up on the GPU THEN the step works there
    data = DataSide.from_dataset(Rows(), batch_size=8)
    bench, _ = warm_bench(data, model=model, optimizer=optimizer, train_step=train, device="cuda")
    bench.close()


class OutOfMemory:
    """Asks for far more than there is while a file exists."""

    def __init__(self, demand: Path) -> None:
        self.demand = demand

    def __call__(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        if self.demand.exists():
            self.trouble()
        return train(model, batch)

    def trouble(self) -> None:
        torch.empty(1 << 42, device="cuda")


class FailingKernel(OutOfMemory):
    """After it every CUDA call of the process fails."""

    def trouble(self) -> None:
        index = torch.full((4,), 99, device="cuda")
        torch.zeros(4, device="cuda")[index].sum().item()


@pytest.mark.parametrize(("kind", "told"), [(OutOfMemory, ("device_memory", "step")), (FailingKernel, None)])
def test_trouble_on_the_device_costs_one_burst(kind: Any, told: Any, tmp_path: Path) -> None:
    demand = tmp_path / "demand"
    with on_gpu(model=torch.nn.Linear(16, 4), train_step=kind(demand)) as probe:
        demand.touch()
        failure = probe.probe.burst(ONE_WORKER, PLAN)
        demand.unlink()
        assert isinstance(failure, Failure)
        assert told in (None, (failure.kind, failure.phase))
        measured(probe.probe, ONE_WORKER, PLAN)


def test_a_compiled_model_in_half_precision_is_warm_before_the_first_burst() -> None:
    # GIVEN a model that compiles at its first step, under autocast
    def in_half(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return train(model, batch)

    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
    # THEN none of the steps of a burst stands out as a compilation would
    with on_gpu(model=model, train_step=in_half) as probe:
        assert max(trace.step_s for trace in measured(probe.probe, ALONE, PLAN).traces) < 1.0


def test_tune_searches_the_roads_to_the_device_and_makes_the_loader() -> None:
    # GIVEN a parent that uses CUDA
    model = torch.nn.Linear(16, 4).cuda()
    # WHEN it tunes
    options = {"search": "grid", "max_workers": 1, "max_trials": 8, "budget": 20, "progress": False, "reuse": False}
    result = tune(Rows(), model, train_step=train, batch_size=8, **options)
    # THEN pinning and copying ahead were among the trials, and the GPU's memory is known
    assert any(trial.config.pin_memory for trial in result.trials)
    assert any(trial.config.device_prefetch for trial in result.trials)
    assert result.measured.gpu_memory_bytes is not None
    # THEN the loader that it makes delivers
    batch = next(iter(result.make_loader(Rows(), device="cuda")))
    assert batch.shape == (8, 16)
