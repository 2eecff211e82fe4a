"""GPUs that CUDA shows for a mask, and differences to the machine that was tuned on (load_config: tests/results)."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from autotune_loader.machine.facts import inspect_machine, visible_gpus
from autotune_loader.machine.fingerprint import Fingerprint, differences

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"


def nvml(*uuids, **changes):
    """A stand-in for `pynvml`: GPUs that are named like their UUID."""
    functions = {
        "NVMLError": LookupError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: len(uuids),
        "nvmlDeviceGetHandleByIndex": uuids.__getitem__,
        "nvmlDeviceGetUUID": str,
        "nvmlDeviceGetName": str,
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=16 << 30),
    }
    return SimpleNamespace(**functions | changes)


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
    assert [(each.cuda_index, each.name) for each in devices] == list(enumerate(shown))
    assert ({each.memory_bytes for each in devices} <= {16 << 30}, reason) == (True, None)


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetMemoryInfo"])
def test_why_nothing_is_known_is_said_and_what_is_known_is_in_the_fingerprint(refused):
    refuses = {refused: Mock(side_effect=LookupError("Not Supported"))}
    assert visible_gpus(nvml(A, B, C, **refuses), {}) == ((), "NVML: Not Supported")
    assert inspect_machine(environ={}, nvml=nvml(A)).fingerprint().gpus == (A,)


def test_the_stand_in_has_only_names_that_the_real_binding_has():
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(nvml()) if not hasattr(pynvml, name)] == []


TUNED = Fingerprint(
    usable_cores=16, memory_bytes=64 << 30, shm_bytes=8 << 30, gpus=("NVIDIA H100",), dataset="Images[1000]"
)


@pytest.mark.parametrize(
    ("here", "told", "matters"),
    [
        ({"usable_cores": 32}, "16 then, 32 here; more workers may be faster", False),
        ({"usable_cores": 8}, "16 then, 8 here; its workers may be too many", True),
        ({"memory_bytes": 16 << 30}, "65536 MiB then, 16384 MiB here; its workers may not fit", True),
        ({"shm_bytes": 64 << 20}, "8192 MiB then, 64 MiB here", True),
        ({"shm_bytes": 16 << 30}, "8192 MiB then, 16384 MiB here", False),
        ({"gpus": ("NVIDIA T4",)}, "NVIDIA H100 then, NVIDIA T4 here", True),
        ({"gpus": ("NVIDIA H100", "NVIDIA H100")}, "NVIDIA H100 then, NVIDIA H100, NVIDIA H100 here", False),
        ({"dataset": "Images[2000]"}, "Images[1000] then, Images[2000] here", True),
        # the same, not known, hardly different
        ({"shm_bytes": (8 << 30) - (100 << 20), "memory_bytes": None, "dataset": "", "torch": "2.7.1"}, None, None),
    ],
    ids=str,
)
def test_a_difference_is_told_with_both_values_and_whether_it_matters(here, told, matters):
    found = differences(TUNED, replace(TUNED, **here))
    assert [each.matters for each in found] == ([] if told is None else [matters])
    assert all((told or "") in each.sentence for each in found)
