from __future__ import annotations

import pytest

from autotune_loader.machine.ordinals import PhysicalGpu, match_uuids, visible_uuids

A, B, C = "GPU-aaaa1111-0000", "GPU-aabb2222-0000", "GPU-cccc3333-0000"
PLAIN = [PhysicalGpu(uuid=uuid, migs=()) for uuid in (A, B, C)]
SPLIT = [
    PhysicalGpu(uuid=A, migs=("MIG-1111-aa", "MIG-2222-bb")),
    PhysicalGpu(uuid=B, migs=("MIG-GPU-aabb2222-0000/7/0",)),
    PhysicalGpu(uuid=C, migs=()),
]


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, [A, B, C]),
        ("", []),
        ("-1", []),
        ("0", [A]),
        ("2,0", [C, A]),
        (" 1 , 2 ", [B, C]),
        ("+1", [B]),
        ("1gpu,2ampere", [B, C]),  # read like strtoul
        ("0,-1,2", [A]),  # the first invalid entry ends the list
        ("0,7,2", [A]),
        ("0,nonsense,2", [A]),
        ("0,", [A]),
        ("0,0", []),  # a repeated one empties it
        (A, [A]),
        (f"{C},{A}", [C, A]),
        ("GPU-aaaa", [A]),
        ("GPU-AAAA", [A]),
        ("GPU-aa", []),  # ambiguous
        ("GPU-ffff", []),
        (f"{B},GPU-ffff,{A}", [B]),
        ("GPU-aaaa,GPU-aaaa1", []),
        ("MIG-1111-aa", []),
    ],
)
def test_a_mask_is_read_as_cuda_reads_it(mask: str | None, visible: list[str]) -> None:
    assert visible_uuids(mask, PLAIN) == visible


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        ("MIG-2222-bb", ["MIG-2222-bb"]),
        ("MIG-2222", ["MIG-2222-bb"]),
        ("MIG-GPU-aabb2222-0000/7/0", ["MIG-GPU-aabb2222-0000/7/0"]),
        ("MIG-ffff", []),
        ("0", ["MIG-1111-aa"]),  # a split GPU shows as its first instance
        (A, ["MIG-1111-aa"]),
        ("2", [C]),
        (None, ["MIG-1111-aa", "MIG-GPU-aabb2222-0000/7/0", C]),
    ],
)
def test_a_mask_finds_mig_instances(mask: str | None, visible: list[str]) -> None:
    assert visible_uuids(mask, SPLIT) == visible


def test_cudas_uuids_find_their_devices_in_swapped_order() -> None:
    # GIVEN CUDA, which counts the other way round and writes UUIDs without a prefix
    cuda = [C.removeprefix("GPU-"), A.removeprefix("GPU-").upper()]
    # WHEN matched THEN each ordinal has its own device
    assert match_uuids(cuda, PLAIN) == {0: C, 1: A}


def test_cudas_uuid_of_a_mig_instance_finds_it() -> None:
    assert match_uuids(["2222-bb"], SPLIT) == {0: "MIG-2222-bb"}


def test_an_unknown_uuid_leaves_the_other_ordinals_alone() -> None:
    assert match_uuids(["unknown", A], PLAIN) == {1: A}
