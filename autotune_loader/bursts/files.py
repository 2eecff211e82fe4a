"""Which files a burst may change, what it is told so that it need not, and how a refused write becomes a sentence.

    scratch     a folder of the process's own, which is its TMPDIR and is removed with it
    caches      of libraries and compilers: what they keep there is nobody's work
    devices     /dev (GPUs, shared memory, null), /proc

All else is refused by the kernel (Landlock). Where it cannot, what Python and `torch.save` write is refused, and that is told.
What is only read, but opened for writing, as NumPy's maps and SQLite's databases are, is opened so that reading is enough.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import getpass
import os
import re
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from autotune_loader.machine.elsewhere import changed_files, write_only_in

CACHES = {
    "XDG_CACHE_HOME": "~/.cache", "TRITON_CACHE_DIR": "~/.triton", "CUDA_CACHE_PATH": "~/.nv", "CUPY_CACHE_DIR": "~/.cupy",
    "MPLCONFIGDIR": "~/.config/matplotlib",
}  # fmt: skip
"""Folders of caches: the variable that names one, and where it is otherwise."""
NAMED = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"),
    *("NUMBA_CACHE_DIR", "CUDA_MPS_PIPE_DIRECTORY"),
)
"""Variables that name further folders; where they are not set these are in the first of the caches, or among the devices."""
DEVICES = ("/dev", "/proc", "/tmp/nvidia-mps")  # noqa: S108 - where NVIDIA's service has its pipes
TRACKERS_OFF = {
    "WANDB_MODE": "disabled", "SWANLAB_MODE": "disabled", "NEPTUNE_MODE": "debug",
    "COMET_AUTO_LOG_DISABLE": "1", "CLEARML_OFFLINE_MODE": "1",
}  # fmt: skip
"""What tells experiment trackers to record nothing."""
NOT_HELD = (
    "This kernel has no Landlock, so only what Python and torch.save write is refused, not what SQLite, other libraries in C "
    "and programs write: leave saving and logging out of the step and the dataset."
)
IN_TEXT = re.compile(
    r"permission denied|can(?:no|')t be opened|(?:unable|failed) to (?:open|create|write)", re.IGNORECASE
)
"""How libraries in C and C++ say that they could not open a file: torch.save, h5py, OpenCV, and workers' tracebacks."""
REFUSED = (errno.EACCES, errno.EXDEV)
"""The second is what renames between folders get."""
DATABASE, DATABASE_REFUSED = (
    "a database",
    re.compile("attempt to write a readonly database|unable to open database file"),
)
"""How SQLite says so of a file that it does not name."""
PATHS = re.compile(
    r"'([^'\n]+)'|\"([^\"\n]+)\"|path: (\S+)|[Ff]ile (\S*[./]\S*)|(?:^|: )([^\s:'\"]*[./][^\s:'\"]*): Permission denied"
)
WAL_HEADER = re.compile(rb"SQLite format 3\0..\x02\x02", re.DOTALL)
"""How a database begins of which SQLite keeps an index of recent changes beside it: readers write that, too."""
MOST_AT_TOP, MOST_LINKS = 10_000, 1000
"""Entries of the temporary folder that scratch has, and of the folders there: 1,000 take 20 ms to make and remove."""
OWN_NAMES = ("autotune-loader-", "pymp-", "mlflow", "torchinductor")
"""How names begin that are made in a scratch folder itself, or that another process has there."""
STEP_WRITES = "{step} writes {path}, but trials do not change your files: leave saving and logging out of the step"
NEW_FILE = "{sample} writes {path}, but trials do not change your files: fill the cache first"
OLD_FILE = (
    "{sample} changes {path}, or opens it as if to, but trials do not change your files: what is only read is to be opened for "
    'reading (mode="r" or "rb"; a map with access=mmap.ACCESS_READ; LMDB with readonly=True, lock=False), and what writes is '
    "to be left out of the dataset"
)
OLD_DATABASE = (
    "{sample} changes a database, or opens it as if to, but trials do not change your files: what is only read is to be opened "
    "by sqlite3.connect('file:PATH?mode=ro&immutable=1', uri=True), and what writes is to be left out of the dataset"
)


