"""What a change of the step brings: measured in this process with autocast, and once for real with torch.compile."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.acceleration import is_same_loss, measure_acceleration, relative_difference
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.probe.step import build_step
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trial import Acceleration, AccelerationKind

QUICK = BurstPlan(max_s=0.2, min_s=0.1, relative_error=0.1, deadline_s=120.0)
NUMBERS = torch.Generator().manual_seed(0)
BATCH = [torch.rand(8, 16, generator=NUMBERS), torch.randint(0, 3, (8,), generator=NUMBERS)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps so small take longer with more threads, and much longer on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(*more: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), *more, torch.nn.Linear(32, 3))


class DifferentInHalf(torch.nn.Module):
    """Gives something else under autocast, as a model does that does not bear rounding."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 3)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out * self.factor if torch.is_autocast_enabled("cpu") else out


def amp(model: torch.nn.Module, **training: Any) -> Acceleration | Failure:
    made: list[TrainingSide] = []

    def fresh() -> TrainingSide:
        import copy

        made.append(TrainingSide(model=copy.deepcopy(model), device="cpu", **training))
        return made[-1]

    return measure_acceleration("amp", fresh, BATCH, build_step(fresh(), BATCH), QUICK)


def test_autocast_is_timed_in_pairs_and_its_losses_are_compared() -> None:
    # GIVEN a model that bears rounding WHEN autocast is measured
    found = amp(small_model())

    # THEN there is a ratio with its interval, and the losses are the same but for rounding
    assert isinstance(found, Acceleration)
    assert found.name == "autocast(bfloat16)"
    assert found.speedup is not None
    assert found.speedup.low < found.speedup.value < found.speedup.high
    assert found.speedup.count >= 4
    assert found.loss_difference is not None
    assert 0 < found.loss_difference < 0.02
    assert (found.loss_noise, found.is_same_loss) == (0.0, True)


@pytest.mark.parametrize("factor", [30.0, math.nan])
def test_a_change_that_trains_something_else_is_found_out(factor: float) -> None:
    found = amp(DifferentInHalf(factor))
    assert isinstance(found, Acceleration)
    assert found.is_same_loss is False


def test_dropout_differs_anyway_and_is_no_reason_to_object() -> None:
    # GIVEN a model whose loss depends on random numbers WHEN autocast is measured
    found = amp(small_model(torch.nn.Dropout(0.9)))

    # THEN two plain runs differ, and that is told beside the difference
    assert isinstance(found, Acceleration)
    assert found.loss_noise is not None
    assert found.loss_noise > 0.02
    assert found.is_same_loss is True


class OnTheWay:
    """A batch that counts how often it is brought to the device."""

    def __init__(self, x: torch.Tensor, copies: list[Any], *, is_there: bool = False) -> None:
        self.x, self.copies, self.is_there = x, copies, is_there

    def to(self, device: Any, non_blocking: bool = False) -> OnTheWay:
        if not self.is_there:
            self.copies.append(device)
        return OnTheWay(self.x, self.copies, is_there=True)


def test_the_batch_lies_on_the_device_and_there_is_one_model_beside_the_plain_one() -> None:
    # GIVEN a batch whose copies are counted, and models whose lives are
    copies: list[Any] = []
    batch = OnTheWay(BATCH[0], copies)
    made: list[weakref.ref[torch.nn.Module]] = []
    alive: list[int] = []

    def fresh() -> TrainingSide:
        alive.append(sum(each() is not None for each in made))
        model = small_model()
        made.append(weakref.ref(model))
        return TrainingSide(model=model, train_step=lambda model, batch: model(batch.x).square().mean())

    plain = build_step(fresh(), batch)
    plain.run(batch)
    copies.clear()
    # WHEN changes are measured, one after the other
    for _ in range(2):
        assert isinstance(measure_acceleration("amp", fresh, batch, plain, QUICK), Acceleration)
    # THEN nothing was copied in their rounds, and no model was made while there were two
    assert len(copies) == 2
    assert max(alive) == 1


def test_a_step_without_a_loss_is_timed_but_not_judged() -> None:
    found = amp(small_model(), train_step=lambda model, batch: model(batch[0]).sum().backward())
    assert isinstance(found, Acceleration)
    assert found.speedup is not None
    assert (found.loss_difference, found.is_same_loss) == (None, None)


