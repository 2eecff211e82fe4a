from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from autotune_loader.machine.gpus import STAMP_CLOCKS, Gpus
from autotune_loader.machine.meters.gpu import use_within
from autotune_loader.machine.meters.process_tree import TreeMeter
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import BatchTrace
from tests.support import FakeGpu, FakeGpus


def test_a_short_window_has_the_utilisation_of_its_own_samples() -> None:
    # GIVEN samples every 0.1 s: idle before a window of 0.4 s, three quarters busy in it, busy after it
    samples = [(t / 10, share) for t, share in enumerate([0.0] * 6 + [0.5, 1.0, 0.5, 1.0] + [1.0] * 3)]
    # WHEN they are read for the window, and for one of which they cover a quarter THEN only the first has a figure
    assert use_within(samples, 0.5, 0.9) == pytest.approx(0.75)
    assert use_within(samples, 1.1, 1.5) is None
    assert use_within([], 0.5, 0.9) is use_within(samples[:1], 0.0, 0.1) is None


@pytest.mark.parametrize("clock", STAMP_CLOCKS)
def test_stamps_of_either_clock_become_seconds_ago(clock: Callable[[], float]) -> None:
    # GIVEN a driver that stamps its samples by the time of day, or since boot
    gpu = FakeGpu(uuid="GPU-1", samples=lambda: [(clock() - 0.2, 40), (clock() - 0.3, 20)])
    gpus = Gpus(FakeGpus([gpu]), environ={})
    # WHEN asked for what it keeps
    (older, younger) = gpus.recent_use(gpus.devices()[0])
    # THEN
    assert older == (pytest.approx(0.3, abs=0.05), 0.2)
    assert younger == (pytest.approx(0.2, abs=0.05), 0.4)


@pytest.mark.parametrize(
    "gpu", [FakeGpu(uuid="GPU-1"), FakeGpu(uuid="GPU-1", unsupported=frozenset(["nvmlDeviceGetSamples"]))]
)
def test_a_driver_that_keeps_no_samples_is_asked_as_before(gpu: FakeGpu) -> None:
    gpus = Gpus(FakeGpus([gpu]), environ={})
    assert gpus.recent_use(gpus.devices()[0]) == []
    assert gpus.sample(gpus.devices()[0]).util == 0.5


def test_a_burst_too_short_for_nvmls_means_has_the_utilisation_of_its_window() -> None:
    # GIVEN a meter on a GPU that was busy for the last half second, by samples 20 ms apart
    def samples() -> list[tuple[float, int]]:
        now = time.time()
        return [(now - ago / 50, 100 if ago < 25 else 0) for ago in range(50)]

    gpu = FakeGpu(uuid="GPU-1", samples=samples)
    meter = TreeMeter(os.getpid(), usable_cores=1, gpus=Gpus(FakeGpus([gpu]), environ={}))
    with meter:
        pass
    now = max(moment for moment, _ in meter._gpu_samples)
    # WHEN the burst's window was the last 0.4 s, or began before the GPU did
    short, long = (meter.added_to(burst_of(now, window_s)).gpu for window_s in (0.4, 0.8))
    # THEN each has the utilisation of its own window, and nothing is missing
    assert (short.util, short.reason) == (pytest.approx(1.0, abs=0.05), None)
    assert long.util == pytest.approx(0.62, abs=0.08)


def burst_of(end: float, window_s: float) -> Measurement:
    """A burst that a step ended at a moment."""
    times = {
        "fetch_start": end,
        "fetch_end": end,
        "collate_end": end,
        "requested": end,
        "received": end,
        "step_end": end,
    }
    last = BatchTrace(worker=0, cpu_s=0.0, samples=1, **times)
    rate = Interval(value=1.0, low=1.0, high=1.0, count=1)
    figures = dict.fromkeys(("batch_size", "first_batch_s", "wait_share", "service_s"), 0.0)
    figures |= dict.fromkeys(("service_cpu_s", "receive_s", "step_s"), 0.0)
    return Measurement(samples_per_s=rate, samples=1, window_s=window_s, traces=(last,), **figures)
