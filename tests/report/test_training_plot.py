"""Samples/s over the time trained, from the batches of the training itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.report.plots.training import plot_training, training_info
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
        replace(FIRST, requested=100 + number * period_s, step_end=100 + (number + 1) * period_s)
        for number in range(count)
    ]


def test_rates_are_samples_over_seconds_from_the_first_batch() -> None:
    info = training_info(batches(40, 0.1), [(0, TWO), (20, FOUR), (30, FOUR)])
    assert [rate for _, rate in info.rates] == pytest.approx([100.0] * len(info.rates), rel=0.21)
    assert info.rates[0][0] == 0.0
    # A pool that begins anew with the same configuration is no change.
    assert [(second, config) for second, config in info.changes] == [
        (pytest.approx(0.0), TWO),
        (pytest.approx(2.0), FOUR),
    ]


def test_what_was_forgotten_is_not_shown_and_nothing_is_said_of_nothing() -> None:
    assert training_info(batches(5, 0.1), [(-3, TWO), (9, FOUR)]).changes == ()
    empty = plot_training(training_info([], []))
    assert [text.get_text() for text in empty.axes[0].texts] == ["No batch was trained yet."]


def test_the_picture_names_each_change() -> None:
    axes = plot_training(training_info(batches(40, 0.1), [(0, LoaderConfig()), (20, FOUR)])).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0", "4 x 2"]
