"""The alarm that ends a burst before the kernel's OOM killer ends whom it likes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

GUARD_SHARE = 0.9
"""The alarm's share of the budget: the rest is for what is allocated before the burst has ended."""
GUARD_PERIOD_S = 1.0
"""Between PSS readings that check an alarm."""


@dataclass(slots=True)
class MemoryGuard:
    """Raises the alarm once when a process tree outgrows 90 % of its budget.

    RSS counts shared pages once per process, so it only raises suspicion; PSS decides, where there is one.
    """

    budget_bytes: int
    alarm: Callable[[], None]
    """Ends the burst; called once."""
    held_bytes: int = 0
    """What the tree held before anything was run; it comes on top of the budget."""
    is_raised: bool = field(default=False, init=False)
    _quiet_until: float = field(default=-math.inf, init=False)

    def check(self, now: float, rss_bytes: int, pss_bytes: Callable[[], int | None]) -> None:
        """Raise the alarm if it is time to; `pss_bytes` is only called on suspicion, and once a second at most."""
        limit_bytes = self.held_bytes + GUARD_SHARE * self.budget_bytes
        if self.is_raised or rss_bytes <= limit_bytes or now < self._quiet_until:
            return
        used = pss_bytes()
        if (rss_bytes if used is None else used) > limit_bytes:
            self.is_raised = True
            logger.warning("Memory guard: %d bytes in use, %d allowed", used or rss_bytes, limit_bytes)
            self.alarm()
        self._quiet_until = now + GUARD_PERIOD_S
