"""The space: what Optuna proposes is what runs, every veto is exact, and costs are compared as people would."""

from dataclasses import replace

import optuna
import pytest

from autotune_loader.search.belief import Belief
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
from autotune_loader.values import LoaderConfig, MemoryUse
from tests.support import SimulatedMachine, simulated_trials, with_workers

MIB = 2**20
RICH = Space(
    pin_memory=(True, False), device_prefetch=(0, 1, 2), in_order=(True, False), batch_size=(None, 64, 16),
    persistent_workers=True, multiprocessing_context="forkserver",
)  # fmt: skip


def test_every_candidate_is_legal_different_and_changes_one_unmodelled_knob_at_most():
    limits = Limits(shm_bytes=20 * MIB, memory_bytes=300 * MIB, descriptors=100)
    space = replace(RICH, max_workers=3, limits=limits, batch=BatchCost(bytes=MIB, tensors=2))
    configs = space.candidates()
    assert {0} < {config.num_workers for config in configs} <= {0, 1, 2, 3}
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert space.veto(config) is None
        assert config.persistent_workers == (config.num_workers > 0)
        plain, odd = (
            space.as_set(config),
            ("pin_memory", "device_prefetch", "batch_size", "in_order"),
        )
        assert sum(getattr(config, name) != getattr(plain, name) for name in odd) <= 1


@pytest.mark.parametrize(
    "space", [Space(), Space(max_workers=0), Space(max_workers=6, in_order=(True, False)), RICH]
)
def test_what_a_sampler_proposes_is_exactly_what_runs_and_what_the_study_says(space):
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
    "own", [with_workers(96), with_workers(3, 13, pin_memory=True), LoaderConfig()], ids=str
)
def test_the_users_own_is_proposed_as_it_is(own):
    # GIVEN a configuration of the user's that no grid has
    space, study = Space(max_workers=8, also=(own,)), optuna.create_study()
    study.enqueue_trial(space.params(own))
    trial = study.ask()
    # THEN it runs unclipped, and the study names what ran
    assert space.suggest(trial) == own
    assert trial.params["num_workers"] == own.num_workers
    assert (space.veto(own), own in space.candidates()) == (None, True)
    # BUT no more workers than the cap are allowed to others
    assert "num_workers=8 would work" in vetoed(space, with_workers(9, 1)).message


def vetoed(space, config):
    veto = space.veto(config)
    assert (veto.kind, veto.phase, veto.retryable) == ("infeasible", "plan", False)
    return veto


@pytest.mark.parametrize(
    ("limit", "need", "words"),
    [
        ("shm_bytes", 2 * 13 * MIB, "of /dev/shm for two loaders"),
        (
            "descriptors",
            13 * 3 + RESERVED_DESCRIPTORS,
            f"{13 * 3 + RESERVED_DESCRIPTORS} of 113 descriptors",
        ),
        ("memory_bytes", 3 * WORKER_BASE_BYTES + 13 * MIB, "193 of 214 MiB of host memory"),
    ],
)
def test_vetoes_are_exact(limit, need, words):
    # GIVEN batches of 1 MiB in 3 tensors, and room for exactly what three workers with four batches each, and one, take
    enough, config = round(need / SAFE_SHARE) + 1, with_workers(3, 4)

    def with_room(room):
        return Space(
            max_workers=4, batch=BatchCost(bytes=MIB, tensors=3), limits=Limits(**{limit: room})
        )

    assert with_room(enough).veto(config) is None
    assert words in vetoed(with_room(enough - 2), config).message
    # AND without workers nothing of it is needed
    assert with_room(1).veto(LoaderConfig()) is None


def test_a_larger_batch_needs_the_memory_of_its_samples():
    # GIVEN batches of 1 MiB with 8 samples, and room for 40 batches in flight
    space = Space(
        batch=BatchCost(bytes=MIB, samples=8),
        batch_size=(None, 64),
        limits=Limits(shm_bytes=80 * MIB),
    )
    # THEN four workers with two each are fine, but not with batches of eight times the size
    assert space.veto(with_workers(4)) is None
    assert "144 of 80 MiB of /dev/shm" in vetoed(space, with_workers(4, batch_size=64)).message
    # AND without workers the batch itself must fit
    tight = replace(space, limits=Limits(memory_bytes=8 * MIB))
    vetoed(tight, LoaderConfig(batch_size=64))
    assert tight.veto(LoaderConfig(batch_size=4)) is None


def test_what_a_burst_of_a_tuned_batch_size_took_leaves_a_margin():
    space = Space(limits=Limits(device_bytes=100 * MIB), batch_size=(None, 16))
    burst = simulated_trials(SimulatedMachine(), with_workers(1))[0].measurement
    burst = replace(burst, memory=MemoryUse(rss_bytes=MIB), gpu_memory_bytes=95 * MIB)
    failure = space.over_margin(with_workers(1, batch_size=16), burst)
    assert failure.kind == "device_memory"
    assert "95 of 100 MiB" in failure.message
    # AND the user's own size is the user's, and less is no matter
    assert space.over_margin(with_workers(1), burst) is None
    assert (
        space.over_margin(with_workers(1, batch_size=16), replace(burst, gpu_memory_bytes=80 * MIB))
        is None
    )


