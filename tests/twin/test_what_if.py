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


@pytest.fixture(scope="module")
def result() -> TuningResult:
    return simulated_result(MACHINE)


@pytest.mark.parametrize("workers", [0, 3, 6])
def test_another_number_of_workers_is_predicted_near_the_truth(result: TuningResult, workers: int) -> None:
    truth = SimulatedProbe(MACHINE, FakeClock()).truth(LoaderConfig(num_workers=workers))
    assert result.predict(workers).samples_per_s.value == pytest.approx(truth, rel=0.1)


def test_a_batch_of_another_size_says_nothing_of_the_memory_of_the_workloads_own() -> None:
    # GIVEN 4 workers with batches of 10 MiB, and a last burst with batches four times as large
    burst = SimulatedProbe(MACHINE, FakeClock()).burst(LoaderConfig(), BurstPlan(max_s=0.3))
    assert isinstance(burst, Measurement)

    def observed(mib: int, batch_mib: int, **knobs: int) -> tuple[LoaderConfig, Measurement]:
        memory = MemoryUse(rss_bytes=mib << 20)
        config = LoaderConfig(num_workers=knobs.pop("workers", 4), **knobs)  # type: ignore[arg-type]
        return config, replace(burst, memory=memory, batch_bytes=batch_mib << 20)

    seen = [observed(690, 10, workers=2), observed(990, 10), observed(1260, 40, batch_size=256)]
    model = MemoryModel.fit(seen)
    # THEN what is predicted of the own size is what was measured of it
    assert model is not None
    assert model.peak_bytes(LoaderConfig(num_workers=4)) / 2**20 == pytest.approx(990, rel=0.01)
    assert model.peak_bytes(LoaderConfig(num_workers=4, batch_size=256)) / 2**20 == pytest.approx(1260, rel=0.01)


def test_more_cores_are_a_machine_that_is_not_here(result: TuningResult) -> None:
    here, there = result.predict(8), result.predict(8, cores=8)
    assert there.samples_per_s.value > 1.5 * here.samples_per_s.value


def test_a_saved_result_answers_like_the_one_it_was(result: TuningResult, tmp_path: Path) -> None:
    result.save(tmp_path / "loader.json")
    loaded = TuningResult.load(tmp_path / "loader.json")
    for workers in (0, 6):
        expected = result.predict(workers).samples_per_s.value
        assert loaded.predict(workers).samples_per_s.value == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("asked", "error", "answer"),
    [
        ({"workers": 3}, TypeError, "workers=3 is no knob; num_workers would work"),
        ({"cores": 0}, ValueError, "cores=0 must be more than 0"),
    ],
)
def test_what_makes_no_sense_is_answered_with_what_does(
    result: TuningResult, asked: dict[str, int], error: type[Exception], answer: str
) -> None:
    with pytest.raises(error, match=answer):
        result.predict(**asked)
    empty = TuningResult(best=LoaderConfig(), status="fallback", baseline=LoaderConfig())
    with pytest.raises(ValueError, match="nothing was measured"):
        empty.predict(2)


STAGES = (
    StageTime(stage="decode", where="a.py:2", wall_share=0.75, cpu_share=0.75, wall_s=0.75e-3, cpu_s=0.75e-3),
    StageTime(stage="crop", where="a.py:3", wall_share=0.25, cpu_share=0.25, wall_s=0.25e-3, cpu_s=0.25e-3),
)


@pytest.mark.parametrize(("factors", "left"), [({"decode": 0.5}, 0.625), ({"decode": 0.5, "crop": 2.0}, 0.875)])
def test_cheaper_stages_are_a_machine_with_less_to_compute(
    result: TuningResult, factors: dict[str, float], left: float
) -> None:
    watched, lighter = replace(result, stage_times=STAGES), replace(MACHINE, cpu_s=MACHINE.cpu_s * left)
    for workers in (0, 4):
        truth = SimulatedProbe(lighter, FakeClock()).truth(LoaderConfig(num_workers=workers))
        assert watched.predict(workers, stages=factors).samples_per_s.value == pytest.approx(truth, rel=0.1)


def test_waiting_that_is_halved_leaves_what_is_computed() -> None:
    machine = replace(MACHINE, wait_s=0.2)
    read = StageTime(stage="read", where="a.py:1", wall_share=0.75, cpu_share=0.0, wall_s=3e-3, cpu_s=0.0)
    watched = replace(simulated_result(machine), stage_times=(read, *STAGES))
    truth = SimulatedProbe(replace(machine, wait_s=0.1), FakeClock()).truth(LoaderConfig(num_workers=1))
    assert watched.predict(1, stages={"read": 0.5}).samples_per_s.value == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(
    ("watched", "stages", "error", "message"),
    [
        (STAGES, {"decod": 0.5}, ValueError, r"'decod'.* names no stage; 'decode' would work"),
        (STAGES, {"decode": -1}, ValueError, r"'decode': -1.* is no factor of 0 or more"),
        (STAGES, {"decode": "half"}, ValueError, r"is no factor of 0 or more; \{'decode': 0.5\} would work"),
        (STAGES, ["decode"], TypeError, r"stages=\['decode'\] names no factors; stages=\{'decode': 0.5\} would work"),
        ((), {"decode": 0.5}, ValueError, r"no worker was watched; tune\(\.\.\., stages=True\)"),
    ],
)
def test_a_stage_that_there_is_not_is_named(
    result: TuningResult, watched: tuple[StageTime, ...], stages: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        replace(result, stage_times=watched).predict(stages=stages)
