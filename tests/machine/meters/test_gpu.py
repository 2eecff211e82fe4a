from __future__ import annotations

import pytest

from autotune_loader.machine.gpus import Gpus, GpuSample
from autotune_loader.machine.meters.gpu import gpu_use
from autotune_loader.testing import FakeClock, FakeGpu, FakeGpus


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


def test_memory_is_the_peak() -> None:
    series = [(float(t), GpuSample(util=0.5, memory_bytes=used)) for t, used in enumerate([1, 9, 3, 3, 3])]
    use = gpu_use(series, start=0.0)
    assert (use.memory_bytes, use.util, use.reason) == (9, 0.5, None)


def test_nothing_sampled_is_not_zero() -> None:
    use = gpu_use([], start=0.0)
    assert (use.util, use.memory_bytes, use.reason) == (None, None, "NVML was not asked in time")
