"""A process beside the training that can change nothing of it: no file, no position, no shared memory, no other process.

forked_twice   nobody's child, so that who waits for children of their own finds none of ours
become_helper  no signal handlers, no finalisers by the garbage collector, no file can be written
let_go         nothing is held that another process waits for
cut_off        descriptors lead nowhere or have positions of their own; writing to shared memory ends the process
Guard          an audit hook: what would change a file or start a process ends the process first, with a report
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import resource
import signal
import stat
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from autotune_loader.machine.inherited import FIRST_OWN_FD, descriptors, map_over, reopen, writable_shared_mappings

NICE = 5
"""What the loop does comes first."""
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PROT_READ = 1, 38, 1
"""Of Linux: `prctl(2)`, `mprotect(2)`."""
LANDLOCK_CREATE, LANDLOCK_ALLOW, LANDLOCK_RESTRICT, BENEATH = 444, 445, 446, 1
WRITE_FILE, CHANGE_FILES = 1 << 1, 0x1FF2
"""Of `landlock(7)`: calls; what a process may do to files, beside that making and removing whatever a folder may hold."""
WRITES = {
    "os.remove": "removes", "os.rename": "renames", "os.rmdir": "removes", "os.mkdir": "makes", "os.truncate": "writes",
    "os.chmod": "changes", "os.chown": "changes", "os.link": "makes", "os.symlink": "makes", "os.utime": "changes",
    "os.setxattr": "changes", "os.removexattr": "changes", "tempfile.mkstemp": "writes", "tempfile.mkdtemp": "makes",
    "shutil.copyfile": "writes", "shutil.move": "moves", "shutil.rmtree": "removes", "shutil.copytree": "writes",
    "shutil.make_archive": "writes", "shutil.unpack_archive": "writes", "shutil.chown": "changes",
}  # fmt: skip
"""Audit events that change files, and the verb; the first argument is the file."""
STARTS = ("subprocess.Popen", "os.system", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")
KILLS = ("os.kill", "os.killpg", "signal.pthread_kill")
"""... that start or end processes: what these do, nobody knows."""
SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")
SEMAPHORES = "/dev/shm/sem."  # noqa: S108 - how the names of their mappings begin


_filters = threading.Lock()
"""Two threads that set warnings aside at once would put back each other's filters."""
os.register_at_fork(after_in_child=_filters._at_fork_reinit)  # type: ignore[attr-defined]


def forked_twice(child: Callable[[], Any]) -> int:
    """Run a function in a process that is nobody's child, so that who waits for children of their own finds none of ours.

    Returns:
        Its number.
    """
    read_end, write_end = os.pipe()
    with _undisturbed(), _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads; torch's workers are forked, too
        first = os.fork()
        if not first:
            _begin_child(write_end, child)
        with contextlib.suppress(ChildProcessError):  # children are not waited for where SIGCHLD is ignored
            os.waitpid(first, 0)
    os.close(write_end)
    number = os.read(read_end, 4)
    os.close(read_end)
    if len(number) < 4:
        raise OSError(errno.EAGAIN, "no helper process could be forked")
    return int.from_bytes(number, "little")


def _begin_child(write_end: int, child: Callable[[], Any]) -> NoReturn:
    try:
        second = os.fork()
        if second:
            os.write(write_end, second.to_bytes(4, "little"))
        else:
            os.close(write_end)
            child()
    finally:
        os._exit(0)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Hold signals back, so that no handler of the user's runs in a child."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def become_helper() -> None:
    """Out of reach of what belongs to the training process."""
    gc.disable()  # no object of the user's may be finalised
    gc.freeze()
    sys.unraisablehook = lambda _: None
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)  # an event loop of the training process would hear of our signals
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the loop
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can be written, by whatever library
    with contextlib.suppress(OSError):
        os.nice(NICE)


def cut_off(keep: int) -> None:
    """Regular files get positions of their own and cannot be written; pipes, sockets and terminals lead nowhere.

    Whoever writes to memory that is shared with other processes is ended by a signal; and so is the process with its parent.
    """
    die_with_starter()
    libc, nowhere = ctypes.CDLL(None), os.open(os.devnull, os.O_RDWR)
    _protect_shared_memory(libc)
    _protect_files(libc, nowhere)
    for number in descriptors():
        if number in (keep, nowhere):
            continue
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if stat.S_ISREG(mode) and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                try:
                    reopen(number, os.O_RDONLY, inheritable=False)
                except OSError:
                    os.dup2(nowhere, number, inheritable=False)
            elif not stat.S_ISDIR(mode) and not (stat.S_ISCHR(mode) and not os.isatty(number)):
                os.dup2(nowhere, number, inheritable=False)
    _unflushed.extend((sys.stdout, sys.stderr))
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123


