"""The simulated machine has to be right before anything that is tested with it is."""

import itertools

import pytest

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BurstPlan, Failure
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

PLAN = BurstPlan(max_s=1.0, relative_error=0.0)
STEADY = {"service_cv": 0.0, "step_cv": 0.0, "alpha": 0.0, "receive_s": 0.0, "first_batch_extra_s": 0.0}


def probe_on(epoch_batches=None, seed=0, **machine):
    return SimulatedProbe(SimulatedMachine(**machine), FakeClock(100.0), seed=seed, epoch_batches=epoch_batches)


def workers(count, **options):
    return LoaderConfig(num_workers=count, **options)


RATES = {
    "two workers": (workers(2), {"cpu_s": 0.04, "step_s": 0.015}, 2 / 0.04),
    "the step is slower": (workers(3), {"cpu_s": 0.04, "step_s": 0.015}, 1 / 0.015),
    "one thing after the other": (workers(0), {"cpu_s": 0.03, "wait_s": 0.01, "step_s": 0.01}, 1 / 0.05),
    "more workers than cores": (workers(4), {"cores": 2, "cpu_s": 0.04, "step_s": 0.0001}, 2 / 0.04),
    "waiting takes no core": (workers(8), {"cores": 2, "cpu_s": 0.0, "wait_s": 0.04, "step_s": 0.0001}, 8 / 0.04),
    "receipt": (workers(1), {"cpu_s": 0.001, "step_s": 0.02, "receive_s": 0.01}, 1 / 0.03),
    "receipt behind a step": (workers(1, device_prefetch=2), {"cpu_s": 0.001, "step_s": 0.02, "receive_s": 0.01}, 50),
    "one thread pins": (workers(4, pin_memory=True), {"cpu_s": 0.001, "step_s": 0.001, "pin_s": 0.01}, 1 / 0.01),
}


@pytest.mark.parametrize(("config", "machine", "batches_per_s"), RATES.values(), ids=RATES)
def test_the_long_run_rate_is_that_of_what_binds(config, machine, batches_per_s):
    assert probe_on(**{**STEADY, **machine}).truth(config) == pytest.approx(32 * batches_per_s, rel=0.01)


def test_out_of_order_delivery_is_not_held_up_by_a_slow_batch():
    probe = probe_on(wait_s=0.04, cpu_s=0.0, step_s=0.012, tail_share=0.05, tail_factor=20)
    assert probe.truth(workers(4, in_order=False)) > 1.1 * probe.truth(workers(4))


def test_a_step_on_the_cpu_slows_down_when_workers_want_its_cores():
    probe = probe_on(**STEADY, cores=2, cpu_s=0.04, step_s=0.02, step_cores=2.0)
    assert probe.burst(workers(2), PLAN).step_s > 0.022
    assert probe.step_ceiling(PLAN).samples_per_s.value == pytest.approx(1600)


def test_the_traces_of_a_burst_tell_one_possible_history():
    traces = probe_on().burst(workers(3), PLAN).traces
    for each in traces:
        assert each.fetch_start <= each.fetch_end <= each.collate_end <= each.received <= each.step_end
        assert each.requested <= each.received
    assert [each.worker for each in traces[:6]] == [0, 1, 2, 0, 1, 2]
    assert all(one.step_end <= other.requested for one, other in itertools.pairwise(traces))


def test_noise_differs_between_bursts_not_between_seeds_and_leaves_the_truth_alone():
    first, second = (probe_on(noise_sd=0.05, seed=3) for _ in range(2))
    rates = [first.burst(workers(2), PLAN).samples_per_s.value for _ in range(3)]
    assert len(set(rates)) == 3
    assert rates[0] == second.burst(workers(2), PLAN).samples_per_s.value
    assert first.truth(workers(2)) == probe_on().truth(workers(2))


def test_a_machine_can_be_slow_and_refuse():
    crash = Failure(kind="crashed", phase="start", message="no")
    assert probe_on(fails=lambda config: crash).burst(workers(3), PLAN) is crash
    assert probe_on(cpu_s=10.0).burst(workers(1), BurstPlan(deadline_s=5.0)).kind == "deadline"
    drifted = probe_on(drift_per_hour=36.0).burst(workers(1), PLAN)  # the clock begins at 100 s
    assert drifted.service_s == pytest.approx(2 * probe_on().burst(workers(1), PLAN).service_s, rel=0.1)


@pytest.mark.parametrize(("count", "depth"), [(1, 8), (2, 8), (2, 2)])
def test_the_share_of_waiting_is_that_of_the_long_run_however_full_the_queues_were(count, depth):
    config = workers(count, prefetch_factor=depth)
    times = {"cores": 2, "cpu_s": 0.001, "wait_s": 0.05, "step_s": 0.02, "receive_s": 1e-4, "service_cv": 0.1}
    probe = probe_on(**{**STEADY, **times})
    in_the_long_run = 1 - probe.truth(config) * 0.02 / 32
    plans = [BurstPlan(max_s=0.5, min_s=0.3, seed=seed, prefill_s=s) for seed in range(4) for s in (0.0, 0.75)]
    seen = [probe.burst(config, plan).wait_share for plan in plans]
    # Summed up over the window it read half as much from full queues.
    assert in_the_long_run > 0.15
    assert all(share == pytest.approx(in_the_long_run, abs=0.12) for share in seen)
    assert sum(seen) / len(seen) == pytest.approx(in_the_long_run, abs=0.05)
