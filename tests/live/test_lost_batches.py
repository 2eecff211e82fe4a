"""Batches that never come from their workers: where nobody asked for workers the loop makes them, else it is an error."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from autotune_loader import AutoLoader
from autotune_loader.live import state
from tests.support.schedules import Numbers

pytestmark = pytest.mark.process
SAMPLES, WRONG = 800, 600
MAIN = os.getpid()


class Unsent(Numbers):
    """A late sample holds what no worker can send."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return super().__getitem__(index), (lambda: index) if index == WRONG else None


class Stuck(Numbers):
    """A late sample is never done in a worker, as behind a lock that was held in the fork."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(1000.0 if index == WRONG and os.getpid() != MAIN else 0.002)
        return super().__getitem__(index), None


def firsts(loader: AutoLoader) -> list[int]:
    return [int(number[0]) for batch in loader for number, _ in batch]


@pytest.mark.parametrize("dataset", [Unsent(SAMPLES), Stuck(SAMPLES)], ids=["unsent", "stuck"])
def test_workers_nobody_asked_for_lose_no_batch(dataset: Numbers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SHORTEST_PATIENCE_S", 2.0)
    loader = AutoLoader(dataset, batch_size=8, collate_fn=list)

    while not any(change.reason == "loss" for change in loader.traces.changes):
        assert firsts(loader) == list(range(SAMPLES))
    assert loader.config.num_workers == 0


def test_workers_that_were_asked_for_and_cannot_send_are_an_error() -> None:
    loader = AutoLoader(Unsent(SAMPLES), batch_size=8, collate_fn=list, num_workers=1, tune=False)

    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        firsts(loader)
