"""The probe process: it loads the workload, answers requests until the connection closes, and prints for nobody.

It is started fresh: a forked child of a process that has run a multi-threaded torch step hangs at its first parallel region.
Only what cannot be pickled is run in a fork, and there by one thread.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from autotune_loader.pipeline.workload import DataSide, Workload
    from autotune_loader.probe.bench import Bench
    from autotune_loader.probe.burst_loop import Announce
    from autotune_loader.probe.wire import Message, Request
    from autotune_loader.values.measurement import Failure, FailurePhase, Measurement

# Copies of the data side, and the caches that bursts fill in them, may take so much; then the last one is used again.
MOST_COPIED_BYTES = 1 << 30


def main(connection_fd: int, lifeline_fd: int, data_fd: int, training_fd: int, scratch: str) -> NoReturn:
    """Serve requests over an inherited connection until the parent, which removes the scratch folder, closes it or dies.

    Args:
        connection_fd: of requests and answers.
        lifeline_fd: closed when the parent ends.
        data_fd: of the archive of the data side.
        training_fd: of the archive of the training side.
        scratch: a folder for sockets.
    """
    from autotune_loader.probe.leaving import leave

    for descriptor in (connection_fd, lifeline_fd, data_fd, training_fd):
        os.set_inheritable(descriptor, False)  # private: no program that the dataset starts may have them
    sys.modules["__main__"] = types.ModuleType("__main__")  # for the classes of the caller's script
    code = 1
    try:
        _settle(lifeline_fd, scratch)
        with (
            Connection(connection_fd) as connection,
            contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError),
        ):
            _greet(connection)
            _serve(connection, lambda: _bench_of_archives(data_fd, training_fd))
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def serve_forked(connection_fd: int, lifeline_fd: int, workload: Workload, scratch: str) -> None:
    """The same in a fork of the caller's process, with the caller's objects as the fork has them; it leaves afterwards."""
    from autotune_loader.machine.inherited import own_shared_memory

    own_shared_memory()
    vars(multiprocessing.current_process()).get("_config", {}).pop("daemon", None)  # it may have workers
    _settle(lifeline_fd, scratch)
    connection = Connection(connection_fd)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        _serve(connection, lambda: _bench_of(workload, lambda: workload.data))


def _settle(lifeline_fd: int, scratch: str) -> None:
    _die_with_parent(lifeline_fd, scratch)
    _keep_sockets_in(scratch)


def _greet(connection: Connection) -> None:
    """Set what the parent has set, before any user module is imported."""
    from autotune_loader.probe.wire import Hello, receive

    hello = receive(connection, Hello)
    multiprocessing.set_start_method(hello.start_method, force=True)
    import torch

    from autotune_loader.probe.torch_state import set_torch_state

    torch.set_num_threads(hello.threads)
    set_torch_state(hello.torch_state)


def _serve(connection: Connection, make_bench: Callable[[], Bench]) -> None:
    from autotune_loader.probe.failures import failure_of_reading, failure_of_workload
    from autotune_loader.probe.wire import Message, Request, receive, send
    from autotune_loader.values.errors import WorkloadError
    from autotune_loader.values.measurement import Failure

    def announce(phase: FailurePhase) -> None:
        send(connection, Message(phase=phase))

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
        send(connection, _answer(bench, request, announce))


def _answer(bench: Bench, request: Request, announce: Announce) -> Message:
    from autotune_loader.probe.failures import failure_of_workload
    from autotune_loader.probe.wire import Message
    from autotune_loader.values.errors import WorkloadError
    from autotune_loader.values.measurement import Failure

    outcome: Measurement | Failure
    try:
        if request.what == "burst":
            outcome = bench.burst(request.config, request.plan, announce)
        else:
            outcome = bench.step_ceiling(request.config.consumer_threads, request.plan)
    except WorkloadError as error:
        return Message(failure=failure_of_workload(error, "batches"), ends_run=True)
    return Message(failure=outcome) if isinstance(outcome, Failure) else Message(measurement=outcome)


def _bench_of_archives(data_fd: int, training_fd: int) -> Bench:
    from autotune_loader.pipeline.workload import Workload
    from autotune_loader.probe.archive import read_archive
    from autotune_loader.probe.leaving import held

    data: DataSide = held(read_archive(data_fd, held))
    private = _Copies(data_fd)
    return _bench_of(Workload(data=data, training=held(read_archive(training_fd, held))), private.fresh)


def _bench_of(workload: Workload, private: Callable[[], DataSide]) -> Bench:
    from dataclasses import replace

    from autotune_loader.probe.bench import Bench
    from autotune_loader.probe.leaving import BurstWorkerInit

    data = workload.data
    for_workers = replace(data, worker_init_fn=BurstWorkerInit(data.worker_init_fn))
    return Bench(lambda: for_workers, private, workload.training)


class _Copies:
    """Copies of the data side for bursts that fetch in this process: each begins without what others have cached or opened.

    All of them are kept, since their end may be the end of something that is the user's.
    """

    def __init__(self, data_fd: int) -> None:
        self._data_fd = data_fd
        self._last: DataSide | None = None
        self._begun_bytes = _resident_bytes()

    def fresh(self) -> DataSide:
        """Another copy, or the last one where copies take too much memory already."""
        from autotune_loader.probe.archive import read_archive
        from autotune_loader.probe.leaving import held

        if self._last is None or _resident_bytes() - self._begun_bytes < MOST_COPIED_BYTES:
            self._last = held(read_archive(self._data_fd, held))
        return self._last


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _keep_sockets_in(folder: str) -> None:
    """Have multiprocessing and all workers keep their sockets in this folder.

    Otherwise each worker that sends a tensor makes a folder of its own (`pymp-...`), and one that is killed leaves it there.
    """
    # There is no public way. Children take the setting over, however they are started.
    vars(multiprocessing.current_process()).get("_config", {})["tempdir"] = folder


def _die_with_parent(lifeline_fd: int, scratch: str) -> None:
    """Kill the whole process group when the parent's end of the lifeline closes, however the parent ended."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline_fd, 1)
        shutil.rmtree(scratch, ignore_errors=True)
        if os.getpgrp() == os.getpid():  # our own group, as the parent started us: workers included
            os.killpg(os.getpgrp(), signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
