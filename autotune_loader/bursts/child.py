"""The process of the bursts: it loads the workload, answers requests until its parent is gone, and prints for nobody.

    parent   starts it ───────────────────────────────── burst? ─────────────────────────────── kills it
    child    data ─┬────────────────── step, warm-up ─ ready    bursts with workers
    fetcher        └─ the first batch                           bursts without workers, after a warm-up

Workers are forked from the child, which never fetches: they inherit no file, no thread and no cache that a batch has made.
Its fork, the fetcher, looks at the first batches, and fetches for bursts without workers.

The child is a fresh interpreter where the workload can be pickled: a fork of a process that has run a multi-threaded torch
step hangs at its first parallel region. What cannot be pickled runs in a fork, and there by one thread; each burst of its
fetcher is another fork, so that caches that one fills are empty for the next, unless the step runs on a GPU.
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
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import util
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import psutil
import torch

from autotune_loader.bursts.bench import Bench, leave_segments
from autotune_loader.bursts.failures import AGAINST_SECONDS, failure_of
from autotune_loader.bursts.files import confine, environment, refused_path
from autotune_loader.bursts.packing import read_archive
from autotune_loader.bursts.protocol import Allowance, Message, Request, WarmupReport, receive, send
from autotune_loader.bursts.settings import LACKS, Settings
from autotune_loader.machine.elsewhere import (
    cut_channels,
    die_with_parent,
    leave_fork_server,
    name_semaphores,
    own_files,
    own_shared_memory,
)
from autotune_loader.pipeline.batches import accelerator, initialized_accelerator
from autotune_loader.pipeline.workload import TrainingSide, Workload
from autotune_loader.values import Failure

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""Whose handlers of the caller do not run in a fork."""
CONTEXT_BYTES = 1 << 29
"""What a second process takes of a GPU before it has any tensor there, at the least."""
IN_USE = f"this process uses {{device}}, which no fork of it can; {AGAINST_SECONDS}"
"""Or has asked `torch.cuda.is_available()`."""


def main(
    connection_fd: int, fds: tuple[int, ...], seed: int, allowed: tuple[int, int | None], notes: list[str]
) -> NoReturn:
    """The whole life of a fresh process, which is confined already, as `notes` tell.

    `connection_fd` is that of requests and answers, `fds` those of the archives of settings, data and training, and
    of what these refer to.
    """
    for fd in (connection_fd, *fds):
        os.set_inheritable(fd, False)  # private: no program that the dataset starts may have them
    sys.modules["__main__"] = types.ModuleType("__main__")  # for the classes of the caller's script
    settings_fd, data_fd, training_fd, *_ = fds

    def read_training() -> TrainingSide:
        known = set(sys.modules)
        training: TrainingSide = read_archive(training_fd)
        notes.extend(settings.set_modules(known))  # of modules that it has imported; others may have been used
        return training

    def make_bench() -> Bench:
        data = read_archive(data_fd)
        notes.extend(settings.set_modules())
        return Bench(data, read_training, functools.partial(read_archive, data_fd), say, seed, Allowance(*allowed))

    def run() -> None:
        notes.extend(settings.set_process())
        serve(connection, make_bench, notes, in_forks=False)

    connection = Connection(connection_fd)
    say = functools.partial(send, connection)
    settings: Settings = read_archive(settings_fd)
    _live(run)


def fork(workload: Workload, connection: int, output: int, scratch: str, seed: int, allowed: Allowance) -> int:
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
        say = functools.partial(send, to := Connection(connection))
        bench = Bench(workload.data, lambda: workload.training, lambda: workload.data, say, seed, allowed)
        serve(to, lambda: bench, notes, in_forks=in_forks)

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
    """Make a bench ready and answer requests until the parent is gone.

    Each burst without workers runs in a fork of its own where `in_forks`.
    """
    leave_segments()
    name_semaphores(tempfile.gettempdir())  # scratch
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited where it is ignored, and then no child can be waited for
    threads, begun = torch.get_num_threads(), psutil.Process().create_time()
    torch.set_num_threads(1)  # no fork has the threads of a parallel region
    try:
        bench = make_bench()
    except (Exception, SystemExit) as error:
        send(connection, Message(failure=failure_of(error, "start")))
        return
    start_s = time.time() - begun
    threading.excepthook = functools.partial(_of_thread, bench, connection)
    fetcher: Bench | Fetcher = bench
    # No fork could use what the data lie on, nor has it the threads that their modules have started.
    if initialized_accelerator() is None and threading.active_count() == 1:
        fetcher = Fetcher(bench, threads, in_forks=in_forks)
    torch.set_num_threads(threads)
    message, place = fetcher.look()
    if message.failure is not None and message.failure.kind in ("user_exception", "no_data"):
        with_worker, place = bench.look(workers=1)
        message = message if with_worker.ready is None else with_worker
    if message.ready is None:
        send(connection, _with_lacks(message, notes))
        return
    seen = bench.judged(replace(message.ready, start_s=start_s))
    alone: Bench | Fetcher = fetcher if in_forks or seen.most_workers != 0 else bench
    trainer = bench if seen.most_workers != 0 else alone
    message = trainer.prepare(seen)
    if message.ready is None:
        send(connection, _with_lacks(message, notes))
        return
    send(connection, Message(ready=replace(message.ready, notes=tuple(dict.fromkeys((*notes, *message.ready.notes))))))
    warm = [trainer]
    if trainer is not alone and not _fits_twice(bench, alone):
        alone = bench
    while True:
        request = receive(connection, Request)
        runner = alone if request.what == "burst" and not request.config.num_workers else trainer
        if runner not in warm:
            warm.append(runner)
            if (failed := runner.prepare(replace(seen, most_workers=0))).ready is None:  # it has none
                send(connection, failed)
                return
        elsewhere = request.plan.place
        answer, after = runner.run(request, place if elsewhere is None else elsewhere)
        place = after if elsewhere is None else place
        send(connection, answer)


