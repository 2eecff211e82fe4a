"""`result.predict()`: what another configuration or another machine would do, also from a saved file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune_loader.results.result import TuningResult
from autotune_loader.testing import FakeClock, SimulatedMachine, SimulatedProbe
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trial import Trial

MACHINE = SimulatedMachine(cores=4, cpu_s=0.06, step_s=0.005)
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
