"""What a worker is at, from the frames of its main thread: a stage that the user knows, and the line.

    tracing ─► torch's Subset, ConcatDataset ─► the user's __getitem__ ─► the user's function ─► PIL.Image.convert
    boundary   skipped                          site, unless a later       names the stage       unless what is called
                                                frame is the user's                              reads or decodes

A container of transforms is known by what it is doing, not by its class: a frame that holds one of `transforms` in a local
variable is applying it. So nothing of the user's is wrapped, and a lambda or a partial is seen like any other member.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import opcode
import re
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Line = tuple[str, str]
"""stage, where"""
UNKNOWN: Line = ("", "")
"""Between two lines of the user's: the time before was theirs, but which one's is not to be told."""
_BOUNDARY = "autotune_loader.pipeline.tracing"
_OURS = ("autotune_loader.pipeline.", "autotune_loader.probe.", "autotune_loader.live.")
_WRAPPERS = "torch.utils.data."  # its datasets pass calls on, too; they are named only where nothing else is
_MACHINERY = ("torch.nn.modules.module", "functools", "contextlib", "torch.utils._contextlib")
"""They only pass a call on."""
_LIBRARY_ROOTS = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_ENTRANCES = {"__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "forward"}
"""Not telling as a stage's name."""
_RESUME = opcode.opmap.get("RESUME")  # the first instruction of a function, from Python 3.11 on
_KINDS = (
    ("read", re.compile(r"(^|\.)PIL\.Image\.open$")),
    (
        "decode",
        re.compile(
            r"^PIL\.\w+\.(convert|load|load_prepare|draft|tobytes)$|decod|decompress|imread|pixel_array|\bloads$"
        ),
    ),
    ("read", re.compile(r"(^|\.)(open|pread|preadv|read|readinto|read_\w+|readlines?|recv\w*|load|memmap|fromfile)$")),
    (
        "read",
        re.compile(r"^(h5py|zarr|lmdb|tarfile|zipfile|fsspec|s3fs|gcsfs|boto3|botocore|requests|urllib3|http|ssl)\."),
    ),
)


def line_of(frame: FrameType | None, after: bool = False) -> Line | None:
    """Stage and line of a thread that makes batches; None where it makes none, `UNKNOWN` where it cannot be told.

    Args:
        frame: the thread's innermost.
        after: the time that is asked about has passed just before. Where a function was only just entered it was its
            caller's, and no call on that line had its part in it.
    """
    entered = after and frame is not None and _has_just_begun(frame)
    if entered and frame is not None:
        frame = frame.f_back
    chain: list[FrameType] = []
    while frame is not None and not _is_boundary(frame):
        chain.append(frame)
        frame = frame.f_back
    if frame is None:
        return None
    frames = [each for each in reversed(chain) if not _module(each).startswith(_OURS)]
    frames = [each for each in frames if not _module(each).startswith(_WRAPPERS)] or frames
    if frame.f_code.co_name == "__call__":
        return "collate", _where(frames, needs_user=True) or "torch's default_collate"
    if not frames:
        return UNKNOWN
    for holder in reversed(frames):
        member = _member(holder)
        if member is not None:
            inside = frames[frames.index(holder) + 1 :]
            return _numbered_name(*member), _where(inside, needs_user=True) or _origin(member[0])
    name = _named(frames, calls=not entered)
    return (name, _where(frames)) if name else UNKNOWN


def _has_just_begun(frame: FrameType) -> bool:
    """Whether a function was entered and has run nothing yet, so that what took time lies before it."""
    if _RESUME is None:  # before Python 3.11
        return frame.f_lasti <= 0
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _RESUME


def _is_boundary(frame: FrameType) -> bool:
    code = frame.f_code
    if _module(frame) != _BOUNDARY:
        return False
    return code.co_name in ("__getitem__", "__getitems__", "_epoch") or "fetch_end" in code.co_varnames


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


@functools.cache
def _is_library(path: str) -> bool:
    return (
        "site-packages" in path or "dist-packages" in path or path.startswith((*_LIBRARY_ROOTS, "<frozen", "<string>"))
    )


def _site(frames: Sequence[FrameType], needs_user: bool = False) -> int | None:
    """Position of the innermost frame of the user's; of the outermost frame where all is a library's."""
    own = [i for i, each in enumerate(frames) if not _is_library(each.f_code.co_filename)]
    return own[-1] if own else None if needs_user or not frames else 0


