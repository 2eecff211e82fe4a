"""No result contradicts itself: simulated searches on quiet and busy machines. What was not measured (None) is not asked."""

import itertools
import math
import random
from dataclasses import replace
from statistics import geometric_mean

import pytest
from report.example import ran

from autotune_loader.report.ranking import ranking
from autotune_loader.report.result import Comparison, TuningResult
from autotune_loader.results.comparison import Side
from autotune_loader.values import LoaderConfig, Round
from tests.support import SimulatedMachine, simulated_result

CLOCKS = (
    0.05  # two clocks of the same thing may differ by so much, relatively, beyond their intervals
)
LITTLE = 0.05  # less than this share of the time, or of the rate, is nothing to gain
PASSED = 1.15  # a rate may lie so far above the step alone, each timed in bursts
FEWEST_ROUNDS = 3  # fewer decide nothing
SAY_NOTHING_OF_WAITING = ("unclear", "start_up", "in_memory", "memory", "nothing")


def contradictions(result):
    """Every way in which the result contradicts itself, a sentence each; empty where it does not."""
    rate, ceiling, bottleneck = result.rate, result.ceiling, result.bottleneck
    if (result.status == "undecided") != (result.undecided is not None):
        yield f"status {result.status}, and undecided is {result.undecided}"
    if rate is not None and ceiling is not None:
        if rate.value > PASSED * ceiling.value:
            yield f"the rate is {rate.value:.0f}, and the step alone has {ceiling.value:.0f}"
        if (
            transfer := result.transfer_ceiling
        ) is not None and rate.value > PASSED * transfer.value:
            yield f"the rate is {rate.value:.0f}, and workers hand over {transfer.value:.0f}"
        if bottleneck is not None and not _same(
            max(0.0, ceiling.value / rate.value - 1), bottleneck.gain
        ):
            yield f"headroom {bottleneck.gain}, the rate is {rate.value:.0f}, the ceiling {ceiling.value:.0f}"
    if bottleneck is not None and bottleneck.kind not in SAY_NOTHING_OF_WAITING:
        yield from _of_the_bottleneck(bottleneck, result.wait_share)
    yield from (
        f"{each} reaches below zero"
        for each in _intervals(result.to_dict())
        if (each["low"] or 0.0) < 0.0
    )
    yield from _of_the_choice(result)
    if result.speedup is not None:
        yield from _of_the_speed_up(result)


def _intervals(plain):
    parts = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ()
    yield from [plain] if isinstance(plain, dict) and "low" in plain else ()
    yield from (found for part in parts for found in _intervals(part))


def _of_the_bottleneck(found, wait):
    if not (gains := [each for each in (wait, found.gain) if each is not None]):
        return
    if found.kind == "step":
        contradicts = max(gains) > 2 * LITTLE and (wait is None or wait > LITTLE)
    else:
        contradicts = (
            wait if found.kind == "storage" and wait is not None else max(gains)
        ) < LITTLE
    if contradicts:
        yield f"{found.kind} limits, and the loop waits {wait} of its time with a headroom of {found.gain}"


def _of_the_choice(result):
    """Nothing with fewer workers is as fast (of equally many the deeper queue is the safer); its row has its figures."""
    best, best_rates = result.best, result.rates_of(result.best)
    for row in ranking(result):
        if row.is_best and row.measurement is not None:
            shown = (row.measurement.wait_share, row.measurement.taken_bytes)
            if not all(map(_same, (result.wait_share, result.memory_bytes), shown)):
                yield f"waiting and memory are {result.wait_share}, {result.memory_bytes}, in the table {shown}"
        if row.config.batch_size != best.batch_size or row.config.num_workers >= best.num_workers:
            continue
        rates = result.rates_of(row.config)
        ratios = [rates[number] / best_rates[number] for number in rates.keys() & best_rates.keys()]
        is_decided = result.status != "undecided" and len(ratios) >= FEWEST_ROUNDS
        if row.is_as_fast or (is_decided and geometric_mean(ratios) > 1 + result.tolerance):
            yield f"{row.config} costs less than {best}, and was as fast: {ratios}"


def _of_the_speed_up(result):
    ratio, rate, before = result.speedup, result.rate, result.baseline_rate
    if not ratio.low <= ratio.value <= ratio.high or result.best == result.baseline:
        yield f"{ratio} of {result.best} over {result.baseline}"
    if rate is not None and before is not None and rate.is_telling and before.is_telling:
        low, high = rate.low / max(before.high, 1e-9), rate.high / max(before.low, 1e-9)
        if ratio.low > high * (1 + CLOCKS) or ratio.high < low * (1 - CLOCKS):
            yield f"{ratio.value:.2f}x, the rates make it {rate.value / before.value:.2f}x"


