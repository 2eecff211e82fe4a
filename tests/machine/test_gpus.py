"""Which GPUs CUDA shows for a mask, and what is said where NVML tells nothing."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from autotune_loader.machine.facts import inspect_machine, visible_gpus

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"


class NVMLError(Exception):
    pass


def nvml(*uuids, **changes):
    """A stand-in for `pynvml`: GPUs that are named like their UUID."""
    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(uuids),
        "nvmlDeviceGetHandleByIndex": uuids.__getitem__,
        "nvmlDeviceGetUUID": str,
        "nvmlDeviceGetName": str,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=16 << 30),
    }
    return SimpleNamespace(NVMLError=NVMLError, **functions | changes)


@pytest.mark.parametrize(
    ("mask", "shown"),
    [
        # the expected devices stand here one by one: what CUDA shows for a mask is not computed a second time
        (None, [A, B, C]),
        ("", []),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("0,-1,2", [A]),  # the first invalid entry ends the list
        ("GPU-aa", []),  # ambiguous
        (f"GPU-cccc,{A}", [C, A]),
        (f"{B},GPU-ffff,{A}", [B]),
    ],
)
def test_a_mask_shows_what_cuda_shows(mask, shown):
    devices, reason = visible_gpus(nvml(A, B, C), {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert [(each.cuda_index, each.name, each.memory_bytes) for each in devices] == [
        (index, name, 16 << 30) for index, name in enumerate(shown)
    ]
    assert reason is None


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetMemoryInfo"])
def test_why_nothing_is_known_is_said_and_what_is_known_is_in_the_fingerprint(refused):
    refuses = {refused: Mock(side_effect=NVMLError("Not Supported"))}
    assert visible_gpus(nvml(A, B, C, **refuses), {}) == ((), "NVML: Not Supported")
    assert inspect_machine(environ={}, nvml=nvml(A)).fingerprint().gpus == (A,)


def test_the_stand_in_has_only_names_that_the_real_binding_has():
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(nvml()) if not hasattr(pynvml, name)] == []
