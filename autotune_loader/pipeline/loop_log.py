"""What training loops spend on one loader: every batch's history, and totals over all epochs.

iter() ── asks ── receives ── step ── asks ── receives ── step ── asks ── is told that the epoch is over
 starts    waits               steps   waits               steps   waits

Seconds are of one monotonic clock, which the caller reads. A pause in which nobody asks (evaluation, a checkpoint, a
notebook left alone) is no step. Torch is not needed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune_loader.values import BatchTrace

MOST_ROWS = 20_000
"""Batches whose histories are kept at least; twice as many at most (10 MiB)."""
PAUSE_S, PAUSE_STEPS = 0.5, 20.0
"""A step is a pause if it takes longer than this and so many mean steps."""

Fetch = tuple[int, float, float, float, float]
"""worker, fetch_start, fetch_end, collate_end, cpu_s: the first fields of a `BatchTrace`."""


@dataclass(slots=True)
class Totals:
    """Sums over all loops of a loader."""

    epochs: int = 0
    """In which a batch was asked for."""
    batches: int = 0
    samples: int = 0
    waited_s: float = 0.0
    """Until a batch was there; starts of epochs and workers included."""
    started_s: float = 0.0
    """Of that, from `iter()` until the first batch of an epoch."""
    stepped_s: float = 0.0

    @property
    def active_s(self) -> float:
        return self.waited_s + self.stepped_s

    @property
    def wait_share(self) -> float | None:
        """Share of them in which the loop waited; None before there was a step, without which there is no share."""
        return self.waited_s / self.active_s if self.stepped_s > 0 else None

    @property
    def starting_share(self) -> float:
        """Share of them in which the loop waited for an epoch's first batch longer than for another one."""
        others = self.batches - self.epochs
        if others <= 0 or self.active_s <= 0:
            return 0.0
        typical_s = (self.waited_s - self.started_s) / others
        return max(0.0, self.started_s - self.epochs * typical_s) / self.active_s


class Log:
    """One loader's, over all its epochs. Rows are those of the loop that was begun last."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.rows: list[BatchTrace] = []
        """The latest batches; `forgotten` older ones were dropped."""
        self.forgotten = 0
        self.current: Loop | None = None

    @property
    def end(self) -> int:
        return self.forgotten + len(self.rows)

    def since(self, batch: int) -> list[BatchTrace]:
        """The batches from this number on, those that are remembered."""
        return self.rows[max(0, batch - self.forgotten) :]

    def begin(self, now: float) -> Loop:
        """`iter()` was called: a loop over one epoch."""
        self.current = Loop(self, now)
        if len(self.rows) > 2 * MOST_ROWS:
            del self.rows[:MOST_ROWS]
            self.forgotten += MOST_ROWS
        return self.current


class Loop:
    __slots__ = ("_asked", "_begun", "_fetch", "_log", "_received", "_rows", "_samples", "batches", "is_over")

    def __init__(self, log: Log, now: float) -> None:
        self._log, self._rows, self._begun = log, log.rows, now
        self._asked, self._received, self._samples = now, 0.0, 0
        self._fetch: Fetch | None = None
        self.batches, self.is_over = 0, False

    def started(self, now: float) -> None:
        """`iter()` has returned: what it took was waiting."""
        totals, self._asked = self._log.totals, now
        totals.waited_s += now - self._begun
        totals.started_s += now - self._begun

    def ask(self, now: float) -> None:
        """The loop asks for a batch: its step has ended."""
        received = self._received
        if received:
            totals, step_s = self._log.totals, now - received
            if step_s <= PAUSE_S or step_s * totals.batches <= PAUSE_STEPS * totals.stepped_s or totals.batches == 1:
                totals.stepped_s += step_s
            if self._fetch is not None and self._log.current is self:
                self._rows.append(BatchTrace(*self._fetch, self._samples, self._asked, received, now))
            self._received = 0.0
        self._asked = now

    def receive(self, now: float, samples: int, fetch: Fetch | None = None) -> None:
        """The loop has a batch; `fetch` is its history, None where torch's workers made it."""
        totals, waited_s = self._log.totals, now - self._asked
        if not self.batches:
            totals.epochs += 1
            totals.started_s += waited_s
        self.batches += 1
        totals.batches += 1
        totals.samples += samples
        totals.waited_s += waited_s
        self._fetch, self._samples, self._received = fetch, samples, now

    def end(self, now: float) -> None:
        """The loop is told that the epoch is over."""
        if not self.is_over:
            self.is_over = True
            self._log.totals.waited_s += now - self._asked
