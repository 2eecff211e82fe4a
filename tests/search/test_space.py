"""The space: what Optuna proposes runs, every veto is exact, and costs are as people say."""

from dataclasses import replace

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from autotune_loader.search.belief import Belief
from autotune_loader.search.rule import begin_with, plain_rule
from autotune_loader.search.space import (
    RESERVED_DESCRIPTORS,
    SAFE_SHARE,
    UNMODELLED,
    WORKER_BASE_BYTES,
    BatchCost,
    Context,
    Limits,
    Space,
    closest,
)
from autotune_loader.values import LoaderConfig
from tests.support import with_workers

MIB = 2**20
NONE = LoaderConfig()
RICH = Space(
    pin_memory=(True, False), device_prefetch=(0, 1, 2), in_order=(True, False),
    batch_size=(None, 64, 16), persistent_workers=True, multiprocessing_context="forkserver",
)  # fmt: skip
SPACES = st.builds(
    Space,
    max_workers=st.integers(1, 40),
    min_workers=st.integers(0, 1),
    pin_memory=st.sampled_from([(False,), (True, False), (False, True)]),
    device_prefetch=st.sampled_from([(0,), (0, 1, 2)]),
    in_order=st.sampled_from([(True,), (True, False)]),
    batch_size=st.sampled_from([(None,), (None, 64, 16)]),
    persistent_workers=st.booleans(),
    multiprocessing_context=st.sampled_from([None, "spawn"]),
    limits=st.builds(
        Limits,
        shm_bytes=st.none() | st.integers(10 * MIB, 1000 * MIB),
        memory_bytes=st.none() | st.integers(100 * MIB, 2000 * MIB),
        descriptors=st.none() | st.integers(100, 1000),
    ),
    batch=st.just(BatchCost(bytes=MIB, tensors=2, samples=32)),
)


@settings(max_examples=40)
@given(SPACES)
def test_candidates_are_legal_and_parameters_make_them(space):
    found = space.candidates()
    assert len(set(found)) == len(found)
    for config in found:
        assert space.holds(config)
        assert space.config(space.params(config)) == config
        assert space.min_workers <= config.num_workers <= space.max_workers
        workers = config.num_workers > 0
        assert config.persistent_workers == (space.persistent_workers and workers)
        # AND one setting is changed at most, beside workers and prefetch
        plain = space.as_set(config)
        assert sum(getattr(config, name) != getattr(plain, name) for name in UNMODELLED) <= 1


@settings(max_examples=20)
@given(SPACES, st.integers(0, 1000))
def test_what_a_sampler_proposes_is_what_runs(space, seed):
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    for _ in range(5):
        config = space.suggest(trial := study.ask())
        assert {name: getattr(config, name) for name in trial.params} == trial.params
        assert space.config(trial.params) == config
        assert set(trial.params) <= set(space.distributions())


@pytest.mark.parametrize(
    "own", [with_workers(96), with_workers(3, 13, pin_memory=True), NONE], ids=str
)
def test_the_users_own_is_proposed_as_it_is(own):
    # GIVEN a configuration of the user's that no grid has
    space, study = Space(max_workers=8, also=(own,)), optuna.create_study()
    study.enqueue_trial(space.params(own))
    trial = study.ask()
    # THEN it runs unclipped, and the study names what ran
    assert space.suggest(trial) == own
    assert trial.params["num_workers"] == own.num_workers
    assert space.veto(own) is None
    assert own in space.candidates()
    # BUT no more workers than the cap, or deeper queues, are allowed to others
    assert "Try num_workers=8." in vetoed(space, with_workers(9, 1))
    assert not Space().holds(with_workers(2, 9))


def vetoed(space, config):
    veto = space.veto(config)
    assert veto.kind == "infeasible"
    assert not veto.retryable
    return veto.message


FDS = 13 * 3 + RESERVED_DESCRIPTORS


