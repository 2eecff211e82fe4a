"""What is kept of the batches of a long training."""

import json
import random
from collections import Counter

import pytest

from autotune_loader.report.perfetto import write_trace
from autotune_loader.values import BatchTrace, LoaderTrace, Sampled
from autotune_loader.values.sampled import LAST, RUN


def batch(number, wait_s=2e-4, service_s=0.035, step_s=0.0095, workers=4):
    """A batch of a training of 100 batches/s; each of the four workers takes 35 ms for one."""
    requested = 1000 + number / 100
    whole, received = requested - 0.05, requested + wait_s
    fetch = number % workers, whole - service_s, whole - 0.002, whole, 0.03, 32
    pinned = whole + 0.0005, whole + 0.001
    return BatchTrace(*fetch, requested, received, received + step_s, *pinned)


def sampled(count, most=40_000, rare=(), vary=0.1, **rare_times):
    """After so many batches, of which these numbers take longer."""
    rng, kept = random.Random(0), Sampled(most)
    for number in range(1, count + 1):
        times = {"service_s": 0.035 * rng.uniform(1 - vary, 1 + vary)}
        kept.add(batch(number, **(rare_times if number in rare else times)))
    return kept


def test_a_short_training_is_kept_whole():
    kept = sampled(999, most=1000)
    assert list(kept.rows) == list(range(1, 1000))
    assert kept.rows[500].requested == batch(500).requested
    # AND one batch more thins it
    kept.add(batch(1000))
    assert kept.count == 1000
    assert len(kept.rows) < 600


RARE = set(range(1500, 360_000, 997))
HOUR = 360_000


@pytest.fixture(scope="module")
def hour():
    """An hour at 100 batches/s, in which each 997th batch takes ten times as long."""
    return sampled(HOUR, rare=RARE, service_s=0.35)


def test_an_hour_keeps_every_rare_batch(hour):
    assert RARE - hour.rows.keys() == set()
    assert set(range(1, LAST + 1)) - hour.rows.keys() == set()
    assert hour.count == HOUR
    assert 15_000 < len(hour.rows) < 40_000
    assert list(hour.rows) == sorted(hour.rows)


def test_common_batches_are_kept_in_runs(hour):
    common = hour.rows.keys() - RARE - set(range(1, LAST + 1))
    runs = Counter(number // RUN for number in common)
    assert {run % 16 for run in runs} == {0}
    whole = [
        count
        for run, count in runs.items()
        if not RARE.intersection(range(run * RUN, (run + 1) * RUN))
    ]
    assert {*whole[:-1]} == {RUN}


def test_an_hours_file_has_at_most_50_mb(hour, tmp_path):
    write_trace(path := tmp_path / "trace.json", [LoaderTrace("train.py:12", hour.rows)])
    size = path.stat().st_size
    assert size <= 50e6
    assert size / len(hour.rows) * 40_000 <= 50e6  # just before it is thinned
    events = json.loads(path.read_bytes())["traceEvents"]
    fetched = {each["args"]["batch"] for each in events if each["name"] == "fetch"}
    assert RARE - fetched == set()


@pytest.mark.parametrize(
    ("times", "is_kept"),
    [
        ({"service_s": 0.15}, True),
        ({"service_s": 0.06}, False),
        ({"step_s": 0.04}, True),
        ({"step_s": 0.02}, False),
        ({"wait_s": 0.005}, True),
        ({"wait_s": 0.002}, False),  # ten times the usual, and next to nothing of a step
    ],
)
def test_what_takes_several_times_the_usual_is_rare(times, is_kept):
    rare = {number for number in range(2000, 9000, 100) if number // RUN % 16}
    kept = sampled(9000, most=1000, rare=rare, **times)
    assert (rare <= kept.rows.keys()) == is_kept
    assert len(rare & kept.rows.keys()) == len(rare) * is_kept


def test_waits_that_come_in_waves_are_usual():
    """Four workers deliver together: each fourth wait is long."""
    kept = Sampled(1000)
    for number in range(1, 9001):
        service_s = 0.035 if number % 2000 else 0.14
        wait_s = 2e-4 if number % 4 else 0.03
        kept.add(batch(number, wait_s, service_s, step_s=0.001))
    rare = {2000, 4000, 6000, 8000}
    assert rare - kept.rows.keys() == set()
    assert Counter(number % 4 for number in kept.rows).keys() == {0, 1, 2, 3}
    assert {number // RUN % 16 for number in kept.rows if number > LAST} - {
        number // RUN % 16 for number in rare
    } == {0}


def test_what_is_usual_changes_with_the_training():
    kept = Sampled(1000)
    for number in range(1, 20_001):
        kept.add(batch(number, service_s=0.035 if number < 3000 else 0.35))
    late = [number for number in kept.rows if number > 3000 + LAST]
    assert {number // RUN % 32 for number in late} == {0}


def test_where_many_are_rare_the_rarest_stay():
    # GIVEN one of twelve takes 10 times as long, and one of 144 even 100 times
    kept = Sampled(1000)
    for number in range(1, 30_001):
        times = 1 if number % 12 else 10 if number % 144 else 100
        kept.add(batch(number, service_s=0.035 * times))
        assert len(kept.rows) <= 1000
    assert set(range(144, 30_001, 144)) - kept.rows.keys() == set()
    assert sum(number % 12 > 0 for number in kept.rows) > 200
    assert list(kept.rows) == sorted(kept.rows)
