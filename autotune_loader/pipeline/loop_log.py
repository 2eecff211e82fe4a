"""Which loader it is, and what training loops spend on it: every batch's history, and totals over all epochs.

host    iter() ── ask ▪── receive ▪ launch │ ask ▪── receive ▪ launch │ ask ▪── is told that the epoch is over
        starts    waits                      waits                      waits
device                    step ────────────────────│ step ─────────────────────│ idle

Seconds are of one monotonic clock, which the caller reads. With an accelerator, a mark (an event) is laid behind its work at
each of these moments, which count when it has passed them: what passes on the host is mostly no waiting. Nobody waits for it,
so that batches are counted a little later.

Loops of other loaders within a step (evaluation) and checkpoints are told apart from it. What is left of a step is a pause (a
notebook left alone, an evaluation without a loader), and not counted, if it is longer than 0.5 s, than 20 median steps, and
than twice what comes back once in 80 steps: what takes as long every 50 steps is a step.

    wall of the loops = waits + steps + evaluation + checkpoints + pauses
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import RandomSampler

from autotune_loader.lines import Line
from autotune_loader.pipeline.batches import initialized_accelerator
from autotune_loader.pipeline.forking import ParentProcess
from autotune_loader.pipeline.waits import SLOW_S, Waits
from autotune_loader.values import MAIN_PROCESS, BatchTrace, Interval, Measurement, Sampled

MOST_ROWS = 20_000
"""Batches whose histories are kept at least; twice as many at most (10 MiB)."""
MOST_INTERVALS = 10_000
"""Epochs, evaluations and checkpoints whose times are kept."""
LATEST_STEPS = 1_000
"""By so many steps a long one is judged."""
PAUSE_S, PAUSE_STEPS, PAUSE_USUAL = 0.5, 20.0, 2.0
"""A pause takes longer than this, than so many median steps, and than so many times what comes back often."""
WAITS_FOR_A_THREAD = {("threading.py", "join"), ("_base.py", "result"), ("base_events.py", "run_forever")}
"""Where the main thread is while another one trains; beside one that reads ahead, it trains."""
COLLECTING, COLLECTING_S = 0.1, 0.0005
"""Where all steps take less than this share of the pauses, of which there were some, and less than so much each, the loop only
collects batches in between, as where gradients are accumulated over hundreds of them: its pauses are its steps."""
OFTEN, LEAST_OFTEN = 80, 3
"""What comes once in so many steps comes back often, and has come at least so many times."""

Fetch = tuple[int, float, float, float, float]
"""worker, fetch_start, fetch_end, collate_end, cpu_s: the first fields of a `BatchTrace`."""
Pinned = tuple[float, float]
"""pin_start, pin_end: its last fields."""


@dataclass(slots=True)
class Extent:
    """Of a loop, by the host's clock."""

    begun: float
    moment: float
    """The latest one."""


class Beside(threading.local):
    """What this thread does within the steps of its loops: the loops that were begun last, and seconds of checkpoints."""

    def __init__(self) -> None:
        self.loops = deque[Extent](maxlen=128)
        self.saved = deque[Extent](maxlen=1024)
        self.saved_s = 0.0
        self.is_saving = False


beside = Beside()


@contextmanager
def saving() -> Iterator[None]:
    """In this block a checkpoint is written; of blocks within one another the outermost counts."""
    if beside.is_saving:
        yield
        return
    begun, beside.is_saving = time.monotonic(), True
    try:
        yield
    finally:
        now = time.monotonic()
        beside.saved.append(Extent(begun, now))
        beside.saved_s += now - begun
        beside.is_saving = False


class Site(NamedTuple):
    """Which loader it is: where it is made, and what it reads; however often a script makes it anew, it is one.

    It is told by attributes alone: lengths are the user's code, which may draw or count.
    """

    line: Line
    """`?:0` where it cannot be told."""
    dataset: str
    """Its class."""
    batch_size: int | None
    is_shuffled: bool

    @classmethod
    def of(cls, loader: Any, line: Line | None) -> Site:
        """The site of a loader that was made at this line; None where no line is known."""
        dataset, batches = getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)
        size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
        while (inner := getattr(batches, "batch_sampler", None)) is not None:  # as Accelerate shards them
            batches = inner
        sampler = getattr(batches, "sampler", None)
        sampler = sampler if sampler is not None else getattr(loader, "sampler", None)  # an array has no truth
        return cls(
            line=line or Line("?", 0),
            dataset=type(dataset).__name__,
            batch_size=size if isinstance(size, int) else None,
            is_shuffled=isinstance(sampler, RandomSampler) or getattr(sampler, "shuffle", False) is True,
        )

    def contents(self, samples: int | None = None) -> str:
        """What it reads, for people: "Images[1200], batches of 32, shuffled"; `samples` of an epoch, as counted."""
        length = "" if samples is None else f"[{samples}]"
        size = "" if self.batch_size is None else f", batches of {self.batch_size}"
        return f"{self.dataset}{length}{size}{', shuffled' if self.is_shuffled else ''}"


