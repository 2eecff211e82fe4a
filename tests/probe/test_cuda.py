"""Bursts and tuning on a real GPU; `sh studies/gpu/run.sh` runs these and the studies. Skipped where there is no CUDA.

The logic is tested on any machine with a fake device (tests/probe/test_device.py); here is what only a device can say.
"""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader import tune
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.prefetch import DevicePrefetcher
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.bench import Bench, WarmupReport
from autotune_loader.probe.device import timeline_of
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

QUICK = BurstPlan(max_s=0.5, min_s=0.2, relative_error=0.05, deadline_s=60.0)
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


def workload(dataset: Any = None, **training: Any) -> Workload:
    data = DataSide.from_dataset(dataset or Rows(), batch_size=8)
    return Workload(data=data, training=TrainingSide(**{"device": "cuda", "train_step": train, **training}))


@pytest.fixture
def open_probe() -> Iterator[Callable[[Workload], ProcessProbe]]:
    opened: list[ProcessProbe] = []

    def open_it(what: Workload) -> ProcessProbe:
        opened.append(ProcessProbe(Payload.of(what, 1 << 30), inspect_machine()))
        opened[-1].start()
        return opened[-1]

    yield open_it
    for probe in opened:
        probe.close()


def allocated_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


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


def test_a_burst_is_timed_by_the_device_and_knows_its_memory(open_probe: Callable[[Workload], ProcessProbe]) -> None:
    # GIVEN a step of which the host sees only the launch
    probe = open_probe(workload(train_step=slow_step))
    # WHEN the ceiling and a burst are measured
    ceiling, burst = probe.step_ceiling(None, QUICK), probe.burst(LoaderConfig(num_workers=2, pin_memory=True), QUICK)
    # THEN both have the device's time, and the burst the copy's
    assert isinstance(ceiling, Measurement)
    assert isinstance(burst, Measurement)
    assert burst.step_s == pytest.approx(ceiling.step_s, rel=0.2)
    assert burst.step_s > 0.002
    assert burst.gpu.copy_s is not None
    assert burst.gpu.copy_s < burst.step_s
    assert burst.gpu.memory_bytes is not None
    # THEN the device was at work for the share of its step in its cycle
    assert burst.gpu.busy_share == pytest.approx(1 - burst.wait_share, abs=0.05)
    assert all(t.requested <= t.received <= t.step_end for t in burst.traces)


@pytest.mark.parametrize("ahead", [1, 2])
def test_copying_ahead_hides_the_copy_in_a_burst(ahead: int, open_probe: Callable[[Workload], ProcessProbe]) -> None:
    # GIVEN batches of 32 MiB, whose copy takes a good part of the step
    probe = open_probe(workload(Rows(1 << 20), train_step=slow_step))
    # WHEN they are copied in the loop, and ahead of it
    plain = probe.burst(LoaderConfig(num_workers=2, pin_memory=True), QUICK)
    hidden = probe.burst(LoaderConfig(num_workers=2, pin_memory=True, device_prefetch=ahead), QUICK)
    # THEN the copy is known in both, and the step as long
    assert isinstance(plain, Measurement)
    assert isinstance(hidden, Measurement)
    assert plain.gpu.copy_s is not None
    assert hidden.gpu.copy_s is not None
    assert hidden.gpu.copy_s > 0.0
    assert hidden.step_s == pytest.approx(plain.step_s, rel=0.3)


def test_a_parent_on_the_gpu_keeps_its_model_and_its_memory(open_probe: Callable[[Workload], ProcessProbe]) -> None:
    # GIVEN a parent whose model has trained on the GPU already
    model = torch.nn.Linear(16, 16).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, torch.ones(8, 16, device="cuda")).backward()
    optimizer.step()
    weights, before = model.weight.detach().clone(), allocated_bytes()
    # WHEN a burst trains it in the probe process
    probe = open_probe(workload(model=model, optimizer=optimizer))
    burst = probe.burst(LoaderConfig(num_workers=1), QUICK)
    # THEN it was measured, and here nothing changed
    assert isinstance(burst, Measurement)
    assert torch.equal(model.weight, weights)
    assert allocated_bytes() == before


