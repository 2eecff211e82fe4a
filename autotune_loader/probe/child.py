"""The probe process: `python -m autotune_loader.probe.child <four descriptors> <scratch folder>`.

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

# A data side that takes more than this beyond its buffers is not read anew for bursts that fetch in the main process: they use
# the one that workers inherit.
PRIVATE_COPY_BYTES = 256 << 20


def main(connection_fd: int, lifeline_fd: int, data_fd: int, training_fd: int, scratch: str) -> None:
    """Serve requests over an inherited connection until the parent, which removes the scratch folder, closes it or dies.

    Args:
        connection_fd: of requests and answers.
        lifeline_fd: closed when the parent ends.
        data_fd: of the archive of the data side.
        training_fd: of the archive of the training side.
        scratch: a folder for sockets, and for what workers note.
    """
    for descriptor in (
        connection_fd,
        lifeline_fd,
        data_fd,
        training_fd,
    ):  # private: no program that the dataset starts may have them
        os.set_inheritable(descriptor, False)
    _die_with_parent(lifeline_fd, scratch)
    _keep_sockets_in(scratch)
    connection = Connection(connection_fd)
    _greet(connection)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        _serve(connection, data_fd, training_fd, scratch)


def _greet(connection: Connection) -> None:
    """Make this interpreter find what the parent's finds, before torch or any user module is imported."""
    from autotune_loader.probe.wire import Hello, receive

    hello = receive(connection, Hello)
    sys.path[:] = hello.sys_path
    with contextlib.suppress(OSError):
        os.chdir(hello.working_directory)
    multiprocessing.set_start_method(hello.start_method, force=True)
    import torch

    from autotune_loader.probe.torch_state import set_torch_state

    torch.set_num_threads(hello.threads)
    set_torch_state(hello.torch_state)


def _serve(connection: Connection, data_fd: int, training_fd: int, scratch: str) -> None:
    from autotune_loader.probe.wire import Message, Request, receive, send
    from autotune_loader.values.measurement import Failure

    def announce(phase: FailurePhase) -> None:
        send(connection, Message(phase=phase))

    bench, warmup = _load(data_fd, training_fd, scratch, announce)
    if bench is None or isinstance(warmup, Failure):
        assert isinstance(warmup, Failure)
        send(connection, Message(failure=warmup))
        return
    send(connection, Message(ready=warmup))
    while True:
        request = receive(connection, Request)
        send(connection, _answer(bench, request, announce))


def _answer(bench: Bench, request: Request, announce: Announce) -> Message:
    from autotune_loader.probe.wire import Message
    from autotune_loader.values.measurement import Failure

    outcome: Measurement | Failure
    if request.what == "burst":
        outcome = bench.burst(request.config, request.plan, announce)
    else:
        outcome = bench.step_ceiling(request.config.consumer_threads, request.plan)
    return Message(failure=outcome) if isinstance(outcome, Failure) else Message(measurement=outcome)


def _load(
    data_fd: int, training_fd: int, scratch: str, announce: Announce
) -> tuple[Bench | None, WarmupReport | Failure]:
    """Read the workload and warm it up; one that cannot be read here is a failure like any other."""
    from autotune_loader.probe.archive import pickled_bytes, read_archive
    from autotune_loader.probe.bench import Bench
    from autotune_loader.probe.failures import failure_of_reading
    from autotune_loader.values.measurement import Failure

    try:
        shared = read_archive(data_fd)
        small = pickled_bytes(data_fd) <= PRIVATE_COPY_BYTES
        private = (lambda: read_archive(data_fd)) if small else (lambda: shared)
        bench = Bench(lambda: shared, private, lambda: read_archive(training_fd), scratch)
    except Exception as error:
        return None, failure_of_reading(error)
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
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
