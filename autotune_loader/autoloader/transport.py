"""How a message travels between the loop and a worker: one packet on a socket of their own, with memory files beside it.

    packet   0 + pickle                                  what is small
             1 + sizes    and a file of these parts      pickles above 32 KiB, large numpy arrays
    files    one for each tensor above 64 KiB, which the loop maps and closes: a batch that is kept holds no descriptor

Torch's queue connects to a thread of the worker, with a challenge, for each tensor. Here nothing has a name: neither
/dev/shm nor TMPDIR is used.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import io
import os
import pickle
import socket
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

SMALL_BYTES = 1 << 16
"""Tensors and arrays up to this size are part of the pickle: copying them is cheaper than a file."""
PACKET_BYTES = 1 << 15
"""A socket holds some 200 KiB: so several packets lie ready before their worker has to wait."""
MOST_FILES = 16
"""Tensors of one message that have files of their own; the kernel counts descriptors on their way against the user's limit."""
MOST_PARTS = 512
"""Arrays of one message that are written beside the pickle."""


class IncompleteError(OSError):
    """A message lost its files, as this process may open no more."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Any) -> None:
    """Pickle and send.

    Raises:
        OSError: the other end is gone, or there is no room for a file.
        Exception: the message cannot be pickled.
    """
    outgoing = _Outgoing()
    try:
        end_of_pickle = io.BytesIO()
        _Pickler(end_of_pickle, outgoing).dump(message)
        _send(end, end_of_pickle.getbuffer(), outgoing)
    finally:
        outgoing.close()


def send_plain(end: socket.socket, message: Any) -> None:
    """The same of what holds no large tensors, at half the cost."""
    outgoing = _Outgoing()
    try:
        _send(end, pickle.dumps(message, pickle.HIGHEST_PROTOCOL), outgoing)
    finally:
        outgoing.close()


def _send(end: socket.socket, pickled: Any, outgoing: _Outgoing) -> None:
    parts = [pickled, *outgoing.parts]
    if len(parts) == 1 and len(pickled) <= PACKET_BYTES:
        packet = [b"\0", pickled]
    else:
        outgoing.own.append(file := _file_of(parts))
        outgoing.files.append(file)
        packet = [b"\1", array.array("Q", map(len, parts))]
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", outgoing.files))] if outgoing.files else []
    end.sendmsg(packet, files)


class _Here(threading.local):
    """One thread's: where a packet is put, and the files of the message that is being unpickled."""

    def __init__(self) -> None:
        self.packet = bytearray(PACKET_BYTES + 1)
        self.files: list[int] = []


_here = _Here()
_ROOM_FOR_FILES = socket.CMSG_SPACE((MOST_FILES + 1) * 4)


def receive(end: socket.socket, flags: int = 0) -> Any:
    """The next message.

    Raises:
        EOFError: the other end is gone.
        BlockingIOError: there was none in the time that was set for the socket.
        IncompleteError: this process has too many files open.
    """
    here = _here
    size, ancillary, flags, _ = end.recvmsg_into([here.packet], _ROOM_FOR_FILES, flags)
    if not size:
        raise EOFError
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    here.files = files.tolist()
    try:
        if flags & socket.MSG_CTRUNC:
            raise IncompleteError(errno.EMFILE, os.strerror(errno.EMFILE))
        view = memoryview(here.packet)[1:size]
        if not here.packet[0]:
            return pickle.loads(view)  # noqa: S301 - our own worker has made it
        pickled, *arrays = _parts_of(here.files.pop(), view.cast("Q").tolist())
        return pickle.loads(pickled, buffers=arrays)  # noqa: S301
    finally:
        for file in here.files:
            os.close(file)
        here.files = []


