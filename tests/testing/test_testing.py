"""The simulated and the replayed probe: fakes have to be right before anything tested with them is."""

import pytest

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import MAIN_PROCESS
from tests.support import ReplayProbe, SimulatedMachine, SimulatedProbe

PLAN = BurstPlan(max_s=1.0, relative_error=0.0)


class StubClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def steady(**changes):
    """A machine on which nothing varies."""
    return SimulatedMachine(
        **{"service_cv": 0.0, "step_cv": 0.0, "alpha": 0.0, "receive_s": 0.0, "first_batch_extra_s": 0.0, **changes}
    )


def probe_on(machine, **options):
    return SimulatedProbe(machine, StubClock(), **options)


def workers(count, prefetch=2, **options):
    return LoaderConfig(num_workers=count, prefetch_factor=prefetch if count else None, **options)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_truth_is_the_slower_of_the_workers_and_the_step(count):
    # GIVEN a machine on which a batch takes 40 ms of a worker and the step 15 ms
    probe = probe_on(steady(cpu_s=0.04, step_s=0.015, batch_size=10))
    # WHEN the long-run rate is asked for
    rate = probe.truth(workers(count))
    # THEN it is what the slower side allows
    assert rate == pytest.approx(10 * min(count / 0.04, 1 / 0.015), rel=0.01)


def test_truth_without_workers_is_one_thing_after_the_other():
    assert probe_on(steady(cpu_s=0.03, wait_s=0.01, step_s=0.01, batch_size=10)).truth(workers(0)) == pytest.approx(200)


def test_more_workers_than_cores_gain_nothing_on_cpu_work():
    # GIVEN a step that costs nothing and twice as many workers as cores
    probe = probe_on(steady(cores=2, cpu_s=0.04, step_s=0.0001, batch_size=1))
    # THEN the cores limit the rate
    assert probe.truth(workers(4)) == pytest.approx(2 / 0.04, rel=0.01)


def test_waiting_takes_no_core():
    probe = probe_on(steady(cores=2, cpu_s=0.0, wait_s=0.04, step_s=0.0001, batch_size=1))
    assert probe.truth(workers(8)) == pytest.approx(8 / 0.04, rel=0.01)


def test_a_step_on_the_cpu_slows_down_when_workers_want_its_cores():
    # GIVEN a step that uses both cores, behind which two workers also compute all the time
    machine = steady(cores=2, cpu_s=0.04, step_s=0.02, step_cores=2.0)
    # WHEN a burst runs
    measured = probe_on(machine).burst(workers(2), PLAN)
    # THEN its steps take longer than undisturbed ones
    assert measured.step_s > 0.022


def test_out_of_order_delivery_is_not_held_up_by_a_slow_batch():
    probe = probe_on(SimulatedMachine(wait_s=0.04, cpu_s=0.0, step_s=0.012, tail_share=0.05, tail_factor=20))
    assert probe.truth(workers(4, in_order=False)) > 1.1 * probe.truth(workers(4))


def test_a_device_prefetch_hides_the_receipt_behind_the_step():
    probe = probe_on(steady(cpu_s=0.001, step_s=0.02, receive_s=0.01, batch_size=1))
    assert probe.truth(workers(1)) == pytest.approx(1 / 0.03, rel=0.01)
    assert probe.truth(workers(1, device_prefetch=2)) == pytest.approx(1 / 0.02, rel=0.01)


def test_one_thread_pins_all_batches():
    probe = probe_on(steady(cpu_s=0.001, step_s=0.001, pin_s=0.01, batch_size=1))
    assert probe.truth(workers(4, pin_memory=True)) == pytest.approx(1 / 0.01, rel=0.01)


def test_a_burst_moves_the_clock_on_by_start_up_and_window():
    # GIVEN a probe on a machine whose workers take a second each to start
    clock = StubClock()
    probe = SimulatedProbe(steady(worker_start_s=1.0), clock)
    # WHEN a burst with two workers and a window of one second runs
    measured = probe.burst(workers(2), PLAN)
    # THEN the clock went on by start-up and the shortest window at least
    assert measured.first_batch_s > 2.0
    assert 2.0 + PLAN.min_s < clock.now - 100.0 < 4.5


