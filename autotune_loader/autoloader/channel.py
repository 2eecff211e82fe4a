"""What torch takes for its queues: between the loop and each worker one socket, whose end is the end of the worker.

    put ── job ──► worker: get ── seeds ── torch fetches and collates ── put ── packet, segments ──► get

Jobs never block the loop, as a worker may be waiting for the loop to read. All results come from one `Results`, which a
pinning thread may read. Nothing here has a name in a file system.
"""

from __future__ import annotations

import errno
import os
import pickle
import queue
import select
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from autotune_loader.autoloader.pinning import Pinner
from autotune_loader.autoloader.segments import SMALL_BYTES, JobPickler, Mapped, Pool, Segment
from autotune_loader.autoloader.torchs import ExceptionWrapper, pin, share_by
from autotune_loader.machine.kernel import memfd
from autotune_loader.machine.nursery import pair
from autotune_loader.pipeline.loop_log import Fetch

MOST_FILES = 16
"""Descriptors in one packet, as a job may have few of them left (the kernel takes 253, unix(7))."""
TRUNCATED, DONT_WAIT, SPACE = int(socket.MSG_CTRUNC), int(socket.MSG_DONTWAIT), socket.CMSG_SPACE(4 * MOST_FILES)
"""As enums they take 5 us."""


def _send(end: socket.socket, data: Any, files: Sequence[int], flags: int = 0) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
    end.sendmsg([data], rights, flags)  # `socket.send_fds` forgets its flags (Python 3.11)


class NoQueue:
    """What torch calls of a queue when all is over."""

    def cancel_join_thread(self) -> None: ...

    def close(self) -> None: ...


class WorkerEnd(NoQueue):
    """A worker's end of a channel, which torch's worker loop takes for both of its queues."""

    first: Callable[[], object] | None = None  # called before the first job, when torch has told the worker what it is
    seed: Callable[[Any], object] | None = None  # called with the seed of a job, before torch gets the job
    note: str | None = None  # for the loop, with the next batch
    _begun: tuple[float, float] | None = None

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def begin(self) -> None:
        """From now on this process is a worker: it holds no other channel, and collates into segments."""
        close_channels(but=self)
        self.socket.setblocking(True)  # whatever `socket.setdefaulttimeout()` says
        self._pool, self._poll = Pool(), select.poll()
        self._poll.register(self.socket, select.POLLIN)
        share_by(lambda size: self._pool.flat(size).untyped_storage(), SMALL_BYTES)

    def get(self, timeout: float | None = None) -> Any:
        if self.first is not None:
            first, self.first = self.first, None
            first()
        if not self._poll.poll(None if timeout is None else 1000 * timeout):
            raise queue.Empty
        try:
            data, files, _, _ = socket.recv_fds(self.socket, 2 * SMALL_BYTES, 1)
        except ConnectionError:
            data, files = b"", []
        if not data:  # the loop is gone, or wants no more
            raise SystemExit(0)
        if files:
            data = os.pread(files[0], pickle.loads(data), 0)  # noqa: S301 - the loop's own
            os.close(files[0])
        back, job = pickle.loads(data)  # noqa: S301
        for number in back:
            self._pool.back(number)
        if type(job) is not tuple:
            return job
        number, indices, *seed = job  # torch's own jobs have none
        if seed and self.seed is not None:
            self.seed(*seed)
        self._begun = time.monotonic(), time.process_time()
        return number, indices

    def put(self, message: tuple[Any, Any]) -> None:
        (number, data), times = message, None
        if self._begun is not None:
            times, self._begun = (self._begun[0], time.monotonic(), time.process_time() - self._begun[1]), None
        try:
            body = self._pool.pickled(data)
        except Exception:  # it cannot be pickled, or there is no memory
            body = self._pool.pickled(ExceptionWrapper(where="in a DataLoader worker process, as it sent a batch"))
        fresh, dropped = self._pool.news()
        rest, self.note = (number, dropped, times, self.note, body), None
        try:
            for at in range(0, max(1, len(fresh)), MOST_FILES):
                some, is_last = fresh[at : at + MOST_FILES], at + MOST_FILES >= len(fresh)
                data = pickle.dumps(([each[:2] for each in some], rest if is_last else None), pickle.HIGHEST_PROTOCOL)
                _send(self.socket, data, [file for *_, file in some])
        except ConnectionError:
            pass  # the loop wants no more: that comes with the next job
        finally:
            for *_, file in fresh:
                os.close(file)


class WorkerGone:
    """A message: its channel, and so the worker, has come to its end."""


class Come(NamedTuple):
    """A message of a worker's. Torch's pinning thread, which pins what it finds in a tuple, passes it on."""

    number: Any  # of a batch, or what else torch numbers messages by
    data: Any  # a batch, an exception, or `WorkerGone`
    fetch: Fetch | None = None
    note: str | None = None  # what the worker tells
    channel: Any = None
    bytes: int = 0  # of the segments that it was lent


