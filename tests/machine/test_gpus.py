"""Which GPUs CUDA shows for a mask, and what is said where NVML tells nothing."""

from __future__ import annotations

import pytest

from autotune_loader.machine.gpus import visible_gpus
from tests.support import FakeGpu, FakeGpus
from tests.support.gpus import ANSWERS

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"
THREE = tuple(FakeGpu(uuid=uuid, name=uuid) for uuid in (A, B, C))
# The expected devices stand here one by one: what CUDA shows for a mask is not computed a second time.
VISIBLE: dict[str | None, list[str]] = {
    None: [A, B, C],
    "": [],
    "2,0": [C, A],
    " 1 , 2 ": [B, C],
    "0,-1,2": [A],  # the first invalid entry ends the list
    "GPU-aa": [],  # ambiguous
    f"GPU-cccc,{A}": [C, A],
    f"{B},GPU-ffff,{A}": [B],
}


@pytest.mark.parametrize("mask", VISIBLE)
def test_a_mask_shows_what_cuda_shows(mask: str | None) -> None:
    environ = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    devices, reason = visible_gpus(FakeGpus(THREE), environ)
    assert [(each.cuda_index, each.name) for each in devices] == list(enumerate(VISIBLE[mask]))
    assert reason is None
    assert all(each.memory_bytes == 16 << 30 for each in devices)


def test_why_nothing_is_known_is_said() -> None:
    assert visible_gpus(FakeGpus(has_driver=False)) == ((), "NVML: NVML Shared Library Not Found")
    refusing = FakeGpus(THREE, unsupported=["nvmlDeviceGetMemoryInfo"])
    assert visible_gpus(refusing, {}) == ((), "NVML: Not Supported")


def test_the_fake_has_only_names_that_the_real_binding_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = [*ANSWERS, *(name for name in vars(FakeGpus) if name.startswith("NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []
