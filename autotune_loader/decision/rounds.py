"""What a paired round says."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Round


def as_round(outcomes: Sequence[tuple[Hashable, Measurement | Failure]]) -> Round:
    """The rates of one round, without those that failed, and the largest share of the cores that others took meanwhile."""
    measured = [(key, outcome) for key, outcome in outcomes if isinstance(outcome, Measurement)]
    foreign = [each.foreign_cpu_share for _, each in measured if each.foreign_cpu_share is not None]
    return Round(
        rates={key: each.samples_per_s.value for key, each in measured}, foreign_cpu_share=max(foreign, default=None)
    )