def _where(frames: Sequence[FrameType], needs_user: bool = False) -> str:
    site = _site(frames, needs_user)
    if site is None:
        return ""
    frame, callee = frames[site], _callee(frames, site)
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" + (f", {callee}" if callee else "")


def _callee(frames: Sequence[FrameType], site: int) -> str:
    """What the user's line calls: a library's function, or the call as it is written there."""
    called = next((each for each in frames[site + 1 :] if _module(each) not in _MACHINERY), None)
    return _label(called) if called is not None else _call_text(frames[site].f_code, frames[site].f_lasti)


def _label(frame: FrameType) -> str:
    name, own = frame.f_code.co_name, None
    if name in _ENTRANCES or name == "__init__":
        own = _self_of(frame)
    return f"{_module(frame)}.{name if own is None else type(own).__name__}"


@functools.lru_cache(maxsize=4096)
def _call_text(code: CodeType, lasti: int) -> str:
    """What is called at an instruction, as it is written, such as "time.sleep"; "" where the source does not tell."""
    if sys.version_info < (3, 11) or lasti < 0:
        return ""
    line, end_line, column, end = next(itertools.islice(code.co_positions(), lasti // 2, None), (None,) * 4)
    if line is None or line != end_line:
        return ""
    text = linecache.getline(code.co_filename, line).encode()[column:end].decode(errors="replace")
    called = re.match(r"([\w.]+)\(", text)
    return called[1] if called else ""


def _named(frames: Sequence[FrameType], calls: bool) -> str:
    """What a user calls it; "" where only a call could tell, and `calls` says that there was none."""
    site = _site(frames)
    assert site is not None
    last = frames[-1]
    called = [_label(each) for each in frames[site + 1 :]]
    called += [_call_text(last.f_code, last.f_lasti)] if calls else []
    for text in called:
        for kind, pattern in _KINDS:
            if pattern.search(text):
                return kind
    for each in frames[: site + 1]:
        name = each.f_code.co_name
        if name == "<lambda>":
            return "lambda"
        if name not in _ENTRANCES and not name.startswith("<"):
            return name
    if not calls:
        return ""
    callee = _callee(frames, site)
    return callee.rpartition(".")[2] if callee else f"{_class_of(frames[0])}{frames[0].f_code.co_name}"


def _class_of(frame: FrameType) -> str:
    own = _self_of(frame)
    return "" if own is None else f"{type(own).__name__}."


def _self_of(frame: FrameType) -> Any:
    """The object whose method it is, as far as a first argument tells."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


def _member(frame: FrameType) -> tuple[Any, list[Any]] | None:
    """The member that a container of transforms is applying in this frame, and all of them."""
    code = frame.f_code
    sequential = _module(frame) == "torch.nn.modules.container" and code.co_name == "forward"
    if not sequential and "transforms" not in code.co_names and "transforms" not in code.co_varnames:
        return None
    variables = dict(frame.f_locals)
    own = variables.pop(code.co_varnames[0], None) if code.co_argcount else None
    held = getattr(own, "__dict__", {})
    members = variables.pop("transforms", None) or held.get("transforms") or held.get("_modules", {}).get("transforms")
    members = list(held["_modules"].values()) if sequential else members
    if not isinstance(members, Iterable) or isinstance(members, str | bytes | dict):
        return None
    members = list(members)
    for value in reversed(list(variables.values())):
        if any(value is each for each in members):
            return value, members
    return None


def _numbered_name(member: Any, members: Sequence[Any]) -> str:
    """The member's name, with its number where several bear it."""
    name = _name(member)
    alike = [each for each in members if _name(each) == name]
    position = next(i for i, each in enumerate(alike) if each is member)
    return name if not position else f"{name} ({position + 1})"


def _name(member: Any) -> str:
    while isinstance(member, functools.partial):
        member = member.func
    name = getattr(member, "__name__", None) or type(member).__name__
    return "lambda" if name == "<lambda>" else str(name)


def _origin(member: Any) -> str:
    while isinstance(member, functools.partial):
        member = member.func
    code = getattr(member, "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    kind = member if hasattr(member, "__name__") else type(member)
    return f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', _name(member))}".lstrip(".")
