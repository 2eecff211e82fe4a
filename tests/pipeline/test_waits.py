"""What a loop waited for, by the histories of its batches."""

import math

import pytest

from autotune_loader.pipeline.waits import Waits

# A batch: begun, whole, asked for, received; what of its wait was transfer.
BATCHES = [
    ((0.0, 1.0, 0.5, 1.25), 0.25),  # it is made while the loop waits
    ((0.0, 1.0, 2.0, 2.5), 0.5),  # it lies ready
    ((2.0, 3.0, 1.0, 3.0), 0.0),
    ((0.0, 1.5, 0.5, 1.25), 0.0),  # on an accelerator, moments may be earlier than they seem
]


@pytest.mark.parametrize(("batch", "transfer_s"), BATCHES)
def test_a_wait_is_divided(batch, transfer_s):
    made, whole, asked, received = batch
    waits = Waits()
    waits.add(made, whole, 0.5, asked, received)
    assert waits.transfer_s == pytest.approx(transfer_s)
    assert waits.waited_s == received - asked
    assert waits.fetched_s == whole - made
    assert waits.cpu_s == 0.5
    assert waits.unready_s == 0.0


@pytest.mark.parametrize(
    ("pinned", "pinning_s", "transfer_s"),
    [
        ((1.5, 1.75), 0.25, 0.75),
        ((0.25, 1.25), 0.25, 0.75),
        ((0.0, 0.5), 0.0, 1.0),
        ((0.5, 3.0), 1.0, 0.0),
    ],
)
def test_pinning_is_no_transfer(pinned, pinning_s, transfer_s):
    waits = Waits()
    waits.add(0.0, 0.5, 0.0, 1.0, 2.0)
    waits.add_pinned(*pinned, 1.0, 2.0)
    assert waits.pinning_s == pinning_s
    assert waits.transfer_s == transfer_s
    assert waits.pinned_s == pinned[1] - pinned[0]


@pytest.mark.parametrize(("is_early", "unready_s"), [(True, 1.0), (False, 0.0)])
def test_a_worker_may_not_be_ready_at_first(is_early, unready_s):
    waits = Waits()
    waits.add(2.0, 3.0, 0.0, 1.0, 3.0, is_early=is_early)
    waits.add(0.0, 3.0, 0.0, 1.0, 3.0, is_early=is_early)
    assert waits.unready_s == unready_s


@pytest.mark.parametrize(
    ("slow_s", "waited_s", "expected"),
    [(1.0, 0.95, 0.9), (1.0, 0.5, 0.5), (0.39, 0.39, None), (0.41, 0.41, 0.31)],
)
@pytest.mark.parametrize("position", [0, 30, 80])
def test_a_batch_far_above_the_usual_is_slow(position, slow_s, waited_s, expected):
    waits = Waits()
    for number in range(90):
        seconds, wait = (slow_s, waited_s) if number == position else (0.1, 0.01)
        waits.add(10.0, 10.0 + seconds, 0.0, 10.0, 10.0 + wait)
    waits.settle()
    assert waits.usual_s == pytest.approx(0.1)
    assert waits.slow == (expected is not None)
    assert waits.slow_s == pytest.approx(expected or 0.0)
    assert waits.slow_fetches_s == pytest.approx(slow_s if expected else 0.0)


def test_a_batch_may_stand_for_others():
    waits, one = Waits(), Waits()
    for each, times in ((waits, 3), (one, 1)):
        each.add(1.0, 2.0, 0.5, 0.5, 3.0, is_early=True, times=times)
        each.add_pinned(2.0, 2.5, 0.5, 3.0, times)
    sums = (
        "batches",
        "waited_s",
        "unready_s",
        "transfer_s",
        "pinning_s",
        "fetched_s",
        "cpu_s",
        "pinned_s",
    )
    assert [getattr(waits, name) for name in sums] == [3 * getattr(one, name) for name in sums]


def test_cpu_that_is_not_known_is_none():
    waits = Waits()
    for cpu_s in (math.nan, 0.5):
        waits.add(0.0, 1.0, cpu_s, 0.0, 1.0)
    assert waits.cpu_s == 0.5


def test_short_batches_are_not_slow():
    waits = Waits()
    for number in range(90):
        waits.add(0.0, 0.04 if number % 30 == 0 else 0.001, 0.0, 0.0, 0.04)
    waits.settle()
    assert waits.slow == 0
