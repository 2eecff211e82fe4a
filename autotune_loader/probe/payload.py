"""The workload on its way to the probe process: archived in two halves, and the part at fault named where that fails.

The data side is unpickled afresh for every burst that fetches in the main process: a dataset that caches, or that opens a
file on first use, must not hand its filled cache or its open handle to the workers of the next burst. An optimizer travels
with the model whose parameters it points at.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.archive import Archive, TooLargeError
from autotune_loader.probe.copying import fault_in
from autotune_loader.probe.forking import in_fork
from autotune_loader.values.secrets import without_secrets

# In a part that does not travel no more than this is looked through for the object at fault.
SEARCHED_BYTES = 1 << 26
# A fork inherits locks that other threads hold; the largest payload takes about 10 s.
PICKLING_DEADLINE_S = 40.0


class NotSentError(Exception):
    """A part of the workload cannot travel to the probe process, or is too large to; `part` names it."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(f"{part} {without_secrets(reason)}")
        self.part = part


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A workload as two files without names, which the probe process maps."""

    data: Archive
    training: Archive

    @classmethod
    def of(cls, workload: Workload, max_bytes: int) -> Payload:
        """Archive both halves, of `max_bytes` each at most.

        Pickling runs code of the user's (`__getstate__` may close a file), so it runs in a fork, which is then gone. A process
        that uses CUDA cannot do so; there it runs in this one.

        Raises:
            NotSentError: naming the attribute at fault, such as `dataset.lock`, or the half that is too large.
        """
        payload = cls(data=Archive(), training=Archive())

        def write() -> bytes:
            return msgspec.json.encode(_write(workload, payload, max_bytes))

        answer = write() if torch.cuda.is_initialized() else in_fork(write, PICKLING_DEADLINE_S)
        if isinstance(answer, str):
            fault: tuple[str, str] | None = ("the workload", f"cannot be pickled: {answer}")
        else:
            fault = msgspec.json.decode(answer, type=tuple[str, str] | None)
        if fault is not None:
            payload.close()
            raise NotSentError(*fault)
        return payload

    def close(self) -> None:
        """Free the files; the processes that have them mapped keep what they have."""
        self.data.close()
        self.training.close()


def _write(workload: Workload, payload: Payload, max_bytes: int) -> tuple[str, str] | None:
    """Fill both files; the part that is not in its file, and why."""
    halves: tuple[tuple[Archive, Any, tuple[str, ...]], ...] = (
        (payload.data, workload.data, ("dataset", "collate_fn", "sampler", "batch_sampler")),
        (payload.training, workload.training, ("model", "train_step", "loss_fn", "optimizer")),
    )
    for archive, side, names in halves:
        parts = {name: getattr(side, name) for name in names}
        with _unimportable_modules_by_value(parts.values()):
            try:
                archive.write(side, max_bytes)
            except TooLargeError as error:
                return f"the {names[0]}", f"is {error}"
            except Exception as error:
                path, _ = fault_in("", parts, {}, SEARCHED_BYTES) or ("", None)
                return path or type(side).__name__, f"cannot be pickled: {error}"
    return None


@contextlib.contextmanager
def _unimportable_modules_by_value(parts: Iterable[Any]) -> Iterator[None]:
    """Let cloudpickle send classes by value whose module another process could not import (a plugin, a test file)."""
    import cloudpickle

    names = {getattr(part, "__module__", None) or type(part).__module__ for part in parts if part is not None}
    with contextlib.ExitStack() as until:
        for name in names:
            if name in sys.modules and not _is_importable(name):
                cloudpickle.register_pickle_by_value(sys.modules[name])
                until.callback(cloudpickle.unregister_pickle_by_value, sys.modules[name])
        yield


def _is_importable(name: str) -> bool:
    try:
        return name == "__main__" or importlib.util.find_spec(name) is not None  # cloudpickle sends __main__ by value
    except (ImportError, ValueError, AttributeError):
        return False
