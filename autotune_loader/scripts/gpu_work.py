"""The share of a loader's time in which this process' GPU worked, whoever kept it so, as NVML says it afterwards.

NVML keeps stamped samples for a few seconds: now and then they are taken over, for the stretches in which a loader is iterated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from autotune_loader.machine.gpus import busy_within, known_share, use_of_current_device

LOOK_S = 1.0
"""So often samples are taken over, before a driver forgets them."""

log = logging.getLogger(__name__)


class GpuWork:
    """Adds up samples over the stretches in which a loader is iterated, in seconds of one clock.

    Args:
        recent: how many seconds ago each sample was taken, and the share of the time since the one before; oldest first.
    """

    def __init__(self, recent: Callable[[], list[tuple[float, float]]] = use_of_current_device) -> None:
        self._recent = recent
        self._from = self._next_look = 0.0
        self._busy_s = self._covered_s = self._seen_s = 0.0

    @property
    def share(self) -> float | None:
        """Share of the time, 0 to 1; None where samples cover less than half of it, or there is no GPU."""
        return known_share(self._busy_s, self._covered_s, self._seen_s)

    def begin(self, now: float) -> None:
        """A stretch begins; what was before does not count."""
        self._from, self._next_look = now, now + LOOK_S

    def go_on(self, now: float) -> None:
        """The stretch goes on."""
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self.end(now)

    def end(self, now: float) -> None:
        """Take over what is known of the stretch so far."""
        try:
            samples = [(now - ago, share) for ago, share in self._recent()]
        except Exception:  # whatever it is, it is no reason to end somebody's training
            log.debug("this GPU is not looked at any more", exc_info=True)
            self._recent = list
            return
        begun = self._from
        busy_s, covered_s = busy_within(samples, begun, now)
        self._busy_s, self._covered_s = self._busy_s + busy_s, self._covered_s + covered_s
        # The driver tells of a moment some time after it.
        self._from = max(begun, min(now, samples[-1][0])) if samples else now
        self._seen_s += self._from - begun
