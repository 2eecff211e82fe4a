"""`compare()`: ratios from paired rounds, a side that fails as an answer, and one loop for all paired rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader import Comparison, LoaderConfig, compare
from autotune_loader.diagnosis.units import ratio_text
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.tuning.compare import MOST_ROUNDS, compare_workloads
from autotune_loader.tuning.finals import paired
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure
from tests.support import SimulatedMachine, on_simulated_machines


def orders(sides: str, rounds: int, seed: int = 0) -> list[str]:
    run = paired(lambda number: sides if number < rounds else (), lambda side, number: side, seed=seed)
    return ["".join(side for side, _ in outcomes) for outcomes, _ in run]


def test_two_sides_take_turns_in_being_first_and_more_run_in_an_order_that_the_seed_decides() -> None:
    assert orders("AB", 3) == ["AB", "BA", "AB"]
    assert all(sorted(each) == list("ABCD") for each in orders("ABCD", 20))
    assert orders("ABCD", 20) == orders("ABCD", 20) != orders("ABCD", 20, seed=1)


# On simulated machines

FAST, SLOW = SimulatedMachine(cpu_s=0.02, noise_sd=0.02), SimulatedMachine(cpu_s=0.04, noise_sd=0.02)
BROKEN = SimulatedMachine(fails=lambda config: Failure(kind="user_exception", phase="batches", message="no such file"))


def too_many_samples_raise(config: LoaderConfig) -> Failure:
    raise WorkloadError("sample 3 raises KeyError, and so do sample 5 and sample 8")


def simulated(monkeypatch: pytest.MonkeyPatch, **machines: SimulatedMachine | str) -> Comparison:
    """A comparison of one worker on each machine; a text is what the first batch of a side raises."""
    workloads = {
        name: Workload(
            data=DataSide(dataset=range(10**6), batch_size=getattr(machine, "batch_size", 32)),
            training=TrainingSide(train_step=print, device="cuda"),
            own_config=LoaderConfig(num_workers=1),
        )
        for name, machine in machines.items()
    }
    machine_of = {id(workloads[name].data): machine for name, machine in machines.items()}

    on_simulated_machines(monkeypatch, lambda workload: machine_of[id(workload.data)])
    return compare_workloads(workloads, TuneOptions(budget_s=30.0, progress="off"))


def test_the_faster_side_is_told_with_its_interval_and_what_binds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulated(monkeypatch, now=SLOW, cached=FAST)
    ratio = found.ratios["cached"]
    assert ratio.low < 2 < ratio.high * 1.05
    assert len(found.rounds) == MOST_ROUNDS
    told = f"cached is {ratio_text(ratio)} as fast as now in {ratio.count} paired rounds."
    assert told in " ".join(str(found).split())
    frame = found.to_dataframe().set_index("side")
    assert frame.loc["cached", "ratio"] == pytest.approx(ratio.value)
    assert frame.loc["cached", "bottleneck"] == "cpu"


def test_sides_that_are_alike_are_not_called_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulated(monkeypatch, now=SLOW, other=SLOW)
    assert "other is not shown to be faster than now" in found.report()


@pytest.mark.parametrize(
    "sides",
    [
        {"broken": BROKEN, "works": FAST},
        {"works": FAST, "broken": SimulatedMachine(fails=too_many_samples_raise)},
        {"works": FAST, "broken": "the first batch failed"},
    ],
    ids=["in a burst", "for its samples", "at once"],
)
def test_a_side_that_fails_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, sides: dict[str, SimulatedMachine | str]
) -> None:
    found = simulated(monkeypatch, **sides)
    assert found["broken"].error is not None
    assert str(found).startswith("broken failed:")
    assert "works is the only side that worked." in " ".join(str(found).split())
    assert found["works"].measurement is not None
    assert found.ratios == {}


def test_sides_of_different_batch_sizes_are_compared_by_samples_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = simulated(
        monkeypatch, small=SimulatedMachine(batch_size=16, cpu_s=0.02), large=SimulatedMachine(batch_size=32)
    )
    assert found.ratios["large"].value == pytest.approx(1.0, abs=0.1)
    assert "Batch sizes differ (small 16, large 32): sides are compared by samples/s" in " ".join(
        found.report().split()
    )


# Arguments

LOADER = DataLoader([0] * 10_000, batch_size=8)
WRONG = [
    (LOADER, TypeError, "is not a dict of loaders by name"),
    ({"a": LOADER}, ValueError, "holds 1 of the two sides"),
    ({"a": LOADER, "b": "path"}, TypeError, r"sides\['b'\]: dataset_or_loader='path' is a path"),
    ({"a": LOADER, "b": (LOADER, "step")}, TypeError, r"sides\['b'\]: train_step='step' is not callable"),
]


@pytest.mark.parametrize(("sides", "error", "message"), WRONG)
def test_wrong_sides_are_named(sides: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compare(sides)


def step(model: Any, batch: Any) -> None: ...


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


def test_a_side_may_have_a_step_or_a_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    slow = {(None, id(model))}
    on_simulated_machines(
        monkeypatch,
        lambda each: SLOW if (each.training.train_step, id(each.training.model)) in slow else FAST,
    )
    found = compare({"now": LOADER, "step": (LOADER, step), "model": (Own([0] * 9), other)}, model, progress=False)
    assert set(found.ratios) == {"step", "model"}
    assert "model: Own has an __iter__ of its own, which the bursts leave out" in found.report()
    assert all(ratio.value > 1.3 for ratio in found.ratios.values())


JOB = """
from torch.utils.data import DataLoader

def make():
    return DataLoader([0] * 10_000, batch_size=8)
"""
