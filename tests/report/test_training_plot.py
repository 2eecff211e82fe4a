"""Samples/s over the time trained, from the batches of the training itself."""

from __future__ import annotations

import pytest

from autotune_loader.report.plots.training import plot_training
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trace import BatchTrace

FIRST = BatchTrace(
    worker=0,
    samples=10,
    fetch_start=0.0,
    fetch_end=0.0,
    collate_end=0.0,
    cpu_s=0.0,
    requested=100.0,
    received=100.0,
    step_end=100.1,
)
TWO, FOUR = LoaderConfig(num_workers=2), LoaderConfig(num_workers=4)


def batches(count: int, period_s: float) -> list[BatchTrace]:
    return [
        FIRST._replace(requested=100 + number * period_s, step_end=100 + (number + 1) * period_s)
        for number in range(count)
    ]


def drawn(
    traces: list[BatchTrace], changes: list[tuple[int, LoaderConfig]]
) -> tuple[list[float], list[tuple[float, str]]]:
    """Rates of the line, and (second, text) of the changes."""
    axes = plot_training(traces, changes).axes[0]
    return axes.patches[0].get_data().values.tolist(), [(t.get_position()[0], t.get_text().strip()) for t in axes.texts]


def test_rates_are_samples_over_seconds_from_the_first_batch() -> None:
    rates, changes = drawn(batches(40, 0.1), [(0, TWO), (20, FOUR), (30, FOUR)])
    assert rates == pytest.approx([100.0] * len(rates), rel=0.21)
    # A pool that begins anew with the same configuration is no change.
    assert changes == [(pytest.approx(0.0), "2 x 2"), (pytest.approx(2.0), "4 x 2")]


def test_without_workers_the_picture_says_so() -> None:
    assert drawn(batches(40, 0.1), [(0, LoaderConfig())])[1] == [(0.0, "0")]


def test_what_was_forgotten_is_not_shown_and_nothing_is_said_of_nothing() -> None:
    assert drawn(batches(5, 0.1), [(-3, TWO), (9, FOUR)])[1] == []
    empty = plot_training([], [])
    assert [text.get_text() for text in empty.axes[0].texts] == ["No batch was trained yet."]
