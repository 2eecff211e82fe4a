"""What `compare()` found: its sides, and their rates and ratios in paired rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from autotune_loader.results.result import Finding
from autotune_loader.values import Effects, Interval, LoaderConfig, Measurement, RateUnit, Round, log_ratios

if TYPE_CHECKING:
    import pandas as pd

SURE = 0.95
"""Confidence with which all intervals of a comparison hold together."""


def ratios_of(rounds: Sequence[Round], works: Sequence[str], count: int) -> dict[str, Interval]:
    """Rate of each side that works over that of the first one; `count` sides are compared."""
    first, *others = works or [""]
    others = [name for name in others if log_ratios(rounds, name, first)]
    if not others:
        return {}
    effects, confidence = Effects([each for each in rounds if each.rates]), 1 - (1 - SURE) / (count - 1)
    return {name: effects.ratio(name, first, confidence) for name in others}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison."""

    name: str
    config: LoaderConfig
    """As its loader is set."""
    measurement: Measurement | None = None
    """Mean of its bursts in the rounds; None where it failed."""
    bottleneck: Finding | None = None
    """What limits it; None where it failed."""
    error: str | None = None
    """Why it has no rate."""
    traceback: str | None = None
    """The user's own, where user code raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `compare()`: each side beside the first.

    If the first side failed, the next one that worked takes its place. All intervals together hold with 95% confidence:
    with m sides beside the first, each has an error of 5% / m (Bonferroni). They hold at any stopping time.
    """

    sides: tuple[Side, ...]
    rounds: tuple[Round, ...] = ()
    """Rates by the name of the side."""
    rate_unit: RateUnit = "samples/s"
    seconds: float = 0.0
    notes: Sequence[Finding] = ()

    def __getitem__(self, name: str) -> Side:
        """The side of this name.

        Raises:
            KeyError: there is none; the message names those that are.
        """
        for side in self.sides:
            if side.name == name:
                return side
        raise KeyError(f"{name!r} is not a side. Try one of {', '.join(repr(side.name) for side in self.sides)}.")

    @property
    def rates(self) -> dict[str, Interval]:
        """Mean rate of each side that worked."""
        ran = [each for each in self.rounds if each.rates]
        if not ran:
            return {}
        effects = Effects(ran)
        names = [side.name for side in self.sides if side.name in effects.keys and not side.error]
        return {name: effects.rate(name) for name in names}

    @property
    def ratios(self) -> dict[str, Interval]:
        """Rate of each side over that of the first, from A/B rounds, without sides that failed."""
        return ratios_of(self.rounds, list(self.rates), len(self.sides))

    def report(self) -> str:
        """The table of the sides and the conclusions as text, 80 columns wide."""
        from autotune_loader.report.text import comparison_report

        return comparison_report(self)

    def to_dataframe(self) -> pd.DataFrame:
        """One row per side: settings, rate and ratio with their limits, shares, bytes, bottleneck, error."""
        from autotune_loader.report.frames import sides_frame

        return sides_frame(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.report())}</pre>"

    def __str__(self) -> str:
        from autotune_loader.report.text import comparison_summary

        return comparison_summary(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(side.name for side in self.sides)}: {len(self.rounds)} rounds>"