def test_the_traces_of_a_burst_tell_one_possible_history():
    measured = probe_on(SimulatedMachine()).burst(workers(3), PLAN)
    for trace in measured.traces:
        assert trace.fetch_start <= trace.fetch_end <= trace.collate_end <= trace.received <= trace.step_end
        assert trace.requested <= trace.received
    assert [t.worker for t in measured.traces[:6]] == [0, 1, 2, 0, 1, 2]
    assert all(
        before.step_end <= after.requested for before, after in zip(measured.traces, measured.traces[1:], strict=False)
    )


def test_without_workers_the_training_process_fetches():
    measured = probe_on(SimulatedMachine()).burst(workers(0), PLAN)
    assert {t.worker for t in measured.traces} == {MAIN_PROCESS}


WHOLE = BurstPlan(max_s=0.5, min_s=0.1, whole_epochs=True)


def test_an_epoch_takes_the_rounds_of_its_workers():
    # GIVEN epochs of 8 batches that two workers fetch in four rounds of 40 ms, the last of them followed by its step
    probe = probe_on(steady(cpu_s=0.04, step_s=0.001, batch_size=10), epoch_batches=8)
    # WHEN they are run whole
    staying = probe.burst(workers(2, persistent_workers=True), WHOLE)
    # THEN they take what these rounds take, whatever came before
    assert staying.samples_per_s.value == pytest.approx(80 / 0.162, rel=0.01)
    assert staying.samples % 80 == 0
    assert probe.truth_of_epochs(workers(2, persistent_workers=True), epochs=5) == pytest.approx(80 / 0.162, rel=0.01)


def test_workers_that_do_not_persist_start_in_every_epoch():
    probe = probe_on(steady(cpu_s=0.04, step_s=0.001, start_s=0.1, worker_start_s=0.05, batch_size=10), epoch_batches=8)
    assert probe.truth_of_epochs(workers(2), epochs=5) == pytest.approx(80 / (0.2 + 0.162), rel=0.01)


def test_all_epochs_read_the_same_batches_in_orders_of_their_own():
    # GIVEN epochs of 16 batches that differ much, and one worker, who fetches them one after the other
    machine = steady(cpu_s=0.0, wait_s=0.01, service_cv=0.5, step_s=0.0001)
    probe = probe_on(machine, epoch_batches=16)
    # WHEN epochs are run whole, and without end
    for plan in (WHOLE, PLAN):
        traces = probe.burst(workers(1, persistent_workers=True), plan).traces
        epochs = [[t.service_s for t in traces[i : i + 16]] for i in range(0, len(traces) - 15, 16)]
        # THEN each holds the same, shuffled
        assert len(epochs) > 2
        assert all(sorted(each) == pytest.approx(sorted(epochs[0])) for each in epochs)
        assert epochs[0] != pytest.approx(epochs[1])


def test_a_dataset_without_end_has_no_whole_epochs():
    with pytest.raises(ValueError, match=r"epoch_batches=16\) would work"):
        probe_on(SimulatedMachine()).burst(workers(2), WHOLE)


def test_the_same_seed_gives_the_same_burst():
    noisy = SimulatedMachine(noise_sd=0.05)
    first, second = (probe_on(noisy, seed=3).burst(workers(2), PLAN) for _ in range(2))
    assert first == second


def test_noise_differs_between_bursts_and_leaves_the_truth_alone():
    # GIVEN a noisy machine
    probe = probe_on(SimulatedMachine(noise_sd=0.05))
    # WHEN the same burst runs three times
    rates = {probe.burst(workers(2), PLAN).samples_per_s.value for _ in range(3)}
    # THEN every one differs, and the truth does not
    assert len(rates) == 3
    assert probe.truth(workers(2)) == probe_on(SimulatedMachine()).truth(workers(2))


def test_spikes_and_drift_slow_a_burst_down():
    spiked = probe_on(SimulatedMachine(spike_share=1.0, spike_factor=2.0)).burst(workers(1), PLAN)
    drifted = probe_on(SimulatedMachine(drift_per_hour=36.0)).burst(workers(1), PLAN)  # the clock begins at 100 s
    quiet = probe_on(SimulatedMachine()).burst(workers(1), PLAN)
    for slowed in (spiked, drifted):
        assert slowed.service_s == pytest.approx(2 * quiet.service_s, rel=0.1)


