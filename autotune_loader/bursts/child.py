"""The process of the bursts: it loads the workload, answers requests until its parent is gone, and prints for nobody.

    parent   starts it ─────────────────────── burst? ─────────────────────── kills it
    child               phase ... phase ... ready      phase ... phase ... answer

It is a fresh interpreter where the workload can be pickled: a fork of a process that has run a multi-threaded torch step
hangs at its first parallel region. What cannot be pickled runs in a fork, and there by one thread; each of its bursts is
another fork, so that caches that one fills are empty for the next, unless the step runs on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from autotune_loader.bursts.bench import Bench, leave_segments
from autotune_loader.bursts.failures import AGAINST_SECONDS, failure_of
from autotune_loader.bursts.files import confine, environment, refused_path
from autotune_loader.bursts.packing import read_archive
from autotune_loader.bursts.protocol import Message, Request, receive, send
from autotune_loader.bursts.settings import LACKS, Settings
from autotune_loader.machine.elsewhere import (
    cut_channels,
    die_with_parent,
    leave_fork_server,
    own_files,
    own_shared_memory,
)
from autotune_loader.pipeline.batches import accelerator
from autotune_loader.pipeline.workload import Workload
from autotune_loader.values import Failure

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""Whose handlers of the caller do not run in a fork."""
IN_USE = f"this process uses {{device}}, which no fork of it can; {AGAINST_SECONDS}"
"""Or has asked `torch.cuda.is_available()`."""


def main(connection_fd: int, fds: tuple[int, int, int], seed: int, notes: list[str]) -> NoReturn:
    """The whole life of a fresh process, which is confined already, as `notes` tell.

    `connection_fd` is that of requests and answers, `fds` those of the archives of settings, data and training.
    """
    for fd in (connection_fd, *fds):
        os.set_inheritable(fd, False)  # private: no program that the dataset starts may have them
    sys.modules["__main__"] = types.ModuleType("__main__")  # for the classes of the caller's script
    settings_fd, data_fd, training_fd = fds

    def make_bench() -> Bench:
        workload = Workload(data=read_archive(data_fd), training=read_archive(training_fd))
        notes.extend(settings.set_modules())
        return Bench(workload, lambda: read_archive(data_fd), seed)

    def run() -> None:
        notes.extend(settings.set_process())
        serve(Connection(connection_fd), make_bench, notes, in_forks=False)

    settings: Settings = read_archive(settings_fd)
    _live(run)


def fork(workload: Workload, connection: int, output: int, scratch: str, seed: int) -> int:
    """Fork a process that serves requests with the caller's objects as it has them; its ID, which is that of its group, too.

    `connection` is the descriptor of requests and answers, `output` that of what it prints, `scratch` its temporary folder.
    """

    def live() -> None:
        _become_own_process(caller, connection, output, scratch)
        module = accelerator(workload.training.device)
        if module is not None and module._is_in_bad_fork():
            failure = Failure(
                kind="user_exception", phase="start", message=IN_USE.format(device=workload.training.device)
            )
            send(Connection(connection), Message(failure=failure))
            return
        notes, in_forks = confine(), module is None  # no fork of a process that uses CUDA can use it
        serve(Connection(connection), lambda: Bench(workload, lambda: workload.data, seed), notes, in_forks=in_forks)

    caller = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, whose locks may stay held: everything has a deadline.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = _forked(live)
    with contextlib.suppress(OSError):  # it has done so, or has ended
        os.setpgid(pid, pid)
    return pid


def _forked(run: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        leave_fork_server()
        _live(run)
    return pid


def _live(run: Callable[[], None]) -> NoReturn:
    """Run this, and end the process after what was printed is written: nothing of the user's is finalised."""
    code = 1
    try:
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):  # the parent is gone
            run()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _become_own_process(caller: int, connection: int, output: int, scratch: str) -> None:
    """Share nothing with the caller that can be changed, or waited for."""
    die_with_parent(caller)
    os.setpgid(0, 0)  # Ctrl-C on the terminal is the caller's
    gc.freeze()  # what the caller has left to the collector is the caller's to finalise
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream, source in enumerate((nowhere, output, output)):
        os.dup2(source, stream)
    # What the caller's buffers hold is the caller's to print.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    own_files(writable=False)
    own_shared_memory()
    cut_channels([connection])
    os.environ.update(environment(scratch))
    tempfile.tempdir = None
    # Connections to managers, for one, are made anew, as in multiprocessing's own forks.
    util._run_after_forkers()  # type: ignore[attr-defined]
    config: dict[str, Any] = vars(multiprocessing.current_process()).get("_config", {})
    for name in ("daemon", "tempdir"):  # it may have workers, and their sockets lie in scratch
        config.pop(name, None)
    torch.set_num_threads(1)  # the pool of threads is not there


def serve(connection: Connection, make_bench: Callable[[], Bench], notes: list[str], *, in_forks: bool) -> None:
    """Make a bench ready and answer requests until the parent is gone, each of them in a fork if asked so."""

    def answer() -> None:
        send(connection, bench.run(request))

    leave_segments()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited where it is ignored, and then no child can be waited for
    try:
        bench = make_bench()
    except (Exception, SystemExit) as error:
        send(connection, Message(failure=failure_of(error, "start")))
        return
    threading.excepthook = functools.partial(_of_thread, bench, connection)
    message = bench.prepare(functools.partial(send, connection))
    if message.ready is not None:
        message = Message(ready=replace(message.ready, notes=(*notes, *message.ready.notes)))
    elif message.failure is not None and (lacks := [note.rstrip(".") for note in notes if note.startswith(LACKS)]):
        message = Message(failure=replace(message.failure, message="; ".join((message.failure.message, *lacks))))
    send(connection, message)
    while message.ready is not None:
        request = receive(connection, Request)
        if in_forks:
            if not request.plan.again:
                bench.begin_elsewhere()
            _in_fork(answer)
        else:
            answer()


def _in_fork(run: Callable[[], None]) -> None:
    """Run this in a fork and wait for its end; this process dies as that fork does."""

    def live() -> None:
        die_with_parent(caller)
        run()

    caller = os.getpid()
    status = os.waitstatus_to_exitcode(os.waitpid(_forked(live), 0)[1])
    if status < 0:
        os.kill(os.getpid(), -status)
    elif status:
        os._exit(status)


def _of_thread(bench: Bench, connection: Connection, raised: threading.ExceptHookArgs) -> None:
    """A thread that was kept from writing ends the run: the step would wait for its queue, as for a logger's."""
    error = raised.exc_value
    if error is not None and (path := refused_path(error)) is not None:
        send(connection, Message(failure=bench.step_writes(path, error), ends_run=True))
    threading.__excepthook__(raised)
