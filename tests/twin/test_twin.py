"""The twin against closed forms, an independent event simulation, and simulated machines."""

import heapq
import itertools
import time
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune_loader.twin import Observation, Prediction, Twin, queue, steady_rate
from autotune_loader.twin.queue import Times
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import BatchTrace
from tests.support import SimulatedMachine, SimulatedProbe

seconds = st.floats(min_value=0.001, max_value=0.1)
few_workers = st.integers(min_value=0, max_value=6)
few_batches = st.integers(min_value=1, max_value=5)
quick = settings(max_examples=30, derandomize=True)


class StubClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


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
    """Step-end times by a queue of events, written without the recursion; whole-number times make it exact."""
    queues = [deque() for _ in range(workers)]
    idle, owner, ready, done = set(range(workers)), {}, [], []
    events, order, sent = [], itertools.count(), 0
    received = expected = 0
    receiving = stepping = False
    to_step = deque()

    def hand_out(worker, now):
        nonlocal sent
        if sent < len(service):
            owner[sent] = worker
            queues[worker].append(sent)
            sent += 1
            begin(worker, now)

    def begin(worker, now):
        if worker in idle and queues[worker]:
            idle.discard(worker)
            index = queues[worker].popleft()
            heapq.heappush(events, (now + service[index], 0, next(order), "fetched", index))

    def consume(now):
        nonlocal receiving, stepping, expected
        if not stepping and to_step:
            stepping = True
            heapq.heappush(events, (now + step[to_step.popleft()], 1, next(order), "stepped", -1))
        wanted = expected
        if not receiving and received <= len(done) + ahead and wanted in ready:
            ready.remove(wanted)
            receiving, expected = True, expected + 1
            heapq.heappush(events, (now + receive[expected - 1], 2, next(order), "received", wanted))

    for slot in range(workers * prefetch):
        hand_out(slot % workers, 0)
    while events:
        now, _, _, what, index = heapq.heappop(events)
        if what == "fetched":
            ready.append(index)
            idle.add(owner[index])
            begin(owner[index], now)
        elif what == "received":
            receiving, received = False, received + 1
            to_step.append(received - 1)
            hand_out(sent % workers, now)
        else:
            stepping = False
            done.append(now)
        if not events or events[0][0] > now or what != "fetched":
            consume(now)
    return done


def observation(workers, *, service=0.04, cpu=0.04, receive=0.001, step=0.01, rate=None, cv=0.0, count=80):
    rng = np.random.default_rng(workers)
    varied = np.exp(cv * rng.standard_normal(count))
    bound = max(workers, 1) / service if workers else 1 / (service + receive + step)
    return Observation(
        num_workers=workers, prefetch_factor=2, service_s=service * varied, cpu_s=cpu * varied,
        receive_s=np.full(count, receive), step_s=np.full(count, step), batch_size=8.0,
        samples_per_s=rate or 8 * min(bound, 1 / (receive + step)),
        startup_s=0.1 * workers,
    )  # fmt: skip


def twin_of_a_machine(machine, *, seed=1, plan_seed=1):
    """The twin from bursts at 0, 1 and as many workers as cores, and the probe that knows the truth."""
    probe = SimulatedProbe(machine, StubClock(), seed=seed)
    configs = [LoaderConfig(num_workers=n) for n in (0, 1, machine.cores)]
    bursts = [(c, probe.burst(c, BurstPlan(seed=plan_seed))) for c in configs]
    observed = [Observation.from_measurement(config, measured) for config, measured in bursts]
    return Twin.fit(observed, cores=machine.cores, consumer_cores=machine.step_cores), probe


def grid(workers):
    return [
        LoaderConfig(num_workers=n, prefetch_factor=p if n else None)
        for n in workers
        for p in ((2, 4, 8) if n else (2,))
    ]


