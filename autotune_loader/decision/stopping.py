"""Why a search ends."""

from __future__ import annotations

from enum import Enum


class StopReason(Enum):
    """The value is how a file or a log names it; sentences for people are made in `report`."""

    CEILING = "ceiling"  # as fast as the training step alone
    CHOICE_SAFE = "choice_safe"  # nothing untried is worth an observation
    OUT_OF_BUDGET = "out_of_budget"  # the rest is kept for the paired rounds
    OUT_OF_TRIALS = "out_of_trials"
    SAMPLER_REPEATS = "sampler_repeats"
    INTERRUPTED = "interrupted"

    @property
    def wanted_more(self) -> bool:
        """Whether more time or trials would have been used."""
        return self in (StopReason.OUT_OF_BUDGET, StopReason.OUT_OF_TRIALS)
