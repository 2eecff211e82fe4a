"""Objects by value for another process: classes of a script or a notebook cell travel too, and can be pickled on from there.

cloudpickle makes such a class anew in the other process, where no module holds it. A worker pickles its batches by plain
pickle, which looks a class up in its module: so it is put there.
"""

from __future__ import annotations

import io
import pickle
import sys
import types
from typing import Any

import cloudpickle
import torch


class ByValue:
    """Is made anew in a worker, of its attributes: these are what its constructor takes, in that order."""

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return _made, (cloudpickle.dumps((type(self), *vars(self).values())),)


def _made(data: bytes) -> Any:
    kind, *arguments = pickle.loads(data)
    put_classes_into_modules()
    return kind(*arguments)


def put_classes_into_modules() -> None:
    """Let plain pickle find the classes that cloudpickle has made in this process, under their own names."""
    # There is no public list of them. Where this one is missing, classes of a script do not travel back from workers.
    made = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    for each in list(made.values()):
        name = getattr(each, "__module__", None)
        if isinstance(each, type) and isinstance(name, str) and "<locals>" not in each.__qualname__:
            _put(each, sys.modules.setdefault(name, types.ModuleType(name)))


def _put(made: type, owner: Any) -> None:
    *outer, last = made.__qualname__.split(".")
    for name in outer:
        if not hasattr(owner, name):
            setattr(owner, name, types.SimpleNamespace())
        owner = getattr(owner, name)
    if not hasattr(owner, last):
        setattr(owner, last, made)


def why_not_pickled(batch: Any) -> str | None:
    """Why a worker could not send a batch, as plain pickle says it; None where it could. Tensors are not copied."""
    try:
        _WithoutTensors(io.BytesIO()).dump(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class _WithoutTensors(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        is_tensor = isinstance(value, (torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage))
        return (int, ()) if is_tensor else NotImplemented
