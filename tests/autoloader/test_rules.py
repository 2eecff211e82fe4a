"""The rules by which the tuner decides, each asked by itself: their limits from both sides."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from autotune_loader.autoloader import tuner as tuner_module
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


def tuner(asked: int = 0, active_s: float = 0.0, **how: Any) -> Any:
    """A tuner, private parts included, whose log has been trained for so long since it began."""
    log = Log()
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
