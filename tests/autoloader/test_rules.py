"""The rules by which the tuner decides, each asked by itself: their limits from both sides."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune_loader.autoloader import iterator
from autotune_loader.autoloader.meter import Measure, Reached
from autotune_loader.autoloader.outlook import Outlook, counts
from autotune_loader.autoloader.tuner import (
    EpochEnded,
    Proposal,
    Room,
    Switched,
    Tuner,
    _product,
    _verdict,
)
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.values import Interval, LoaderConfig, Measurement
from tests.support.training import BEGUN_S, Training


def of(workers: int, depth: int = 2) -> LoaderConfig:
    return LoaderConfig(num_workers=workers, prefetch_factor=depth) if workers else LoaderConfig()


def about(value: float, low: float = 0.5, high: float = 2.0, count: int = 2) -> Interval:
    return Interval(value=value, low=low, high=high, count=count)


def reached(config: LoaderConfig, batch_s: float = 0.1, wait: float = 0.5, **more: Any) -> Reached:
    """Ten batches of eight samples each, after twelve."""
    how = {"service_s": 0.04, "service_cpu_s": 0.01, "receive_s": 0.001, "step_s": 0.02, **more}
    measurement = Measurement(
        samples_per_s=about(8 / batch_s, count=10),
        window_s=10 * batch_s,
        batch_size=8.0,
        first_batch_s=None,
        wait_share=wait,
        **how,
    )
    services_s = np.full(10, how["service_s"])
    return Reached(config, measurement, 8 / batch_s, 12 * batch_s, 12, 0.0, services_s, 0.0)


def tuner(asked: int = 0, active_s: float = 0.0, earlier_s: float = 0.0, **how: Any) -> Any:
    """A tuner, private parts included, with so many seconds of training since it began."""
    log = Log()
    log.totals.stepped_s = earlier_s
    found = Tuner(log, of(asked), cores=4, max_workers=32, **how)
    log.totals.waited_s = active_s
    return found


@pytest.mark.parametrize(
    ("gain", "speed", "is_fewer", "verdict"),
    [
        (about(0.9, high=0.99, count=1), about(2, low=1.9), False, False),
        (about(0.99, high=1.0, count=1), about(1), False, None),
        (about(1.2, low=1.01, count=2), about(1), False, True),
        (about(1.2, low=1.01, count=1), about(1), False, None),
        (about(1.5, low=1.01, count=1), about(1), False, None),
        (about(1.51, low=1.01, count=1), about(1), False, True),
        (about(1.6, low=1.0, count=2), about(1), False, None),
        # Steps that wait for others hide a gain, which the speed tells.
        (about(1.0, count=1), about(1.6, low=1.02), False, None),
        (about(1.0, count=2), about(1.6, low=1.02), False, True),
        (about(0.99, count=2), about(1.6, low=1.02), False, None),
        (about(1.0, count=3), about(1.5, low=1.02), False, None),
        (about(1.0, count=4), about(1.5, low=1.02), False, True),
        (about(1.0, count=4), about(1.5, low=1.01), False, None),
        # Some day it is over.
        (about(1.01, count=5), about(1), False, None),
        (about(1.01, count=6), about(1), False, False),
        (about(1.011, count=11), about(1), False, None),
        (about(1.011, count=12), about(1), False, False),
        # Fewer need not be faster.
        (about(0.9, count=1), about(1), True, None),
        (about(0.95, count=2), about(1), True, False),
        (about(0.96, count=2), about(1), True, None),
        (about(0.955, count=5), about(1), True, False),
        (about(0.99, count=5), about(1), True, None),
        (about(0.99, count=6), about(0.99), True, True),
        (about(0.985, count=6), about(1), True, False),
        (about(0.99, count=6), about(0.985), True, False),
    ],
)  # fmt: skip
def test_pairs_say_yes_no_or_not_yet(
    gain: Interval, speed: Interval, is_fewer: bool, verdict: bool | None
) -> None:
    assert _verdict(gain, speed, is_fewer=is_fewer) is verdict


@pytest.mark.parametrize(
    ("batch_s", "is_idle", "ratio", "expected", "what"),
    [
        (0.1, False, 1.16, 1.16, "kept"),
        (0.1, False, 1.14, 1.14, "paired"),
        (0.1, True, 1.14, 1.14, "paired"),
        (0.5, False, 1.06, 1.06, "kept"),
        (0.5, False, 1.04, 1.04, "paired"),
        (0.5, True, 0.99, 1.0, "kept"),
        (0.5, True, 0.98, 1.0, "paired"),
        (0.1, False, 0.98, 1.2, "paired"),
        (0.1, False, 0.96, 1.2, "left"),
        # What is far from what was predicted is not believed at once.
        (0.1, False, 1.2, 1.31, "kept"),
        (0.1, False, 1.2, 1.4, "paired"),
        (0.1, False, 1.5, 1.2, "kept"),
        (0.1, False, 2.0, 1.1, "kept"),
        (0.1, False, 1.3, 1.0, "paired"),
    ],
)  # fmt: skip
def test_pairs_are_for_what_is_not_clear(
    batch_s: float, is_idle: bool, ratio: float, expected: float, what: str
) -> None:
    asked, config = of(2), of(4)
    tuned, seen = tuner(2, 40.0), reached(asked, batch_s)
    rates = iter([Proposal(config, expected * seen.rate, True)])
    tuned._proposed = lambda *_, **__: next(rates, None)
    plan = tuned._improve(seen, is_idle=is_idle)
    assert next(plan) == Measure(config)
    found = reached(config, batch_s / ratio)
    try:
        after = plan.send(found)
    except StopIteration:
        after = None
    assert (after == Measure(config)) == (what == "paired")
    assert (tuned.best == config) == (what == "kept")
    assert tuned.own_s == pytest.approx(max(0.0, 12 * batch_s / ratio - 12 * batch_s))
    if what == "kept":
        surprise = max(ratio / expected, expected / ratio)
        assert tuned.gain.value == pytest.approx(ratio)
        assert tuned._sure == pytest.approx(max(1.0, ratio / max(1.1, surprise)))


def outlook(configs: list[LoaderConfig], step_s: float, extra_s: float, size: int = 0) -> Any:
    return Outlook(
        configs, [reached(of(0))], cores=4, step_s=step_s, extra_s=lambda _: extra_s, batch_bytes=size
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mib", "losses", "cheapest"),
    [
        (0, [0, 0, 0, 0], of(0)),
        (0, [0.02, 0, 0, 0], of(1, 8)),  # as deep as is cheap: it hides a batch that comes late
        (0.5, [0.02, 0, 0, 0], of(1, 8)),
        (1, [0.02, 0, 0, 0], of(1, 2)),
        (1, [0.02, 0.02, 0, 0], of(1, 8)),
        (1, [0.02, 0.02, 0.02, 0], of(2, 2)),
        (1, [0.01, 0.02, 0.02, 0], of(0)),
    ],
)
def test_cheapest_has_fewest_workers_then_a_cheap_queue(
    mib: float, losses: list[float], cheapest: LoaderConfig
) -> None:
    configs = [of(0), of(1, 2), of(1, 8), of(2, 2)]
    found = outlook(configs, 0.02, 0.0, int(mib * (1 << 20)))
    assert found.configs == configs
    found._losses = np.array(losses)
    assert configs[found.cheapest(range(4))] == cheapest


def test_what_is_expected_has_step_and_extra_seconds() -> None:
    def rates(step_s: float, extra_s: float) -> Any:
        return outlook([of(0), of(8)], step_s, extra_s).rates

    assert rates(0.0, 0.0) == pytest.approx(rates(0.02, 0.0))  # that which was seen beside batches
    assert rates(0.01, 0.0)[1] == pytest.approx(2 * rates(0.0, 0.0)[1], rel=0.1)
    assert 8 / rates(0.0, 0.02) - 8 / rates(0.0, 0.0) == pytest.approx([0.02, 0.02], rel=0.05)


def test_counts_are_four_an_octave_with_both_ends() -> None:
    assert [*counts(0, 0)] == [0]
    assert [*counts(0, 1)] == [0, 1]
    assert [*counts(1, 33)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 19, 23, 27, 32, 33]
    assert [*counts(3, 12)] == [3, 4, 5, 6, 7, 8, 10, 11, 12]


def test_events_tell_what_starting_workers_takes() -> None:
    tuned, kept = tuner(epoch_batches=10), tuner(epoch_batches=10, is_kept=True)
    assert tuner()._starts_s(of(5)) == kept._starts_s(of(5)) == 0.0
    for event, batch_s in [
        (EpochEnded(10, 5.0, 0.0), 0.02 * 5 / 10),
        (Switched(of(5), 0, 0.0), 0.02 * 5 / 10),
        (Switched(of(5), 0, 0.1), 0.1 * 5 / 10),
        (EpochEnded(20, 5.0, 0.2), 0.2 * 5 / 20),
        (Switched(of(5), 0, 0.1), 0.2 * 5 / 20),  # whole epochs tell better
        (EpochEnded(0, 5.0, 0.4), 0.3 * 5 / 20),
    ]:
        tuned.decide(event, 1.0)
        assert tuned._starts_s(of(5)) == pytest.approx(batch_s)
    # AND before there was a worker, receiving a batch of its takes 0.1 ms
    for latest, workers, extra_s in [(0, 5, 0.0751), (0, 0, 0.0), (2, 5, 0.075), (2, 0, 0.0)]:
        tuned._latest = {of(latest): reached(of(latest))}
        assert tuned._extra_s(of(workers)) == pytest.approx(extra_s)


@pytest.mark.parametrize(
    ("workers", "batch_s", "gain", "price_s"),
    [
        (6, 0.01, 1.2, 4 * 0.02 + 0.5),
        (4, 0.01, 1.15, 2 * 0.02),  # as many have run
        (4, 0.01, 1.1, 2 * 0.02 + 0.2 * 0.25),
        (4, 0.1, 1.1, 2 * 0.02 + 0.2 * 0.6),
        (4, 1.0, 1.1, 2 * 0.02 + 0.2 * 1.0),
        (1, 0.01, 1.2, 0.0),
    ],
)
def test_a_trial_costs_starts_first_fetches_and_risk(
    workers: int, batch_s: float, gain: float, price_s: float
) -> None:
    tuned = tuner(2)
    tuned._meter.open_s, tuned._meter.has_run = 0.5, 4
    assert tuned._price(of(workers), reached(of(2), batch_s), gain) == pytest.approx(price_s)


def test_half_a_second_one_percent_and_half_the_gain_may_be_spent() -> None:
    tuned = tuner(2, 100.0, earlier_s=50.0)
    tuned.own_s, tuned.gained_s = 1.0, 4.0
    assert tuned._may(2.5)
    assert not tuned._may(2.501)
    # AND what was asked for is tried again the later, the dearer that is: six blocks, and workers
    for asked_s, price_s, pause_s in [(0.1, 0.0, 300.0), (0.3, 1.6, 300.0), (1.1, 8.0, 800.0)]:
        tuned._latest = {of(2): reached(of(2), asked_s)}
        found = tuned._proof_s(reached(of(4), 0.1))
        assert found == (pytest.approx(price_s), pytest.approx(pause_s))


def test_gains_on_the_way_are_multiplied() -> None:
    gain = _product(about(2.0, 1.5, 3.0, 5), about(3.0, 2.0, 4.0, 4))
    assert gain == about(6.0, 3.0, 12.0, 4)


@pytest.mark.parametrize(
    ("after", "stuck", "seconds", "left"),
    [
        (2, 1, 2.30, 11),
        (2, 3, 3.95, 11),
        (2, 1000, 5.27, 0),  # the loop goes on alone
        (3, 1000, 20.0, 0),
        (40, 1, 2.35, 11),
        (40, 3, 3.49, 0),
    ],
)
def test_stuck_workers_cost_seconds_and_no_batch(
    after: int, stuck: int, seconds: float, left: int
) -> None:
    training = Training(fetch_s=0.05, cpu=0.05, step_s=0.005)
    training.tuner(of(0))
    get_stuck(training, range(after, after + stuck))
    seen = [training.batch() for _ in range(75)]
    assert sum(seen, []) == [*range(600)]
    assert training.now - BEGUN_S == pytest.approx(seconds, rel=0.02)
    assert training.loader.num_workers == left
    assert training.loader._live.equal == 2  # of the batches that are made twice


def test_workers_that_were_asked_for_may_take_long() -> None:
    training = Training(fetch_s=0.05, cpu=0.05, step_s=0.005).fixed(of(2))
    get_stuck(training, range(1, 2))
    assert [training.batch() for _ in range(40)]
    assert training.now > BEGUN_S + 1000.0
    assert training.started == 2


def get_stuck(training: Training, fetches: range) -> None:
    """These fetches of workers take a thousand seconds."""
    usual, numbers = training.fetch_takes, itertools.count()

    def takes(now: float, worker: int, slower: float) -> float:
        is_stuck = worker >= 0 and next(numbers) in fetches
        return 1000.0 if is_stuck else usual(now, worker, slower)

    training.fetch_takes = takes  # type: ignore[method-assign]


def test_size_of_somebodys_batch_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(fetch_s=0.001, cpu=1.0, step_s=0.1)
    training.tuner(of(0))
    training.batch()
    assert training.loader._live.batch_bytes == 1  # lists of numbers have none
    training.loader._live.batch_bytes, asked = 0, list[Any]()
    monkeypatch.setattr(iterator, "BatchShape", SimpleNamespace(of=asked.append))
    for _ in range(3):
        training.batch()
    assert len(asked) == 1
    assert training.loader._live.batch_bytes == 1
