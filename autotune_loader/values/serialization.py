"""Dataclasses as plain JSON values and back, and as files that a reader never sees half of."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, BinaryIO, Literal, TypeVar, get_args, get_origin, get_type_hints

from autotune_loader.values.statistics import Interval

_Kind = TypeVar("_Kind")


def write_json(file: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write a dataclass as JSON, as `replacing` does; `private` for the owner alone."""
    text = json.dumps(to_plain(file), indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path, private=private) as stream:
        stream.write(f"{text}\n".encode())


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write in the block: a temporary one in the same folder, renamed at the end, and removed by an error.

    Where a link leads is written, and the link stays.
    """
    target, temporary = _places(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Not tempfile: its files are private, and the training job may run as somebody else. The umask decides.
        mode = 0o600 if private else 0o666
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def require_writable(name: str, path: str | os.PathLike[str], example: str = "loader.json") -> None:
    """Find out now, not after a minute of measuring, whether a file can be written, and its folder be made.

    Raises:
        ValueError: it cannot.
    """
    try:
        _touch(path)
    except OSError as error:
        works = what_works(name, example)
        raise ValueError(f"{name}={os.fspath(path)!r} cannot be written ({error.strerror}){works}") from error


def what_works(name: str, example: str) -> str:
    """The end of an error: a file that can be written, in this folder or in that for temporary files; empty if neither can."""
    for find_folder in (str, tempfile.gettempdir):
        with contextlib.suppress(OSError):
            _touch(place := os.path.join(find_folder(), example))  # noqa: PTH118 - no "./" before the name
            return f". Try {name}={place!r}."
    return ""


def _touch(path: str | os.PathLike[str]) -> None:
    trial = _places(path)[1]
    trial = next(folder for folder in trial.parents if folder.exists()) / trial.name  # where folders would be made
    trial.touch(exist_ok=False)
    trial.unlink()


def _places(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where a file is written, and a temporary one beside it.

    Raises:
        OSError: it is a folder, or a device or pipe, in whose place a file must not be put.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is not a file", os.fspath(path))
    return target, target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def to_plain(value: Any) -> Any:
    """Plain JSON values of a dataclass. What JSON cannot say is replaced: an interval's infinite bound becomes null."""
    if hasattr(value, "to_plain"):  # a record that is written with more than its fields
        return to_plain(value.to_plain())
    if is_dataclass(value):
        return to_plain(fields_of(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):  # the name of an unreadable file may hold bytes that are no text
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {to_plain(key): to_plain(each) for key, each in value.items()}
    return [to_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def fields_of(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are, also for `json.dumps(record, default=fields_of)`, which has NaN and infinity, too.

    Raises:
        TypeError: it is no dataclass.
    """
    return {field.name: getattr(record, field.name) for field in fields(record)}


def from_plain(raw: Any, kind: type[_Kind]) -> _Kind:
    """The inverse of `to_plain`: null bounds of intervals become infinite again. Keys that `kind` lacks are ignored.

    Raises:
        ValueError, TypeError: the values do not make a `kind`.
    """
    made: _Kind = _made_of(raw, kind, kind.__name__)
    return made


def _made_of(raw: Any, kind: Any, place: str) -> Any:
    if type(raw) is kind:
        return raw
    origin, inner = _parts_of(kind)
    if kind is Any or (origin is Literal and raw in inner) or (raw is None and NoneType in inner):
        return raw
    if NoneType in inner:
        return _made_of(raw, next(each for each in inner if each is not NoneType), place)
    if hasattr(kind, "from_plain"):  # a finding
        return kind.from_plain(raw)
    if hasattr(kind, "__dataclass_fields__") and isinstance(raw, dict):
        if kind is Interval:
            bounds = (("low", -math.inf), ("high", math.inf))
            raw = {**raw, **{name: bound for name, bound in bounds if raw.get(name, bound) is None}}
        known = _types_of(kind).items()
        return kind(**{name: _made_of(raw[name], its, f"{place}.{name}") for name, its in known if name in raw})
    if hasattr(kind, "_fields") and isinstance(raw, list):  # a NamedTuple
        return kind(*map(_made_of, raw, _types_of(kind).values(), itertools.repeat(place)))
    if origin is tuple and isinstance(raw, list):
        return tuple(_made_of(each, inner[0], f"{place}[{at}]") for at, each in enumerate(raw))
    if origin is dict and isinstance(raw, dict):
        return {key: _made_of(each, inner[1], f"{place}.{key}") for key, each in raw.items()}
    if kind is float and type(raw) is int and raw.bit_length() < sys.float_info.max_exp:
        return float(raw)
    raise ValueError(f"{place}={raw!r:.60} must be of type {kind if origin else kind.__name__}")


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    return get_origin(kind), get_args(kind)


@functools.cache
def _types_of(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
