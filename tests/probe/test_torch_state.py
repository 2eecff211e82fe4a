"""What the caller has set in torch: the probe trains with it, the result lists it, and no burst changes it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.inline import untouched_state
from autotune_loader.probe.step import build_step
from autotune_loader.probe.torch_state import note_of, read_torch_state, set_torch_state
from autotune_loader.values.errors import WorkloadError
from tests.support.bursts import opened, workload

CHANGES: dict[str, Any] = {
    "float32_matmul_precision": "high",
    "deterministic_algorithms": "warn",
    "default_dtype": "float64",
    "sharing_strategy": "file_system",
    "cudnn.benchmark": True,
    "cudnn.deterministic": True,
    "cudnn.allow_tf32": False,
    "autocast.cpu": "bfloat16",
    "flash_sdp": False,
}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    state = read_torch_state()
    yield
    set_torch_state(state)
    assert read_torch_state() == state


@pytest.mark.parametrize(("name", "value"), [*CHANGES.items(), ("default_device", "meta")])
def test_each_setting_is_read_set_and_listed(name: str, value: Any) -> None:
    before = read_torch_state()
    assert note_of(before) == []
    assert before[name] != value
    # WHEN it is set THEN it is read, and the note names it
    set_torch_state({name: value})
    assert read_torch_state()[name] == value
    assert f"{name}={value}" in note_of(read_torch_state())[0]
    # WHEN a step changes it in this process THEN it is put back afterwards
    with untouched_state(DataSide(dataset=[], batch_size=1)):
        set_torch_state(before)
    assert read_torch_state()[name] == value


def test_a_precision_given_by_its_newer_name_travels_too() -> None:
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch < 2.9")
    # GIVEN a precision that torch then refuses to tell by its older names
    matmul.fp32_precision = "tf32"
    # WHEN the state is read and set THEN nothing is lost, and nothing raises
    state = read_torch_state()
    assert state["cuda.matmul.fp32_precision"] == "tf32"
    assert "float32_matmul_precision" not in state
    matmul.fp32_precision = "none"
    set_torch_state(state)
    assert matmul.fp32_precision == "tf32"
    matmul.fp32_precision = "none"


def test_the_threads_of_opencv_are_carried_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [8]
    cv2 = types.SimpleNamespace(
        getNumThreads=lambda: threads[0], setNumThreads=lambda n: threads.__setitem__(0, n), getNumberOfCPUs=lambda: 8
    )
    monkeypatch.setitem(sys.modules, "cv2", cv2)
    cv2.setNumThreads(0)

    state = read_torch_state()
    assert "cv2.threads=0" in note_of(state)[0]

    cv2.setNumThreads(8)
    set_torch_state(state)
    assert threads == [0]
    monkeypatch.undo()


def tell_state(model: Any, batch: Any) -> None:
    raise RuntimeError(f"seen: {read_torch_state()!r}")


@pytest.mark.process
def test_the_probe_process_trains_with_what_this_process_has_set() -> None:
    # GIVEN settings of this process
    set_torch_state(CHANGES)
    # WHEN a step in the probe process tells its own
    what = workload([torch.ones(2)] * 8, training=TrainingSide(train_step=tell_state))
    with pytest.raises(WorkloadError, match="seen: ") as caught, opened(what):
        pass
    # THEN they are the same
    told = caught.value.user_traceback
    assert [name for name, value in CHANGES.items() if f"{name!r}: {value!r}" not in told] == []


def test_under_a_callers_autocast_each_step_sees_the_weights_of_the_one_before() -> None:
    # GIVEN autocast that is on for good, as the probe process has it, and keeps cast copies of weights until it ends
    set_torch_state({"autocast.cpu": "bfloat16"})
    model, x, y = torch.nn.Linear(4, 2), torch.rand(8, 4), torch.randint(0, 2, (8,))
    losses: list[float] = []

    def train_step(model: Any, batch: Any) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        losses.append(loss.item())
        return loss

    side = TrainingSide(model=model, train_step=train_step, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    step = build_step(side, (x, y))
    # WHEN it trains THEN the loss falls with each step
    for _ in range(4):
        step.run((x, y))
    assert losses == sorted(set(losses), reverse=True)
    assert len(losses) == 4