def test_a_machine_can_refuse_configurations():
    # GIVEN a machine on which three workers crash and whose memory is enough for two
    crash = Failure(kind="crashed", phase="start", message="no")
    refuses = probe_on(SimulatedMachine(fails=lambda config: crash if config.num_workers == 3 else None))
    small = probe_on(SimulatedMachine(base_bytes=0, batch_bytes=0, worker_bytes=100, memory_limit_bytes=250))
    # THEN these bursts fail and others do not
    assert refuses.burst(workers(3), PLAN) is crash
    assert small.burst(workers(3), PLAN).kind == "memory_guard"
    assert isinstance(refuses.burst(workers(2), PLAN), Measurement)
    assert isinstance(small.burst(workers(2), PLAN), Measurement)


def test_a_burst_that_takes_too_long_is_a_failure():
    failed = probe_on(steady(cpu_s=10.0)).burst(workers(1), BurstPlan(deadline_s=5.0))
    assert failed.kind == "deadline"


def test_the_step_ceiling_is_the_undisturbed_step():
    probe = probe_on(steady(step_s=0.02, step_s_by_threads={1: 0.01}, batch_size=10))
    assert probe.step_ceiling(None, PLAN).samples_per_s.value == pytest.approx(500)
    assert probe.step_ceiling(1, PLAN).samples_per_s.value == pytest.approx(1000)


def test_replay_answers_in_the_order_of_the_record():
    # GIVEN two recorded bursts of one configuration, and a step ceiling
    source = probe_on(SimulatedMachine(noise_sd=0.05))
    answers = [source.burst(workers(2), PLAN), source.burst(workers(2), PLAN)]
    ceiling = source.step_ceiling(None, PLAN)
    # WHEN they are replayed
    probe = ReplayProbe({workers(2): answers}, {None: [ceiling]})
    # THEN they come as they were recorded
    assert [probe.burst(workers(2), PLAN), probe.burst(workers(2), PLAN)] == answers
    assert probe.step_ceiling(None, PLAN) is ceiling
    assert probe.asked == [workers(2), workers(2)]


def test_replay_refuses_what_was_not_recorded():
    failure = Failure(kind="crashed", phase="start", message="no")
    probe = ReplayProbe({workers(2): [failure]})
    with pytest.raises(LookupError, match=r"no burst of 3 workers.* was recorded; recorded: 2 workers"):
        probe.burst(workers(3), PLAN)
    probe.burst(workers(2), PLAN)
    with pytest.raises(LookupError, match="was replayed already"):
        probe.burst(workers(2), PLAN)
    with pytest.raises(LookupError, match="no step ceiling of 1"):
        probe.step_ceiling(1, PLAN)


@pytest.mark.parametrize(("count", "depth"), [(1, 8), (2, 8), (2, 2)])
def test_the_share_of_waiting_is_that_of_the_long_run_however_full_the_queues_were(count, depth):
    config = LoaderConfig(num_workers=count, prefetch_factor=depth)
    # GIVEN a job that sleeps, and the share of the time in which its loop waits in the long run
    machine = steady(cores=2, cpu_s=0.001, wait_s=0.05, step_s=0.02, receive_s=1e-4, service_cv=0.1)
    in_the_long_run = 1 - probe_on(machine).truth(config) * machine.step_s / machine.batch_size
    # WHEN bursts of half a second begin with empty and with full queues
    seen = [
        probe_on(machine).burst(config, BurstPlan(max_s=0.5, min_s=0.3, seed=seed, prefill_s=prefill_s)).wait_share
        for seed in range(4)
        for prefill_s in (0.0, 0.75)
    ]
    # THEN each of them tells it; summed up over the window it read half as much from full queues
    assert in_the_long_run > 0.15
    assert all(share == pytest.approx(in_the_long_run, abs=0.12) for share in seen)
    assert sum(seen) / len(seen) == pytest.approx(in_the_long_run, abs=0.05)
