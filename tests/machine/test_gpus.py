"""Which GPUs CUDA shows for a mask, and what NVML says of them; a refused call takes its own value only."""

from __future__ import annotations

import logging

import pytest

from autotune_loader.machine.gpus import Gpus
from tests.support import FakeGpu, FakeGpus
from tests.support.gpus import ANSWERS

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"
THREE = tuple(FakeGpu(uuid=uuid, name=uuid) for uuid in (A, B, C))
# The expected devices stand here one by one: what CUDA shows for a mask is not computed a second time.
VISIBLE: dict[str | None, list[str]] = {
    None: [A, B, C],
    "": [],
    "0": [A],
    "2,0": [C, A],
    " 1 , 2 ": [B, C],
    "0,-1,2": [A],  # the first invalid entry ends the list
    C: [C],
    "GPU-aa": [],  # ambiguous
    f"GPU-cccc,{A}": [C, A],
    f"{B},GPU-ffff,{A}": [B],
}


@pytest.mark.parametrize("mask", VISIBLE)
def test_a_mask_shows_what_cuda_shows(mask: str | None) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    devices = Gpus(FakeGpus(THREE), environ=environ).devices()
    assert [(each.cuda_index, each.name) for each in devices] == list(enumerate(VISIBLE[mask]))


FOUND = {"devices": 1, "name": "H100", "memory_bytes": 16 << 30, "driver": "570.00"}


@pytest.mark.parametrize(
    ("refused", "lost"),
    [
        ("nvmlDeviceGetCount", {"devices": 0}),
        ("nvmlDeviceGetUUID", {}),
        ("nvmlDeviceGetName", {"name": "unknown GPU"}),
        ("nvmlDeviceGetMemoryInfo", {"memory_bytes": None}),
        ("nvmlSystemGetDriverVersion", {"driver": None}),
    ],
)
def test_a_refused_call_takes_its_own_value_only(refused: str, lost: dict[str, object]) -> None:
    # GIVEN an NVML that refuses one call, as under WSL2 and on a Jetson
    gpus = Gpus(FakeGpus([FakeGpu(uuid=A, name="H100")], unsupported=[refused]), environ={})
    # WHEN all is asked THEN nothing is raised, and what needs another call is there
    found: dict[str, object] = {"devices": len(gpus.devices()), "driver": gpus.driver}
    for each in gpus.devices():
        found |= {name: getattr(each, name) for name in ("name", "memory_bytes")}
    assert found.items() <= (FOUND | lost).items()
    assert gpus.reason is None


def test_a_machine_without_a_driver_has_one_reason_and_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    nvml = FakeGpus(has_driver=False)
    gpus = Gpus(nvml, environ={})
    with caplog.at_level(logging.DEBUG, logger="autotune_loader"):
        answers = (gpus.devices(), gpus.driver, gpus.reason, gpus.devices())
    # THEN NVML was tried once, and it was said once
    assert answers == ((), None, "nvmlInit: NVML Shared Library Not Found", ())
    assert (nvml.calls, len(caplog.records)) == (["nvmlInit"], 1)


def test_the_fake_has_only_names_that_the_real_binding_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [*ANSWERS, *(name for name in vars(FakeGpus) if name.startswith("NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []
