"""An alarm before a process tree takes too much memory: somebody else's process may be the one that the system kills."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from autotune_loader.machine.processes import tree, tree_pss, tree_use

logger = logging.getLogger(__name__)
PERIOD_S = 0.25
"""Between looks: 4 Hz, below the 5 Hz at which reading RSS begins to cost."""
MEMBERS_S = 1.0
"""Between looks for new processes of the tree, which read the parents of all processes there are."""
GUARDED_SHARE = 0.9
"""Of the budget: the rest is for what is allocated between two looks."""
SUSPICION_S = 1.0
"""Where RSS, which counts shared pages once for each process, raises suspicion, PSS decides, as often as this: reading it walks
page tables and stalls the processes."""


class MemoryGuard:
    """Watches a process tree from outside, from entering to leaving a `with` block.

    Args:
        pid: process at the root of the tree.
        budget_bytes: the tree may not outgrow 90 % of it; None for no alarm.
        on_limit: called once, on a thread of the guard's, when it does; it should end the burst.
    """

    def __init__(self, pid: int, budget_bytes: int | None, on_limit: Callable[[], None]) -> None:
        self._pid, self._on_limit = pid, on_limit
        self._limit_bytes = None if budget_bytes is None else GUARDED_SHARE * budget_bytes
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="autotune-loader-memory", daemon=True)

    def __enter__(self) -> None:
        if self._limit_bytes is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._limit_bytes is not None:
            self._thread.join()

    def _watch(self) -> None:
        """Look until the tree is too large, or gone, or the burst is over."""
        assert self._limit_bytes is not None
        next_members = next_pss = 0.0
        while not self._stopped.wait(PERIOD_S):
            now = time.monotonic()
            if now >= next_members:
                members, next_members = tree(self._pid), now + MEMBERS_S
            if (use := tree_use(members)) is None:
                return
            if now < next_pss or use.rss_bytes <= self._limit_bytes:
                continue
            next_pss = now + SUSPICION_S
            if (used := tree_pss(members) or use.rss_bytes) > self._limit_bytes:
                logger.warning("Memory guard: %d bytes in use, %d allowed", used, self._limit_bytes)
                self._on_limit()
                return
