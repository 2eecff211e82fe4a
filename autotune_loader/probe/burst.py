"""One timed run of one configuration, in whatever process calls it: the same code in the probe process and inline.

iter(loader) ── start ── first batch ──┬── window ──────────────────────────┬── shutdown (not timed)
                                       └ opens when every worker delivered  └ closes when the rate is known
                                                                              well enough, or time is up

Where epochs are so short that their beginnings and ends are much of them, whole ones are run:

    start-up │ epoch 1 │ gap │ epoch 2 │ gap │ epoch 3 │        gap: the iterator ends (workers are joined, unless they
             not timed └───── window, epoch by epoch ──┘        persist), a new one begins, the first batch is fetched
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.util import get_temp_dir
from typing import Any, ClassVar

import torch

from autotune_loader.machine.window import Window
from autotune_loader.pipeline.build import make_traced_loader
from autotune_loader.pipeline.prefetch import prefetched
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import forget_open_batch
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.bad_samples import SampleError
from autotune_loader.probe.burst_loop import Announce, Run, are_enough_epochs
from autotune_loader.probe.device import Timeline
from autotune_loader.probe.failures import deaths_of, failure_of
from autotune_loader.probe.step import TrainingStep
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trace import MAIN_PROCESS

# Workers get this long to finish the batch they are on; then they are terminated. Torch alone waits 5 s for each in turn.
SHUTDOWN_GRACE_S = 1.0
# A worker that dies while it hands a batch over is first seen as a broken connection; why it died is told within this.
NEWS_OF_DEATH_S = 0.3


@dataclass(frozen=True, slots=True)
class Cached:
    """A batch that lies ready, stepped on again and again in place of loading."""

    batch: Any
    samples: int
    num_workers: ClassVar[int] = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            now = time.monotonic()
            yield self.batch, (MAIN_PROCESS, now, now, now, 0.0, self.samples)


def run_burst(
    data: DataSide | Cached,
    step: TrainingStep,
    config: LoaderConfig,
    plan: BurstPlan,
    announce: Announce = lambda phase: None,
    timeline: Timeline | None = None,
    bad: dict[str, BadSample] | None = None,
    reading: Reading | None = None,
) -> Measurement | Failure:
    """Train for a moment with `config` and measure it; whatever goes wrong comes back as a `Failure`, but for a bad sample.

    The workers it started are gone when it returns, also after KeyboardInterrupt, which passes through.

    Args:
        data: what is loaded, or a batch that lies ready: its rate is what no loader can exceed, and the g of the twin without
            contention. It is on the device beforehand: a loader that copies ahead of the step can hide the copy.
        step: what is done with a batch.
        config: the loader's configuration.
        plan: how long, and which samples.
        announce: told which phase begins.
        timeline: of the device that the step runs on, where that works behind the host; None for a CPU.
        bad: samples that have raised before, by name; what the step raises for is added.
        reading: of the run that the burst belongs to; one of its own where None.

    Raises:
        SampleError: a sample of the dataset raised, by no fault of the configuration.
    """
    phase: FailurePhase = "start"

    def enter(next_phase: FailurePhase) -> None:
        nonlocal phase
        phase = next_phase
        announce(next_phase)

    keeps_memory = False
    try:
        with OpenLoader() as open_loader:
            try:
                with as_configured(config):
                    enter("start")
                    outcome = _measure(open_loader, data, step, config, plan, enter, timeline, bad, reading)
            except Exception as error:
                if isinstance(error, SampleError):
                    raise
                traceback.clear_frames(error.__traceback__)  # its frames hold the iterator, and so the workers
                if config.num_workers and isinstance(error, (OSError, EOFError)):
                    time.sleep(NEWS_OF_DEATH_S)
                outcome = failure_of(error, phase, deaths_of(open_loader.workers))
            enter("shutdown")
    except RuntimeError as error:  # a worker's death, told by torch's signal handler in the midst of the handling above
        outcome = failure_of(error, phase, deaths_of(open_loader.workers))
    else:
        # What the driver has to be asked for anew slows the next burst down; other batches took more than it needs.
        keeps_memory = isinstance(outcome, Measurement) and config.batch_size is None and plan.batch_size is None
    finally:
        if timeline is not None and not keeps_memory:
            timeline.release()
    return outcome


def _measure(  # noqa: PLR0913
    open_loader: OpenLoader,
    data: DataSide | Cached,
    step: TrainingStep,
    config: LoaderConfig,
    plan: BurstPlan,
    enter: Announce,
    timeline: Timeline | None,
    bad: dict[str, BadSample] | None,
    reading: Reading | None,
) -> Measurement | Failure:
    window, lane = Window(), None
    if timeline is not None:
        timeline.open()
        if config.device_prefetch:
            lane = timeline.make_lane()
            open_loader.ahead = lambda batches: prefetched(batches, lane, config.device_prefetch)
    if isinstance(data, Cached):
        loader: Any = replace(data, batch=step.ready(data.batch))
    else:
        reading = reading or Reading(data, plan.seed)
        loader = make_traced_loader(data, config, reading, endless=not plan.whole_epochs, stages=plan.stages)
    run = Run(plan, config.num_workers, time.monotonic(), enter, timeline, lane, bad)
    open_loader.open(loader)
    window.watch()
    if plan.prefill_s:
        time.sleep(plan.prefill_s)
    enter("first_batch")
    if not run.deliver(open_loader.iterator, step):
        return Failure(kind="no_data", phase="first_batch", message="the loader ended before it delivered a batch")
    enter("batches")
    if plan.whole_epochs:
        return window.closed(run.measurement(*run_epochs(open_loader, loader, run, step, plan, window.note_memory)))
    del loader
    window.open()
    while not run.knows_enough() and run.deliver(open_loader.iterator, step):
        pass
    return window.closed(run.measurement())


def run_epochs(
    open_loader: OpenLoader,
    loader: Any,
    run: Run,
    step: TrainingStep,
    plan: BurstPlan,
    note_memory: Callable[[], None] = lambda: None,
) -> tuple[list[int], float]:
    """Train to the end of the epoch whose first batch has been delivered, and on for some more.

    Returns the batches by the end of each, and when memory was last read: that is no part of the window.

    Args:
        open_loader: has the first epoch's iterator, and then the others.
        loader: whose epochs end.
        run: takes the batches.
        step: what is done with them.
        plan: how long.
        note_memory: reads memory, now and then in the first epoch, which is not timed: workers end with their epoch.
    """
    begun, ends, batches, count, noted = run.now(), list[float](), list[int](), 1, 0.0
    while not are_enough_epochs(ends, plan, begun):
        if ends:
            open_loader.iterator = None  # as at the end of a training loop: workers that do not persist are joined here
            open_loader.open(loader)
        while True:
            if not ends and count.bit_count() == 1:
                note_memory()
                noted = run.now()
            if not run.deliver(open_loader.iterator, step):
                break
            count += 1
        if ends and count == batches[-1]:
            raise ValueError("an epoch ended before it delivered a batch")
        ends.append(run.now())
        batches.append(count)
    return batches, noted


class OpenLoader:
    """Owner of a running iterator, for a block: the only reference to it, so that dropping it here shuts the workers down.

    Other processes that begin meanwhile belong to the user's dataset or sampler and are left alone.
    """

    def __init__(self) -> None:
        self.iterator: Any = None
        self.ahead: Callable[[Any], Any] = lambda batches: batches
        """Takes batches to the device ahead of the step."""
        self.workers: list[Any] = []

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

    def open(self, loader: Any) -> None:
        """Begin an epoch; its workers are known from then on, also where not all of them could be started."""
        before = set(multiprocessing.active_children())
        if loader.num_workers:
            get_temp_dir()  # of this process, which removes it; one of a worker's own stays where that is killed
        try:
            self.iterator = iter(loader)
        finally:
            if loader.num_workers:
                started = set(multiprocessing.active_children()) - before
                # Torch's iterator knows its workers; where there is none, because one failed to start, all count.
                own = started.intersection(getattr(self.iterator, "_workers", started))
                self.workers += own
                _workers.update(own)
        self.iterator = self.ahead(self.iterator)

    def close(self) -> None:
        """Let the workers finish their batch, and terminate those that have not after a short grace."""
        impatience = threading.Timer(SHUTDOWN_GRACE_S, _terminate, [self.workers])
        impatience.daemon = True
        impatience.start()
        try:
            self.iterator = None
            if any(worker.is_alive() for worker in self.workers):
                gc.collect()  # an exception kept elsewhere may still hold the iterator in a cycle
        finally:
            impatience.cancel()
            impatience.join()
            _terminate(self.workers)
            deadline = time.monotonic() + SHUTDOWN_GRACE_S
            for worker in self.workers:
                worker.join(max(0.0, deadline - time.monotonic()))
                if worker.is_alive():
                    worker.kill()
                    worker.join()


# The workers of bursts in this process, for whoever must end a burst from another thread.
_workers: weakref.WeakSet[Any] = weakref.WeakSet()


def running_workers() -> list[Any]:
    """The workers of the burst that runs in this process."""
    return [worker for worker in list(_workers) if worker.is_alive()]


def _terminate(workers: list[Any]) -> None:
    # A worker that gets SIGTERM from its parent leaves quietly (torch installs a handler for just that).
    for worker in workers:
        if worker.is_alive():
            worker.terminate()


@contextlib.contextmanager
def as_configured(config: LoaderConfig) -> Iterator[None]:
    """Within the block this process computes with the configuration's threads, and shares tensors as it says."""
    sharing, threads = torch.multiprocessing.get_sharing_strategy(), torch.get_num_threads()
    if config.consumer_threads is not None:
        torch.set_num_threads(config.consumer_threads)
    try:
        if config.sharing_strategy is not None:
            torch.multiprocessing.set_sharing_strategy(config.sharing_strategy)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.multiprocessing.set_sharing_strategy(sharing)
