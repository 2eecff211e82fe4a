"""Which differences to the machine that was tuned on matter; what load_config() does then is in tests/results."""

from dataclasses import replace

import pytest

from autotune_loader.machine.fingerprint import Fingerprint, differences

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
