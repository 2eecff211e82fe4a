"""The trace meter against simulated bursts whose long-run rate is known."""

import functools
import itertools
from statistics import fmean

import pytest

from autotune_loader.pipeline.throughput import (
    is_enough,
    once_locked,
    queued_share,
    relative_error,
    summarise,
)
from autotune_loader.values import BatchTrace, BurstPlan, LoaderConfig
from tests.support.simulation import Disturbed, Run, SimulatedMachine

SAMPLES = 8


class WithSlow(Disturbed):
    """One of four workers is slow."""

    def fetch_seconds(self, number, *, is_first):
        cpu_s, wait_s = super().fetch_seconds(number, is_first=is_first)
        slower = 2.0 if number % 4 == 2 else 1.0
        return cpu_s * slower, wait_s * slower


def simulate(
    batches, *, workers, prefetch=2, service_s=0.02, step_s=0.005, receive_s=0.0005, variation=0.1,
    pause_s=0.0, slow=False, seed=0,
):  # fmt: skip
    """The traces of a loader on a machine where nobody waits for cores; half of a fetch computes."""
    machine = SimulatedMachine(
        batch_size=SAMPLES, cores=64, alpha=0.0, cpu_s=service_s / 2, wait_s=service_s / 2,
        service_cv=variation, step_s=step_s, receive_s=receive_s, worker_start_s=0.005,
        first_batch_extra_s=0.0,
    )  # fmt: skip
    config = LoaderConfig(num_workers=workers, prefetch_factor=prefetch if workers else None)
    disturbed = (WithSlow if slow else Disturbed)(machine, 1.0, 1.0)
    run = Run(disturbed, config, itertools.count(1_000_000 * seed), 0.0, pause_s)
    return list(itertools.islice(run.batches(), batches))


def summary_of(batches, *, workers, **loader):
    return summarise(simulate(batches, workers=workers, **loader), workers=workers, started=0.0)


def rates_of(batches, seeds, **loader):
    return [summary_of(batches, seed=seed, **loader).samples_per_s for seed in range(seeds)]


@functools.cache
def long_run_rate(**loader):
    ends = [trace.step_end for trace in simulate(4000, seed=99, **loader)]
    return SAMPLES * 3000 / (ends[3999] - ends[999])


# A slow worker is one that delivery in order waits for.
@pytest.mark.parametrize(
    ("workers", "prefetch", "slow"),
    [(1, 16, None), (2, 8, None), (4, 2, None), (4, 16, None), (4, 16, 2)],
)
def test_full_queues_do_not_flatter_the_rate(workers, prefetch, slow):
    # GIVEN a fast step and a pause of 1 s in which the workers fill their queues: those batches were made before the burst
    loader = {"workers": workers, "prefetch": prefetch, "slow": slow}
    loader |= {"service_s": 0.04, "step_s": 0.0003, "receive_s": 0.0001}
    for batches in (20, 40, 60):
        summary = summary_of(batches, pause_s=1.0, **loader)
        # THEN the rate is the one that lasts, and the loop is said to wait
        assert summary.samples_per_s.value == pytest.approx(long_run_rate(**loader), rel=0.10)
        assert summary.wait_share > 0.8


@pytest.mark.parametrize("batches", [24, pytest.param(60, marks=pytest.mark.acceptance)])
@pytest.mark.parametrize("pause_s", [0.0, 1.0])
def test_short_windows_read_the_sustained_rate_everywhere(batches, pause_s):
    # GIVEN loaders from four times too fast to four times too slow for the step, near balance included
    for workers in (0, 1, 2, 4, 8):
        for prefetch in (1, 2, 8) if workers else (1,):
            for ratio in (0.25, 0.8, 1.0, 1.05, 1.3, 4.0):
                times = {
                    "service_s": 0.01 * max(workers, 1) * ratio,
                    "step_s": 0.0095,
                    "variation": 0.05,
                }
                loader = {"workers": workers, "prefetch": prefetch, **times}
                rates = rates_of(batches, 10, pause_s=pause_s, **loader)
                # THEN the mean of ten short bursts is the rate in the long run
                assert fmean(rate.value for rate in rates) == pytest.approx(
                    long_run_rate(**loader), rel=0.03
                ), loader


