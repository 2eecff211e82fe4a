"""Which files a burst may change, what it is told so that it need not, and how a refused write becomes a sentence.

    scratch     a folder of the process's own, which is its TMPDIR and is removed with it
    caches      of libraries and compilers: what they keep there is nobody's work
    devices     /dev (GPUs, shared memory, null), /proc

All else is refused by the kernel (Landlock). Where it cannot, what Python and `torch.save` write is refused, and that is told.
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
from collections.abc import Callable, Iterator
from typing import Any

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
READ_ONLY = "readonly database"
"""How SQLite, which then goes on reading, says so of a file that it does not name."""
PATHS = re.compile(r"'([^'\n]+)'|\"([^\"\n]+)\"|path: (\S+)|[Ff]ile (\S*[./]\S*)")
STEP_WRITES = "{step} writes {path}, but trials do not change your files: leave saving and logging out of the step"
SAMPLE_WRITES = "{sample} writes {path}, but trials do not change your files: fill the cache first"


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


def places() -> list[str]:
    """Where files may be changed: scratch, caches, devices."""
    named = [os.environ[name] for name in ("TMPDIR", *NAMED) if os.environ.get(name)]
    return [*named, *DEVICES, *_caches().values()]


def _roots() -> tuple[str, ...]:
    return tuple(os.path.realpath(each) + os.sep for each in places())


def _caches() -> dict[str, str]:
    return {name: os.environ.get(name) or os.path.expanduser(folder) for name, folder in CACHES.items()}  # noqa: PTH111


def confine() -> list[str]:
    """From now on this process changes files in `places()` only; a note where only a part of that could be had.

    Called before torch and the user's classes are imported: threads that run already would not be held.
    """
    roots = _roots()

    def check(path: Any) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            real = os.path.realpath(os.fsdecode(path))
            if not f"{real}{os.sep}".startswith(roots):
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
    return [] if is_held else [NOT_HELD]


def refused_path(error: BaseException | None) -> str | None:
    """The file that a burst was kept from changing, as far as an exception tells; None where it was something else.

    Landlock does not show in access(2): a folder that looks writable, and in which nothing can be written, was refused by it.
    An error from a worker has the text of a traceback only.
    """
    roots = _roots()
    while error is not None:
        if READ_ONLY in str(error):
            return "to a database"
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
