from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from autotune_loader.machine.gpus import STAMP_CLOCKS, Gpus, GpuSample
from autotune_loader.machine.meters.gpu import gpu_use, use_within
from autotune_loader.machine.meters.process_tree import TreeMeter
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import BatchTrace
from tests.support import FakeClock, FakeGpu, FakeGpus


def square_wave(busy_share: float, *, seconds: float = 9.0) -> list[tuple[float, GpuSample]]:
    """Samples four times a second of a GPU that is busy for a share of every second."""
    clock = FakeClock()
    gpu = FakeGpu(uuid="GPU-1", util=lambda: 100 if clock() % 1.0 < busy_share else 0)
    gpus = Gpus(FakeGpus([gpu]), environ={})
    (device,) = gpus.devices()
    series = []
    for _ in range(int(seconds * 4)):
        clock.advance(0.25)
        series.append((clock(), gpus.sample(device)))
    return series


def test_a_busier_gpu_is_reported_as_busier() -> None:
    # GIVEN square waves of one second, sampled a few times in each
    uses = [gpu_use(square_wave(share), start=0.0).util for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    # THEN the ranking is theirs, and the ends are exact
    assert uses == sorted(uses, key=lambda util: util if util is not None else -1.0)
    assert (uses[0], uses[-1]) == (0.0, 1.0)


def test_what_was_before_the_burst_does_not_count() -> None:
    # GIVEN samples whose period still reaches back before the burst, then an idle GPU
    series = [(t / 4, GpuSample(util=1.0 if t < 4 else 0.0, memory_bytes=1)) for t in range(1, 20)]
    assert gpu_use(series, start=0.0).util == 0.0


def test_a_short_burst_has_no_utilisation_and_says_why() -> None:
    use = gpu_use(square_wave(1.0, seconds=1.25), start=0.0)
    assert (use.util, use.memory_bytes) == (None, 1 << 30)
    assert use.reason == "the burst is too short for NVML's utilisation"


@pytest.mark.parametrize("samples", [1, 40])
def test_an_unsupported_utilisation_is_none_with_nvmls_reason(samples: int) -> None:
    sample = GpuSample(memory_bytes=5, reasons={"util": "nvmlDeviceGetUtilizationRates: Not Supported"})
    use = gpu_use([(float(t), sample) for t in range(samples)], start=0.0)
    assert (use.util, use.memory_bytes, use.reason) == (None, 5, "nvmlDeviceGetUtilizationRates: Not Supported")


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
    now = max(moment for moment, _ in meter.reading.gpu_samples)
    # WHEN the burst's window was the last 0.4 s, or began before the GPU did
    short, long = (meter.reading.added_to(burst_of(now, window_s)).gpu for window_s in (0.4, 0.8))
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


def test_memory_is_the_peak() -> None:
    series = [(float(t), GpuSample(util=0.5, memory_bytes=used)) for t, used in enumerate([1, 9, 3, 3, 3])]
    use = gpu_use(series, start=0.0)
    assert (use.memory_bytes, use.util, use.reason) == (9, 0.5, None)


def test_nothing_sampled_is_not_zero() -> None:
    use = gpu_use([], start=0.0)
    assert (use.util, use.memory_bytes, use.reason) == (None, None, "NVML was not asked in time")
