"""Where workers are born: a process that has what they are given clones them, and does nothing else.

    fork                training ── nursery: a fork of it                                            ── workers
    spawn, forkserver   training ── root: a new Python with the script's imports ── nursery: data    ── workers

All are children of the training process (CLONE_PARENT, clone(2)), which waits for them as for its own. The root serves all
loaders of the process. A nursery serves as long as the same parcel would be sent to another one.

A clone of a new process is as good as a new process if that has no threads, and nothing open that clones would share. Where it
has, `why_not` tells what, and processes start as their start method does it.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_start_method, popen_fork, popen_spawn_posix, set_start_method, spawn, util
from typing import Any

from autotune_loader.machine.clones import ROOT, Begin, Inherited, be_worker, seeds, serve, try_fork
from autotune_loader.machine.kernel import CLONE, pidfd
from autotune_loader.machine.parcel import Lists, Parcel

NO_GUARD = "the script has no `if __name__ == '__main__':` around what trains"
BY_NAME = 'memory is shared by name (sharing strategy "file_system")'
GONE = "the process that clones workers was ended"
ANSWER_S = 10.0
"""A nursery that takes longer to clone a worker was stopped, or waits for a lock."""


class _Cloner:
    """A child of this process that clones itself for each socket that it is sent."""

    def __init__(self) -> None:
        self._ours, self._theirs = pair()
        self._pids = list[int]()
        self.close = weakref.finalize(self, _end, self._ours, self._pids, os.getpid())

    @property
    def pid(self) -> int | None:
        """Of its process; None while that is not known."""
        return self._pids[0] if self._pids else None

    @property
    def has_ended(self) -> bool:
        """Whether it was killed; to be asked where it has nothing to say."""
        return _can_read(self._ours, 0)

    def clone(self, theirs: socket.socket, imports: Sequence[str] = ()) -> None:
        """Have another child, whose process ID the other end of this socket gets, after these imports.

        Raises:
            OSError: It is gone.
        """
        socket.send_fds(self._ours, [pickle.dumps(imports)], [theirs.fileno()])


class Nursery(_Cloner):
    """A process that clones workers, for whoever gives them the same.

    Attributes:
        key: Of the parcel that it was sent, and of what its root began with; None where that cannot be compared, as in a fork.
        why_not: Why no worker can be cloned here; None where one can, or where that is not known yet.
        has_failed: Whether what workers are given cannot be unpickled.
    """

    key: Any = None
    why_not: str | None = None
    is_known = has_failed = False
    _root: Root | None = None
    """Until it has cloned this nursery."""

    @classmethod
    def forked(cls, given: Sequence[Any], begin: Callable[[], dict[int, Any]]) -> Nursery:
        """A fork of this process; `begin` is called in it and returns the handlers of signals that workers have.

        Raises:
            OSError: The kernel refuses what a nursery needs.
        """
        require_clones()
        one = cls()
        pid = os.fork()  # no child that the script counts or waits for
        if not pid:
            try:
                handlers = begin()
                try_fork()
                gc.freeze()
                serve(one._theirs, handlers, lambda there: be_worker(there, given))
            finally:
                os._exit(0)
        one._theirs.close()
        one._pids.append(pid)
        one.is_known = True
        return one

    @classmethod
    def spawned(cls, root: Root, parcel: Parcel, key: Any) -> Nursery:
        """A clone of the root, to which a parcel is sent: what it has `Inherited`, what is given, and `seeds()`.

        Raises:
            OSError: The kernel refuses what a nursery needs.
        """
        require_clones()
        one = cls()
        one.key, one._root = key, root
        with one._theirs, suppress(OSError):  # the root is gone, which is seen when the nursery is waited for
            root.clone(one._theirs, root.imports)
        # While the root imports, and the loop goes on where nobody waits for workers.
        threading.Thread(target=one._send, args=(parcel,), name="autotune-loader-parcel", daemon=True).start()
        return one

    def _send(self, parcel: Parcel) -> None:
        try:
            parcel.send(self._ours)
        except Exception:  # such as no memory: nobody is to wait for it
            with suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is known by then if workers can be cloned here."""
        while not self.is_known:
            if not _can_read(self._ours, seconds):
                return False
            if isinstance(answer := _answer(self._ours), int):
                self._pids.append(answer)
            else:
                self.why_not, self.has_failed, imports = answer
                if self._root is not None and self.why_not is None:
                    self._root.imports = imports
                self.is_known, self._root = True, None
        return True

    def popen(self, given: Sequence[Any], one: Any) -> Any:
        """What `start()` of a process calls in place of what its start method does, which is done where no clone can be had."""
        self.wait()
        if self.why_not is None:
            try:
                return self.cloned(given, one)
            except OSError:
                self.why_not = GONE
        vars(one).pop("_Popen", None)
        return one._Popen(one)

    def cloned(self, given: Sequence[Any], one: Any) -> popen_fork.Popen:
        """A worker that does what a process of `multiprocessing` is to do, which may refer to what was given.

        Raises:
            OSError: The nursery is gone, or there is no room for another process.
        """
        vars(one).pop("_Popen", None)
        util._flush_std_streams()  # type: ignore[attr-defined]  # as `multiprocessing` does before it forks
        ours, theirs = pair()
        with ours:
            with theirs:
                self.clone(theirs)
            Parcel(one, given).send(ours)
            ours.settimeout(ANSWER_S)
            answer = _answer(ours)
        if not isinstance(answer, int):
            raise OSError(errno.EPERM if answer[0] != GONE else errno.ECONNRESET, answer[0])
        return _Clone(answer)


