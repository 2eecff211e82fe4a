"""No result contradicts itself: simulated searches on quiet and busy machines."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from invariants import contradictions

from autotune_loader.results.result import TuningResult
from tests.support import SimulatedMachine, simulated_result

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
