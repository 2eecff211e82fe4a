"""Running the user's code in another process so that it changes nothing here: bursts of `tune()`, unasked workers.

All but the last three are called once in the new process, before any code of the user's runs in it. A fork needs all of these;
a fresh interpreter inherits nothing, and needs `die_with_parent` and `write_only_in`. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import inspect
import mmap
import multiprocessing
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

from autotune_loader.machine.kernel import memfd

FIRST_OWN_FD = 3
"""Below are stdin, stdout and stderr."""
MOST_COPIED_BYTES = 1 << 30
"""A larger shared mapping becomes private to each process instead: pages are then copied when they are written to."""
COPIED_AT_ONCE_BYTES = 1 << 24
MEMORY = ("/dev/shm/", "/dev/zero", "/memfd:", "/SYSV")  # noqa: S108 - names of mappings
"""How the names of what lies in memory begin."""
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
"""prctl(2)."""
PRESENT, PAGE_FLAGS = 1 << 63, 1 << 63 | 1 << 61 | 1 << 56
"""Of a page: it is in memory; it is a file's, or only one process maps it."""
MADV_POPULATE_WRITE = 23
"""madvise(2); Python's mmap has no name for it."""
MAP_FIXED = 0x10
"""mmap(2); Python's mmap has no name for it."""
LANDLOCK_CREATE, LANDLOCK_ALLOW, LANDLOCK_RESTRICT, LANDLOCK_VERSION, BENEATH = 444, 445, 446, 1, 1
"""landlock(7): its system calls, the flag that asks for the version, and the kind of rule."""
WRITE_FILE, REMOVE_AND_MAKE, REFER, TRUNCATE = 1 << 1, 0x1FF0, 1 << 13, 1 << 14
"""What is refused. Since version 2, renames between folders (REFER) can be allowed; since 3, truncate(2) can be refused."""
FILE_EVENTS = {
    "os.remove": {0: 1}, "os.rename": {0: 2, 1: 3}, "os.rmdir": {0: 1}, "os.mkdir": {0: 2}, "os.truncate": {0: 0},
    "os.link": {0: 2, 1: 3}, "os.symlink": {1: 2},
}  # fmt: skip
"""Audit events that make, change or remove files beside "open": which arguments these are, and the folder that each is in."""

LONGEST_ROOT = 48
"""Characters of the folder's own path that leave room for `/autotune-loader-xxxxxxxx` and for multiprocessing's."""
OTHER_ROOTS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - where a system has its temporary files

AFTER_US = """
import glob, os, shutil, signal, sys
os.read(0, 1)
try:
    os.killpg(int(sys.argv[1]), signal.SIGKILL)
except ProcessLookupError:
    pass
shutil.rmtree(sys.argv[2], ignore_errors=True)
for path in glob.glob(f"/dev/shm/sem.{os.path.basename(sys.argv[2])}-*"):
    os.unlink(path)
"""
"""Its standard input ends with the process that it stands beside."""


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process as soon as the thread that started it has ended.

    `parent` is the ID of that thread's process, known before this one began; None where it surely lives still.
    """
    starter = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter:  # it ended before the call
        os._exit(1)


def die_with_owner() -> None:
    """The same for a process of `multiprocessing`'s, which a fork server may have started for the one that asked for it."""
    die_with_parent()
    owner = multiprocessing.parent_process()
    if owner is None or owner.pid == os.getppid():
        return

    def die_after(sentinel: int) -> None:
        connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_after, args=(owner.sentinel,), name="parent-watch", daemon=True).start()


def own_files(*, writable: bool) -> None:
    """Give this process regular files of its own in place of those that it has inherited, each at its position.

    Where they shall not be `writable`, files open for reading can only be read, and what is written to others goes nowhere.
    """
    for fd in descriptors(FIRST_OWN_FD):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK)
            if not writable and not os.readlink(f"/proc/self/fd/{fd}").startswith(MEMORY):  # noqa: PTH115
                if flags & os.O_ACCMODE == os.O_WRONLY:
                    lead_nowhere(fd)
                    continue
                flags &= ~os.O_ACCMODE
            try:
                _reopen(fd, flags)
            except OSError:  # it may not be opened again
                if not writable:
                    lead_nowhere(fd)


def _reopen(fd: int, flags: int) -> None:
    """Open a file once more, also one that has been unlinked, under the number and at the position that it has."""
    position, inheritable = os.lseek(fd, 0, os.SEEK_CUR), os.get_inheritable(fd)
    again = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
    os.lseek(again, position, os.SEEK_SET)
    os.dup2(again, fd, inheritable=inheritable)
    os.close(again)


