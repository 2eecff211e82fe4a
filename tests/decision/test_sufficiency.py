"""Workers that keep the loop fed: who has more of them is not faster, however lucky its burst was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune_loader.decision.posterior import Posterior
from autotune_loader.decision.sufficiency import Sufficiency
from autotune_loader.twin import Observation
from autotune_loader.values.config import LoaderConfig

SERVICE_S, LOOP_S = 0.04, 0.0105
TOO_FEW, ENOUGH, MANY = (LoaderConfig(num_workers=count, prefetch_factor=8) for count in (2, 5, 16))
CONFIGS = (TOO_FEW, ENOUGH, MANY, LoaderConfig())


def observed(config, *, batches=200, slow=0):
    """A burst in which a worker takes 40 ms a batch, `slow` of them ten times as long, and the loop 10.5 ms."""
    service = np.full(batches, SERVICE_S)
    service[:slow] *= 10
    return Observation(
        num_workers=config.num_workers,
        prefetch_factor=config.prefetch_factor or 1,
        consumer_threads=config.consumer_threads,
        service_s=service,
        cpu_s=service,
        receive_s=np.full(batches, 0.0005),
        step_s=np.full(batches, LOOP_S - 0.0005),
        batch_size=8.0,
        samples_per_s=100.0,
    )


def sufficiency(configs=CONFIGS, seen=CONFIGS[:3], use=(0.5, 1.0, 1.0, 0.2), **options):
    return Sufficiency.of(configs, [observed(config, **options) for config in seen], use[: len(configs)])


def known(rates, sd=0.05):
    size = len(rates)
    return Posterior(
        configs=CONFIGS[:size],
        mean=np.log(rates),
        covariance=sd**2 * np.eye(size),
        noise_sd=0.05,
        sufficiency=sufficiency(CONFIGS[:size]),
    )


def test_headroom_is_what_the_workers_could_deliver_over_what_the_loop_takes():
    seen = sufficiency()
    expected = np.log([config.num_workers * LOOP_S / SERVICE_S for config in CONFIGS[:3]])
    assert seen.log_headroom[:3] == pytest.approx(expected)
    assert seen.log_headroom[3] == -np.inf


def test_every_prefetch_shares_what_was_seen_of_the_workers_but_other_threads_do_not():
    shallow, threads = replace(ENOUGH, prefetch_factor=1), replace(ENOUGH, consumer_threads=2)
    seen = sufficiency((ENOUGH, shallow, threads), seen=[ENOUGH], use=(1.0, 1.0, 1.0))
    assert seen.log_headroom[1] == seen.log_headroom[0]
    assert seen.log_headroom[2] == -np.inf


def test_a_lucky_burst_of_more_workers_does_not_beat_workers_that_are_enough():
    # GIVEN 16 workers that are believed to be 10 % faster than 5, which keep the loop fed, and 2, which do not
    belief = known([50.0, 100.0, 110.0])
    costs = [(float(config.num_workers),) for config in belief.configs]
    # THEN the 5 are chosen, and without what the bursts showed of the feeding the 16
    assert belief.configs[belief.choice(costs, 0.02)[0]] == ENOUGH
    blind = replace(belief, sufficiency=None)
    assert blind.configs[blind.choice(costs, 0.02)[0]] == MANY
    # THEN they are as fast in every truth that may be
    paths = belief.paths()
    assert np.all(paths[:, 1] >= paths[:, 2] - 1e-9)
    assert np.median(paths[:, 0] - paths[:, 2]) < np.log(0.6)


def test_irregular_batches_take_from_what_fed_workers_are_worth():
    # GIVEN a twin that says that the loop waits 8 % of the time behind slow batches
    irregular = replace(known([50.0, 100.0, 110.0]), sufficiency=sufficiency(CONFIGS[:3], use=(0.5, 0.92, 1.0)))
    paths = irregular.paths()
    # THEN 5 workers may be that much slower
    assert not irregular.is_as_fast(1, 2, 0.02)
    assert np.median(paths[:, 1] - paths[:, 2]) < np.log(0.95)


def test_rare_slow_batches_in_any_burst_make_all_headroom_uncertain():
    # GIVEN the same bursts, and slow batches in another one
    calm = sufficiency(CONFIGS[:3], seen=[ENOUGH], batches=30)
    seen = [observed(ENOUGH, batches=30), observed(MANY, batches=30, slow=2)]
    rough = Sufficiency.of(CONFIGS[:3], seen, (0.5, 1.0, 1.0))
    assert calm.is_as_fast(1, 2, 0.02)
    assert not rough.is_as_fast(1, 2, 0.02)


def test_a_batch_that_travels_while_the_loop_waits_is_no_work_of_the_loop():
    # GIVEN 3 workers for whose batches the loop waits while these travel, and a burst in which they lay ready
    few = LoaderConfig(num_workers=3, prefetch_factor=8)
    waited = replace(observed(few), receive_s=np.full(200, 0.004))
    assert Sufficiency.of((few,), [waited], (1.0,)).log_headroom[0] > 0
    # THEN the 3 are not enough: with more workers that time would be hidden
    assert Sufficiency.of((few, MANY), [waited, observed(MANY)], (1.0, 1.0)).log_headroom[0] < 0


@pytest.mark.parametrize(("receive_s", "enough"), [(0.0006, True), (0.003, False)], ids=["by chance", "busy workers"])
def test_workers_that_are_enough_but_hand_over_slowly_may_be_slower_than_more_of_them(receive_s, enough):
    # GIVEN 5 workers that could feed the loop, whose batches take some time to fetch, and 16 who are quick at that
    slow = replace(observed(ENOUGH), receive_s=np.full(200, receive_s))
    seen = Sufficiency.of(CONFIGS[:3], [slow, observed(MANY)], (0.5, 1.0, 1.0))
    # THEN the 5 are as fast, unless that is much of the loop's time: 1 - (10 + 1.25 x 0.5) / (10 + 3) of it
    assert 1 in seen.sufficient()
    assert seen.is_as_fast(1, 2, 0.02) is enough
    assert seen.least_loss[1] == pytest.approx(0.0 if enough else 1 - 10.625 / 13)


def test_a_burst_in_which_everything_was_quicker_shows_the_same_headroom():
    # GIVEN 5 workers, and 16 on a machine that was 1.3 times as quick at that moment
    usual, lucky = observed(ENOUGH), observed(MANY)
    quicker = {name: getattr(lucky, name) / 1.3 for name in ("service_s", "cpu_s", "receive_s", "step_s")}
    # THEN that is no quicker receipt, and the 5 have the headroom that they have
    seen = Sufficiency.of(CONFIGS[:3], [usual, replace(lucky, **quicker)], (0.5, 1.0, 1.0))
    assert seen.log_headroom == pytest.approx(sufficiency(CONFIGS[:3], seen=[ENOUGH, MANY]).log_headroom)


def test_rates_beyond_all_luck_refute_what_was_seen_of_the_feeding():
    # GIVEN 16 workers that are faster than 5, which seem to be enough, by far more than bursts scatter
    belief = known([50.0, 100.0, 130.0], sd=0.02)
    costs = [(float(config.num_workers),) for config in belief.configs]
    assert not belief.is_as_fast(1, 2, 0.02)
    assert belief.configs[belief.choice(costs, 0.02)[0]] == MANY


def test_only_more_workers_of_the_same_kind_are_no_faster():
    threads = replace(MANY, consumer_threads=2)
    seen = sufficiency((TOO_FEW, ENOUGH, MANY, threads), seen=[ENOUGH], use=(0.5, 1.0, 1.0, 1.0))
    assert [seen.is_as_fast(1, other, 0.02) for other in range(4)] == [False, False, True, False]


@pytest.mark.parametrize(("rounds", "chosen"), [(0, 8), (6, 2)])
def test_a_deeper_queue_is_as_fast_until_bursts_show_that_it_is_not(rounds: int, chosen: int) -> None:
    # GIVEN four workers with large batches, whose queues of 8 are 20 % slower than those of 2
    belief = Posterior(
        configs=tuple(LoaderConfig(num_workers=4, prefetch_factor=depth) for depth in (2, 4, 8)),
        mean=np.log([100.0, 100.0, 100.0]),
        covariance=0.06**2 * np.array([[1.0, 0.9, 0.8], [0.9, 1.0, 0.9], [0.8, 0.9, 1.0]]),
        noise_sd=0.05,
    )
    seen = [0, 2] * rounds
    logs = [np.log(100.0), np.log(80.0)] * rounds
    # WHEN so many rounds have shown it, and a deeper queue wins at ties
    after = belief.updated(seen, logs, [0.05**2] * len(seen))
    best, _ = after.choice([(-float(config.prefetch_factor or 0),) for config in after.configs], 0.02)
    # THEN it is chosen only before
    assert after.configs[best].prefetch_factor == chosen


def test_a_part_of_what_is_known_keeps_what_it_owes_to_the_rest():
    # GIVEN 5 workers that are as fast as 16 because they are enough
    belief = known([50.0, 100.0, 110.0])
    # WHEN only the 2 and the 5 are looked at THEN their rates are still what they were
    part = belief.at([TOO_FEW, ENOUGH])
    assert np.array_equal(part.paths(), belief.paths()[:, :2])
    assert part.sufficiency.larger == ((1,), ())
    # WHEN a burst is added THEN they are drawn anew
    after = part.updated([1], [np.log(100.0)], [1e-6])
    assert (after.drawn, after.sufficient) == (None, None)


def test_a_newcomer_is_known_by_its_burst_alone():
    more = known([50.0, 100.0, 110.0]).including({LoaderConfig(num_workers=3): 70.0})
    assert more.sufficiency.log_headroom[3] == -np.inf
    assert not more.is_as_fast(3, 2, 0.02)
