"""The joint belief about rates, and what observations make of it."""

from __future__ import annotations

import numpy as np

from autotune_loader.decision.posterior import Posterior, Seen, prior_covariance
from autotune_loader.decision.space import Space
from autotune_loader.values.config import LoaderConfig

A, B = (LoaderConfig(num_workers=count) for count in (2, 4))


def believed(*rates, sd=0.3):
    configs = (A, B)[: len(rates)]
    return Posterior(configs=configs, mean=np.log(rates), covariance=sd**2 * np.eye(len(rates)))


def rounds(*seen, sd=0.0):
    """Observations from rounds, each a mapping of position to rate."""
    flat = [(where, np.log(rate), number) for number, each in enumerate(seen) for where, rate in each.items()]
    where, logs, numbers = map(np.array, zip(*flat, strict=True))
    return Seen(where=where, logs=logs, variances=np.full(len(flat), sd**2), rounds=numbers)


def test_an_observation_that_something_disturbed_moves_the_belief_less_than_its_distance():
    # GIVEN four bursts of one configuration, the last of them half as fast as the others, or as good as alike
    before = believed(100.0, sd=0.2)
    disturbed, near = (before.after(rounds(*[{0: 100.0}] * 3, {0: last})) for last in (50.0, 98.0))
    # THEN it counts for less than one of four would, and one within the noise in full
    assert np.log(100.0) - disturbed.mean[0] < 0.7 * np.log(2.0) / 4
    assert np.log(100.0) - near.mean[0] > 0.9 * np.log(100.0 / 98.0) / 4


def test_noise_is_read_from_what_is_seen():
    rng = np.random.default_rng(0)
    calm, rough = (
        believed(100.0).after(rounds(*[{0: 100.0 * np.exp(sd * z)} for z in rng.standard_normal(30)]))
        for sd in (0.01, 0.09)
    )
    assert calm.noise_sd < 0.03 < 0.06 < rough.noise_sd


def test_similar_configurations_share_an_error_and_an_unknown_knob_is_an_error_of_its_own():
    near, far, odd = (LoaderConfig(num_workers=4, drop_last=drop) for drop in (None, None, True))
    near, far = near.with_workers(5), far.with_workers(64)
    space = Space(max_workers=64, drop_lasts=(None, True))
    covariance = prior_covariance([B, near, far, odd, odd.with_workers(5)], 1.0, space)
    assert covariance[0, 1] > 0.9 * covariance[0, 0] > 0.1 * covariance[0, 0] > covariance[0, 2]
    # THEN batches without the last one may be faster or slower, and alike with any number of workers
    assert covariance[3, 3] > 2 * covariance[0, 3]
    assert covariance[3, 4] > 0.9 * covariance[3, 3]
