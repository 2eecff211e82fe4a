"""Where the time of a sample goes in a worker: what was seen of one burst, and the split that a result keeps."""

from __future__ import annotations

from dataclasses import dataclass

HAND_OVER = "hand over"
"""The stage beside the others: a thread of its own writes batches to the queue."""


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
    """Wall seconds for each sample, without those in which it was ready and there was no core for it."""
    cpu_s: float
    """CPU seconds for each sample."""

    @property
    def waited_s(self) -> float:
        """Seconds without the CPU, for each sample."""
        return max(0.0, self.wall_s - self.cpu_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """How often one line was found at work."""

    stage: str
    where: str
    computing: float = 0.0
    """CPU samples in it."""
    waiting: float = 0.0
    """Looks that found it with nothing to run."""
    released: float = 0.0
    """Looks that found it computing without the interpreter lock: certain, while a CPU sample may come a line late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSamples:
    """What the watchers in a burst's workers saw."""

    seen: tuple[Seen, ...]
    samples: float
    """Samples of the batches that were watched, like all that follows."""
    wall_s: float
    """Seconds from fetch to collated batch."""
    cpu_s: float
    """CPU seconds of the process meanwhile, all its threads together."""
    thread_cpu_s: float
    """CPU seconds of the thread that makes the batches."""
    crowded_s: float
    """Seconds in which that thread was ready and had no core."""
    queue_cpu_s: float
    """CPU seconds of the thread that writes batches to the queue."""
    looks: float
    """Looks that fell into a batch."""
