"""`compare()`: ratios from rounds, a side that fails as an answer; on simulated machines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader import Comparison, LoaderConfig, compare
from autotune_loader.diagnosis import Caution
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure
from tests.support import SimulatedMachine, on_simulated_machines

FAST, SLOW = SimulatedMachine(cpu_s=0.02, noise_sd=0.02), SimulatedMachine(cpu_s=0.04, noise_sd=0.02)
BROKEN = SimulatedMachine(fails=lambda config: Failure(kind="user_exception", phase="batches", message="no such file"))


def sample_raises(config: LoaderConfig) -> Failure:
    raise WorkloadError("sample 3 raises KeyError: 'label'")


def simulated(monkeypatch: pytest.MonkeyPatch, **machines: SimulatedMachine | str) -> Comparison:
    """A comparison of one worker on each machine; a text is what the first batch of a side raises."""
    loaders = {
        name: DataLoader([0] * 10**6, batch_size=getattr(machine, "batch_size", 32), num_workers=1)
        for name, machine in machines.items()
    }
    machine_of = {id(loaders[name].dataset): machine for name, machine in machines.items()}
    on_simulated_machines(monkeypatch, lambda workload: machine_of[id(workload.data.dataset)])
    return compare(loaders, train_step=0.001, progress=False)


def test_the_faster_side_is_told_with_its_interval_and_what_limits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulated(monkeypatch, now=SLOW, cached=FAST)
    ratio = found.ratios["cached"]
    assert ratio.low < 2 < ratio.high
    assert ratio.high < 3
    assert len(found.rounds) >= 2
    assert all(each.rates.keys() == {"now", "cached"} for each in found.rounds[:2])
    assert found["cached"].bottleneck is not None
    assert found["cached"].bottleneck.kind == "cpu"
    assert "cached is" in str(found)


def test_sides_that_are_alike_are_not_called_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    found = simulated(monkeypatch, now=SLOW, other=SLOW)
    assert found.ratios["other"].low < 1 < found.ratios["other"].high
    assert "other is not shown to be faster than now" in found.report()


@pytest.mark.parametrize(
    "sides",
    [
        {"broken": BROKEN, "works": FAST},
        {"works": FAST, "broken": SimulatedMachine(fails=sample_raises)},
        {"works": FAST, "broken": "the first batch failed"},
        {"broken": "the first batch failed", "works": FAST},
    ],
    ids=["in a burst", "by a sample", "at once", "the first at once"],
)
def test_a_side_that_fails_is_an_answer(
    monkeypatch: pytest.MonkeyPatch, sides: dict[str, SimulatedMachine | str]
) -> None:
    found = simulated(monkeypatch, **sides)
    assert found["broken"].error is not None
    assert "broken failed: " in found.report()
    assert "works is the only side that worked" in found.report()
    assert found["works"].measurement is not None
    assert found.ratios == {}
    assert simulated(monkeypatch, one=BROKEN, other="the first batch failed").rates == {}


def test_sides_of_different_batch_sizes_are_compared_by_samples_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = simulated(
        monkeypatch, small=SimulatedMachine(batch_size=16, cpu_s=0.02), large=SimulatedMachine(batch_size=32)
    )
    assert found.ratios["large"].value == pytest.approx(1.0, abs=0.1)
    assert Caution.BATCH_SIZES_DIFFER.said_by(found.notes[0])
    assert "(small 16, large 32)" in found.report()


# Arguments

LOADER = DataLoader([0] * 10_000, batch_size=8)
WRONG = [
    (LOADER, TypeError, "is not a dict of loaders by name"),
    ({"a": LOADER}, ValueError, "holds 1 of the two sides"),
    ({"a": LOADER, 2: LOADER}, TypeError, "sides has the name 2, which is not a text"),
    ({"a": LOADER, "b": "path"}, TypeError, r"sides\['b'\]: data='path' is a path"),
    ({"a": LOADER, "b": (LOADER,)}, TypeError, r"sides\['b'\] is a tuple of 1; \(loader, train_step\) or "),
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