def environment(scratch: str) -> dict[str, str]:
    """The variables of a process whose temporary folder is `scratch`: caches stay where they are, trackers are off.

    A cache that is not there yet, and that may not be made there, is made in `scratch`.
    """
    compiled = f"{scratch}/torchinductor"  # which follows TMPDIR, so that every process would compile anew
    with contextlib.suppress(KeyError, OSError):  # a container without a name for this user
        folder = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
        compiled = folder if os.path.isdir(folder) else compiled  # noqa: PTH112
    folders = _caches()
    present = tuple(folder + os.sep for folder in folders.values() if os.path.isdir(folder))  # noqa: PTH112
    missing = [name for name, folder in folders.items() if not f"{folder}{os.sep}".startswith(present)]
    return {
        "TORCHINDUCTOR_CACHE_DIR": compiled,
        **os.environ,
        **{name: f"{scratch}/{name.lower()}" for name in missing},
        **TRACKERS_OFF,
        "AUTOTUNE_LOADER_BURST": "1",  # `watch` leaves its loaders alone
        "MLFLOW_TRACKING_URI": f"file://{scratch}/mlflow",
        "TMPDIR": scratch,
    }


def link_temporary_files(scratch: str) -> None:
    """Let `scratch` have what the temporary folder of this process has now: folders of its own, and links to files.

    What is there is found by `tempfile.gettempdir()`, too, and read; what is made there is made in scratch. An empty file, as
    of a lock, is one of its own. Of a folder with more files than fit there is a link to the folder. Who removes scratch
    removes links alone.
    """
    left, folders = MOST_LINKS, deque([(tempfile.gettempdir(), Path(scratch))])
    while folders:
        source, target = folders.popleft()
        is_top = target == Path(scratch)
        with contextlib.suppress(OSError):  # of another user, or gone
            with os.scandir(source) as found:
                entries = list(islice(found, MOST_AT_TOP if is_top else left + 1))
            if len(entries) > left and not is_top:
                target.symlink_to(source)
                continue
            left -= 0 if is_top else len(entries)
            target.mkdir(exist_ok=True)
            for entry in entries:
                place = target / entry.name
                if is_top and entry.name.startswith(OWN_NAMES):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, place))
                elif entry.is_file(follow_symlinks=False) and not entry.stat().st_size:
                    place.touch()
                else:
                    place.symlink_to(entry.path)


def places() -> list[str]:
    """Where files may be changed: scratch, caches, devices."""
    named = [os.environ[name] for name in ("TMPDIR", *NAMED) if os.environ.get(name)]
    return [*named, *DEVICES, *_caches().values()]


def _roots() -> tuple[str, ...]:
    return tuple(os.path.realpath(each) + os.sep for each in places())


def _caches() -> dict[str, str]:
    return {name: os.environ.get(name) or os.path.expanduser(folder) for name, folder in CACHES.items()}  # noqa: PTH111