class Log:
    """One loader's, over all its epochs. Rows are those of the loop that was begun last."""

    def __init__(self) -> None:
        self.totals, self.waits, self.marks = Totals(), Waits(), Marks()
        self.rows: list[BatchTrace] = []
        """The latest batches; older ones were dropped."""
        self._dropped = 0
        self._before = 0, 0, 0.0, 0.0
        """Batches, samples, seconds of waiting and of all else, when figures were last asked for."""
        self.current: Loop | None = None
        self.steps = deque[float](maxlen=LATEST_STEPS)
        """What the latest steps took, pauses included."""
        self._aside = list[float]()
        """Steps that were pauses when they ended: they are counted if they come back often."""
        self._pauses, self._is_collecting = 0, False
        self.parent: ParentProcess | None = None
        """What workers were forked from last; None where they are not forked."""
        self.workers = 0
        """Those that torch starts for an epoch."""
        self.garbage_s: Callable[[], float] = float
        """CPU seconds of garbage collections until now; 0 where nobody counts them."""
        self.sampled: Sampled | None = None
        """Where a trace is written."""
        self.intervals = deque[tuple[str, float, float]](maxlen=MOST_INTERVALS)
        """Names, begins and ends of epochs, evaluations and checkpoints, where a trace is written."""

    @property
    def end(self) -> int:
        """Batches so far, dropped ones included."""
        return self._dropped + len(self.rows)

    @property
    def behind(self) -> int:
        """Batches that the loop has had and that are not in the log yet, or one or two more where an epoch begins."""
        return (len(self.marks) + 1) // 2

    def since(self, batch: int) -> list[BatchTrace]:
        """The batches from this number on, those that are remembered."""
        return self.rows[max(0, batch - self._dropped) :]

    def recent(self, prefix: str) -> dict[str, float]:
        """Figures since the last call, by their names with this prefix; none where there was no batch."""
        self.marks.settle(time.monotonic())
        totals, before = self.totals, self._before
        self._before = now = totals.batches, totals.samples, totals.waited_s, totals.active_s
        batches, samples, waited_s, active_s = (each - last for each, last in zip(now, before, strict=True))
        if not batches or active_s <= 0:
            return {}
        figures = {"wait_s": waited_s / batches, "wait_share": waited_s / active_s, "samples_per_s": samples / active_s}
        return {f"{prefix}{name}": value for name, value in figures.items()}

    def begin(self, now: float) -> Loop:
        """`iter()` was called: a loop over one epoch."""
        self.current = Loop(self, now)
        return self.current

    def workers_start(self, context: Any, *, is_elastic: bool = False) -> None:
        """Workers are about to start with this `multiprocessing_context`."""
        self.parent = ParentProcess.of(context, is_elastic=is_elastic)

    def mark(self, name: str, begin: float, end: float) -> None:
        """Something of the loops that a trace shows."""
        if self.sampled is not None:
            self.intervals.append((name, begin, end))

    def step(self, seconds: float, row: BatchTrace | None) -> None:
        """A step has ended, that of this row where its history is known. A long first one is judged by the second."""
        totals = self.totals
        self.steps.append(seconds)
        if seconds <= PAUSE_S:
            totals.stepped_s += seconds
        else:
            totals.paused_s += seconds
            self._aside.append(seconds)
            self._pauses += 1
        if self._aside and len(self.steps) > 1 and (seconds > PAUSE_S or len(self.steps) == 2):
            longest = longest_s(self.steps)
            steps_s = sum(each for each in self._aside if each <= longest)
            totals.stepped_s += steps_s
            totals.paused_s -= steps_s
            self._aside = [each for each in self._aside[-LATEST_STEPS:] if each > longest]
        if self._pauses >= LEAST_OFTEN:
            shortest_s = min(COLLECTING * totals.paused_s, COLLECTING_S * totals.batches)
            self._is_collecting |= totals.stepped_s < shortest_s
        if self._is_collecting:
            totals.stepped_s += totals.paused_s
            totals.paused_s = 0.0
            self._aside.clear()
        if row is not None:
            self.rows.append(row)
            if self.sampled is not None:
                self.sampled.add(row)
        if len(self.rows) > 2 * MOST_ROWS:
            del self.rows[:MOST_ROWS]
            self._dropped += MOST_ROWS