class Home:
    """Keeps the nursery of a new process as long as it would be sent the same.

    Attributes:
        nursery: The latest one.
        why_not: Why workers are not born there; None where they are, or where nothing is known yet.
    """

    nursery: Nursery | None = None
    _why_not: str | None = None

    def __init__(self) -> None:
        self._lists = Lists()

    @property
    def why_not(self) -> str | None:
        return self._why_not if self.nursery is None else self.nursery.why_not

    @property
    def pids(self) -> list[int]:
        """Of the nursery and its root, where workers are cloned."""
        if self.nursery is None or self.nursery.why_not is not None:
            return []
        return [each.pid for each in (self.nursery, Root.latest) if each is not None and each.pid is not None]

    def nursery_for(
        self, given: Sequence[Any], apart: Sequence[Any] = (), may_import: Callable[[], bool] = lambda: True
    ) -> Nursery | None:
        """A nursery that has this, which may still be importing; None where there can be none.

        Args:
            given: What processes refer to that are born in it.
            apart: Objects of it whose state does not matter.
            may_import: Whether a new process may import the script.

        Raises:
            Exception: As `multiprocessing` raises where something cannot be pickled.
            OSError: The kernel refuses what a nursery needs.
        """
        if self.nursery is not None and self.nursery.why_not not in (None, GONE):
            return self.nursery  # it would not be another one now
        torch: Any = sys.modules["torch"]
        if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
            self._why_not = BY_NAME
            return None
        parcel = Parcel((Inherited(), given, seeds()), lists=self._lists, apart=apart)
        root, kept = Root.here(may_import), self.nursery
        self._why_not = NO_GUARD if root is None else None
        if root is None:
            return None
        key = None if parcel.key is None else (parcel.key, root.begun_with)
        if kept is None or key is None or kept.key != key or kept.has_ended:
            self.close()
            self.nursery = Nursery.spawned(root, parcel, key)
        return self.nursery

    def close(self) -> None:
        if self.nursery is not None:
            self.nursery.close()
            self.nursery = None


class Root(_Cloner):
    """A new process that has imported what the script imports, as a spawned one does; it clones nurseries.

    Attributes:
        begun_with: The process that has begun it, and what `multiprocessing` prepares a new one with, such as sys.path.
        imports: Modules that its latest nursery had to import.
        latest: The one that was begun last.
    """

    imports: Sequence[str] = ()
    latest: Root | None = None

    @classmethod
    def here(cls, may_begin: Callable[[], bool]) -> Root | None:
        """The one of this process, begun anew where a new process would begin with something else by now, if it may.

        Raises:
            RuntimeError: This process is importing the script itself (as `multiprocessing` says it).
        """
        with _undecided_start_method():
            begins_with = os.getpid(), spawn.get_executable(), spawn.get_preparation_data(ROOT)
            if cls.latest is None or cls.latest.begun_with != begins_with or cls.latest.has_ended:
                cls.latest = cls(begins_with) if may_begin() else None
            return cls.latest

    @classmethod
    def end(cls) -> None:
        """End the one of this process, if there is any."""
        if cls.latest is not None:
            cls.latest.close()
            cls.latest = None

    def __init__(self, begins_with: Any) -> None:
        super().__init__()
        self.begun_with = begins_with
        with self._theirs:
            popen = popen_spawn_posix.Popen(Begin(self._theirs))  # type: ignore[arg-type]
        self._pids.append(popen.pid)
        self._ours.send(pickle.dumps(popen._fds))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _undecided_start_method() -> Iterator[None]:
    """In this block a default start method is not fixed: the script may still set another one."""
    was = get_start_method(allow_none=True)
    try:
        yield
    finally:
        if was is None:
            set_start_method(None, force=True)


def require_clones() -> None:
    """Raises OSError where the kernel has no call that a nursery needs."""
    if CLONE is None:
        raise OSError(errno.ENOSYS, "the number of clone(2) is not known for this machine")
    os.close(pidfd(os.getpid()))  # by which it is told when a worker ends


_loop_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def pair() -> tuple[socket.socket, socket.socket]:
    """This process's end, which no fork keeps, and the other one; they keep the bounds of messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setblocking(True)  # whatever `socket.setdefaulttimeout()` says
    _loop_ends.add(ours)
    return ours, theirs


def _leave_ends() -> None:
    for end in list(_loop_ends):  # if a fork held them, the other ends would not end with this process
        end.close()


os.register_at_fork(after_in_child=_leave_ends)


class _Clone(popen_fork.Popen):
    """A child of this process, whoever has cloned it."""

    def __init__(self, pid: int) -> None:
        self.returncode, self.pid, self.sentinel = None, pid, pidfd(pid)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel,))  # type: ignore[attr-defined]


def _end(ours: socket.socket, pids: list[int], owner: int) -> None:
    """End a root or nursery, which has nothing to lose; who was born in it goes on."""
    ours.close()
    if os.getpid() != owner:
        return
    for pid in pids:
        with suppress(OSError):  # somebody has waited for all children
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _can_read(end: socket.socket, seconds: float | None) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def _answer(end: socket.socket) -> Any:
    """The process ID of a clone; or why there is none, whether something could not be unpickled, and what was imported."""
    try:
        data = end.recv(1 << 16)
    except ConnectionError:
        data = b""
    return pickle.loads(data) if data else (GONE, False, ())  # noqa: S301 - our own process has sent it
