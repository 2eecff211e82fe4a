"""One timed run of one configuration: it takes batches, trains on them, notes when, and knows when to stop.
What the run takes of the machine is read at the edges of its window.

iter(loader) ── start ── first batch ──┬── window ──────────────────────────┬── shutdown (not timed)
                                       └ opens when it has arrived          └ closes when the rate is known
                                                                              well enough, or time is up

A step on the CPU is timed by the host's clock, one on a GPU by that device's own (`bursts.device`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from autotune_loader.bursts.device import Passage, Passages, Timeline
from autotune_loader.bursts.failures import Raised, checked, deaths_of, failure_of
from autotune_loader.bursts.protocol import Request
from autotune_loader.bursts.step import StepError, TrainingStep
from autotune_loader.machine.limits import affinity, shared_memory
from autotune_loader.machine.nursery import Home
from autotune_loader.machine.processes import (
    TreeUse,
    borrowed_bytes,
    host_busy_s,
    tree,
    tree_pss,
    tree_use,
    without_nursery,
)
from autotune_loader.pipeline.batches import BatchShape, fresh, prefetched
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.throughput import is_enough, summarise
from autotune_loader.pipeline.tracing import Handed, Stamp, forget_open_batch
from autotune_loader.values import MAIN_PROCESS, BatchTrace, Failure, FailurePhase, Measurement, MemoryUse
from autotune_loader.values.trace import StageSamples, pooled

NEWS_OF_DEATH_S = 0.3
"""A worker that dies while it sends a batch is first seen as a broken connection; its exit code is known within this."""
PINNING_END_S = 1.0
"""A pinning thread ends within this, unless a worker died in the midst of sending."""
STOP_CHECK_S, STOP_CHECK_COST = 0.05, 400.0
"""How often a burst asks whether it knows enough. After a check that took t seconds the next one waits 400 t: checking takes
at most a quarter of a percent."""
KEPT_FIRST, KEPT_LAST = 256, 1792
"""Traces that the record keeps of the start and the end: a burst of tiny batches delivers tens of thousands."""


@dataclass(frozen=True, slots=True)
class Cached:
    """A batch that lies ready, stepped on again and again in place of loading."""

    batch: Any
    samples: int
    num_workers: ClassVar[int] = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            now = time.monotonic()
            yield Handed(Stamp(), fresh(self.batch), Stamp(), (MAIN_PROCESS, now, now, now, 0.0, self.samples, None))


class LoopRun:
    """One running burst: the batches so far and when to stop.

    `announce` is told which phase begins, so that the parent can name it when the process hangs or dies; `on_error` is told
    what was raised, and in which phase, before anything is dropped or ended. In `home` is the nursery of workers, if any.
    """

    def __init__(
        self,
        request: Request,
        step: TrainingStep,
        timeline: Timeline | None,
        announce: Callable[[FailurePhase], None],
        on_error: Callable[[Exception, FailurePhase], None] = lambda error, phase: None,
        home: Home | None = None,
        apart: Sequence[int] = (),
    ) -> None:
        self.request, self.step, self.timeline, self._announce = request, step, timeline, announce
        self._on_error, self._home, self._apart = on_error, home, apart
        self.reading: Reading | None = None
        """What knows how many batches come from one place; None where none are read."""
        self.phase: FailurePhase = "start"
        self._workers = request.config.num_workers
        self._passages = None if timeline is None else Passages(timeline)
        self._traces: list[BatchTrace] = []
        self._stages: list[StageSamples] = []
        self._shape: BatchShape | None = None
        self._batch: Any = None
        """The latest; it lives until the next one has arrived, as in `for batch in loader`, so that pages are not made anew."""
        self._started, self._next_check, self._delivered = 0.0, 0.0, 0
        self.now = time.monotonic

    def measured(self, make_loader: Callable[[], Any]) -> Measurement | Failure:
        """Train for a moment and measure it; whatever goes wrong comes back as a `Failure`, and no worker is left.

        `make_loader` makes a traced loader, or a batch that lies ready.

        Raises:
            Raised: a sample of the dataset raised.
            StepError: the step raised.
        """
        try:
            with OpenLoader() as open_loader:
                try:
                    return self._window(make_loader, open_loader)
                except Exception as error:
                    self._on_error(error, self.phase)
                    if isinstance(error, (Raised, StepError)):
                        raise
                    traceback.clear_frames(error.__traceback__)  # its frames hold the iterator, and so the workers
                    if self._workers and isinstance(error, (OSError, EOFError)):
                        time.sleep(NEWS_OF_DEATH_S)
                    return failure_of(error, self.phase, deaths_of(open_loader.workers))
        except RuntimeError as error:  # a worker's death, told by torch's signal handler in the midst of all that
            return failure_of(error, self.phase)  # by now we have killed the others

    def _window(self, make_loader: Callable[[], Any], open_loader: OpenLoader) -> Measurement | Failure:
        self.enter("start")
        loader = make_loader()
        window = Window(self.request.usable_cores, self._apart, reads_pss=self.request.reads_pss)
        if self.timeline is not None and isinstance(loader, Cached):
            # On the device beforehand: a loader that copies ahead of the step can hide the copy.
            loader = replace(loader, batch=self.step.ready(loader.batch))
        batches = self.begin(open_loader, loader)
        del loader
        window.watch()
        if self.request.plan.prefill_s:
            time.sleep(self.request.plan.prefill_s)
        self.enter("first_batch")
        if not self.deliver(batches, on_arrival=window.open):
            return Failure(kind="no_data", phase="first_batch", message="the loader ended before it delivered a batch")
        self.enter("batches")
        while not self.knows_enough() and self.deliver(batches):
            pass
        workers, nursery = [each.pid for each in open_loader.workers], [] if self._home is None else self._home.pids
        found = replace(self.measurement(), **window.close(workers, nursery))
        if workers and nursery:
            found = replace(found, first_batch_s=None)
        self.enter("shutdown")
        return found

    def enter(self, phase: FailurePhase) -> None:
        self.phase = phase
        self._announce(phase)

    def begin(self, open_loader: OpenLoader, loader: Any) -> Iterator[Any]:
        timeline, depth = self.timeline, self.request.config.device_prefetch
        if timeline is not None:
            timeline.open()
        self._started = self.now()
        batches = open_loader.open(loader)
        return batches if timeline is None or not depth else prefetched(batches, timeline.lane, depth)

    def deliver(self, batches: Iterator[Any], on_arrival: Callable[[], None] = lambda: None) -> bool:
        """Take one batch and train on it, or hand it to the device; False when the loader has ended."""
        step, timeline, now = self.step, self.timeline, self.now
        requested = now()
        try:
            handed: Handed = next(batches)
        except StopIteration:
            return False
        self._batch, fetch = checked(handed.batch), handed.fetch
        received, self._delivered = now(), self._delivered + 1
        on_arrival()
        if self._shape is None:
            self._shape = BatchShape.of(self._batch)
        if fetch[6] is not None:
            self._stages.append(fetch[6])
        if timeline is None:
            step.run(self._batch)
            self._traces.append(BatchTrace(*fetch[:6], requested, received, now(), *handed.pinned))
            return True
        on_device = step.move(self._batch)
        copied = timeline.mark()
        step.train(on_device)
        assert self._passages is not None
        self._passages.note(Passage(fetch, handed.pinned, requested, received, copied, timeline.mark(), now()))
        return True

    def knows_enough(self) -> bool:
        """Whether the burst may end; asks seldom, so that asking costs next to nothing."""
        now, workers = self.now(), max(self._workers, 1)
        # When one of the first rounds of the workers is through, the next batch may be long in coming.
        is_between_rounds = self._delivered <= 3 * workers and self._delivered % workers == 0
        if now < self._next_check and not is_between_rounds:
            return False
        self._settle()
        if len(self._traces) < 2:  # one opens the window, and one is in it, be its steps as long as they may
            return False
        plan, run = self.request.plan, 0 if self.reading is None else self.reading.run
        enough = is_enough(self._traces, plan, delivered=self._delivered, workers=self._workers, now=now, run=run)
        pause_s = max(STOP_CHECK_S, STOP_CHECK_COST * (self.now() - now))
        ends = self._traces[0].received + plan.max_s  # from then on checks cost nothing
        self._next_check = min(now + pause_s, max(ends, now + STOP_CHECK_S))
        return enough

    def measurement(self) -> Measurement:
        """What the run amounts to, once the device has finished what it was given."""
        if self.timeline is not None:
            self.timeline.synchronize()
            self._settle()
        traces, shape = self._traces, self._shape or BatchShape()
        measured, end = summarise(traces, workers=self._workers, started=self._started), traces[-1].step_end
        of_device = {} if self._passages is None else self._passages.use(end - measured.window_s, end)
        return replace(
            measured,
            batch_bytes=shape.bytes,
            **of_device,
            traces=tuple(traces[:KEPT_FIRST] + traces[KEPT_FIRST:][-KEPT_LAST:]),
            stages=pooled(self._stages),
        )

    def _settle(self) -> None:
        if self._passages is not None:
            self._traces += self._passages.settled()


class OpenLoader:
    """Owner of a running iterator for a block, at whose end its workers are killed, and no other processes."""

    def __init__(self) -> None:
        self.workers: list[Any] = []
        self._iterator: Any = None

    def __enter__(self) -> OpenLoader:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # its frames hold the iterator, and so the workers
        try:
            self.close()
        except RuntimeError:  # a worker's death, told by torch's signal handler in the midst of it; once
            self.close()
        forget_open_batch()

    def open(self, loader: Any) -> Any:
        """Begin an epoch; its workers are known from then on, also where one of them failed to start."""
        before = set(multiprocessing.active_children())
        try:
            self._iterator = iter(loader)
        finally:
            if loader.num_workers:
                started = set(multiprocessing.active_children()) - before
                # Others that began meanwhile are the dataset's; without an iterator that is not known, and all count.
                self.workers += started.intersection(getattr(self._iterator, "_workers", started))
        return self._iterator

    def close(self) -> None:
        """Kill the workers, which hold nothing that is needed.

        Before that the pinning thread ends: a worker that is killed while it sends leaves the queue locked, and nothing would
        wake the thread for 5 s.
        """
        # Otherwise torch's handler of SIGCHLD raises for what is killed here.
        if getattr(self._iterator, "_worker_pids_set", False):
            with contextlib.suppress(Exception):
                torch._C._remove_worker_pids(id(self._iterator))
                self._iterator._worker_pids_set = False
        if (pinning := getattr(self._iterator, "_pin_memory_thread", None)) is not None:
            self._iterator._pin_memory_thread_done_event.set()
            self._iterator._worker_result_queue.put((None, None))
            pinning.join(PINNING_END_S)
        for worker in self.workers:
            with contextlib.suppress(Exception):  # it has not begun, or has ended
                worker.kill()
        for worker in self.workers:
            worker.join()
        self._iterator = None


class Window:
    """What this process and its descendants take of the machine between two moments.

        watch │ start-up │ open ─── window ─── close        nothing that takes long happens between the last two

    The tree of processes is looked for while workers start, and again when the window has closed. At its edges only the
    counters of known processes are read. Memory is read where `reads_pss`, which stalls each process for some milliseconds.
    Processes `apart` are left out, and so is that they share pages with the others.
    """

    def __init__(self, usable_cores: int, apart: Sequence[int] = (), *, reads_pss: bool) -> None:
        self._reads_pss, self._cpus, self._cores = reads_pss, affinity(), usable_cores
        self._apart = [pid for pid in apart if pid != os.getpid()]
        self._shm = shared_memory()

    def _tree(self) -> list[int]:
        return [pid for pid in tree(os.getpid()) if pid not in self._apart]

    def watch(self) -> None:
        """Find the processes, once all workers have been started and before anything is timed."""
        self._members = self._tree()

    def open(self) -> None:
        self._use, self._busy_s = tree_use(self._members), host_busy_s(self._cpus)
        self._opened = time.monotonic()

    def close(self, workers: Sequence[int] = (), nursery: Sequence[int] = ()) -> dict[str, Any]:
        """What the machine gave meanwhile, by fields of `Measurement`; called while the workers live.

        Memory is as if workers had not been cloned from a `nursery` (it and its root), and that were not there.
        """
        elapsed_s, busy_s = max(1e-9, time.monotonic() - self._opened), host_busy_s(self._cpus)
        use, begun, members = tree_use(self._members), self._use, self._tree()
        newer = tree_use(set(members) - set(self._members)) or TreeUse(cpu_s=0.0, rss_bytes=0)
        cpu_share = foreign_share = read_bytes = memory = None
        if use is not None and begun is not None:
            own_s = use.cpu_s - begun.cpu_s + newer.cpu_s
            cpu_share = own_s / (elapsed_s * self._cores)
            if busy_s and self._busy_s:
                # Ticks of the host and of the tree are counted apart and may differ by one: no foreign load is not less.
                foreign_s = max(0.0, sum(busy_s) - sum(self._busy_s) - own_s)
                foreign_share = foreign_s / (elapsed_s * len(busy_s))
            if use.read_bytes is not None and begun.read_bytes is not None:
                read_bytes = max(0, use.read_bytes - begun.read_bytes) + (newer.read_bytes or 0)
        if self._reads_pss and (taken := tree_use(members)) is not None:
            shm, before = shared_memory(), self._shm
            shm_bytes = None if shm is None or before is None else max(0, before.free_bytes - shm.free_bytes)
            more = without_nursery(workers, nursery) if nursery else (0, 0)
            if more is not None:
                pss_bytes = tree_pss(members)
                memory = MemoryUse(
                    rss_bytes=taken.rss_bytes + more[0],
                    pss_bytes=None if pss_bytes is None else pss_bytes + more[1] + borrowed_bytes(self._apart),
                    shm_bytes=shm_bytes,
                )
        return {"memory": memory, "read_bytes": read_bytes, "cpu_share": cpu_share, "foreign_cpu_share": foreign_share}