class _Outgoing:
    """What goes along with a pickle."""

    def __init__(self) -> None:
        self.files: list[int] = []
        self.own: list[int] = []
        """Of them, those that are nobody else's."""
        self.parts: list[Any] = []

    def add(self, part: pickle.PickleBuffer) -> bool:
        """Whether an array stays in the pickle; else it is written beside it."""
        raw = part.raw()
        if raw.nbytes <= SMALL_BYTES or len(self.parts) >= MOST_PARTS:
            return True
        self.parts.append(raw)
        return False

    def file(self, storage: torch.UntypedStorage) -> int | None:
        """Number of a storage's file in the message; None where there are enough."""
        if len(self.files) >= MOST_FILES:
            return None
        known = _shared.get(storage._cdata)
        if known is None:
            known = _file_of([_bytes_of(storage.data_ptr(), storage.nbytes())])
            self.own.append(known)
        self.files.append(known)
        return len(self.files) - 1

    def close(self) -> None:
        for file in self.own:
            os.close(file)
        _shared.forget()


class _Pickler(ForkingPickler):
    """As torch's workers pickle, but for where the bytes of tensors go."""

    def __init__(self, file: io.BytesIO, outgoing: _Outgoing) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, outgoing.add)
        self._outgoing = outgoing

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            return self._reduced(value, value.nbytes())
        is_plain = kind is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not is_plain or value.requires_grad or not value.is_contiguous() or value.is_conj() or value.is_neg():
            return NotImplemented
        size = value.nbytes
        if size <= SMALL_BYTES:
            return _by_value, (bytearray(_bytes_of(value.data_ptr(), size)), value.dtype, tuple(value.shape))
        storage = value.untyped_storage()
        if storage.nbytes() != size:  # a part of something larger
            storage = value.clone().untyped_storage()
        return _tensor, (storage, value.dtype, tuple(value.shape))

    def _reduced(self, storage: torch.UntypedStorage, size: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        number = self._outgoing.file(storage) if size > SMALL_BYTES else None
        if number is not None:
            return _mapped, (number, size)
        return _storage, (pickle.PickleBuffer(bytearray(_bytes_of(storage.data_ptr(), size))),)


def _by_value(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _tensor(storage: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def _storage(data: Any) -> torch.UntypedStorage:
    return (
        torch.frombuffer(data, dtype=torch.uint8).untyped_storage()
        if len(memoryview(data))
        else torch.UntypedStorage(0)
    )


def _mapped(number: int, size: int) -> torch.UntypedStorage:
    return _mapping(_here.files[number], size)


def _mapping(file: int, size: int) -> torch.UntypedStorage:
    """The memory of a file, which may be closed."""
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, size)  # type: ignore[return-value]


def _bytes_of(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B") if size else memoryview(b"")


def _file_of(parts: list[Any]) -> int:
    file = os.memfd_create("batch")
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            while len(view):
                view = view[os.write(file, view) :]
    except OSError:
        os.close(file)
        raise
    return file


def _parts_of(file: int, sizes: list[int]) -> list[memoryview]:
    try:
        data, read = memoryview(bytearray(sum(sizes))), 0
        while read < len(data):
            read += os.preadv(file, [data[read:]], read)
    finally:
        os.close(file)
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [data[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class _Shared:
    """In a worker: storages that lie in memory files already, so that sending them copies nothing."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}

    def new(self, size: int) -> torch.UntypedStorage:
        if size <= SMALL_BYTES:
            return torch.UntypedStorage(size)
        file = os.memfd_create("batch")
        try:
            os.ftruncate(file, size)
            storage = _mapping(file, size)
        except BaseException:
            os.close(file)
            raise
        self._known[storage._cdata] = file, StorageWeakRef(storage)
        return storage

    def get(self, cdata: int) -> int | None:
        known = self._known.get(cdata)
        return None if known is None else known[0]

    def forget(self) -> None:
        for cdata, (file, storage) in list(self._known.items()):
            if storage.expired():
                os.close(file)
                del self._known[cdata]


_shared = _Shared()


def collate_into_files() -> None:
    """In a worker: where torch's collate function asks for shared memory, it gets a memory file, or none for what is small."""

    def new_shared(_: Any, size: int, *, device: Any = "cpu") -> Any:
        return _shared.new(size) if torch.device(device).type == "cpu" else plain(size, device=device)

    plain: Any = torch.UntypedStorage._new_shared
    torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment, method-assign]


def within(end: socket.socket, seconds: float) -> None:
    """From now on `receive` waits no longer; 0 waits for ever."""
    whole, rest = divmod(seconds, 1)
    packed = array.array("l", [int(whole), int(rest * 1e6)])
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed.tobytes())
