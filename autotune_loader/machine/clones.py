"""What runs in root and nurseries: a loop that clones its process, and whether a clone is as good as a new process.

    root      imports ── fit? ── serve ── clone: a nursery
    nursery                      receive the parcel ── fit? ── serve ── clone: a worker

A clone of a new process is as good as a new process if that has no threads, has not touched CUDA, and has nothing open that
clones would share.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing import process, resource_tracker, util
from pathlib import Path
from typing import Any

from autotune_loader.machine.elsewhere import FIRST_OWN_FD, descriptors, own_files
from autotune_loader.machine.kernel import clone, pidfd
from autotune_loader.machine.parcel import receive, unpack

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


class Environment:
    """The environment of this process, which the one has where it is unpickled."""

    def __reduce__(self) -> Any:
        return _set_environment, (dict(os.environ),)


def _set_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


class Begin:
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
            serve(self._socket, leave_signals(), _nurse)
        unread = list[socket.socket]()
        while (request := socket.recv_fds(self._socket, 1, 1))[0]:
            unread.append(_refuse(socket.socket(fileno=request[1][0]), why))
        return 0


def leave_signals() -> dict[int, Any]:
    """Have none of the script's handlers run in this process, which were for the training; returns them."""
    handlers: dict[int, Any] = {each: signal.getsignal(each) for each in signal.valid_signals()}
    handlers = {each: handler for each, handler in handlers.items() if callable(handler)}
    for each in handlers:
        signal.signal(each, signal.SIG_IGN if each in FOR_THE_TRAINING else signal.SIG_DFL)
    return handlers


def serve(theirs: socket.socket, handlers: dict[int, Any], live: Callable[[socket.socket], int]) -> None:
    """Clone this process for each socket that is sent, and have the clone live by it, until the training hangs up."""
    util._flush_std_streams()  # type: ignore[attr-defined]  # what is in buffers each clone would write
    unread = list[socket.socket]()
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
        if pid > 0:
            with there, suppress(OSError):
                there.send(pickle.dumps(pid))
        else:
            unread.append(_refuse(there, "no worker can be cloned"))


def _refuse(there: socket.socket, why: str | None) -> socket.socket:
    """A socket that is to be kept: who closes it before the parcel is read takes the answer back, too (unix(7))."""
    with suppress(OSError):
        there.send(pickle.dumps((why, False)))
    return there


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
        why, has_failed = f"{type(error).__name__}: {error}", True
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    gc.freeze()  # a collection in a worker touches, and so copies, nothing that all share
    if was_enabled:
        gc.enable()
    with suppress(ConnectionError):
        there.send(pickle.dumps((why, has_failed)))
    if why is None:
        unseeded = [bits for place, entropy in known.items() if (bits := _unseeded(*place, entropy)) is not None]

        def live(end: socket.socket) -> int:
            own_files(writable=True)  # each has positions of its own
            for bits in unseeded:
                bits.state = type(bits)().state
            return be_worker(end, given)

        serve(there, leave_signals(), live)
    return 0


def be_worker(there: socket.socket, given: Sequence[Any]) -> int:
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
    if try_fork():
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


def try_fork() -> bool:
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


def seeds() -> dict[tuple[str, str], Any]:
    """What numpy's generators at the top level of modules were seeded with here, by module and name."""
    if (numpy := sys.modules.get("numpy")) is None:
        return {}
    kinds, found = (numpy.random.Generator, numpy.random.RandomState), dict[tuple[str, str], Any]()
    for module, content in list(sys.modules.items()):
        for name, value in list(getattr(content, "__dict__", {}).items()):
            if type(value) in kinds:
                found[module, name] = _entropy(_bits_of(value))
    return found


def _unseeded(module: str, name: str, in_training: Any) -> Any:
    """The bits of a generator that nobody has seeded: it has 128 bits of the system's entropy, others in each process.

    Only what the training has found is looked at: a look at everything would write to the memory that clones share.
    """
    value = getattr(sys.modules.get(module), name, None)
    bits = None if value is None else _bits_of(value)
    own = _entropy(bits)
    return bits if type(own) is int and own >> 64 > 0 and own != in_training else None


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or getattr(generator, "_bit_generator", None)


def _entropy(bits: Any) -> Any:
    return getattr(getattr(bits, "_seed_seq", None), "entropy", None)
