"""A shadow: a helper process with two workers, which fetch some of the loop's own batches as torch's workers would.

    loop ── fork ── (gone at once) ── supervisor ── worker 0        item  ──>  digest, or what stood in the way
                                          └──────── worker 1

The loop sends items and goes on; it never waits. Workers see what forked workers would see, but may change nothing: what
would be written to a file is refused before it is, descriptors and shared memory of the training process are out of reach,
and no object of the user's is finalised. The supervisor runs none of the user's code. It ends the workers, and itself, when
the loop closes its end, is gone, or time is up.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import fcntl
import gc
import io
import os
import pickle
import random
import resource
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import _utils

from autotune_loader.pipeline.digest import digest

WORKERS = 2
LIFE_S = 240.0
"""A shadow that is still there after so long is of a loop that pauses; it ends, and another one may begin."""
NICE = 5
"""What the loop does comes first."""
PR_SET_PDEATHSIG = 1
MOST_MESSAGE = 2000
"""Characters of an exception's text."""
WRITES = {
    "os.remove": "removes", "os.rename": "renames", "os.rmdir": "removes", "os.mkdir": "makes", "os.truncate": "writes",
    "os.chmod": "changes", "os.chown": "changes", "os.link": "makes", "os.symlink": "makes", "os.utime": "changes",
    "os.setxattr": "changes", "os.removexattr": "changes", "tempfile.mkstemp": "writes", "tempfile.mkdtemp": "makes",
    "shutil.copyfile": "writes", "shutil.move": "moves", "shutil.rmtree": "removes", "shutil.copytree": "writes",
    "shutil.make_archive": "writes", "shutil.unpack_archive": "writes", "shutil.chown": "changes",
}  # fmt: skip
"""Audit events that change files, and the verb; the first argument is the file."""
STARTS = (
    "subprocess.Popen",
    "os.system",
    "os.fork",
    "os.forkpty",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "pty.spawn",
)
KILLS = ("os.kill", "os.killpg", "signal.pthread_kill")
"""... that start or end processes: what these do, nobody knows."""
SAFE_METHODS = (b"GET", b"HEAD", b"OPTIONS")
FRAME = struct.Struct("!I")


