"""The space: every configuration legal, every veto exact, and a hash that says when trials mean the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_loader.config import LoaderConfig
from autotune_loader.space import (
    MAX_WORKERS,
    RESERVED_DESCRIPTORS,
    SAFE_SHARE,
    WORKER_BASE_BYTES,
    BatchCost,
    Limits,
    Space,
    consumer_thread_counts,
    max_useful_workers,
)

MIB = 2**20


def subset(*values):
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


def spaces():
    return st.builds(
        Space,
        max_workers=st.integers(0, 12),
        prefetch_factors=subset(1, 2, 4, 8),
        pin_memory=subset(False, True),
        persistent_workers=st.booleans(),
        in_order=subset(True, False),
        multiprocessing_contexts=subset(None, "fork", "spawn"),
        sharing_strategies=subset(None, "file_system"),
        consumer_threads=subset(None, 1, 2),
        device_prefetch=subset(0, 2),
        batch_sizes=subset(None, 16, 32),
        drop_last=st.none() | st.booleans(),
        limits=st.builds(
            Limits,
            shm_bytes=st.none() | st.integers(1, 64 * MIB),
            memory_bytes=st.none() | st.integers(1, 4096 * MIB),
            descriptors=st.none() | st.integers(1, 1024),
        ),
        batch=st.builds(BatchCost, bytes=st.integers(0, 8 * MIB), tensors=st.integers(0, 8)),
    )


@given(spaces())
def test_every_config_is_legal_different_and_not_vetoed(space):
    configs = space.configs()
    assert all(space.veto(config) is None for config in configs)
    assert len(set(configs)) == len(configs)


@given(spaces())
def test_configs_come_with_fewest_workers_first_and_none_is_always_possible(space):
    workers = [config.num_workers for config in space.configs()]
    assert workers == sorted(workers)
    assert workers[0] == 0
    assert workers[-1] <= space.max_workers


@given(spaces())
def test_configs_vary_only_what_is_searched(space):
    for config in space.configs():
        assert config.drop_last == space.drop_last
        assert config.persistent_workers == (space.persistent_workers and config.num_workers > 0)
        assert config.consumer_threads in space.consumer_threads


def test_worker_counts_are_all_up_to_sixteen_then_eighths():
    counts = Space(max_workers=40).worker_counts()
    assert counts == (*range(17), 18, 20, 22, 24, 27, 30, 33, 37, 40)


@given(st.integers(0, MAX_WORKERS))
def test_worker_counts_rise_from_none_to_the_most(most):
    counts = Space(max_workers=most).worker_counts()
    assert counts[0] == 0
    assert counts[-1] == most
    assert list(counts) == sorted(set(counts))


def workers(count, prefetch=2):
    return LoaderConfig(num_workers=count, prefetch_factor=prefetch)


def test_the_shared_memory_veto_is_exact_to_the_byte():
    # GIVEN batches of 1000 bytes and exactly enough room for (3 * 4 + 1) of them
    batch, in_flight = BatchCost(bytes=1000), 3 * 4 + 1
    enough = round(in_flight * 1000 / SAFE_SHARE) + 1
    # THEN three workers with four batches each are fine, and not with less room
    assert Space(max_workers=4, batch=batch, limits=Limits(shm_bytes=enough)).veto(workers(3, 4)) is None
    veto = Space(max_workers=4, batch=batch, limits=Limits(shm_bytes=enough - 2)).veto(workers(3, 4))
    assert (veto.kind, veto.phase, veto.retryable) == ("infeasible", "plan", False)
    assert "/dev/shm" in veto.message


def test_the_descriptor_veto_is_exact():
    batch, need = BatchCost(tensors=3), (2 * 4 + 1) * 3 + RESERVED_DESCRIPTORS
    enough = round(need / SAFE_SHARE) + 1
    assert Space(max_workers=4, batch=batch, limits=Limits(descriptors=enough)).veto(workers(2, 4)) is None
    veto = Space(max_workers=4, batch=batch, limits=Limits(descriptors=enough - 2)).veto(workers(2, 4))
    assert f"{need} of descriptors" in veto.message


def test_the_memory_veto_counts_workers_and_batches_in_flight():
    batch, need = BatchCost(bytes=MIB), 4 * WORKER_BASE_BYTES + (4 * 8 + 1) * MIB
    space = Space(max_workers=4, batch=batch)
    assert space.memory_need(workers(4, 8)) == need
    enough = round(need / SAFE_SHARE) + 1
    assert replace(space, limits=Limits(memory_bytes=enough)).veto(workers(4, 8)) is None
    veto = replace(space, limits=Limits(memory_bytes=enough - 2)).veto(workers(4, 8))
    assert f"{need / MIB:.0f} MiB of host memory" in veto.message


def test_no_worker_is_never_vetoed():
    space = Space(max_workers=2, limits=Limits(shm_bytes=1, memory_bytes=1, descriptors=1), batch=BatchCost(bytes=MIB))
    assert {config.num_workers for config in space.configs()} == {0}


def test_the_hash_is_the_same_in_another_process():
    space = Space(max_workers=5, pin_memory=(False, True))
    code = "from autotune_loader.space import Space; print(Space(max_workers=5, pin_memory=(False, True)).hash)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == space.hash


def test_the_hash_changes_with_what_is_searched_and_not_with_what_happens_to_be_free():
    space = Space(max_workers=5)
    assert replace(space, limits=Limits(shm_bytes=1), batch=BatchCost(bytes=1)).hash == space.hash
    others = [
        replace(space, max_workers=6),
        replace(space, prefetch_factors=(2,)),
        replace(space, persistent_workers=True),
        replace(space, consumer_threads=(None, 1)),
        replace(space, drop_last=True),
    ]
    assert len({space.hash, *(other.hash for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("cores", "wall_s", "cpu_s", "most"),
    [
        (4, 0.10, 0.10, 6),  # computes: one and a half per core
        (4, 0.10, 0.01, 16),  # waits: four per core
        (1, 0.10, 0.10, 2),  # one worker beside the step is always worth a try
        (4, 0.0, 0.0, 6),  # nothing measured: taken for computing
        (96, 0.10, 0.10, MAX_WORKERS),
        (96, 0.10, 0.0, MAX_WORKERS),
        (4, 0.10, 0.30, 6),  # a fetch that uses several threads
    ],
)
def test_as_many_workers_as_could_help(cores, wall_s, cpu_s, most):
    assert max_useful_workers(cores, wall_s, cpu_s) == most


@pytest.mark.parametrize(
    ("cores", "default", "counts"),
    [(4, 4, (None, 2, 1)), (4, 8, (None, 4, 2, 1)), (8, 4, (None, 2, 1)), (1, 1, (None,)), (6, 6, (None, 3, 1))],
)
def test_thread_counts_are_the_default_and_halves(cores, default, counts):
    assert consumer_thread_counts(cores, default) == counts
