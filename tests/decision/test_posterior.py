"""The joint belief about rates: what pairs say, what one disturbed observation does, what the twin's error is of."""

from __future__ import annotations

import numpy as np
import pytest

from autotune_loader.decision import posterior
from autotune_loader.decision.belief import prior_covariance
from autotune_loader.decision.posterior import Posterior, Scales, Seen
from autotune_loader.decision.space import Space
from autotune_loader.values.config import LoaderConfig

A, B, C = (LoaderConfig(num_workers=count) for count in (2, 4, 8))
UNKNOWN = Posterior(configs=(A, B, C), mean=np.log([950.0] * 3), covariance=0.3**2 * np.eye(3))
COSTS = [(2.0,), (4.0,), (8.0,)]


def seen(*rounds: dict[LoaderConfig, float], own_sd: float = 0.01) -> Seen:
    each = [(number, config, rate) for number, rates in enumerate(rounds) for config, rate in rates.items()]
    return Seen(
        where=np.array([UNKNOWN.configs.index(config) for _, config, _ in each]),
        logs=np.log([rate for *_, rate in each]),
        variances=np.full(len(each), own_sd**2),
        rounds=np.array([number for number, *_ in each]),
    )


@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        # THE machine is 20 % slower in the rounds that A ran alone: in every pair it is 5 % faster
        ([{A: 1000.0, B: 950.0}] * 2 + [{A: 800.0}] * 3, A),
        ([{B: 1000.0, A: 950.0}] * 2 + [{B: 800.0}] * 3, B),
        # A was lucky once, in five rounds B is faster
        ([{A: 1200.0, B: 1000.0}] + [{A: 900.0, B: 1000.0}] * 5, B),
        ([{A: 1200.0}] + [{A: 900.0}] * 5 + [{B: 1000.0}] * 6, B),
        # B was disturbed once
        ([{A: 900.0, B: 1000.0}] * 3 + [{A: 905.0, B: 600.0}], B),
        # equal ones: the cheapest
        ([{A: 1000.0, B: 1001.0, C: 1002.0}] * 4, A),
    ],
)  # fmt: skip
def test_who_is_chosen_after_these_rounds(rounds: list[dict[LoaderConfig, float]], chosen: LoaderConfig) -> None:
    after = UNKNOWN.after(seen(*rounds)).at(sorted({config for each in rounds for config in each}, key=str))
    costs = [COSTS[UNKNOWN.configs.index(config)] for config in after.configs]
    assert after.configs[after.choice(costs, 0.02)[0]] == chosen


def test_it_is_the_normal_belief_conditioned_on_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN known noise, and a prior in which configurations have something in common
    known = Scales(error=np.array([1.0]), noise=np.array([0.03]), machine=np.array([0.05]))
    monkeypatch.setattr(posterior, "ALTERNATIVES", known)
    monkeypatch.setattr(posterior, "TAIL_FREEDOM", 1e12)
    rng = np.random.default_rng(0)
    shape = np.exp(-0.5 * np.subtract.outer(np.arange(3), np.arange(3)) ** 2)
    prior = Posterior(configs=(A, B, C), mean=np.log([900.0, 950.0, 1000.0]), covariance=0.1**2 * shape)
    data = seen({A: 1000.0, B: 980.0}, {B: 1010.0}, {A: 940.0, C: 990.0})
    # WHEN the joint density of rates, machine and observations is conditioned by integration over a great many draws
    size, rounds = 3, 3
    joint = np.block(
        [
            [prior.covariance, np.zeros((size, rounds))],
            [np.zeros((rounds, size)), 0.05**2 * np.eye(rounds)],
        ]
    )
    draws = rng.multivariate_normal(np.concatenate([prior.mean, np.zeros(rounds)]), joint, size=400_000)
    expected = draws[:, data.where] + draws[:, size + data.rounds]
    weights = np.exp(-0.5 * (((data.logs - expected) ** 2) / (0.03**2 + 0.01**2)).sum(axis=1))
    weights /= weights.sum()
    mean = weights @ draws[:, :size]
    sd = np.sqrt(weights @ (draws[:, :size] - mean) ** 2)
    # THEN that is the belief
    after = prior.after(data)
    assert after.mean == pytest.approx(mean, abs=0.004)
    assert after.sd() == pytest.approx(sd, rel=0.05)