def test_inline_leaves_no_copy_of_the_model_on_the_gpu() -> None:
    # GIVEN a model on the GPU
    model = torch.nn.Linear(1024, 1024).cuda()
    weights, before = model.weight.detach().clone(), allocated_bytes()
    # WHEN it is burst in this process
    probe = InlineProbe(workload(Rows(1024), model=model), inspect_machine())
    probe.start()
    burst = probe.burst(LoaderConfig(), QUICK)
    probe.close()
    # THEN the copy is gone
    assert isinstance(burst, Measurement)
    assert torch.equal(model.weight, weights)
    assert allocated_bytes() == before


def test_a_model_and_an_optimizer_from_the_host_are_both_moved() -> None:
    # GIVEN an optimizer with momenta on the host
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.Adam(model.parameters())
    train(model, torch.ones(2, 16)).backward()
    optimizer.step()
    side = workload(model=model, optimizer=optimizer)
    # WHEN they are warmed up on the GPU THEN the step works there
    bench = Bench(lambda: side.data, lambda: side.data, side.training)
    assert isinstance(bench.prepare(), WarmupReport)
    bench.close()


class OutOfMemoryOnDemand:
    """Asks for far more than there is while a file exists."""

    def __init__(self, demand: Path) -> None:
        self.demand = demand

    def __call__(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        if self.demand.exists():
            torch.empty(1 << 42, device="cuda")
        return train(model, batch)


def test_running_out_of_device_memory_costs_one_burst(
    tmp_path: Path, open_probe: Callable[[Workload], ProcessProbe]
) -> None:
    # GIVEN a step that runs out of memory while a file exists
    demand = tmp_path / "demand"
    probe = open_probe(workload(model=torch.nn.Linear(16, 4), train_step=OutOfMemoryOnDemand(demand)))
    # WHEN a burst runs with it, and one without
    demand.touch()
    failure = probe.burst(LoaderConfig(num_workers=1), QUICK)
    demand.unlink()
    after = probe.burst(LoaderConfig(num_workers=1), QUICK)
    # THEN
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.phase) == ("device_memory", "step")
    assert isinstance(after, Measurement)


class FailingKernelOnDemand(OutOfMemoryOnDemand):
    def __call__(self, model: Any, batch: torch.Tensor) -> torch.Tensor:
        if self.demand.exists():
            index = torch.full((4,), 99, device="cuda")
            torch.zeros(4, device="cuda")[index].sum().item()
        return train(model, batch)


def test_a_failed_kernel_costs_the_process_and_not_the_study(
    tmp_path: Path, open_probe: Callable[[Workload], ProcessProbe]
) -> None:
    demand = tmp_path / "demand"
    probe = open_probe(workload(model=torch.nn.Linear(16, 4), train_step=FailingKernelOnDemand(demand)))
    demand.touch()
    failure = probe.burst(LoaderConfig(), QUICK)
    demand.unlink()
    assert isinstance(failure, Failure)
    assert isinstance(probe.burst(LoaderConfig(), QUICK), Measurement)


def test_a_compiled_model_in_half_precision_is_warm_before_the_first_burst(
    open_probe: Callable[[Workload], ProcessProbe],
) -> None:
    # GIVEN a model that compiles at its first step, under autocast
    def in_half(model: Any, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return train(model, batch)

    model = torch.compile(torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)))
    probe = open_probe(workload(model=model, train_step=in_half))
    # WHEN bursts follow THEN none of their steps stands out as a compilation would
    burst = probe.burst(LoaderConfig(), QUICK)
    assert isinstance(burst, Measurement)
    assert max(trace.step_s for trace in burst.traces) < 1.0


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


def test_a_loader_made_for_a_device_copies_ahead_as_tuned() -> None:
    best = LoaderConfig(pin_memory=True, device_prefetch=2)
    result = TuningResult(best=best, status="complete", baseline=LoaderConfig())
    loader = result.make_loader(torch.arange(4), batch_size=2, device="cuda")
    assert isinstance(loader, DevicePrefetcher)
    assert [(batch.device.type, batch.tolist()) for batch in loader] == [("cuda", [0, 1]), ("cuda", [2, 3])]


def test_a_child_that_was_forked_from_a_process_with_cuda_can_still_load() -> None:
    # GIVEN CUDA in use here
    torch.ones(1, device="cuda")
    assert multiprocessing.get_start_method(allow_none=False)
    # WHEN workers are started THEN they deliver, since they do not touch it
    assert len(list(DataLoader(Rows(), batch_size=64, num_workers=2, pin_memory=True))) == 4
