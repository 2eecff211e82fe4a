"""Batches that were cut short, as the loop that would have had them whole."""

from __future__ import annotations

import pytest

from autotune_loader.pipeline.cut_short import as_whole
from autotune_loader.pipeline.throughput import summarise
from autotune_loader.values.trace import BatchTrace


def cut(worker: int, *, read_s: float, unread_s: float, step_s: float, cpu_s: float = 0.1) -> BatchTrace:
    """A batch of 16 samples that was read, for a part, from second 1 on."""
    return BatchTrace(
        worker=worker,
        fetch_start=1.0,
        fetch_end=1.0 + read_s,
        collate_end=1.0 + read_s,
        cpu_s=cpu_s,
        requested=1.0,
        received=1.0 + read_s,
        step_end=1.0 + read_s + step_s,
        samples=16,
        unread_s=unread_s,
    )


@pytest.mark.parametrize(
    ("workers", "step_s", "rate"),
    [(0, 4.0, 16 / 20), (1, 0.01, 16 / 16), (4, 0.01, 4 * 16 / 16), (8, 4.0, 16 / 4)],
    ids=["in turns", "one worker", "four workers", "a step that binds"],
)
def test_the_rate_is_that_of_whole_batches(workers: int, step_s: float, rate: float) -> None:
    # GIVEN batches that take 16 s, of which 2 s were seen
    seen = [cut(worker, read_s=2.0, unread_s=14.0, step_s=step_s) for worker in range(max(workers, 1))]
    # WHEN they are taken as whole
    measured = summarise(as_whole(seen, workers), workers=workers, started=0.0)
    # THEN all that is measured is that of a training loop
    assert measured.samples_per_s.value == pytest.approx(rate, rel=0.01)
    assert measured.service_s == pytest.approx(16.0)
    assert measured.service_cpu_s == pytest.approx(0.8)
    assert measured.step_s == pytest.approx(step_s)
    assert measured.first_batch_s == pytest.approx(17.0)


def test_whole_batches_stay_as_they_were_seen() -> None:
    seen = [cut(0, read_s=0.1, unread_s=0.0, step_s=0.1) for _ in range(3)]
    assert as_whole(seen, 1) == seen
