"""Workers that keep the loop fed: who has more of them is not faster, however lucky its burst was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune_loader.decision.posterior import Posterior
from autotune_loader.decision.sufficiency import fed
from autotune_loader.twin import Observation
from autotune_loader.values.config import LoaderConfig

SERVICE_S, LOOP_S = 0.04, 0.0105
TOO_FEW, ENOUGH, MANY = (LoaderConfig(num_workers=count, prefetch_factor=8) for count in (2, 5, 16))
CONFIGS = (TOO_FEW, ENOUGH, MANY)
BY_WORKERS = [(float(config.num_workers),) for config in CONFIGS]


def observed(config, *, batches=200, slow=0, faster=1.0, **changes):
    """A burst in which a worker takes 40 ms a batch, `slow` of them ten times as long, and the loop 10.5 ms."""
    service = np.full(batches, SERVICE_S) / faster
    service[:slow] *= 10
    seen = Observation(
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor or 1,
        consumer_threads=config.consumer_threads,
        service_s=service,
        cpu_s=service,
        receive_s=np.full(batches, 0.0005) / faster,
        step_s=np.full(batches, LOOP_S - 0.0005) / faster,
        batch_size=8.0,
        samples_per_s=100.0,
    )
    return replace(seen, **changes)


def known(rates, *, sd=0.05, use=(0.5, 1.0, 1.0), bursts=None, configs=CONFIGS):
    """A belief in these rates, by one who saw the bursts."""
    seen = [observed(config) for config in CONFIGS] if bursts is None else bursts
    size = len(configs)
    return Posterior(
        configs=configs, mean=np.log(rates), covariance=sd**2 * np.eye(size), enough=fed(configs, seen, use)
    )


def lost(belief):
    """What 5 workers lose against 16, in the mean of the truths that may be."""
    paths = belief.paths()
    return float(np.maximum(1 - np.exp(paths[:, 1] - paths[:, 2]), 0.0).mean())


def test_a_lucky_burst_of_more_workers_does_not_beat_workers_that_are_enough():
    # GIVEN 16 workers that are believed to be 10 % faster than 5, which keep the loop fed, and 2, which do not
    belief = known([50.0, 100.0, 110.0])
    # THEN the 5 are chosen, and without what the bursts showed of the feeding the 16
    assert belief.configs[belief.choice(BY_WORKERS, 0.02)[0]] == ENOUGH
    blind = replace(belief, enough=())
    assert blind.configs[blind.choice(BY_WORKERS, 0.02)[0]] == MANY
    # THEN they are as fast in every truth that may be
    paths = belief.paths()
    assert np.all(paths[:, 1] >= paths[:, 2] - 1e-9)
    assert np.median(paths[:, 0] - paths[:, 2]) < np.log(0.6)


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
def test_workers_are_enough_where_what_they_could_deliver_exceeds_what_the_loop_takes(bursts, use, are_enough):
    belief = known([50.0, 100.0, 110.0], use=(0.5, use, 1.0), bursts=bursts)
    assert (lost(belief) < 0.001) == are_enough


def test_rates_beyond_all_luck_refute_what_was_seen_of_the_feeding():
    # GIVEN 16 workers that are faster than 5, which seem to be enough, by far more than bursts scatter
    belief = known([50.0, 100.0, 130.0], sd=0.02)
    assert belief.configs[belief.choice(BY_WORKERS, 0.02)[0]] == MANY
