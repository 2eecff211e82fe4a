"""The probe process: `python -m autotune_loader.probe.child <connection fd> <lifeline fd> <scratch folder>`.

It is started fresh, never forked: a forked child of a process that has run a multi-threaded torch step hangs at its first
parallel region. It loads the workload, answers requests until the connection closes, and prints nothing that anyone parses.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autotune_loader.probe.bench import Bench, WarmupReport
    from autotune_loader.probe.burst_loop import Announce
    from autotune_loader.probe.wire import Message, Request
    from autotune_loader.values.measurement import Failure, FailurePhase, Measurement
    from autotune_loader.values.trial import Acceleration

# A data side larger than this is not copied for bursts that fetch in the main process: it shares the one workers inherit.
PRIVATE_COPY_BYTES = 256 << 20


def main(connection_fd: int, lifeline_fd: int, scratch: str) -> None:
    """Serve requests over an inherited connection until the parent, which removes the scratch folder, closes it or dies."""
    for descriptor in (connection_fd, lifeline_fd):  # private: no program that the dataset starts may have them
        os.set_inheritable(descriptor, False)
    _die_with_parent(lifeline_fd, scratch)
    _keep_sockets_in(scratch)
    connection = Connection(connection_fd)
    _greet(connection)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        _serve(connection)


def _greet(connection: Connection) -> None:
    """Make this interpreter find what the parent's finds, before torch or any user module is imported."""
    from autotune_loader.probe.wire import receive_hello

    hello = receive_hello(connection)
    sys.path[:] = hello.sys_path
    with contextlib.suppress(OSError):
        os.chdir(hello.working_directory)
    multiprocessing.set_start_method(hello.start_method, force=True)
    import torch

    from autotune_loader.probe.torch_state import set_torch_state

    torch.set_num_threads(hello.threads)
    set_torch_state(hello.torch_state)


def _serve(connection: Connection) -> None:
    from autotune_loader.probe.wire import Message, receive_request, send
    from autotune_loader.values.measurement import Failure

    def announce(phase: FailurePhase) -> None:
        send(connection, Message(phase=phase))

    data, training = connection.recv_bytes(), connection.recv_bytes()
    bench, warmup = _load(data, training, announce)
    if bench is None or isinstance(warmup, Failure):
        assert isinstance(warmup, Failure)
        send(connection, Message(failure=warmup))
        return
    send(connection, Message(ready=warmup))
    while True:
        request = receive_request(connection)
        send(connection, _answer(bench, request, announce))


def _answer(bench: Bench, request: Request, announce: Announce) -> Message:
    from autotune_loader.probe.wire import Message
    from autotune_loader.values.measurement import Failure
    from autotune_loader.values.trial import Acceleration

    outcome: Measurement | Acceleration | Failure
    if request.what == "burst":
        outcome = bench.burst(request.config, request.plan, announce)
    elif request.what == "step_ceiling":
        outcome = bench.step_ceiling(request.config.consumer_threads, request.plan)
    else:
        assert request.acceleration is not None
        announce("step")
        outcome = bench.acceleration(request.acceleration, request.config.consumer_threads, request.plan)
    if isinstance(outcome, Acceleration):
        return Message(acceleration=outcome)
    return Message(failure=outcome) if isinstance(outcome, Failure) else Message(measurement=outcome)


def _load(data: bytes, training: bytes, announce: Announce) -> tuple[Bench | None, WarmupReport | Failure]:
    """Unpickle and warm up; a workload that cannot be unpickled here is a failure like any other."""
    import pickle

    from autotune_loader.probe.bench import Bench
    from autotune_loader.probe.failures import failure_of
    from autotune_loader.values.measurement import Failure

    try:
        shared = pickle.loads(data)
        small = len(data) <= PRIVATE_COPY_BYTES
        private = (lambda: pickle.loads(data)) if small else (lambda: shared)
        bench = Bench(data=lambda: shared, private_data=private, training=lambda: pickle.loads(training))
    except Exception as error:
        return None, failure_of(error, "start")
    warmup = bench.prepare(announce)
    return (None if isinstance(warmup, Failure) else bench), warmup


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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
