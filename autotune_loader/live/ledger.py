"""The loaders of one process share its machine: workers that only wait for their next epoch go where memory is short.

A validation loader whose kept workers hold queued batches may otherwise cost what the training loader's workers need.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class Idle(Protocol):
    """An iterator whose workers are kept between two epochs."""

    def let_go(self) -> None:
        """End the workers; the next epoch starts new ones."""
        ...


_idle: weakref.WeakSet[Any] = weakref.WeakSet()


def rests(iterator: Idle) -> None:
    """From now on its workers only wait."""
    _idle.add(iterator)


def is_busy(iterator: Idle) -> None:
    """It has begun another epoch."""
    _idle.discard(iterator)


def make_room(fits: Callable[[], bool]) -> None:
    """Let workers of other loaders go, until what is to be started fits or nobody is idle."""
    while _idle and not fits():
        iterator = _idle.pop()
        logger.info("memory is short: the idle workers of another loader are let go")
        iterator.let_go()
