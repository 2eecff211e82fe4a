"""The twin against closed forms, and against machines that are simulated event by event."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_loader.search.belief import predict
from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import simulate
from autotune_loader.search.space import Context
from autotune_loader.search.twin import Twin, _line
from autotune_loader.values import MAIN_PROCESS, BatchTrace, LoaderConfig, MemoryUse, Trial
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    simulated_trials,
    with_workers,
)

MIB = 2**20


WAITS_S, PINS_S = st.floats(0.001, 0.1), st.sampled_from([0.0, 0.01, 0.03])


@settings(max_examples=30, derandomize=True)
@given(WAITS_S, st.integers(0, 5), st.integers(1, 4), PINS_S)
def test_the_queue_agrees_with_a_simulation_of_events(wait_s, workers, prefetch, pin_s):
    # GIVEN batches that differ much; a thread that pins takes them as they come, the twin in order
    machine = SimulatedMachine(
        cpu_s=0.0, wait_s=wait_s, service_cv=0.0 if pin_s else 1.0,
        receive_s=0.003, step_s=0.02, step_cv=0.5, pin_s=pin_s,
    )  # fmt: skip
    config = with_workers(workers, prefetch, pin_memory=pin_s > 0)
    traces = simulated_trials(machine, config)[0].measurement.traces
    ends = [each.step_end for each in traces]
    service = [each.collate_end - each.fetch_start for each in traces]
    receive = [
        each.received - max(each.ready, end)
        for each, end in zip(traces, [0.0, *ends[:-1]], strict=True)
    ]
    # AND another loader in the same call
    stages = service, receive, [each.step_s for each in traces]
    times = [np.column_stack([each, each]) for each in stages]
    workers, prefetch = np.array([workers, 5]), np.array([prefetch, 4])
    done = simulate(*times, workers=workers, prefetch=prefetch, pin_s=pin_s)
    # THEN every step ends at the same time
    assert done[:, 0] == pytest.approx(np.array(ends) - traces[0].fetch_start, rel=1e-9)


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
    trials = simulated_trials(machine, *map(with_workers, (0, 1, machine.cores)), seed=1)
    config = with_workers(workers, 4)
    [found] = predict(trials, [config], usable_cores=machine.cores)
    rate = found.samples_per_s
    assert rate.low <= SimulatedProbe(machine, FakeClock()).truth(config) <= rate.high


@pytest.mark.parametrize(
    ("trials", "cores", "words"),
    [
        ([], None, r"needs at least one successful trial. Try "),
        (simulated_trials(SimulatedMachine(), with_workers(1)), 0.0, "cores=2"),
    ],
)
def test_what_cannot_be_predicted_is_refused(trials, cores, words):
    with pytest.raises(ValueError, match=words):
        predict(trials, [with_workers(2)], usable_cores=4, cores=cores)


def test_a_deeper_queue_than_any_is_predicted():
    trials = simulated_trials(SimulatedMachine(), *(with_workers(count) for count in (0, 1, 4)))
    shallow, deep = predict(trials, [with_workers(4, 2), with_workers(4, 16)], usable_cores=4)
    assert deep.samples_per_s.value == pytest.approx(shallow.samples_per_s.value, rel=0.1)
    assert deep.memory_bytes > shallow.memory_bytes


def test_memory_grows_with_workers_and_queues():
    # GIVEN a worker that takes 100 MiB beside 500 MiB for the process, and batches of 10 MiB
    def burst(config):
        taken = (500 + 100 * config.num_workers + 10 * config.batches_in_flight) * MIB
        found = replace(BURST, batch_bytes=10 * MIB, memory=MemoryUse(rss_bytes=taken))
        return Trial.of(0, config, found)

    known = [burst(with_workers(2)), burst(with_workers(4))]
    found = predict(known, [with_workers(8, 4), LoaderConfig()], usable_cores=4)
    assert [each.memory_bytes for each in found] == [(500 + 800 + 330) * MIB, 510 * MIB]
    # AND where one number of workers alone ran, one takes what it does before it loads anything
    alone = predict(known[:1], [with_workers(4)], usable_cores=4)[0].memory_bytes
    assert alone == (500 + 2 * 100 + 2 * 60 + 10 * 9) * MIB


def test_workers_are_counted_while_all_are_seen():
    # GIVEN two workers, of which the second begins later, and the first ends later
    spans = {0: [(0.0, 1.0), (2.0, 3.0), (4.0, 6.0)], 1: [(0.5, 1.0), (2.5, 3.0), (4.5, 5.0)]}
    traces = [
        BatchTrace(worker, begun, ended, ended, 0.1, 8, 6.0, 6.5, 7.0)
        for worker, each in spans.items()
        for begun, ended in each
    ]
    burst = replace(BURST, traces=tuple(traces))
    # THEN they worked 2.5 and 1.5 of 4.5 s
    assert Observation.of(with_workers(2), burst).at_work == pytest.approx(4.0 / 4.5)
    # AND while one is not seen, or no two at a time, it is what the rate tells
    rate = burst.samples_per_s.value / burst.batch_size
    for workers, seen in ((3, traces[:4]), (2, [traces[0], traces[4]._replace(fetch_start=1.0)])):
        told = Observation.of(with_workers(workers), replace(burst, traces=tuple(seen)))
        assert told.at_work == pytest.approx(min(rate * told.service_s.mean(), workers))


@pytest.mark.parametrize(
    ("workers", "batches", "kept", "steps"),
    [(2, 6, [2, 3, 4, 5], [1, 2, 3, 4, 5]), (0, 6, [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]),
     (2, 5, [0, 1, 2, 3, 4], [1, 2, 3, 4]), (2, 4, [0, 1, 2, 3], [0, 1, 2, 3])],
)  # fmt: skip
def test_what_is_first_is_left_out_of_stages(workers, batches, kept, steps):
    # GIVEN 1 s of the sampler, 2 of fetching, 1.2 of receipt, 2 of a step, and a loop between
    traces = []
    for i in range(batches):
        at, worker = 10.0 * i, i % workers if workers else MAIN_PROCESS
        whole, ended = at + 3 + 0.1 * i, at + 6.2 + 0.4 * i
        times = at, whole + 1.2, ended
        traces.append(BatchTrace(worker, at + 1, at + 2, whole, 0.5 + i, 8, *times))
    found = Observation.of(with_workers(workers), replace(BURST, traces=tuple(traces)))
    fetch_s = 2 if workers else 3
    assert found.service_s == pytest.approx([fetch_s + 0.1 * i for i in kept])
    assert found.cpu_s == pytest.approx([0.5 + i for i in kept])
    assert found.receive_s == pytest.approx([1.2] * len(kept))
    loop_s = 3.8 - 0.4 * (batches - 2) / 2
    assert found.step_s == pytest.approx([2 + 0.3 * i + loop_s for i in steps])


def test_without_traces_a_burst_tells_its_means():
    means = {"service_s": 0.04, "service_cpu_s": 0.03, "receive_s": 0.002, "step_s": 0.01}
    found = Observation.of(with_workers(1), replace(BURST, traces=(), **means))
    told = [found.service_s, found.cpu_s, found.receive_s, found.step_s]
    assert [each.tolist() for each in told] == [[mean] for mean in means.values()]


def observation(workers, service_s, step_s, receive_s=0.001, **more):
    """A burst with these seconds of each batch."""
    service, step, receive = (
        np.full(np.size(service_s), 1.0) * each for each in (service_s, step_s, receive_s)
    )
    bound = workers / service.mean() if workers else 1 / (service + receive + step).mean()
    rate = min(bound, 1 / (receive + step).mean())
    known = {"at_work": min(float(workers), rate * service.mean()), "cpu_s": service, **more}
    return Observation(
        num_workers=workers, batch_size=8.0, batches_per_s=rate,
        service_s=service, receive_s=receive, step_s=step, **known,
    )  # fmt: skip


def test_a_step_on_cores_is_slowed_as_shown():
    # GIVEN a step of four threads that workers beside it slow down 2.5 times
    fetch = np.full(80, 0.01)
    seen = [observation(count, fetch, 0.03, at_work=0.7) for count in (1, 4)]
    context = Context(usable_cores=4, step_cores=4.0, step_s=0.012)
    twin = Twin([observation(0, fetch, 0.012), *seen], context)
    # THEN with other workers beside it it is expected to take about as long
    assert twin.predict([with_workers(2)]).samples_per_s[0] == pytest.approx(8 / 0.031, rel=0.08)
    # AND without any step it is the workers that limit
    twin = Twin([observation(2, fetch, 0.0)], Context(usable_cores=4))
    assert twin.predict([with_workers(2)]).samples_per_s[0] == pytest.approx(1600, rel=0.01)


WAVES = 1 + 0.5 * np.sin(np.arange(90.0))
CONTENDING = [
    observation(
        count, (0.04 + 0.002 * count) * WAVES, 0.004 + 0.0006 * count, 0.001 + 0.0001 * count,
        cpu_s=(0.03 + 0.001 * count) * WAVES, at_work=at_work, pin_s=0.003 * (count > 0),
    )
    for count, at_work in {0: 0.0, 1: 0.9, 4: 3.6, 8: 7.5}.items()
]  # fmt: skip
COMPUTING = observation(  # four workers that wait less than one
    4, 0.048 * WAVES, 0.0064, 0.0014, cpu_s=0.046 * WAVES, at_work=3.6, pin_s=0.003
)
BUSY = Context(usable_cores=4, step_cores=2.0, step_s=0.0035, fetch_cpu_s=0.032)
PREDICTED = [with_workers(*each) for each in ((0, 1), (1, 1), (2, 2), (4, 8), (6, 2), (16, 4))]
MEASURED = [
    # bursts, cores of the step, and of all:
    # samples/s, shares of the time in which the loop works, and workers of use
    (
        CONTENDING, 2.0, 4, [177.53, 208.47, 435.93, 657.96, 668.93, 679.19],
        [0.1110, 0.1525, 0.3167, 0.6322, 0.7668, 1.0], 9,
    ),
    (
        CONTENDING, 2.0, 8, [177.53, 208.47, 435.93, 803.32, 1009.02, 1107.3],
        [0.1110, 0.1525, 0.3167, 0.5832, 0.7347, 1.0], 9,
    ),
    (
        CONTENDING[:1], 5.0, 4, [177.53, 194.50, 367.03, 599.61, 645.07, 662.79],
        [0.1110, 0.1224, 0.2557, 0.5100, 0.6308, 1.0], 10,
    ),
    (
        [*CONTENDING[:2], COMPUTING], 2.0, 4, [177.53, 201.57, 397.27, 546.60, 548.67, 552.24],
        [0.1110, 0.1435, 0.2924, 0.5630, 0.6951, 1.0], 9,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("bursts", "step_cores", "cores", "rates", "uses", "useful"), MEASURED)
def test_predictions_are_those_that_studies_judged(bursts, step_cores, cores, rates, uses, useful):
    # GIVEN arithmetic that `studies/regret` has measured THEN nobody changes it unawares
    twin = Twin(bursts, replace(BUSY, step_cores=step_cores))
    found = twin.predict(PREDICTED, cores)
    assert found.samples_per_s == pytest.approx(rates, rel=1e-4)
    assert found.loop_use == pytest.approx(uses, rel=1e-3)
    assert twin.useful_workers == useful


@pytest.mark.parametrize(("tail", "use"), [(1.0, 1.0), (12.0, 0.67)])
def test_workers_that_keep_up_have_filled_queues(tail, use):
    # GIVEN 18 workers that deliver 1.04 times what the loop takes, each 33rd batch perhaps slower
    service = 0.04 * np.exp(0.25 * np.random.default_rng(18).standard_normal(396))
    service[::33] *= tail
    loop_s = 1.04 * service.mean() / 18
    seen = observation(18, service, loop_s * 3 / 4, loop_s / 4, cpu_s=np.full(396, 0.001))
    # THEN the loop hardly waits in the long run, unless for the slow ones
    found = Twin([seen], Context(usable_cores=32)).predict([with_workers(18, 8)])
    assert found.loop_use[0] == pytest.approx(use, abs=0.003)


DEPTHS = {
    # samples/s with 4 workers at each prefetch, and with 1 and 0: the shallowest that is enough
    "never one, which would wait": ({1: 100.0, 2: 100.0, 4: 100.0, 8: 100.0}, {}, 2),
    "unless all have one": ({1: 100.0}, {}, 1),
    "by so much it may be slower": ({2: 99.6, 4: 100.0, 8: 100.0}, {}, 2),
    "not by more": ({2: 99.4, 4: 100.0, 8: 100.0}, {}, 4),
    "the deepest": ({4: 99.4, 8: 100.0}, {}, 8),
    "the slow do not tell": ({2: 100.0, 4: 100.0}, {2: 70.0, 4: 79.0}, 2),
    "those near the best do": ({2: 100.0, 4: 100.0}, {2: 80.0, 4: 81.0}, 4),
    "without workers there is none": ({}, {}, 1),
}


@pytest.mark.parametrize(("four", "one", "needed"), DEPTHS.values(), ids=DEPTHS)
def test_a_queue_is_as_deep_as_needed(monkeypatch, four, one, needed):
    rates = {with_workers(0): 90.0}
    for count, each in ((4, four), (1, one)):
        rates.update({with_workers(count, depth): rate for depth, rate in each.items()})
    twin, told = Twin(CONTENDING, BUSY), SimpleNamespace(samples_per_s=np.array([*rates.values()]))
    monkeypatch.setattr(twin, "predict", lambda configs: told)
    assert twin.needed_prefetch([*rates], 0.005) == needed


def test_a_falling_line_ends_where_it_was_seen():
    # GIVEN a step that was seen to get faster beside workers
    falling = _line([3.0, 6.0], np.array([0.0, -2.0]), np.array([0.02, 0.02]))
    assert falling.slope < 0
    assert falling.at(np.array([1.0])) == falling.at(np.array([3.0])) > falling.at(np.array([6.0]))
