"""The twin against closed forms, and against machines that are simulated event by event."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_loader.search.belief import predict
from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import simulate
from autotune_loader.search.space import Context
from autotune_loader.search.twin import Twin, _line
from autotune_loader.values import LoaderConfig, MemoryUse, Trial
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    simulated_trials,
    with_workers,
)

MIB = 2**20


@settings(max_examples=30, derandomize=True)
@given(
    st.floats(0.001, 0.1), st.integers(0, 5), st.integers(1, 4), st.sampled_from([0.0, 0.01, 0.03])
)
def test_the_queue_agrees_with_the_event_simulation_of_a_machine(wait_s, workers, prefetch, pin_s):
    # GIVEN the times of the batches of a burst, which differ much, and another loader in the same call
    # AND perhaps a thread that pins them, one after the other
    cv = 0.0 if pin_s else 1.0  # it takes them as they come, and the twin in order
    machine = SimulatedMachine(
        cpu_s=0.0,
        wait_s=wait_s,
        service_cv=cv,
        receive_s=0.003,
        step_s=0.02,
        step_cv=0.5,
        pin_s=pin_s,
    )
    config = with_workers(workers, prefetch, pin_memory=pin_s > 0)
    traces = simulated_trials(machine, config)[0].measurement.traces
    step_ends = np.array([each.step_end for each in traces])
    service = [each.collate_end - each.fetch_start for each in traces]
    before = [each.step_end for each in traces[:-1]]
    receive = [
        each.received - max(each.ready, end)
        for each, end in zip(traces, [0.0, *before], strict=True)
    ]
    times = [
        np.column_stack([each] * 2) for each in (service, receive, [each.step_s for each in traces])
    ]
    done = simulate(
        *times, workers=np.array([workers, 5]), prefetch=np.array([prefetch, 4]), pin_s=pin_s
    )
    # THEN every step ends at the same time
    assert done[:, 0] == pytest.approx(step_ends - traces[0].fetch_start, rel=1e-9)


BURST = simulated_trials(SimulatedMachine(batch_size=8), LoaderConfig())[0].measurement


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        (SimulatedMachine(cpu_s=0.04, step_s=0.001, cores=4), 8),
        (SimulatedMachine(cpu_s=0.001, wait_s=0.08, step_s=0.001), 2),
        (SimulatedMachine(cpu_s=0.01, step_s=0.03), 4),
        (SimulatedMachine(cpu_s=0.01, step_s=0.001, receive_s=0.02), 4),
        (SimulatedMachine(cpu_s=0.04, step_s=0.001), 0),
    ],
)
def test_a_prediction_holds_the_true_rate(machine, workers):
    trials = simulated_trials(
        machine, *(with_workers(count) for count in (0, 1, machine.cores)), seed=1
    )
    config = with_workers(workers, 4)
    rate = predict(trials, [config], usable_cores=machine.cores, step_cores=machine.step_cores)[
        0
    ].samples_per_s
    assert rate.low <= SimulatedProbe(machine, FakeClock()).truth(config) <= rate.high


@pytest.mark.parametrize(
    ("trials", "cores", "words"),
    [
        ([], None, r"needs at least one successful trial; .* would work"),
        (simulated_trials(SimulatedMachine(), with_workers(1)), 0.0, "cores=2"),
    ],
)
def test_what_cannot_be_predicted_is_refused(trials, cores, words):
    with pytest.raises(ValueError, match=words):
        predict(trials, [with_workers(2)], usable_cores=4, cores=cores)


def test_a_deeper_queue_than_any_that_ran_is_predicted():
    trials = simulated_trials(SimulatedMachine(), *(with_workers(count) for count in (0, 1, 4)))
    shallow, deep = predict(trials, [with_workers(4, 2), with_workers(4, 16)], usable_cores=4)
    assert deep.samples_per_s.value == pytest.approx(shallow.samples_per_s.value, rel=0.1)
    assert deep.memory_bytes > shallow.memory_bytes


def test_memory_grows_by_what_workers_took_and_by_what_their_queues_hold():
    # GIVEN bursts in which a worker takes 100 MiB beside 500 MiB for the process, and batches of 10 MiB
    def burst(config):
        taken = (500 + 100 * config.num_workers + 10 * config.batches_in_flight) * MIB
        return Trial.of(
            0, config, replace(BURST, batch_bytes=10 * MIB, memory=MemoryUse(rss_bytes=taken))
        )

    known = [burst(with_workers(2)), burst(with_workers(4))]
    found = predict(known, [with_workers(8, 4), LoaderConfig()], usable_cores=4)
    assert [each.memory_bytes for each in found] == [(500 + 800 + 330) * MIB, 510 * MIB]
    # AND where one number of workers alone ran, a worker is worth what one costs before it has loaded anything
    alone = predict(known[:1], [with_workers(4)], usable_cores=4)[0].memory_bytes
    assert alone == (500 + 2 * 100 + 2 * 60 + 10 * 9) * MIB


def observation(workers, service_s, step_s, receive_s=0.001, **more):
    """A burst with these seconds of each batch."""
    service, step, receive = (
        np.full(np.size(service_s), 1.0) * each for each in (service_s, step_s, receive_s)
    )
    bound = workers / service.mean() if workers else 1 / (service + receive + step).mean()
    rate = min(bound, 1 / (receive + step).mean())
    known = {"at_work": min(float(workers), rate * service.mean()), "cpu_s": service, **more}
    stages = {"service_s": service, "receive_s": receive, "step_s": step, **known}
    return Observation(num_workers=workers, batch_size=8.0, batches_per_s=rate, **stages)


def test_a_step_on_the_cores_is_slowed_by_workers_as_the_bursts_show():
    # GIVEN a step of four threads that workers beside it slow down 2.5 times
    fetch = np.full(80, 0.01)
    seen = [
        observation(0, fetch, 0.012),
        *(observation(n, fetch, 0.03, at_work=0.7) for n in (1, 4)),
    ]
    twin = Twin(seen, Context(usable_cores=4, step_cores=4.0, step_s=0.012))
    # THEN with other workers beside it it is expected to take about as long
    assert twin.predict([with_workers(2)]).samples_per_s[0] == pytest.approx(8 / 0.031, rel=0.08)


@pytest.mark.parametrize(("tail", "waits"), [(1.0, False), (12.0, True)])
def test_workers_that_just_keep_up_have_long_filled_their_queues(tail, waits):
    # GIVEN 18 workers that can deliver 1.04 times what the loop takes, every 33rd batch perhaps much slower
    service = 0.04 * np.exp(0.25 * np.random.default_rng(18).standard_normal(396))
    service[::33] *= tail
    loop_s = 1.04 * service.mean() / 18
    seen = observation(18, service, loop_s * 3 / 4, loop_s / 4, cpu_s=np.full(396, 0.001))
    # THEN the loop hardly waits in the long run, unless for the slow ones
    use = Twin([seen], Context(usable_cores=32)).predict([with_workers(18, 8)]).loop_use[0]
    assert (use < 0.95) == waits


def test_a_step_that_was_seen_to_get_faster_beside_workers_is_not_slower_beside_fewer_than_seen():
    falling = _line([3.0, 6.0], np.array([0.0, -2.0]), np.array([0.02, 0.02]))

    assert falling.slope < 0
    assert falling.at(np.array([1.0])) == falling.at(np.array([3.0])) > falling.at(np.array([6.0]))
