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
import stat
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from multiprocessing import (
    get_start_method,
    popen_fork,
    popen_spawn_posix,
    process,
    resource_tracker,
    set_start_method,
    spawn,
    util,
)
from pathlib import Path
from typing import Any

from autotune_loader.machine.elsewhere import FIRST_OWN_FD, descriptors, own_files
from autotune_loader.machine.kernel import CLONE, clone, pidfd
from autotune_loader.machine.parcel import Lists, Parcel, receive, unpack

ROOT = "autotune-loader root"
"""Name of its process."""
HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/zero")
"""Devices that clones may share; those of NVIDIA's driver are others while no context of CUDA is there."""
IDLE_THREADS = {"jemalloc_bg_thd", "polars-ooc-clea"}
"""Threads that imports of pyarrow and polars start: they wait for work of their own process, and hold nothing meanwhile."""
FOR_THE_TRAINING = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Signals such as Ctrl-C and those of schedulers, which a process that nobody asked for ignores."""
USES_CUDA = (
    "imports or the dataset use CUDA, or ask for its devices; with PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment asking "
    "is allowed"
)
STARTS_THREADS, OPENS = "imports or the dataset start threads ({names})", "imports or the dataset open {name}"
NO_GUARD = "the script has no `if __name__ == '__main__':` around what trains"
BY_NAME = 'memory is shared by name (sharing strategy "file_system")'
GONE = "the process that clones workers was ended"
ANSWER_S = 10.0
"""A nursery that takes longer to clone a worker was stopped, or waits for a lock."""


# --- in the training ---


class Nursery:
    """A process that clones workers, for whoever gives them the same.

    Attributes:
        key: Of the parcel that it was sent; None where that cannot be compared, as in a fork.
        why_not: Why no worker can be cloned here; None where one can, or where that is not known yet.
        has_failed: Whether what workers are given cannot be unpickled.
    """

    key: Any = None
    why_not: str | None = None
    is_known = has_failed = False
    _root: Root | None = None
    """Until it has cloned this nursery."""

    def __init__(self) -> None:
        self._ours, self._theirs = pair()
        self._pids = list[int]()
        self.close = weakref.finalize(self, _end, self._ours, self._pids, os.getpid())

    @classmethod
    def forked(cls, given: Sequence[Any], begin: Callable[[], dict[int, Any]]) -> Nursery:
        """A fork of this process; `begin` is called in it and returns the handlers of signals that workers have.

        Raises:
            OSError: The kernel refuses what a nursery needs.
        """
        require_clones()
        one = cls()
        try:
            pid = os.fork()  # no child that the script counts or waits for
        except BaseException:
            one.close()
            raise
        if not pid:
            try:
                handlers = begin()
                _try_fork()
                gc.freeze()
                _serve(one._theirs, handlers, lambda there: _work(there, given))
            finally:
                os._exit(0)
        one._theirs.close()
        one._pids.append(pid)
        one.is_known = True
        return one

    @classmethod
    def spawned(cls, root: Root, parcel: Parcel) -> Nursery:
        """A clone of the root, to which a parcel is sent: `_Environment()`, what is given, and `seeds()`.

        Raises:
            OSError: The kernel refuses what a nursery needs.
        """
        require_clones()
        one = cls()
        one.key, one._root = parcel.key, root
        with suppress(OSError):  # it is gone, which is seen when the nursery is waited for
            socket.send_fds(root.socket, [b"n"], [one._theirs.fileno()])
        one._theirs.close()
        # While the root imports, and the loop goes on where nobody waits for workers.
        threading.Thread(target=one._send, args=(parcel,), name="autotune-loader-parcel", daemon=True).start()
        return one

    def _send(self, parcel: Parcel) -> None:
        try:
            parcel.send(self._ours)
        except Exception:  # such as no memory: nobody is to wait for it
            with suppress(OSError):
                self._ours.shutdown(socket.SHUT_RDWR)

    @property
    def has_ended(self) -> bool:
        """Whether it was killed, as far as is known."""
        return self.is_known and _can_read(self._ours, 0)  # it has nothing more to say

    @property
    def pid(self) -> int | None:
        """Of its process; None while that is not known."""
        return self._pids[0] if self._pids else None

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is known by then if workers can be cloned here."""
        while not self.is_known:
            if not _can_read(self._ours, seconds):
                return False
            data = _received(self._ours)
            if data and type(answer := pickle.loads(data)) is int:  # noqa: S301 - our own process has sent it
                self._pids.append(answer)
                continue
            self.is_known, self._root = True, None
            self.why_not, self.has_failed = answer if data else (GONE, False)
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
        """A worker that does what this process of `multiprocessing` is to do.

        Args:
            given: Objects that the nursery has, to which the process may refer.
            one: The process.

        Raises:
            OSError: The nursery is gone, or there is no room for another process.
        """
        vars(one).pop("_Popen", None)
        util._flush_std_streams()  # type: ignore[attr-defined]  # as `multiprocessing` does before it forks
        ours, theirs = pair()
        with ours:
            with theirs:
                socket.send_fds(self._ours, [b"w"], [theirs.fileno()])
            Parcel(one, given).send(ours)
            ours.settimeout(ANSWER_S)
            if not (data := _received(ours)):
                raise ConnectionResetError(GONE)
        if type(answer := pickle.loads(data)) is not int:  # noqa: S301
            raise OSError(errno.EPERM, answer[0])
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
        parcel = Parcel((_Environment(), given, seeds()), lists=self._lists, apart=apart)
        root, kept = Root.here(may_import), self.nursery
        self._why_not = NO_GUARD if root is None else None
        if root is None:
            return None
        if kept is None or kept.has_ended or parcel.key is None or parcel.key != kept.key:
            self.close()
            self.nursery = Nursery.spawned(root, parcel)
        return self.nursery

    def close(self) -> None:
        if self.nursery is not None:
            self.nursery.close()
            self.nursery = None


