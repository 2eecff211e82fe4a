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
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from autotune_loader.autoloader.pinning import Pinner
from autotune_loader.autoloader.segments import SMALL_BYTES, Mapped, Pool, Segment, keep_freed_memory
from autotune_loader.autoloader.torchs import ExceptionWrapper, pin, share_by
from autotune_loader.pipeline.loop_log import Fetch

MOST_FILES, PACKET_BYTES = 16, SMALL_BYTES
"""Descriptors in one packet, as a job may have few of them left (the kernel takes 253, unix(7)); bytes of a job's."""
TRUNCATED, DONT_WAIT, SPACE = int(socket.MSG_CTRUNC), int(socket.MSG_DONTWAIT), socket.CMSG_SPACE(4 * MOST_FILES)
"""As enums they take 5 us."""


class NoQueue:
    """What torch calls of a queue when all is over."""

    def cancel_join_thread(self) -> None: ...

    def close(self) -> None: ...


class WorkerEnd(NoQueue):
    """A worker's end of a channel, which torch's worker loop takes for both of its queues.

    Attributes:
        first: Called before the first job, once torch has told the worker what it is.
        seed: Called with the seed of a job, before torch gets the job.
        note: What the loop is told with the next batch.
    """

    first: Callable[[], object] | None = None
    seed: Callable[[Any], object] | None = None
    note: str | None = None
    _begun: tuple[float, float] | None = None

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def begin(self) -> None:
        """From now on this process is a worker: it holds no other channel, and collates into segments."""
        close_channels(but=self)
        self.socket.setblocking(True)  # whatever `socket.setdefaulttimeout()` says
        self._pool, self._poll = Pool(), select.poll()
        self._poll.register(self.socket, select.POLLIN)
        share_by(self._pool.storage, SMALL_BYTES)
        keep_freed_memory()

    def get(self, timeout: float | None = None) -> Any:
        if self.first is not None:
            first, self.first = self.first, None
            first()
        if not self._poll.poll(None if timeout is None else 1000 * timeout):
            raise queue.Empty
        try:
            data, files, _, _ = socket.recv_fds(self.socket, 2 * PACKET_BYTES, 1)
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
        note, self.note = self.note, None
        try:
            for at in range(0, len(fresh) - MOST_FILES, MOST_FILES):
                self._send(fresh[at : at + MOST_FILES], None)
            rest = fresh[-(len(fresh) % MOST_FILES or MOST_FILES) :]
            self._send(rest, (number, dropped, times, note, body))
        except ConnectionError:
            pass  # the loop wants no more: that comes with the next job
        finally:
            for *_, file in fresh:
                os.close(file)

    def _send(self, fresh: list[tuple[int, int, int]], rest: Any) -> None:
        data = pickle.dumps(([(number, size) for number, size, _ in fresh], rest), pickle.HIGHEST_PROTOCOL)
        files = [file for *_, file in fresh]
        socket.send_fds(self.socket, [data], files) if files else self.socket.sendall(data)