# 32 workers with batches of a second that vary by 20%, and a step that hardly counts, for a few rounds
MANY = {"workers": 32, "service_s": 1.0, "step_s": 0.002, "variation": 0.2}


@pytest.mark.parametrize(
    ("loader", "batches", "coverage"),
    [
        ({"workers": 0, "service_s": 0.02, "variation": 0.3}, 120, 0.90),
        ({"workers": 8, "service_s": 0.12, "variation": 0.3, "prefetch": 4}, 120, 0.90),
        ({"workers": 4, "service_s": 0.01, "variation": 0.3, "step_s": 0.02}, 120, 0.90),
        *(
            (MANY | {"prefetch": prefetch}, 32 * rounds, 0.7)
            for prefetch in (2, 8)
            for rounds in (3, 5)
        ),
    ],
)
def test_bursts_err_by_a_few_percent_and_know_it(loader, batches, coverage):
    truth, rates = long_run_rate(**loader), rates_of(batches, 200, **loader)
    # THEN nominal 95% are at least 90% in fact, of a few rounds 70%
    assert fmean(rate.low <= truth <= rate.high for rate in rates) >= coverage
    assert fmean(abs(rate.value / truth - 1) for rate in rates) < 0.08
    assert max(rate.high / rate.low for rate in rates) < 1.5


def test_means_are_those_of_the_window_and_start_up_is_no_part_of_them():
    # GIVEN a worker, and one whose first batch takes 2 s longer than the others
    traces = simulate(41, workers=1, service_s=0.03, step_s=0.004, variation=0.0)
    moments = ("fetch_start", "fetch_end", "collate_end", "requested", "received", "step_end")
    late = [
        trace._replace(**{name: getattr(trace, name) + 2.0 for name in moments}) for trace in traces
    ]
    late[0] = late[0]._replace(fetch_start=traces[0].fetch_start, requested=traces[0].requested)
    summary, delayed = (summarise(each, workers=1, started=-0.5) for each in (traces, late))
    means = (
        summary.service_s,
        summary.service_cpu_s,
        summary.step_s,
        summary.receive_s,
        summary.batch_size,
    )
    assert means == pytest.approx((0.03, 0.015, 0.004, 0.0005, SAMPLES), rel=0.1)
    assert summary.samples == 40 * SAMPLES == summary.samples_per_s.count * SAMPLES
    assert summary.window_s == pytest.approx(traces[-1].step_end - traces[0].step_end)
    assert summary.wait_share == pytest.approx(1 - 0.004 / 0.0301, abs=0.01)
    # THEN only the time to the first batch differs
    assert delayed.samples_per_s.value == pytest.approx(summary.samples_per_s.value)
    assert summary.first_batch_s == pytest.approx(traces[0].received + 0.5)
    assert delayed.first_batch_s == pytest.approx(summary.first_batch_s + 2.0)
    # AND a loop that asks late makes it no longer
    at_once, paused = (summary_of(40, workers=2, pause_s=pause_s) for pause_s in (0.0, 1.0))
    assert paused.first_batch_s == pytest.approx(at_once.first_batch_s, abs=0.001)


@pytest.mark.parametrize("workers", [0, 1, 16])
def test_a_handful_of_batches_has_a_rate_with_an_honest_interval_and_one_has_none(workers):
    for batches in (2, 3, 9):
        rate = summary_of(batches, workers=workers).samples_per_s
        assert 0 < rate.low < rate.value < rate.high < float("inf")
    with pytest.raises(ValueError, match="at least 2"):
        summary_of(1, workers=workers)


