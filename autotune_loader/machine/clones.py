"""What runs in root and nurseries: a loop that clones its process, and whether a clone is as good as a new process.

    root      imports ── fit? ── serve ── clone: a nursery
    nursery                      receive the parcel ── fit? ── serve ── clone: a worker

A clone of a new process is as good as a new process if that has no threads, has not touched CUDA, and has nothing open that
clones would share.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pickle
import resource
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
from types import ModuleType
from typing import Any

from autotune_loader.lines import is_library
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
THIS_PROCESS = os.PRIO_PROCESS, 0
LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
"""Kinds of setrlimit(2)."""
USES_CUDA = (
    "imports or the dataset use CUDA, or ask for its devices; with PYTORCH_NVML_BASED_CUDA_CHECK=1 in the environment asking "
    "is allowed"
)
STARTS_THREADS, OPENS = "imports or the dataset start threads ({names})", "imports or the dataset open {name}"


class Inherited:
    """What a process has from the one that starts it: who unpickles this has it from the one that has pickled it."""

    def __reduce__(self) -> Any:
        mask = Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0]  # proc_pid_status(5)
        cores, niceness = sorted(os.sched_getaffinity(0)), os.getpriority(*THIS_PROCESS)
        limits = [(kind, resource.getrlimit(kind)) for kind in LIMITS]
        return _inherit, (dict(os.environ), int(mask, 8), cores, niceness, limits)


def _inherit(environment: dict[str, str], mask: int, cores: list[int], niceness: int, limits: list[Any]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.umask(mask)
    with suppress(OSError):
        os.sched_setaffinity(0, cores)
    with suppress(OSError):  # nobody gets back what he has given up
        os.setpriority(*THIS_PROCESS, niceness)
    for kind, limit in limits:
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, limit)


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
        while (request := socket.recv_fds(self._socket, 1 << 16, 1))[0]:
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
    """Clone this process for each socket that is sent, and have the clone live by it, until the training hangs up.

    With a socket come names of modules, which are imported first.
    """
    util._flush_std_streams()  # type: ignore[attr-defined]  # what is in buffers each clone would write
    unread = list[socket.socket]()
    while True:
        try:
            data, files, _, _ = socket.recv_fds(theirs, 1 << 16, 1)
        except ConnectionError:
            return
        if not data:
            return
        there = socket.socket(fileno=files[0])
        if names := pickle.loads(data):  # noqa: S301 - the training's own
            _import(names)
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


def _import(names: Sequence[str]) -> None:
    """Import what a clone of this process has imported, which was found fit to be cloned after that."""
    for name in names:
        with suppress(Exception):  # it may not be imported by its name
            importlib.import_module(name)
    try_fork()


def _refuse(there: socket.socket, why: str | None) -> socket.socket:
    """A socket that is to be kept: who closes it before the parcel is read takes the answer back, too (unix(7))."""
    with suppress(OSError):
        there.send(pickle.dumps((why, False, [])))
    return there


def _nurse(there: socket.socket) -> int:
    """The life of a spawned nursery: it opens its parcel, tells whether it can be cloned, and serves."""
    files, size = receive(there)
    imported, used = set(sys.modules), set[str]()
    given, known = list[Any](), dict[tuple[str, ...], Any]()
    why: str | None = None
    was_enabled, has_failed, current = gc.isenabled(), False, process.current_process()
    gc.disable()  # nothing of a dataset is garbage, however many objects it has
    current._inheriting = True  # type: ignore[attr-defined]  # no process is started while it unpickles
    try:
        _, given, known = unpack(files, size, modules=used)
        why = _why_no_clone({*files, there.fileno()})
    except BaseException as error:
        why, has_failed = f"{type(error).__name__}: {error}", True
    finally:
        del current._inheriting  # type: ignore[attr-defined]
    gc.freeze()  # a collection in a worker touches, and so copies, nothing that all share
    if was_enabled:
        gc.enable()
    with suppress(ConnectionError):
        there.send(pickle.dumps((why, has_failed, sorted(used - imported))))
    if why is None:
        # Only what the training has found is looked at: a look at everything would write to the memory that clones share.
        unseeded = [each for place, seed in known.items() if is_unseeded(each := _at(place), [seed])]

        def live(end: socket.socket) -> int:
            own_files(writable=True)  # each has positions of its own
            for each in unseeded:
                seed_anew(each)
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


def seeds() -> dict[tuple[str, ...], Any]:
    """What numpy's generators of modules, and of classes and dicts of the script's own modules, were seeded with here."""
    if (numpy := sys.modules.get("numpy")) is None:
        return {}
    kinds, found = {numpy.random.Generator, numpy.random.RandomState}, dict[tuple[str, ...], Any]()

    def look(place: tuple[str, ...], content: Any, *, is_deep: bool) -> None:
        if not is_deep and kinds.isdisjoint(map(type, list(content.values()))):  # a third of the time
            return
        for name, value in list(content.items()):
            here = (*place, name)
            if type(value) in kinds:
                found[here] = entropy_of(value)
            elif is_deep and not isinstance(value, ModuleType):
                look(here, _content(value), is_deep=False)

    for name, module in list(sys.modules.items()):
        content = getattr(module, "__dict__", {})
        look((name,), content, is_deep=not is_library(content.get("__file__") or ""))
    return found


def _content(value: Any) -> Any:
    return value if type(value) is dict else vars(value) if isinstance(value, (type, ModuleType)) else {}


def _at(place: tuple[str, ...]) -> Any:
    return functools.reduce(lambda value, name: _content(value).get(name), place, sys.modules)


def is_unseeded(generator: Any, elsewhere: Collection[Any]) -> bool:
    """Whether nobody has seeded a numpy generator: it has 128 bits of the system's entropy, others in each process.

    Args:
        generator: Any object.
        elsewhere: Entropy of generators that another process has found.
    """
    own = entropy_of(generator)
    return type(own) is int and own >> 64 > 0 and own not in elsewhere


def seed_anew(generator: Any) -> None:
    """Seed a numpy generator by the system's entropy."""
    bits = _bits_of(generator)
    bits.state = type(bits)().state


def entropy_of(generator: Any) -> Any:
    """What a numpy generator was seeded with; None of anything else."""
    return getattr(getattr(_bits_of(generator), "_seed_seq", None), "entropy", None)


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", None) or getattr(generator, "_bit_generator", None)
