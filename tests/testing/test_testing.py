"""The simulated machine has to be right before anything that is tested with it is."""

import pytest

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import MAIN_PROCESS
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

PLAN = BurstPlan(max_s=1.0, relative_error=0.0)
WHOLE = BurstPlan(max_s=0.5, min_s=0.1, whole_epochs=True)


def steady(**changes):
    """A machine on which nothing varies."""
    still = {"service_cv": 0.0, "step_cv": 0.0, "alpha": 0.0, "receive_s": 0.0, "first_batch_extra_s": 0.0}
    return SimulatedMachine(**{**still, **changes})


def probe_on(machine, **options):
    return SimulatedProbe(machine, FakeClock(100.0), **options)


def workers(count, prefetch=2, **options):
    return LoaderConfig(num_workers=count, prefetch_factor=prefetch if count else None, **options)


RATES = {
    "one worker": (workers(1), {"cpu_s": 0.04, "step_s": 0.015}, 1 / 0.04),
    "two workers": (workers(2), {"cpu_s": 0.04, "step_s": 0.015}, 2 / 0.04),
    "the step is slower": (workers(3), {"cpu_s": 0.04, "step_s": 0.015}, 1 / 0.015),
    "one thing after the other": (workers(0), {"cpu_s": 0.03, "wait_s": 0.01, "step_s": 0.01}, 1 / 0.05),
    "more workers than cores": (workers(4), {"cores": 2, "cpu_s": 0.04, "step_s": 0.0001}, 2 / 0.04),
    "waiting takes no core": (workers(8), {"cores": 2, "cpu_s": 0.0, "wait_s": 0.04, "step_s": 0.0001}, 8 / 0.04),
    "receipt": (workers(1), {"cpu_s": 0.001, "step_s": 0.02, "receive_s": 0.01}, 1 / 0.03),
    "receipt behind the step": (
        workers(1, device_prefetch=2),
        {"cpu_s": 0.001, "step_s": 0.02, "receive_s": 0.01},
        1 / 0.02,
    ),
    "one thread pins": (workers(4, pin_memory=True), {"cpu_s": 0.001, "step_s": 0.001, "pin_s": 0.01}, 1 / 0.01),
}


@pytest.mark.parametrize(("config", "machine", "batches_per_s"), RATES.values(), ids=RATES)
def test_the_long_run_rate_is_that_of_what_binds(config, machine, batches_per_s):
    assert probe_on(steady(batch_size=10, **machine)).truth(config) == pytest.approx(10 * batches_per_s, rel=0.01)


def test_out_of_order_delivery_is_not_held_up_by_a_slow_batch():
    probe = probe_on(SimulatedMachine(wait_s=0.04, cpu_s=0.0, step_s=0.012, tail_share=0.05, tail_factor=20))
    assert probe.truth(workers(4, in_order=False)) > 1.1 * probe.truth(workers(4))


def test_a_step_on_the_cpu_slows_down_when_workers_want_its_cores():
    machine = steady(cores=2, cpu_s=0.04, step_s=0.02, step_cores=2.0, step_s_by_threads={1: 0.01}, batch_size=10)
    probe = probe_on(machine)
    assert probe.burst(workers(2), PLAN).step_s > 0.022
    assert probe.step_ceiling(None, PLAN).samples_per_s.value == pytest.approx(500)
    assert probe.step_ceiling(1, PLAN).samples_per_s.value == pytest.approx(1000)


def test_a_burst_moves_the_clock_on_by_start_up_and_window():
    clock = FakeClock(100.0)
    measured = SimulatedProbe(steady(worker_start_s=1.0), clock).burst(workers(2), PLAN)
    assert measured.first_batch_s > 2.0
    assert 2.0 + PLAN.min_s < clock.now - 100.0 < 4.5


def test_the_traces_of_a_burst_tell_one_possible_history():
    measured = probe_on(SimulatedMachine()).burst(workers(3), PLAN)
    for trace in measured.traces:
        assert trace.fetch_start <= trace.fetch_end <= trace.collate_end <= trace.received <= trace.step_end
        assert trace.requested <= trace.received
    assert [t.worker for t in measured.traces[:6]] == [0, 1, 2, 0, 1, 2]
    pairs = zip(measured.traces, measured.traces[1:], strict=False)
    assert all(before.step_end <= after.requested for before, after in pairs)
    alone = probe_on(SimulatedMachine()).burst(workers(0), PLAN)
    assert {t.worker for t in alone.traces} == {MAIN_PROCESS}


