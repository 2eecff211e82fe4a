"""A workload loaded and warmed up, ready for bursts: what runs in the process of the bursts."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from torch.utils.data._utils.pin_memory import pin_memory

from autotune_loader.bursts.device import Timeline
from autotune_loader.bursts.failures import ENDS_TRAINING, Raised, checked, failure_of, has_lost_device, user_traceback
from autotune_loader.bursts.files import STEP_WRITES, confine, refused_path
from autotune_loader.bursts.loop import Cached, LoopRun, OpenLoader
from autotune_loader.bursts.packing import read_archive, write_archive
from autotune_loader.bursts.protocol import Allowance, Message, Request, WarmupReport
from autotune_loader.bursts.repeats import workers_repeat_each_other
from autotune_loader.bursts.step import StepError, StepInferenceError, TrainingStep, build_step
from autotune_loader.machine.elsewhere import (
    FIRST_OWN_FD,
    descriptors,
    die_with_owner,
    own_files,
    own_memory,
    require_own_memory,
)
from autotune_loader.machine.facts import start_method
from autotune_loader.machine.kernel import memfd
from autotune_loader.machine.nursery import Home, Root
from autotune_loader.pipeline.batches import BatchShape, Copies, accelerator, fresh, locked_bytes, move, samples_in
from autotune_loader.pipeline.by_value import why_not_pickled
from autotune_loader.pipeline.reading import FRESH_STARTS, Reading
from autotune_loader.pipeline.tracing import forget_open_batch, make_traced_loader
from autotune_loader.pipeline.workload import DataSide, TrainingSide, draws_nothing, wrapped_datasets
from autotune_loader.values import TORCH_PREFETCH_FACTOR, Failure, FailurePhase, LoaderConfig

MOST_FOR_SECOND_S = 30.0
"""After a first batch that took no longer a second one is timed: the first may open files, import and compile."""
SLOW_FETCH_S = 2.0
"""A burst of half a second has no room for several batches that take longer to fetch."""
WARM_UP_STEPS, MOST_WARM_UP_STEPS, WARM_UP_S, SETTLED = 3, 10, 1.0, 1.2
"""The first steps are slow: allocator, cuDNN's choice of algorithms. torch.compile compiles in the first, may do so again in
the second and records graphs in the third. A step is warm when it took the same time twice in a row."""
BATCHES_COUNTED = "The number of samples per batch is unknown, so rates are batches/s."
SLOW_BATCHES = (
    "A batch takes {seconds:.0f} s to load in one process, and a trial needs several: raise the budget, or tune "
    "with a smaller batch_size."
)
IN_HAND, MOST_PINNING_S, MOST_PINNED = 3, 2.0, 0.1
"""Batches pinned beside those in flight: one being pinned, one on its way, one that the loop keeps. Locking the pages of each
takes long the first time. Training pays for it once, so it is no part of a rate, and is done before all bursts: in no more
seconds than these, and with no more than this share of the memory."""
HANDLES = ("lmdb.Environment", "environment_t.Environment", "h5py._hl.files.File", "sqlite3.Connection")
"""Classes whose open objects forked workers must not share; other open files are seen by their positions."""
HANDLE = (
    "dataset.{name} is an open {kind} that forked workers would share, so none are tried (num_workers=0). Open it on first "
    "use in each worker, or in worker_init_fn."
)
SHARED_FILE = (
    "{dataset} reads from {file}, which was open before: forked workers would share its position, and training would get wrong "
    "samples without a word, so none are tried (num_workers=0). Open it on first use in each process, and not before."
)
NEEDS_WORKERS = "The dataset cannot be read without workers (num_workers=0), so every trial has at least one."
UNPICKLABLE_BATCH = (
    "A batch cannot be pickled ({fault}), so no worker could hand it over and none are tried (num_workers=0). Tensors, "
    "numbers, and objects of classes at the top level of a module can be."
)
REPEATED_SAMPLES = (
    "Every worker of this IterableDataset delivers the same samples if it is seeded alike, so at most 1 worker is used. Share "
    "them out in __iter__ by torch.utils.data.get_worker_info().id."
)


class Bench:
    """Runs bursts of one workload in this process.

    Args:
        data: What workers inherit. A process that forks them never fetches from it.
        read_training: Gives the training side.
        read_data: Gives a data side whose caches and handles a burst without workers may fill.
        say: Sends a message to the parent.
        seed: Another one begins to read at another place.
        allowed: Of it, pinned memory takes a part.

    Attributes:
        apart: Processes of this workload whose memory and time are no part of a burst's.
        reads_alone: Whether the samples that raised in a worker can be read without one.
    """

    def __init__(
        self,
        data: DataSide,
        read_training: Callable[[], TrainingSide],
        read_data: Callable[[], DataSide],
        say: Callable[[Message], None],
        seed: int,
        allowed: Allowance,
    ) -> None:
        sharing, inner = torch.multiprocessing.get_sharing_strategy(), data.worker_init_fn
        self._data = replace(data, worker_init_fn=functools.partial(begin_worker, inner, sharing))
        self._read_training, self._read_data, self._say, self._allowed = read_training, read_data, say, allowed
        self._reading, self._seed, self._home = Reading(self._data, seed), seed, Home()
        self._first: Cached | None = None
        self._file = memfd("first-batch")
        """The first batch, on its way to another process; empty where it cannot go there."""
        self._step: TrainingStep | None = None
        self._name = "the step"
        self._copy_s = dict[bool, float | None]()
        """Of the first batch, by whether it is pinned, where the step is the user's own; empty off a device."""
        self.apart: list[int] = []
        self.reads_alone: Callable[[Raised], bool] = lambda raised: raised.is_of_workers(self._read_data)

    @property
    def device(self) -> torch.device:
        """Of the step; the CPU before it is built."""
        return torch.device("cpu") if self._step is None else self._step.device

    def may_use(self, device: torch.device) -> bool:
        """Whether this process, which is a fork, can use an accelerator."""
        return not accelerator(device)._is_in_bad_fork()

    def read_elsewhere(self) -> None:
        """Draw other samples from a sampler than the process does of which this is a fork."""
        self._reading = Reading(self._data, self._seed + FRESH_STARTS // 2)

    def look(self, workers: int = 0) -> tuple[Message, Any]:
        """Fetch two batches and keep the first: what is known of them, or why there is none; and where reading goes on."""
        return self._look(workers), self._reading.place

    def judged(self, seen: WarmupReport) -> WarmupReport:
        """What was `seen`, and whether workers of a stream repeat each other."""
        may_repeat = seen.most_workers is None and self._data.is_iterable
        if not may_repeat or not workers_repeat_each_other(self._data, seen.first_batch_s):
            return seen
        return replace(seen, most_workers=1, notes=(*seen.notes, REPEATED_SAMPLES))

    def _look(self, workers: int) -> Message:
        data, took, threads = self._data, list[tuple[float, float]](), torch.get_num_threads()
        torch.set_num_threads(1)  # as workers have
        try:
            self._announce("first_batch")
            before, faults = positions(), [] if workers else why_not_forked(data)
            with OpenLoader() as open_loader:
                loader = make_traced_loader(data, LoaderConfig(num_workers=workers), self._reading, on_error=Raised.of)
                begun, batches = time.monotonic(), open_loader.open(loader)
                while len(took) < 2 and sum(wall_s for wall_s, _ in took) <= MOST_FOR_SECOND_S:
                    handed = next(batches)
                    fetch = handed.fetch
                    if not took:
                        self._first = Cached(checked(handed.batch), fetch[5])
                        took.append((time.monotonic() - begun, fetch[4]))
                    else:
                        took.append((fetch[3] - fetch[1], fetch[4]))
        except StopIteration:
            return Message(
                failure=Failure(kind="no_data", phase="first_batch", message="the dataset delivered no batch")
            )
        except Exception as error:
            return self._answer_to(error, "first_batch")
        finally:
            torch.set_num_threads(threads)
            forget_open_batch()
        assert self._first is not None
        faults += [] if workers else why_files_not_shared(data, before)
        faults += why_batch_not_sent(self._first.batch)
        try:
            write_archive(self._file, self._first.batch, sys.maxsize)
        except Exception:  # whoever needs it looks at one of its own
            os.ftruncate(self._file, 0)
        return Message(ready=self._seen(self._first, took, faults, workers))

    def prepare(self, seen: WarmupReport) -> Message:
        """Build the step and warm it up on the first batch, which was `seen`; that it is warm, or why not."""
        try:
            if self._first is None and os.fstat(self._file).st_size:
                self._first = Cached(read_archive(self._file), seen.samples)
            if self._first is None and (failed := self._look(0)).ready is None:
                return failed
            assert self._first is not None
            self._announce("step")
            side = self._read_training()
            self._name = "train_step" if side.train_step is not None else "the step"
            step = build_step(side, self._first.batch)
            self._timeline = None if accelerator(step.device) is None else Timeline(step.device)
            warm_up(step, self._first.batch, self._timeline)
            if self._timeline is not None:
                lock_pages(self._first.batch, self._allowed, seen.most_workers)
            self._step = step
        except Exception as error:
            return self._answer_to(error, "step")
        why_no_nvml = "" if self._timeline is None else self._timeline.gpu.why_none
        return Message(
            ready=replace(
                seen,
                step=step.description,
                default_threads=torch.get_num_threads(),
                notes=(*step.notes, *seen.notes, *filter(None, [why_no_nvml])),
                **accelerator_facts(step.device),
            )
        )

    def run(self, request: Request, place: Any) -> tuple[Message, Any]:
        """A burst, or the step on the first batch or copies of it, after `prepare`; and where reading goes on.

        `place` is where the latest burst has stopped, in whatever process it ran.
        """
        self._reading.go_on(place)
        return self._run(request), self._reading.place

    def _run(self, request: Request) -> Message:
        step, first, is_burst = self._step, self._first, request.what == "burst"
        assert step is not None
        assert first is not None
        if request.what == "hand_over" and (faults := why_batch_not_sent(first.batch)):
            return Message(failure=Failure(kind="pickling", phase="plan", message=faults[0]))
        config, stages, has_workers = request.config, request.plan.stages, request.config.num_workers > 0
        home = self._home if is_burst else Home()  # whose nursery has the copies

        def make_loader() -> Any:
            if request.what == "step_ceiling":
                return first
            if self._timeline is not None and step.is_own:
                self._time_copy(config.pin_memory, step, self._timeline)
            data = self._data  # in which no burst without workers may fill a cache
            if not is_burst:
                data = copies_of(first, data.multiprocessing_context)
                loader = make_traced_loader(data, replace(config, batch_size=None), Reading(data))
            else:
                if not has_workers and not draws_nothing(data.dataset, data.collate):
                    data = self._read_data()
                loader = make_traced_loader(data, config, self._reading, stages=stages, on_error=Raised.of)
            if is_burst and request.plan.anew:
                home.close()
                Root.end()
            elif has_workers and start_method(data.multiprocessing_context or config.multiprocessing_context) != "fork":
                clone_workers(loader, home)
            return loader

        def on_error(error: Exception, phase: FailurePhase) -> None:
            if not isinstance(error, Raised):
                self._answer_to(error, phase, config)

        try:
            run = LoopRun(request, step, self._timeline, self._announce, on_error, home, self.apart)
            run.reading = self._reading if is_burst else None
            outcome = run.measured(make_loader)
        except (Raised, StepError) as error:
            if isinstance(error, Raised) and has_workers and self.reads_alone(error):
                alone = f"{error.failure.message}, in a worker, and not when it is read again alone"
                return Message(failure=replace(error.failure, message=alone))
            return self._answer_to(error, "step", config)
        finally:
            if not is_burst:
                home.close()
        if isinstance(outcome, Failure):
            return Message(failure=outcome)
        if step.is_own and request.what != "step_ceiling" and not config.device_prefetch:
            # Its copy is in its step, which may copy a part of the batch.
            alone_s = self._copy_s.get(config.pin_memory)
            outcome = replace(outcome, copy_s=alone_s and min(alone_s, outcome.step_s))
        return Message(measurement=outcome)

    def _announce(self, phase: FailurePhase) -> None:
        self._say(Message(phase=phase))

    def _answer_to(self, error: Exception, phase: FailurePhase, config: LoaderConfig | None = None) -> Message:
        """What the parent is told of an error; where the device is lost it is told at once, and this process ends.

        To be called while the error is handled, and its frames hold what they held: after a kernel has failed, dropping a
        tensor or pinned memory may abort the process.
        """
        cause: BaseException = error.__cause__ or error
        ends_run = isinstance(error, (Raised, StepError))
        if isinstance(error, Raised):
            failure = replace(error.failure, message=error.failure.message + ("" if error.writes else ENDS_TRAINING))
        elif isinstance(error, StepInferenceError):
            failure = Failure(kind="user_exception", phase=phase, message=str(error), traceback=user_traceback(cause))
        elif isinstance(error, StepError):
            ends_run = config is None or config.batch_size is None  # else the size was not the user's own
            path = refused_path(cause)
            failure = failure_of(cause, "step") if path is None else self.step_writes(path, cause)
        else:
            failure = failure_of(error, phase)
        message = Message(failure=failure, ends_run=ends_run)
        if has_lost_device(failure):
            self._say(message)
            os._exit(0)
        return message

    def _time_copy(self, is_pinned: bool, step: TrainingStep, timeline: Timeline) -> None:
        """Time once a copy such as the user's step makes."""
        if is_pinned in self._copy_s:
            return
        assert self._first is not None
        batch = self._first.batch
        self._copy_s[is_pinned] = None
        with suppress(Exception):  # only its step knows how it moves; it may not fit as a whole
            batches = [pin_memory(fresh(batch)) if is_pinned else batch for _ in range(IN_HAND)]
            self._copy_s[is_pinned] = copy_s(batches, step.device, timeline)

    def step_writes(self, path: str, error: BaseException) -> Failure:
        """The failure of a step that writes to a file of the user's."""
        message = STEP_WRITES.format(step=self._name, path=path)
        return Failure(kind="user_exception", phase="step", message=message, traceback=user_traceback(error))

    def _seen(self, first: Cached, took: list[tuple[float, float]], faults: list[str], workers: int) -> WarmupReport:
        """What is known of the first batch; wall and CPU seconds of each look are in `took`."""
        data, shape, (fetch_s, fetch_cpu_s) = self._data, BatchShape.of(first.batch), took[-1]
        counts_batches = not data.is_batched and first.samples == 1 and samples_in(first.batch) is None
        alone = shape.on_accelerator
        told = {
            BATCHES_COUNTED: counts_batches,
            SLOW_BATCHES.format(seconds=fetch_s): fetch_s > SLOW_FETCH_S,
            NEEDS_WORKERS: workers > 0,
            self._reading.note or "": self._reading.note is not None,
        }
        return WarmupReport(
            samples=first.samples,
            batch_bytes=shape.bytes,
            batch_tensors=shape.tensors,
            on_accelerator=alone,
            first_fetch_s=fetch_s,
            first_fetch_cpu_s=fetch_cpu_s,
            first_batch_s=took[0][0],
            counts_batches=counts_batches,
            least_workers=workers,
            most_workers=0 if alone or faults else None,
            notes=(*(note for note, holds in told.items() if holds), *([] if alone else faults)),
        )


def warm_up(step: TrainingStep, batch: Any, timeline: Timeline | None) -> None:
    """Run the step until it takes what it will take from now on."""
    took = list[float]()
    if timeline is not None:
        timeline.open()
    while True:
        begun = time.monotonic()
        step.run(fresh(batch))
        if timeline is not None:
            timeline.synchronize()
        took.append(time.monotonic() - begun)
        settled = len(took) >= WARM_UP_STEPS and max(took[-2:]) <= SETTLED * min(took[-2:])
        costs_more_than_it_tells = len(took) * min(took) > WARM_UP_S or len(took) >= MOST_WARM_UP_STEPS
        if settled or (len(took) > 1 and costs_more_than_it_tells):
            return


def lock_pages(batch: Any, allowed: Allowance, most_workers: int | None) -> None:
    """Pin such batches, all at once, as a loop with a worker on every core has in use: torch keeps their memory."""
    workers = allowed.usable_cores if most_workers is None else min(allowed.usable_cores, most_workers)
    count = LoaderConfig().with_workers(workers, TORCH_PREFETCH_FACTOR).batches_in_flight + IN_HAND
    if allowed.memory_bytes is not None:
        count = min(count, int(MOST_PINNED * allowed.memory_bytes) // max(1, locked_bytes(batch)))
    held, until = list[Any](), time.monotonic() + MOST_PINNING_S
    with suppress(Exception):  # what cannot be pinned, its bursts tell
        while len(held) < count and time.monotonic() < until:
            held.append(pin_memory(fresh(batch)))


def copies_of(first: Cached, method: str | None) -> DataSide:
    """What hands over copies of the first batch, with workers that begin as those of a burst, and nothing of the user's."""
    dataset, sharing = Copies(first.batch, first.samples), torch.multiprocessing.get_sharing_strategy()
    return DataSide(
        dataset=dataset,
        batch_size=first.samples,
        sampler=SequentialSampler(dataset),
        collate_fn=lambda batch: batch,
        worker_init_fn=functools.partial(begin_worker, None, sharing),
        multiprocessing_context=method,
    )


def copy_s(batches: list[Any], device: torch.device, timeline: Timeline) -> float:
    """Seconds that the device takes to copy a batch, at the best of a few."""
    timeline.open()
    marks = [timeline.mark()]
    for each in batches:
        move(each, device)
        marks.append(timeline.mark())
    timeline.synchronize()
    passed = [timeline.passed(mark) or 0.0 for mark in marks]
    return min(end - begun for begun, end in pairwise(passed))


def accelerator_facts(device: torch.device) -> dict[str, Any]:
    """Name and memory of the accelerator that steps run on, by fields of `WarmupReport`."""
    if (of_device := accelerator(device)) is None:
        return {}
    free, _ = of_device.mem_get_info(device)
    name = of_device.get_device_properties(device).name
    return {"device_name": name, "device_bytes": free + of_device.memory_reserved(device)}


def clone_workers(loader: Any, home: Home) -> None:
    """Have the workers of a loader cloned from a nursery, which takes milliseconds; where there is none they start as before.

    The nursery fetches nothing: the caches of its clones are as empty as those of new processes.
    """
    given, nursery = [loader.dataset, loader.collate_fn], None  # what begins a worker differs from burst to burst
    with suppress(OSError):
        require_own_memory()
        nursery = home.nursery_for(given)
    if nursery is None:
        return
    real: Any = loader.multiprocessing_context or multiprocessing.get_context(start_method())

    def process(**arguments: Any) -> Any:
        one = real.Process(**arguments)
        one._Popen = functools.partial(nursery.popen, given)
        return one

    context = copy.copy(real)
    context.Process = process
    loader.multiprocessing_context = context
    loader.worker_init_fn = functools.partial(begin_clone, loader.worker_init_fn)


def begin_clone(inner: Callable[[int], None], worker: int) -> None:
    """Begin a worker that is cloned: it has memory of its own, as one that has started by itself, and copies none later."""
    own_memory()
    inner(worker)


def begin_worker(inner: Callable[[int], None] | None, sharing_strategy: str, worker: int) -> None:
    """Begin a new worker, before the user's own `worker_init_fn`: it ends with its parent, where torch's look every 5 s.

    The sharing strategy is set anew for a spawned worker. A file that the first batch has opened and a module keeps is opened
    anew, as training would do it in each.
    """
    die_with_owner()
    own_files(writable=True)
    confine()
    leave_segments()
    torch.multiprocessing.set_sharing_strategy(sharing_strategy)
    if inner is not None:
        inner(worker)


def leave_segments() -> None:
    """From now on this process removes no shared memory at its end: Python registers what it attaches to as its own."""
    register = resource_tracker.register

    def but_memory(name: Any, rtype: str) -> None:
        if rtype != "shared_memory":
            register(name, rtype)

    resource_tracker.register = but_memory


def positions() -> dict[int, tuple[int, int, int]]:
    """Device, inode and position of the open regular files of this process, by their numbers."""
    found: dict[int, tuple[int, int, int]] = {}
    for fd in descriptors(FIRST_OWN_FD):
        with suppress(OSError):
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                found[fd] = status.st_dev, status.st_ino, os.lseek(fd, 0, os.SEEK_CUR)
    return found


def why_not_forked(data: DataSide) -> list[str]:
    """Which open handle of a dataset forked workers would share, before anything is fetched."""
    if start_method(data.multiprocessing_context) != "fork":
        return []
    for dataset in wrapped_datasets(data.dataset):
        for name, value in list(getattr(dataset, "__dict__", {}).items()):
            kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
            if kinds.intersection(HANDLES):
                return [HANDLE.format(name=name, kind=type(value).__qualname__)]
    return []


def why_files_not_shared(data: DataSide, before: dict[int, tuple[int, int, int]]) -> list[str]:
    """Which file forked workers would share, by positions `before` and after the first batches."""
    after = positions() if start_method(data.multiprocessing_context) == "fork" else {}
    for fd, (device, inode, at) in before.items():
        if after.get(fd, ())[:2] == (device, inode) and after[fd][2] != at:
            name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
            return [SHARED_FILE.format(dataset=type(data.dataset).__qualname__, file=name)]
    return []


def why_batch_not_sent(batch: Any) -> list[str]:
    """Why no worker could hand a batch over."""
    fault = why_not_pickled(batch)
    return [] if fault is None else [UNPICKLABLE_BATCH.format(fault=fault)]