def test_what_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a machine without a C++ compiler
    def no_compiler(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    side = TrainingSide(model=small_model(), device="cpu")

    # WHEN torch.compile is measured THEN what it said comes back
    failure = measure_acceleration("compile", lambda: side, BATCH, build_step(side, BATCH), QUICK)
    assert isinstance(failure, Failure)
    assert "No working C++ compiler found" in failure.message


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([2.0, 1.0], [2.0, 1.0], 0.0),
        ([2.0, 1.0], [2.1, 1.2], 0.2),
        ([1.0, None], [1.1, None], 0.1),
        ([None], [None], None),
        ([1.0], [math.nan], math.inf),
        ([math.nan], [math.nan], None),
    ],
)
def test_losses_differ_by_the_largest_relative_difference(
    expected: list[float | None], found: list[float | None], difference: float | None
) -> None:
    assert relative_difference(expected, found) == (None if difference is None else pytest.approx(difference))


def test_compiling_is_judged_more_strictly_than_half_precision_and_noise_excuses_both() -> None:
    assert is_same_loss("amp", 0.01, noise=0.0)
    assert not is_same_loss("compile", 0.01, noise=0.0)
    assert is_same_loss("compile", 0.01, noise=0.01)


def probe_of(model: torch.nn.Module, **training: Any) -> ProcessProbe:
    dataset = TensorDataset(torch.rand(64, 16), torch.randint(0, 3, (64,)))
    sampler = torch.utils.data.SequentialSampler(dataset)
    data = DataSide(dataset=dataset, batch_size=8, sampler=sampler)
    workload = Workload(data=data, training=TrainingSide(model=model, **{"device": "cpu", **training}))
    return ProcessProbe(Payload.of(workload, 1 << 30), inspect_machine())


@pytest.mark.process
def test_torch_compile_in_the_probe_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "TORCHINDUCTOR_COMPILE_THREADS", "1"
    )  # a pool of compilers takes longer to start than this takes
    # GIVEN a model of torch's own modules, which compile only from outside
    probe = probe_of(small_model())
    try:
        # WHEN it is compiled and timed
        found = probe.acceleration("compile", 1, QUICK)
    finally:
        probe.close()
    # THEN it was compiled for real: other kernels, the same losses
    assert isinstance(found, Acceleration)
    assert found.note is None
    assert found.speedup is not None
    assert found.is_same_loss is True


@pytest.mark.process
def test_a_compilation_that_does_not_end_in_time_costs_only_the_process() -> None:
    probe = probe_of(small_model())
    try:
        probe.start()
        # GIVEN a deadline that no compiler meets WHEN it is compiled
        failure = probe.acceleration("compile", None, BurstPlan(max_s=0.2, deadline_s=0.5))
        # THEN that is told, and the next burst works
        assert isinstance(failure, Failure)
        assert failure.kind == "deadline"
        assert isinstance(probe.burst(LoaderConfig(), QUICK), Measurement)
    finally:
        probe.close()


@pytest.mark.process
def test_a_step_that_ignores_the_model_it_is_given_is_not_taken_for_compiled() -> None:
    outer = small_model()
    probe = probe_of(
        small_model(), train_step=lambda model, batch: torch.nn.functional.cross_entropy(outer(batch[0]), batch[1])
    )
    try:
        found = probe.acceleration("compile", None, QUICK)
    finally:
        probe.close()
    assert isinstance(found, Acceleration)
    assert found.speedup is None
    assert "nothing was compiled" in (found.note or "")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["amp", "compile"])
def test_on_a_gpu_the_change_is_timed_to_its_end_and_judged(kind: AccelerationKind) -> None:
    # GIVEN a step on CUDA that is mostly matrices
    wide = torch.nn.Sequential(torch.nn.Linear(16, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 3))
    probe = probe_of(wide, device="cuda")
    try:
        # WHEN one change is measured there
        found = probe.acceleration(kind, None, QUICK)
    finally:
        probe.close()
    # THEN it has a ratio, and its losses are the same
    assert isinstance(found, Acceleration), found
    assert found.note is None
    assert found.speedup is not None
    assert found.is_same_loss is True
