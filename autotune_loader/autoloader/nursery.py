"""Where workers that begin in mid-epoch are forked: in a process that was forked as the iterator began, and does nothing else.

    iterator begins ── nursery, first workers ── ... the training changes data, makes handles, holds locks ...
                          └── another worker: the data as they were then

The nursery clones workers as children of the training process (CLONE_PARENT, clone(2)), which waits for them as for its own.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import platform
import signal
import socket
from multiprocessing import get_context, popen_fork, process, util
from multiprocessing.context import ForkProcess
from typing import Any

from autotune_loader.autoloader.channel import WorkerEnd, close_channels, pair
from autotune_loader.autoloader.worker import Given, work

CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""Number of the system call, whose arguments but the first are 0 here; None where it is not known."""
CLONE_PARENT = 0x8000
END_S = 1.0
"""A process whose channel has ended is dead a moment later; after this it is killed."""


class Nursery:
    """A process that forks workers, for whoever gives them the same."""

    def __init__(self, given: Given) -> None:
        self._ours, theirs = pair()
        self._process = get_context("fork").Process(target=_nurse, args=(theirs, given), daemon=True)
        self._process.start()
        process._children.discard(self._process)  # type: ignore[attr-defined]  # the script's own count
        theirs.close()

    def fork(self, end: WorkerEnd, number: int, count: int) -> int:
        """Its process ID.

        Raises:
            OSError: the nursery is gone.
        """
        socket.send_fds(self._ours, [pickle.dumps((number, count))], [end.socket.fileno()])
        if not (answer := self._ours.recv(64)):
            raise ConnectionResetError("the process that forks workers is gone")
        return int(answer)

    def close(self) -> None:
        self._ours.close()
        end_process(self._process)


def end_process(process: Any) -> None:
    """See a process end that has been told so."""
    process.join(END_S)
    if process.exitcode is None:
        process.kill()
        process.join()


class _Cloned(popen_fork.Popen):
    def _launch(self, process_obj: Any) -> None:
        nursery, *worker = process_obj.request
        self.pid = nursery.fork(*worker)
        self.sentinel = os.pidfd_open(self.pid)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel,))  # type: ignore[attr-defined]


class NurseryProcess(ForkProcess):
    """A worker from the nursery, which `multiprocessing` takes for one of its own."""

    _Popen = _Cloned

    def __init__(self, nursery: Nursery, end: WorkerEnd, number: int, count: int) -> None:
        super().__init__(daemon=True)
        self.request = nursery, end, number, count


def _nurse(theirs: socket.socket, given: Given) -> None:
    """The life of the nursery: until the loop hangs up."""
    close_channels()
    given.prepare(theirs.fileno())
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the loop
    while True:
        data, files, _, _ = socket.recv_fds(theirs, 1024, 1)
        if not data:
            return
        worker = pickle.loads(data)  # noqa: S301 - the loop's own
        if (pid := _clone()) == 0:
            code = 1
            try:
                theirs.close()
                signal.signal(signal.SIGINT, interrupt)
                one = ForkProcess(
                    target=work, args=(given, WorkerEnd(socket.socket(fileno=files[0])), *worker), daemon=True
                )
                one._parent_pid = os.getppid()  # type: ignore[attr-defined]
                code = one._bootstrap()  # type: ignore[attr-defined]
            finally:
                os._exit(code)
        os.close(files[0])
        theirs.send(str(pid).encode())


def _clone() -> int:
    """As `os.fork()`, a child of this process's own parent."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid
