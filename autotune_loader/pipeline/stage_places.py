"""What of a dataset is clocked in a worker: functions of the user's, members of transforms, and what reads and decodes.

A place is where a function is looked up when it is called: a class, a module, a list, the dict of an object's attributes.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autotune_loader.pipeline.look import is_users, names_of
from autotune_loader.pipeline.workload import wrapped_datasets

MOST_DEPTH, MOST_MEMBERS = 4, 100
"""Containers of transforms within each other, and members of one."""
ENTRIES = ("__getitem__", "__getitems__", "__iter__", "__next__")
"""Methods of a dataset that name what a sample is made by."""
READERS = (
    "PIL.Image:open", "numpy:load", "numpy:fromfile", "torch:load", "torchvision.io:read_file", "h5py:Dataset.__getitem__",
    "pathlib:Path.read_bytes", "pathlib:Path.read_text",
)  # fmt: skip
DECODERS = (
    "PIL.ImageFile:ImageFile.load", "cv2:imread", "cv2:imdecode", "torchvision.io:decode_image", "torchaudio:load",
    "soundfile:read", "json:load", "json:loads", "zlib:decompress",
)  # fmt: skip
"""By module and name, clocked where they are loaded."""

Line = tuple[str, str]
"""stage, where"""


def places(dataset: Any) -> Iterator[tuple[Any, Any, Line | None]]:
    """What is clocked: owner, name there, and line; None for a line is the class of the first argument."""
    for each in wrapped_datasets(dataset):
        kinds = [kind for kind in type(each).__mro__ if is_users(kind.__module__)]
        methods = [vars(kind).get(name) for kind in kinds for name in ENTRIES]
        entries = [method for method in methods if isinstance(method, types.FunctionType)]
        names = {name for entry in entries for name in names_of(entry.__code__)} - {*ENTRIES}
        spaces: list[tuple[Any, Any]] = [(kind, vars(kind)) for kind in kinds]
        spaces += [(entry.__globals__, entry.__globals__) for entry in entries]
        for owner, held in spaces:
            functions = [(name, held[name]) for name in names if isinstance(held.get(name), types.FunctionType)]
            yield from ((owner, name, (name, where(own))) for name, own in functions if is_users(own.__module__))
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if callable(value) or (isinstance(value, (list, tuple)) and len(value) <= MOST_MEMBERS):
                yield from _of_value(vars(each), name, value, MOST_DEPTH)
    for path in (*READERS, *DECODERS):
        module, *outer, last = path.split(":")[0], *path.split(":")[1].split(".")
        holder: Any = sys.modules.get(module)
        for name in outer:
            holder = getattr(holder, name, None)
        if hasattr(holder, last):
            yield holder, last, ("read" if path in READERS else "decode", "")


def _of_value(owner: Any, name: Any, value: Any, depth: int) -> Iterator[tuple[Any, Any, Line | None]]:
    """A function, an object that is called, or the members of a container of them."""
    members = list(value) if isinstance(value, (list, tuple)) else _members(value)
    if members is not None:
        places = value if isinstance(value, list) else getattr(value, "transforms", None)
        if depth and all(map(callable, members)):
            for index, member in enumerate(members):
                yield from _of_value(places if isinstance(places, list) else None, index, member, depth - 1)
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType, functools.partial)):
        if owner is not None:
            yield owner, name, (_name(value), where(value))
    elif not isinstance(value, type):
        entry = "forward" if isinstance(value, torch.nn.Module) else "__call__"
        kind = next(
            (kind for kind in type(value).__mro__ if isinstance(vars(kind).get(entry), types.FunctionType)), None
        )
        if kind is not None:
            yield kind, entry, None


def _members(value: Any) -> list[Any] | None:
    """Those of a container of transforms; None where it is none."""
    if isinstance(value, torch.nn.Sequential):
        return list(value)
    members = getattr(value, "transforms", None)
    return list(members) if isinstance(members, (list, tuple, torch.nn.ModuleList)) else None


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = str(getattr(function, "__name__", type(function).__name__))
    return "lambda" if name == "<lambda>" else name


def where(function: Any) -> str:
    """The line of a function of the user's, or the name of a library's."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    if code is not None:
        return f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}".strip(".")


def of_class(kind: type, method: Any) -> Line:
    return kind.__name__, where(method) if is_users(kind.__module__) else f"{kind.__module__}.{kind.__qualname__}"


def base(dataset: Any) -> Line:
    """The stage of what is in no other: the method by which the user's own class is asked for samples."""
    for each in wrapped_datasets(dataset):
        for kind in type(each).__mro__:
            entry = next((name for name in ENTRIES if name in vars(kind)), None)
            if entry is not None and is_users(kind.__module__):
                return f"{type(each).__name__}.{entry}", where(vars(kind)[entry])
    return type(dataset).__name__, f"{type(dataset).__module__}.{type(dataset).__qualname__}"