def test_a_running_burst_knows_its_error_after_some_rounds_unless_stock_hides_the_rate():
    traces = simulate(400, workers=4, service_s=0.06)
    # GIVEN full queues that the workers cannot keep full, and such that they can
    emptied = simulate(60, workers=4, prefetch=16, service_s=0.04, step_s=0.0005, pause_s=1.0)
    full = simulate(60, workers=4, prefetch=4, service_s=0.01, step_s=0.02, pause_s=1.0)
    unknown = [*(traces[:count] for count in range(2, 17)), emptied]
    assert [relative_error(each, workers=4) for each in unknown] == [None] * 16
    few, many, of_full = (relative_error(each, workers=4) for each in (traces[:40], traces, full))
    assert many < few < 1
    assert of_full < 0.05


@pytest.mark.parametrize("step_s", [0.001, 0.3])
@pytest.mark.parametrize("workers", [2, 8, 24, 32])
def test_batches_that_take_seconds_are_not_waited_for_longer_than_they_tell(workers, step_s):
    # GIVEN workers whose first batches all come after 8 s, and their second ones after 16
    loader = {"workers": workers, "service_s": 8.0, "step_s": step_s, "variation": 0.02}
    enough = functools.partial(is_enough, plan=BurstPlan(max_s=3.0, min_s=3.0), workers=workers)
    traces = simulate(100, **loader)
    # AND the first is handed over slowly, while others start
    early = {
        name: getattr(traces[0], name) - 0.6 for name in ("fetch_start", "fetch_end", "collate_end")
    }
    traces[0] = traces[0]._replace(**early)
    count = next(
        n for n in range(2, 100) if enough(traces[:n], delivered=n, now=traces[n - 1].step_end)
    )
    rate, truth = (
        summarise(traces[:count], workers=workers, started=0.0).samples_per_s,
        long_run_rate(**loader),
    )
    # THEN the burst ends within one and a half of these and its window, and its rate is the one that lasts
    assert traces[count - 1].step_end < 1.5 * 8.0 + 3.0
    assert rate.value == pytest.approx(truth, rel=0.05)
    assert rate.low < truth < rate.high


@pytest.mark.parametrize("phase", [0, 7, 39])
@pytest.mark.parametrize(
    ("load_s", "batch_s"), [(0.15, 0.001), (0.5, 0.001), (0.8, 0.03), (1.2, 0.04)]
)
def test_a_window_holds_whole_runs_of_batches_that_come_with_one_load(load_s, batch_s, phase):
    # GIVEN a shard of 40 batches in memory, whose first waits for the load of it, and a burst that begins within one
    traces, now = [], 0.0
    for number in range(200):
        begun, now = (
            now,
            now + batch_s + (load_s if number in (0, 40 - phase, 80 - phase, 120 - phase) else 0.0),
        )
        traces.append(BatchTrace(-1, begun, now, now, 0.0, 8, begun, now, now))
    enough = functools.partial(is_enough, plan=BurstPlan(max_s=0.3, min_s=0.1), workers=0, run=40)
    count = next(
        n for n in range(2, 200) if enough(traces[:n], delivered=n, now=traces[n - 1].step_end)
    )
    # THEN its rate is that of an epoch, though no such burst is longer than 3 s
    found = summarise(traces[:count], workers=0, started=0.0)
    assert found.samples_per_s.value == pytest.approx(8 * 40 / (load_s + 40 * batch_s), rel=0.03)
    assert found.window_s < 3.1


def test_what_goes_into_queues_is_told_while_they_fill():
    # GIVEN workers that make twice what the loop takes, such whose queues are full, such that are waited for, and none
    filling = simulate(40, workers=4, prefetch=32, service_s=0.02, step_s=0.0095, variation=0.0)
    full = simulate(200, workers=4, service_s=0.02, step_s=0.0095)[100:]
    waited_for, none = simulate(40, workers=2, service_s=0.04), simulate(40, workers=0)
    for traces, workers, share in (
        (filling, 4, 0.5),
        (full, 4, 0),
        (waited_for, 2, 0),
        (none, 0, 0),
    ):
        assert queued_share(traces, workers=workers) == pytest.approx(share, abs=0.03)


