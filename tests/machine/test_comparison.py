"""Which differences to the machine that was tuned on matter; what load_config() does then is in tests/results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune_loader.machine.comparison import differences
from autotune_loader.machine.facts import Fingerprint

TUNED = Fingerprint(
    usable_cores=16,
    shm_bytes=8 << 30,
    gpus=("NVIDIA H100",),
    driver="570.10",
    torch="2.6.0+cu126",
    start_method="fork",
    thread_env={"OMP_NUM_THREADS": "1"},
    dataset="Images[1000]",
)


@pytest.mark.parametrize(
    ("field", "here", "told", "matters"),
    [
        ("usable_cores", 32, "16 then, 32 here", False),
        ("shm_bytes", 64 << 20, "8192 MiB then, 64 MiB here", True),
        ("shm_bytes", 16 << 30, "8192 MiB then, 16384 MiB here", False),
        ("gpus", ("NVIDIA T4",), "NVIDIA H100 then, NVIDIA T4 here", True),
        ("gpus", ("NVIDIA H100", "NVIDIA H100"), "NVIDIA H100 then, NVIDIA H100, NVIDIA H100 here", False),
        ("driver", "575.01", "570.10 then, 575.01 here", False),
        ("torch", "2.7.1", "2.6.0+cu126 then, 2.7.1 here", True),
        ("torch", "2.6.1+cu124", "2.6.0+cu126 then, 2.6.1+cu124 here", False),
        ("thread_env", {"OMP_NUM_THREADS": "8"}, "OMP_NUM_THREADS=1 then, OMP_NUM_THREADS=8 here", True),
        ("dataset", "Images[2000]", "Images[1000] then, Images[2000] here", True),
    ],
)
def test_a_difference_is_told_with_both_values_and_whether_it_matters(
    field: str, here: Any, told: str, matters: bool
) -> None:
    (difference,) = differences(TUNED, replace(TUNED, **{field: here}))
    assert (difference.field, difference.matters) == (field, matters)
    assert told in difference.sentence


def test_what_is_the_same_or_not_known_or_hardly_differs_is_no_difference() -> None:
    alike = replace(TUNED, shm_bytes=(8 << 30) - (100 << 20), start_method=None, dataset="")
    assert differences(TUNED, TUNED) == differences(TUNED, alike) == []
