"""Descriptors of memory and of processes, also where Python lacks them: it was built against an old glibc, as conda's are."""

from __future__ import annotations

import ctypes
import errno
import os
import platform

MEMFD_CREATE, PIDFD_OPEN = {"x86_64": 319, "aarch64": 279}.get(platform.machine()), 434
"""Numbers of the system calls; the first is None where it is not known."""
CLOEXEC = 1
"""MFD_CLOEXEC."""


def memfd(name: str) -> int:
    """A descriptor of a new file in memory, which has no name in a file system (memfd_create(2)).

    Raises:
        OSError: the kernel has none.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    return _called(MEMFD_CREATE, name.encode(), CLOEXEC)


def pidfd(pid: int) -> int:
    """A descriptor of a process, which can be read once that has ended (pidfd_open(2)).

    Raises:
        OSError: there is no such process, or the kernel has no such call, or refuses it.
    """
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _called(PIDFD_OPEN, pid, 0)


def _called(number: int | None, first: bytes | int, flags: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    found = -1 if number is None else int(libc.syscall(ctypes.c_long(number), first, flags))
    if found < 0:
        error = errno.ENOSYS if number is None else ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return found