@pytest.mark.parametrize(
    ("limit", "need", "words"),
    [
        ("shm_bytes", 2 * 13 * MIB, "of /dev/shm for two loaders"),
        ("descriptors", FDS, f"{FDS} of 113 descriptors"),
        ("memory_bytes", 3 * WORKER_BASE_BYTES + 13 * MIB, "193 MiB of 214 MiB of host memory"),
    ],
)
def test_vetoes_are_exact(limit, need, words):
    # GIVEN batches of 1 MiB in 3 tensors, and room for four with each of three workers, and one
    enough, config = round(need / SAFE_SHARE) + 1, with_workers(3, 4)
    space = Space(max_workers=4, batch=BatchCost(bytes=MIB, tensors=3))
    roomy, tight, none = (
        replace(space, limits=Limits(**{limit: room})) for room in (enough, enough - 2, 1)
    )
    assert roomy.veto(config) is None
    assert words in vetoed(tight, config)
    # AND without workers nothing of it is needed
    assert none.veto(NONE) is None


def test_data_may_need_a_worker():
    assert "Try num_workers=1." in vetoed(Space(min_workers=1), NONE)


def test_a_larger_batch_needs_memory_of_its_samples():
    # GIVEN batches of 1 MiB with 8 samples, and room for 40 batches in flight
    limits, sizes = Limits(shm_bytes=80 * MIB), (None, 64)
    space = Space(batch=BatchCost(bytes=MIB, samples=8), batch_size=sizes, limits=limits)
    # THEN four workers with two each are fine, but not with batches of eight times the size
    assert space.veto(with_workers(4)) is None
    assert "144 MiB of 80 MiB of /dev/shm" in vetoed(space, with_workers(4, batch_size=64))
    # AND without workers the batch itself must fit
    tight = replace(space, limits=Limits(memory_bytes=8 * MIB))
    assert " of host memory" in vetoed(tight, LoaderConfig(batch_size=64))
    none = replace(space, limits=Limits(memory_bytes=1))
    assert none.veto(LoaderConfig(batch_size=8)) is None


def test_costs_are_size_workers_memory_settings_and_depth():
    # GIVEN batches of 18 MiB, of which torch locks 32, and a queue of 1 GiB that costs nothing
    space = Space(limits=Limits(memory_bytes=64 << 30), batch=BatchCost(bytes=18 * MIB, samples=32))
    assert space.cost(with_workers(33, 2)) == (False, 33, 1, False, -2)  # 67 batches, 1,206 MiB
    assert space.cost(with_workers(33, 2, pin_memory=True)) == (False, 33, 2, True, -2)
    assert space.cost(with_workers(20, 2, batch_size=64)) == (True, 20, 1, True, -2)
    assert space.is_cheap(with_workers(27, 2))  # 55 batches, 990 MiB
    assert not space.is_cheap(with_workers(28, 2))
    assert replace(space, batch=BatchCost(bytes=64 * MIB)).is_cheap(with_workers(15, 1))  # 1 GiB
    assert space.cost(with_workers(10, 2)) == (False, 10, 0, False, -2)
    assert space.cost(NONE) == (False, 0, 0, False, 0)
    # AND 2% of a small memory
    small = replace(space, limits=Limits(memory_bytes=1 << 30))
    assert small.cost(with_workers(1, 1)) == (False, 1, 1, False, -1)


def test_the_grid_is_finer_where_workers_are_few():
    counts = list(dict.fromkeys(config.num_workers for config in Space().candidates()))
    assert counts == [*range(16), *range(16, 32, 2), *range(32, 65, 4)]
    few = Space(max_workers=19).candidates(most_workers=17.5)
    assert list(dict.fromkeys(config.num_workers for config in few)) == [*range(17), 17]


ASKED = [
    # a distribution, what is set, and the nearest
    (CategoricalDistribution([0, 2, "auto", 4]), 5, 4),
    (CategoricalDistribution([3, 1, 0]), None, 0),
    (CategoricalDistribution(["auto"]), 5, None),
    (IntDistribution(2, 16, step=2), 7.1, 8),
    (IntDistribution(2, 16, step=2), 64, 16),
    (IntDistribution(2, 16), None, 2),
    (IntDistribution(1, 64, log=True), 0, 1),
    (FloatDistribution(0.0, 8.0, step=0.5), 3.3, 3.5),
    (FloatDistribution(0.0, 8.0), 3.3, 3.3),
]  # fmt: skip


@pytest.mark.parametrize(("distribution", "value", "nearest"), ASKED)
def test_an_objective_gets_the_nearest_it_asks_for(distribution, value, nearest):
    assert closest(distribution, value) == nearest


