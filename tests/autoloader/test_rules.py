"""The rules by which the tuner decides, each asked by itself: their limits from both sides."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from autotune_loader.autoloader.meter import Measure, Reached
from autotune_loader.autoloader.outlook import Outlook
from autotune_loader.autoloader.tuner import (
    EpochEnded,
    Proposal,
    Switched,
    Tuner,
    _product,
    _verdict,
)
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.values import Interval, LoaderConfig, Measurement
from tests.support import with_workers
from tests.support.training import BEGUN_S, Training


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
    found = Tuner(log, with_workers(asked), cores=4, max_workers=32, **how)
    log.totals.waited_s = active_s
    return found


@pytest.mark.parametrize(
    ("is_fewer", "limits", "count", "speed", "verdict"),
    [
        # Of a gain: low, value and high; of a speed: low and value.
        (False, (0.5, 0.9, 0.99), 1, (1.9, 2.0), False), (False, (0.5, 0.99, 1.0), 1, (0, 1), None),
        (False, (1.01, 1.2, 2), 2, (0, 1), True), (False, (1.01, 1.5, 2), 1, (0, 1), None),
        (False, (1.01, 1.51, 2), 1, (0, 1), True), (False, (1.0, 1.6, 2), 2, (0, 1), None),
        # Steps that wait for others hide a gain, which the speed tells.
        (False, (0.5, 1, 2), 1, (1.02, 1.6), None), (False, (0.5, 1, 2), 2, (1.02, 1.6), True),
        (False, (0.5, 0.99, 2), 2, (1.02, 1.6), None), (False, (0.5, 1, 2), 3, (1.02, 1.5), None),
        (False, (0.5, 1, 2), 4, (1.02, 1.5), True), (False, (0.5, 1, 2), 4, (1.01, 1.5), None),
        # Some day it is over.
        (False, (0.5, 1.01, 2), 5, (0, 1), None), (False, (0.5, 1.01, 2), 6, (0, 1), False),
        (False, (0.5, 1.011, 2), 11, (0, 1), None), (False, (0.5, 1.011, 2), 12, (0, 1), False),
        # Fewer need not be faster.
        (True, (0.5, 0.9, 2), 1, (0, 1), None), (True, (0.5, 0.95, 2), 2, (0, 1), False),
        (True, (0.5, 0.96, 2), 2, (0, 1), None), (True, (0.5, 0.955, 2), 5, (0, 1), False),
        (True, (0.5, 0.99, 2), 5, (0, 1), None), (True, (0.5, 0.99, 2), 6, (0, 0.99), True),
        (True, (0.5, 0.985, 2), 6, (0, 1), False), (True, (0.5, 0.99, 2), 6, (0, 0.985), False),
    ],
)  # fmt: skip
def test_pairs_say_yes_no_or_not_yet(
    is_fewer: bool, limits: Any, count: int, speed: Any, verdict: bool | None
) -> None:
    low, value, high = limits
    found = _verdict(about(value, low, high, count), about(*speed[::-1]), is_fewer=is_fewer)
    assert found is verdict


@pytest.mark.parametrize(
    ("batch_s", "is_idle", "ratio", "expected", "what"),
    [
        (0.1, False, 1.16, 1.16, "kept"), (0.1, False, 1.14, 1.14, "paired"),
        (0.1, True, 1.14, 1.14, "paired"), (0.5, False, 1.06, 1.06, "kept"),
        (0.5, False, 1.04, 1.04, "paired"), (0.5, True, 0.99, 1.0, "kept"),
        (0.5, True, 0.98, 1.0, "paired"), (0.1, False, 0.98, 1.2, "paired"),
        (0.1, False, 0.96, 1.2, "left"),
        # What is far from what was predicted is not believed at once.
        (0.1, False, 1.2, 1.31, "kept"), (0.1, False, 1.2, 1.4, "paired"),
        (0.1, False, 2.0, 1.1, "kept"), (0.1, False, 1.3, 1.0, "paired"),
    ],
)  # fmt: skip
def test_pairs_are_for_what_is_not_clear(
    batch_s: float, is_idle: bool, ratio: float, expected: float, what: str
) -> None:
    asked, config = with_workers(2), with_workers(4)
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
    if what != "paired":  # the next look for more, or fewer, is later
        assert tuned._fewer_at == (70.0 if is_idle else 0.0)
        assert tuned._up_at == (0.0 if is_idle else 45.0)
        assert (tuned._fewer_s, tuned._up_s) == ((60.0, 5.0) if is_idle else (30.0, 10.0))
        assert tuned._known_wait == (0.0 if is_idle else 0.5)
    assert tuned.own_s == pytest.approx(max(0.0, 12 * batch_s / ratio - 12 * batch_s))
    if what == "kept":
        surprise = max(ratio / expected, expected / ratio)
        assert tuned.gain.value == pytest.approx(ratio)
        assert tuned._sure == pytest.approx(max(1.0, ratio / max(1.1, surprise)))


def outlook(configs: list[LoaderConfig], step_s: float, extra_s: float, size: int = 0) -> Any:
    how: Any = {"extra_s": lambda _: extra_s, "batch_bytes": size}
    return Outlook(configs, [reached(with_workers(0))], cores=4, step_s=step_s, **how)


@pytest.mark.parametrize(
    ("mib", "losses", "cheapest"),
    [
        (0, [0, 0, 0, 0], with_workers(0)), (1, [0.01, 0.02, 0.02, 0], with_workers(0)),
        # As deep as is cheap: it hides a batch that comes late.
        (0, [0.02, 0, 0, 0], with_workers(1, 8)), (0.5, [0.02, 0, 0, 0], with_workers(1, 8)),
        (1, [0.02, 0, 0, 0], with_workers(1, 2)), (1, [0.02, 0.02, 0, 0], with_workers(1, 8)),
        (1, [0.02, 0.02, 0.02, 0], with_workers(2, 2)),
    ],
)  # fmt: skip
def test_cheapest_has_fewest_workers_then_a_cheap_queue(
    mib: float, losses: list[float], cheapest: LoaderConfig
) -> None:
    configs = [with_workers(0), with_workers(1, 2), with_workers(1, 8), with_workers(2, 2)]
    found = outlook(configs, 0.02, 0.0, int(mib * (1 << 20)))
    found._losses = np.array(losses)
    assert configs[found.cheapest(range(4))] == cheapest


def test_what_is_expected_has_step_and_extra_seconds() -> None:
    def rates(step_s: float, extra_s: float) -> Any:
        return outlook([with_workers(0), with_workers(8)], step_s, extra_s).rates

    configs = [with_workers(16), with_workers(1), with_workers(8), with_workers(32)]
    assert outlook(configs, 0.02, 0.0).configs == configs[:-1]  # of no use, unless it is the best
    assert rates(0.0, 0.0) == pytest.approx(rates(0.02, 0.0))  # that which was seen beside batches
    assert rates(0.01, 0.0)[1] == pytest.approx(2 * rates(0.0, 0.0)[1], rel=0.1)
    assert 8 / rates(0.0, 0.02) - 8 / rates(0.0, 0.0) == pytest.approx([0.02, 0.02], rel=0.05)


def test_events_tell_what_starting_workers_takes() -> None:
    tuned, kept = tuner(epoch_batches=10), tuner(epoch_batches=10, is_kept=True)
    assert tuner()._starts_s(with_workers(5)) == kept._starts_s(with_workers(5)) == 0.0
    for event, batch_s in [
        (EpochEnded(10, 5.0, 0.0), 0.02 * 5 / 10),
        (Switched(with_workers(5), 0, 0.0), 0.02 * 5 / 10),
        (Switched(with_workers(5), 0, 0.1), 0.1 * 5 / 10),
        (EpochEnded(20, 5.0, 0.2), 0.2 * 5 / 20),
        (Switched(with_workers(5), 0, 0.1), 0.2 * 5 / 20),  # whole epochs tell better
        (EpochEnded(0, 5.0, 0.4), 0.3 * 5 / 20),
    ]:
        tuned.decide(event, 1.0)
        assert tuned._starts_s(with_workers(5)) == pytest.approx(batch_s)
    # AND before there was a worker, receiving a batch of its takes 0.1 ms
    for latest, workers, extra_s in [(0, 5, 0.0751), (0, 0, 0.0), (2, 5, 0.075), (2, 0, 0.0)]:
        tuned._latest = {with_workers(latest): reached(with_workers(latest))}
        assert tuned._extra_s(with_workers(workers)) == pytest.approx(extra_s)


@pytest.mark.parametrize(
    ("workers", "batch_s", "gain", "price_s"),
    [
        (6, 0.01, 1.2, 0.08 + 0.5), (4, 0.01, 1.15, 0.04),  # as many have run
        (4, 0.01, 1.1, 0.04 + 0.2 * 0.25), (4, 0.1, 1.1, 0.04 + 0.2 * 0.6),
        (4, 1.0, 1.1, 0.04 + 0.2 * 1.0), (1, 0.01, 1.2, 0.0),
    ],
)  # fmt: skip
def test_a_trial_costs_starts_first_fetches_and_risk(
    workers: int, batch_s: float, gain: float, price_s: float
) -> None:
    tuned = tuner(2)
    tuned._meter.open_s, tuned._meter.has_run = 0.5, 4
    assert tuned._price(
        with_workers(workers), reached(with_workers(2), batch_s), gain
    ) == pytest.approx(price_s)


def test_trials_may_cost_time_and_what_they_gain() -> None:
    tuned = tuner(2, 100.0, earlier_s=50.0)
    tuned.own_s, tuned.gained_s = 1.0, 4.0
    assert tuned._may(2.5)
    assert not tuned._may(2.501)
    # AND what was asked for is tried again the later, the dearer that is: six blocks, and workers
    for asked_s, price_s, pause_s in [(0.1, 0.0, 300.0), (0.3, 1.6, 300.0), (1.1, 8.0, 800.0)]:
        tuned._latest = {with_workers(2): reached(with_workers(2), asked_s)}
        found = tuned._proof_s(reached(with_workers(4), 0.1))
        assert found == (pytest.approx(price_s), pytest.approx(pause_s))


def test_gains_on_the_way_are_multiplied() -> None:
    gain = _product(about(2.0, 1.5, 3.0, 5), about(3.0, 2.0, 4.0, 4))
    assert gain == about(6.0, 3.0, 12.0, 4)


@pytest.mark.parametrize(
    ("asked", "how", "killed", "stuck", "seconds", "started", "left"),
    [
        (0, {}, {}, range(2, 3), 2.292, 10, 10),  # the first two are what the loop has made, too
        (0, {}, {}, range(2, 5), 4.023, 12, 10),
        (0, {}, {}, range(2, 1000), 5.263, 10, 0),  # the loop goes on alone
        (0, {}, {}, range(3, 1000), 19.49, 11, 0),
        (0, {}, {}, range(40, 43), 3.387, 11, 0),
        (0, {}, {21: [0]}, range(0), 1.850, 11, 10),
        (0, {}, {21: [0, 1], 22: [0, 1]}, range(0), 4.242, 12, 0),
        (0, {}, {30: [0]}, range(0), 2.106, 11, 10),
        (0, {}, {30: [0, 1, 2, 3]}, range(0), 3.80, 12, 0),
        (2, {}, {5: [0]}, range(0), 1.445, 11, 10),
        (2, {}, {5: [0, 1], 6: [0, 1]}, range(0), 1.391, 14, 10),
        (2, {}, {70: [0]}, range(0), 1.639, 11, 2),
        (2, {"persistent_workers": True}, {40: [1]}, range(0), 3.095, 11, 2),
        (2, {"tune": False}, {}, range(1, 2), 1001.9, 2, 2),  # who was asked for may take long
    ],
)  # fmt: skip
def test_stuck_and_killed_workers_cost_no_batch(
    asked: int, how: Any, killed: Any, stuck: range, seconds: float, started: int, left: int
) -> None:
    epoch = 25 if "persistent_workers" in how else 1000
    training = Training(fetch_s=0.05, cpu=0.05, step_s=0.005, epoch_batches=epoch)
    training.tuner(with_workers(asked), **how)
    usual, numbers = training.fetch_takes, itertools.count()
    training.fetch_takes = lambda now, worker, slower: (  # type: ignore[method-assign]
        1000.0 if worker >= 0 and next(numbers) in stuck else usual(now, worker, slower)
    )
    for number in range(120 if 70 in killed or epoch == 25 else 75):
        begin = 8 * (number % epoch)
        assert training.batch() == [*range(begin, begin + 8)]
        for worker in killed.get(number, []):
            training._batches._workers[worker].kill()
    assert training.now - BEGUN_S == pytest.approx(seconds, rel=0.01)
    assert training.started == started
    assert training.loader.num_workers == left
    # Workers are given up for good if none ever made a batch.
    is_refused = training.loader.found.tuner.refused is not None
    assert is_refused == (22 in killed or "tune" in how)