def _same(figure, shown):
    """Sums of the same figures in another order differ by less."""
    return figure is None or (
        shown is not None and math.isclose(figure, shown, rel_tol=1e-6, abs_tol=1e-6)
    )


JOBS = {  # seconds of one batch
    "decodes": {"cpu_s": 0.04, "step_s": 0.005, "receive_s": 1e-4},
    "decodes beside a step on the CPU": {
        "cpu_s": 0.03,
        "step_s": 0.02,
        "step_cores": 1.0,
        "receive_s": 2e-4,
    },
    "sleeps": {"cpu_s": 2e-4, "wait_s": 0.1, "step_s": 0.003, "receive_s": 5e-5},
    "reads": {"cpu_s": 0.006, "wait_s": 0.1, "step_s": 0.003, "receive_s": 1e-4},
    "moves": {"cpu_s": 0.012, "step_s": 0.001, "receive_s": 0.006, "batch_bytes": 64 << 20},
    "steps": {"cpu_s": 0.02, "step_s": 0.03, "receive_s": 2e-4},
    "steps on the CPU": {"cpu_s": 0.004, "step_s": 0.03, "step_cores": 2.0, "receive_s": 2e-4},
    "is in memory": {"cpu_s": 3e-4, "step_s": 2e-4, "receive_s": 5e-4, "batch_bytes": 16 << 10},
    "has slow batches": {"cpu_s": 0.03, "step_s": 0.012, "tail_share": 0.04, "tail_factor": 8.0},
}


def searched(number):
    """A search on one of many machines: jobs, sizes, neighbours, budgets and epochs differ."""
    rng = random.Random(number)
    job, neighbours = list(itertools.product(JOBS.values(), (0.0, 0.5, 1.0)))[
        number % (3 * len(JOBS))
    ]
    cores, scale = rng.choice([2, 4, 8]), rng.choice([0.3, 1.0, 4.0])
    scaled = {name: value * scale if name.endswith("_s") else value for name, value in job.items()}
    machine = SimulatedMachine(
        cores=cores, noise_sd=0.03, service_cv=0.2, neighbours=neighbours * cores,
        neighbours_share=rng.choice([0.3, 1.0]), **scaled,
    )  # fmt: skip
    epoch = rng.choice([10_000, 10_000, 60])
    return simulated_result(
        machine, seed=number, budget_s=rng.choice([15.0, 60.0]), epoch_batches=epoch
    )


QUICK = {
    3 * job + 2 * (job % 2) for job in range(len(JOBS))
}  # each job once, on a quiet machine or a busy one
NUMBERS = [
    pytest.param(number, marks=[] if number in QUICK else [pytest.mark.acceptance])
    for number in range(300)
]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_search_contradicts_itself(number):
    assert list(contradictions(searched(number))) == []


def test_the_example_of_the_other_tests_does_not_contradict_itself(result):
    assert list(contradictions(result)) == []
    assert list(contradictions(replace(result, status="undecided"))) == [
        "status undecided, and undecided is None"
    ]


def test_no_interval_reaches_below_zero_however_much_bursts_differ():
    rates, own = (10.0, 900.0), LoaderConfig()
    result = TuningResult(
        best=own, status="complete", trials=tuple(ran(own, rates[n], n, n) for n in range(2))
    )
    assert result.measurement_of(own).samples_per_s.low == 0.0
    rounds = tuple(Round(rates={"a": rates[n], "b": rates[1 - n]}) for n in range(2))
    measured = result.trials[0].measurement
    compared = Comparison(
        sides=tuple(Side(name=each, config=own, measurement=measured) for each in "ab"),
        rounds=rounds,
    )
    assert (compared.to_dataframe()[["rate_low", "rate_high"]] > 0.0).all(axis=None)
    # AND what a table shows as rates has the ratio that it shows
    assert compared.rates["b"].value / compared.rates["a"].value == pytest.approx(
        compared.ratios["b"].value
    )


def test_how_busy_a_gpu_was_is_the_mean_of_the_rounds_that_know_it():
    own, shares = LoaderConfig(), ((0.8, 0.6), (0.9, None), (1.0, 0.7))
    trials = tuple(
        ran(
            own,
            100.0,
            number,
            number,
            gpu_busy_share=steps,
            gpu_utilization=kernels,
            gpu_used_bytes=1 << 30,
        )
        for number, (steps, kernels) in enumerate(shares)
    )
    result = TuningResult(best=own, status="complete", trials=trials)
    measured = result.measurement_of(own)
    assert (measured.gpu_busy_share, measured.gpu_utilization) == pytest.approx((0.9, 0.65))
    frame = result.to_dataframe()
    assert frame.gpu_utilization.fillna(-1.0).tolist() == [
        0.6,
        -1.0,
        0.7,
    ]  # what NVML does not tell is not 0
    assert frame.gpu_used_bytes.tolist() == [1 << 30] * 3
