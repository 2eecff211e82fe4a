"""One timed run of one configuration, in whatever process calls it: the same code in the probe process and inline.

iter(loader) ── start ── first batch ──┬── window ──────────────────────────┬── shutdown (not timed)
                                       └ opens when every worker delivered  └ closes when the rate is known
                                                                              well enough, or time is up
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, default_collate, default_convert

from autotune_loader.config import LoaderConfig
from autotune_loader.meters.trace import is_enough, summarise
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.step import TrainingStep, tensors_in
from autotune_loader.probe.traced import (
    EndlessBatches,
    Fetch,
    TracedCollate,
    TracedDataset,
    TracedIterable,
    TracedWorkerInit,
    forget_open_batch,
)
from autotune_loader.probe.workload import DataSide
from autotune_loader.trial import MAIN_PROCESS, BatchTrace, BurstPlan, Failure, FailurePhase, Measurement

# Workers get this long to finish the batch they are on; then they are terminated. Torch alone waits 5 s for each in turn.
SHUTDOWN_GRACE_S = 1.0
# A worker that dies while it hands a batch over is first seen as a broken connection; why it died is told within this.
NEWS_OF_DEATH_S = 0.3
# How often the running burst asks whether it knows enough, in seconds: cheap against any batch worth prefetching.
STOP_CHECK_S = 0.05
# After a check that took t seconds the next one waits this many t, so that checking never costs more than 1 %.
STOP_CHECK_COST = 100.0

# A burst of tiny in-memory batches delivers tens of thousands; its record keeps at most this many.
KEPT_TRACES = 2048

Announce = Callable[[FailurePhase], None]
"""Told which phase begins, so that a parent can name it when the process hangs or dies."""


def make_traced_loader(data: DataSide, config: LoaderConfig, seed: int) -> DataLoader[Any]:
    """A DataLoader of the user's parts that never ends and whose batches carry their history.

    Args:
        data: the user's parts; they are used, not copied.
        config: what to tune.
        seed: seeds the global generators and the user's own, so that equal seeds give equal indices.
    """
    _seed_everything(data, seed)
    batched = data.batch_size is not None or data.batch_sampler is not None
    default = default_collate if batched else default_convert
    parts: dict[str, Any] = {
        "collate_fn": TracedCollate(data.collate_fn or default, batched),
        "worker_init_fn": TracedWorkerInit(data.worker_init_fn),
        "generator": data.generator or torch.Generator().manual_seed(seed),
    }
    drop_last = data.drop_last if config.drop_last is None else config.drop_last
    batch_size = config.batch_size or data.batch_size
    if data.is_iterable:
        parts |= {"dataset": TracedIterable(data.dataset), "batch_size": batch_size}
        parts |= {"drop_last": drop_last} if batched else {}
    elif not batched:
        parts |= {"dataset": TracedDataset(data.dataset), "sampler": EndlessBatches(data.sampler), "batch_size": None}
    else:
        batches = data.batch_sampler
        if batches is None:
            assert batch_size is not None
            batches = BatchSampler(data.sampler, batch_size, drop_last)
        parts |= {"dataset": TracedDataset(data.dataset), "batch_sampler": EndlessBatches(batches)}
    kwargs = config.to_kwargs()
    kwargs.pop("drop_last", None)
    return DataLoader(**parts, **kwargs)


def _seed_everything(data: DataSide, seed: int) -> None:
    """Seed whatever a sampler may draw from: torch, Python, numpy, and the generators that the user's parts hold."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - what samplers draw from is the global generator
    holders = (data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None))
    for generator in (getattr(holder, "generator", None) for holder in holders):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)


def run_burst(
    data: DataSide,
    step: TrainingStep,
    config: LoaderConfig,
    plan: BurstPlan,
    announce: Announce = lambda phase: None,
) -> Measurement | Failure:
    """Train for a moment with `config` and measure it; whatever goes wrong comes back as a `Failure`.

    The workers it started are gone when it returns, also after KeyboardInterrupt, which passes through.
    """
    phase: FailurePhase = "start"

    def enter(next_phase: FailurePhase) -> None:
        nonlocal phase
        phase = next_phase
        announce(next_phase)

    before = {process.pid for process in multiprocessing.active_children()}
    open_loader = OpenLoader()
    try:
        try:
            with _consumer_threads(config.consumer_threads), _sharing_strategy(config.sharing_strategy):
                enter("start")
                return _measure(open_loader, data, step, config, plan, enter)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # its frames hold the iterator, and so the workers
            if not isinstance(error, Exception):
                raise
            if config.num_workers and isinstance(error, (OSError, EOFError)):
                time.sleep(NEWS_OF_DEATH_S)
            return failure_of(error, phase)
    except RuntimeError as error:  # a worker's death, told by torch's signal handler in the midst of the handling above
        return failure_of(error, phase)
    finally:
        try:
            enter("shutdown")
            open_loader.close(before)
        except RuntimeError:  # or here; torch tells it once
            open_loader.close(before)
        forget_open_batch()


def _measure(
    open_loader: OpenLoader,
    data: DataSide,
    step: TrainingStep,
    config: LoaderConfig,
    plan: BurstPlan,
    enter: Announce,
) -> Measurement | Failure:
    loader = make_traced_loader(data, config, plan.seed)
    started = time.monotonic()
    open_loader.iterator = iter(loader)
    del loader
    if plan.pause_s:
        time.sleep(plan.pause_s)
    enter("first_batch")
    run = _Run(plan, config.num_workers, started)
    if not run.deliver(open_loader.iterator, step):
        return Failure(kind="no_data", phase="first_batch", message="the loader ended before it delivered a batch")
    enter("batches")
    while not run.knows_enough() and run.deliver(open_loader.iterator, step):
        pass
    return run.measurement(step)


