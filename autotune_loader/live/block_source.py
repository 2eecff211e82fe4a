"""Evidence from blocks of training itself: the batches that one configuration has served since it was asked for.

    asked for ── the pool before serves what it has in hand ── block: until its rate is known, or its time is up ── Evidence

A full queue hides a small deficit, so that the rate is `summarise`'s: what was consumed, or what the workers make where stock
is left. Ends of epochs and pauses are taken out, the starts of pools are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.live.traces import LiveTraces, continuous
from autotune_loader.pipeline.throughput import is_enough, summarise
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import BatchTrace

SEARCH_BLOCK = BurstPlan(max_s=1.0, min_s=0.3, relative_error=0.015)
"""Long enough to see most changes."""
COMPARE_BLOCK = BurstPlan(max_s=1.5, min_s=0.5, relative_error=0.005)
LOOK_S = 0.05
"""So often a block that is under way is looked at."""
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

    def may_run(self, config: LoaderConfig) -> bool:
        """Whether its batches are known to be those of the configuration asked for."""
        ...

    def change_to(self, config: LoaderConfig) -> None: ...


@dataclass(slots=True)
class _Block:
    config: LoaderConfig
    ask: Ask
    mark: int
    """Number of the batch that was noted next when it was asked for."""
    first: int | None
    """Number of its first batch, once that is known."""


class BlockSource:
    """Evidence from a training run: `begin` a block and ask for its `evidence` between batches until there is some.

    Args:
        training: what is observed.
        advance: trains one batch, for `gather` alone, which pulls what else the training loop brings.
    """

    def __init__(self, training: Training, advance: Callable[[], object] | None = None) -> None:
        self._training = training
        self._advance = advance
        self._block: _Block | None = None
        self._seconds: dict[LoaderConfig, float] = {}

    @property
    def pause_s(self) -> float:
        """For how long the loop may be left alone."""
        return LOOK_S

    def settle(self, config: LoaderConfig) -> None:
        """Change to this configuration for good, or until the next block."""
        if config.key() != self._training.config.key():
            self._training.change_to(config)

    def is_due(self) -> bool:
        """Whether what was asked for last has been begun; with other ranks it has to wait for its batch."""
        return True

    def begin(self, config: LoaderConfig, ask: Ask) -> None:
        """Change to this configuration, and observe it from its first batch on."""
        end, is_running = self._training.traces.end, config.key() == self._training.config.key()
        is_whole = is_running and end > 0
        self._block = _Block(config, ask, end, end if is_whole else None)
        if not is_running:
            self._training.change_to(config)

    def evidence(self) -> Evidence | None:
        """What the block says, once it says enough."""
        block, training = self._block, self._training
        assert block is not None
        failure = self._failure(block)
        if failure is not None:
            return self._ended(block, failure)
        if block.first is None:
            block.first = self._first(block)
            if block.first is None:
                return None
        begun, traces = training.traces.block(block.first, block.first + 1), self._traces(block.first)
        # The time of a block is up once it was there for so long, though a quick loop's is looked at in part only.
        left_out_s = traces[0].requested - begun[0].requested if begun and traces else 0.0
        plan = SEARCH_BLOCK if block.ask.phase == "search" else COMPARE_BLOCK
        workers = training.config.num_workers
        if len(traces) < max(3, ROUNDS * workers) or not is_enough(
            traces, plan, workers=workers, now=traces[-1].step_end + left_out_s
        ):
            return None
        return self._ended(block, _measured(traces, workers))

    def latest(self, config: LoaderConfig, first: int) -> Evidence | None:
        """What runs, by its batches from `first` on; the latest pool's only."""
        log = self._training.traces
        served = [change.serves_from for change in log.changes if change.reason in ("start", "change")]
        traces = self._traces(max(first, *served[-1:], log.first))
        if len(traces) < max(3, ROUNDS * config.num_workers):
            return None
        return Evidence(config=config, outcome=_measured(traces, config.num_workers), phase="compare")

    def gather(self, config: LoaderConfig, ask: Ask) -> Evidence:
        if self._advance is None:
            raise ValueError("advance=None lets the training loop pull; BlockSource(training, advance) would work")
        self.begin(config, ask)
        while (evidence := self.evidence()) is None:
            self._advance()
        return evidence

    def cost_s(self, config: LoaderConfig, ask: Ask) -> float:  # noqa: ARG002 - a block is a block
        return self._seconds.get(config.key(), max(self._seconds.values(), default=0.0))

    def _ended(self, block: _Block, outcome: Measurement | Failure) -> Evidence:
        self._block = None
        if isinstance(outcome, Measurement):
            self._seconds[block.config.key()] = outcome.window_s
        ask = block.ask
        return Evidence(config=block.config, outcome=outcome, kind=ask.kind, phase=ask.phase, group=ask.group)

    def _failure(self, block: _Block) -> Failure | None:
        training = self._training
        if (failure := training.failures.get(block.config.key())) is not None:
            return failure
        if training.config.key() == block.config.key():
            return None
        message = f"{block.config} was given up for {training.config} while it was observed: its workers were lost"
        return Failure(kind="oom_killed", phase="batches", message=message)

    def _first(self, block: _Block) -> int | None:
        """Number of the first batch that came from the new pool after its queues had found their level; None before."""
        log = self._training.traces
        for change in log.changes:
            if change.batch >= block.mark and change.config.key() == block.config.key():
                served = log.block(change.serves_from)
                if not served:
                    return None
                turned_over = change.serves_from + change.config.num_workers * (change.config.prefetch_factor or 0)
                is_late = served[-1].step_end - served[0].requested > LEVEL_S
                return turned_over if log.end >= turned_over else log.end if is_late else None
        return None

    def _traces(self, first: int) -> list[BatchTrace]:
        log = self._training.traces
        first = max(first, log.end - MOST_LOOKED_AT) if log.end - first > 2 * MOST_LOOKED_AT else first
        return continuous(log.block(first), log.changes)


def _measured(traces: list[BatchTrace], workers: int) -> Measurement:
    started = min(traces[0].requested, traces[0].fetch_start)
    return replace(summarise(traces, workers=workers, started=started), traces=tuple(traces[-MOST_LOOKED_AT:]))


def waiting_share(measured: Measurement) -> float:
    """Share of the time in which the loop waited for batches that were not made yet; receiving them is no waiting."""
    traces = measured.traces
    elapsed_s = traces[-1].step_end - traces[0].requested
    waited_s = sum(min(max(0.0, trace.collate_end - trace.requested), trace.wait_s) for trace in traces[1:])
    # What is hidden by stock that workers cannot replace comes out later.
    receive_s = sum(trace.receive_s for trace in traces) / len(traces)
    hidden = 1.0 - measured.samples_per_s.value / measured.batch_size * (measured.step_s + max(receive_s, 0.0))
    return min(1.0, max(waited_s / max(elapsed_s, 1e-9), hidden, 0.0))
