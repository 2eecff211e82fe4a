"""Copies of the user's objects for bursts in the user's own process: all of it but what cannot be copied, and that is told."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from autotune_loader.probe.archive import TooLargeError, size_of
from autotune_loader.values.secrets import cause_without_secrets, without_secrets

# More objects than this that cannot be copied, and the whole is given up.
MOST_SHARED = 16
# How deep an object that cannot be copied is looked for, in attributes and items.
SEARCH_DEPTH = 6


class NotCopiedError(Exception):
    """A value cannot be taken apart."""


def copied(parts: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Deep copies of parts that may refer to each other, and the paths of what they still share with the originals.

    Locks, sockets, open files and the like cannot be copied; they are shared, everything around them is copied.

    Args:
        parts: values by name, copied as one, so that an optimizer keeps pointing at its model's parameters.

    Raises:
        NotCopiedError: not to be copied even in part.
    """
    memo, paths = dict[int, Any](), list[str]()
    try:
        while (fault := fault_in("", parts, memo)) is not None:
            path, value = fault
            if value is parts or len(paths) >= MOST_SHARED:
                raise NotCopiedError(f"{', '.join(paths) or 'it'} cannot be copied")
            if _is_trained(value):  # never shared; torch copies some modules that it refuses to pickle
                copy.deepcopy(value, memo)
            else:
                memo[id(value)] = value
                paths.append(path)
        return {
            name: _copied_function(value, memo) if isinstance(value, types.FunctionType) else copy.deepcopy(value, memo)
            for name, value in parts.items()
        }, paths
    except NotCopiedError:
        raise
    except Exception as error:
        raise NotCopiedError(without_secrets(str(error))) from cause_without_secrets(error)


def fault_in(
    path: str, value: Any, shared: dict[int, Any], max_bytes: int | None = None, depth: int = SEARCH_DEPTH
) -> tuple[str, Any] | None:
    """The deepest part of a value that cannot be pickled by itself, with its path; None when there is none.

    Args:
        path: of the value, such as "dataset".
        value: what is looked through.
        shared: objects by id that need not be pickled.
        max_bytes: what is larger is not looked at further: large is not at fault.
        depth: how deep it is looked for.
    """
    try:
        size_of(value, max_bytes, shared)
    except TooLargeError:
        return None
    except Exception:
        for name, part in _parts_of(value) if depth else ():
            fault = fault_in(f"{path}.{name}" if path else name, part, shared, max_bytes, depth - 1)
            if fault is not None:
                return fault
        return path, value
    return None


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(index), part) for index, part in enumerate(value))
    elif isinstance(value, types.FunctionType):
        yield from ((name, cell.cell_contents) for name, cell in _cells(value))
    else:
        yield from dict(getattr(value, "__dict__", {})).items()


def _copied_function(function: types.FunctionType, memo: dict[int, Any]) -> Callable[..., Any]:
    """The function over copies of the models and optimizers that it closes over or finds in its module.

    A `train_step` often reaches its optimizer in this way; deepcopy would hand back the very same function.
    """
    cells = tuple(types.CellType(copy.deepcopy(cell.cell_contents, memo)) for _, cell in _cells(function))
    names = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    trained = {name: copy.deepcopy(value, memo) for name, value in names.items() if _is_trained(value)}
    if not trained and not cells:
        return function
    space = {**function.__globals__, **trained} if trained else function.__globals__
    closure = cells if function.__closure__ else None
    twin = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _is_trained(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))


def _cells(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    return list(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
