"""System calls that Python lacks: clone(2), and those for descriptors of memory and of processes where it was built against an
old glibc, as conda's are.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal

CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
"""Number of the system call; None where it is not known."""
SET_ROBUST_LIST, GET_ROBUST_LIST = {"x86_64": (273, 274), "aarch64": (99, 100)}.get(platform.machine(), (0, 0))
CLONE_PARENT, CHILD_SETTID, CHILD_CLEARTID, PR_GET_TID_ADDRESS = 0x8000, 0x1000000, 0x200000, 40
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


def clone() -> int:
    """As `os.fork()`, a child of this process's own parent; this process has one thread, and CLONE is known (clone(2))."""
    python, libc, own = ctypes.pythonapi, ctypes.PyDLL(None), ctypes.c_void_p()
    flags = CLONE_PARENT | signal.SIGCHLD
    if libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(own), 0, 0, 0) == 0 and own.value:
        flags |= CHILD_SETTID | CHILD_CLEARTID  # glibc keeps its thread's number there, as its own fork() sets it
    address, nothing = ctypes.c_void_p(own.value), ctypes.c_void_p(0)
    last = (address, nothing) if CLONE == 56 else (nothing, address)  # aarch64 has them the other way round
    mutexes, size = ctypes.c_void_p(), ctypes.c_size_t()
    libc.syscall(GET_ROBUST_LIST, 0, ctypes.byref(mutexes), ctypes.byref(size))
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(CLONE, flags, nothing, nothing, *last))
    if pid == 0:
        libc.syscall(SET_ROBUST_LIST, mutexes, size)  # as glibc: what it holds is released should it die
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    return pid
