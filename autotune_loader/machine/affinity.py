"""Staying on some of the cores: what a thread may use, the processes that it starts may use, too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def confined_to(cores: int | None) -> Iterator[None]:
    """Within the block this thread, and every process that it starts, runs on the first so many of its cores.

    Args:
        cores: None, or as many as there are, changes nothing.
    """
    allowed = os.sched_getaffinity(0)
    if cores is None or cores >= len(allowed):
        yield
        return
    os.sched_setaffinity(0, sorted(allowed)[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
