"""Has a rate shifted for good? A two-sided CUSUM (Page 1954) over the logarithms of block rates.

Each block counts for `CLIP` at most, so that no single one raises an alarm, however slow it was.
"""

from __future__ import annotations

from statistics import median

LEAST_REFERENCE, REFERENCE = 8, 32
"""Blocks that tell the level and its noise: the test begins after the fewer, and goes on learning until the more."""
LEAST_NOISE = 0.02
"""Relative; blocks that agree better do so by chance."""
SLACK = 1.0
"""Shifts of less than this, in standard deviations, are none."""
CLIP = 3.0
ALARM = 7.0
"""With slack and clip: four blocks of any shift that is beyond doubt, and hardly ever one of noise."""


class ShiftTest:
    """Add the logarithm of each block's rate; `add` returns True once the level has shifted."""

    def __init__(self) -> None:
        self._reference: list[float] = []
        self._up = self._down = 0.0

    @property
    def blocks(self) -> int:
        """Those that tell the level."""
        return len(self._reference)

    def add(self, log_rate: float) -> bool:
        count = len(self._reference)
        if count < REFERENCE and not max(self._up, self._down) > SLACK:
            self._reference.append(log_rate)
        if count < LEAST_REFERENCE:
            return False
        level = median(self._reference)
        noise = max(LEAST_NOISE, 1.48 * median(abs(each - level) for each in self._reference))
        z = min(CLIP, max(-CLIP, (log_rate - level) / noise))
        self._up = max(0.0, self._up + z - SLACK)
        self._down = max(0.0, self._down - z - SLACK)
        return max(self._up, self._down) > ALARM
