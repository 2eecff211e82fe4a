"""The space: every configuration legal, every veto exact, and a hash that says when trials mean the same."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune_loader.decision.space import (
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
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import GpuUse, MemoryUse
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

MIB = 2**20


def subset(*values):
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(tuple)


def spaces():
    return st.builds(
        Space,
        max_workers=st.integers(0, 3),
        prefetch_factors=subset(1, 2, 4, 8),
        pin_memory=subset(False, True),
        persistent_workers=st.booleans(),
        in_order=subset(True, False),
        multiprocessing_contexts=subset(None, "fork", "spawn"),
        sharing_strategies=subset(None, "file_system"),
        consumer_threads=subset(None, 1, 2),
        device_prefetch=subset(0, 2),
        batch_sizes=subset(None, 16, 32),
        drop_lasts=subset(None, False, True),
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
        assert config.drop_last in space.drop_lasts
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


@pytest.mark.process
def test_the_hash_is_the_same_in_another_process():
    space = Space(max_workers=5, pin_memory=(False, True))
    code = (
        "from autotune_loader.decision.space import Space; print(Space(max_workers=5, pin_memory=(False, True)).hash)"
    )
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
        replace(space, drop_lasts=(None, True)),
    ]
    assert len({space.hash, *(other.hash for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("cores", "wall_s", "cpu_s", "step_s", "most"),
    [
        (4, 0.10, 0.10, 0.001, 8),  # computes: half as many again as cores, and two
        (4, 0.10, 0.02, 0.001, 32),  # waits four fifths of its time: five times the cores, half as many again, and two
        (2, 0.128, 0.0, 0.012, 29),  # waits all of it: what keeps the step busy, with room for slow batches
        (2, 0.128, 0.0, 0.1, 7),  # a slow step needs few workers, whatever they wait
        (1, 0.10, 0.10, 0.0, 4),  # one worker beside the step is always worth a try
        (4, 0.0, 0.0, 0.0, 8),  # nothing measured: taken for computing
        (96, 0.10, 0.10, 0.0, MAX_WORKERS),
        (4, 0.10, 0.0, 0.0, MAX_WORKERS),  # waits, and nothing is trained
        (4, 0.10, 0.30, 0.0, 8),  # a fetch that uses several threads
    ],
)
def test_as_many_workers_as_could_help(cores, wall_s, cpu_s, step_s, most):
    assert max_useful_workers(cores, wall_s, cpu_s, step_s) == most


@pytest.mark.parametrize(
    ("cores", "default", "counts"),
    [(4, 4, (None, 2, 1)), (4, 8, (None, 4, 2, 1)), (8, 4, (None, 2, 1)), (1, 1, (None,)), (6, 6, (None, 3, 1))],
)
def test_thread_counts_are_the_default_and_halves(cores, default, counts):
    assert consumer_thread_counts(cores, default) == counts


# What the twin knows nothing of


def test_plain_configs_have_the_first_value_of_every_knob_that_the_twin_does_not_know():
    space = Space(
        max_workers=2,
        batch_sizes=(None, 64),
        drop_lasts=(None, True),
        sharing_strategies=(None, "file_system"),
        multiprocessing_contexts=("spawn", "fork"),
    )
    plain = space.modelled_configs()
    assert len(plain) * 2**4 > len(space.configs()) > len(plain)
    assert {(config.batch_size, config.drop_last, config.sharing_strategy) for config in plain} == {(None, None, None)}
    assert all(space.is_modelled(config) for config in plain)
    assert {config.multiprocessing_context for config in plain if config.num_workers} == {"spawn"}


def test_variants_change_one_knob_and_only_where_that_is_legal():
    space = Space(max_workers=2, batch_sizes=(None, 64, 128), multiprocessing_contexts=(None, "forkserver"))
    config = workers(2)
    assert space.variants(config, "batch_size") == (replace(config, batch_size=64), replace(config, batch_size=128))
    assert space.variants(config, "multiprocessing_context") == (replace(config, multiprocessing_context="forkserver"),)
    assert space.variants(LoaderConfig(), "multiprocessing_context") == ()
    assert space.variants(config, "drop_last") == ()
    assert space.plain(space.variants(config, "batch_size")[0]) == config


def test_a_larger_batch_needs_the_memory_of_its_samples():
    # GIVEN batches of 1 MiB with 8 samples, and room for 40 batches in flight
    batch = BatchCost(bytes=MIB, samples=8)
    space = Space(max_workers=4, batch=batch, batch_sizes=(None, 64), limits=Limits(shm_bytes=40 * MIB))
    # THEN four workers with two each are fine, but not with batches of eight times the size
    assert space.veto(workers(4)) is None
    assert "72 MiB of /dev/shm" in space.veto(replace(workers(4), batch_size=64)).message
    # AND without workers the batch itself must fit
    tight = replace(space, limits=Limits(memory_bytes=8 * MIB))
    assert "host memory" in tight.veto(LoaderConfig(batch_size=64)).message
    assert tight.veto(LoaderConfig(batch_size=4)) is None


@pytest.mark.parametrize(
    ("limits", "kind"),
    [(Limits(memory_bytes=1000), "host"), (Limits(device_bytes=1000), "device"), (Limits(), None)],
)
def test_a_tuned_batch_size_leaves_a_margin_of_memory(limits, kind):
    space = Space(max_workers=1, limits=limits)
    probe = SimulatedProbe(SimulatedMachine(), FakeClock())
    burst = replace(
        probe.burst(LoaderConfig(), BurstPlan()), memory=MemoryUse(rss_bytes=950), gpu=GpuUse(memory_bytes=950)
    )
    failure = space.over_margin(LoaderConfig(batch_size=64), burst)
    assert (failure is None) == (kind is None)
    assert kind is None or f"of {kind} memory, more than 90%" in failure.message
    assert space.over_margin(LoaderConfig(), burst) is None
