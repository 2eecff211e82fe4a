"""What the caller has set in torch: the probe trains with it, the result lists it, and no burst changes it."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.inline import untouched_state
from autotune_loader.probe.step import build_step
from autotune_loader.probe.torch_state import note_of, read_torch_state, set_torch_state
from autotune_loader.values.errors import WorkloadError
from tests.support.bursts import opened, workload

CHANGES = {
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


# Since torch 2.9, which then refuses to tell the precision by its older names.
NEWER_NAME = [("cuda.matmul.fp32_precision", "tf32")] if hasattr(torch.backends.cuda.matmul, "fp32_precision") else []


@pytest.fixture(autouse=True)
def as_it_was():
    state = read_torch_state()
    yield
    set_torch_state(state)
    assert read_torch_state() == state


@pytest.fixture
def cv2(monkeypatch):
    """OpenCV, which has eight threads."""
    threads = [8]
    set_threads = lambda n: threads.__setitem__(0, n)  # noqa: E731
    cv2 = types.SimpleNamespace(getNumThreads=lambda: threads[0], setNumThreads=set_threads, getNumberOfCPUs=lambda: 8)
    monkeypatch.setitem(sys.modules, "cv2", cv2)


@pytest.mark.usefixtures("cv2")
@pytest.mark.parametrize(
    ("name", "value"), [*CHANGES.items(), *NEWER_NAME, ("default_device", "meta"), ("cv2.threads", 0)]
)
def test_each_setting_is_read_set_and_listed(name, value):
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


@pytest.mark.process
def test_the_probe_process_trains_with_what_this_process_has_set():
    set_torch_state(CHANGES)

    def tell_state(model, batch):
        raise RuntimeError(f"seen: {read_torch_state()!r}")

    # WHEN a step in the probe process tells its own
    what = workload([torch.ones(2)] * 8, training=TrainingSide(train_step=tell_state))
    with pytest.raises(WorkloadError, match="seen: ") as caught, opened(what):
        pass
    # THEN they are the same
    told = caught.value.user_traceback
    assert [name for name, value in CHANGES.items() if f"{name!r}: {value!r}" not in told] == []


def test_under_a_callers_autocast_each_step_sees_the_weights_of_the_one_before():
    # GIVEN autocast that is on for good, as the probe process has it, and keeps cast copies of weights until it ends
    set_torch_state({"autocast.cpu": "bfloat16"})
    model, x, y, losses = torch.nn.Linear(4, 2), torch.rand(8, 4), torch.randint(0, 2, (8,)), []

    def train_step(model, batch):
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
