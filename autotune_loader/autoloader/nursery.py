"""How workers are born: what torch takes for a multiprocessing context, and the process in which later workers are forked.

    iterator begins ── nursery ── first workers, if any were asked for ── ... the training makes handles, holds locks ...
                          └── another worker: the data as they were when the iterator began

The nursery does nothing but clone workers, as children of the training process (CLONE_PARENT, clone(2)), which waits for them
as for its own. Without one (another start method, a kernel that refuses) they start as the method does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import inspect
import os
import pickle
import platform
import signal
import socket
import stat
import time
import weakref
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import popen_fork, resource_tracker, util
from multiprocessing.context import ForkProcess
from typing import Any

from autotune_loader.autoloader.channel import Channel, NoQueue, Results, WorkerEnd, close_channels, pair
from autotune_loader.autoloader.given import Given, Parts
from autotune_loader.autoloader.pinning import Pinner
from autotune_loader.autoloader.worker import Flag, leave_signals, work
from autotune_loader.machine.elsewhere import descriptors, lead_nowhere
from autotune_loader.machine.kernel import pidfd

CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""Number of the system call; None where it is not known."""
SET_ROBUST_LIST, GET_ROBUST_LIST = {"x86_64": (273, 274), "aarch64": (99, 100)}.get(platform.machine(), (0, 0))
CLONE_PARENT, CHILD_SETTID, CHILD_CLEARTID, PR_GET_TID_ADDRESS = 0x8000, 0x1000000, 0x200000, 40
REFUSED = (errno.ENOSYS, errno.EPERM)
"""What a kernel, or a sandbox, says that has no such call, or does not allow it."""
END_S = 1.0
"""A process whose channel has ended is dead a moment later; after this it is killed."""
ANSWER_S = 10.0
"""A nursery that takes longer to clone a worker was stopped, or waits for a lock."""
OF_A_WORKER = ("index_queue", "data_queue", "done_event", "worker_id", "num_workers")
"""Arguments of torch's worker loop that differ between workers."""


