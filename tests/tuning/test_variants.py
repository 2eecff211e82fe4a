"""Changes that `allow=` opens and the twin knows nothing of: tried on the best, chosen only where they gain, and said."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from autotune_loader import TuningResult, load_config, tune
from autotune_loader.decision.space import BatchCost, Limits, Space
from autotune_loader.tuning.state import SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, GpuUse, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    on_simulated_machines,
    simulated_run,
    simulated_search,
)

OWN_SIZE = 32
# One worker keeps this step busy.
MACHINE = SimulatedMachine(batch_size=OWN_SIZE, cpu_s=0.005, step_s=0.01, receive_s=1e-5)
SIZES = (None, 64, 128, 16)


@dataclass
class Batches:
    """A probe whose step takes a fixed time and some for each sample, and whose device has room for so many samples."""

    per_batch_s: float
    most_samples: int = 10**9
    clock: FakeClock = field(default_factory=FakeClock)
    epoch_batches: int | None = None
    asked: list[LoaderConfig] = field(default_factory=list)

    def _probe(self, batch_size: int | None) -> SimulatedProbe:
        size = batch_size or OWN_SIZE
        share = size / OWN_SIZE
        step_s = self.per_batch_s + (MACHINE.step_s - self.per_batch_s) * share
        machine = replace(MACHINE, batch_size=size, cpu_s=MACHINE.cpu_s * share, step_s=step_s)
        return SimulatedProbe(machine, self.clock, epoch_batches=self.epoch_batches)

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.asked.append(config)
        if (config.batch_size or OWN_SIZE) > self.most_samples:
            return Failure(kind="out_of_memory", phase="step", message="CUDA out of memory")
        outcome = self._probe(config.batch_size).burst(replace(config, batch_size=None), plan)
        assert isinstance(outcome, Measurement)
        return replace(outcome, gpu=GpuUse(memory_bytes=1000 * (config.batch_size or OWN_SIZE)))

    def step_ceiling(self, plan: BurstPlan) -> Measurement | Failure:
        return self._probe(plan.batch_size).step_ceiling(plan)


def searched(probe: Batches, space: Space, **options: Any) -> SearchState:
    return simulated_search(probe, simulated_run(MACHINE, space), probe.clock, **options)


def space(**changes: Any) -> Space:
    return Space(**{"max_workers": 4, "batch": BatchCost(bytes=1000, samples=OWN_SIZE), **changes})


def winner(found: SearchState) -> LoaderConfig:
    assert found.finals is not None
    return found.finals.winner


def test_a_batch_that_the_device_has_no_memory_for_ends_the_growth_and_nothing_else() -> None:
    # GIVEN a device with room for the user's batch only
    probe = Batches(per_batch_s=0.009, most_samples=OWN_SIZE)
    found = searched(probe, space(batch_sizes=SIZES))
    # THEN no larger size is tried twice, half of it is still, and the search has its winner
    tried = [config.batch_size for config in probe.asked]
    assert 1 <= tried.count(64) + tried.count(128) <= 2
    assert 16 in tried
    assert winner(found).batch_size is None
    # AND one that fits but takes more than 90 % is refused
    found = searched(Batches(per_batch_s=0.009), space(batch_sizes=SIZES, limits=Limits(device_bytes=70 * 1000)))
    assert winner(found).batch_size is None
    failures = [trial.failure.message for trial in found.trials if trial.failure]
    assert failures
    assert all("of device memory, more than 90%" in message for message in failures)


# tune(), on simulated machines


class Stamped(TensorDataset):
    epoch = 0


ROWS = TensorDataset(torch.zeros(40_000, 3))


def tuned(
    monkeypatch: pytest.MonkeyPatch,
    dataset: Any,
    **given: Any,
) -> TuningResult:
    """What `tune()` finds where most of a step is the same for every batch."""

    def probe_on(machine: SimulatedMachine, clock: FakeClock, epoch_batches: int | None) -> Batches:
        return Batches(per_batch_s=0.009, clock=clock, epoch_batches=epoch_batches)

    on_simulated_machines(monkeypatch, lambda workload: MACHINE, probe_on)
    options = {"batch_size": OWN_SIZE, "max_workers": 2, "budget": 60, "progress": False, **given}
    return tune(dataset, None, train_step=lambda model, batch: None, **options)


def test_a_tuned_batch_size_is_in_the_file_the_loader_and_the_warnings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "loader.json"
    result = tuned(monkeypatch, ROWS, allow=("batch_size",), output=path)
    # THEN a larger batch is chosen, and everything that comes of it has that size
    size = result.best.batch_size
    assert size in (64, 128)
    content = json.loads(path.read_text())
    assert (content["batch_size"], content["extras"]) == (size, {"batch_size": size})
    assert "batch_size" not in content["dataloader_kwargs"]
    assert load_config(path) == result.best
    assert result.make_loader(ROWS).batch_size == size
    assert any(f"from 32 to {size}: the learning rate" in str(warning) for warning in result.warnings)
    assert result.ceiling is not None
    assert result.ceiling.value == pytest.approx(size / (0.009 + 0.001 * size / 32), rel=0.1)


@pytest.mark.parametrize(
    ("name", "dataset", "values"),
    [
        ("batch_size", ROWS, {None, 64, 128, 16}),
        ("multiprocessing_context", ROWS, {None, "forkserver"}),
        ("sharing_strategy", ROWS, {None, "file_system"}),
        ("in_order", ROWS, {True, False}),
        ("drop_last", TensorDataset(torch.zeros(300 * OWN_SIZE + 1, 3)), {None, True}),
        ("persistent_workers", Stamped(torch.zeros(1000, 3)), {False, True}),
    ],
)
def test_what_is_allowed_is_tried_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, name: str, dataset: Any, values: set[Any]
) -> None:
    def seen(**given: Any) -> set[Any]:
        found = tuned(monkeypatch, dataset, **given)
        return {getattr(config, name) for config in [trial.config for trial in found.trials]}

    assert seen() < values
    assert seen(allow=(name,)) == values
