"""A burst of whole epochs, for epochs so short that their beginnings and ends are much of them.

    start-up │ epoch 1 │ gap │ epoch 2 │ gap │ epoch 3 │        gap: the iterator ends (workers are joined, unless they
             not timed └───── window, epoch by epoch ──┘        persist), a new one begins, the first batch is fetched

Epochs end when their last step is done: by the device's events where a host runs ahead of it. How many are enough, and what
their ends tell: `pipeline.epoch_throughput`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from autotune_loader.pipeline.epoch_throughput import are_enough_epochs, over_epochs
from autotune_loader.probe.burst_loop import Announce, Run
from autotune_loader.probe.step import TrainingStep
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan


class Holder(Protocol):
    """The owner of the running iterator."""

    iterator: Any

    def open(self, loader: Any) -> None:
        """Begin an epoch."""


def measure_epochs(
    holder: Holder,
    loader: Any,
    run: Run,
    step: TrainingStep,
    plan: BurstPlan,
    enter: Announce,
    note_memory: Callable[[], None] = lambda: None,
    ahead: Callable[[Iterator[Any]], Iterator[Any]] | None = None,
) -> Measurement | Failure:
    """Train for some epochs and measure what an epoch takes, from the end of one to the end of the next.

    Args:
        holder: holds the first epoch's iterator, and then the others.
        loader: whose epochs end.
        run: takes the batches.
        step: what is done with them.
        plan: how long.
        enter: told when the first batch is there.
        note_memory: reads memory, now and then in the first epoch, which is not timed: workers end with their epoch.
        ahead: copies the batches of an iterator ahead of the step.
    """
    begun, ends, batches, count = run.now(), list[float](), list[int](), 0
    while not are_enough_epochs(ends, plan, begun):
        if ends:
            holder.iterator = None  # as at the end of a training loop: workers that do not persist are joined here
            holder.open(loader)
            if ahead is not None:
                holder.iterator = ahead(holder.iterator)
        while run.deliver(holder.iterator, step):
            count += 1
            if count == 1:
                enter("batches")
            if not ends and count.bit_count() == 1:
                note_memory()
        if count == (batches[-1] if batches else 0):
            return Failure(kind="no_data", phase="first_batch", message="an epoch ended before it delivered a batch")
        ends.append(run.now())
        batches.append(count)
    measured, ends = run.measurement(), run.step_ends(batches)
    found = over_epochs(measured, ends, run.samples(batches[0], batches[-1]))
    return replace(found, gpu=run.gpu_use(ends[0], ends[-1]))