COSTS = {
    "fewer workers": (with_workers(2), with_workers(3)),
    "the user's batch size": (with_workers(8), with_workers(1, batch_size=64)),
    "what is usual": (with_workers(2, pin_memory=True), with_workers(2)),
    "a deeper queue that costs nothing": (with_workers(2, 8), with_workers(2, 4)),
    "no workers": (with_workers(0), with_workers(1, 8)),
    "a queue of less memory": (with_workers(33, 2), with_workers(33, 8)),
}


@pytest.mark.parametrize(("cheaper", "dearer"), COSTS.values(), ids=COSTS)
def test_costs_are_compared_as_people_would(cheaper, dearer):
    space = replace(RICH, limits=Limits(memory_bytes=64 << 30), batch=BatchCost(bytes=18 * MIB))
    assert space.cost(space.as_kept(cheaper)) < space.cost(space.as_kept(dearer))


RULES = {
    "one keeps up": (
        {"fetch_s": 0.04, "fetch_cpu_s": 0.0, "step_s": 0.04, "cores": 8},
        with_workers(2, 4),
    ),
    "1.15 x 10 + 1": (
        {"fetch_s": 0.1, "fetch_cpu_s": 0.001, "step_s": 0.01, "cores": 2},
        with_workers(12),
    ),
    "the cores are full": (
        {"fetch_s": 0.1, "fetch_cpu_s": 0.1, "step_s": 0.001, "cores": 4},
        with_workers(5),
    ),
    "nothing limits": (
        {"fetch_s": 0.1, "fetch_cpu_s": 0.0, "step_s": 0.0, "cores": 4},
        with_workers(64),
    ),
}


@pytest.mark.parametrize(("seen", "expected"), RULES.values(), ids=RULES)
def test_the_rule(seen, expected):
    assert plain_rule(**seen) == expected


SET = {"pin_memory": True, "persistent_workers": True, "multiprocessing_context": "forkserver"}
NONE, RULE, PINNED = with_workers(0), with_workers(3, 4), with_workers(0, pin_memory=True)
BEGINNINGS = {
    "own, suggested, rule, none": (
        Space(),
        with_workers(6),
        0.02,
        [with_workers(6), with_workers(5), RULE, NONE],
    ),
    "none twice": (Space(), RULE, 0.02, [RULE, with_workers(5), NONE]),
    "the rule before no workers": (Space(), NONE, 0.02, [with_workers(5), RULE, NONE]),
    "slow batches tell of no workers": (Space(), NONE, 2.0, [with_workers(5), with_workers(64)]),
    "without a first batch": (Space(), None, None, [with_workers(5), with_workers(4), NONE]),
    "data that workers must not read": (Space(max_workers=0), None, 0.02, [NONE]),
    "with what is set, and no suggestion without it": (
        RICH,
        NONE,
        0.02,
        [with_workers(3, 4, **SET), PINNED],
    ),
}


@pytest.mark.parametrize(
    ("space", "own", "fetch_s", "expected"), BEGINNINGS.values(), ids=BEGINNINGS
)
def test_a_search_begins_with_the_users_own_what_is_suggested_and_the_rule(
    space, own, fetch_s, expected
):
    context = Context(usable_cores=4, step_s=0.01, fetch_s=fetch_s, fetch_cpu_s=0.001)
    space = replace(space, also=() if own is None else (own,))
    assert begin_with(space, context, own=own, suggested=[with_workers(5)]) == expected


COMPUTING = {"fetch_s": 0.02, "fetch_cpu_s": 0.02}
DEEPEST = {
    "workers compute beside a step of several threads": ({"step_cores": 4.0, **COMPUTING}, 2),
    "the step has one": ({"step_cores": 1.0, **COMPUTING}, 8),
    "the cores cannot keep up with it": (
        {"step_cores": 1.0, "fetch_s": 0.1, "fetch_cpu_s": 0.1},
        2,
    ),
    "workers wait": ({"step_cores": 4.0, "fetch_s": 0.02, "fetch_cpu_s": 0.002}, 8),
    "without a first batch": ({"step_cores": 4.0}, 8),
}


@pytest.mark.parametrize(("known", "deepest"), DEEPEST.values(), ids=DEEPEST)
def test_queues_are_shallow_where_filling_them_takes_the_cores_of_the_step(known, deepest):
    context = Context(usable_cores=4, step_s=0.02, **known)
    proposed = Belief(Space(), context, ()).configs
    first = begin_with(Space(), context)
    assert max(config.prefetch_factor or 0 for config in proposed) == deepest
    assert max(config.prefetch_factor or 0 for config in first) <= deepest