class Root:
    """A new process that has imported what the script imports, as a spawned one does; it clones nurseries."""

    _latest: Root | None = None

    @classmethod
    def here(cls, may_begin: Callable[[], bool]) -> Root | None:
        """The one of this process, begun anew where a new process would begin with something else by now, if it may.

        Raises:
            RuntimeError: This process is importing the script itself (as `multiprocessing` says it).
        """
        with _undecided_start_method():
            begun_with = os.getpid(), spawn.get_executable(), spawn.get_preparation_data(ROOT)
            if cls._latest is None or cls._latest.begun_with != begun_with or cls._latest.has_ended:
                cls._latest = cls(begun_with) if may_begin() else None
            return cls._latest

    def __init__(self, begun_with: Any) -> None:
        self.begun_with, (self.socket, theirs) = begun_with, pair()
        with theirs:
            popen = popen_spawn_posix.Popen(_Begin(theirs))  # type: ignore[arg-type]
        self.pid = popen.pid
        self.socket.send(pickle.dumps(popen._fds))  # type: ignore[attr-defined]
        self.close = weakref.finalize(self, _end, self.socket, [popen.pid], os.getpid())

    @property
    def has_ended(self) -> bool:
        return _can_read(self.socket, 0)  # it sends nothing here


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


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except ConnectionError:
        return b""


# --- in root and nurseries ---


class _Environment:
    """The environment of this process, which the one has where it is unpickled."""

    def __reduce__(self) -> Any:
        return _set_environment, (dict(os.environ),)


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


class _Begin:
    """What `multiprocessing` runs in the root, in place of a process of its own, which would count among the script's."""

    _name = ROOT

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def _bootstrap(self, parent_sentinel: int) -> int:
        passed = {parent_sentinel, *pickle.loads(self._socket.recv(1 << 16))}  # noqa: S301 - the training's own
        for fd in passed - {self._socket.fileno(), resource_tracker._resource_tracker._fd}:  # type: ignore[attr-defined]
            with suppress(OSError):  # it was closed by `multiprocessing`
                os.close(fd)
        if (why := _why_no_clone({self._socket.fileno()})) is None:
            _serve(self._socket, leave_signals(), _nurse)
        while (request := socket.recv_fds(self._socket, 1, 1))[0]:
            with socket.socket(fileno=request[1][0]) as there, suppress(OSError):
                there.send(pickle.dumps((why, False)))
        return 0


def leave_signals() -> dict[int, Any]:
    """Have none of the script's handlers run in this process, which were for the training; returns them."""
    handlers: dict[int, Any] = {each: signal.getsignal(each) for each in signal.valid_signals()}
    handlers = {each: handler for each, handler in handlers.items() if callable(handler)}
    for each in handlers:
        signal.signal(each, signal.SIG_IGN if each in FOR_THE_TRAINING else signal.SIG_DFL)
    return handlers


def _serve(theirs: socket.socket, handlers: dict[int, Any], live: Callable[[socket.socket], int]) -> None:
    """Clone this process for each socket that is sent, and have the clone live by it, until the training hangs up."""
    util._flush_std_streams()  # type: ignore[attr-defined]  # what is in buffers each clone would write
    while True:
        try:
            data, files, _, _ = socket.recv_fds(theirs, 1, 1)
        except ConnectionError:
            return
        if not data:
            return
        there = socket.socket(fileno=files[0])
        if (pid := clone()) == 0:
            code = 1
            try:
                theirs.close()
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                code = live(there)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        with there, suppress(OSError):
            there.send(pickle.dumps(pid if pid > 0 else ("no worker can be cloned", False)))


