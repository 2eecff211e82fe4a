"""What is believed of a job from what was observed of it, and what observations make of a belief: no clock, no process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.posterior import Posterior, Seen, prior_covariance
from autotune_loader.decision.space import Space
from autotune_loader.decision.sufficiency import fed
from autotune_loader.twin import Observation
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, FailureKind
from autotune_loader.values.statistics import Interval
from tests.support import FakeClock, SimulatedMachine, SimulatedSource

MACHINE = SimulatedMachine(cores=4, cpu_s=0.02, step_s=0.001, noise_sd=0.02)
WAITING = SimulatedMachine(cores=1, cpu_s=0.0005, wait_s=0.0715, step_s=0.004)
CROWDED = SimulatedMachine(cores=1, cpu_s=0.02, step_s=0.01)


def seen_of(machine: SimulatedMachine, config: LoaderConfig, phase: str = "search", group: int = 0) -> Evidence:
    return SimulatedSource(machine, FakeClock()).gather(config, Ask(phase=phase, group=group))


@pytest.mark.parametrize(
    ("machine", "bursts", "space", "most"),
    [
        (WAITING, (1, 8), Space(max_workers=8), 16),
        (WAITING, (1, 8), Space(max_workers=8, workers_are_capped=True), 8),
        (CROWDED, (4,), Space(max_workers=4), 4),
    ],
    ids=["twice as many as were observed", "unless more would be wrong", "or they are in each other's way"],
)
def test_slow_batches_that_the_first_look_missed_allow_more_workers(
    machine: SimulatedMachine, bursts: tuple[int, ...], space: Space, most: int
) -> None:
    # GIVEN a space made after a look at quick batches
    beliefs = Beliefs(space, TwinContext(usable_cores=1, consumer_cores=0.1))
    # WHEN bursts have shown what batches take
    for workers in bursts:
        beliefs.log.add(seen_of(machine, LoaderConfig(num_workers=workers)))
    assert beliefs.space.max_workers == most


@pytest.fixture
def beliefs() -> Beliefs:
    """Of a job of which three bursts were seen."""
    context = TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, 0.001),))
    beliefs = Beliefs(Space(max_workers=8, drop_lasts=(None, True)), context)
    for workers in (0, 1, 4):
        beliefs.log.add(seen_of(MACHINE, LoaderConfig(num_workers=workers)))
    return beliefs


def posterior(beliefs: Beliefs) -> Posterior:
    found = beliefs.posterior()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("workers", "kind", "knobs"),
    [(48, "oom_killed", {}), (2, "user_exception", {"pin_memory": True}), (2, "user_exception", {"batch_size": 64})],
)
def test_what_fails_by_another_knob_or_far_beyond_the_limit_says_nothing_of_workers(
    beliefs: Beliefs, workers: int, kind: FailureKind, knobs: dict[str, Any]
) -> None:
    failure = Failure(kind=kind, phase="batches", message="no")
    beliefs.log.add(Evidence(config=LoaderConfig(num_workers=workers, **knobs), outcome=failure))
    assert beliefs.feasible(LoaderConfig(num_workers=5)) is None
    assert beliefs.space.max_workers == 8


def test_a_disturbed_round_says_nothing(beliefs: Beliefs) -> None:
    config = LoaderConfig(num_workers=4)
    before = posterior(beliefs)
    where = before.configs.index(config)
    beliefs.log.add(seen_of(replace(MACHINE, cpu_s=0.2), config, phase="compare"))
    assert posterior(beliefs).mean[where] < before.mean[where] - 0.1
    # WHEN its round is left out THEN it is as if it had not been
    beliefs.log.leave_out([0])
    assert posterior(beliefs).mean[where] == before.mean[where]


def test_a_lucky_first_burst_of_what_the_twin_knows_nothing_of_does_not_stay(beliefs: Beliefs) -> None:
    # GIVEN two workers, and the same without the last batch, which was fastest in the first round and slowest in five others
    plain = LoaderConfig(num_workers=2)
    odd = replace(plain, drop_last=True)
    for number, rate in enumerate([1200.0, 900.0, 900.0, 900.0, 900.0, 900.0]):
        for config, value in ((plain, 1000.0), (odd, rate)):
            seen = seen_of(MACHINE, config, "compare", number)
            assert seen.measurement is not None
            interval = Interval(value=value, low=value / 1.03, high=value * 1.03, count=20)
            beliefs.log.add(replace(seen, outcome=replace(seen.measurement, samples_per_s=interval)))
    known = posterior(beliefs)
    ratio, sd = known.ratio(known.configs.index(odd), known.configs.index(plain))
    assert ratio < -2 * sd


# What observations make of a belief


def after(rates: list[float], sd: float = 0.3) -> Posterior:
    """A belief in 100 samples/s of one configuration, after rounds with these rates."""
    before = Posterior(configs=(LoaderConfig(),), mean=np.log([100.0]), covariance=np.array([[sd**2]]))
    count = len(rates)
    seen = Seen(where=np.zeros(count, int), logs=np.log(rates), variances=np.zeros(count), rounds=np.arange(count))
    return before.after(seen)


def test_an_observation_that_something_disturbed_moves_the_belief_less_than_its_distance() -> None:
    # GIVEN four bursts of one configuration, the last of them half as fast as the others, or as good as alike
    disturbed, near = (after([100.0, 100.0, 100.0, last], sd=0.2) for last in (50.0, 98.0))
    # THEN it counts for less than one of four would, and one within the noise in full
    assert np.log(100.0) - disturbed.mean[0] < 0.7 * np.log(2.0) / 4
    assert np.log(100.0) - near.mean[0] > 0.9 * np.log(100.0 / 98.0) / 4


def test_noise_is_read_from_what_is_seen() -> None:
    normal = np.random.default_rng(0).standard_normal((2, 30))
    calm, rough = (after(list(100.0 * np.exp(sd * z))) for sd, z in zip((0.01, 0.09), normal, strict=True))
    assert calm.noise_sd < 0.03 < 0.06 < rough.noise_sd


def test_similar_configurations_share_an_error_and_an_unknown_knob_is_an_error_of_its_own() -> None:
    own = LoaderConfig(num_workers=4)
    odd = replace(own, drop_last=True)
    configs = [own, own.with_workers(5), own.with_workers(64), odd, odd.with_workers(5)]
    covariance = prior_covariance(configs, 1.0, Space(max_workers=64, drop_lasts=(None, True)))
    assert covariance[0, 1] > 0.9 * covariance[0, 0] > 0.1 * covariance[0, 0] > covariance[0, 2]
    # THEN batches without the last one may be faster or slower, and alike with any number of workers
    assert covariance[3, 3] > 2 * covariance[0, 3]
    assert covariance[3, 4] > 0.9 * covariance[3, 3]


# Workers that keep the loop fed: who has more of them is not faster, however lucky its burst was

SERVICE_S, LOOP_S = 0.04, 0.0105
CONFIGS = TOO_FEW, ENOUGH, MANY = tuple(LoaderConfig(num_workers=count, prefetch_factor=8) for count in (2, 5, 16))


def observed(config: LoaderConfig, *, batches: int = 200, slow: int = 0, faster: float = 1.0, **changes: Any) -> Any:
    """A burst in which a worker takes 40 ms a batch, `slow` of them ten times as long, and the loop 10.5 ms."""
    service = np.full(batches, SERVICE_S) / faster
    service[:slow] *= 10
    seen = Observation(
        num_workers=config.num_workers,
        prefetch_factor=8,
        service_s=service,
        cpu_s=service,
        receive_s=np.full(batches, 0.0005) / faster,
        step_s=np.full(batches, LOOP_S - 0.0005) / faster,
        batch_size=8.0,
        samples_per_s=100.0,
    )
    return replace(seen, **changes)


def fed_belief(many: float, *, sd: float = 0.05, use: float = 1.0, bursts: Any = None) -> Posterior:
    """A belief in 50, 100 and so many samples/s, by one who saw the bursts."""
    seen = [observed(config) for config in CONFIGS] if bursts is None else bursts
    enough = fed(CONFIGS, seen, (0.5, use, 1.0))
    return Posterior(configs=CONFIGS, mean=np.log([50.0, 100.0, many]), covariance=sd**2 * np.eye(3), enough=enough)


def chosen(belief: Posterior) -> LoaderConfig:
    return belief.configs[belief.choice([(float(config.num_workers),) for config in CONFIGS], 0.02)[0]]


def test_a_lucky_burst_of_more_workers_does_not_beat_workers_that_are_enough() -> None:
    # GIVEN 16 workers that are believed to be 10 % faster than 5, which keep the loop fed, and 2, which do not
    belief = fed_belief(110.0)
    # THEN the 5 are chosen, and without what the bursts showed of the feeding the 16
    assert chosen(belief) == ENOUGH
    assert chosen(replace(belief, enough=())) == MANY
    # THEN they are as fast in every truth that may be
    paths = belief.paths()
    assert np.all(paths[:, 1] >= paths[:, 2] - 1e-9)
    assert np.median(paths[:, 0] - paths[:, 2]) < np.log(0.6)
    # BUT rates beyond all luck refute what was seen of the feeding
    assert chosen(fed_belief(130.0, sd=0.02)) == MANY


@pytest.mark.parametrize(
    ("bursts", "use", "are_enough"),
    [
        ([observed(ENOUGH)], 1.0, True),
        ([observed(ENOUGH)], 0.92, False),
        ([observed(ENOUGH, batches=30), observed(MANY, batches=30, slow=2)], 1.0, False),
        ([observed(ENOUGH, step_s=np.full(200, 0.006)), observed(MANY)], 1.0, False),
        ([observed(ENOUGH, step_s=np.full(200, 0.007), receive_s=np.full(200, 0.0035)), observed(MANY)], 1.0, False),
        ([observed(ENOUGH), observed(MANY, faster=1.3)], 1.0, True),
    ],
    ids=[
        "they keep up",
        "the loop waits 8 % of the time behind slow batches",
        "rare slow batches in another burst",
        "a step that is too quick for them",
        "what they hide is only that a batch travels",
        "a moment in which everything was quicker",
    ],
)
def test_workers_are_enough_where_what_they_could_deliver_exceeds_what_the_loop_takes(
    bursts: list[Observation], use: float, are_enough: bool
) -> None:
    paths = fed_belief(110.0, use=use, bursts=bursts).paths()
    # THEN 5 workers lose nothing against 16, in the mean of the truths that may be
    lost = np.maximum(1 - np.exp(paths[:, 1] - paths[:, 2]), 0.0).mean()
    assert (lost < 0.001) == are_enough
