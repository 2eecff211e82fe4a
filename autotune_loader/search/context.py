"""What the search needs to know besides bursts: the cores there are, and what the training step takes of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The machine and the step, as measured without a loader."""

    usable_cores: int
    step_cores: float = 1.0
    """Cores that the step keeps busy while it runs: its intra-op threads on a CPU, 1 where it only feeds an accelerator."""
    step_s: float | None = None
    """Seconds of the step on a cached batch; None where there is no step, or it was not timed."""
    epoch_batches: int | None = None
    """Batches of an epoch; None where that is unknown."""