class Loop:
    """Over one epoch. Each moment is noted as it comes, and counted when an accelerator has passed it.

    Attributes:
        begun: when `iter()` was called, and an accelerator had passed that.
        batches: those that it has had.
        is_over: whether it was told that the epoch is over.
    """

    def __init__(self, log: Log, now: float) -> None:
        self._log, self.begun, self._span = log, now, Extent(now, now)
        self._asked = self._own_asked = now
        self._received, self._samples = 0.0, 0
        self._fetch: Fetch | None = None
        self._pinned: Pinned | tuple[()] = ()
        self._own_received = 0.0
        self._saved_s, self._skipped = 0.0, 0
        self._garbage_s = self._log.garbage_s()
        self.batches, self.is_over = 0, False
        if log.totals.batches >= log.marks.until:
            log.marks.looks, log.marks.until = 0, log.totals.batches + OFTEN
        beside.loops.append(self._span)
        log.marks.note(now, self._begin)

    @property
    def moment(self) -> float:
        """The latest one, by the host's clock."""
        return self._span.moment

    def started(self, now: float) -> None:
        """`iter()` has returned: what it took was waiting."""
        self._span.moment = now
        self._log.marks.note(now, self._started)

    def ask(self, now: float) -> None:
        """The loop asks for a batch: its step has ended."""
        self._own_asked = self._span.moment = now
        others = 0.0, 0.0
        garbage_s = self._log.garbage_s()
        if self._own_received:
            others = self._others(self._own_received)
            self._log.totals.step_garbage_s += garbage_s - self._garbage_s
        self._garbage_s = garbage_s
        self._log.marks.note(now, self._ask, *others)

    def receive(self, now: float, samples: int, fetch: Fetch | None = None, pinned: Pinned | tuple[()] = ()) -> None:
        """The loop has a batch; `fetch` is its history, None where it is not known."""
        totals, garbage_s = self._log.totals, self._log.garbage_s()
        self.batches += 1
        self._own_received = self._span.moment = now
        self._saved_s = beside.saved_s
        totals.asking_s += now - self._own_asked
        totals.wait_garbage_s += garbage_s - self._garbage_s
        self._garbage_s = garbage_s
        self._log.marks.note(now, self._receive, self.batches, samples, fetch, pinned)

    def may_skip(self, now: float) -> bool:
        """Whether a batch that is asked for now may be counted without a row: `skip` takes the place of ask and receive."""
        received, loops = self._received, beside.loops
        if not received or now - received > PAUSE_S or beside.saved_s != self._saved_s:
            return False
        return bool(loops) and loops[-1].begun <= received and self._log.marks.are_none()

    def skip(self, asked: float, received: float, samples: int) -> None:
        """The loop has asked for a batch and has it: totals are all that is noted of it."""
        totals, waited_s = self._log.totals, received - asked
        if self._fetch is not None:
            self._ask(0.0, 0.0, asked)
            self._fetch = None
        else:
            totals.stepped_s += asked - self._received
        totals.waited_s += waited_s
        totals.asking_s += waited_s
        totals.batches += 1
        totals.samples += samples
        self.batches += 1
        self._skipped += 1
        self._asked, self._received = asked, received
        self._own_received = self._span.moment = received

    def end(self, now: float) -> None:
        """The loop is told that the epoch is over."""
        if not self.is_over:
            self.is_over, self._span.moment = True, now
            self._log.marks.note(now, self._end)

    @staticmethod
    def is_main_thread_waiting() -> bool:
        """Whether the main thread waits for the end of another one, as where training runs in a thread."""
        return is_main_thread_waiting()

    def _others(self, received: float) -> tuple[float, float]:
        """Seconds of loops and of checkpoints since then: within the step that has just ended."""
        loops = beside.loops
        if beside.saved_s == self._saved_s and not (loops and loops[-1].begun > received):  # nearly always
            return 0.0, 0.0
        inner, saved = list[Extent](), list[Extent]()
        while loops and loops[-1].begun > received:  # an iterator that another is zipped with began before
            inner.append(loops.pop())
        if beside.saved_s != self._saved_s:
            own = [each for each in beside.saved if each.begun >= received]
            saved = [each for each in own if not any(its.begun <= each.begun < its.moment for its in inner)]
        for name, extents in (("evaluation", inner), ("checkpoint", saved)):
            for each in extents:
                self._log.mark(name, each.begun, each.moment)
        return sum(each.moment - each.begun for each in inner), sum(each.moment - each.begun for each in saved)

    def _begin(self, now: float) -> None:
        self.begun = self._asked = now

    def _started(self, now: float) -> None:
        totals, self._asked = self._log.totals, now
        totals.waited_s += now - self.begun
        totals.started_s += now - self.begun
        totals.made_s += now - self.begun

    def _ask(self, evaluated_s: float, saved_s: float, now: float) -> None:
        if received := self._received:
            row = None
            if self._fetch is not None and (self._log.current is self or self.is_over):
                row = BatchTrace(*self._fetch, self._samples, self._asked, received, now, *self._pinned)
            step_s, totals = now - received, self._log.totals
            if evaluated_s or saved_s:  # on an accelerator, some of it may have run while the step still did
                saved_s = min(saved_s, step_s)
                evaluated_s = min(evaluated_s, step_s - saved_s)
                totals.evaluated_s += evaluated_s
                totals.saved_s += saved_s
                step_s -= evaluated_s + saved_s
            self._log.step(step_s, row)
            self._received = 0.0
        self._asked = now

    def _receive(self, number: int, samples: int, fetch: Fetch | None, pinned: Pinned | tuple[()], now: float) -> None:
        totals, waited_s = self._log.totals, now - self._asked
        if number == 1:
            totals.epochs += 1
            totals.started_s += waited_s
        totals.batches += 1
        totals.samples += samples
        totals.waited_s += waited_s
        if fetch is not None and number > 1:
            waits, is_early, times = self._log.waits, number <= self._log.workers, 1
            if waited_s <= SLOW_S:  # a batch that is late stands for no other
                times += self._skipped
                self._skipped = 0
            waits.add(fetch[1], fetch[3], fetch[4], self._asked, now, is_early=is_early, times=times)
            if pinned:
                waits.add_pinned(*pinned, self._asked, now, times)
        self._fetch, self._pinned, self._samples, self._received = fetch, pinned, samples, now

    def _end(self, now: float) -> None:
        log = self._log
        log.totals.waited_s += now - self._asked
        log.totals.ended_s += now - self._asked
        log.mark(f"epoch {log.totals.epochs}", self.begun, now)


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
    made_s: float = 0.0
    """Of that, in `iter()`, which starts workers."""
    ended_s: float = 0.0
    """Of `waited_s`, until the loop was told that an epoch is over, which ends workers."""
    stepped_s: float = 0.0
    evaluated_s: float = 0.0
    """Within steps, in loops of other loaders."""
    saved_s: float = 0.0
    """Within steps, in writing checkpoints."""
    paused_s: float = 0.0
    """Of steps that were pauses."""
    wait_garbage_s: float = 0.0
    """Of garbage collections while the loop waited."""
    step_garbage_s: float = 0.0
    """Of garbage collections during steps, evaluation included."""
    asking_s: float = 0.0
    """Of the loop itself, between asking for a batch and receiving it, also while an accelerator was at work."""

    @property
    def active_s(self) -> float:
        return self.waited_s + self.stepped_s

    @property
    def wall_s(self) -> float:
        """All of the loops."""
        return self.active_s + self.evaluated_s + self.saved_s + self.paused_s

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


