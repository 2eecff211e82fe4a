"""What the workers of one iterator are given: the user's objects, and the arguments of torch's worker loop.

A forked worker has it as it was when the iterator began. Under `spawn` and `forkserver` it is pickled when the first worker
starts, and the others read the same bytes from a file in memory, so that no worker is waited for until it has read them.
"""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

from autotune_loader.machine.kernel import memfd


class Parts(NamedTuple):
    """Of what is given.

    Attributes:
        arguments: Of torch's worker loop, by name, but for those that differ between workers.
        is_seeded: Whether each batch is seeded.
        initial_seed: What `torch.initial_seed()` returns then; None for torch's own.
        held: Generators that dataset, transforms and collate_fn hold.
        asked: Number of workers that was asked for, which workers are told; 0 where nobody asked.
    """

    arguments: dict[str, Any]
    is_seeded: bool
    initial_seed: int | None
    held: list[Any]
    asked: int


class Given:
    """Parts, which a worker takes out once."""

    def __init__(self, parts: Parts) -> None:
        self._parts: Parts | None = parts
        self.asked = parts.asked
        self._file, self._files = -1, list[int]()

    def taken(self) -> Parts:
        """All of it, which this process drops."""
        parts, self._parts = self._parts, None
        assert parts is not None
        return parts

    def __reduce__(self) -> Any:
        popen: Any = get_spawning_popen()
        if self._file < 0:
            before, data = len(popen._fds), memoryview(ForkingPickler.dumps(self._parts))
            self._file = memfd("dataset")
            weakref.finalize(self, os.close, self._file)
            while data:
                data = data[os.write(self._file, data) :]
            self._files = popen._fds[before:]
        else:
            for file in self._files:  # of shared memory in the pickle, in the same places
                popen.duplicate_for_child(file)
        return _read, (DupFd(self._file),)


def _read(file: Any) -> Given:
    number = file.detach()
    with mmap.mmap(number, 0, prot=mmap.PROT_READ) as data:  # a position would be shared with other workers
        parts = pickle.loads(data)  # noqa: S301 - the loop's own
    os.close(number)
    return Given(parts)
