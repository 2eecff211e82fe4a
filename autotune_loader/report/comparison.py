"""What `compare()` found: sides, their rates in paired rounds, who is faster and what binds each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

from autotune_loader.report.tables import render_table
from autotune_loader.report.units import (
    bytes_text,
    counted,
    faster_words,
    number_text,
    ratio_text,
    seconds_text,
    share_text,
)
from autotune_loader.results.loader_file import RateUnit, Verdict
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval, Round, log_ratios, mean_interval, paired_ratio

if TYPE_CHECKING:
    import pandas as pd

SURE = 0.95
"""Confidence with which all intervals of a comparison hold together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison."""

    name: str
    config: LoaderConfig
    """As its loader is set."""
    measurement: Measurement | None = None
    """Mean of its bursts in the rounds; None where it failed."""
    verdict: Verdict | None = None
    """What binds it; None where it failed."""
    error: str | None = None
    """Why it has no rate."""
    traceback: str | None = None
    """The user's own, where user code raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Sides of a comparison, the first of which the others are compared with.

    All intervals together hold with 95 % confidence: with m sides beside the first, each has an error of 5 % / m (Bonferroni).
    How many rounds there are depends on time alone, never on who is ahead.
    """

    sides: tuple[Side, ...]
    rounds: tuple[Round, ...] = ()
    """Rates by the name of the side, without rounds in which other processes kept the cores busy."""
    rate_unit: RateUnit = "samples/s"
    whole_epochs: bool = False
    """Whether epochs were run whole, as they are short: rates then include start-up."""
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> Side:
        """The side of this name.

        Raises:
            KeyError: there is none; the message names those that are.
        """
        for side in self.sides:
            if side.name == name:
                return side
        raise KeyError(f"{name!r} is no side; {', '.join(repr(side.name) for side in self.sides)} would work")

    @property
    def rates(self) -> dict[str, Interval]:
        """Mean rate of each side that worked."""
        seen = {
            each.name: [one.rates[each.name] for one in self.rounds if each.name in one.rates] for each in self.sides
        }
        return {
            each.name: mean_interval(seen[each.name]) for each in self.sides if seen[each.name] and each.error is None
        }

    @property
    def ratios(self) -> dict[str, Interval]:
        """How many times as fast as the first side each other one is, from paired rounds; sides that failed are not in it."""
        first = self.sides[0].name
        found = {name: self._ratio(name, first) for name in self.rates if name != first}
        return {name: ratio for name, ratio in found.items() if ratio is not None}

    @property
    def fastest(self) -> str | None:
        """The side that is shown to be faster than every other one that worked; None where none is."""
        for name in self.rates:
            ratios = [self._ratio(name, other) for other in self.rates if other != name]
            if ratios and all(ratio is not None and ratio.low > 1 for ratio in ratios):
                return name
        return None

    def _ratio(self, name: str, other: str) -> Interval | None:
        sure = 1 - (1 - SURE) / max(1, len(self.sides) - 1)
        return paired_ratio(self.rounds, name, other, sure) if log_ratios(self.rounds, name, other) else None

    @property
    def summary(self) -> tuple[str, ...]:
        """One sentence for each side beside the first, what failed, and what else is to be known."""
        rates, first = self.rates, self.sides[0].name
        failed = [f"{side.name} failed: {side.error}" for side in self.sides if side.error is not None]
        faster = [f"{faster_words(name, ratio, first)}{_binds(self[name])}." for name, ratio in self.ratios.items()]
        alone = [f"{name} is the only side that worked{_binds(self[name])}." for name in rates if len(rates) == 1]
        return (*failed, *faster, *alone, *self.notes)

    def report(self) -> str:
        """A table of the sides and the sentences."""
        headers = ("", self.rate_unit, "times", "waits", "workers", "memory", "binds")
        table = render_table(headers, [[self._row(side) for side in self.sides]], numeric=(1, 3, 4, 5))
        what = "whole epochs, as these are short" if self.whole_epochs else "bursts of training"
        how = f"{counted(len(self.rounds), 'paired round')} of {what}, in {seconds_text(self.seconds)}."
        return "\n".join([table, "", *self.summary, how])

    def _row(self, side: Side) -> Sequence[str]:
        measured, rate, workers = side.measurement, self.rates.get(side.name), str(side.config.num_workers)
        if measured is None or rate is None:
            return (side.name, "failed", "", "", workers, "", "")
        times = "1" if side is self.sides[0] else ratio_text(self.ratios.get(side.name))
        memory = bytes_text(None if measured.memory is None else measured.memory.taken_bytes)
        binds = "" if side.verdict is None else side.verdict.binding
        return (side.name, number_text(rate.value), times, share_text(measured.wait_share), workers, memory, binds)

    __str__ = report

    def to_frame(self) -> pd.DataFrame:
        """One row for each side: configuration, rate and ratio with their 95 % intervals, shares, bytes, what binds, error."""
        import pandas as pd

        frame: pd.DataFrame = pd.DataFrame([self._record(side) for side in self.sides])
        return frame

    def _record(self, side: Side) -> dict[str, object]:
        measured = side.measurement
        memory = None if measured is None else measured.memory
        return {
            "side": side.name,
            "config": str(side.config),
            "batch_size": None if measured is None else measured.batch_size,
            **_limits("rate", self.rates.get(side.name)),
            **_limits("ratio", self.ratios.get(side.name)),
            "wait_share": None if measured is None else measured.wait_share,
            "cpu_share": None if measured is None else measured.cpu_share,
            "gpu_busy_share": None if measured is None else measured.gpu.busy_share,
            "memory_bytes": None if memory is None else memory.taken_bytes,
            "binding": None if side.verdict is None else side.verdict.binding,
            "error": side.error,
        }

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.report())}</pre>"


def about_batch_sizes(sides: Sequence[Side]) -> Iterator[str]:
    """That sides of different batch sizes are compared by samples/s; nothing where they are of one size."""
    sizes = {side.name: side.measurement.batch_size for side in sides if side.measurement is not None}
    if sizes and max(sizes.values()) > 1.01 * min(sizes.values()):
        told = ", ".join(f"{name} {size:.3g}" for name, size in sizes.items())
        yield (
            f"Batch sizes differ ({told}), so the sides are compared by samples/s; what a batch size does to learning, "
            "no rate tells."
        )


def _binds(side: Side) -> str:
    if side.verdict is None or side.verdict.binding == "unknown":
        return ""
    what, separator, _ = side.verdict.sentence.partition(" binds")
    return f"; {what[:1].lower() + what[1:] if not what.startswith('CPU') else what} binds then" if separator else ""


def _limits(name: str, interval: Interval | None) -> dict[str, float | None]:
    low, value, high = (None, None, None) if interval is None else (interval.low, interval.value, interval.high)
    return {name: value, f"{name}_low": low, f"{name}_high": high}
