"""A workload loaded and warmed up, ready for bursts: what runs in the process of the bursts."""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from autotune_loader.bursts.device import Timeline
from autotune_loader.bursts.failures import (
    ENDS_TRAINING,
    Raised,
    checked,
    failure_of,
    has_lost_device,
    user_traceback,
)
from autotune_loader.bursts.files import STEP_WRITES, confine, refused_path
from autotune_loader.bursts.loop import Cached, LoopRun, OpenLoader
from autotune_loader.bursts.protocol import Message, Request, WarmupReport
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
from autotune_loader.machine.nursery import Home, Root
from autotune_loader.pipeline.batches import BatchShape, accelerator, fresh, move, samples_in, tensors_in
from autotune_loader.pipeline.by_value import why_not_pickled
from autotune_loader.pipeline.reading import Reading, seed_everything
from autotune_loader.pipeline.tracing import forget_open_batch, make_traced_loader
from autotune_loader.pipeline.workload import DataSide, Workload, draws_nothing, wrapped_datasets
from autotune_loader.values import Failure, FailurePhase, LoaderConfig

SECOND_LOOK_S = 0.5
"""After a first batch that took no longer a second one is timed: the first may have read a cold file."""
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
IN_HAND, MOST_PINNING_S = 3, 2.0
"""Batches pinned beside those in flight: one being pinned, one on its way, one that the loop keeps. Locking the pages of each
takes long the first time (H200: 55 ms for 38.5 MB, 8 ms for a later copy into them). Training pays for it once, so it is no
part of a rate; a burst takes no longer than this for it."""
TWO_WORKERS = LoaderConfig(num_workers=2, prefetch_factor=1)
SHORTEST_TIMEOUT_S, SPAWNED_TIMEOUT_S, TIMEOUT_FACTOR = 5.0, 60.0, 10.0
"""For a batch of two workers that may repeat each other. A spawned one imports torch first."""
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

    Workers inherit the data of `workload`, from which the main process never fetches. `read_private` gives a data side that
    it may fetch from, and whose caches and handles it may fill. Another `seed` begins to read at another place.
    """

    def __init__(self, workload: Workload, read_private: Callable[[], DataSide], seed: int) -> None:
        sharing, inner = torch.multiprocessing.get_sharing_strategy(), workload.data.worker_init_fn
        self._data = replace(workload.data, worker_init_fn=functools.partial(begin_worker, inner, sharing))
        self._training, self._read_private = workload.training, read_private
        self._seed, self._reading, self._home = seed, Reading(self._data, seed), Home()
        self._pinned, self._copy_s = 0, dict[bool, float | None]()
        """Of the first batch, by whether it is pinned, where the step is the user's own; empty off a device."""

    def prepare(self, say: Callable[[Message], None]) -> Message:
        """Fetch one batch, build the step from it and warm it up; that it is warm, or why not. `say` sends to the parent."""
        self._say = say
        self._announce: Callable[[FailurePhase], None] = lambda phase: say(Message(phase=phase))
        phase: FailurePhase = "first_batch"
        try:
            self._announce(phase)
            private, before = self._read_private(), positions()
            took = self._fetch_first(private)
            why_none = why_no_workers(private, self._first.batch, before)
            phase = "step"
            self._announce(phase)
            step = self._step = build_step(self._training, self._first.batch)
            self._timeline = None if accelerator(step.device) is None else Timeline(step.device)
            warm_up(step, self._first.batch, self._timeline)
        except StopIteration:
            return Message(failure=Failure(kind="no_data", phase=phase, message="the dataset delivered no batch"))
        except Exception as error:
            return self._answer_to(error, phase)
        finally:
            forget_open_batch()
        return Message(ready=self._report(took, why_none))

    def run(self, request: Request) -> Message:
        """A burst with workers or without, or the step on the first batch again and again; after `prepare`."""
        if request.plan.again:
            self._reading.rewind()
        config, stages, has_workers = request.config, request.plan.stages, request.config.num_workers > 0

        def make_loader() -> Any:
            if request.what == "step_ceiling":
                return self._first
            if self._timeline is not None:
                self._begin_copies(config, self._timeline)
            data = self._data  # in which no burst without workers may fill a cache
            if not has_workers and not draws_nothing(data.dataset, data.collate):
                data = self._read_private()
            loader = make_traced_loader(data, config, self._reading, stages=stages, on_error=Raised.of)
            if request.plan.anew:
                self._home.close()
                Root.end()
            elif has_workers and start_method(data.multiprocessing_context or config.multiprocessing_context) != "fork":
                clone_workers(loader, self._home)
            return loader

        def on_error(error: Exception, phase: FailurePhase) -> None:
            if not isinstance(error, Raised):
                self._answer_to(error, phase, config)

        try:
            run = LoopRun(request, self._step, self._timeline, self._announce, on_error, self._home)
            outcome = run.measured(make_loader)
        except (Raised, StepError) as error:
            if isinstance(error, Raised) and has_workers and error.is_of_workers(self._read_private):
                alone = f"{error.failure.message}, in a worker, and not when it is read again alone"
                return Message(failure=replace(error.failure, message=alone))
            return self._answer_to(error, "step", config)
        if isinstance(outcome, Failure):
            return Message(failure=outcome)
        if self._step.is_own and request.what == "burst" and not config.device_prefetch:
            # Its copy is in its step, which may copy a part of the batch.
            alone_s = self._copy_s.get(config.pin_memory)
            outcome = replace(outcome, copy_s=alone_s and min(alone_s, outcome.step_s))
        return Message(measurement=outcome)

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

    def _begin_copies(self, config: LoaderConfig, timeline: Timeline) -> None:
        """Pin as much memory as a burst will have in use, and time once a copy such as the user's step makes."""
        batch, held = self._first.batch, list[Any]()
        if config.pin_memory and config.batches_in_flight + IN_HAND > self._pinned:
            until = time.monotonic() + MOST_PINNING_S
            while len(held) < config.batches_in_flight + IN_HAND and time.monotonic() < until:
                held.append(pin_memory(fresh(batch)))
            self._pinned = max(self._pinned, len(held))
        if self._step.is_own and config.pin_memory not in self._copy_s:
            self._copy_s[config.pin_memory] = None
            with suppress(Exception):  # only its step knows how it moves; it may not fit as a whole
                self._copy_s[config.pin_memory] = copy_s(
                    [*held, *[batch] * IN_HAND][:IN_HAND], self._step.device, timeline
                )

    def begin_elsewhere(self) -> None:
        """Let the next burst read other samples, where the last one ran in a fork."""
        self._seed += 1
        self._reading = Reading(self._data, self._seed)

    def step_writes(self, path: str, error: BaseException) -> Failure:
        """The failure of a step that writes to a file of the user's."""
        name = "train_step" if self._training.train_step is not None else "the step"
        message = STEP_WRITES.format(step=name, path=path)
        return Failure(kind="user_exception", phase="step", message=message, traceback=user_traceback(error))

    def _fetch_first(self, data: DataSide) -> list[tuple[float, float]]:
        """Keep the first batch; wall and CPU seconds of one or two, of which the first was cold."""
        batches = iter(make_traced_loader(data, LoaderConfig(), self._reading, on_error=Raised.of))
        took = list[tuple[float, float]]()
        while not took or (len(took) == 1 and took[0][0] <= SECOND_LOOK_S):
            begun = time.monotonic()
            batch, fetch = next(batches)
            if not took:
                self._first = Cached(checked(batch), fetch[5])
            took.append((time.monotonic() - begun, fetch[4]))
        return took

    def _report(self, took: list[tuple[float, float]], why_none: list[str]) -> WarmupReport:
        step, first, data = self._step, self._first, self._data
        shape, first_batch_s = BatchShape.of(first.batch), took[0][0]
        fetch_s, fetch_cpu_s = max(took, key=lambda each: each[1] / max(each[0], 1e-9))  # the one that waited less
        counts_batches = not data.is_batched and first.samples == 1 and samples_in(first.batch) is None
        alone = shape.on_accelerator
        repeats = data.is_iterable and not alone and workers_repeat_each_other(data, first_batch_s)
        told = {
            BATCHES_COUNTED: counts_batches,
            SLOW_BATCHES.format(seconds=fetch_s): fetch_s > SLOW_FETCH_S,
            REPEATED_SAMPLES: repeats,
            self._reading.note or "": self._reading.note is not None,
        }
        return WarmupReport(
            step=step.description,
            samples=first.samples,
            batch_bytes=shape.bytes,
            batch_tensors=shape.tensors,
            on_accelerator=alone,
            first_fetch_s=fetch_s,
            first_fetch_cpu_s=fetch_cpu_s,
            first_batch_s=first_batch_s,
            counts_batches=counts_batches,
            most_workers=0 if alone or why_none else 1 if repeats else None,
            default_threads=torch.get_num_threads(),
            **accelerator_facts(step.device),
            notes=(*step.notes, *(note for note, holds in told.items() if holds), *([] if alone else why_none)),
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


def why_no_workers(data: DataSide, batch: Any, before: dict[int, tuple[int, int, int]]) -> list[str]:
    """Why workers would get other samples, or none, by the first batch and the positions of files before it was read."""
    if start_method(data.multiprocessing_context) == "fork":
        after = positions()
        for fd, (device, inode, at) in before.items():
            if after.get(fd, ())[:2] == (device, inode) and after[fd][2] != at:
                name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
                return [SHARED_FILE.format(dataset=type(data.dataset).__qualname__, file=name)]
        for dataset in wrapped_datasets(data.dataset):
            for name, value in list(getattr(dataset, "__dict__", {}).items()):
                kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__}
                if kinds.intersection(HANDLES):
                    return [HANDLE.format(name=name, kind=type(value).__qualname__)]
    fault = why_not_pickled(batch)
    return [] if fault is None else [UNPICKLABLE_BATCH.format(fault=fault)]


