from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_device import FakeStep, FakeTimeline

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.burst_loop import Run
from autotune_loader.probe.step import build_step
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import MAIN_PROCESS
from tests.support import FakeClock

PLAN = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.01)


class Fetches:
    """Batches fetched in this process, which notes how many of the earlier ones lived when each was begun."""

    def __init__(self) -> None:
        self.alive: list[int] = []
        self.batches: list[weakref.ref[torch.Tensor]] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.alive.append(sum(each() is not None for each in self.batches))
        batch = torch.zeros(4, 1)
        self.batches.append(weakref.ref(batch))
        return batch, (MAIN_PROCESS, 0.0, 0.0, 0.0, 0.0, 4)


@pytest.mark.parametrize("on_device", [False, True])
def test_the_last_batch_lives_until_the_next_has_arrived_as_in_a_training_loop(on_device: bool) -> None:
    # GIVEN fetches as a plain loop makes them: its batch is another one only once the next has arrived
    plain = Fetches()
    for _batch, _record in plain:
        if len(plain.alive) == 4:
            break
    # WHEN a burst takes as many
    fetches, clock = Fetches(), FakeClock()
    if on_device:
        timeline = FakeTimeline(clock, clock.sleep)
        run = Run(PLAN, 0, 0.0, timeline=timeline)
        step: Any = FakeStep(timeline, step_s=0.01)
    else:
        run = Run(PLAN, 0, 0.0)
        step = build_step(TrainingSide(model=None, train_step=lambda model, batch: None), torch.zeros(4, 1))
    for _ in range(4):
        run.deliver(fetches, step)
    # THEN malloc has the same memory to give for each fetch
    assert fetches.alive == plain.alive == [0, 1, 1, 1]
    # THEN nothing outlives the burst
    del run
    assert all(each() is None for each in fetches.batches)
