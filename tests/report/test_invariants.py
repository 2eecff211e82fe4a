"""No result contradicts itself: simulated searches on quiet and busy machines. What was not measured (None) is not asked."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

import pytest

from autotune_loader.diagnosis.ranking import ranking
from autotune_loader.diagnosis.units import share_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval
from tests.support import SimulatedMachine, simulated_result

ROUNDING = 1e-6
"""Relative or absolute; sums of the same figures in another order differ by less."""
CLOCKS = 0.05
"""Two clocks of the same thing may differ by so much, relatively, beyond their intervals."""
LITTLE = 0.05
"""Less than this share of the time, or of the rate, is nothing to gain."""
PASSED = 1.15
"""A rate may lie so far above the step alone, each timed in bursts."""
FEWEST_ROUNDS = 3
"""Fewer rounds decide nothing."""
SELDOM = ("unclear", "start_up", "in_memory", "memory", "nothing")
"""Bottlenecks that say nothing of waiting."""


def contradictions(result: TuningResult) -> list[str]:
    """Every way in which the result contradicts itself, a sentence each; empty where it does not."""
    return [f"{check.__name__.strip('_').replace('_', ' ')}: {text}" for check in CHECKS for text in check(result)]


def _the_ceiling_is_one(result: TuningResult) -> Iterator[str]:
    if result.ceiling is not None and result.rate is not None and result.rate.value > PASSED * result.ceiling.value:
        yield f"the rate is {result.rate.value:.0f}, and the step alone has {result.ceiling.value:.0f}"


def _the_headroom_is_that_of_rate_and_ceiling(result: TuningResult) -> Iterator[str]:
    if result.rate is None or result.ceiling is None or result.bottleneck is None:
        return
    expected = max(0.0, result.ceiling.value / result.rate.value - 1)
    if not _same(expected, result.bottleneck.gain):
        yield f"headroom {result.bottleneck.gain}, rate and ceiling make it {expected}"


def _what_limits_has_something_to_gain(result: TuningResult) -> Iterator[str]:
    found, wait = result.bottleneck, result.wait_share
    gains = [each for each in (wait, None if found is None else found.gain) if each is not None]
    if found is None or not gains or found.kind in SELDOM:
        return
    if found.kind == "step":
        contradicts = max(gains) > 2 * LITTLE and (wait is None or wait > LITTLE)
    else:
        contradicts = (wait if found.kind == "storage" and wait is not None else max(gains)) < LITTLE
    if contradicts:
        yield f"{found.kind} limits, and the loop waits {share_text(wait)} with a headroom of {share_text(found.gain)}"


def _nothing_cheaper_is_as_fast_as_the_choice(result: TuningResult) -> Iterator[str]:
    for row in ranking(result):
        if row.is_as_fast and _is_cheaper(row.config, result.best):
            yield f"{row.config} is marked as fast as {result.best}, and costs less"
        ratios = _ratios(result, row.config, result.best)
        if result.status == "undecided" or len(ratios) < FEWEST_ROUNDS or not _is_cheaper(row.config, result.best):
            continue
        if (ratio := geometric_mean(ratios)) > 1 + result.tolerance:
            yield f"{row.config} costs less than {result.best}, and was {ratio:.3f}x as fast in {len(ratios)} rounds"


def _each_figure_is_that_of_the_table(result: TuningResult) -> Iterator[str]:
    best = next((row for row in ranking(result) if row.is_best), None)
    own = None if best is None else best.measurement
    if result.rate is not None and own is None:
        yield f"{result.best} has a rate, and neither waiting nor memory"
    table = {} if own is None else {"wait_share": own.wait_share, "memory_bytes": own.taken_bytes}
    for name, shown in table.items():
        figure = getattr(result, name)
        if figure is not None and not _same(figure, shown):
            yield f"{name} is {figure:g}, in the table {shown}"


def _the_speed_up_is_that_of_the_rates(result: TuningResult) -> Iterator[str]:
    ratio, rate, before = result.speedup, result.rate, result.baseline_rate
    if ratio is None:
        return
    if not ratio.low <= ratio.value <= ratio.high:
        yield f"{ratio.value:.2f}x lies outside of {ratio.low:.2f}x to {ratio.high:.2f}x"
    if result.best == result.baseline:
        yield f"{ratio.value:.2f}x over itself"
    if rate is None or before is None or not (rate.is_telling and before.is_telling):
        return
    low, high = rate.low / max(before.high, 1e-9), rate.high / max(before.low, 1e-9)
    if ratio.low > high * (1 + CLOCKS) or ratio.high < low * (1 - CLOCKS):
        yield f"{ratio.value:.2f}x, the rates make it {rate.value / before.value:.2f}x"


def _a_status_has_its_reason(result: TuningResult) -> Iterator[str]:
    if (result.status == "undecided") != (result.undecided is not None):
        yield f"status {result.status}, and undecided is {result.undecided}"


CHECKS = (
    *(_the_ceiling_is_one, _the_headroom_is_that_of_rate_and_ceiling, _what_limits_has_something_to_gain),
    *(_nothing_cheaper_is_as_fast_as_the_choice, _each_figure_is_that_of_the_table),
    *(_the_speed_up_is_that_of_the_rates, _a_status_has_its_reason),
)


def _ratios(result: TuningResult, a: LoaderConfig, b: LoaderConfig) -> list[float]:
    """Rate of a over rate of b in every round in which both worked."""
    first, second = result.rates_of(a), result.rates_of(b)
    return [first[number] / second[number] for number in first.keys() & second.keys()]


def _is_cheaper(config: LoaderConfig, other: LoaderConfig) -> bool:
    """Whether it has fewer workers; of equally many the deeper queue is the safer."""
    return config.batch_size == other.batch_size and config.num_workers < other.num_workers


def _same(one: Interval | float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(float(one), other, rel_tol=ROUNDING, abs_tol=ROUNDING)  # type: ignore[arg-type]


JOBS: dict[str, dict[str, Any]] = {  # seconds of one batch
    "decodes": {"cpu_s": 0.04, "step_s": 0.005, "receive_s": 1e-4},
    "decodes beside a step on the CPU": {"cpu_s": 0.03, "step_s": 0.02, "step_cores": 1.0, "receive_s": 2e-4},
    "sleeps": {"cpu_s": 2e-4, "wait_s": 0.1, "step_s": 0.003, "receive_s": 5e-5},
    "reads": {"cpu_s": 0.006, "wait_s": 0.1, "step_s": 0.003, "receive_s": 1e-4},
    "moves": {"cpu_s": 0.012, "step_s": 0.001, "receive_s": 0.006, "batch_bytes": 64 << 20},
    "steps": {"cpu_s": 0.02, "step_s": 0.03, "receive_s": 2e-4},
    "steps on the CPU": {"cpu_s": 0.004, "step_s": 0.03, "step_cores": 2.0, "receive_s": 2e-4},
    "is in memory": {"cpu_s": 3e-4, "step_s": 2e-4, "receive_s": 5e-4, "batch_bytes": 16 << 10},
    "has slow batches": {"cpu_s": 0.03, "step_s": 0.012, "tail_share": 0.04, "tail_factor": 8.0},
}


def searched(number: int) -> TuningResult:
    """A search on one of many machines: jobs, sizes, neighbours, budgets and epochs differ."""
    rng = random.Random(number)
    job, neighbours = list(itertools.product(JOBS.values(), (0.0, 0.5, 1.0)))[number % (3 * len(JOBS))]
    cores, scale = rng.choice([2, 4, 8]), rng.choice([0.3, 1.0, 4.0])
    scaled = {name: value * scale if name.endswith("_s") else value for name, value in job.items()}
    machine = SimulatedMachine(
        cores=cores, noise_sd=0.03, service_cv=0.2, neighbours=neighbours * cores,
        neighbours_share=rng.choice([0.3, 1.0]), **scaled,
    )  # fmt: skip
    epoch = rng.choice([10_000, 10_000, 60])
    return simulated_result(machine, seed=number, budget_s=rng.choice([15.0, 60.0]), epoch_batches=epoch)


QUICK = {3 * job + 2 * (job % 2) for job in range(len(JOBS))}  # each job once, on a quiet machine or a busy one
NUMBERS = [pytest.param(number, marks=[] if number in QUICK else [pytest.mark.acceptance]) for number in range(300)]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_search_contradicts_itself(number: int) -> None:
    assert contradictions(searched(number)) == []


def test_the_example_of_the_other_tests_does_not_contradict_itself(result: TuningResult) -> None:
    assert contradictions(result) == []
    assert contradictions(replace(result, status="undecided")) == [
        "a status has its reason: status undecided, and undecided is None"
    ]
