"""Which line of the user's own code something happens for, however deep in a framework it does."""

from __future__ import annotations

import functools
import os
import re
import site
import sys
import sysconfig
from types import FrameType
from typing import NamedTuple

# os.path and not pathlib: this is imported whenever a Python of a watched script starts.
_PACKAGE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")  # noqa: PTH100, PTH118, PTH120
_DEMO = _PACKAGE + "demo"


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109
    except OSError:  # it is gone
        return os.sep


_STARTED_IN = _folder()
"""Where this process was started: a loader keeps its name where its script changes the folder."""


class Line(NamedTuple):
    """A line of code."""

    file: str
    number: int

    def __str__(self) -> str:
        """As people name it: "train.py:41", "src/data.py:12", "cell:3"."""
        if "ipykernel" in self.file or self.file.startswith("<"):
            return f"cell:{self.number}"
        relative = os.path.relpath(os.path.join(_STARTED_IN, self.file), _STARTED_IN)  # noqa: PTH118
        named = os.path.basename(self.file) if relative.startswith("..") else relative  # noqa: PTH119
        return f"{named}:{self.number}"


def users_line(frame: FrameType | None, *, libraries: bool = False) -> Line | None:
    """The nearest line of the user's own code, or of a library, from a frame outwards; the outermost one if there is none."""
    outermost = None
    while frame is not None:
        line = Line(frame.f_code.co_filename, frame.f_lineno)
        if not (is_ours(line.file) if libraries else is_library(line.file)):
            return line
        if not line.file.startswith("<") and not is_ours(line.file):
            outermost = line  # an installed program, perhaps
        frame = frame.f_back
    return outermost


def is_ours(file: str) -> bool:
    """Whether a file is one of this package, and no script of its own."""
    return file.startswith(_PACKAGE) and not file.startswith(_DEMO)


@functools.lru_cache(maxsize=4096)
def is_library(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to this one."""
    if file.startswith("<"):
        return not re.match(r"<(stdin|string|ipython)", file)
    if "site-packages" in file or "dist-packages" in file or is_ours(file) or file.startswith(_library_folders()):
        return True
    return any(_has_packages(folder) for folder in sys.path if folder and file.startswith(folder + os.sep))


@functools.lru_cache(maxsize=256)
def _has_packages(folder: str) -> bool:
    """Whether packages were installed there, as by `pip install --target`."""
    return os.path.isdir(folder) and any(name.endswith(".dist-info") for name in os.listdir(folder))  # noqa: PTH112, PTH208


@functools.lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    known = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    known |= {os.path.dirname(os.__file__), os.path.join(sys.prefix, "lib")}  # noqa: PTH118, PTH120
    known |= {site.getusersitepackages()}
    return tuple(f"{each}{os.sep}" for each in known)