_settling = threading.Lock()
_passed: dict[Any, tuple[Any, float]] = {}
"""The mark that a device was seen to pass last, and when: of any loop, as one of an evaluation asks seldom."""


class Marks:
    """Moments of a loop, told in order with the time at which the accelerator has passed them, in seconds of the host's clock.

    Where this process uses none, or a thread takes the batches while the main thread trains, a moment is told at once and as it
    is.
    """

    def __init__(self) -> None:
        self._ahead = deque[tuple[float, Any, Callable[[float], object]]]()
        self._device: tuple[Any, int] | None = None
        self.looks = 0
        """Moments that may have begun to use a device: it is looked for at the first, second, fourth, eighth ..."""
        self.until = 0
        """A loop that begins after so many batches counts them anew."""
        self._time = 0.0

    def __len__(self) -> int:
        """Moments that the accelerator has not passed."""
        return len(self._ahead)

    def are_none(self) -> bool:
        """Whether this moment is as it is, since no device is in use."""
        if self._device is None:
            self.looks += 1
            if not self.looks & (self.looks - 1):  # ever more seldom: it takes longer than all else here
                with suppress(Exception):  # whatever it is, it is no reason to end somebody's training
                    self._device = _device_in_use()
        return self._device is None and not self._ahead

    def note(self, now: float, tell: Callable[..., object], *what: Any) -> None:
        """Have `tell(*what, seconds)` called once the accelerator has passed this moment."""
        if self._device is None and not self._ahead:
            self.looks += 1
            if self.looks & (self.looks - 1):  # most moments are told here
                tell(*what, now)
                return
            self.looks -= 1
        if self.are_none() or ((mark := self._mark()) is None and not self._ahead):
            tell(*what, now)
            return
        self._ahead.append((now, mark, partial(tell, *what)))
        self.settle(now)

    def settle(self, now: float, *, is_end: bool = False) -> None:
        """Tell of the moments that have passed; at the end, of all others as if they did now."""
        if _settling.acquire(blocking=False):  # else another thread does, such as one that asks for figures
            try:
                self._settle(now, is_end)
            finally:
                _settling.release()

    def _settle(self, now: float, is_end: bool) -> None:
        while self._ahead:
            moment, mark, tell = self._ahead[0]
            last, last_s = _passed.get(self._device, (None, 0.0))
            try:
                if mark is None:
                    passed = moment
                elif mark.query():
                    passed = now if last is None else last_s + last.elapsed_time(mark) / 1e3
                elif is_end:
                    mark, passed = None, now
                else:
                    return
            except RuntimeError:  # the device is lost
                mark, passed = None, moment
            passed = max(moment, min(passed, now))
            if mark is not None:
                _passed[self._device] = mark, passed
            self._time = max(self._time, passed)
            self._ahead.popleft()
            tell(self._time)

    def _mark(self) -> Any:
        try:
            is_main = threading.current_thread() is threading.main_thread()
            if self._device is None or not (is_main or is_main_thread_waiting()):
                return None  # the main thread may capture a graph meanwhile
            module, index = self._device
            event = module.Event(enable_timing=True)
            event.record(module.current_stream(index))
        except Exception:  # whatever it is, it is no reason to end somebody's training
            return None
        return event


