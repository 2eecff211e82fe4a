"""The result as text for a terminal, a log or an e-mail: the table, what it says, and what to do next.

A result goes in and a string comes out, without colour codes; whoever calls prints it.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune_loader.report.advice.acceleration import acceleration_sentence
from autotune_loader.report.standings import Standing, standings
from autotune_loader.report.units import (
    UNKNOWN,
    bytes_text,
    counted,
    number_text,
    range_text,
    rate_text,
    ratio_text,
    seconds_text,
    share_text,
)
from autotune_loader.results.loader_file import Advice
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_ROWS = 16
"""Slower configurations than these are counted, not listed; the frame has them all."""
BEST, TIE, BASELINE, FAILED = ">", "=", "b", "x"
LEGEND = f"{BEST} chosen   {TIE} as fast, within what can be told   {BASELINE} before tuning   {FAILED} failed"
STATUS_SENTENCES = {
    "complete": "",
    "partial": "Interrupted: this is the best so far.",
    "fallback": "Nothing worked, so torch's defaults are given.",
}


def render_report(result: TuningResult, width: int = 100) -> str:
    """The whole result as text of at most `width` columns: table, speed-up, verdict, advice, warnings."""
    parts = [render_trials(result, width), render_findings(result, width)]
    return "\n\n".join(part for part in parts if part)


def render_trials(result: TuningResult, width: int = 100, tolerance: float | None = None) -> str:
    """The table of configurations with a legend: the finals, then the search, then what failed and why."""
    rows = standings(result, tolerance)
    if not rows:
        return "No configuration was tried."
    shown = _shown(rows)
    groups = [[_cells(row) for row in shown if row.source == source] for source in ("finals", "trial", "failure")]
    table = [render_table(_HEADERS, [group for group in groups if group], width, numeric=_NUMERIC)]
    table += _failure_lines([row for row in shown if row.failure], width)
    if len(shown) < len(rows):
        table.append(f"and {counted(len(rows) - len(shown), 'more configuration')}, all in result.to_dataframe()")
    return "\n".join([*table, "", LEGEND])


_HEADERS = ("", "workers", "prefetch", "also", "samples/s", "95 % interval", "from", "wait", "first batch", "memory")
_NUMERIC = (1, 2, 4, 5, 7, 8, 9)


def _shown(rows: Sequence[Standing]) -> list[Standing]:
    """The fastest, and always the chosen one, the baseline and some of the failed."""
    worked = [row for row in rows if row.rate]
    failed = [row for row in rows if not row.rate][: MAX_ROWS // 2]
    kept = worked[: MAX_ROWS - len(failed)]
    return [*kept, *(row for row in worked if row not in kept and (row.is_best or row.is_baseline)), *failed]


def _cells(row: Standing) -> tuple[str, ...]:
    marks = ((BEST, row.is_best), (TIE, row.ties_with_best), (BASELINE, row.is_baseline), (FAILED, row.rate is None))
    mark = "".join(mark for mark, applies in marks if applies)
    rate = number_text(row.rate.value) if row.rate else UNKNOWN
    ahead = UNKNOWN if row.config.prefetch_factor is None else str(row.config.prefetch_factor)
    knobs = (str(row.config.num_workers), ahead, other_knobs(row.config))
    return (mark, *knobs, rate, range_text(row.rate), _evidence(row), *_meter_cells(row.measurement))


def other_knobs(config: LoaderConfig) -> str:
    """What a configuration sets beyond workers and prefetch_factor, as `str(config)` says it; empty when nothing."""
    words = str(config).split(", ")
    return ", ".join(words[1 if config.prefetch_factor is None else 2 :])


def _evidence(row: Standing) -> str:
    if row.source == "finals" and row.rate:
        return counted(row.rate.count, "round")
    return "search" if row.rate else "failed"


def _meter_cells(measurement: Measurement | None) -> tuple[str, str, str]:
    if measurement is None:
        return (UNKNOWN, UNKNOWN, UNKNOWN)
    return (
        share_text(measurement.wait_share),
        seconds_text(measurement.first_batch_s),
        bytes_text(memory_bytes(measurement)),
    )


def memory_bytes(measurement: Measurement) -> int | None:
    """PSS, or RSS where the kernel does not tell PSS; None where neither was measured."""
    memory = measurement.memory
    if memory is None:
        return None
    return memory.rss_bytes if memory.pss_bytes is None else memory.pss_bytes


def _failure_lines(rows: Sequence[Standing], width: int) -> list[str]:
    lines, told = [], set()
    for row in rows:
        if row.failure is None or row.failure.message in told:
            continue
        told.add(row.failure.message)
        text = f"{FAILED} {row.config}: {kind_text(row.failure)}: {row.failure.message}"
        lines.append(_wrapped(text, width, indent="    "))
    return ["", *lines] if lines else []


def kind_text(failure: Failure) -> str:
    """The kind of a failure in words, and the phase it came in."""
    return f"{failure.kind.replace('_', ' ')} ({failure.phase.replace('_', ' ')})"


def render_findings(result: TuningResult, width: int = 100) -> str:
    """What the table means, as sentences: status, speed-up, ceiling, verdict, advice, warnings, cost."""
    verdict = [_wrapped(f"Verdict: {result.verdict.sentence}", width)]
    facts = [_wrapped(sentence, width) for sentence in (*_status(result), *_facts(result))]
    advice = [_wrapped(_advice_line(each), width) for each in result.advice]
    warnings = [_wrapped(f"! {warning}", width) for warning in result.warnings]
    blocks = [facts, verdict, ["Next:", *advice] if advice else [], warnings]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _status(result: TuningResult) -> list[str]:
    sentence = STATUS_SENTENCES[result.status]
    return [sentence] if sentence else []


def _facts(result: TuningResult) -> list[str]:
    facts = [f"Chosen: {result.best}."]
    if result.speedup is not None:
        facts.append(f"Speed-up: {ratio_text(result.speedup)} over {_baseline_name(result)}, {_rounds(result)}.")
    elif result.finals.rounds and result.best != result.baseline:
        facts.append(
            f"Speed-up: not proven, {counted(len(result.finals.rounds), 'paired round')} fitted into the budget."
        )
    if result.ceiling is not None:
        facts.append(f"Ceiling: {rate_text(result.ceiling.value)}, the training step alone on a batch that is there.")
    facts += [f"Step with {acceleration_sentence(each)}." for each in result.accelerations]
    spent = result.spent
    if spent.bursts:
        facts.append(f"Spent: {seconds_text(spent.seconds)} on {counted(spent.bursts, 'burst')}.")
    return facts


def _baseline_name(result: TuningResult) -> str:
    return f"{result.baseline} (before tuning)"


def _rounds(result: TuningResult) -> str:
    count = result.speedup.count if result.speedup else 0
    return f"95 % interval of {counted(count, 'paired round')}"


def _advice_line(advice: Advice) -> str:
    return f"- {advice.action.rstrip('.')}{_gain(advice.expected_gain)}: {advice.reason}"


def _gain(expected: float | None) -> str:
    if expected is None:
        return ""
    return f" (about {expected * 100:+.0f} %)" if expected < 1 else f" (about {1 + expected:.1f} times the rate)"


def _wrapped(text: str, width: int, indent: str = "  ") -> str:
    lines = text.splitlines() or [""]
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in lines
    )


def render_table(
    headers: Sequence[str], groups: Sequence[Sequence[Sequence[str]]], width: int = 100, numeric: Sequence[int] = ()
) -> str:
    """A plain table, its groups of rows apart; columns with an index in `numeric` are aligned right and not wrapped."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, collapse_padding=True)
    for index, header in enumerate(headers):
        right = index in numeric
        table.add_column(header, justify="right" if right else "left", no_wrap=right or not header)
    for rows in groups:
        for row in rows:
            table.add_row(*row, end_section=row is rows[-1])
    return render_plain(table, width)


def render_plain(renderable: RenderableType, width: int) -> str:
    """What rich draws, as text without colour codes and trailing spaces."""
    from rich.console import Console

    buffer = io.StringIO()
    # User text (paths, messages) is not markup: "[/]" in a message must not end a style or raise.
    plain = {"color_system": None, "markup": False, "emoji": False, "highlight": False}
    # In a notebook rich would show the text itself instead of writing it.
    console = Console(file=buffer, width=width, force_jupyter=False, **plain)  # type: ignore[arg-type]
    console.print(renderable)
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip("\n").splitlines())