def _with_lacks(message: Message, notes: list[str]) -> Message:
    """A failure with what this process lacks, which may be why."""
    lacks = [note.rstrip(".") for note in notes if note.startswith(LACKS)]
    if message.failure is None or not lacks:
        return message
    return replace(message, failure=replace(message.failure, message="; ".join((message.failure.message, *lacks))))


def _fits_twice(bench: Bench, fetcher: Bench | Fetcher) -> bool:
    """Whether the step can run in the fetcher, too, while the bench keeps its memory of the device."""
    module = accelerator(bench.device)
    if module is None:
        return True
    free, _ = module.mem_get_info(bench.device)
    return free > module.memory_reserved(bench.device) + CONTEXT_BYTES and fetcher.may_use(bench.device)


class Fetcher:
    """A fork of this process in which a bench fetches, so that workers of this one do not inherit what that leaves.

    It has the bench's methods. This process ends as the fork does, should it die.

    Args:
        bench: It has not fetched yet.
        threads: Of a step on the CPU.
        in_forks: Whether each call runs in another fork, but for the warm-up.
    """

    def __init__(self, bench: Bench, threads: int, *, in_forks: bool) -> None:
        caller = os.getpid()
        self._connection, theirs = multiprocessing.Pipe()

        def live() -> None:
            die_with_parent(caller)
            own_files(writable=True)  # positions of files that unpickling has opened
            torch.set_num_threads(threads)
            bench.apart = [caller, os.getpid()]
            bench.read_elsewhere()
            while True:
                name, arguments = theirs.recv()

                def answer(name: str = name, arguments: Any = arguments) -> None:
                    theirs.send(getattr(bench, name)(*arguments))

                if in_forks and name != "prepare":
                    _in_fork(answer)
                else:
                    answer()

        self._pid = _forked(live)
        theirs.close()
        bench.apart = [self._pid]
        bench.reads_alone = functools.partial(self._ask, "reads_alone")
        self.look: Callable[[], tuple[Message, Any]] = functools.partial(self._ask, "look")
        self.prepare: Callable[[WarmupReport], Message] = functools.partial(self._ask, "prepare")
        self.run: Callable[[Request, Any], tuple[Message, Any]] = functools.partial(self._ask, "run")
        self.may_use: Callable[[torch.device], bool] = functools.partial(self._ask, "may_use")

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            self._connection.send((name, arguments))
            return self._connection.recv()
        except (EOFError, OSError):
            _end_as(os.waitpid(self._pid, 0)[1])


def _in_fork(run: Callable[[], None]) -> None:
    """Run this in a fork and wait for its end; this process dies as that fork does."""

    def live() -> None:
        die_with_parent(caller)
        run()

    caller = os.getpid()
    if (status := os.waitpid(_forked(live), 0)[1]) != 0:
        _end_as(status)


def _end_as(status: int) -> NoReturn:
    """End this process as the one did that was waited for."""
    if (code := os.waitstatus_to_exitcode(status)) < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _of_thread(bench: Bench, connection: Connection, raised: threading.ExceptHookArgs) -> None:
    """A thread that was kept from writing ends the run: the step would wait for its queue, as for a logger's."""
    error = raised.exc_value
    if error is not None and (path := refused_path(error)) is not None:
        send(connection, Message(failure=bench.step_writes(path, error), ends_run=True))
    threading.__excepthook__(raised)
