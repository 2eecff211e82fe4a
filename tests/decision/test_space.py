"""The space: every configuration legal, every veto exact, and a hash that says when trials mean the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

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

MIB = 2**20


@pytest.mark.parametrize("limits", [Limits(), Limits(shm_bytes=20 * MIB, memory_bytes=300 * MIB, descriptors=100)])
def test_every_config_is_legal_different_and_of_what_is_searched_with_fewest_workers_first(limits):
    space = Space(
        max_workers=3,
        pin_memory=(False, True),
        persistent_workers=True,
        in_order=(True, False),
        multiprocessing_contexts=(None, "spawn"),
        consumer_threads=(None, 2),
        device_prefetch=(0, 2),
        batch_sizes=(None, 16),
        drop_lasts=(None, True),
        limits=limits,
        batch=BatchCost(bytes=MIB, tensors=2),
    )
    configs = space.configs()
    workers = [config.num_workers for config in configs]
    assert workers == sorted(workers)
    assert {0} <= set(workers) <= {0, 1, 2, 3}
    assert len(set(configs)) == len(configs)
    assert all(space.veto(config) is None for config in configs)
    assert all(config.persistent_workers == (config.num_workers > 0) for config in configs)
    # AND of many workers every eighth
    assert Space(max_workers=40).worker_counts() == (*range(17), 18, 20, 22, 24, 27, 30, 33, 37, 40)


def workers(count, prefetch=2):
    return LoaderConfig(num_workers=count, prefetch_factor=prefetch)


@pytest.mark.parametrize(
    ("limit", "need", "words"),
    [
        ("shm_bytes", 13 * MIB, "of /dev/shm"),
        ("descriptors", 13 * 3 + RESERVED_DESCRIPTORS, f"{13 * 3 + RESERVED_DESCRIPTORS} of descriptors"),
        ("memory_bytes", 3 * WORKER_BASE_BYTES + 13 * MIB, "193 MiB of host memory"),
    ],
)
def test_vetoes_are_exact(limit, need, words):
    # GIVEN batches of 1 MiB in 3 tensors, and room for exactly what three workers with four batches each, and one, take
    enough, space = round(need / SAFE_SHARE) + 1, Space(max_workers=4, batch=BatchCost(bytes=MIB, tensors=3))
    assert replace(space, limits=Limits(**{limit: enough})).veto(workers(3, 4)) is None
    veto = replace(space, limits=Limits(**{limit: enough - 2})).veto(workers(3, 4))
    assert (veto.kind, veto.phase, veto.retryable) == ("infeasible", "plan", False)
    assert words in veto.message


def test_the_hash_changes_with_what_is_searched_and_not_with_what_happens_to_be_free():
    space = Space(max_workers=5)
    assert replace(space, limits=Limits(shm_bytes=1), batch=BatchCost(bytes=1), max_workers=6).hash == space.hash
    for searched in ({"workers_are_capped": True}, {"prefetch_factors": (2,)}, {"drop_lasts": (None, True)}):
        assert replace(space, **searched).hash != space.hash


@pytest.mark.parametrize(
    ("cores", "wall_s", "cpu_s", "step_s", "most"),
    [
        (4, 0.10, 0.10, 0.001, 8),  # computes: half as many again as cores, and two
        (4, 0.10, 0.02, 0.001, 32),  # waits four fifths of its time: five times the cores, half as many again, and two
        (2, 0.128, 0.0, 0.012, 29),  # waits all of it: what keeps the step busy, with room for slow batches
        (2, 0.128, 0.0, 0.1, 7),  # a slow step needs few workers, whatever they wait
        (1, 0.10, 0.10, 0.0, 4),  # one worker beside the step is always worth a try
        (4, 0.0, 0.0, 0.0, 8),  # nothing measured: taken for computing
        (4, 0.10, 0.0, 0.0, MAX_WORKERS),  # waits, and nothing is trained
    ],
)
def test_as_many_workers_as_could_help(cores, wall_s, cpu_s, step_s, most):
    assert max_useful_workers(cores, wall_s, cpu_s, step_s) == most


def test_thread_counts_are_the_default_and_halves_within_the_cores():
    counts = {(8, 8): (None, 4, 2, 1), (4, 8): (None, 4, 2, 1), (8, 4): (None, 2, 1), (1, 1): (None,)}
    assert {each: consumer_thread_counts(*each) for each in counts} == counts
    assert consumer_thread_counts(4, 8, 4) == (4, 2, 1)  # no more than the user allows


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
