"""Limits from measurements with known parts, and how soon a compute-bound job is recognised."""

import pytest
from report.bursts import BATCH, burst, traces

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from studies.fidelity import ceilings
from studies.fidelity.ceilings import Limit
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

RECOGNISED_WITHIN_S = 3.0


def test_transport_is_told_by_batches_that_lay_ready():
    # GIVEN batches that were whole long before they were asked for
    # WHEN
    limit = ceilings.transport_limit(burst(traces(20, receive_s=0.002)))
    # THEN
    assert limit.samples_per_s.value == pytest.approx(BATCH / 0.002)


def test_batches_that_were_waited_for_do_not_tell_the_transport():
    assert ceilings.transport_limit(burst(traces(20, cpu_s=0.95))) is None


def test_storage_is_what_only_the_first_touch_waits_for():
    # GIVEN the same batches twice: 40 ms of storage the first time
    first = burst(traces(24, cpu_s=0.01, wait_s=0.045, jitter=0.01))
    second = burst(traces(24, cpu_s=0.01, wait_s=0.005, jitter=0.01))
    # WHEN two workers read them
    limit = ceilings.storage_limit(first, second, workers=2)
    # THEN storage gives two batches per 40 ms
    assert limit.samples_per_s.value == pytest.approx(2 * BATCH / 0.04, rel=0.01)
    assert limit.samples_per_s.low < limit.samples_per_s.value < limit.samples_per_s.high


def test_equal_touches_show_no_storage():
    # GIVEN
    touch = burst(traces(24, cpu_s=0.01, wait_s=0.02, jitter=0.05))
    # THEN
    assert ceilings.storage_limit(touch, touch, workers=1) is None


def test_the_smallest_limit_binds():
    # GIVEN
    limits = [
        Limit(name=name, samples_per_s=Interval(value=rate, low=rate, high=rate, count=1), because="")
        for name, rate in (("step", 900.0), ("cpu", 700.0), ("transport", 5000.0))
    ]
    # THEN
    assert ceilings.binding(limits).name == "cpu"


def test_without_workers_nothing_is_transported():
    # GIVEN batches that cost more to transport than to make
    transport = ceilings.transport_limit(burst(traces(20, receive_s=0.1)))
    alone = ceilings.in_process_limit(burst())
    # THEN the main process on its own is the ceiling, and where transport is cheap it is none
    assert ceilings.binding([transport, alone]).name == "in_process"
    cheap = ceilings.transport_limit(burst(traces(20, receive_s=0.01)))
    assert ceilings.binding([cheap, alone]).name == "transport"


def test_no_limits_are_the_callers_mistake():
    with pytest.raises(ValueError, match="limits is empty"):
        ceilings.binding([])


@pytest.mark.parametrize("step_s", [0.02, 0.06, 0.15])
@pytest.mark.parametrize("seed", range(4))
def test_a_compute_bound_job_is_recognised_within_3_s(step_s, seed):
    # GIVEN a step far slower than two workers' fetching, on a machine with noise
    clock = FakeClock()
    machine = SimulatedMachine(cpu_s=step_s / 4, step_s=step_s, receive_s=0.0002, noise_sd=0.003)
    probe = SimulatedProbe(machine, clock, seed=seed)
    # WHEN the step is run on a cached batch, and then one burst with workers
    cached = probe.step_ceiling(None, BurstPlan(min_s=0.2, max_s=0.6))
    measured = probe.burst(LoaderConfig(num_workers=2), BurstPlan(min_s=0.3, max_s=1.0, relative_error=0.015))
    # THEN the verdict is there, in time
    assert ceilings.is_compute_bound(cached, measured)
    assert clock() < RECOGNISED_WITHIN_S


def test_a_starved_step_is_not_taken_for_compute_bound():
    # GIVEN fetching that takes twice as long as the step
    probe = SimulatedProbe(SimulatedMachine(cpu_s=0.04, step_s=0.02), FakeClock())
    # WHEN
    cached = probe.step_ceiling(None, BurstPlan())
    measured = probe.burst(LoaderConfig(num_workers=1), BurstPlan())
    # THEN
    limit = ceilings.step_limit(cached)
    assert not ceilings.is_compute_bound(cached, measured)
    assert measured.samples_per_s.high < 0.7 * limit.samples_per_s.low


def test_a_step_that_the_workers_slow_down_is_not_taken_for_compute_bound():
    # GIVEN a loader that never keeps the step waiting, but takes its cores
    machine = SimulatedMachine(cpu_s=0.1, step_s=0.06, step_cores=4, receive_s=0.0001)
    probe = SimulatedProbe(machine, FakeClock())
    # WHEN
    cached = probe.step_ceiling(None, BurstPlan())
    measured = probe.burst(LoaderConfig(num_workers=4, prefetch_factor=8), BurstPlan())
    # THEN
    assert measured.step_s > 1.1 * cached.step_s
    assert not ceilings.is_compute_bound(cached, measured)


def test_the_step_beside_busy_workers_is_told_with_its_interval():
    # GIVEN steps of 49 ms in a burst
    found = ceilings.step_beside(burst(traces(20)))
    assert found.value == pytest.approx(BATCH / 0.049)
    assert found.low <= found.value <= found.high


def test_a_burst_without_traces_cannot_tell_the_step_apart():
    with pytest.raises(ValueError, match="no traces"):
        ceilings.step_beside(burst())
