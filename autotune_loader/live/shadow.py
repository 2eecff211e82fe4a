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
import io
import multiprocessing
import os
import pickle
import random
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import _utils

from autotune_loader.machine.sandbox import Guard, become_helper, cut_off, forked_twice, let_go
from autotune_loader.pipeline.digest import digest

WORKERS = 2
LIFE_S = 240.0
"""A shadow that is still there after so long is of a loop that pauses; it ends, and another one may begin."""
MOST_MESSAGE = 2000
"""Characters of an exception's text."""
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
            self.pid = forked_twice(lambda: _supervise(pairs, fetch))
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


def _supervise(pairs: list[tuple[socket.socket, socket.socket]], fetch: Callable[[int], Any]) -> NoReturn:
    """Start the workers; see them end, or end them."""
    become_helper()
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
    let_go([end.fileno() for end in ends])
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


def _work(number: int, channel: Channel, fetch: Callable[[int], Any]) -> NoReturn:
    """A worker: fetch and answer, until the loop is gone."""
    cut_off(channel.end.fileno())
    sys.addaudithook(Guard(lambda did: channel.send({"did": did})))
    with contextlib.suppress(EOFError):
        make = None
        while True:
            item = channel.next()
            try:
                if make is None:
                    make = fetch(number)
                    refuse_what_is_held(make(item), make(item))
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


class NotSentError(Exception):
    """A batch does not come through a pickle as it was."""


class _Pickler(ForkingPickler):
    """As that of workers, but that tensors are passed by reference: no shared memory is made."""

    def __init__(self, buffer: io.BytesIO, passed: list[Any], parts: list[Any] | None) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._passed, self._parts = passed, parts

    def persistent_id(self, value: Any) -> int | None:
        if self._parts is not None:
            self._parts.append(value)
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


def sent(value: Any, parts: list[Any] | None = None) -> Any:
    """A value as it comes out of a queue between processes.

    Args:
        value: any.
        parts: gets all that it consists of.

    Raises:
        NotSentError: it does not.
    """
    buffer, passed = io.BytesIO(), list[Any]()
    try:
        _Pickler(buffer, passed, parts).dump(value)
        buffer.seek(0)
        return _Unpickler(buffer, passed).load()
    except Exception as error:
        raise NotSentError(_words(error)) from None


def refuse_what_is_held(batch: Any, again: Any) -> None:
    """Of two fetches of the same indices nothing may be the same object, or lie in the same memory, that can be changed.

    The training then changes, or knows, what somebody holds: the dataset its samples, collate_fn a buffer. What comes from a
    worker is a copy.

    Raises:
        NotSentError: something is, or they cannot be sent.
    """
    first, second = (_changeable(each) for each in (batch, again))
    for key in first.keys() & second.keys():
        if sent(first[key]) is not first[key]:  # classes, functions and the like are the same everywhere
            kind = type(first[key]).__name__
            raise NotSentError(f"a {kind} in it is held elsewhere, too, where the training may change it")


def _changeable(batch: Any) -> dict[Any, Any]:
    """Parts of a batch that are no mere values, by identity; tensors and arrays by where their numbers lie."""
    parts, found = list[Any](), dict[Any, Any]()
    sent(batch, parts)
    for part in parts:
        if isinstance(part, (torch.Tensor, np.ndarray)):
            with contextlib.suppress(RuntimeError):  # sparse ones lie in several places
                place = part.data_ptr() if isinstance(part, torch.Tensor) else part.ctypes.data * part.flags.writeable
                found.update({("memory", place): part} if place else {})
        elif getattr(type(part), "__hash__", None) in (None, object.__hash__):
            found[id(part)] = part
    return found


def become_torch_worker(dataset: Any, number: int, base_seed: int) -> None:
    """Make this process look like one of torch's workers, but that `default_collate` uses memory of its own."""
    setattr(torch.UntypedStorage, "_new_shared", classmethod(_new_private))  # noqa: B010
    torch.set_num_threads(1)
    seed = base_seed + number
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    parent: Any = multiprocessing.parent_process() or multiprocessing.current_process()
    here: Any = multiprocessing.process
    here._current_process = multiprocessing.get_context("fork").Process(daemon=True)
    here._parent_process = here._ParentProcess(parent.name, os.getppid(), None)
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
