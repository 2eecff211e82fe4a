"""No result contradicts itself: simulated searches on quiet and busy machines."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune_loader.results.loader_file import Advice, Verdict
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval
from tests.support import SimulatedMachine, simulated_result
from tests.support.invariants import CHECKS, contradictions

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


def test_files_of_every_version_can_be_checked() -> None:
    # The first version's file, which was written by hand, has a headroom over a ceiling that it does not have.
    path = Path(__file__).parent.parent / "results" / "data" / "loader-1.0.json"
    assert any(each.startswith("the headroom is that of") for each in contradictions(TuningResult.load(path)))


def exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value, count=20)


def mistakes(good: TuningResult) -> dict[str, dict[str, Any]]:
    """Changes of the kind that was seen in real results, by the check that finds each."""
    measured, best = good.measured, good.best
    rate = measured.samples_per_s
    assert rate is not None
    assert measured.wait_share is not None
    cheaper = replace(best, num_workers=best.num_workers - 1)
    return {
        "the ceiling is one": {"measured": replace(measured, ceiling_samples_per_s=exactly(0.5 * rate.value))},
        "the headroom is that of rate and ceiling": {"verdict": replace(good.verdict, headroom=17.0)},
        "what binds has something to gain": {
            "verdict": replace(good.verdict, binding="step"),
            "measured": replace(measured, wait_share=0.5),
        },
        "advice promises no more than there is": {
            "verdict": Verdict(binding="unknown", sentence="Unknown."),
            "advice": (Advice(action="Do.", reason="Because.", expected_gain=0.3),),
        },
        "nothing cheaper is as fast as the choice": {
            "finals": replace(good.finals, as_fast=(cheaper,)),
            "trials": (*good.trials, replace(good.trials[-1], config=cheaper)),
        },
        "each figure is that of the table": {"measured": replace(measured, first_batch_s=99.0)},
        "the chosen row is whole": {"trials": (), "finals": replace(good.finals, measurements=())},
        "the speed up is that of the rates": {"measured": replace(measured, speedup=exactly(77.0))},
        "a choice is called decided when it was": {"finals": replace(good.finals, rounds=good.finals.rounds[:1])},
        "a doubt is said first": {"status": "undecided"},
    }


def test_each_kind_of_mistake_is_found() -> None:
    good = simulated_result(SimulatedMachine(noise_sd=0.03))
    assert contradictions(good) == []
    broken = mistakes(good)
    assert set(broken) == {check.__name__.strip("_").replace("_", " ") for check in CHECKS}
    for name, changes in broken.items():
        assert any(each.startswith(f"{name}: ") for each in contradictions(replace(good, **changes))), name


def test_the_example_of_the_other_tests_is_a_possible_one(result: TuningResult) -> None:
    assert contradictions(result) == []