class TestRecursion:
    @quick
    @given(service=seconds, receive=seconds, step=seconds, workers=st.integers(1, 8), prefetch=st.integers(2, 5))
    def test_constant_times_give_the_closed_form(self, service, receive, step, workers, prefetch):
        rate = constant(service, receive, step, workers=workers, prefetch=prefetch)
        assert rate == pytest.approx(min(workers / service, 1 / (receive + step)), rel=0.02)

    @quick
    @given(service=seconds, receive=seconds, step=seconds)
    def test_without_workers_everything_adds_up(self, service, receive, step):
        assert constant(service, receive, step, workers=0, prefetch=1) == pytest.approx(1 / (service + receive + step))

    @quick
    @given(
        st.data(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2),
    )  # fmt: skip
    def test_it_agrees_with_an_event_simulation(self, data, workers, prefetch, ahead):
        # GIVEN whole-number times without ties between workers, for 40 batches
        count = 40
        seed = data.draw(st.integers(0, 10_000))
        rng = np.random.default_rng(seed)
        service = rng.permutation(np.arange(1, count + 1)) * 10_007 + rng.integers(0, 5_000, count)
        receive, step = rng.integers(1, 20_000, count), rng.integers(1, 200_000, count)
        # WHEN both simulate them
        expected = event_simulation(
            [int(s) for s in service], [int(r) for r in receive], [int(s) for s in step],
            workers=workers, prefetch=prefetch, ahead=ahead,
        )  # fmt: skip
        done = simulate(
            service[:, None], receive[:, None], step[:, None],
            workers=workers, prefetch=prefetch, device_prefetch=ahead,
        )  # fmt: skip
        # THEN every step ends at the same time
        assert done[:, 0].tolist() == expected

    @quick
    @given(seed=st.integers(0, 1000), workers=st.integers(1, 6), prefetch=st.integers(1, 4), slower=st.floats(1.0, 3.0))
    def test_a_slower_service_never_ends_earlier(self, seed, workers, prefetch, slower):
        service = np.random.default_rng(seed).exponential(0.02, (60, 1))
        fixed = {"receive_s": np.full((60, 1), 0.001), "step_s": np.full((60, 1), 0.01)}
        fast = simulate(service, workers=workers, prefetch=prefetch, **fixed)
        slow = simulate(service * slower, workers=workers, prefetch=prefetch, **fixed)
        assert np.all(slow >= fast)

    @quick
    @given(seed=st.integers(0, 1000), workers=st.integers(1, 6), prefetch=st.integers(1, 4))
    def test_a_deeper_prefetch_never_ends_later(self, seed, workers, prefetch):
        service = np.random.default_rng(seed).exponential(0.02, (60, 1))
        fixed = {"receive_s": np.full((60, 1), 0.001), "step_s": np.full((60, 1), 0.01)}
        shallow = simulate(service, workers=workers, prefetch=prefetch, **fixed)
        deep = simulate(service, workers=workers, prefetch=prefetch + 1, **fixed)
        assert np.all(deep <= shallow + 1e-12)

    def test_the_pinning_thread_is_a_stage_of_its_own(self):
        assert constant(0.01, 0.001, 0.002, workers=8, prefetch=2, pin_s=0.02) == pytest.approx(1 / 0.02, rel=0.01)

    def test_travel_delays_but_does_not_limit(self):
        # GIVEN two workers and batches that travel longer than they take to make
        quick_one, far = (constant(0.02, 0.001, 0.002, workers=2, prefetch=8, transit_s=t) for t in (0.0, 0.05))
        assert far == pytest.approx(quick_one, rel=0.01)
        # THEN only a loader that hands out too few orders is slowed down
        few = constant(0.02, 0.001, 0.002, workers=2, prefetch=1, transit_s=0.05)
        assert few == pytest.approx(2 / (0.02 + 0.05 + 0.001), rel=0.05)

    def test_columns_do_not_disturb_each_other(self):
        # GIVEN columns with and without workers in one call
        service = np.random.default_rng(0).exponential(0.02, (80, 4))
        rest = {"receive_s": np.full((80, 4), 0.001), "step_s": np.full((80, 4), 0.01)}
        workers, prefetch = [0, 3, 2, 5], [1, 2, 4, 3]
        together = simulate(service, workers=workers, prefetch=prefetch, **rest)
        # THEN each is as if simulated alone
        for i in range(4):
            alone = simulate(
                service[:, i], 0.001 * np.ones(80), 0.01 * np.ones(80), workers=workers[i], prefetch=prefetch[i]
            )
            np.testing.assert_array_equal(together[:, i], alone[:, 0])


