"""A comparison as text: the sides in a table, who is faster, what limits each."""

from __future__ import annotations

from autotune_loader.diagnosis.tables import Answer, Choice, answer
from autotune_loader.diagnosis.units import (
    UNKNOWN,
    bytes_text,
    counted,
    number_text,
    ratio_text,
    seconds_text,
    share_text,
)
from autotune_loader.report.table import WIDTH, table_text, wrapped
from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.record import Finding


def summary_of(comparison: Comparison) -> str:
    """Who is faster, a sentence for each side beside the first, and where the report is."""
    said = [*answers_of(comparison), Choice.REPORT(name="comparison")]
    return wrapped(" ".join(each.sentence for each in said), indent="")


def report_of(comparison: Comparison, width: int = WIDTH) -> str:
    """The table of the sides and what it says."""
    headers = ("", comparison.rate_unit, "times as fast", "wait", "workers", "memory", "bottleneck")
    rows = [_row(comparison, side) for side in comparison.sides]
    limits = [f"{side.name}: {side.bottleneck}" for side in comparison.sides if side.bottleneck is not None]
    said = [each.sentence for each in answers_of(comparison)]
    how = f"{counted(len(comparison.rounds), 'paired round')} in {seconds_text(comparison.seconds)}."
    blocks = [said, limits, [f"! {each}" for each in comparison.notes], [how]]
    text = ["\n".join(wrapped(line, width) for line in block) for block in blocks if block]
    return "\n\n".join([table_text(headers, [rows], numeric=(1, 3, 4, 5), width=width), *text])


def answers_of(comparison: Comparison) -> list[Finding]:
    """A sentence for each side beside the first, and for each that failed."""
    first, rates = comparison.sides[0].name, comparison.rates
    failed = [Answer.FAILED(name=side.name, error=side.error) for side in comparison.sides if side.error is not None]
    said = [answer(name, ratio, first) for name, ratio in comparison.ratios.items()]
    if not rates:
        return [*failed, Answer.NONE()]
    alone = [Answer.ALONE(name=name) for name in rates if len(rates) == 1]
    return [*failed, *said, *alone]


def _row(comparison: Comparison, side: Side) -> tuple[str, ...]:
    measured, rate, workers = side.measurement, comparison.rates.get(side.name), str(side.config.num_workers)
    if measured is None or rate is None:
        return (side.name, "failed", "", "", workers, "", "")
    times = "1" if side is comparison.sides[0] else ratio_text(comparison.ratios.get(side.name))
    limited_by = UNKNOWN if side.bottleneck is None else side.bottleneck.kind.replace("_", " ")
    return (
        side.name,
        number_text(rate.value),
        times,
        share_text(measured.wait_share),
        workers,
        bytes_text(measured.taken_bytes),
        limited_by,
    )