class Births:
    """A multiprocessing context whose queues are channels: torch asks for its result queue first, then for one a worker.

    Args:
        real: The context that starts processes.
        parts: What workers get beside the arguments of torch's worker loop.
        is_asked: Whether somebody asked for workers. Torch asks for one where there is to be none yet.
        pins: Whether batches are pinned as they arrive, where they lie if there is a `pinner`.
        has_nursery: Whether later workers are to be forked from one.
        nursery_first: Whether it is to be there before the first worker.
        files: Descriptors that the dataset holds.
    """

    def __init__(
        self,
        real: Any,
        parts: Parts,
        pinner: Pinner | None,
        *,
        is_asked: bool,
        pins: bool,
        has_nursery: bool,
        nursery_first: bool = False,
        files: Collection[int] = (),
    ) -> None:
        self._real, self._parts, self._pinner, self._is_asked = real, parts, pinner, is_asked
        self._nursery_first, self._files = nursery_first, files
        self._has_nursery = has_nursery and CLONE is not None and real.get_start_method() == "fork"
        self.results = Results(pins=pins)
        self._is_first = True
        self._nursery: Nursery | None = None
        self._given: Given | None = None
        self._made: Channel | None = None
        self._starting_at = 0.0
        self.start_s = 0.0
        """What starting a worker took last."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    @property
    def method(self) -> str:
        """How processes start."""
        return str(self._real.get_start_method())

    @property
    def is_prepared(self) -> bool:
        """Whether another worker may start now: the nursery is there, or there is to be none."""
        return self._nursery is not None or not self._has_nursery

    def Event(self) -> Flag:  # noqa: N802 - as in multiprocessing
        return Flag()

    def Queue(self) -> Any:  # noqa: N802
        if self._is_first:
            self._is_first = False
            return self.results
        if not self._is_asked and self._given is None:
            return NoQueue()
        self._clock()
        self.started()
        self._made, self._starting_at = Channel(self._pinner), time.monotonic()
        self.results.add(self._made)
        return self._made

    def Process(self, *, target: Any, args: Any) -> Any:  # noqa: N802
        arguments = dict(zip(_parameters(target), args, strict=True))  # versions differ
        if self._given is None:
            given = {name: value for name, value in arguments.items() if name not in OF_A_WORKER}
            self._given = Given(self._parts._replace(arguments=given))
            if self._nursery_first:
                self.prepare()
        if not self._is_asked:
            return _Nobody()
        return self._process(arguments["worker_id"], arguments["num_workers"])

    def prepare(self) -> None:
        """Have a nursery from now on, where there may be one."""
        if self._has_nursery and self._nursery is None:
            assert self._given is not None
            try:
                self._nursery = Nursery(self._given, self._files)
            except OSError as error:
                self._has_nursery = error.errno not in REFUSED  # else workers start as the method does

    def start(self, number: int, count: int) -> tuple[Channel, Any]:
        """Another worker, of so many.

        Raises:
            OSError: No process can be started; or the nursery is gone, and nobody asked for workers.
            Exception: As `multiprocessing` raises where what workers get cannot be pickled.
        """
        channel, born = self.Queue(), None
        channel.number = number
        try:
            if self._nursery is not None:
                try:
                    born = NurseryProcess(self._nursery, channel.end, number, count)
                    born.start()
                except OSError as error:  # it was killed, or may not clone
                    self.close_nursery()
                    self._has_nursery = not self._is_asked and error.errno not in REFUSED
                    if self._has_nursery:
                        raise
                    born = None
            if born is None:
                born = self._process(number, count)
                born.start()
        except BaseException:
            self.results.remove(channel)
            channel.close()
            raise
        finally:
            self._clock()
            self.started()
        return channel, born

    def _process(self, number: int, count: int) -> Any:
        channel = self._made
        assert channel is not None
        channel.number = number
        return self._real.Process(target=work, args=(self._given, channel.end, number, count), daemon=True)

    def started(self) -> None:
        """The latest worker has its end: as long as the loop had it, too, the channel would not end with the worker."""
        if self._made is not None:
            self._made.end.socket.close()
            self._made = None
        self._starting_at = 0.0

    def _clock(self) -> None:
        if self._starting_at:
            self.start_s = time.monotonic() - self._starting_at

    def close_nursery(self) -> None:
        """Later workers start as they do without."""
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


@functools.cache
def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


class _Nobody:
    """What torch takes for a worker where there is to be none yet."""

    daemon, pid = True, 0

    def start(self) -> None: ...


class Nursery:
    """A process that forks workers, for whoever gives them the same.

    Raises:
        OSError: The kernel refuses what it needs.
    """

    def __init__(self, given: Given, files: Collection[int]) -> None:
        os.close(pidfd(os.getpid()))  # whether it can be told when a worker ends
        self._ours, theirs = pair()
        try:
            self.pid = os.fork()  # no child that the script counts or waits for
        except BaseException:
            self._ours.close()
            theirs.close()
            raise
        if not self.pid:
            try:
                _nurse(theirs, given, files)
            finally:
                os._exit(0)
        theirs.close()
        self.close = weakref.finalize(self, _ended, self.pid, os.getpid(), self._ours)

    def fork(self, end: WorkerEnd, number: int, count: int) -> int:
        """Its process ID.

        Raises:
            OSError: The nursery is gone, or cannot clone.
        """
        socket.send_fds(self._ours, [pickle.dumps((number, count))], [end.socket.fileno()])
        self._ours.settimeout(ANSWER_S)
        if not (answer := self._ours.recv(64)):
            raise ConnectionResetError("the process that forks workers is gone")
        if (pid := int(answer)) <= 0:
            raise OSError(errno.EPERM, "no worker can be cloned")
        return pid


def _ended(pid: int, parent: int, ours: socket.socket) -> None:
    """The nursery ends, and whoever was born in it goes on."""
    ours.close()
    if os.getpid() != parent:
        return
    until, has_ended = time.monotonic() + END_S, False
    with suppress(OSError):  # somebody has waited for all children
        while not (has_ended := os.waitpid(pid, os.WNOHANG)[0] != 0) and time.monotonic() < until:
            time.sleep(0.0005)
        if not has_ended:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def end_process(process: Any) -> None:
    """See a process end that has been told so."""
    process.join(END_S)
    if process.exitcode is None:
        kill(process)
        process.join()


def kill(process: Any) -> None:
    """Kill a process; where the script ignores SIGCHLD it may be gone without a word."""
    with suppress(ProcessLookupError):
        process.kill()


class _Cloned(popen_fork.Popen):
    def _launch(self, process_obj: Any) -> None:
        nursery, *worker = process_obj.request
        self.pid = nursery.fork(*worker)
        self.sentinel = pidfd(self.pid)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel,))  # type: ignore[attr-defined]


class NurseryProcess(ForkProcess):
    """A worker from the nursery, which `multiprocessing` takes for one of its own."""

    _Popen = _Cloned

    def __init__(self, nursery: Nursery, end: WorkerEnd, number: int, count: int) -> None:
        super().__init__(daemon=True)
        self.request = nursery, end, number, count


def _nurse(theirs: socket.socket, given: Given, files: Collection[int]) -> None:
    """The life of the nursery: until the loop hangs up. None of the script's handlers of signals runs in it."""
    close_channels()
    handlers = leave_signals()
    if not given.asked:
        _leave_pipes(files)
    if (probe := os.fork()) == 0:  # before the first clone: libraries end their threads where somebody forks
        os._exit(0)
    with suppress(ChildProcessError):  # the script ignores SIGCHLD
        os.waitpid(probe, 0)
    while True:
        data, files, _, _ = socket.recv_fds(theirs, 1024, 1)
        if not data:
            return
        worker = pickle.loads(data)  # noqa: S301 - the loop's own
        if (pid := _clone()) == 0:
            code = 1
            try:
                theirs.close()
                for each, handler in handlers.items():
                    signal.signal(each, handler)
                one = ForkProcess(
                    target=work, args=(given, WorkerEnd(socket.socket(fileno=files[0])), *worker), daemon=True
                )
                one._parent_pid = os.getppid()  # type: ignore[attr-defined]
                code = one._bootstrap()  # type: ignore[attr-defined]
            finally:
                os._exit(code)
        os.close(files[0])
        theirs.send(str(pid).encode())


