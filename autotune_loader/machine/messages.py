"""How a message travels between the loop and a worker: one packet on a socket of their own, with a memory file beside it.

    packet   the pickle; where there is a file, only where in it the pickle begins
    file     large tensors and arrays, one after the other, then (their places, the pickle)

The loop maps the file and closes it: a batch that is kept holds no descriptor. Torch's queue connects to a thread of the
worker, with a challenge, for each tensor. Here nothing has a name: neither /dev/shm nor TMPDIR is used.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import pickle
import socket
import struct
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

SMALL_BYTES = 1 << 16
"""Tensors and arrays up to this size are part of the pickle: copying them is cheaper than a file."""
PACKET_BYTES = 1 << 15
"""A socket holds some 200 KiB: so several packets lie ready before their worker has to wait."""
ALIGNMENT = 64
TRUNCATED = int(socket.MSG_CTRUNC)
"""As an enum it takes 5 us."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends that keep the bounds of messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Any, *, is_plain: bool = False) -> None:
    """Pickle and send; what is plain holds no tensors, which takes half as long.

    Raises:
        OSError: the other end is gone, or there is no room for a file.
        Exception: the message cannot be pickled.
    """
    large, pickled = list[memoryview](), io.BytesIO()

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        if data.nbytes > SMALL_BYTES:
            large.append(data)
        return data.nbytes <= SMALL_BYTES

    if is_plain:
        pickle.dump(message, pickled, pickle.HIGHEST_PROTOCOL)
    else:
        _Pickler(pickled, pickle.HIGHEST_PROTOCOL, True, is_small).dump(message)
    if not large and pickled.tell() <= PACKET_BYTES:
        end.sendall(pickled.getbuffer())
        return
    file = os.memfd_create("batch")
    try:
        places, begin = list[tuple[int, int]](), 0
        for data in large:
            places.append((begin, begin + data.nbytes))
            _write(file, data, begin)
            begin += data.nbytes + -data.nbytes % ALIGNMENT
        _write(file, memoryview(pickle.dumps((places, pickled.getvalue()))), begin)
        socket.send_fds(end, [pickle.dumps(begin)], [file])
    finally:
        os.close(file)


def _write(file: int, data: memoryview, begin: int) -> None:
    while data.nbytes:
        written = os.pwrite(file, data, begin)
        data, begin = data[written:], begin + written


def receive(end: socket.socket, seconds: float | None = 0.0) -> Any:
    """The next message.

    Args:
        end: of a pair.
        seconds: it is waited for at most; 0 for ever, None not at all.

    Raises:
        EOFError: the other end is gone.
        BlockingIOError: there was none in that time.
        OSError: this process has too many files open.
    """
    if seconds is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
    packet, flags = bytearray(PACKET_BYTES), socket.MSG_DONTWAIT if seconds is None else 0
    size, ancillary, flags, _ = end.recvmsg_into([packet], socket.CMSG_SPACE(4), flags)
    if not size:
        raise EOFError
    if flags & TRUNCATED:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    message = pickle.loads(memoryview(packet)[:size])  # noqa: S301 - our own worker has made it
    if not ancillary:
        return message
    file = int.from_bytes(ancillary[0][2], "little")
    try:
        mapping: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, os.fstat(file).st_size)
    finally:
        os.close(file)
    data: Any = torch.empty(0, dtype=torch.uint8).set_(mapping).numpy()
    places, pickled = pickle.loads(data[message:])  # noqa: S301
    return pickle.loads(pickled, buffers=[data[begin:end] for begin, end in places])  # noqa: S301


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


def collate_without_sharing() -> None:
    """In a worker: where torch's collate function asks for shared memory, it gets memory of the worker's own."""

    def new_shared(kind: Any, size: int, *, device: Any = "cpu") -> Any:
        return kind(size, device=device)

    torch.UntypedStorage._new_shared = classmethod(new_shared)  # type: ignore[assignment, method-assign]
