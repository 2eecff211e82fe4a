"""What training loops spend on one loader: every batch's history, and totals over all epochs.

iter() ── asks ── receives ── step ── asks ── receives ── step ── asks ── is told that the epoch is over
 starts    waits               steps   waits               steps   waits

Seconds are of one monotonic clock, which the caller reads; with an accelerator, of when it was through with its work (`Marks`),
so that batches are counted a little later. A step is a pause (evaluation, a checkpoint, a notebook left
alone), and not counted, if it is longer than 0.5 s, than 20 median steps, and than twice what comes back once in 80 steps: an
evaluation every 100 steps is a pause, and what takes as long every 50 steps is a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from autotune_loader.pipeline.marks import Marks
from autotune_loader.values import MAIN_PROCESS, BatchTrace, Interval, Measurement

MOST_ROWS = 20_000
"""Batches whose histories are kept at least; twice as many at most (10 MiB)."""
LATEST_STEPS = 1_000
"""By so many steps a long one is judged."""
PAUSE_S, PAUSE_STEPS, PAUSE_USUAL = 0.5, 20.0, 2.0
"""A pause takes longer than this, than so many median steps, and than so many times what comes back often."""
OFTEN, LEAST_OFTEN = 80, 3
"""What comes once in so many steps comes back often, and has come at least so many times."""

Fetch = tuple[int, float, float, float, float]
"""worker, fetch_start, fetch_end, collate_end, cpu_s: the first fields of a `BatchTrace`."""


def longest_s(seconds: Sequence[float]) -> float:
    """What takes longer than this is no part of the series, which is not empty: it is far from usual, and rare."""
    ordered = sorted(seconds)
    count = len(ordered)
    often = ordered[-min(count, max(LEAST_OFTEN, count // OFTEN + 1))]
    return max(PAUSE_S, PAUSE_STEPS * ordered[(count - 1) // 2], PAUSE_USUAL * often)


def measurement(rows: Sequence[BatchTrace], longest_step_s: float, workers: int | None = None) -> Measurement | None:
    """What batches of one configuration say; None of none. With `workers`, batches that others made are not its own.

    Left out are what others made, pauses, waits that are as long and rare, and what lay ready when one of these was over.
    """
    longest_row_s = longest_s([row.wait_s + min(row.step_s, longest_step_s) for row in rows]) if rows else 0.0
    own, late, ready = list[BatchTrace](), list[BatchTrace](), -math.inf
    for row in rows:
        is_other = workers is not None and (row.worker != MAIN_PROCESS) != bool(workers)
        if is_other or row.step_s > longest_step_s or row.wait_s > longest_row_s:
            ready = row.step_end
        else:
            (own if row.collate_end > ready else late).append(row)
    if not (own := own or late):
        return None
    window_s, waited_s = sum(row.step_end - row.requested for row in own), sum(row.wait_s for row in own)
    if workers:  # a queue that drains is no speed
        drained_s = max(0.0, sum(row.service_s for row in own) / workers - window_s)
        window_s, waited_s = window_s + drained_s, waited_s + drained_s
    window_s = max(window_s, 1e-9)
    rate = sum(row.samples for row in own) / window_s
    return Measurement.of(
        own,
        Interval(value=rate, low=0.0, high=math.inf, count=len(own)),
        window_s=window_s,
        first_batch_s=own[0].wait_s,
        wait_share=waited_s / window_s,
    )


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
    asking_s: float = 0.0
    """Of the loop itself, between asking for a batch and receiving it, also while an accelerator was at work."""

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
        self.totals, self.marks = Totals(), Marks()
        self.rows: list[BatchTrace] = []
        """The latest batches; `forgotten` older ones were dropped."""
        self.forgotten = 0
        self.current: Loop | None = None
        self.steps = deque[float](maxlen=LATEST_STEPS)
        """What the latest steps took, pauses included."""
        self._aside = list[float]()
        """Steps that were pauses when they ended: they are counted if they come back often."""

    @property
    def end(self) -> int:
        return self.forgotten + len(self.rows)

    @property
    def behind(self) -> int:
        """Batches that the loop has had and that are not in the log yet, or one or two more where an epoch begins."""
        return (len(self.marks) + 1) // 2

    def since(self, batch: int) -> list[BatchTrace]:
        """The batches from this number on, those that are remembered."""
        return self.rows[max(0, batch - self.forgotten) :]

    def begin(self, now: float) -> Loop:
        """`iter()` was called: a loop over one epoch."""
        self.current = Loop(self, now)
        return self.current

    def trim(self) -> None:
        """Forget the older half of the rows."""
        del self.rows[:MOST_ROWS]
        self.forgotten += MOST_ROWS

    def step(self, seconds: float) -> None:
        """A step has ended. A long first one, which may compile, is judged by the second."""
        self.steps.append(seconds)
        is_long = seconds > PAUSE_S
        if not is_long:
            self.totals.stepped_s += seconds
            if not self._aside:
                return
        else:
            self._aside.append(seconds)
        if len(self.steps) > 1 and (is_long or len(self.steps) == 2):
            longest = longest_s(self.steps)
            self.totals.stepped_s += sum(each for each in self._aside if each <= longest)
            self._aside = [each for each in self._aside[-LATEST_STEPS:] if each > longest]


class Loop:
    __slots__ = (
        *("_asked", "_fetch", "_log", "_own_asked", "_received", "_rows", "_samples"),
        *("batches", "begun", "is_over"),
    )

    def __init__(self, log: Log, now: float) -> None:
        self._log, self._rows, self.begun = log, log.rows, now
        self._asked = self._own_asked = now
        self._received, self._samples = 0.0, 0
        self._fetch: Fetch | None = None
        self.batches, self.is_over = 0, False
        log.marks.looks = 0
        log.marks.note(now, self._begin)

    def started(self, now: float) -> None:
        """`iter()` has returned: what it took was waiting."""
        self._log.marks.note(now, self._started)

    def ask(self, now: float) -> None:
        """The loop asks for a batch: its step has ended."""
        self._own_asked = now
        self._log.marks.note(now, self._ask)

    def receive(self, now: float, samples: int, fetch: Fetch | None = None) -> None:
        """The loop has a batch; `fetch` is its history, None where torch's workers made it."""
        self.batches += 1
        self._log.totals.asking_s += now - self._own_asked
        self._log.marks.note(now, partial(self._receive, self.batches == 1, samples, fetch))

    def end(self, now: float) -> None:
        """The loop is told that the epoch is over."""
        if not self.is_over:
            self.is_over = True
            self._log.marks.note(now, self._end)

    def _begin(self, now: float) -> None:
        self.begun = self._asked = now

    def _started(self, now: float) -> None:
        totals, self._asked = self._log.totals, now
        totals.waited_s += now - self.begun
        totals.started_s += now - self.begun

    def _ask(self, now: float) -> None:
        received = self._received
        if received:
            self._log.step(now - received)
            if self._fetch is not None and (self._log.current is self or self.is_over):
                self._rows.append(BatchTrace(*self._fetch, self._samples, self._asked, received, now))
                if len(self._rows) > 2 * MOST_ROWS:
                    self._log.trim()
            self._received = 0.0
        self._asked = now

    def _receive(self, is_first: bool, samples: int, fetch: Fetch | None, now: float) -> None:
        totals, waited_s = self._log.totals, now - self._asked
        if is_first:
            totals.epochs += 1
            totals.started_s += waited_s
        totals.batches += 1
        totals.samples += samples
        totals.waited_s += waited_s
        self._fetch, self._samples, self._received = fetch, samples, now

    def _end(self, now: float) -> None:
        self._log.totals.waited_s += now - self._asked