def _leave_pipes(files: Collection[int]) -> None:
    """Hold no writing end of the training's own pipes: a program that it feeds waits until nobody does."""
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    for fd in descriptors(3):
        with suppress(OSError):  # it was closed meanwhile
            is_pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
            if (
                is_pipe
                and fd != tracker
                and fd not in files
                and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            ):
                lead_nowhere(fd)


def _clone() -> int:
    """As `os.fork()`, a child of this process's own parent; the process has one thread."""
    python, libc, own = ctypes.pythonapi, ctypes.PyDLL(None), ctypes.c_void_p()
    flags = CLONE_PARENT | signal.SIGCHLD
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(own), 0, 0, 0) == 0 and own.value:
        flags |= CHILD_SETTID | CHILD_CLEARTID  # glibc keeps its thread's number there, as its own fork() sets it
    address, nothing = ctypes.c_void_p(own.value), ctypes.c_void_p(0)
    last = (address, nothing) if CLONE == 56 else (nothing, address)  # aarch64 has them the other way round
    mutexes, size = ctypes.c_void_p(), ctypes.c_size_t()
    libc.syscall(GET_ROBUST_LIST, 0, ctypes.byref(mutexes), ctypes.byref(size))
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(CLONE, flags, nothing, nothing, *last))
    if pid == 0:
        libc.syscall(SET_ROBUST_LIST, mutexes, size)  # as glibc: what it holds is released should it die
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid
