"""How a message travels between the loop and a worker: one packet on a socket of their own, with memory files beside it.

    packet   the pickle; where there are files, what lies where in them, and the pickle if that is short
    files    large tensors and arrays, which the loop maps and closes: a batch that is kept holds no descriptor

Torch's queue connects to a thread of the worker, with a challenge, for each tensor. Here nothing has a name: neither
/dev/shm nor TMPDIR is used. Large data are copied once at most: into the file.
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
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

SMALL_BYTES = 1 << 16
"""Tensors and arrays up to this size are part of the pickle: copying them is cheaper than a file."""
PACKET_BYTES = 1 << 15
"""A socket holds some 200 KiB: so several packets lie ready before their worker has to wait."""
MOST_FILES = 16
"""Of one message, beside its own; the kernel counts descriptors on their way against the user's limit."""
MOST_PLACES = 500
"""Tensors and arrays of one message that lie in files: which places that are is a part of the packet."""
ALIGNMENT = 64
TRUNCATED = int(socket.MSG_CTRUNC)
"""As an enum it takes 5 us."""
_ROOM_FOR_FILES = socket.CMSG_SPACE((MOST_FILES + 1) * 4)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def within(end: socket.socket, seconds: float) -> None:
    """From now on `receive` waits no longer; 0 waits for ever."""
    whole, rest = divmod(seconds, 1)
    packed = array.array("l", [int(whole), int(rest * 1e6)])
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed.tobytes())


def send(end: socket.socket, message: Any) -> None:
    """Pickle and send.

    Raises:
        OSError: the other end is gone, or there is no room for a file.
        Exception: the message cannot be pickled.
    """
    outgoing, pickled = _Outgoing(), io.BytesIO()
    try:
        _Pickler(pickled, pickle.HIGHEST_PROTOCOL, True, outgoing.take).dump(message)
        whole = pickled.getbuffer()
        if not outgoing.places and len(whole) <= PACKET_BYTES:
            end.sendall(whole)
            return
        is_short = len(whole) <= PACKET_BYTES // 4
        if not is_short:
            outgoing.write(whole)
        packet = pickle.dumps((outgoing.places, whole.tobytes() if is_short else None))
        end.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", outgoing.files))])
    finally:
        outgoing.close()


def send_plain(end: socket.socket, message: Any) -> None:
    """The same of what holds no large tensors, at half the cost."""
    pickled = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    if len(pickled) <= PACKET_BYTES:
        end.sendall(pickled)
    else:
        send(end, message)


def receive(end: socket.socket, flags: int = 0) -> Any:
    """The next message.

    Raises:
        EOFError: the other end is gone.
        BlockingIOError: there was none in the time that was set for the socket.
        OSError: this process has too many files open.
    """
    packet, files = bytearray(PACKET_BYTES), array.array("i")
    size, ancillary, flags, _ = end.recvmsg_into([packet], _ROOM_FOR_FILES, flags)
    if not size:
        raise EOFError
    for _, _, data in ancillary:
        files.frombytes(data[: len(data) - len(data) % files.itemsize])
    try:
        if flags & TRUNCATED:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        message = pickle.loads(memoryview(packet)[:size])  # noqa: S301 - our own worker has made it
        if not files:
            return message
        places, pickled = message
        mapped = [_bytes_in(_mapping(file, os.fstat(file).st_size)) for file in files]
        parts = [mapped[number][begin : begin + size] for number, begin, size in places]
        return pickle.loads(parts.pop() if pickled is None else pickled, buffers=parts)  # noqa: S301
    finally:
        for file in files:
            os.close(file)


class _Outgoing:
    """What lies beside the pickle of a message."""

    def __init__(self) -> None:
        self.files: list[int] = []
        self.places: list[tuple[int, int, int]] = []
        """File, first byte, size."""
        self._own: int | None = None
        self._number = self._end = 0

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """Whether it is to be a part of the pickle."""
        data = buffer.raw()
        if data.nbytes <= SMALL_BYTES or len(self.places) >= MOST_PLACES:
            return True
        file = _shared.file_of(data) if len(self.files) < MOST_FILES else None
        if file is None:
            self.write(data)
        else:
            self.places.append((len(self.files), 0, data.nbytes))
            self.files.append(file)
        return False

    def write(self, data: memoryview) -> None:
        """Into the message's own file."""
        if self._own is None:
            self._own, self._number = os.memfd_create("batch"), len(self.files)
            self.files.append(self._own)
        self.places.append((self._number, self._end, data.nbytes))
        while data.nbytes:
            written = os.pwrite(self._own, data, self._end)
            data, self._end = data[written:], self._end + written
        self._end += -self._end % ALIGNMENT

    def close(self) -> None:
        if self._own is not None:
            os.close(self._own)
        _shared.forget()


class _Pickler(ForkingPickler):
    """As torch's workers pickle, but for where the bytes of tensors go."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.UntypedStorage and value.device.type == "cpu":
            return _storage, (_buffer(value.data_ptr(), value.nbytes()),)
        is_plain = kind is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
        if not is_plain or value.requires_grad or not value.is_contiguous() or value.is_conj() or value.is_neg():
            return NotImplemented
        return _tensor, (_buffer(value.data_ptr(), value.nbytes), value.dtype, tuple(value.shape))


def _buffer(address: int, size: int) -> pickle.PickleBuffer:
    return pickle.PickleBuffer((ctypes.c_char * size).from_address(address) if size else bytearray())


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def _storage(data: Any) -> torch.UntypedStorage:
    return torch.frombuffer(data, dtype=torch.uint8).untyped_storage() if len(data) else torch.UntypedStorage(0)


def _bytes_in(storage: torch.UntypedStorage) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def _mapping(file: int, size: int) -> torch.UntypedStorage:
    """The memory of a file, which may be closed."""
    return torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, size)  # type: ignore[return-value]


class _Shared:
    """In a worker: storages that lie in memory files already, so that sending them copies nothing."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int, StorageWeakRef]] = {}
        """By address: file, size."""

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
        self.forget()
        self._known[storage.data_ptr()] = file, size, StorageWeakRef(storage)
        return storage

    def file_of(self, data: memoryview) -> int | None:
        address = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        file, size, storage = self._known.get(address, (None, 0, None))
        return None if storage is None or size != data.nbytes or storage.expired() else file

    def forget(self) -> None:
        for address, (file, _, storage) in list(self._known.items()):
            if storage.expired():
                os.close(file)
                del self._known[address]


_shared = _Shared()


def collate_into_files() -> None:
    """In a worker: where torch's collate function asks for shared memory, it gets a memory file, or none for what is small."""

    def new_shared(_: Any, size: int, *, device: Any = "cpu") -> Any:
        return _shared.new(size) if torch.device(device).type == "cpu" else plain(size, device=device)

    plain: Any = torch.UntypedStorage._new_shared
    torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment, method-assign]
