"""A loader's share of GPU work, from the samples of a GPU that does as a test says."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from autotune_loader.machine import gpus as machine_gpus
from autotune_loader.machine.gpus import Gpus, use_of_current_device
from autotune_loader.scripts.batch_log import BatchLog, Loop
from autotune_loader.scripts.gpu_work import GpuWork
from tests.support import FakeClock, FakeGpu, FakeGpus

PERIOD_S, KEPT_S = 0.02, 2.0


def a_gpu(clock: FakeClock, is_busy: Callable[[float], bool]) -> FakeGpu:
    """Its driver keeps samples of the last seconds, the newest of which is late."""

    def samples() -> list[tuple[float, int]]:
        agos = [number * PERIOD_S for number in range(5, int(KEPT_S / PERIOD_S))]
        return [(time.time() - ago, 100 if is_busy(clock() - ago) else 0) for ago in agos]

    return FakeGpu(uuid="GPU-1", samples=samples)


def work_of(gpu: FakeGpu) -> GpuWork:
    gpus = Gpus(FakeGpus([gpu]), environ={})
    (device,) = gpus.devices()
    return GpuWork(lambda: gpus.recent_use(device))


def iterate(log: BatchLog, clock: FakeClock, seconds: float) -> None:
    """An epoch with batches of 0.1 s, 0.05 of which the loop waits."""
    loop = Loop(log, None)
    for _ in range(round(seconds * 10)):
        asked = clock()
        loop.ask(asked)
        clock.advance(0.05)
        loop.receive(clock(), [])
        clock.advance(0.05)
    loop.ask(clock())
    loop.end(clock())


def test_each_loader_has_the_share_of_its_own_time() -> None:
    # GIVEN a GPU that works for 70 % of each second of training and is idle for the validation, an epoch of each in turns
    clock = FakeClock()
    gpu = a_gpu(clock, lambda moment: moment % 14.0 < 8.0 and moment % 1.0 < 0.7)
    training, validation = BatchLog(work_of(gpu)), BatchLog(work_of(gpu))

    for _ in range(3):
        iterate(training, clock, 8.0)
        iterate(validation, clock, 6.0)

    assert training.gpu.share == pytest.approx(0.7, abs=0.03)
    assert validation.gpu.share == pytest.approx(0.0, abs=0.03)


def test_a_pause_between_two_batches_does_not_count() -> None:
    # GIVEN a GPU that works in each step of 0.5 s, and a minute between two batches in which it is idle
    clock = FakeClock()
    log = BatchLog(work_of(a_gpu(clock, lambda moment: moment < 4.0 or moment > 64.0)))
    loop = Loop(log, None)
    for step_s in (*[0.5] * 8, 60.0, *[0.5] * 8):
        loop.ask(clock())
        loop.receive(clock(), [])
        clock.advance(step_s)
    loop.ask(clock())
    loop.end(clock())

    assert log.gpu.share == pytest.approx(1.0, abs=0.03)


@pytest.mark.parametrize(
    "gpu",
    [FakeGpu(uuid="GPU-1"), FakeGpu(uuid="GPU-1", unsupported=frozenset(["nvmlDeviceGetSamples"]))],
    ids=["keeps no samples", "does not tell"],
)
def test_without_samples_there_is_no_share(gpu: FakeGpu) -> None:
    log = BatchLog(work_of(gpu))
    iterate(log, FakeClock(), 5.0)
    assert log.gpu.share is None


def test_a_driver_that_fails_ends_no_training() -> None:
    asked = []

    def fails() -> list[tuple[float, float]]:
        asked.append(1)
        raise RuntimeError("driver")

    log = BatchLog(GpuWork(fails))
    iterate(log, FakeClock(), 5.0)

    assert (log.gpu.share, len(asked)) == (None, 1)


def test_the_gpu_is_the_current_one_and_cuda_is_left_alone_where_it_is_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # GIVEN two GPUs, of which the script uses CUDA's second
    used = FakeGpu(uuid="GPU-2", samples=lambda: [(time.time() - 0.1, 40), (time.time() - 0.2, 20)])
    nvml = FakeGpus([FakeGpu(uuid="GPU-1"), used])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(machine_gpus, "_gpus_of", machine_gpus._gpus_of.__wrapped__)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"{index + 1}"))

    # WHEN it is asked for before CUDA is in use, and then
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert use_of_current_device() == []
    assert nvml.calls == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    # THEN the second one's samples are there
    assert [share for _, share in use_of_current_device()] == [0.2, 0.4]