def lead_nowhere(fd: int) -> None:
    """Put /dev/null in the place of a descriptor."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.dup2(nowhere, fd, inheritable=os.get_inheritable(fd))
    os.close(nowhere)


def cut_channels(keep: Collection[int]) -> None:
    """Let inherited pipes and sockets lead nowhere: who waits for the end of one waits for all that hold it.

    Descriptors to `keep` stay, and so do the standard three and those of `multiprocessing`'s books.
    """
    owner, frame = multiprocessing.parent_process(), inspect.currentframe()
    while frame is not None and "child_w" not in frame.f_locals:
        frame = frame.f_back
    # The third is the pipe by whose end `Process.join` sees this process end: it is known in a frame of `_launch` alone.
    joined = None if frame is None else frame.f_locals["child_w"]
    books = (getattr(resource_tracker._resource_tracker, "_fd", None), getattr(owner, "_sentinel", None), joined)
    for fd in descriptors(FIRST_OWN_FD):
        if fd in keep or fd in books:
            continue
        with contextlib.suppress(OSError):
            mode = os.fstat(fd).st_mode
            if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
                lead_nowhere(fd)


def leave_fork_server() -> None:
    """Let a fork start a fork server of its own where it needs one: the caller's is none of its children."""
    if (module := sys.modules.get("multiprocessing.forkserver")) is not None:
        module._forkserver._forkserver_pid = None


def write_only_in(places: Iterable[str | os.PathLike[str]]) -> bool:
    """From now on this thread, and all that it starts, changes no file but in these folders and files, if they exist.

    Modes, owners and times of files, and files that are open for writing already, are not covered. Returns whether the kernel
    holds it to that: Linux 5.13 and later, unless a container's profile forbids to ask for it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION)
    if version < 1:
        return False
    refused = WRITE_FILE | REMOVE_AND_MAKE | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    rules = libc.syscall(LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(refused)), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    try:
        for place in places:
            try:
                fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            allowed = refused if stat.S_ISDIR(os.fstat(fd).st_mode) else refused & (WRITE_FILE | TRUNCATE)
            is_added = libc.syscall(LANDLOCK_ALLOW, rules, BENEATH, struct.pack("=Qi", allowed, fd), 0) == 0
            os.close(fd)
            if not is_added:
                return False
        if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            return False
        return bool(libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0)
    finally:
        os.close(rules)


def changed_files(event: str, arguments: Sequence[Any]) -> list[Any]:
    """The files that an audit event says are about to be made, changed or removed; none of other events."""
    if event == "open":
        flags = arguments[2] or 0
        writes = flags & os.O_ACCMODE != os.O_RDONLY or flags & (os.O_CREAT | os.O_TRUNC)
        return [arguments[0]] if writes else []
    return [_named(arguments[at], arguments[folder]) for at, folder in FILE_EVENTS.get(event, {}).items()]


def _named(file: Any, folder: Any) -> Any:
    """A file's name from everywhere: `shutil.rmtree` names it in a folder that it has open; -1 is the working directory."""
    if file is folder or folder == -1:
        return file
    return os.path.join(f"/proc/self/fd/{folder}", os.fsdecode(file))  # noqa: PTH118


def own_shared_memory() -> None:
    """Replace each shared mapping that this process may write to, so that its parent no longer sees what is written.

    A `multiprocessing.Value`, a tensor after `share_memory_()` and a `numpy.memmap` are shared mappings, and so are the
    semaphores of `multiprocessing`: each stays shared among this process and its own children.
    """
    mappings = list(_writable_shared_mappings())
    with Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for mapping in mappings:
            with contextlib.suppress(OSError):
                _replace(mapping, memory.fileno())


class _Mapping(NamedTuple):
    begin: int
    size: int
    offset: int
    protection: int
    path: str


