"""`result.predict()`: what another configuration or another machine would do, also from a saved file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune_loader.results.result import TuningResult
from autotune_loader.twin.memory import MemoryModel
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement, MemoryUse
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.stages import StageTime
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_result

MACHINE = SimulatedMachine(cores=4, cpu_s=0.06, step_s=0.005)
STAGES = (
    StageTime(stage="decode", where="a.py:2", wall_share=0.75, cpu_share=0.75, wall_s=0.75e-3, cpu_s=0.75e-3),
    StageTime(stage="crop", where="a.py:3", wall_share=0.25, cpu_share=0.25, wall_s=0.25e-3, cpu_s=0.25e-3),
)
READ = StageTime(stage="read", where="a.py:1", wall_share=0.75, cpu_share=0.0, wall_s=3e-3, cpu_s=0.0)


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return simulated_result(MACHINE)


def truth(machine: SimulatedMachine, workers: int) -> Any:
    return pytest.approx(SimulatedProbe(machine, FakeClock()).truth(LoaderConfig(num_workers=workers)), rel=0.1)


def test_other_workers_and_cores_are_predicted_near_the_truth_also_from_a_file(
    result: TuningResult, tmp_path: Path
) -> None:
    result.save(tmp_path / "loader.json")
    truths = {workers: truth(MACHINE, workers) for workers in (0, 3, 6)}
    for known in (result, TuningResult.load(tmp_path / "loader.json")):
        assert {workers: known.predict(workers).samples_per_s.value for workers in truths} == truths
        here, there = known.predict(8), known.predict(8, cores=8)
        assert there.samples_per_s.value > 1.5 * here.samples_per_s.value


@pytest.mark.parametrize(("factors", "left"), [({"decode": 0.5}, 0.625), ({"decode": 0.5, "crop": 2.0}, 0.875)])
def test_cheaper_stages_are_a_machine_with_less_to_compute(
    result: TuningResult, factors: dict[str, float], left: float
) -> None:
    watched, lighter = replace(result, stage_times=STAGES), replace(MACHINE, cpu_s=MACHINE.cpu_s * left)
    for workers in (0, 4):
        assert watched.predict(workers, stages=factors).samples_per_s.value == truth(lighter, workers)


def test_waiting_that_is_halved_leaves_what_is_computed() -> None:
    machine = replace(MACHINE, wait_s=0.2)
    watched = replace(simulated_result(machine), stage_times=(READ, *STAGES))
    assert watched.predict(1, stages={"read": 0.5}).samples_per_s.value == truth(replace(machine, wait_s=0.1), 1)


@pytest.mark.parametrize(
    ("watched", "asked", "error", "answer"),
    [
        ((), {"workers": 3}, TypeError, "workers=3 is no knob; num_workers would work"),
        ((), {"cores": 0}, ValueError, "cores=0 must be more than 0"),
        ((), {"stages": {"decode": 0.5}}, ValueError, r"no worker was watched; tune\(\.\.\., stages=True\)"),
        (STAGES, {"stages": {"decod": 0.5}}, ValueError, r"'decod'.* names no stage; 'decode' would work"),
        (STAGES, {"stages": {"decode": -1}}, ValueError, r"'decode': -1.* is no factor of 0 or more"),
        (STAGES, {"stages": {"decode": "half"}}, ValueError, r"factor of 0 or more; \{'decode': 0.5\} would work"),
        (STAGES, {"stages": ["decode"]}, TypeError, r"\['decode'\] names no factors; stages=\{'decode': 0.5\} would"),
    ],
)
def test_what_makes_no_sense_is_answered_with_what_does(
    result: TuningResult, watched: tuple[StageTime, ...], asked: Any, error: type[Exception], answer: str
) -> None:
    with pytest.raises(error, match=answer):
        replace(result, stage_times=watched).predict(**asked)
    empty = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    with pytest.raises(ValueError, match="nothing was measured"):
        empty.predict(2)


def test_a_batch_of_another_size_says_nothing_of_the_memory_of_the_workloads_own() -> None:
    # GIVEN 4 workers with batches of 10 MiB, and a last burst with batches four times as large
    burst = SimulatedProbe(MACHINE, FakeClock()).burst(LoaderConfig(), BurstPlan(max_s=0.3))
    assert isinstance(burst, Measurement)
    four = LoaderConfig(num_workers=4)
    large = replace(four, batch_size=256)
    seen = [
        (config, replace(burst, memory=MemoryUse(rss_bytes=mib << 20), batch_bytes=batch_mib << 20))
        for config, mib, batch_mib in ((LoaderConfig(num_workers=2), 690, 10), (four, 990, 10), (large, 1260, 40))
    ]
    model = MemoryModel.fit(seen)
    # THEN what is predicted of the own size is what was measured of it
    assert model is not None
    assert model.peak_bytes(four) / 2**20 == pytest.approx(990, rel=0.01)
    assert model.peak_bytes(large) / 2**20 == pytest.approx(1260, rel=0.01)