class Channel(NoQueue):
    """The loop's end, which torch takes for the index queue of a worker."""

    def __init__(self, pinner: Pinner | None) -> None:
        self.socket, theirs = pair()
        self.end, self.number, self.mapped = WorkerEnd(theirs), -1, Mapped(pinner)
        self.jobs = deque[int]()  # numbers of those that were sent and not answered, for whoever sends them
        self._waiting, self._buffer = deque[Any](), bytearray(2 * SMALL_BYTES)
        self._lock = threading.RLock()  # a pinning thread receives while the loop puts
        _living.add(self)

    def put(self, job: Any) -> None:
        """Send a job, or keep it until there is room."""
        with self._lock:
            self._waiting.append(job)
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            back, files = self.mapped.back(), list[int]()
            dumps = pickle.dumps if _is_plain(self._waiting[0]) else JobPickler.dumps
            data: Any = dumps((back, self._waiting[0]), pickle.HIGHEST_PROTOCOL)
            if len(data) > SMALL_BYTES:  # many indices
                files.append(memfd("job"))
                os.write(files[0], data)
                data = pickle.dumps(len(data))
            try:
                _send(self.socket, data, files, DONT_WAIT)
            except OSError as error:
                # No room, or too many descriptors are on their way.
                if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                    self.mapped.returned.extend(back)
                else:  # the worker is gone, which is found out where a batch is waited for
                    self._waiting.clear()
                return
            finally:
                for each in files:
                    os.close(each)
            self._waiting.popleft()

    def receive(self) -> Come | None:
        """What a worker has put; None where more is to come first, EOFError where it is gone."""
        size, ancillary, flags, _ = self.socket.recvmsg_into([self._buffer], SPACE)
        if not size:
            raise EOFError
        files = memoryview(b"".join(data for *_, data in ancillary)).cast("i").tolist()
        try:
            if flags & TRUNCATED:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            fresh, rest = pickle.loads(memoryview(self._buffer)[:size])  # noqa: S301 - our own worker has made it
            for (number, its_size), file in zip(fresh, files, strict=True):
                self.mapped.all[number] = Segment(number, file, its_size)
        finally:
            for file in files:
                os.close(file)
        if rest is None:
            return None
        number, dropped, times, note, body = rest
        for each in dropped:
            del self.mapped.all[each]
        if self._waiting:
            with self._lock:
                self._flush()
        try:
            data, lent = self.mapped.unpickled(body)
        except Exception:  # of somebody's own class of batches
            data, lent = ExceptionWrapper(where="in the training process, as it received a batch"), 0
        fetch = times and (self.number, times[0], times[1], times[1], times[2])
        return Come(number, data, fetch, note, self, lent)

    def hang_up(self) -> None:
        """A worker that waits for room to send, or for a job, ends."""
        with suppress(OSError):  # it has ended already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """This process has no end any more; what is kept of its batches stays."""
        self.socket.close()
        self.end.socket.close()

    __del__ = close


def _is_plain(job: Any) -> bool:
    """Whether a job has plain numbers, which Python's own pickler takes half the time for."""
    indices = job[1] if type(job) is tuple else None
    return type(indices) is list and bool(indices) and type(indices[0]) is int


_living: weakref.WeakSet[Channel] = weakref.WeakSet()


def close_channels(*, but: WorkerEnd | None = None) -> None:
    """In a fork: it holds none of the channels that it has inherited, but perhaps its own."""
    for each in list(_living):
        if each.end is not but:
            each.close()


def _before_fork() -> None:
    for each in list(_living):
        each.mapped.keep()


def _in_fork() -> None:
    for each in list(_living):
        each.mapped.leave()


os.register_at_fork(before=_before_fork, after_in_child=_in_fork)


class Results(NoQueue):
    """What torch takes for its result queue: all channels, and a bell that torch's loop rings to end its pinning thread.

    Args:
        pins: Whether batches are pinned here, and by no thread.
    """

    _poll: Any = None

    def __init__(self, *, pins: bool) -> None:
        self._pins = pins
        self._channels: dict[int, Channel] = {}
        self._own: deque[Any] = deque()

    def _open(self) -> None:
        self._poll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._poll.register(self._bell, select.EPOLLIN)

    def add(self, channel: Channel) -> None:
        if self._poll is None:  # an epoch without workers needs none
            self._open()
        self._channels[channel.socket.fileno()] = channel
        self._poll.register(channel.socket.fileno(), select.EPOLLIN)

    def remove(self, channel: Channel) -> None:
        """Its worker is gone, or could not be started."""
        if self._channels.pop(channel.socket.fileno(), None) is not None:
            self._poll.unregister(channel.socket.fileno())

    def is_ready(self) -> bool:
        """Whether `get` would find something now: a message, or a part of one."""
        return bool(self._channels) and bool(self._poll.poll(0, 1))

    def get(self, timeout: float | None = None) -> tuple[Any, Any]:
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            ready = self._poll.poll(-1 if until is None else max(0.0, until - time.monotonic()), 1)
            if not ready:
                raise queue.Empty
            if ready[0][0] == self._bell:
                os.eventfd_read(self._bell)
                message: tuple[Any, Any] = self._own.popleft()
                return message
            channel = self._channels[ready[0][0]]
            try:
                come = channel.receive()
            except (EOFError, ConnectionError):
                self.remove(channel)
                return None, Come(None, WorkerGone(), channel=channel)
            if come is None:
                continue
            if self._pins and not isinstance(come.data, ExceptionWrapper):  # what is pinned already stays where it lies
                try:
                    come = come._replace(data=pin(come.data))
                except Exception:
                    come = come._replace(data=ExceptionWrapper(where="in the training process, as it pinned a batch"))
            return come.number, come

    def put(self, message: tuple[Any, Any]) -> None:
        self._own.append(message)
        os.eventfd_write(self._bell, 1)
