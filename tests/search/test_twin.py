"""The twin against closed forms, an independent event simulation, and simulated machines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_loader.search.observation import Observation
from autotune_loader.search.predict import Prediction, predict
from autotune_loader.search.queue import simulate
from autotune_loader.search.space import Context
from autotune_loader.search.twin import Twin
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BurstPlan, Measurement, MemoryUse, Trial
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import BatchTrace
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe

seconds = st.floats(min_value=0.001, max_value=0.1)
quick = settings(max_examples=30, derandomize=True)
MIB = 2**20


def with_workers(workers: int, prefetch: int = 2) -> LoaderConfig:
    return LoaderConfig(num_workers=workers, prefetch_factor=prefetch if workers else None)


def event_simulation(
    service: Sequence[int], receive: Sequence[int], step: Sequence[int], *, workers: int, prefetch: int
) -> list[int]:
    """Step-end times by going from event to event, written without the recursion; whole-number times make it exact."""
    queues: list[deque[int]] = [deque() for _ in range(workers)]
    sent, received, now = 0, 0, 0
    ready, done, ends = set[int](), list[int](), dict[Any, int]()
    while True:
        while sent < min(len(service), workers * prefetch + received):
            queues[sent % workers].append(sent)
            sent += 1
        for worker, queue_of_it in enumerate(queues):
            if queue_of_it and worker not in ends:
                ends[worker] = now + service[queue_of_it[0]]
        if "receiving" not in ends and received in ready and received <= len(done):
            ends["receiving"] = now + receive[received]
        if "stepping" not in ends and len(done) < received:
            ends["stepping"] = now + step[len(done)]
        if not ends:
            return done
        now = min(ends.values())
        for what in [each for each, end in ends.items() if end == now]:
            del ends[what]
            if what == "receiving":
                received += 1
            elif what == "stepping":
                done.append(now)
            else:
                ready.add(queues[what].popleft())


@quick
@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4))
def test_the_queue_agrees_with_an_event_simulation(seed: int, workers: int, prefetch: int) -> None:
    # GIVEN whole-number times without ties between workers, for 40 batches, and three loaders in one call
    count, rng = 40, np.random.default_rng(seed)
    service = rng.permutation(np.arange(1, count + 1)) * 10_007 + rng.integers(0, 5_000, count)
    receive, step = rng.integers(1, 20_000, count), rng.integers(1, 200_000, count)
    loaders = [(workers, prefetch), (workers % 5 + 1, prefetch), (workers, prefetch % 4 + 1)]
    times = [np.column_stack([each] * 3) for each in (service, receive, step)]
    done = simulate(*times, workers=[each for each, _ in loaders], prefetch=[each for _, each in loaders])
    # THEN every step ends at the same time
    for column, (each, deep) in zip(done.T, loaders, strict=True):
        exact = [series.tolist() for series in (service, receive, step)]
        assert column.tolist() == event_simulation(*exact, workers=each, prefetch=deep)


# What a burst tells


def measured(traces: Sequence[BatchTrace]) -> Measurement:
    return Measurement(
        samples_per_s=Interval(value=80.0, low=79.0, high=81.0, count=10), samples=80, window_s=1.0, batch_size=8.0,
        first_batch_s=1.5, wait_share=0.0, service_s=0.04, service_cpu_s=0.03, receive_s=0.002, step_s=0.01,
        traces=tuple(traces),
    )  # fmt: skip


def trace(start: float, service: float, worker: int = 0, *, requested: float) -> BatchTrace:
    end = start + service
    return BatchTrace(
        worker=worker, fetch_start=start, fetch_end=end, collate_end=end, cpu_s=service, requested=requested,
        received=max(end, requested) + 0.002, step_end=max(end, requested) + 0.01, samples=8,
    )  # fmt: skip


def test_the_first_batch_of_each_worker_is_left_out() -> None:
    # GIVEN two workers, each of which is slow at first
    times = [(i, 0.5 if i < 2 else 0.04) for i in range(8)]
    traces = [trace(i * 0.1, service, i % 2, requested=i * 0.1 + service + 1.0) for i, service in times]
    seen = Observation.of(LoaderConfig(num_workers=2), measured(traces))
    assert seen.service_s == pytest.approx(np.full(6, 0.04))


def test_a_worker_that_has_its_order_shows_what_it_does_between_batches() -> None:
    # GIVEN one worker that begins 3 ms after it ended, its next orders long there, and a loop that waits for each batch
    traces = [trace(i * 0.043, 0.04, requested=i * 0.043 + 0.01) for i in range(20)]
    seen = Observation.of(LoaderConfig(num_workers=1, prefetch_factor=4), measured(traces))
    assert seen.between_s == pytest.approx(0.003)
    # THEN that is part of what it can deliver
    rate = Twin.fit([seen], Context(usable_cores=4)).predict([with_workers(1, 4)]).samples_per_s[0]
    assert rate == pytest.approx(8 / 0.043, rel=0.01)


# What the twin says


def observation(
    workers: int, *, service: float = 0.04, cpu: float = 0.04, receive: float = 0.001, step: float = 0.01
) -> Any:
    bound = max(workers, 1) / service if workers else 1 / (service + receive + step)
    return Observation(
        num_workers=workers, service_s=np.full(80, service), cpu_s=np.full(80, cpu),
        receive_s=np.full(80, receive), step_s=np.full(80, step), batch_size=8.0,
        samples_per_s=8 * min(bound, 1 / (receive + step)),
    )  # fmt: skip


def trials_on(machine: SimulatedMachine, *workers: int) -> list[Trial]:
    probe = SimulatedProbe(machine, FakeClock(), seed=1)
    configs = [with_workers(count) for count in workers]
    return [Trial.of(i, each, probe.burst(each, BurstPlan(seed=1))) for i, each in enumerate(configs)]


def predicted(machine: SimulatedMachine, config: LoaderConfig, **asked: Any) -> Prediction:
    trials = trials_on(machine, 0, 1, machine.cores)
    known = {"usable_cores": machine.cores, "step_cores": machine.step_cores, **asked}
    return predict(trials, [config], **known)[0]


@pytest.mark.parametrize(
    ("machine", "workers"),
    [
        (SimulatedMachine(cpu_s=0.04, step_s=0.001, cores=4), 8),
        (SimulatedMachine(cpu_s=0.001, wait_s=0.08, step_s=0.001), 2),
        (SimulatedMachine(cpu_s=0.01, step_s=0.03), 4),
        (SimulatedMachine(cpu_s=0.01, step_s=0.001, receive_s=0.02), 4),
        (SimulatedMachine(cpu_s=0.04, step_s=0.001), 0),
    ],
)  # fmt: skip
def test_a_prediction_holds_the_true_rate(machine: SimulatedMachine, workers: int) -> None:
    found = predicted(machine, config := with_workers(workers, 4))
    assert found.samples_per_s.low <= SimulatedProbe(machine, FakeClock()).truth(config) <= found.samples_per_s.high


@pytest.mark.parametrize(
    ("trials", "cores", "words"),
    [([], None, "nothing was measured"), (trials_on(SimulatedMachine(), 1), 0.0, "cores=2")],
)
def test_what_cannot_be_predicted_is_refused(trials: list[Trial], cores: float | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        predict(trials, [with_workers(2)], usable_cores=4, cores=cores)


def test_memory_grows_by_what_workers_took_and_by_what_their_queues_hold() -> None:
    # GIVEN bursts in which a worker takes 100 MiB beside 500 MiB for the process, and batches of 10 MiB
    def burst(workers: int, prefetch: int) -> Trial:
        config = with_workers(workers, prefetch)
        taken = (500 + 100 * workers + 10 * config.batches_in_flight) * MIB
        seen = replace(measured([]), batch_bytes=10 * MIB, memory=MemoryUse(rss_bytes=taken))
        return Trial.of(workers, config, seen)

    known = [burst(2, 2), burst(4, 2)]
    found = predict(known, [with_workers(8, 4), LoaderConfig()], usable_cores=4)
    assert [each.memory_bytes for each in found] == [(500 + 800 + 330) * MIB, 510 * MIB]
    # AND where one number of workers alone ran, a worker is worth what one costs before it has loaded anything
    alone = predict(known[:1], [with_workers(4)], usable_cores=4)[0].memory_bytes
    assert alone == (500 + 2 * 100 + 2 * 60 + 10 * 9) * MIB


def test_a_step_on_the_cores_is_slowed_by_workers_as_the_bursts_show() -> None:
    # GIVEN a step of four threads that workers beside it slow down 2.5 times
    seen = [observation(0, service=0.01, cpu=0.01, step=0.012)]
    seen += [replace(observation(n, service=0.01, cpu=0.01, step=0.03), at_work=0.7) for n in (1, 4)]
    twin = Twin.fit(seen, Context(usable_cores=4, step_cores=4.0, step_s=0.012))
    # THEN with other workers beside it it is expected to take about as long
    assert twin.predict([with_workers(2)]).samples_per_s[0] == pytest.approx(8 / 0.031, rel=0.08)


@pytest.mark.parametrize(("tail", "waits"), [(1.0, False), (12.0, True)])
def test_workers_that_just_keep_up_have_long_filled_their_queues(tail: float, waits: bool) -> None:
    # GIVEN 18 workers that can deliver 1.04 times what the loop takes, every 33rd batch perhaps much slower
    service = 0.04 * np.exp(0.25 * np.random.default_rng(18).standard_normal(396))
    service[::33] *= tail
    loop_s = 1.04 * service.mean() / 18
    seen = replace(observation(18, cpu=0.001), service_s=service, cpu_s=np.full(396, 0.001))
    seen = replace(seen, receive_s=np.full(396, loop_s / 4), step_s=np.full(396, loop_s * 3 / 4))
    # THEN the loop hardly waits in the long run, unless for the slow ones
    use = Twin.fit([seen], Context(usable_cores=32)).predict([with_workers(18, 8)]).loop_use[0]
    assert (use < 0.95) == waits