def _writable_shared_mappings() -> Iterator[_Mapping]:
    """Those of this process that lie in memory or in a file; a device's, such as a GPU's, are left alone.

    A line of /proc/self/maps is `address perms offset dev inode pathname`, the last of perms being `s` for shared (proc(5)):

        7f3c4e1d2000-7f3c4e1d3000 rw-s 00000000 00:1b 42   /dev/shm/pym-4711-x (deleted)
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        address, permissions, offset, _, _, *rest = line.split(maxsplit=5)
        if permissions[1] != "w" or permissions[3] != "s" or not rest or not rest[0].startswith("/"):
            continue
        path = rest[0]
        is_device = path.startswith("/dev/") or not Path(path.removesuffix(" (deleted)")).is_file()
        if path.startswith(MEMORY) or not is_device:
            begin, end = (int(each, 16) for each in address.split("-"))
            protection = sum(flag for letter, flag in zip(permissions, (1, 2, 4), strict=False) if letter != "-")
            yield _Mapping(begin, end - begin, int(offset, 16), protection, path)


def _replace(mapping: _Mapping, memory_fd: int) -> None:
    """Put a private mapping of its file, or shared memory of this process's own, in the place of a mapping."""
    is_file = not mapping.path.startswith(MEMORY) and not mapping.path.endswith(" (deleted)")
    if is_file or mapping.size > MOST_COPIED_BYTES:
        fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
        kind, offset = mmap.MAP_PRIVATE, mapping.offset
    else:
        fd, kind, offset = memfd("autotune-loader"), mmap.MAP_SHARED, 0
        os.ftruncate(fd, mapping.size)
        for at in range(0, mapping.size, COPIED_AT_ONCE_BYTES):
            # Read by the kernel: pages behind the end of a file would end this process by SIGBUS.
            data = os.pread(memory_fd, min(COPIED_AT_ONCE_BYTES, mapping.size - at), mapping.begin + at)
            os.pwrite(fd, data, at)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    place = libc.mmap(mapping.begin, mapping.size, mapping.protection, MAP_FIXED | kind, fd, offset)
    os.close(fd)
    if place != mapping.begin:
        raise OSError(ctypes.get_errno(), f"mmap of {mapping.path}")


def require_own_memory() -> None:
    """Raises OSError where `own_memory` does nothing: before Linux 5.14, and in some sandboxes."""
    mmap.mmap(-1, mmap.PAGESIZE).madvise(MADV_POPULATE_WRITE)
    os.close(os.open("/proc/self/pagemap", os.O_RDONLY))


def own_memory() -> None:
    """Copy all that this process shares with the one it was cloned from, as if it had written to each page: 0.5 s for 1 GB.

    A page of memory is 8 bytes of /proc/self/pagemap (proc_pid_pagemap(5)).
    """
    import numpy as np

    page, madvise = mmap.PAGESIZE, ctypes.CDLL(None).madvise
    maps = Path("/proc/self/maps").read_text().splitlines()
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        for address, permissions, *_ in map(str.split, maps):
            begin, end = (int(each, 16) for each in address.split("-"))
            if permissions[1] == "w" and permissions[3] == "p":
                flags = np.frombuffer(os.pread(file.fileno(), (end - begin) // page * 8, begin // page * 8), np.uint64)
                is_shared = np.concatenate(([False], flags & PAGE_FLAGS == PRESENT, [False]))
                for first, after in np.flatnonzero(np.diff(is_shared)).reshape(-1, 2).tolist():
                    size = ctypes.c_size_t((after - first) * page)
                    madvise(ctypes.c_void_p(begin + first * page), size, MADV_POPULATE_WRITE)


def descriptors(first: int = 0) -> list[int]:
    """Numbers of open files from `first` on."""
    return sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) >= first)  # noqa: PTH208


def scratch_root() -> str:
    """The temporary folder of this process, or where its name is too long the first other one in which files can be made.

    The kernel takes 107 characters for a socket's path (unix(7)). Below `TMPDIR`, multiprocessing needs 32 of them for
    `/pymp-xxxxxxxx/listener-xxxxxxxx`, and a folder of our own comes in between: with a longer `TMPDIR` workers would hang.
    Where there is none it is the long one all the same: most start methods need no socket with a path.
    """
    with contextlib.suppress(FileNotFoundError):  # where nothing else is writable /dev/shm may be
        if len(os.fsencode(tempfile.gettempdir())) <= LONGEST_ROOT:
            return tempfile.gettempdir()
    usable = (place for place in OTHER_ROOTS if Path(place).is_dir() and os.access(place, os.W_OK | os.X_OK))
    return next(usable, None) or tempfile.gettempdir()


def name_semaphores(folder: str) -> None:
    """Have multiprocessing name the semaphores of this process after a folder, so that `remove` finds them.

    Its tracker, which would remove them, is killed with the group.
    """
    vars(multiprocessing.current_process())["_config"]["semprefix"] = f"/{Path(folder).name}"


def remove(folder: str) -> None:
    """Remove a folder, and semaphores of processes that were killed which bear its name."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in Path("/dev/shm").glob(f"sem.{Path(folder).name}-*"):  # noqa: S108 - sem_overview(7)
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def ended_with_us(group: int, folder: str) -> Iterator[None]:
    """Should this process be killed within the block, another one kills a process group and does what `remove` does.

    The kernel's signal (`die_with_parent`) reaches one process, not those that it has started, and it leaves files behind.
    """
    command, nowhere = [sys.executable, "-I", "-S", "-c", AFTER_US, str(group), folder], subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as guard:
        try:
            yield
        finally:
            guard.kill()