def let_go(keep: Collection[int]) -> None:
    """Close what was inherited: who waits for the end of a pipe, or for a file's lock, waits for all that hold it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in descriptors():
        if number in keep or number == nowhere:
            continue
        with contextlib.suppress(OSError):
            os.dup2(nowhere, number) if number < FIRST_OWN_FD else os.close(number)


def die_with_starter() -> None:
    """Have the kernel kill this process as soon as the thread that forked it has ended; Linux only.

    Python's handlers would not run in a process that hangs.
    """
    starter = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:  # it ended before the call
        os._exit(1)


Channels = Mapping[int, tuple[int, int]]
"""Device and inode by descriptor: a number that was closed soon belongs to another one."""


def channels() -> Channels:
    """Pipes and sockets of this process, but for its standard ones and that by which `multiprocessing` keeps account."""
    own = getattr(resource_tracker._resource_tracker, "_fd", None)
    numbers = [number for number in descriptors(FIRST_OWN_FD) if number != own]
    return {number: found for number in numbers if (found := _channel(number)) is not None}


def cut(inherited: Channels) -> None:
    """Let pipes and sockets lead nowhere: who waits for the end of one waits for all that hold it."""
    if inherited:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number, then in inherited.items():
            if _channel(number) == then:
                os.dup2(nowhere, number, inheritable=False)
        os.close(nowhere)


def _channel(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:  # closed meanwhile
        return None
    is_channel = stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode)
    return (status.st_dev, status.st_ino) if is_channel else None


_unflushed: list[Any] = []
"""Kept, as they may hold what the training process will write."""


def _protect_shared_memory(libc: Any) -> None:
    for each in writable_shared_mappings(Path("/proc/self/maps").read_text()):
        if each.path.startswith(SEMAPHORES):  # whoever takes a lock changes nothing, and tqdm takes one for each bar
            state = ctypes.string_at(each.begin, each.size)
            map_over(each, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
            ctypes.memmove(each.begin, state, each.size)
        elif each.protection & PROT_READ:
            libc.mprotect(ctypes.c_void_p(each.begin), ctypes.c_size_t(each.size), PROT_READ)


def _protect_files(libc: Any, but: int) -> None:
    """Let no library, in whatever language, make, empty or remove a file; Linux before 5.13 cannot do that."""
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(CHANGE_FILES)), ctypes.c_size_t(8), 0)
    if rules >= 0:
        libc.syscall(LANDLOCK_ALLOW, rules, BENEATH, struct.pack("=Qi", WRITE_FILE, but), 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.syscall(LANDLOCK_RESTRICT, rules, 0)
        os.close(rules)


class Guard:
    """An audit hook that ends this process before it changes what is outside of it.

    Args:
        report: told of it first, in words ("removes `/data/1.npy`").
    """

    def __init__(self, report: Callable[[str], object]) -> None:
        self._report = report

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        did = _deed(event, arguments)
        if did is not None:
            self._report(did)
            os._exit(0)


def _deed(event: str, arguments: tuple[Any, ...]) -> str | None:
    """What an audit event would change, in words; None where it changes nothing."""
    if event == "open":
        path, _, flags = arguments
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & (os.O_CREAT | os.O_TRUNC)
        return f"writes {_quoted(path)}" if writes and path != os.devnull else None
    if event in WRITES:
        return f"{WRITES[event]} {_quoted(arguments[0] if arguments else None)}"
    if event.startswith(STARTS):
        return f"starts a process ({event})"
    if event in KILLS:
        return f"signals a process ({event})"
    if event == "http.client.send" and isinstance(arguments[1], bytes) and not arguments[1].startswith(SAFE_METHODS):
        return "sends data to a server"
    return None


def _quoted(path: Any) -> str:
    return f"`{os.fsdecode(path)}`" if isinstance(path, (str, bytes)) else "a file"
