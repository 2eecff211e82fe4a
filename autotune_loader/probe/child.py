"""The probe process: it loads the workload, answers requests until the connection closes, and prints for nobody.

    parent   starts it ─────────────────────── burst? ─────────────────────── bye (or just closes)
    child               phase ... phase ... ready      phase ... phase ... answer

Both sides send plain records as MessagePack over a private socket pair. Only the workload itself is a pickle, in files that the
child inherits (`probe.archive`); nothing the child sends is unpickled.

It is started fresh: a forked child of a process that has run a multi-threaded torch step hangs at its first parallel region.
Only what cannot be pickled is run in a fork, and there by one thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal, NoReturn, TypeVar

import msgspec
import psutil
import torch

from autotune_loader.machine.inherited import own_shared_memory
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.probe import lifeline
from autotune_loader.probe.archive import read_archive
from autotune_loader.probe.bench import Bench, WarmupReport
from autotune_loader.probe.failures import failure_of_reading, failure_of_workload
from autotune_loader.probe.leaving import BurstWorkerInit, held, leave, leave_segments
from autotune_loader.probe.torch_state import read_torch_state, set_torch_state
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, FailurePhase, Measurement
from autotune_loader.values.plan import BurstPlan

# Copies of the data side, and the caches that bursts fill in them, may take so much; then the last one is used again.
MOST_COPIED_BYTES = 1 << 30
PARENT_IS_GONE = (EOFError, ConnectionResetError, BrokenPipeError)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to run."""

    what: Literal["burst", "step_ceiling"]
    plan: BurstPlan
    config: LoaderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of the child; one of the first four fields is set."""

    phase: FailurePhase | None = None
    ready: WarmupReport | None = None
    measurement: Measurement | None = None
    failure: Failure | None = None
    ends_run: bool = False
    """Whether no other configuration would be without that failure."""


def send(connection: Connection, record: Request | Message) -> None:
    connection.send_bytes(msgspec.msgpack.encode(record))


def receive(connection: Connection, kind: type[T]) -> T:
    """The next record of the other side.

    Raises:
        EOFError, OSError: it is gone.
    """
    return msgspec.msgpack.decode(connection.recv_bytes(), type=kind)


def settings() -> dict[str, Any]:
    """What a child sets before it imports the user's classes, so that it trains as this process would; all of it literals."""
    method = multiprocessing.get_start_method(allow_none=True)
    return {"threads": torch.get_num_threads(), "start_method": method, "torch_state": read_torch_state()}


def main(connection_fd: int, lifeline_fd: int, data_fd: int, training_fd: int, settings: dict[str, Any]) -> NoReturn:
    """Serve requests over an inherited connection until the parent closes it.

    Args:
        connection_fd: of requests and answers.
        lifeline_fd: closed when the parent ends, which is watched already.
        data_fd: of the archive of the data side.
        training_fd: of the archive of the training side.
        settings: of the parent.
    """
    for descriptor in (connection_fd, lifeline_fd, data_fd, training_fd):
        os.set_inheritable(descriptor, False)  # private: no program that the dataset starts may have them
    sys.modules["__main__"] = types.ModuleType("__main__")  # for the classes of the caller's script
    code = 1
    try:
        with Connection(connection_fd) as connection, contextlib.suppress(*PARENT_IS_GONE):
            multiprocessing.set_start_method(settings["start_method"], force=True)
            torch.set_num_threads(settings["threads"])
            set_torch_state(settings["torch_state"])
            _serve(connection, lambda: _bench_of_archives(data_fd, training_fd))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        lifeline.let_go()
        leave(code)


def serve_forked(connection_fd: int, lifeline_fd: int, workload: Workload, scratch: str) -> None:
    """The same in a fork of the caller's process, with the caller's objects as the fork has them; it leaves afterwards."""
    own_shared_memory()
    vars(multiprocessing.current_process()).get("_config", {}).pop("daemon", None)  # it may have workers
    lifeline.hold(lifeline_fd, scratch)
    with contextlib.suppress(*PARENT_IS_GONE):
        _serve(Connection(connection_fd), lambda: _bench_of(workload, lambda: workload.data))
    lifeline.let_go()


def _serve(connection: Connection, make_bench: Callable[[], Bench]) -> None:
    def announce(phase: FailurePhase) -> None:
        send(connection, Message(phase=phase))

    leave_segments()
    try:
        bench = make_bench()
    except Exception as error:
        send(connection, Message(failure=failure_of_reading(error)))
        return
    try:
        warmup = bench.prepare(announce)
    except WorkloadError as error:
        warmup = failure_of_workload(error, "first_batch")
    if isinstance(warmup, Failure):
        send(connection, Message(failure=warmup))
        return
    send(connection, Message(ready=warmup))
    while True:
        request = receive(connection, Request)
        try:
            outcome = getattr(bench, request.what)(request.config, request.plan, announce)
        except WorkloadError as error:
            message = Message(failure=failure_of_workload(error, "batches"), ends_run=True)
        else:
            message = Message(failure=outcome) if isinstance(outcome, Failure) else Message(measurement=outcome)
        send(connection, message)


def _bench_of_archives(data_fd: int, training_fd: int) -> Bench:
    """A bench whose bursts without workers begin without what others have cached or opened.

    All copies are kept, since their end may be the end of something that is the user's.
    """
    resident, begun_bytes, on_gpu_bytes, last = psutil.Process().memory_info, 0, 0, None

    def copied() -> DataSide:
        nonlocal on_gpu_bytes
        before = torch.cuda.memory_allocated()
        data: DataSide = held(read_archive(data_fd, held))
        on_gpu_bytes += torch.cuda.memory_allocated() - before
        return data

    def private() -> DataSide:
        nonlocal last
        if last is None or resident().rss - begun_bytes + on_gpu_bytes < MOST_COPIED_BYTES:
            last = copied()
        return last

    workload = Workload(data=copied(), training=held(read_archive(training_fd, held)))
    begun_bytes = resident().rss
    return _bench_of(workload, private)


def _bench_of(workload: Workload, private: Callable[[], DataSide]) -> Bench:
    data = workload.data
    for_workers = replace(data, worker_init_fn=BurstWorkerInit(data.worker_init_fn))
    return Bench(lambda: for_workers, private, workload.training)