class Channel(NoQueue):
    """The loop's end, which torch takes for the index queue of a worker; `times` and `note` are of the latest batch."""

    times: Any = None
    note: str | None = None

    def __init__(self, pinner: Pinner | None) -> None:
        self.socket, theirs = pair()
        self.end, self.number, self.mapped = WorkerEnd(theirs), -1, Mapped(pinner)
        self._waiting, self._buffer = deque[Any](), bytearray(2 * PACKET_BYTES)
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
            data = pickle.dumps((back, self._waiting[0]), pickle.HIGHEST_PROTOCOL)
            if len(data) > PACKET_BYTES:  # many indices
                files.append(os.memfd_create("job"))
                os.write(files[0], data)
                data = pickle.dumps(len(data))
            try:
                socket.send_fds(self.socket, [data], files, DONT_WAIT) if files else self.socket.send(data, DONT_WAIT)
            except BlockingIOError:
                self.mapped.returned.extend(back)
                return
            except OSError:  # the worker is gone, which is found out where a batch is waited for
                self._waiting.clear()
                return
            finally:
                for each in files:
                    os.close(each)
            self._waiting.popleft()

    def receive(self) -> tuple[Any, Any] | None:
        """What a worker has put; None where more is to come first.

        Raises:
            EOFError: the worker is gone.
            OSError: this process has too many files open.
        """
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
        number, dropped, self.times, self.note, body = rest
        for each in dropped:
            del self.mapped.all[each]
        if self._waiting:
            with self._lock:
                self._flush()
        try:
            return number, self.mapped.unpickled(body)
        except Exception:  # of somebody's own class of batches
            return number, ExceptionWrapper(where="in the training process, as it received a batch")

    def hang_up(self) -> None:
        """A worker that waits for room to send, or for a job, ends."""
        with suppress(OSError):  # it has ended already
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """This process has no end any more; what is kept of its batches stays."""
        self.socket.close()
        self.end.socket.close()

    __del__ = close


_living: weakref.WeakSet[Channel] = weakref.WeakSet()
_loop_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def pair() -> tuple[socket.socket, socket.socket]:
    """The loop's end, which no fork keeps, and the other one; they keep the bounds of messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setblocking(True)
    _loop_ends.add(ours)
    return ours, theirs


def close_channels(*, but: WorkerEnd | None = None) -> None:
    """In a fork: it holds none of the channels that it has inherited, but perhaps its own."""
    for each in list(_living):
        if each.end is not but:
            each.close()


def _in_fork() -> None:  # if it held the loop's ends, a channel would not end with the loop
    for each in list(_loop_ends):
        each.close()


os.register_at_fork(after_in_child=_in_fork)


class WorkerGone:
    """A message, as a pinning thread passes it on: this channel, and so its worker, has come to its end."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel


class Results(NoQueue):
    """What torch takes for its result queue: all channels, and a bell that torch's loop rings to end its pinning thread.

    Args:
        pins: Whether batches are pinned here, and by no thread.

    Attributes:
        fetches: By number of a batch that has come, how it was made.
        note: The latest that a worker has told.
        batch_bytes: Of the largest batch so far.
    """

    def __init__(self, *, pins: bool) -> None:
        self._pins = pins
        self._poll, self._channels, self._own = select.epoll(), dict[int, Channel](), deque[Any]()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._bell).atexit = False
        self._poll.register(self._bell, select.EPOLLIN)
        self.fetches, self.batch_bytes = dict[int, Fetch](), 0
        self.note: str | None = None

    def add(self, channel: Channel) -> None:
        self._channels[channel.socket.fileno()] = channel
        self._poll.register(channel.socket.fileno(), select.EPOLLIN)

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
                received = channel.receive()
            except (EOFError, ConnectionError):
                self._poll.unregister(channel.socket.fileno())
                del self._channels[ready[0][0]]
                return None, WorkerGone(channel)
            if received is not None:
                if channel.times is not None:
                    begun, end, cpu_s = channel.times
                    self.fetches[received[0]] = channel.number, begun, end, end, cpu_s
                if isinstance(received[1], ExceptionWrapper):
                    vars(received[1])["channel"] = channel  # from whom it is
                self.note = channel.note or self.note
                self.batch_bytes = max(self.batch_bytes, channel.mapped.leased_bytes)
                return (received[0], _pinned(received[1])) if self._pins else received

    def put(self, message: tuple[Any, Any]) -> None:
        self._own.append(message)
        os.eventfd_write(self._bell, 1)


def _pinned(data: Any) -> Any:
    """As torch's pinning thread leaves it; what is pinned already stays where it lies."""
    if isinstance(data, ExceptionWrapper):
        return data
    try:
        return pin(data)
    except Exception:
        return ExceptionWrapper(where="in the training process, as it pinned a batch")
