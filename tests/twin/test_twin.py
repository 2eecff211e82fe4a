"""The twin against closed forms, an independent event simulation, and simulated machines."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_loader.twin import Observation, Twin, queue, steady_rate
from autotune_loader.twin.queue import Times
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import BatchTrace
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

seconds = st.floats(min_value=0.001, max_value=0.1)
quick = settings(max_examples=30, derandomize=True)


def simulate(service_s, receive_s, step_s, *, pin_s=0.0, transit_s=0.0, **loader):
    return queue.simulate(Times(service_s, receive_s, step_s, pin_s, transit_s), **loader)


def answer(twin, num_workers, prefetch_factor=None, *, epoch_batches=None, startup_s=None, **knobs):
    """What the twin says of one configuration; what needs workers is left out without them."""
    if not num_workers:
        prefetch_factor, knobs = None, {**knobs, "persistent_workers": False}
    config = LoaderConfig(num_workers=num_workers, prefetch_factor=prefetch_factor, **knobs)
    return twin.predict_all([config], epoch_batches=epoch_batches, startup_s=startup_s)[0]


def constant(service, receive, step, *, workers, batches=400, **options):
    done = simulate(
        np.full((batches, 1), service), np.full((batches, 1), receive), np.full((batches, 1), step),
        workers=workers, **options,
    )  # fmt: skip
    return float(steady_rate(done, workers, 200)[0])


def event_simulation(service, receive, step, *, workers, prefetch, ahead=0):
    """Step-end times by going from event to event, written without the recursion; whole-number times make it exact."""
    queues = [deque() for _ in range(workers)]
    sent, received, now, ready, done, ends = 0, 0, 0, set(), [], {}
    while True:
        while sent < min(len(service), workers * prefetch + received):
            queues[sent % workers].append(sent)
            sent += 1
        for worker, queue_of_it in enumerate(queues):
            if queue_of_it and worker not in ends:
                ends[worker] = now + service[queue_of_it[0]]
        if "receiving" not in ends and received in ready and received <= len(done) + ahead:
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


def observation(workers, *, service=0.04, cpu=0.04, receive=0.001, step=0.01, cv=0.0, count=80):
    rng = np.random.default_rng(workers)
    varied = np.exp(cv * rng.standard_normal(count))
    bound = max(workers, 1) / service if workers else 1 / (service + receive + step)
    return Observation(
        num_workers=workers, prefetch_factor=2, service_s=service * varied, cpu_s=cpu * varied,
        receive_s=np.full(count, receive), step_s=np.full(count, step), batch_size=8.0,
        samples_per_s=8 * min(bound, 1 / (receive + step)),
        startup_s=0.1 * workers,
    )  # fmt: skip


class TestRecursion:
    @quick
    @given(service=seconds, receive=seconds, step=seconds, workers=st.integers(0, 8), prefetch=st.integers(2, 5))
    def test_constant_times_give_the_closed_form(self, service, receive, step, workers, prefetch):
        rate = constant(service, receive, step, workers=workers, prefetch=prefetch)
        expected = min(workers / service, 1 / (receive + step)) if workers else 1 / (service + receive + step)
        assert rate == pytest.approx(expected, rel=0.02)

    @quick
    @given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2))
    def test_it_agrees_with_an_event_simulation(self, seed, workers, prefetch, ahead):
        # GIVEN whole-number times without ties between workers, for 40 batches, and three loaders in one call
        count, rng = 40, np.random.default_rng(seed)
        service = rng.permutation(np.arange(1, count + 1)) * 10_007 + rng.integers(0, 5_000, count)
        receive, step = rng.integers(1, 20_000, count), rng.integers(1, 200_000, count)
        loaders = [(workers, prefetch), (workers % 5 + 1, prefetch), (workers, prefetch % 4 + 1)]
        done = simulate(
            *(np.column_stack([times] * 3) for times in (service, receive, step)),
            workers=[each for each, _ in loaders], prefetch=[each for _, each in loaders], device_prefetch=ahead,
        )  # fmt: skip
        # THEN every step ends at the same time
        for column, (each, deep) in zip(done.T, loaders, strict=True):
            exact = [times.tolist() for times in (service, receive, step)]
            assert column.tolist() == event_simulation(*exact, workers=each, prefetch=deep, ahead=ahead)

    def test_the_pinning_thread_is_a_stage_of_its_own_and_travel_delays_but_does_not_limit(self):
        assert constant(0.01, 0.001, 0.002, workers=8, prefetch=2, pin_s=0.02) == pytest.approx(1 / 0.02, rel=0.01)
        # GIVEN two workers and batches that travel longer than they take to make
        quick_one, far = (constant(0.02, 0.001, 0.002, workers=2, prefetch=8, transit_s=t) for t in (0.0, 0.05))
        assert far == pytest.approx(quick_one, rel=0.01)
        # THEN only a loader that hands out too few orders is slowed down
        few = constant(0.02, 0.001, 0.002, workers=2, prefetch=1, transit_s=0.05)
        assert few == pytest.approx(2 / (0.02 + 0.05 + 0.001), rel=0.05)


class TestObservation:
    def measured(self, traces):
        return Measurement(
            samples_per_s=Interval(value=80.0, low=79.0, high=81.0, count=10), samples=80, window_s=1.0, batch_size=8.0,
            first_batch_s=1.5, wait_share=0.0, service_s=0.04, service_cpu_s=0.03, receive_s=0.002, step_s=0.01,
            traces=tuple(traces),
        )  # fmt: skip

    def trace(self, start, service, worker=0, *, requested):
        end = start + service
        return BatchTrace(
            worker=worker, fetch_start=start, fetch_end=end, collate_end=end, cpu_s=service, requested=requested,
            received=max(end, requested) + 0.002, step_end=max(end, requested) + 0.01, samples=8,
        )  # fmt: skip

    def test_the_first_batch_of_each_worker_and_what_happens_while_the_queues_fill_are_left_out(self):
        # GIVEN two workers, each of which is slow at first
        times = [(i, 0.5 if i < 2 else 0.04) for i in range(8)]
        traces = [self.trace(i * 0.1, service, i % 2, requested=i * 0.1 + service + 1.0) for i, service in times]
        seen = Observation.from_measurement(LoaderConfig(num_workers=2), self.measured(traces))
        assert seen.service_s == pytest.approx(np.full(6, 0.04))
        # GIVEN four workers that take the step's cores only until the queues are full
        machine = SimulatedMachine(cpu_s=0.05, step_s=0.06, step_cores=4, service_cv=0.0, step_cv=0.0)
        config = LoaderConfig(num_workers=4, prefetch_factor=4)
        measured = SimulatedProbe(machine, FakeClock()).burst(config, BurstPlan(max_s=2.0, min_s=2.0))
        seen = Observation.from_measurement(config, measured)
        # THEN the step is as it is later on, not as it is on average
        steps = [trace.step_s for trace in measured.traces]
        assert seen.step_s.mean() == pytest.approx(np.mean(steps[len(steps) // 2 :]), rel=0.02)
        assert np.mean(steps) > 1.05 * seen.step_s.mean()

    def test_a_worker_that_has_its_order_shows_what_it_does_between_batches(self):
        # GIVEN one worker that begins 3 ms after it ended, its next orders long there, and a loop that waits for each batch
        traces = [self.trace(i * 0.043, 0.04, requested=i * 0.043 + 0.01) for i in range(20)]
        seen = Observation.from_measurement(LoaderConfig(num_workers=1, prefetch_factor=4), self.measured(traces))
        assert seen.between_s == pytest.approx(0.003)
        # AND the 2 ms until it arrives are no receiving
        assert (seen.saw_ready, seen.waited_s) == (False, pytest.approx(0.002))
        assert answer(Twin.fit([seen], cores=4), 1, 4).samples_per_s.value == pytest.approx(8 / 0.043, rel=0.01)


class TestTwin:
    def test_persistent_workers_start_once(self):
        twin = Twin.fit([observation(1), observation(4)], cores=4)
        again, once = (answer(twin, 2, 2, epoch_batches=20, persistent_workers=p) for p in (False, True))
        assert again.startup_s == pytest.approx(0.2)
        assert 20 * 8 / again.epoch_samples_per_s - 20 * 8 / once.epoch_samples_per_s == pytest.approx(0.2)

    @pytest.mark.parametrize(
        ("machine", "workers", "options", "binding"),
        [
            (SimulatedMachine(cpu_s=0.04, step_s=0.001, cores=4), 8, {}, "cpu"),
            (SimulatedMachine(cpu_s=0.001, wait_s=0.08, step_s=0.001), 2, {}, "workers"),
            (SimulatedMachine(cpu_s=0.01, step_s=0.03), 4, {}, "consumer"),
            (SimulatedMachine(cpu_s=0.01, step_s=0.001, receive_s=0.02), 4, {}, "transport"),
            (SimulatedMachine(cpu_s=0.004, step_s=0.001, batch_bytes=1 << 27), 4, {"pin_memory": True}, "pinning"),
        ],
    )  # fmt: skip
    def test_it_names_what_limits(self, machine, workers, options, binding):
        probe = SimulatedProbe(machine, FakeClock(), seed=1)
        configs = [LoaderConfig(num_workers=count) for count in (0, 1, machine.cores)]
        bursts = [(config, probe.burst(config, BurstPlan(seed=1))) for config in configs]
        seen = [Observation.from_measurement(*each) for each in bursts]
        twin = Twin.fit(seen, cores=machine.cores, consumer_cores=machine.step_cores)
        assert answer(twin, workers, 4, **options).binding == binding

    def test_it_names_storage_where_four_workers_wait_three_times_as_long(self):
        saturated = [observation(1, service=0.04, cpu=0.001), observation(4, service=0.12, cpu=0.001)]
        assert answer(Twin.fit(saturated, cores=8), 4, 2).binding == "storage"


@pytest.mark.parametrize("slowdowns", [{None: 2.5, 2: 1.6, 1: 1.0}, {None: 2.5, 2: 1.0, 1: 1.6}], ids=str)
def test_a_step_on_the_cores_is_slowed_by_workers_in_its_own_way_for_each_number_of_threads(slowdowns):
    # GIVEN bursts in which workers slow the step by what no law of free cores says: with two threads or one, cores are free
    alone, known = {None: 0.012, 2: 0.016, 1: 0.02}, {"service": 0.01, "cpu": 0.01}
    seen = [observation(0, **known, step=alone[None])]
    for workers, threads in ((1, None), (4, None), (2, 2), (3, 1)):
        slowed = observation(workers, **known, step=alone[threads] * slowdowns[threads])
        seen.append(replace(slowed, consumer_threads=threads, at_work=0.7))
    twin = Twin.fit(seen, cores=4, consumer_cores=4.0, step_s_by_threads=alone)
    # THEN with other workers beside it a step of one thread is expected to take about as long as it did
    rate = answer(twin, 2, 2, consumer_threads=1).samples_per_s.value
    assert rate == pytest.approx(8 / (alone[1] * slowdowns[1] + 0.001), rel=0.08)


@pytest.mark.parametrize(("tail", "waits"), [(1.0, False), (12.0, True)])
def test_workers_that_just_keep_up_have_long_filled_their_queues(tail, waits):
    # GIVEN 18 workers that can deliver 1.04 times what the loop takes, every 33rd batch perhaps much slower
    seen = observation(18, service=0.04, cpu=0.001, cv=0.25, count=396)
    seen.service_s[::33] *= tail
    loop_s = 1.04 * seen.service_s.mean() / 18
    twin = Twin.fit([replace(seen, receive_s=np.full(396, loop_s / 4), step_s=np.full(396, loop_s * 3 / 4))], cores=32)
    predicted = answer(twin, 18, 8, epoch_batches=200, persistent_workers=True)
    assert predicted.headroom == pytest.approx(1.04, rel=0.01)
    # THEN the loop hardly waits in the long run, unless for the slow ones; in a short epoch it waits, too
    assert (predicted.consumer_use < 0.95) == waits
    assert predicted.epoch_samples_per_s < 0.97 * predicted.samples_per_s.value
