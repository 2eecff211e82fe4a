"""How often comparisons lie that are looked at while they run, by simulation with fixed seeds."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from autotune_loader.values.statistics import MAX_ROUNDS
from studies.fidelity.sequential import LOOKS, sequential_interval, sequential_verdict

BURST_NOISE = 0.03
TRUE_DIFFERENCE = math.log(1.02)


def paired_noise(rng: random.Random, difference: float, noise: float = BURST_NOISE) -> list[float]:
    return [rng.gauss(difference, noise * math.sqrt(2)) for _ in range(MAX_ROUNDS)]


def ask_at_every_look(logs: list[float], margin: float = 0.02) -> tuple[str, int]:
    for count in (*LOOKS, MAX_ROUNDS):
        verdict = sequential_verdict(logs[:count], margin)
        if verdict != "undecided":
            break
    return verdict, count


def test_equal_configurations_are_almost_never_called_faster() -> None:
    # GIVEN 2,000 A/A comparisons looked at again and again
    rng = random.Random(7)
    verdicts = [ask_at_every_look(paired_noise(rng, 0.0))[0] for _ in range(2000)]
    # THEN false wins stay within 1 %, and most are called what they are
    assert fmean(verdict == "faster" for verdict in verdicts) <= 0.01
    assert fmean(verdict == "tie" for verdict in verdicts) >= 0.7


def test_two_per_cent_are_found_within_the_bounded_number_of_rounds() -> None:
    # GIVEN a true difference of 2 % at 3 % noise per burst
    rng = random.Random(8)
    verdicts = [ask_at_every_look(paired_noise(rng, TRUE_DIFFERENCE))[0] for _ in range(2000)]
    # THEN nine in ten comparisons find it in at most MAX_ROUNDS rounds
    assert fmean(verdict == "faster" for verdict in verdicts) >= 0.89  # 0.90 less two standard errors of 2,000 runs


@pytest.mark.parametrize(("difference", "median_rounds"), [(math.log(1.05), 21), (math.log(1.10), 9), (math.log(2), 4)])
def test_large_differences_need_few_rounds(difference: float, median_rounds: int) -> None:
    rng = random.Random(9)
    counts = sorted(ask_at_every_look(paired_noise(rng, difference))[1] for _ in range(201))
    assert counts[100] <= median_rounds


@pytest.mark.parametrize("difference", [0.0, TRUE_DIFFERENCE, 0.2])
def test_intervals_cover_although_one_stops_when_it_suits(difference: float) -> None:
    # GIVEN comparisons that stop as soon as the interval excludes 1
    rng, hits = random.Random(10), []
    for _ in range(1500):
        logs = paired_noise(rng, difference)
        for count in range(1, MAX_ROUNDS + 1):
            interval = sequential_interval(logs[:count])
            if interval.low > 1 or interval.high < 1:
                break
        hits.append(interval.low <= math.exp(difference) <= interval.high)
    # THEN the reported 95 % intervals hold the truth at least that often
    assert fmean(hits) >= 0.94


@pytest.mark.parametrize("spent_after", [2, 5, 11, 30])
def test_intervals_cover_when_the_budget_ends_the_comparison(spent_after: int) -> None:
    # GIVEN comparisons that stop by themselves or when the budget is spent
    rng, hits = random.Random(11), []
    for _ in range(1500):
        logs = paired_noise(rng, 0.0)
        for count in range(1, spent_after + 1):
            interval = sequential_interval(logs[:count], final=count == spent_after)
            if interval.low > 1 or interval.high < 1:
                break
        hits.append(interval.low <= 1 <= interval.high)
    assert fmean(hits) >= 0.94


def test_before_the_first_look_anything_is_possible() -> None:
    interval = sequential_interval([0.1, 0.1])
    assert (interval.low, interval.high, interval.count) == (0.0, math.inf, 2)
    assert interval.value == pytest.approx(math.exp(0.1))


def test_rounds_after_a_look_wait_for_the_next() -> None:
    logs = [0.01, 0.02, 0.03, 0.02, 5.0]
    assert sequential_interval(logs) == sequential_interval(logs[: LOOKS[0]])
    assert sequential_interval(logs, final=True).count == 5


def test_rounds_beyond_the_last_look_are_ignored() -> None:
    logs = paired_noise(random.Random(1), 0.0)
    assert sequential_interval([*logs, 5.0]) == sequential_interval(logs)


def test_a_verdict_the_other_way_round_is_the_opposite() -> None:
    logs = [0.1, 0.11, 0.09, 0.1]
    assert sequential_verdict(logs, 0.02) == "faster"
    assert sequential_verdict([-each for each in logs], 0.02) == "slower"
    assert sequential_verdict([0.001, -0.001, 0.0005, -0.0005], 0.02) == "tie"
    assert sequential_verdict(logs[:3], 0.02) == "undecided"