@functools.cache
def confine() -> list[str]:
    """From now on this process changes files in `places()` only; a note where only a part of that could be had.

    Called before torch and the user's classes are imported: threads that run already would not be held. A spawned worker is
    held by what started it, and calls this for the rest.
    """
    roots = _roots()

    def is_refused(path: Any) -> bool:
        is_path = isinstance(path, (str, bytes, os.PathLike))
        return is_path and not f"{os.path.realpath(os.fsdecode(path))}{os.sep}".startswith(roots)

    def check(path: Any) -> None:
        if is_refused(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for path in changed_files(event, arguments):
            check(path)

    is_held = write_only_in(places())
    if not is_held:
        sys.addaudithook(hook)  # for good, as Python has no way back
    import torch

    save: Callable[..., Any] = torch.save

    @functools.wraps(save)
    def checked(value: Any, f: Any, *args: Any, **options: Any) -> Any:
        check(f)  # it opens names in C++, which raises no audit event, and an error without the name
        return save(value, f, *args, **options)

    torch.save = checked  # type: ignore[assignment]
    _map_privately(is_refused)
    with contextlib.suppress(ImportError):  # a Python without SQLite
        _read_databases(is_refused)
    return [] if is_held else [NOT_HELD]


def _map_privately(is_refused: Callable[[Any], bool]) -> None:
    """Let NumPy map files so that what is written stays in this process: it maps for writing unless it is told a mode."""
    import numpy as np

    make: Callable[..., Any] = np.memmap.__new__

    def made(kind: Any, filename: Any, dtype: Any = np.uint8, mode: Any = "r+", *args: Any, **options: Any) -> Any:
        is_private = mode in ("r+", "readwrite") and is_refused(filename)
        return make(kind, filename, dtype, "c" if is_private else mode, *args, **options)

    np.memmap.__new__ = staticmethod(made)  # type: ignore[assignment]


def _read_databases(is_refused: Callable[[Any], bool]) -> None:
    """Let Python open databases in WAL mode, if all changes are in them, without the files that SQLite makes beside them."""
    import sqlite3

    connect: Callable[..., Any] = sqlite3.connect

    @functools.wraps(connect)
    def connected(database: Any, *args: Any, uri: bool = False, **options: Any) -> Any:
        is_uri = uri and isinstance(database, str) and database.startswith("file:")
        with contextlib.suppress(OSError, TypeError, ValueError):
            name, mark, query = database.partition("?") if is_uri else (database, "", "")
            path = os.path.realpath(unquote(name[5:]) if is_uri else os.fsdecode(name))
            has_changes = os.path.exists(f"{path}-wal") and os.path.getsize(f"{path}-wal")  # noqa: PTH110, PTH202
            if is_refused(path) and not has_changes:
                with open(path, "rb") as file:  # noqa: PTH123
                    if WAL_HEADER.match(file.read(20)):
                        database, uri = f"file:{quote(path)}?{query}{mark and '&'}immutable=1", True
        return connect(database, *args, uri=uri, **options)

    sqlite3.connect = sqlite3.dbapi2.connect = connected


def sample_writes(sample: str, path: str) -> str:
    """What is said of a sample, or a collate_fn, that was kept from changing a file, or from opening it as if to change it."""
    words = OLD_DATABASE if path == DATABASE else OLD_FILE if os.path.exists(path) else NEW_FILE  # noqa: PTH110
    return words.format(sample=sample, path=path)


def refused_path(error: BaseException | None) -> str | None:
    """The file that a burst was kept from changing, as far as an exception tells; None where it was something else.

    Landlock does not show in access(2): a folder that looks writable, and in which nothing can be written, was refused by it.
    An error from a worker has the text of a traceback only.
    """
    roots = _roots()
    while error is not None:
        if DATABASE_REFUSED.search(str(error)):
            return DATABASE
        for path in _paths_in(error):
            folder, real = os.path.dirname(path) or ".", os.path.realpath(path)  # noqa: PTH120
            looks_writable = os.access(path if os.path.exists(path) else folder, os.W_OK)  # noqa: PTH110
            if looks_writable and not f"{real}{os.sep}".startswith(roots):
                relative = os.path.relpath(real)
                return real if relative.startswith("..") else relative  # as the user would write it
        error = error.__cause__ or error.__context__
    return None


def _paths_in(error: BaseException) -> Iterator[str]:
    names = [getattr(error, name, None) for name in ("filename", "filename2")]
    if isinstance(error, OSError) and error.errno in REFUSED:
        yield from (os.fsdecode(name) for name in names if isinstance(name, (str, bytes)))
    for line in str(error).splitlines():
        if IN_TEXT.search(line):
            yield from (next(filter(None, found.groups())) for found in PATHS.finditer(f"{line} "))