USUAL_S, LOCKING_S = 0.008, 0.055


def pinned(pins_s, *, made_every_s, step_s, swapped=False):
    """Batches of two workers that a thread pins as they come, in so many seconds each, and the loop takes in order."""
    whole = [0.1 + made_every_s * number for number in range(len(pins_s))]
    if swapped:  # each second one is whole before the one that the loop takes first
        whole = [whole[number ^ 1] for number in range(len(whole))]
    stamps, free = {}, 0.0
    for number in sorted(range(len(whole)), key=lambda number: whole[number]):
        begun = max(whole[number], free) + 0.001
        free = begun + pins_s[number]
        stamps[number] = begun, free
    traces, requested = [], 0.0
    for number, (begun, end) in sorted(stamps.items()):
        received = max(requested, end) + 0.0005
        step_end = received + step_s
        start = whole[number] - 0.02
        traces.append(
            BatchTrace(
                number % 2,
                start,
                start,
                whole[number],
                0.02,
                SAMPLES,
                requested,
                received,
                step_end,
                begun,
                end,
            )
        )
        requested = step_end + 1e-4
    return traces


@pytest.mark.parametrize("locks", [(), (0,), (3, 4, 11), range(0, 20, 3)])
@pytest.mark.parametrize(
    "job",
    [
        {"made_every_s": 0.001, "step_s": 0.030},  # the loop binds
        {"made_every_s": 0.001, "step_s": 0.002},  # the thread binds
        {
            "made_every_s": 0.040,
            "step_s": 0.002,
        },  # the workers bind, and catch up what a locking costs
        {"made_every_s": 0.020, "step_s": 0.019, "swapped": True},
    ],
)
def test_first_lockings_of_pages_are_no_part_of_a_rate(job, locks):
    usual = pinned([USUAL_S] * 40, **job)
    traces = pinned([LOCKING_S if number in locks else USUAL_S for number in range(40)], **job)
    for found, known in zip(once_locked(traces), usual, strict=True):
        assert found == pytest.approx(known)
    measured, known = (summarise(each, workers=2, started=0.0) for each in (traces, usual))
    assert measured.samples_per_s.value == pytest.approx(known.samples_per_s.value)
    assert (measured.pin_s, measured.receive_s) == pytest.approx((USUAL_S, 0.0005))
    # AND a loop that waits for its workers or the thread takes no longer to receive a batch
    assert all(trace.receive_s == pytest.approx(0.0005) for trace in traces)


def test_batches_that_take_long_to_pin_again_and_again_are_large_and_stay_as_they_are():
    # GIVEN a loop that waits for the thread, and one batch in five that is as long as a locking, to the end
    pins_s = [LOCKING_S if number % 5 == 4 else USUAL_S for number in range(60)]
    traces = pinned(pins_s, made_every_s=0.001, step_s=0.002)
    assert once_locked(traces) is traces
    rate = summarise(traces, workers=2, started=0.0).samples_per_s.value
    assert rate == pytest.approx(SAMPLES / (sum(pins_s) / 60 + 0.001), rel=0.1)


def test_pages_that_are_locked_late_are_locked_while_more_batches_are_in_use_than_ever():
    # GIVEN a thread that gets ahead of a loop, and locks pages for each second batch that it is further ahead
    pins_s = [LOCKING_S if number in (13, 17, 22, 27, 33) else USUAL_S for number in range(40)]
    traces = pinned(pins_s, made_every_s=0.001, step_s=0.060)
    for found, known in zip(
        once_locked(traces), pinned([USUAL_S] * 40, made_every_s=0.001, step_s=0.060), strict=True
    ):
        assert found == pytest.approx(known)


def test_without_a_thread_that_pins_histories_are_as_they_were():
    traces = simulate(40, workers=2, variation=1.0)
    assert once_locked(traces) is traces
    assert (summarise(traces, workers=2, started=0.0).pin_s, traces[0].pin_s) == (None, 0.0)