class TestObservation:
    def measured(self, traces):
        return Measurement(
            samples_per_s=Interval(value=80.0, low=79.0, high=81.0, count=10), samples=80, window_s=1.0, batch_size=8.0,
            first_batch_s=1.5, wait_share=0.0, service_s=0.04, service_cpu_s=0.03, receive_s=0.002, step_s=0.01,
            traces=tuple(traces),
        )  # fmt: skip

    def trace(self, i, *, service, worker=0, tail=0.0):
        """Delivered so late that the next order is never there when the worker is free."""
        start = i * 0.1
        end = start + service + tail
        return BatchTrace(
            worker=worker, fetch_start=start, fetch_end=end, collate_end=end, cpu_s=service, requested=end + 1.001,
            received=end + 1.002, step_end=end + 1.01, samples=8,
        )  # fmt: skip

    def delivered_at_once(self, i, *, period, service):
        start = i * period
        end = start + service
        return BatchTrace(
            worker=0, fetch_start=start, fetch_end=end, collate_end=end, cpu_s=service, requested=start + 0.01,
            received=end + 0.002, step_end=end + 0.005, samples=8,
        )  # fmt: skip

    def test_the_first_batch_of_each_worker_is_left_out(self):
        # GIVEN two workers, each of which is slow at first
        traces = [self.trace(i, worker=i % 2, service=0.5 if i < 2 else 0.04) for i in range(8)]
        seen = Observation.from_measurement(LoaderConfig(num_workers=2), self.measured(traces))
        assert seen.service_s == pytest.approx(np.full(6, 0.04))

    def test_what_happens_while_the_queues_fill_is_left_out(self):
        # GIVEN four workers that take the step's cores only until the queues are full
        machine = SimulatedMachine(cpu_s=0.05, step_s=0.06, step_cores=4, service_cv=0.0, step_cv=0.0)
        config = LoaderConfig(num_workers=4, prefetch_factor=4)
        measured = SimulatedProbe(machine, StubClock()).burst(config, BurstPlan(max_s=2.0, min_s=2.0))
        # WHEN
        seen = Observation.from_measurement(config, measured)
        # THEN the step is as it is later on, not as it is on average
        steps = [trace.step_s for trace in measured.traces]
        later = np.mean(steps[len(steps) // 2 :])
        assert seen.step_s.mean() == pytest.approx(later, rel=0.02)
        assert np.mean(steps) > 1.05 * later

    def test_a_worker_that_has_its_order_shows_what_it_does_between_batches(self):
        # GIVEN one worker that begins 3 ms after it ended, its next orders long there
        traces = [self.delivered_at_once(i, period=0.043, service=0.04) for i in range(20)]
        seen = Observation.from_measurement(LoaderConfig(num_workers=1, prefetch_factor=4), self.measured(traces))
        # THEN a batch occupies the worker for the whole period
        assert seen.between_s == pytest.approx(0.003)
        assert answer(Twin.fit([seen], cores=4), 1, 4).samples_per_s.value == pytest.approx(8 / 0.043, rel=0.01)

    def test_travelling_is_told_from_receiving(self):
        # GIVEN a loop that waits for each batch, which arrives 2 ms after it was whole
        traces = [self.delivered_at_once(i, period=0.043, service=0.04) for i in range(20)]
        seen = Observation.from_measurement(LoaderConfig(num_workers=1, prefetch_factor=4), self.measured(traces))
        assert not seen.saw_ready
        assert seen.waited_s == pytest.approx(0.002)

    def test_a_heavy_tail_stays(self):
        traces = [self.trace(i, service=0.03, tail=0.06 if i == 7 else 0.0) for i in range(12)]
        seen = Observation.from_measurement(LoaderConfig(num_workers=1), self.measured(traces))
        assert seen.service_s.max() == pytest.approx(0.09)

    def test_means_stand_in_for_missing_traces(self):
        seen = Observation.from_measurement(LoaderConfig(num_workers=1), self.measured([]))
        assert (seen.service_s.mean(), seen.cpu_s.mean(), seen.step_s.mean()) == (0.04, 0.03, 0.01)

    def test_samples_have_to_make_sense(self):
        with pytest.raises(ValueError, match="service_s needs one finite sample"):
            observation(1, service=float("nan"))


class TestTwin:
    def test_it_comes_close_to_its_bursts(self):
        twin = Twin.fit([observation(0), observation(1), observation(4, service=0.05, cpu=0.05)], cores=4)
        rates = [answer(twin, n, 2).samples_per_s.value for n in (0, 1, 4)]
        assert rates == pytest.approx([8 / 0.051, 8 / 0.04, 8 * 4 / 0.05], rel=0.04)

    def test_luck_with_heavy_batches_is_evened_out(self):
        # GIVEN one batch in five that takes 16 times as long
        service = np.array([0.01, 0.01, 0.01, 0.01, 0.16] * 8)
        twin = Twin.fit(
            [replace(observation(1, step=0.001, receive=0.0001), service_s=service, cpu_s=service / 100, at_work=1.0)],
            cores=16,
        )
        rates = twin.rates([LoaderConfig(num_workers=n, prefetch_factor=8) for n in range(1, 7)])
        # THEN each further worker helps about as much as the one before
        gains = np.diff(rates) / rates[0]
        assert gains.min() > 0.5
        assert gains.mean() == pytest.approx(0.73, abs=0.05)

    @quick
    @given(
        service=seconds,
        share=st.floats(0, 1),
        step=seconds,
        workers=few_workers,
        prefetch=few_batches,
        slower=st.floats(1.05, 3),
    )
    def test_a_slower_service_is_never_faster(self, service, share, step, workers, prefetch, slower):
        def rate(wall):
            seen = [observation(n, service=wall, cpu=wall * share, step=step) for n in (0, 1, 4)]
            return answer(Twin.fit(seen, cores=8), workers, prefetch).samples_per_s.value

        assert rate(service * slower) <= rate(service) * 1.001

    @quick
    @given(cv=st.floats(0, 1), share=st.floats(0, 1), step=seconds, workers=few_workers, prefetch=few_batches)
    def test_nothing_exceeds_the_ceiling(self, cv, share, step, workers, prefetch):
        seen = [observation(n, cpu=0.04 * share, step=step, cv=cv) for n in (0, 1, 4)]
        twin = Twin.fit(seen, cores=4)
        assert answer(twin, workers, prefetch).samples_per_s.value <= twin.ceiling() * (1 + 1e-9)

    @quick
    @given(workers=few_workers, prefetch=few_batches, epoch=st.integers(1, 2000), startup=st.floats(0, 5))
    def test_an_epoch_is_never_faster_than_the_sustained_rate(self, workers, prefetch, epoch, startup):
        twin = Twin.fit([observation(0), observation(1, cv=0.3), observation(4, cv=0.3)], cores=4)
        predicted = answer(twin, workers, prefetch, epoch_batches=epoch, startup_s=startup)
        assert predicted.epoch_samples_per_s <= predicted.samples_per_s.value * (1 + 1e-9)

    def test_persistent_workers_start_once(self):
        twin = Twin.fit([observation(1), observation(4)], cores=4)
        again, once = (answer(twin, 2, 2, epoch_batches=20, persistent_workers=p) for p in (False, True))
        assert again.startup_s == pytest.approx(0.2)
        assert 20 * 8 / again.epoch_samples_per_s - 20 * 8 / once.epoch_samples_per_s == pytest.approx(0.2)

    def test_one_burst_is_less_sure_than_two(self):
        one = answer(Twin.fit([observation(1, step=0.0001)], cores=8), 8, 2).samples_per_s
        two = answer(Twin.fit([observation(1, step=0.0001), observation(8, step=0.0001)], cores=8), 8, 2).samples_per_s
        assert one.high / one.low > two.high / two.low

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
        twin, _ = twin_of_a_machine(machine)
        assert answer(twin, workers, 4, **options).binding == binding

    def test_storage_that_saturates_is_named(self):
        # GIVEN waiting that triples with four workers
        seen = [observation(1, service=0.04, cpu=0.001), observation(4, service=0.12, cpu=0.001)]
        assert answer(Twin.fit(seen, cores=8), 4, 2).binding == "storage"

    def test_fewer_step_threads_change_the_step(self):
        twin = Twin.fit([observation(1, step=0.05)], cores=4, consumer_cores=4, step_s_by_threads={None: 0.05, 1: 0.02})
        assert answer(twin, 4, 2, consumer_threads=1).samples_per_s.value > 2 * answer(twin, 4, 2).samples_per_s.value

    def test_it_needs_an_observation_and_a_core(self):
        with pytest.raises(ValueError, match="at least one observation"):
            Twin.fit([], cores=4)
        with pytest.raises(ValueError, match="cores=0 is not positive"):
            Twin.fit([observation(1)], cores=0)


MACHINES = {
    "cpu": SimulatedMachine(),
    "contended": SimulatedMachine(alpha=0.12, step_s=0.004),
    "wait": SimulatedMachine(cpu_s=0.005, wait_s=0.06),
    "mixed": SimulatedMachine(cpu_s=0.02, wait_s=0.03, service_cv=0.3),
    "step on the cpu": SimulatedMachine(cpu_s=0.05, step_s=0.02, step_cores=4),
    "step-bound": SimulatedMachine(step_s=0.05, step_cores=2),
    "in memory": SimulatedMachine(cpu_s=0.001, step_s=0.0002, receive_s=0.0003, first_batch_extra_s=0.001),
}


@pytest.mark.acceptance
class TestFidelity:
    @pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
    def test_three_bursts_predict_every_configuration_up_to_the_cores(self, machine):
        twin, probe = twin_of_a_machine(machine)
        configs = grid(range(machine.cores + 1))
        errors = [p.samples_per_s.value / probe.truth(p.config, batches=800) - 1 for p in twin.predict_all(configs)]
        assert np.median(np.abs(errors)) < 0.05

    def test_the_goals_hold_over_machines_without_heavy_tails(self):
        errors = []
        for machine, plan_seed in itertools.product(MACHINES.values(), (1, 2)):
            twin, probe = twin_of_a_machine(machine, plan_seed=plan_seed)
            predicted = twin.predict_all(grid(range(machine.cores + 1)))
            errors += [p.samples_per_s.value / probe.truth(p.config, batches=800) - 1 for p in predicted]
        assert np.median(np.abs(errors)) < 0.03
        assert np.quantile(np.abs(errors), 0.95) < 0.08

    def test_a_whole_space_is_predicted_at_the_price_of_a_few(self):
        twin, _ = twin_of_a_machine(SimulatedMachine(cores=16))
        configs = [LoaderConfig(num_workers=n, prefetch_factor=p) for n in range(1, 17) for p in (1, 2, 4, 8)]

        def least_s(some: list[LoaderConfig]) -> float:
            seconds = []
            for _ in range(5):
                begun = time.thread_time()
                twin.predict_all(some)
                seconds.append(time.thread_time() - begun)
            return min(seconds)

        assert least_s(configs) < 16 * least_s(configs[:1])


def test_workers_that_have_not_delivered_yet_are_seen_at_work():
    # GIVEN eight workers whose deep queues are far from full when the burst ends
    machine = SimulatedMachine(cores=16, cpu_s=0.1, service_cv=0.3, step_s=0.001)
    config = LoaderConfig(num_workers=8, prefetch_factor=8)
    # WHEN it is observed
    burst = SimulatedProbe(machine, StubClock()).burst(config, BurstPlan(max_s=0.6, min_s=0.3))
    # THEN all of them were at work, whatever the loop had received by then
    assert Observation.from_measurement(config, burst).workers_at_work > 7.5


def test_slight_contention_shows_on_many_cores():
    # GIVEN processes that hardly slow one another down, but 64 of them do
    machine = SimulatedMachine(cores=64, cpu_s=0.1, step_s=0.001, alpha=0.02, beta=0.0005, service_cv=0.05)
    clock = StubClock()
    probe, plan = SimulatedProbe(machine, clock), BurstPlan(max_s=3.0, min_s=3.0)
    seen = [LoaderConfig(num_workers=workers, prefetch_factor=2) for workers in (1, 16, 64)]
    # WHEN the twin is fitted to three bursts
    twin = Twin.fit([Observation.from_measurement(config, probe.burst(config, plan)) for config in seen], cores=64)
    # THEN it knows where more workers begin to cost more than they bring
    unseen = [LoaderConfig(num_workers=workers, prefetch_factor=2) for workers in (8, 32, 48)]
    rates = [prediction.samples_per_s.value for prediction in twin.predict_all(unseen)]
    assert rates == pytest.approx([probe.truth(config) for config in unseen], rel=0.06)


@pytest.mark.parametrize(
    ("slowdowns", "expected"),
    [
        # threads of the step, of 4: all, 2 and 1
        ({None: 2.5, 2: 1.6, 1: 1.0}, 1.0),
        ({None: 2.5, 2: 1.0, 1: 1.6}, 1.6),
    ],
    ids=["one thread is hardly slowed", "one thread is slowed most"],
)
def test_a_step_on_the_cores_is_slowed_by_workers_in_its_own_way_for_each_number_of_threads(slowdowns, expected):
    # GIVEN bursts in which workers slow the step by what no law of free cores says: with two threads or one, cores are free
    alone = {None: 0.012, 2: 0.016, 1: 0.02}
    seen = [
        replace(
            observation(workers, service=0.01, cpu=0.01, step=alone[threads] * slowdowns[threads]),
            consumer_threads=threads,
            at_work=0.7,
        )
        for workers, threads in ((1, None), (4, None), (2, 2), (3, 1))
    ]
    twin = Twin.fit(
        [observation(0, service=0.01, cpu=0.01, step=alone[None]), *seen],
        cores=4,
        consumer_cores=4.0,
        step_s_by_threads=alone,
    )
    # THEN with other workers beside it a step of one thread is expected to take about as long as it did
    rate = answer(twin, 2, 2, consumer_threads=1).samples_per_s.value
    assert rate == pytest.approx(8 / (alone[1] * expected + 0.001), rel=0.08)


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


@pytest.mark.parametrize(
    ("workers", "binding", "words"),
    [
        (0, "workers", "limited by fetching without a worker"),
        (2, "workers", "limited by the number of workers"),
        (2, "consumer", "limited by the training step"),
        (2, "cpu", "limited by the cores"),
    ],
)
def test_a_prediction_says_in_plain_words_what_limits_it(workers: int, binding: Any, words: str) -> None:
    answer = Prediction(
        config=LoaderConfig(num_workers=workers),
        samples_per_s=Interval(value=10.0, low=9.0, high=11.0, count=3),
        epoch_samples_per_s=10.0,
        binding=binding,
        busy_workers=1.0,
        headroom=1.0,
        consumer_use=0.5,
        service_s=0.1,
        startup_s=0.0,
    )
    assert str(answer).endswith(words)