class _Run:
    """The state of one running burst: the batches so far and when to stop."""

    def __init__(self, plan: BurstPlan, workers: int, started: float) -> None:
        self._plan = plan
        self._workers = workers
        self._started = started
        self._traces: list[BatchTrace] = []
        self._shape = BatchShape()
        self._next_check = 0.0

    def deliver(self, iterator: Iterator[Any], step: TrainingStep) -> bool:
        """Take one batch and train on it; False when the loader has ended."""
        requested = time.monotonic()
        try:
            batch, fetch = next(iterator)
        except StopIteration:
            return False
        received = time.monotonic()
        if not self._traces:
            self._shape = BatchShape.of(batch)
        step.run(batch)
        self._traces.append(_trace_of(fetch, requested, received, time.monotonic()))
        return True

    def knows_enough(self) -> bool:
        now = time.monotonic()
        if now < self._next_check:
            return False
        enough = is_enough(self._traces, self._plan, workers=self._workers, started=self._started, now=now)
        self._next_check = now + max(STOP_CHECK_S, STOP_CHECK_COST * (time.monotonic() - now))
        return enough

    def measurement(self, step: TrainingStep) -> Measurement:
        """What the run amounts to, once the device has finished what it was given."""
        step.synchronize()
        self._traces[-1] = replace(self._traces[-1], step_end=time.monotonic())
        summary = summarise(self._traces, workers=self._workers, started=self._started)
        return Measurement(
            samples_per_s=summary.samples_per_s,
            samples=summary.samples,
            window_s=summary.window_s,
            batch_size=summary.batch_size,
            first_batch_s=summary.first_batch_s,
            wait_share=summary.wait_share,
            service_s=summary.service_s,
            service_cpu_s=summary.service_cpu_s,
            receive_s=summary.receive_s,
            step_s=summary.step_s,
            batch_bytes=self._shape.bytes,
            batch_tensors=self._shape.tensors,
            traces=tuple(_worth_keeping(self._traces)),
        )


def _worth_keeping(traces: list[BatchTrace]) -> list[BatchTrace]:
    """The start and the end of a long burst: enough to draw and to model, bounded for the pipe."""
    return traces if len(traces) <= KEPT_TRACES else traces[: KEPT_TRACES // 8] + traces[-(KEPT_TRACES * 7 // 8) :]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How much one batch carries between processes."""

    bytes: int = 0
    tensors: int = 0
    on_accelerator: bool = False

    @classmethod
    def of(cls, batch: Any) -> BatchShape:
        tensors = list(tensors_in(batch))
        return cls(
            bytes=sum(tensor.nbytes for tensor in tensors),
            tensors=len(tensors),
            on_accelerator=any(tensor.device.type != "cpu" for tensor in tensors),
        )


def _trace_of(fetch: Fetch, requested: float, received: float, step_end: float) -> BatchTrace:
    worker, fetch_start, fetch_end, collate_end, cpu_s, samples = fetch
    return BatchTrace(
        worker=worker,
        fetch_start=fetch_start,
        fetch_end=fetch_end,
        collate_end=collate_end,
        cpu_s=cpu_s,
        requested=requested,
        received=received,
        step_end=step_end,
        samples=samples,
    )


def run_step_ceiling(
    batch: Any, samples: int, step: TrainingStep, consumer_threads: int | None, plan: BurstPlan
) -> Measurement | Failure:
    """Step on one batch again and again: the rate no loader can exceed, and the g of the twin without contention."""
    run = _Run(plan, workers=0, started=time.monotonic())
    cached = _again_and_again(batch, samples)
    try:
        with _consumer_threads(consumer_threads):
            run.deliver(cached, step)
            while not run.knows_enough():
                run.deliver(cached, step)
            return run.measurement(step)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        return failure_of(error, "step")


def _again_and_again(batch: Any, samples: int) -> Iterator[tuple[Any, Fetch]]:
    while True:
        now = time.monotonic()
        yield batch, (MAIN_PROCESS, now, now, now, 0.0, samples)


class OpenLoader:
    """Owner of a running iterator: the only reference to it, so that dropping it here shuts the workers down."""

    def __init__(self) -> None:
        self.iterator: Any = None

    def close(self, children_before: set[int | None]) -> None:
        """Let the workers finish their batch, and terminate those that have not after a short grace."""
        started = [child for child in multiprocessing.active_children() if child.pid not in children_before]
        impatience = threading.Timer(SHUTDOWN_GRACE_S, _terminate, [started])
        impatience.daemon = True
        impatience.start()
        try:
            self.iterator = None
            if any(child.is_alive() for child in started):
                gc.collect()  # an exception kept elsewhere may still hold the iterator in a cycle
        finally:
            impatience.cancel()
            impatience.join()
            _end(started)


def _terminate(children: list[Any]) -> None:
    # A worker that gets SIGTERM from its parent leaves quietly (torch installs a handler for just that).
    for child in children:
        if child.is_alive():
            child.terminate()


def _end(children: list[Any]) -> None:
    _terminate(children)
    deadline = time.monotonic() + SHUTDOWN_GRACE_S
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()


@contextlib.contextmanager
def _consumer_threads(threads: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _sharing_strategy(strategy: str | None) -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    if strategy is not None:
        torch.multiprocessing.set_sharing_strategy(strategy)
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
