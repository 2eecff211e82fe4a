"""Objects by value for another process: classes of a script or a notebook cell travel too, and can be pickled on from there.

cloudpickle makes such a class anew in the other process, where no module holds it. A worker pickles its batches by plain
pickle, which looks a class up in its module: so it is put there.
"""

from __future__ import annotations

import copyreg
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
        module = getattr(each, "__module__", None)
        if isinstance(each, type) and isinstance(module, str) and "<locals>" not in each.__qualname__:
            owner: Any = sys.modules.setdefault(module, types.ModuleType(module))
            if module == "__mp_main__":  # the script, of which a worker knows as little
                cloudpickle.register_pickle_by_value(owner)
            *outer, last = each.__qualname__.split(".")
            for name, value in [*((name, types.SimpleNamespace()) for name in outer), (last, each)]:
                if not hasattr(owner, name):
                    setattr(owner, name, value)
                owner = getattr(owner, name)


def why_not_pickled(batch: Any) -> str | None:
    """Why a worker could not send a batch, as plain pickle says it; None where it could. Tensors are not copied."""
    holders = torch.Tensor, torch.UntypedStorage, torch.storage.TypedStorage  # of bytes, whatever class a tensor is of
    pickler = pickle.Pickler(io.BytesIO())
    pickler.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(holders, lambda holder: (int, ()))}
    try:
        pickler.dump(batch)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
