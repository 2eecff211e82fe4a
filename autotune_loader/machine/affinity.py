"""Staying on some of the cores: what a thread may use, the processes that it starts may use, too."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from autotune_loader.machine.limits import affinity

log = logging.getLogger(__name__)


@contextlib.contextmanager
def confined_to(cores: int | None) -> Iterator[None]:
    """Within the block this thread, and every process that it starts, runs on the first so many of its cores.

    Args:
        cores: None, or as many as there are, changes nothing.
    """
    if cores is None:
        yield
        return
    allowed = affinity()
    if allowed is None:
        log.warning("this system cannot keep processes to %d cores; bursts run on all of them", cores)
        yield
        return
    if cores >= len(allowed):
        yield
        return
    os.sched_setaffinity(0, allowed[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