class Channel:
    """Messages over a socket; without waiting, in the loop."""

    def __init__(self, end: socket.socket, *, waits: bool) -> None:
        end.setblocking(waits)
        self.end, self.is_closed = end, False
        self._out, self._in = bytearray(), bytearray()

    def send(self, message: Any) -> None:
        """Send, or keep for the next `send` or `received` what does not fit."""
        data = pickle.dumps(message)
        self._out += FRAME.pack(len(data)) + data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                # Never SIGPIPE: scripts may have given it back its default, which ends the process.
                del self._out[: self.end.send(self._out, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except OSError:
            self.is_closed = True

    def received(self) -> list[Any]:
        """Messages that have come."""
        self._flush()
        try:
            while data := self.end.recv(1 << 16):
                self._in += data
            self.is_closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_closed = True
        return list(self._messages())

    def next(self) -> Any:
        """In a worker: wait for a message; raises EOFError where the loop is gone."""
        while not (found := next(self._messages(), None)):
            data = self.end.recv(1 << 16)
            if not data:
                raise EOFError
            self._in += data
        return found

    def _messages(self) -> Iterator[Any]:
        while len(self._in) >= FRAME.size and len(self._in) >= (end := FRAME.size + FRAME.unpack_from(self._in)[0]):
            data = bytes(self._in[FRAME.size : end])
            del self._in[:end]
            yield pickle.loads(data)  # noqa: S301 - from our own process


class Shadow:
    """Two workers beside the loop.

    Args:
        fetch: makes what a worker fetches with, given its number: `fetch(worker)(item)` returns a batch.

    Attributes:
        channels: one to each worker.
        pid: of the supervisor.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, fetch: Callable[[int], Callable[[Any], Any]]) -> None:
        pairs = [socket.socketpair() for _ in range(WORKERS + 1)]
        self._of_process = os.getpid()
        try:
            self.pid = _forked_twice(lambda: _supervise(pairs, fetch))
        except BaseException:
            for pair in pairs:
                pair[0].close()
                pair[1].close()
            raise
        for pair in pairs:
            pair[1].close()
        self._life = pairs[-1][0]
        self.channels = [Channel(pair[0], waits=False) for pair in pairs[:-1]]

    def close(self) -> None:
        """End it; nothing is waited for."""
        is_own = self._of_process == os.getpid()  # a child that the user forked has but copies
        for end in (*(channel.end for channel in self.channels), self._life):
            with contextlib.suppress(OSError):
                if is_own:
                    end.shutdown(socket.SHUT_RDWR)  # closing is not enough, where such a child has a copy
            end.close()


def _forked_twice(child: Callable[[], Any]) -> int:
    """Run a function in a process that is nobody's child, so that who waits for children of their own finds none of ours.

    Returns:
        Its number.
    """
    read_end, write_end = os.pipe()
    with _undisturbed(), warnings.catch_warnings():
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
    """Hold signals back, so that no handler of the user's runs in a child, nor hears of the end of our own one."""
    handler = signal.getsignal(signal.SIGCHLD)
    is_set_aside = callable(handler) and threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if is_set_aside:  # blocking is not enough: another thread would take the signal
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        if is_set_aside:
            signal.signal(signal.SIGCHLD, handler)
            if _has_ended_child():  # one of the user's, which ended meanwhile
                os.kill(os.getpid(), signal.SIGCHLD)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has_ended_child() -> bool:
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _supervise(pairs: list[tuple[socket.socket, socket.socket]], fetch: Callable[[int], Any]) -> NoReturn:
    """Start the workers; see them end, or end them."""
    _become_helper()
    ends = [pair[1] for pair in pairs]
    for pair in pairs:
        pair[0].close()
    life = ends[-1]
    workers: dict[int, int] = {}
    for number in range(WORKERS):
        pid = os.fork()
        if not pid:
            try:
                _work(number, Channel(ends[number], waits=True), fetch)
            finally:
                os._exit(1)
        workers[number] = pid
    poll, until = select.poll(), time.monotonic() + LIFE_S
    poll.register(life, select.POLLIN)
    while workers and not poll.poll(100) and time.monotonic() < until:
        for number, pid in list(workers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del workers[number]
                _tell(ends[number], {"ended": os.waitstatus_to_exitcode(status)})
    for pid in workers.values():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _tell(end: socket.socket, message: Any) -> None:
    with contextlib.suppress(OSError):
        end.setblocking(False)
        Channel(end, waits=False).send(message)
        end.shutdown(socket.SHUT_RDWR)


def _become_helper() -> None:
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


def _work(number: int, channel: Channel, fetch: Callable[[int], Any]) -> NoReturn:
    """A worker: fetch and answer, until the loop is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _cut_off(channel.end.fileno())
    unflushed = sys.stdout, sys.stderr  # noqa: F841 - kept, as they may hold what the training process will write
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    _protect_shared_memory(libc)
    sys.addaudithook(_Guard(channel))
    with contextlib.suppress(EOFError):
        make = None
        while True:
            item = channel.next()
            try:
                make = make or fetch(number)
                channel.send({"item": item[:2], "digest": digest(sent(make(item)))})
            except NotSentError as error:
                channel.send({"item": item[:2], "unsent": str(error)})
            except WorkerReadError:
                channel.send({"item": item[:2], "reads": True})
            except BaseException as error:
                channel.send({"item": item[:2], "raised": _words(error)})
    os._exit(0)


def _words(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(type(error), error)).strip()[-MOST_MESSAGE:]


def _cut_off(keep: int) -> None:
    """Regular files get positions of their own and cannot be written; pipes, sockets and terminals lead nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number in (keep, nowhere):
            continue
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if stat.S_ISREG(mode) and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
                _reopen(number, nowhere)
            elif not stat.S_ISDIR(mode) and not (stat.S_ISCHR(mode) and not os.isatty(number)):
                os.dup2(nowhere, number, inheritable=False)


def _reopen(number: int, nowhere: int) -> None:
    try:
        position = os.lseek(number, 0, os.SEEK_CUR)
        own = os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        os.dup2(nowhere, number, inheritable=False)
        return
    os.lseek(own, position, os.SEEK_SET)
    os.dup2(own, number, inheritable=False)
    os.close(own)


def _protect_shared_memory(libc: Any) -> None:
    """Whoever writes to memory that is shared with the training process ends, before anything is written."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_ = line.split(maxsplit=2)
        if permissions.startswith("rw") and permissions.endswith("s"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 1)


class _Guard:
    """An audit hook that ends the worker, with a report, before it changes what is outside it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        did = _deed(event, arguments)
        if did is not None:
            self._channel.send({"did": did})
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


class NotSentError(Exception):
    """A batch does not come through a pickle as it was."""


class _Pickler(ForkingPickler):
    """As that of workers, but that tensors are passed by reference: no shared memory is made."""

    def __init__(self, buffer: io.BytesIO, passed: list[Any]) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._passed = passed

    def persistent_id(self, value: Any) -> int | None:
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            if value.requires_grad and not value.is_leaf:
                raise pickle.PicklingError("a tensor with a gradient's history cannot be sent from a worker")
            value = value.detach().requires_grad_(value.requires_grad)  # attributes of its own are lost
        elif not isinstance(value, (torch.UntypedStorage, torch.TypedStorage)):
            return None
        self._passed.append(value)
        return len(self._passed) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, passed: list[Any]) -> None:
        super().__init__(buffer)
        self._passed = passed

    def persistent_load(self, number: Any) -> Any:
        return self._passed[number]


def sent(value: Any) -> Any:
    """A value as it comes out of a queue between processes.

    Raises:
        NotSentError: it does not.
    """
    buffer, passed = io.BytesIO(), list[Any]()
    try:
        _Pickler(buffer, passed).dump(value)
        buffer.seek(0)
        return _Unpickler(buffer, passed).load()
    except Exception as error:
        raise NotSentError(_words(error)) from None


def become_torch_worker(dataset: Any, number: int, base_seed: int) -> None:
    """Make this process look like one of torch's workers, but that `default_collate` uses memory of its own."""
    setattr(torch.UntypedStorage, "_new_shared", classmethod(_new_private))  # noqa: B010
    torch.set_num_threads(1)
    seed = base_seed + number
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    _utils.worker._worker_info = _Info(id=number, num_workers=WORKERS, seed=seed, dataset=dataset)


def _new_private(kind: Any, size: int, *, device: Any = "cpu") -> Any:
    return kind(size, device=device)


class WorkerReadError(Exception):
    """The user's code asks which worker it runs in."""


class _Info(_utils.worker.WorkerInfo):
    def __getattribute__(self, name: str) -> Any:
        if name in ("id", "num_workers"):
            raise WorkerReadError
        return super().__getattribute__(name)
