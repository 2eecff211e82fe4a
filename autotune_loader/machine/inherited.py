"""What a forked process shares with its parent, and how it gets its own: open files, and shared memory.

    file       parent and child read at one position          ─► opened once more: a position of its own
               what one writes, the other reads               ─► a copy in memory, at the same position
    memory     what one writes to a shared mapping, both see  ─► mapped once more: the same bytes at the same address

Linux only, by /proc; elsewhere nothing is done. A `multiprocessing.Value`, a tensor after `share_memory_()` and a
`numpy.memmap` are shared mappings, and so are the semaphores of `multiprocessing`: each stays shared among the child and its
own children.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FIRST_OWN_FD = 3
"""Below are stdin, stdout and stderr."""
MOST_COPIED_BYTES = 1 << 30
"""A larger mapping is made private to each process instead: pages are then copied when they are written to."""
MOST_COPIED_FILES_BYTES = 1 << 28
"""Of files that can be read and written so much is copied, in a tenth of a second; from then on they can only be read."""
LONGEST_NAME = 60
"""Characters of the name of a file in memory, which may have 249 bytes."""
MEMORY = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # noqa: S108 - names of mappings
"""How the names of what lies in memory begin."""
MAP_FIXED = 0x10  # linux/mman.h; Python's mmap has no name for it
CHUNK_BYTES = 1 << 24


def own_files() -> None:
    """Give this process regular files of its own in place of those that it has inherited, each at its position.

    What it writes to one, such as a log, nobody else sees.
    """
    left = MOST_COPIED_FILES_BYTES
    for fd in descriptors(FIRST_OWN_FD):
        with contextlib.suppress(OSError):
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK)
            access, name = flags & os.O_ACCMODE, os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
            copied = status.st_size if access == os.O_RDWR else 0
            if access == os.O_RDONLY or name.startswith(MEMORY):
                reopen(fd, flags, inheritable=os.get_inheritable(fd))
            elif copied > left:
                reopen(fd, flags & ~os.O_ACCMODE, inheritable=os.get_inheritable(fd))
            else:
                left -= copied
                _reopen_in_memory(fd, flags, name, status.st_size, copied)


def _reopen_in_memory(fd: int, flags: int, name: str, size: int, copied: int) -> None:
    """Put a file in memory, of the same name and size, in the place of one; so many of its bytes are copied."""
    memory = os.memfd_create(name[-LONGEST_NAME:])
    try:
        os.ftruncate(memory, size)
        at = 0
        while at < copied and (sent := os.sendfile(memory, fd, at, copied - at)):
            at += sent
        reopen(fd, flags, inheritable=os.get_inheritable(fd), of=memory)
    finally:
        os.close(memory)


def reopen(fd: int, flags: int, *, inheritable: bool, of: int | None = None) -> None:
    """Open a file once more, also one that has been unlinked, under the number and at the position that it has.

    Args:
        fd: its number.
        flags: of the file from now on.
        inheritable: whether programs that are started have it, too.
        of: the number of another file, which takes its place.

    Raises:
        OSError: it has no position, or may not be opened.
    """
    position = os.lseek(fd, 0, os.SEEK_CUR)
    again = os.open(f"/proc/self/fd/{fd if of is None else of}", flags | os.O_CLOEXEC)
    os.lseek(again, position, os.SEEK_SET)
    os.dup2(again, fd, inheritable=inheritable)
    os.close(again)


def own_shared_memory() -> None:
    """Replace each shared mapping that this process may write to, so that its parent no longer sees what is written."""
    if not Path("/proc/self/maps").exists():
        return
    mappings = list(writable_shared_mappings(Path("/proc/self/maps").read_text()))
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for mapping in (each for each in mappings if _is_memory_or_file(each.path)):
            with contextlib.suppress(OSError):
                _replace(mapping, memory.fileno())


@dataclass(frozen=True, slots=True)
class Mapping:
    """One line of /proc/self/maps."""

    begin: int
    size: int
    offset: int
    protection: int
    path: str


def writable_shared_mappings(text: str) -> Iterator[Mapping]:
    """Those of this process, from /proc/self/maps.

    `address perms offset dev inode pathname`, where the last of perms is `s` for shared (proc(5)):

        7f3c4e1d2000-7f3c4e1d3000 rw-s 00000000 00:1b 42   /dev/shm/pym-4711-x (deleted)
    """
    for line in text.splitlines():
        address, permissions, offset, _, _, *path = line.split(maxsplit=5)
        if permissions[1] != "w" or permissions[3] != "s":
            continue
        begin, end = (int(each, 16) for each in address.split("-"))
        protection = sum(flag for letter, flag in zip(permissions, (1, 2, 4), strict=False) if letter != "-")
        yield Mapping(begin, end - begin, int(offset, 16), protection, path[0] if path else "")


def _is_memory_or_file(path: str) -> bool:
    """Devices (a GPU's, say) are left alone."""
    if path.startswith(MEMORY):
        return True
    return path.startswith("/") and not path.startswith("/dev/") and Path(path.removesuffix(" (deleted)")).is_file()


def _replace(mapping: Mapping, memory_fd: int) -> None:
    is_file = not mapping.path.startswith(("/dev/", "/memfd:", "/SYSV")) and not mapping.path.endswith(" (deleted)")
    if is_file or mapping.size > MOST_COPIED_BYTES:
        fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
        map_over(mapping, mmap.MAP_PRIVATE, fd, mapping.offset)
    else:
        fd = os.memfd_create("autotune-loader")
        _copy(mapping, memory_fd, fd)
        map_over(mapping, mmap.MAP_SHARED, fd, 0)
    os.close(fd)


def _copy(mapping: Mapping, memory_fd: int, fd: int) -> None:
    os.ftruncate(fd, mapping.size)
    for at in range(0, mapping.size, CHUNK_BYTES):
        # Read by the kernel: pages behind the end of a file would end this process by SIGBUS.
        data = os.pread(memory_fd, min(CHUNK_BYTES, mapping.size - at), mapping.begin + at)
        os.pwrite(fd, data, at)


def map_over(mapping: Mapping, kind: int, fd: int, offset: int) -> None:
    """Put another mapping in the place of one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    place = libc.mmap(mapping.begin, mapping.size, mapping.protection, MAP_FIXED | kind, fd, offset)
    if place != mapping.begin:
        raise OSError(ctypes.get_errno(), f"mmap of {mapping.path}")


def descriptors(first: int = 0) -> list[int]:
    """Numbers of open files from `first` on; none outside Linux."""
    with contextlib.suppress(OSError):
        return sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) >= first)  # noqa: PTH208
    return []