def workers_repeat_each_other(data: DataSide, first_fetch_s: float) -> bool:
    """Whether two workers begin with the very same batch: an IterableDataset that does not share its samples out.

    Both are seeded alike, so that shuffling and augmentation do not differ.
    """
    inner = data.worker_init_fn

    def begin_alike(worker: int) -> None:
        if inner is not None:
            inner(worker)
        seed_everything(0)
        info: Any = torch.utils.data.get_worker_info()
        object.__setattr__(info, "seed", 0)  # datasets with a generator of their own seed that from it

    alike, first = replace(data, worker_init_fn=begin_alike), dict[int, Any]()
    try:
        with OpenLoader() as open_loader:
            loader = make_traced_loader(alike, TWO_WORKERS, Reading(alike))
            is_forked = start_method(data.multiprocessing_context) == "fork"
            shortest_s = SHORTEST_TIMEOUT_S if is_forked else SPAWNED_TIMEOUT_S
            loader.timeout = max(shortest_s, TIMEOUT_FACTOR * first_fetch_s)
            for batch, fetch in islice(open_loader.open(loader), 2 * TWO_WORKERS.num_workers):
                first.setdefault(fetch[0], batch)
    except Exception:
        return False
    return len(first) == TWO_WORKERS.num_workers and _is_same(first[0], first[1])


def _is_same(one: Any, other: Any) -> bool:
    """Whether two batches hold equal tensors; without any, whether they are written alike."""
    ours, theirs = list(tensors_in(one)), list(tensors_in(other))
    if not ours or len(ours) != len(theirs):
        return not theirs and repr(one) == repr(other)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
