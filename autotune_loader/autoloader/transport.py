"""How a message travels between the loop and a worker: one packet on a socket of their own, with memory files beside it.

    packet   pickle, or nothing but one letter where it is above 32 KiB and the last file holds it
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
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

SMALL_BYTES = 1 << 16
"""Tensors up to this size are part of the pickle: copying them is cheaper than a file."""
PACKET_BYTES = 1 << 15
"""A socket holds some 200 KiB: so several packets lie ready before their worker has to wait."""
MOST_FILES = 16
"""Tensors of one message that have files of their own; the kernel counts descriptors on their way against the user's limit."""
IN_FILE = b"f"
"""In place of a pickle, which is longer."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Any) -> None:
    """Pickle and send.

    Raises:
        OSError: the other end is gone, or there is no room for a file.
        Exception: the message cannot be pickled.
    """
    outgoing, pickled = _Outgoing(), io.BytesIO()
    try:
        _Pickler(pickled, outgoing).dump(message)
        _post(end, pickled.getbuffer(), outgoing.files)
    finally:
        outgoing.close()


def send_plain(end: socket.socket, message: Any) -> None:
    """The same of what holds no large tensors, at half the cost."""
    _post(end, pickle.dumps(message, pickle.HIGHEST_PROTOCOL), [])


def _post(end: socket.socket, pickled: Any, files: list[int]) -> None:
    if len(pickled) > PACKET_BYTES:
        file = _file_of(pickled)
        try:
            _post(end, IN_FILE, [*files, file])
        finally:
            os.close(file)
        return
    end.sendmsg([pickled], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else [])


class _Here(threading.local):
    """One thread's: where a packet is put, and the files of the message that is being unpickled."""

    def __init__(self) -> None:
        self.packet = bytearray(PACKET_BYTES)
        self.files: list[int] = []


_here = _Here()
_ROOM_FOR_FILES = socket.CMSG_SPACE((MOST_FILES + 1) * 4)


def receive(end: socket.socket, flags: int = 0) -> Any:
    """The next message.

    Raises:
        EOFError: the other end is gone.
        BlockingIOError: there was none in the time that was set for the socket.
        OSError: this process has too many files open.
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
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if size > len(IN_FILE):
            return pickle.loads(memoryview(here.packet)[:size])  # noqa: S301 - our own worker has made it
        with open(here.files.pop(), "rb") as pickled:  # noqa: PTH123
            pickled.seek(0)
            return pickle.load(pickled)  # noqa: S301
    finally:
        for file in here.files:
            os.close(file)
        here.files = []


class _Outgoing:
    def __init__(self) -> None:
        self.files: list[int] = []
        self.own: list[int] = []
        """Of them, those that are nobody else's."""

    def file(self, storage: torch.UntypedStorage) -> int | None:
        """Number of a storage's file in the message; None where there are enough."""
        if len(self.files) >= MOST_FILES:
            return None
        known = _shared.get(storage._cdata)
        if known is None:
            known = _file_of(_bytes_of(storage.data_ptr(), storage.nbytes()))
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
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._outgoing = outgoing

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            number = self._outgoing.file(value) if value.nbytes() > SMALL_BYTES else None
            if number is not None:
                return _mapped, (number, value.nbytes())
            return _storage, (bytearray(_bytes_of(value.data_ptr(), value.nbytes())),)
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


def _by_value(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def _tensor(storage: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def _storage(data: bytearray) -> torch.UntypedStorage:
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)


def _mapped(number: int, size: int) -> torch.UntypedStorage:
    return _mapping(_here.files[number], size)


def _mapping(file: int, size: int) -> torch.UntypedStorage:
    """The memory of a file, which may be closed."""
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, size)  # type: ignore[return-value]


def _bytes_of(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B") if size else memoryview(b"")


def _file_of(data: Any) -> int:
    file = os.memfd_create("batch")
    try:
        view = memoryview(data).cast("B")
        while len(view):
            view = view[os.write(file, view) :]
    except OSError:
        os.close(file)
        raise
    return file


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
