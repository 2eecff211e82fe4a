"""Where the time of a sample goes in a worker: what was seen of one burst, and the split that a result keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

HAND_OVER = "hand over"
"""The stage beside the others: a thread of its own writes batches to the queue."""

Line = tuple[str, str]
"""stage, where"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """One stage of what a worker does for a sample; the shares of all stages add up to 1."""

    stage: str
    """Such as "decode", a transform's or a function's name, "collate", or "hand over" to the training process."""
    where: str
    """The line of the user's, and what it calls, that most of it was seen in, such as "photos.py:41, PIL.Image.convert"."""
    wall_share: float
    """Share of a sample's wall seconds in a worker."""
    cpu_share: float
    """Share of a sample's CPU seconds in a worker."""
    wall_s: float
    """Wall seconds for each sample; where workers are more than cores, those of waiting for one are among them."""
    cpu_s: float
    """CPU seconds for each sample."""

    @property
    def waited_s(self) -> float:
        """Seconds without the CPU, for each sample."""
        return max(0.0, self.wall_s - self.cpu_s)


class Seen(NamedTuple):
    """What was seen of one stage."""

    stage: str
    where: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSamples:
    """What the clocks in a burst's workers saw, of the batches that were clocked."""

    seen: tuple[Seen, ...]
    samples: float
    wall_s: float
    """Seconds from fetch to collated batch."""
    cpu_s: float
    """CPU seconds of the process meanwhile, all its threads together."""
    queue_cpu_s: float
    """CPU seconds of the thread that writes batches to the queue."""
