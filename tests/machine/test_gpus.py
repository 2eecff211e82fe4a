"""Which GPUs CUDA shows for a mask, and what is said where NVML tells nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autotune_loader.machine.facts import inspect_machine, visible_gpus

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"


class NVMLError(Exception):
    pass


def refuses(*_: Any) -> Any:
    raise NVMLError("Not Supported")


def nvml(*uuids: str, **changes: Any) -> Any:
    """A stand-in for `pynvml`: GPUs that are named like their UUID."""
    return SimpleNamespace(
        NVMLError=NVMLError,
        **{
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: len(uuids),
            "nvmlDeviceGetHandleByIndex": uuids.__getitem__,
            "nvmlDeviceGetUUID": str,
            "nvmlDeviceGetName": str,
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=16 << 30),
            **changes,
        },
    )


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
def test_a_mask_shows_what_cuda_shows(mask: str | None, shown: list[str]) -> None:
    devices, reason = visible_gpus(nvml(A, B, C), {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    assert [(each.cuda_index, each.name) for each in devices] == list(enumerate(shown))
    assert reason is None
    assert all(each.memory_bytes == 16 << 30 for each in devices)


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetMemoryInfo"])
def test_why_nothing_is_known_is_said_and_what_is_known_is_in_the_fingerprint(refused: str) -> None:
    assert visible_gpus(nvml(A, B, C, **{refused: refuses}), {}) == ((), "NVML: Not Supported")
    assert inspect_machine(environ={}, nvml=nvml(A)).fingerprint().gpus == (A,)


def test_the_stand_in_has_only_names_that_the_real_binding_has() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert [name for name in vars(nvml()) if not hasattr(pynvml, name)] == []
