"""No result contradicts itself: simulated searches on quiet and busy machines.

What was not measured (None) is not asked.
"""

import itertools
import random
from dataclasses import replace
from statistics import geometric_mean

import pytest
from report.example import ran

from autotune_loader.report.ranking import ranking
from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.result import TuningResult
from autotune_loader.values import LoaderConfig, Round
from tests.support import SimulatedMachine, simulated_result

CLOCKS = 0.05  # two clocks of one thing may differ by so much, relatively, beyond their intervals
LITTLE = 0.05  # less than this share of the time, or of the rate, is nothing to gain
PASSED = 1.15  # a rate may lie so far above the step alone
FEWEST_ROUNDS = 3  # fewer decide nothing
SAY_NOTHING_OF_WAITING = ("unclear", "start_up", "in_memory", "memory", "nothing")


def contradictions(result):
    """Every way in which the result contradicts itself, a sentence each."""
    rate, ceiling, bottleneck = result.rate, result.ceiling, result.bottleneck
    if (result.status == "undecided") != (result.undecided is not None):
        yield f"status {result.status}, and undecided is {result.undecided}"
    if rate is not None and ceiling is not None:
        if rate.value > PASSED * ceiling.value:
            yield f"the rate is {rate.value:.0f}, and the step alone has {ceiling.value:.0f}"
        transfer = result.transfer_ceiling
        if transfer is not None and rate.value > PASSED * transfer.value:
            yield f"the rate is {rate.value:.0f}, and workers hand over {transfer.value:.0f}"
        gain = max(0.0, ceiling.value / rate.value - 1)
        if bottleneck is not None and not _same(gain, bottleneck.gain):
            yield f"headroom {bottleneck.gain}, by the ceiling {gain}"
    if bottleneck is not None and bottleneck.kind not in SAY_NOTHING_OF_WAITING:
        yield from _of_the_bottleneck(bottleneck, result.wait_share)
    below = [each for each in _intervals(result.to_dict()) if (each["low"] or 0.0) < 0.0]
    yield from (f"{each} reaches below zero" for each in below)
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
        waits = wait if found.kind == "storage" and wait is not None else max(gains)
        contradicts = waits < LITTLE
    if contradicts:
        yield f"{found.kind} limits, the loop waits {wait}, the headroom is {found.gain}"


def _of_the_choice(result):
    """Nothing with fewer workers is as fast, and the row of the choice has its figures."""
    best, best_rates = result.best, result.rates_of(result.best)
    for row in ranking(result):
        if row.config == best and row.measurement is not None:
            shown = (row.measurement.wait_share, row.measurement.taken_bytes)
            if not all(map(_same, (result.wait_share, result.memory_bytes), shown)):
                yield f"waiting {result.wait_share}, {result.memory_bytes} bytes, shown {shown}"
        if row.config.batch_size != best.batch_size or row.config.num_workers >= best.num_workers:
            continue
        rates = result.rates_of(row.config)
        ratios = [rates[number] / best_rates[number] for number in rates.keys() & best_rates.keys()]
        is_decided = result.status != "undecided" and len(ratios) >= FEWEST_ROUNDS
        if row.config in result.as_fast or (
            is_decided and geometric_mean(ratios) > 1 + result.tolerance
        ):
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
    return figure is None or shown == pytest.approx(figure, rel=1e-6, abs=1e-6)


JOBS = {  # seconds of one batch
    "decodes": {"cpu_s": 0.04, "step_s": 0.005, "receive_s": 1e-4},
    "decodes and steps": {"cpu_s": 0.03, "step_s": 0.02, "step_cores": 1.0, "receive_s": 2e-4},
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
    kinds = list(itertools.product(JOBS.values(), (0.0, 0.5, 1.0)))
    job, neighbours = kinds[number % len(kinds)]
    cores, scale = rng.choice([2, 4, 8]), rng.choice([0.3, 1.0, 4.0])
    scaled = {name: value * scale if name.endswith("_s") else value for name, value in job.items()}
    machine = SimulatedMachine(
        cores=cores, noise_sd=0.03, service_cv=0.2, neighbours=neighbours * cores,
        neighbours_share=rng.choice([0.3, 1.0]), **scaled,
    )  # fmt: skip
    epoch, budget_s = rng.choice([10_000, 10_000, 60]), rng.choice([15.0, 60.0])
    return simulated_result(machine, seed=number, budget_s=budget_s, epoch_batches=epoch)


# Each job once, on a quiet machine or a busy one, and many more for the acceptance.
QUICK = {3 * job + 2 * (job % 2) for job in range(len(JOBS))}
MANY = pytest.mark.acceptance
NUMBERS = [pytest.param(n, marks=[] if n in QUICK else [MANY]) for n in range(300)]


@pytest.mark.parametrize("number", NUMBERS)
def test_no_search_contradicts_itself(number):
    assert list(contradictions(searched(number))) == []


def test_the_example_does_not_contradict_itself(result):
    assert list(contradictions(result)) == []
    (told,) = contradictions(replace(result, status="undecided"))
    assert told == "status undecided, and undecided is None"


def test_no_interval_of_rates_reaches_below_zero():
    rates, own = (10.0, 900.0), LoaderConfig()
    trials = tuple(ran(own, rates[n], n, n) for n in range(2))
    result = TuningResult(best=own, status="complete", trials=trials)
    assert result.measurement_of(own).samples_per_s.low == 0.0
    rounds = tuple(Round(rates={"a": rates[n], "b": rates[1 - n]}) for n in range(2))
    measured = result.trials[0].measurement
    sides = tuple(Side(name=each, config=own, measurement=measured) for each in "ab")
    compared = Comparison(sides=sides, rounds=rounds)
    assert (compared.to_dataframe()[["rate_low", "rate_high"]] > 0.0).all(axis=None)
    # AND what a table shows as rates has the ratio that it shows
    shown = compared.rates["b"].value / compared.rates["a"].value
    assert shown == pytest.approx(compared.ratios["b"].value)


def test_gpu_shares_are_means_of_rounds_that_know():
    own, shares = LoaderConfig(), ((0.8, 0.6), (0.9, None), (1.0, 0.7))
    told = [{"gpu_busy_share": steps, "gpu_utilization": kernels} for steps, kernels in shares]
    trials = tuple(
        ran(own, 100.0, n, n, gpu_used_bytes=1 << 30, **its) for n, its in enumerate(told)
    )
    result = TuningResult(best=own, status="complete", trials=trials)
    measured = result.measurement_of(own)
    assert (measured.gpu_busy_share, measured.gpu_utilization) == pytest.approx((0.9, 0.65))
    frame = result.to_dataframe()
    assert frame.gpu_utilization.fillna(-1.0).tolist() == [0.6, -1.0, 0.7]  # -1: not told
    assert frame.gpu_used_bytes.tolist() == [1 << 30] * 3
