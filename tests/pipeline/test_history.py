"""The record of a running burst: what was noted is what a list of traces would hold."""

from __future__ import annotations

import random

from autotune_loader.pipeline.throughput import relative_error
from autotune_loader.pipeline.trace_log import History
from autotune_loader.values.trace import BatchTrace


def noted(batches: int) -> tuple[History, list[BatchTrace]]:
    """The same batches as a history and as a list of traces."""
    history, traces, now, rng = History(), [], 0.0, random.Random(0)
    for number in range(batches):
        begun, now = now, now + 0.01 + 0.001 * rng.random()
        samples = 4 + number % 2
        fetch = (0, begun, begun + 0.004, begun + 0.005, 0.004, samples)
        history.note((fetch, begun, begun + 0.006, now))
        traces.append(
            BatchTrace(
                worker=0,
                fetch_start=begun,
                fetch_end=begun + 0.004,
                collate_end=begun + 0.005,
                cpu_s=0.004,
                requested=begun,
                received=begun + 0.006,
                step_end=now,
                samples=samples,
            )
        )
    return history, traces


def test_what_was_noted_comes_back_as_traces():
    history, traces = noted(5)
    assert list(history) == traces
    assert history[1:4:2] == traces[1:4:2]
    assert history[-1] == traces[-1]


def test_a_trace_that_was_looked_at_is_not_made_again():
    history, _ = noted(2)
    assert history[1] is history[1]


def test_a_running_burst_reads_the_same_error_from_it():
    # GIVEN so many batches that they are taken in groups, some of which were looked at before
    history, traces = noted(2000)
    _ = history[500:600]
    assert relative_error(history, workers=0) == relative_error(traces, workers=0)
