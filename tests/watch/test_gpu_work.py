"""A loader's share of GPU work, from the samples of a GPU that does as a test says."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune_loader.machine import gpus as machine_gpus
from autotune_loader.machine.gpus import Gpus, use_of_current_device
from autotune_loader.scripts.batch_log import BatchLog, Loop
from autotune_loader.scripts.gpu_work import GpuWork
from tests.support import FakeClock, FakeGpu, FakeGpus

PERIOD_S, KEPT_S = 0.02, 2.0


def work_of(**gpu: Any) -> GpuWork:
    gpus = Gpus(FakeGpus([FakeGpu(uuid="GPU-1", **gpu)]), environ={})
    (device,) = gpus.devices()
    return GpuWork(lambda: gpus.recent_use(device))


def work_while(is_busy: Callable[[float], bool], clock: FakeClock) -> GpuWork:
    """Of a GPU whose driver keeps samples of the last seconds, the newest of which is late."""

    def samples() -> list[tuple[float, int]]:
        agos = [number * PERIOD_S for number in range(5, int(KEPT_S / PERIOD_S))]
        return [(time.time() - ago, 100 if is_busy(clock() - ago) else 0) for ago in agos]

    return work_of(samples=samples)


def iterate(log: BatchLog, clock: FakeClock, seconds: float) -> None:
    """An epoch with batches of 0.1 s, a pause of a minute in its midst."""
    loop, batches = Loop(log, None), round(seconds / 0.1)
    for number in range(batches):
        loop.ask(clock())
        clock.advance(0.05)
        loop.receive(clock(), [])
        clock.advance(0.05 + 70.0 * (number == batches // 2))
    loop.ask(clock())
    loop.end(clock())


def test_each_loader_has_the_share_of_its_own_time() -> None:
    # GIVEN a GPU that works for 70 % of each second of training and is idle for the validation, an epoch of each in turns
    clock = FakeClock()
    logs = [BatchLog(work_while(lambda now: now % 14.0 < 8.0 and now % 1.0 < 0.7, clock)) for _ in range(2)]

    for _ in range(3):
        for log, seconds in zip(logs, (8.0, 6.0), strict=True):
            iterate(log, clock, seconds)

    assert [log.gpu.share for log in logs] == pytest.approx([0.7, 0.0], abs=0.03)


@pytest.mark.parametrize(
    "work",
    [work_of(), work_of(unsupported=frozenset(["nvmlDeviceGetSamples"])), GpuWork(lambda: [][0])],
    ids=["keeps no samples", "does not tell", "a driver that fails ends no training"],
)
def test_without_samples_there_is_no_share(work: GpuWork) -> None:
    log = BatchLog(work)
    iterate(log, FakeClock(), 5.0)
    assert log.gpu.share is None


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
