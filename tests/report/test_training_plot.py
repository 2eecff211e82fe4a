"""Samples/s over the time trained, from the batches of the training itself."""

from __future__ import annotations

import pytest

from autotune_loader.report.plots.training import plot_training
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trace import BatchTrace

FIRST = BatchTrace(
    worker=0, samples=10, fetch_start=0.0, fetch_end=0.0, collate_end=0.0, cpu_s=0.0, requested=100.0, received=100.0,
    step_end=100.1,
)  # fmt: skip
BATCHES = [FIRST._replace(requested=100 + n * 0.1, step_end=100.1 + n * 0.1) for n in range(40)]
NONE, TWO, FOUR = LoaderConfig(), LoaderConfig(num_workers=2), LoaderConfig(num_workers=4)


@pytest.mark.parametrize(
    ("traces", "changes", "shown"),
    [
        # A pool that begins anew with the same configuration is no change.
        (BATCHES, [(0, TWO), (20, FOUR), (30, FOUR)], [(0.0, "2 x 2"), (2.0, "4 x 2")]),
        (BATCHES, [(0, NONE)], [(0.0, "0")]),
        (BATCHES[:5], [(-3, TWO), (9, FOUR)], []),  # what was forgotten, and what is yet to come
    ],
)
def test_rates_and_changes_are_drawn_where_they_were(
    traces: list[BatchTrace], changes: list[tuple[int, LoaderConfig]], shown: list[tuple[float, str]]
) -> None:
    axes = plot_training(traces, changes).axes[0]
    rates = axes.patches[0].get_data().values.tolist()
    assert rates == pytest.approx([100.0] * len(rates), rel=0.21)
    assert [(pytest.approx(t.get_position()[0]), t.get_text().strip()) for t in axes.texts] == shown


def test_nothing_is_said_of_nothing() -> None:
    assert [text.get_text() for text in plot_training([], []).axes[0].texts] == ["No batch was trained yet."]
