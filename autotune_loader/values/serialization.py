"""Dataclasses as plain JSON values and back, and as files that a reader never sees half of."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from autotune_loader.values.statistics import Interval

_Kind = TypeVar("_Kind")
_INTERVAL_KEYS = {field.name for field in fields(Interval)}  # by which an interval is known among plain values


def write_json(file: Any, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write a dataclass as JSON, through a temporary one in the same folder and a rename; `private` for the owner alone.

    Where a link leads is written, and the link stays.
    """
    import msgspec

    target, temporary = _places(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(to_plain(file)), indent=2)
    try:
        # Not tempfile: its files are private, and the training job may run as somebody else. The umask decides.
        mode = 0o600 if private else 0o666
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            stream.write(text + b"\n")
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def require_writable(name: str, path: str | os.PathLike[str], example: str = "loader.json") -> None:
    """Find out now, not after a minute of measuring, whether a file can be written.

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
            return f"; {name}={place!r} would work"
    return ""


def _touch(path: str | os.PathLike[str]) -> None:
    trial = _places(path)[1]
    trial.touch(exist_ok=False)
    trial.unlink()


def _places(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Where a file is written, and a temporary one beside it.

    Raises:
        OSError: it is a folder, or a device or pipe, in whose place a file must not be put.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "it is no file", os.fspath(path))
    return target, target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def to_plain(value: Any) -> Any:
    """Plain JSON values of a dataclass. What JSON cannot say is replaced: an interval's infinite bound becomes null."""
    import msgspec

    # What is no dataclass says itself how it is written, and read.
    return _sayable(msgspec.to_builtins(value, enc_hook=lambda each: each.to_plain()))


def from_plain(raw: Any, kind: type[_Kind]) -> _Kind:
    """The inverse of `to_plain`: null bounds of intervals become infinite again.

    Raises:
        msgspec.ValidationError: the values do not make a `kind`.
    """
    import msgspec

    return msgspec.convert(_with_infinities(raw), kind, dec_hook=lambda own, plain: own.from_plain(plain))


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):  # the name of an unreadable file may hold bytes that are no text
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_sayable(key): _sayable(each) for key, each in value.items()}
    return [_sayable(each) for each in value] if isinstance(value, (list, tuple)) else value


def _with_infinities(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_infinities(each) for each in value]
    if not isinstance(value, dict):
        return value
    restored = {key: _with_infinities(each) for key, each in value.items()}
    if restored.keys() >= _INTERVAL_KEYS:
        for bound, unbounded in (("low", -math.inf), ("high", math.inf)):
            restored[bound] = unbounded if restored[bound] is None else restored[bound]
    return restored