@pytest.mark.parametrize(
    ("persistent", "seconds"),
    # Two workers fetch 8 batches in four rounds of 40 ms, the last of them followed by its step; a start takes 200 ms.
    [(True, 0.162), (False, 0.362)],
)
def test_an_epoch_takes_the_rounds_of_its_workers_and_their_start(persistent, seconds):
    probe = probe_on(steady(cpu_s=0.04, step_s=0.001, start_s=0.1, worker_start_s=0.05, batch_size=10), epoch_batches=8)
    measured = probe.burst(workers(2, persistent_workers=persistent), WHOLE)
    assert measured.samples_per_s.value == pytest.approx(80 / seconds, rel=0.01)
    assert measured.samples % 80 == 0


def test_all_epochs_read_the_same_batches_in_orders_of_their_own():
    probe = probe_on(steady(cpu_s=0.0, wait_s=0.01, service_cv=0.5, step_s=0.0001), epoch_batches=16)
    for plan in (WHOLE, PLAN):
        traces = probe.burst(workers(1, persistent_workers=True), plan).traces
        epochs = [[t.service_s for t in traces[i : i + 16]] for i in range(0, len(traces) - 15, 16)]
        assert len(epochs) > 2
        assert all(sorted(each) == pytest.approx(sorted(epochs[0])) for each in epochs)
        assert epochs[0] != pytest.approx(epochs[1])


def test_noise_differs_between_bursts_not_between_seeds_and_leaves_the_truth_alone():
    first, second = (probe_on(SimulatedMachine(noise_sd=0.05), seed=3) for _ in range(2))
    rates = [first.burst(workers(2), PLAN).samples_per_s.value for _ in range(3)]
    assert len(set(rates)) == 3
    assert rates[0] == second.burst(workers(2), PLAN).samples_per_s.value
    assert first.truth(workers(2)) == probe_on(SimulatedMachine()).truth(workers(2))


def test_spikes_and_drift_slow_a_burst_down():
    spiked = probe_on(SimulatedMachine(spike_share=1.0, spike_factor=2.0)).burst(workers(1), PLAN)
    drifted = probe_on(SimulatedMachine(drift_per_hour=36.0)).burst(workers(1), PLAN)  # the clock begins at 100 s
    quiet = probe_on(SimulatedMachine()).burst(workers(1), PLAN)
    for slowed in (spiked, drifted):
        assert slowed.service_s == pytest.approx(2 * quiet.service_s, rel=0.1)


def test_a_machine_can_refuse_configurations():
    crash = Failure(kind="crashed", phase="start", message="no")
    refuses = probe_on(SimulatedMachine(fails=lambda config: crash if config.num_workers == 3 else None))
    small = probe_on(SimulatedMachine(base_bytes=0, batch_bytes=0, worker_bytes=100, memory_limit_bytes=250))
    slow = probe_on(steady(cpu_s=10.0))
    assert refuses.burst(workers(3), PLAN) is crash
    assert small.burst(workers(3), PLAN).kind == "memory_guard"
    assert slow.burst(workers(1), BurstPlan(deadline_s=5.0)).kind == "deadline"
    assert isinstance(refuses.burst(workers(2), PLAN), Measurement)
    assert isinstance(small.burst(workers(2), PLAN), Measurement)


@pytest.mark.parametrize(("count", "depth"), [(1, 8), (2, 8), (2, 2)])
def test_the_share_of_waiting_is_that_of_the_long_run_however_full_the_queues_were(count, depth):
    config = LoaderConfig(num_workers=count, prefetch_factor=depth)
    machine = steady(cores=2, cpu_s=0.001, wait_s=0.05, step_s=0.02, receive_s=1e-4, service_cv=0.1)
    in_the_long_run = 1 - probe_on(machine).truth(config) * machine.step_s / machine.batch_size
    seen = [
        probe_on(machine).burst(config, BurstPlan(max_s=0.5, min_s=0.3, seed=seed, prefill_s=prefill_s)).wait_share
        for seed in range(4)
        for prefill_s in (0.0, 0.75)
    ]
    # Summed up over the window it read half as much from full queues.
    assert in_the_long_run > 0.15
    assert all(share == pytest.approx(in_the_long_run, abs=0.12) for share in seen)
    assert sum(seen) / len(seen) == pytest.approx(in_the_long_run, abs=0.05)