def test_the_space_is_as_an_objective_asks():
    asked = {
        "num_workers": IntDistribution(0, 12, step=4),
        "prefetch_factor": CategoricalDistribution([2, 3]),
        "pin_memory": IntDistribution(0, 1),
        "batch_size": IntDistribution(16, 256, log=True),
        "device_prefetch": IntDistribution(0, 2),
        "in_order": CategoricalDistribution([False, "maybe", True]),
        "learning_rate": FloatDistribution(0.0, 1.0),
    }
    assert Space().asked(asked, is_whole=False) == Space(
        max_workers=12, prefetch_factors=(2, 2, 3, 3), pin_memory=(False, True),
        batch_size=(16, 32, 64, 128, 256), device_prefetch=(0, 1, 2), in_order=(True, False),
    )  # fmt: skip
    workers = {"num_workers": asked["num_workers"]}
    assert Space().asked(workers, is_whole=True).prefetch_factors == (2,)
    assert Space().asked(workers, is_whole=False).prefetch_factors == (1, 2, 4, 8)


RULES = {
    # seconds of a fetch, of its CPU, of a step; cores
    "one keeps up": (0.04, 0.0, 0.04, 8, with_workers(2, 4)),
    "1.15 x 10 + 1": (0.1, 0.001, 0.01, 2, with_workers(12)),
    "the cores are full": (0.1, 0.1, 0.001, 4, with_workers(5)),
    "nothing limits": (0.1, 0.0, 0.0, 4, with_workers(64)),
}


@pytest.mark.parametrize("case", RULES.values(), ids=RULES)
def test_the_rule(case):
    fetch_s, fetch_cpu_s, step_s, cores, expected = case
    found = plain_rule(fetch_s=fetch_s, fetch_cpu_s=fetch_cpu_s, step_s=step_s, cores=cores)
    assert found == expected


SET = {"pin_memory": True, "persistent_workers": True, "multiprocessing_context": "forkserver"}
FIVE, RULE, PINNED = with_workers(5), with_workers(3, 4), with_workers(0, pin_memory=True)
BEGINNINGS = {
    "all four": (Space(), with_workers(6), 0.02, [with_workers(6), FIVE, RULE, NONE]),
    "none twice": (Space(), RULE, 0.02, [RULE, FIVE, NONE]),
    "the rule before no workers": (Space(), NONE, 0.02, [FIVE, RULE, NONE]),
    "slow batches tell of no workers": (Space(), NONE, 2.0, [FIVE, with_workers(64)]),
    "without a first batch": (Space(), None, None, [FIVE, with_workers(4), NONE]),
    "data that workers must not read": (Space(max_workers=0), None, 0.02, [NONE]),
    "no suggestion without what is set": (RICH, NONE, 0.02, [with_workers(3, 4, **SET), PINNED]),
}


@pytest.mark.parametrize("case", BEGINNINGS.values(), ids=BEGINNINGS)
def test_a_search_begins_with_own_suggested_and_rule(case):
    space, own, fetch_s, expected = case
    context = Context(usable_cores=4, step_s=0.01, fetch_s=fetch_s, fetch_cpu_s=0.001)
    space = replace(space, also=() if own is None else (own,))
    assert begin_with(space, context, own=own, suggested=[FIVE]) == expected


DEEPEST = {
    # cores of the step, seconds of a fetch, of its CPU
    "workers compute beside a step of several threads": (4.0, 0.02, 0.02, 2),
    "the step has one": (1.0, 0.02, 0.02, 8),
    "the cores cannot keep up with it": (1.0, 0.1, 0.1, 2),
    "workers wait": (4.0, 0.02, 0.002, 8),
    "without a first batch": (4.0, None, 0.0, 8),
}


@pytest.mark.parametrize("case", DEEPEST.values(), ids=DEEPEST)
def test_queues_are_shallow_beside_a_step_on_cores(case):
    step_cores, fetch_s, fetch_cpu_s, deepest = case
    seen = {"step_cores": step_cores, "fetch_s": fetch_s, "fetch_cpu_s": fetch_cpu_s}
    context = Context(usable_cores=4, step_s=0.02, **seen)
    proposed, first = Belief(Space(), context, ()).configs, begin_with(Space(), context)
    assert max(config.prefetch_factor or 0 for config in proposed) == deepest
    assert max(config.prefetch_factor or 0 for config in first) <= deepest
