"""The process that workers are forked from: what makes a fork dangerous or expensive."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from autotune_loader.pipeline.batches import initialized_accelerator

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ParentProcess(NamedTuple):
    """This process, before workers are forked from it."""

    accelerator: str | None
    """What it has initialized, such as "cuda"."""
    own_bytes: int
    """Its memory without files and shared memory: a fork copies the page tables of this."""
    is_elastic: bool
    """Whether AutoLoader's iterator starts the workers."""

    @classmethod
    def of(cls, context: Any, *, is_elastic: bool) -> ParentProcess | None:
        """What it is now, in tens of microseconds; None where a `multiprocessing_context` does not fork.

        `statm` (proc_pid_statm(5)) is `size resident shared ...`, in pages.
        """
        with suppress(Exception):  # whatever it is, it is no reason to end somebody's training
            method = (context or multiprocessing).get_start_method(allow_none=True)  # which does not settle the default
            if (method or multiprocessing.get_all_start_methods()[0]) == "fork":
                resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
                return cls(initialized_accelerator(), (resident - shared) * PAGE_BYTES, is_elastic)
        return None
