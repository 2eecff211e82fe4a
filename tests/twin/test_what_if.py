"""`result.predict()`: what another configuration or another machine would do, also from a saved file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune_loader.decision.belief import fit_twin
from autotune_loader.results.result import TuningResult
from autotune_loader.twin.context import TwinContext
from autotune_loader.twin.memory import MemoryModel
from autotune_loader.twin.what_if import with_stages, without_waiting
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement, MemoryUse
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.stages import StageTime
from autotune_loader.values.trial import Trial
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

MACHINE = SimulatedMachine(cores=4, cpu_s=0.06, step_s=0.005)
WAITING_MACHINE = SimulatedMachine(cores=4, cpu_s=0.06, wait_s=0.2, step_s=0.005)
WAITING = SimulatedProbe(WAITING_MACHINE, FakeClock())
TRIED = tuple(LoaderConfig(num_workers=count) for count in (0, 1, 2, 4))


@pytest.fixture(scope="module")
def result() -> TuningResult:
    probe = SimulatedProbe(MACHINE, FakeClock())
    bursts = [probe.burst(config, BurstPlan(max_s=2.0)) for config in TRIED]
    step = probe.step_ceiling(None, BurstPlan())
    assert isinstance(step, Measurement)
    trials = tuple(
        Trial(number=number, config=config, role="search", measurement=burst)
        for number, (config, burst) in enumerate(zip(TRIED, bursts, strict=True))
        if isinstance(burst, Measurement)
    )
    basis = TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, step.step_s),), epoch_batches=500)
    return TuningResult(best=TRIED[-1], status="complete", baseline=TRIED[0], trials=trials, twin=basis)


@pytest.mark.parametrize("workers", [0, 1, 3, 6])
def test_another_number_of_workers_is_predicted_near_the_truth(result: TuningResult, workers: int) -> None:
    truth = SimulatedProbe(MACHINE, FakeClock()).truth(LoaderConfig(num_workers=workers))

    assert result.predict(workers).samples_per_s.value == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(("workers", "prefetch"), [(3, 2), (8, 2), (6, 8)])
def test_the_memory_of_what_was_not_run_is_predicted(result: TuningResult, workers: int, prefetch: int) -> None:
    config = LoaderConfig(num_workers=workers, prefetch_factor=prefetch)
    burst = SimulatedProbe(MACHINE, FakeClock()).burst(config, BurstPlan(max_s=1.0))

    assert isinstance(burst, Measurement)
    assert burst.memory is not None
    measured = burst.memory.pss_bytes or burst.memory.rss_bytes
    assert result.predict(workers, prefetch).pss_bytes == pytest.approx(measured, rel=0.03)


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


def test_without_a_burst_that_tells_memory_none_is_predicted(result: TuningResult) -> None:
    blind = tuple(
        replace(trial, measurement=replace(trial.measurement, memory=None))
        for trial in result.trials
        if trial.measurement is not None
    )

    assert replace(result, trials=blind).predict(3).pss_bytes is None


def test_what_is_not_named_is_as_in_the_best(result: TuningResult) -> None:
    assert result.predict().config == result.best
    assert result.predict(prefetch_factor=8).config == LoaderConfig(num_workers=4, prefetch_factor=8)


def test_more_cores_are_a_machine_that_is_not_here(result: TuningResult) -> None:
    here, there = result.predict(8), result.predict(8, cores=8)

    assert there.samples_per_s.value > 1.5 * here.samples_per_s.value


def test_a_saved_result_answers_like_the_one_it_was(result: TuningResult, tmp_path: Path) -> None:
    result.save(tmp_path / "loader.json")
    loaded = TuningResult.load(tmp_path / "loader.json")

    for workers in (0, 2, 6):
        expected = result.predict(workers).samples_per_s.value
        assert loaded.predict(workers).samples_per_s.value == pytest.approx(expected, rel=0.1)


def test_an_epoch_pays_for_its_start(result: TuningResult) -> None:
    prediction = result.predict(4)

    assert prediction.epoch_samples_per_s < prediction.samples_per_s.value


def test_a_knob_that_does_not_exist_is_answered_with_those_that_do(result: TuningResult) -> None:
    with pytest.raises(TypeError, match=r"workers=3 is no knob; num_workers would work"):
        result.predict(workers=3)


def test_without_a_burst_nothing_is_predicted() -> None:
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
    for workers in (0, 2, 4):
        truth = SimulatedProbe(lighter, FakeClock()).truth(LoaderConfig(num_workers=workers))
        assert watched.predict(workers, stages=factors).samples_per_s.value == pytest.approx(truth, rel=0.1)


def test_a_stage_that_is_gone_leaves_the_step(result: TuningResult) -> None:
    watched = replace(result, stage_times=STAGES)
    alone = watched.predict(stages={"decode": 0.0, "crop": 0.0}).samples_per_s.value
    assert alone > 2 * watched.predict().samples_per_s.value


def test_waiting_that_is_gone_leaves_what_is_computed() -> None:
    read = StageTime(stage="read", where="a.py:1", wall_share=0.75, cpu_share=0.0, wall_s=3e-3, cpu_s=0.0)
    twin_of = fit_twin(
        [
            (config, burst)
            for config in TRIED
            if isinstance(burst := WAITING.burst(config, BurstPlan(max_s=2.0)), Measurement)
        ],
        TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, 0.005),)),
    )
    assert twin_of is not None
    then = (
        with_stages(twin_of, (read, *STAGES), {"read": 0.5})
        .predict_all([LoaderConfig(num_workers=1)])[0]
        .samples_per_s.value
    )
    truth = SimulatedProbe(replace(WAITING_MACHINE, wait_s=0.1), FakeClock()).truth(LoaderConfig(num_workers=1))
    assert then == pytest.approx(truth, rel=0.1)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"decod": 0.5}, r"'decod'.* names no stage; 'decode' would work"),
        ({"nothing like it": 0.5}, r"names no stage; 'decode', 'crop' would work"),
        ({"decode": -1}, r"'decode': -1.* is no factor of 0 or more"),
        ({"decode": "half"}, r"is no factor of 0 or more; \{'decode': 0.5\} would work"),
        ({"decode": float("inf")}, r"is no factor"),
    ],
)
def test_a_stage_that_there_is_not_is_named(result: TuningResult, stages: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(result, stage_times=STAGES).predict(stages=stages)


def test_stages_that_are_no_factors_are_named(result: TuningResult) -> None:
    with pytest.raises(TypeError, match=r"stages=\['decode'\] names no factors; stages=\{'decode': 0.5\} would work"):
        replace(result, stage_times=STAGES).predict(stages=["decode"])  # type: ignore[arg-type]


def test_stages_that_nobody_watched_cannot_be_asked_about(result: TuningResult) -> None:
    with pytest.raises(ValueError, match=r"no worker was watched; tune\(\.\.\., stages=True\)"):
        result.predict(stages={"decode": 0.5})


def test_a_machine_that_waits_for_nothing_is_predicted() -> None:
    bursts = [(config, WAITING.burst(config, BurstPlan(max_s=2.0))) for config in TRIED]
    seen = [(config, burst) for config, burst in bursts if isinstance(burst, Measurement)]
    twin = fit_twin(seen, TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, 0.005),)))
    assert twin is not None
    for config in TRIED:
        truth = SimulatedProbe(MACHINE, FakeClock()).truth(config)
        assert without_waiting(twin).predict_all([config])[0].samples_per_s.value == pytest.approx(truth, rel=0.15)