def is_main_thread_waiting() -> bool:
    """Whether the main thread waits for the end of another one, as where training runs in a thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in WAITS_FOR_A_THREAD:  # noqa: PTH119
            return True
        frame = frame.f_back
    return False


def _device_in_use() -> tuple[Any, int] | None:
    """Torch's module of an accelerator, and the number of a device that holds memory: the current one, if it does.

    No device is opened to see it.
    """
    name = initialized_accelerator()
    if name is None:
        return None
    module = vars(torch)[name]
    indices = module.current_device(), *range(module.device_count())
    return next(((module, index) for index in indices if module.memory_reserved(index)), None)


def longest_s(seconds: Sequence[float]) -> float:
    """What takes longer than this is no part of the series, which is not empty: it is far from usual, and rare."""
    ordered = sorted(seconds)
    count = len(ordered)
    often = ordered[-min(count, max(LEAST_OFTEN, count // OFTEN + 1))]
    return max(PAUSE_S, PAUSE_STEPS * ordered[(count - 1) // 2], PAUSE_USUAL * often)


def own_rows(rows: Sequence[BatchTrace], longest_step_s: float, workers: int | None = None) -> list[BatchTrace]:
    """Batches that say what a configuration does. With `workers`, batches that others made are not its own.

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
    return own or late


def measurement(own: Sequence[BatchTrace], workers: int | None = None) -> Measurement | None:
    """What such batches say; None of none."""
    if not own:
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