def test_what_a_round_shares_cancels_in_ratios() -> None:
    # GIVEN four rounds on a machine whose speed changes by a third WHEN they are believed
    speeds = (1.0, 0.75, 1.2, 0.9)
    after = UNKNOWN.after(seen(*({A: 1000.0 * speed, B: 900.0 * speed} for speed in speeds)))
    # THEN the ratio is known much better than either rate
    ratio, sd = after.ratio(0, 1)
    assert ratio == pytest.approx(np.log(1000 / 900), abs=0.01)
    assert sd < after.sd()[0] / 3


def test_a_disturbed_observation_moves_the_belief_less_than_its_distance() -> None:
    alike = [{A: 1000.0}] * 5
    undisturbed, disturbed, near = (UNKNOWN.after(seen(*alike, {A: rate})) for rate in (1000.0, 500.0, 980.0))
    assert undisturbed.mean[0] - disturbed.mean[0] < 0.3 * np.log(2.0) / 6
    assert undisturbed.mean[0] - near.mean[0] > 0.5 * np.log(1000 / 980) / 6


def test_a_wrong_twin_is_seen_to_be_wrong() -> None:
    prior = Posterior(configs=(A, B, C), mean=np.log([1000.0] * 3), covariance=0.06**2 * np.eye(3))
    near, far = (prior.after(seen({A: rate, B: rate})).sd()[2] for rate in (1010.0, 1400.0))
    assert far > 1.5 * near


def test_nothing_seen_changes_nothing() -> None:
    assert UNKNOWN.after(seen()) is UNKNOWN


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        # both wait for the step, however many workers there are
        (LoaderConfig(num_workers=4), LoaderConfig(num_workers=32), "all"),
        # one waits for its fetches
        (LoaderConfig(num_workers=1), LoaderConfig(num_workers=32), "nothing"),
        # a knob that the twin does not know
        (LoaderConfig(num_workers=4), LoaderConfig(num_workers=4, drop_last=True), "some"),
    ],
)
def test_what_the_errors_of_two_rates_have_in_common(one: LoaderConfig, other: LoaderConfig, shared: str) -> None:
    fetching = np.array([1.0 if config.num_workers == 1 else 0.0 for config in (one, other)])
    found = prior_covariance([one, other], fetching, 1.0, Space(max_workers=64, drop_lasts=(None, True)))
    correlation = found[0, 1] / np.sqrt(found[0, 0] * found[1, 1])
    assert {"all": correlation > 0.98, "nothing": correlation < 0.05, "some": 0.1 < correlation < 0.5}[shared]


def test_variants_of_one_kind_are_alike() -> None:
    # GIVEN two numbers of workers with and without drop_last
    space = Space(max_workers=8, drop_lasts=(None, True))
    configs = [LoaderConfig(num_workers=count, drop_last=drop) for count in (1, 8) for drop in (None, True)]
    prior = Posterior(
        configs=tuple(configs), mean=np.log([1000.0] * 4), covariance=prior_covariance(configs, np.ones(4), 1.0, space)
    )
    # WHEN drop_last is 15 % slower with one worker THEN it is believed to be so with eight
    data = Seen(
        where=np.array([0, 1] * 3), logs=np.log([1000.0, 850.0] * 3), variances=np.full(6, 1e-4), rounds=np.arange(6)
    )
    ratio, _ = prior.after(data).ratio(3, 2)
    assert ratio == pytest.approx(np.log(0.85), abs=0.04)