def _nurse(there: socket.socket) -> int:
    """The life of a spawned nursery: it opens its parcel, tells whether it can be cloned, and serves."""
    files, size = receive(there)
    given, known = list[Any](), dict[tuple[str, str], Any]()
    why: str | None = None
    was_enabled, has_failed, current = gc.isenabled(), False, process.current_process()
    gc.disable()  # nothing of a dataset is garbage, however many objects it has
    current._inheriting = True  # type: ignore[attr-defined]  # no process is started while it unpickles
    try:
        _, given, known = unpack(files, size)
        why = _why_no_clone({*files, there.fileno()})
    except BaseException as error:
        why, has_failed = traceback.format_exception_only(type(error), error)[-1].strip(), True
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    gc.freeze()  # a collection in a worker touches, and so copies, nothing that all share
    if was_enabled:
        gc.enable()
    with suppress(ConnectionError):
        there.send(pickle.dumps((why, has_failed)))
    if why is None:
        unseeded = [bits for place, bits in _generators().items() if _is_unseeded(bits, known.get(place))]

        def live(end: socket.socket) -> int:
            own_files(writable=True)  # each has positions of its own
            for bits in unseeded:
                bits.state = type(bits)().state
            return _work(end, given)

        _serve(there, leave_signals(), live)
    return 0


def _work(there: socket.socket, given: Sequence[Any]) -> int:
    """The life of a worker, as its start method would have begun it."""
    with there:
        one = unpack(*receive(there), given)
    base: Any = process.BaseProcess
    one._after_fork = base._after_fork  # that of a spawned process does nothing from Python 3.12 on
    return int(one._bootstrap(pidfd(os.getppid())))


def _why_no_clone(known: Collection[int]) -> str | None:
    """Why a clone of this process, which holds known descriptors, would not be as good as a new process."""
    python = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    if python:
        return STARTS_THREADS.format(names=", ".join(python[:3]))
    if _try_fork():
        return USES_CUDA
    tasks = [each for each in Path("/proc/self/task").iterdir() if int(each.name) != os.getpid()]
    native = {(each / "comm").read_text().strip() for each in tasks}
    if native - IDLE_THREADS:
        return STARTS_THREADS.format(names=", ".join(sorted(native - IDLE_THREADS)[:3]))
    tracker = resource_tracker._resource_tracker._fd  # type: ignore[attr-defined]
    for fd in descriptors(FIRST_OWN_FD):
        with suppress(OSError):  # it was of this look
            kind, name = stat.S_IFMT(os.fstat(fd).st_mode), os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
            can_share = kind in (stat.S_IFREG, stat.S_IFDIR) or name in HARMLESS or name.startswith("/dev/nvidia")
            if not can_share and fd != tracker and fd not in known:
                return OPENS.format(name={stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}.get(kind, name))
    return None


def _try_fork() -> bool:
    """Whether a fork of this process could not use CUDA.

    Libraries end their threads where somebody forks, of which clone(2) tells nobody: without this fork a first clone would wait
    for threads of OpenBLAS that it does not have.
    """
    torch = sys.modules.get("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads
        pid = os.fork()
    if not pid:
        os._exit(torch is not None and torch.cuda._is_in_bad_fork())
    with suppress(ChildProcessError):  # the script ignores SIGCHLD
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    return False


def _generators() -> dict[tuple[str, str], Any]:
    """Bit generators of numpy at the top level of modules, by module and name."""
    if (numpy := sys.modules.get("numpy")) is None:
        return {}
    kinds, found = (numpy.random.Generator, numpy.random.RandomState), dict[tuple[str, str], Any]()
    for module, content in list(sys.modules.items()):
        if module == "__mp_main__":  # the script, which is `__main__` too
            continue
        for name, value in list(getattr(content, "__dict__", {}).items()):
            if type(value) in kinds:
                found[module, name] = getattr(value, "bit_generator", None) or value._bit_generator
    return found


def _entropy(bits: Any) -> Any:
    return getattr(getattr(bits, "_seed_seq", None), "entropy", None)


def _is_unseeded(bits: Any, in_training: Any) -> bool:
    """Whether nobody has seeded it: it has 128 bits of the system's entropy, which are others in each process."""
    own = _entropy(bits)
    return type(own) is int and own >> 64 > 0 and own != in_training


def seeds() -> dict[tuple[str, str], Any]:
    """What generators at the top level of modules were seeded with here."""
    return {place: _entropy(bits) for place, bits in _generators().items()}
