"""A block: the batches of training that one configuration has served, from when its queues had found their level.

    changed to ── the pool before serves what it has in hand ── queues fill ── block: until its rate is known, or time is up

A full queue hides a small deficit, so that the rate is `summarise`'s: what was consumed, or what the workers make where stock
is left. Ends of epochs and pauses are taken out, the starts of pools are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from autotune_loader.live.traces import LiveTraces, continuous
from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.pipeline.throughput import is_enough, summarise
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, FailureKind, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import BatchTrace

PLAN = BurstPlan(max_s=1.0, min_s=0.3, relative_error=0.015)
"""Long enough to see most changes."""
ROUNDS = 3
"""A block holds so many rounds of the workers, however long they take."""
LEVEL_S = 1.5
"""A new pool's queues have found their level once they were emptied once, or after so long."""
MOST_LOOKED_AT = 1024
"""Batches of a block that are looked at, the latest: a quick loop has thousands a second."""


class Training(Protocol):
    """A training run that notes its batches and can change its workers."""

    @property
    def traces(self) -> LiveTraces: ...
    @property
    def config(self) -> LoaderConfig: ...
    @property
    def failures(self) -> Mapping[LoaderConfig, Failure]: ...
    @property
    def awaits_proof(self) -> bool:
        """Whether it is not known yet whether workers may be tried."""
        ...

    @property
    def shape(self) -> BatchShape | None: ...

    def may_run(self, config: LoaderConfig) -> bool:
        """Whether its batches are known to be those of the configuration asked for."""
        ...

    def change_to(self, config: LoaderConfig) -> None: ...


class Block:
    """Of a configuration that training runs, or was just told to run.

    Args:
        training: what is observed.
        config: that it runs.
        is_new: whether it was told just now, so that the block begins once the change has come into effect.
    """

    def __init__(self, training: Training, config: LoaderConfig, *, is_new: bool) -> None:
        self._training, self.config, self._mark = training, config, training.traces.end
        self._first = self._mark if self._mark and not is_new else None
        """Number of its first batch; None until that is known."""

    def outcome(self) -> Measurement | Failure | None:
        """What the block says, once it says enough."""
        config, training = self.config, self._training
        if (failure := training.failures.get(config.key())) is not None:
            return failure
        if training.config.key() != config.key():
            message = f"{config} was given up for {training.config} while it was observed"
            # What is refused from now on has lost no workers.
            kind: FailureKind = "oom_killed" if training.may_run(config) else "crashed"
            return Failure(kind=kind, phase="batches", message=message)
        self._first = self._begun() if self._first is None else self._first
        if self._first is None:
            return None
        begun, traces = training.traces.block(self._first, self._first + 1), latest(training.traces, self._first)
        # The time of a block is up once it was there for so long, though a quick loop's is looked at in part only.
        left_out_s = traces[0].requested - begun[0].requested if begun and traces else 0.0
        workers = config.num_workers
        if len(traces) < max(3, ROUNDS * workers):
            return None
        is_over = is_enough(traces, PLAN, workers=workers, now=traces[-1].step_end + left_out_s)
        return measured(traces, workers, training.shape) if is_over else None

    def _begun(self) -> int | None:
        """Number of the first batch that came from the new pool after its queues had found their level; None before."""
        log = self._training.traces
        for change in log.changes:
            if change.batch >= self._mark and change.config.key() == self.config.key():
                served = log.block(change.serves_from)
                if not served:
                    return None
                turned_over = change.serves_from + change.config.num_workers * (change.config.prefetch_factor or 0)
                is_late = served[-1].step_end - served[0].requested > LEVEL_S
                return turned_over if log.end >= turned_over else log.end if is_late else None
        return None


def latest(log: LiveTraces, first: int) -> list[BatchTrace]:
    """The batches from `first` on, as if nobody had paused; of many the latest."""
    return continuous(log.block(max(first, log.end - MOST_LOOKED_AT)), log.changes)


def measured(traces: list[BatchTrace], workers: int, shape: BatchShape | None) -> Measurement:
    """What batches of this shape amount to."""
    started, carried = min(traces[0].requested, traces[0].fetch_start), shape or BatchShape()
    found = summarise(traces, workers=workers, started=started)
    return replace(found, batch_bytes=carried.bytes, batch_tensors=carried.tensors, traces=tuple(traces))


def waiting_share(seen: Measurement) -> float:
    """Share of the time in which the loop waited for batches that were not made yet; receiving them is no waiting."""
    traces = seen.traces
    elapsed_s = traces[-1].step_end - traces[0].requested
    waited_s = sum(min(max(0.0, trace.collate_end - trace.requested), trace.wait_s) for trace in traces[1:])
    # What is hidden by stock that workers cannot replace comes out later.
    receive_s = sum(trace.receive_s for trace in traces) / len(traces)
    hidden = 1.0 - seen.samples_per_s.value / seen.batch_size * (seen.step_s + max(receive_s, 0.0))
    return min(1.0, max(waited_s / max(elapsed_s, 1e-9), hidden, 0.0))
