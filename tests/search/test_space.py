"""The space: what Optuna proposes is what runs, every veto is exact, and costs are compared as people would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest

from autotune_loader.search.rule import begin_with, plain_rule
from autotune_loader.search.space import (
    RESERVED_DESCRIPTORS,
    SAFE_SHARE,
    WORKER_BASE_BYTES,
    BatchCost,
    Context,
    Limits,
    Space,
)
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BurstPlan, MemoryUse
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe

MIB = 2**20
RICH = Space(
    pin_memory=(True, False),
    device_prefetch=(0, 1, 2),
    in_order=(True, False),
    batch_sizes=(None, 64, 16),
    persistent_workers=True,
    multiprocessing_context="forkserver",
)


def workers(count: int, prefetch: int = 2, **more: Any) -> LoaderConfig:
    return LoaderConfig(num_workers=count, prefetch_factor=prefetch if count else None, **more)


def test_every_candidate_is_legal_different_and_changes_one_unmodelled_knob_at_most() -> None:
    limits = Limits(shm_bytes=20 * MIB, memory_bytes=300 * MIB, descriptors=100)
    space = replace(RICH, max_workers=3, limits=limits, batch=BatchCost(bytes=MIB, tensors=2))
    configs = space.candidates()
    assert [config.num_workers for config in configs] == sorted(config.num_workers for config in configs)
    assert {0} < {config.num_workers for config in configs} <= {0, 1, 2, 3}
    assert len(set(configs)) == len(configs)
    assert all(space.veto(config) is None for config in configs)
    assert all(config.persistent_workers == (space.persistent_workers and config.num_workers > 0) for config in configs)
    for config in configs:
        plain, odd = space.as_set(config), ("pin_memory", "device_prefetch", "batch_size", "in_order")
        assert sum(getattr(config, name) != getattr(plain, name) for name in odd) <= 1


# What Optuna proposes


@pytest.mark.parametrize("space", [Space(), Space(max_workers=0), Space(max_workers=6, in_order=(True, False)), RICH])
def test_what_a_sampler_proposes_is_exactly_what_runs_and_what_the_study_says(space: Space) -> None:
    # GIVEN any sampler of Optuna's
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(60):
        trial = study.ask()
        config = space.suggest(trial)
        # THEN each parameter is a field of what runs, and gives it again
        assert all(getattr(config, name) == value for name, value in trial.params.items())
        assert space.config(trial.params) == config
        assert set(trial.params) <= set(space.distributions())
        study.tell(trial, 1.0)


@pytest.mark.parametrize(
    "own", [workers(96, 2), workers(4, 16), workers(3, 3, pin_memory=True), LoaderConfig()], ids=str
)
def test_the_users_own_is_proposed_as_it_is(own: LoaderConfig) -> None:
    # GIVEN a configuration of the user's that no grid has
    space = Space(max_workers=8, also=(own,))
    study = optuna.create_study()
    study.enqueue_trial(space.params(own))
    trial = study.ask()
    # THEN it runs unclipped, and the study names what ran
    assert space.suggest(trial) == own
    assert trial.params["num_workers"] == own.num_workers
    assert space.veto(own) is None
    assert own in space.candidates()
    # BUT no more workers than the cap are allowed to others
    veto = space.veto(workers(9, 1))
    assert veto is not None
    assert "num_workers=8 would work" in veto.message


# What is legal


@pytest.mark.parametrize(
    ("limit", "need", "words"),
    [
        ("shm_bytes", 13 * MIB, "of /dev/shm"),
        ("descriptors", 13 * 3 + RESERVED_DESCRIPTORS, f"{13 * 3 + RESERVED_DESCRIPTORS} of descriptors"),
        ("memory_bytes", 3 * WORKER_BASE_BYTES + 13 * MIB, "193 MiB of host memory"),
    ],
)
def test_vetoes_are_exact(limit: str, need: int, words: str) -> None:
    # GIVEN batches of 1 MiB in 3 tensors, and room for exactly what three workers with four batches each, and one, take
    enough, space = round(need / SAFE_SHARE) + 1, Space(max_workers=4, batch=BatchCost(bytes=MIB, tensors=3))
    assert replace(space, limits=Limits(**{limit: enough})).veto(workers(3, 4)) is None
    veto = replace(space, limits=Limits(**{limit: enough - 2})).veto(workers(3, 4))
    assert veto is not None
    assert (veto.kind, veto.phase, veto.retryable) == ("infeasible", "plan", False)
    assert words in veto.message
    # AND without workers nothing of it is needed
    assert replace(space, limits=Limits(**{limit: 1})).veto(LoaderConfig()) is None


def test_a_larger_batch_needs_the_memory_of_its_samples_and_a_margin() -> None:
    # GIVEN batches of 1 MiB with 8 samples, and room for 40 batches in flight
    space = Space(batch=BatchCost(bytes=MIB, samples=8), batch_sizes=(None, 64), limits=Limits(shm_bytes=40 * MIB))
    # THEN four workers with two each are fine, but not with batches of eight times the size
    assert space.veto(workers(4)) is None
    veto = space.veto(workers(4, batch_size=64))
    assert veto is not None
    assert "72 MiB of /dev/shm" in veto.message
    # AND without workers the batch itself must fit
    tight = replace(space, limits=Limits(memory_bytes=8 * MIB, device_bytes=100 * MIB))
    assert tight.veto(LoaderConfig(batch_size=64)) is not None
    assert tight.veto(LoaderConfig(batch_size=4)) is None
    # AND what a burst of it took leaves a tenth, on the host and on the device; asked of tuned sizes only
    burst = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(workers(1), BurstPlan(max_s=0.3, min_s=0.1))
    seen = replace(burst, memory=MemoryUse(rss_bytes=MIB), gpu_memory_bytes=95 * MIB)
    failure = tight.over_margin(workers(1, batch_size=16), seen)
    assert failure is not None
    assert (failure.kind, "95 of 100 MiB" in failure.message) == ("device_memory", True)
    assert tight.over_margin(workers(1), seen) is None
    assert tight.over_margin(workers(1, batch_size=16), replace(seen, gpu_memory_bytes=80 * MIB)) is None


@pytest.mark.parametrize(
    ("cheaper", "dearer"),
    [
        (workers(2), workers(3)),
        (workers(8), workers(1, batch_size=64)),
        (workers(2, pin_memory=True), workers(2)),
        (workers(2, 8), workers(2, 4)),
        (workers(0), workers(1, 8)),
    ],
    ids=["fewer workers", "the user's batch size", "what is usual", "a deeper queue that costs nothing", "no workers"],
)
def test_costs_are_compared_as_people_would(cheaper: LoaderConfig, dearer: LoaderConfig) -> None:
    space = replace(RICH, limits=Limits(memory_bytes=64 << 30))
    assert space.cost(space.as_kept(cheaper)) < space.cost(space.as_kept(dearer))


# What a search begins with


@pytest.mark.parametrize(
    ("stages", "cores", "expected"),
    [
        ({"fetch_s": 0.04, "fetch_cpu_s": 0.0, "step_s": 0.04}, 8, workers(2, 4)),
        ({"fetch_s": 0.1, "fetch_cpu_s": 0.001, "step_s": 0.01}, 2, workers(12, 2)),
        ({"fetch_s": 0.1, "fetch_cpu_s": 0.1, "step_s": 0.001}, 4, workers(5, 2)),
        ({"fetch_s": 0.1, "fetch_cpu_s": 0.0, "step_s": 0.0}, 4, workers(64, 2)),
    ],
    ids=["one keeps up", "1.15 x 10 + 1", "the cores are full", "nothing limits"],
)
def test_the_rule(stages: dict[str, float], cores: int, expected: LoaderConfig) -> None:
    assert plain_rule(cores=cores, **stages) == expected


@pytest.mark.parametrize(
    ("space", "own", "fetch_s", "expected"),
    [
        (Space(), workers(6), 0.02, [workers(6), workers(3, 4), workers(0)]),
        (Space(), workers(3, 4), 0.02, [workers(3, 4), workers(0)]),
        (Space(), None, None, [workers(4), workers(0)]),
        (Space(max_workers=0), None, 0.02, [workers(0)]),
        (RICH, LoaderConfig(), 0.02, [
            LoaderConfig(),
            workers(3, 4, pin_memory=True, persistent_workers=True, multiprocessing_context="forkserver"),
            LoaderConfig(pin_memory=True),
        ]),
    ],
    ids=["own, rule, none", "none twice", "without a first batch", "data that workers must not read", "with what is set"],
)  # fmt: skip
def test_a_search_begins_with_the_users_own_the_rule_and_no_workers(
    space: Space, own: LoaderConfig | None, fetch_s: float | None, expected: list[LoaderConfig]
) -> None:
    context = Context(usable_cores=4, step_s=0.01)
    space = replace(space, also=() if own is None else (own,))
    assert begin_with(space, context, own=own, fetch_s=fetch_s, fetch_cpu_s=0.001) == expected
