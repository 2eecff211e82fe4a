"""The joint belief about rates."""

from __future__ import annotations

import numpy as np

from autotune_loader.decision.posterior import Posterior
from autotune_loader.values.config import LoaderConfig

NOISE = 0.05


def test_a_burst_that_something_disturbed_moves_the_belief_less_than_its_distance() -> None:
    # GIVEN four bursts of one configuration, the last of them half as fast as the others
    belief = Posterior(
        configs=(LoaderConfig(num_workers=4, prefetch_factor=2),),
        mean=np.log([100.0]),
        covariance=np.array([[0.2**2]]),
        noise_sd=NOISE,
    )
    alike = [np.log(100.0)] * 3
    # WHEN all four are believed
    after = belief.updated([0] * 4, [*alike, np.log(50.0)], [NOISE**2] * 4)
    # THEN it counts for less than half of what one of four would
    assert np.log(100.0) - after.mean[0] < 0.5 * np.log(2.0) / 4
    # AND a burst within the noise counts in full
    near = belief.updated([0] * 4, [*alike, np.log(98.0)], [NOISE**2] * 4)
    assert np.log(100.0) - near.mean[0] > 0.8 * np.log(100.0 / 98.0) / 4
