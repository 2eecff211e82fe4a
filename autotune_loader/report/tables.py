"""The result as text for a terminal, a log or an e-mail: the table, what it says, and what to do next.

A result goes in and a string comes out, without colour codes; whoever calls prints it.
"""

from __future__ import annotations

import io
import random
import textwrap
from collections.abc import Sequence

from autotune_loader.report.standings import Standing, standings
from autotune_loader.report.units import (
    UNKNOWN,
    bytes_text,
    counted,
    number_text,
    range_text,
    rate_text,
    seconds_text,
    share_text,
)
from autotune_loader.results.result import TuningResult
from autotune_loader.values.stages import StageTime

MAX_ROWS = 16
"""Slower configurations than these are counted, not listed; the frame has them all."""
SHOWN_STAGES, SMALL_STAGE = 6, 0.01
"""So many stages, and none below this share, are listed; the frame has them all."""
BEST, TIE, BASELINE, FAILED = ">", "=", "b", "x"
"""What stands before a row; the legend below the table explains them."""


def render_report(result: TuningResult, width: int = 100) -> str:
    """The whole result as text of at most `width` columns: table, speed-up, verdict, advice, warnings."""
    doubt = f"{_wrapped(result.summary[0], width)}\n\n" if result.status == "undecided" and result.summary else ""
    return f"{doubt}{render_trials(result, width)}\n\n{render_findings(result, width)}"


def render_trials(result: TuningResult, width: int = 100) -> str:
    """The table of configurations with a legend: the finals, then the search, then what failed and why."""
    rows = standings(result)
    if not rows:
        return "No configuration was tried."
    shown = _shown(rows)
    groups = [[_cells(row) for row in shown if row.source == source] for source in ("finals", "trial", "failure")]
    knobs, measured = ("", "workers", "prefetch", "also"), ("wait", "first batch", "memory")
    headers = (*knobs, result.measured.rate_unit, "95 % interval", "from", *measured)
    table = [render_table(headers, [group for group in groups if group], width, numeric=(1, 2, 4, 5, 7, 8, 9))]
    table += _failure_lines(shown, width)
    if len(shown) < len(rows):
        table.append(f"and {counted(len(rows) - len(shown), 'more configuration')}, all in result.to_dataframe()")
    chosen = "safest guess" if result.status == "undecided" else "chosen"
    legend = f"{BEST} {chosen}   {TIE} equally fast   {BASELINE} before tuning   {FAILED} failed"
    return "\n".join([*table, "", legend])


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
    # What `str(config)` says beyond workers and prefetch_factor.
    others = str(row.config).split(", ")[1 if row.config.prefetch_factor is None else 2 :]
    knobs = (str(row.config.num_workers), ahead, ", ".join(others))
    source = "failed" if row.rate is None else counted(row.rate.count, "round") if row.source == "finals" else "search"
    seen, meters = row.measurement, (UNKNOWN, UNKNOWN, UNKNOWN)
    if seen is not None:
        used = None if seen.memory is None else seen.memory.taken_bytes
        meters = (share_text(seen.wait_share), seconds_text(seen.first_batch_s), bytes_text(used))
    return (mark, *knobs, rate, range_text(row.rate), source, *meters)


def _failure_lines(rows: Sequence[Standing], width: int) -> list[str]:
    """Each reason once, with the first configuration that failed for it."""
    failed: dict[str, str] = {}
    for row in rows:
        if row.failure is not None:
            kind, phase = (word.replace("_", " ") for word in (row.failure.kind, row.failure.phase))
            failed.setdefault(row.failure.message, f"{FAILED} {row.config}: {kind} ({phase}): {row.failure.message}")
    lines = [_wrapped(text, width, indent="    ") for text in failed.values()]
    return ["", *lines] if lines else []


def render_findings(result: TuningResult, width: int = 100) -> str:
    """What the table means, as sentences: status, speed-up, ceiling, verdict, advice, warnings, cost."""
    verdict = [_wrapped(f"Verdict: {result.verdict.sentence}", width)]
    facts = [_wrapped(sentence, width) for sentence in _facts(result)]
    stages = ["A sample's time in a worker:", *(_wrapped(line, width) for line in stage_lines(result.stage_times))]
    advice = [_wrapped(f"- {each}", width) for each in result.advice]
    warnings = [_wrapped(f"! {warning}", width) for warning in result.warnings]
    blocks = [facts, verdict, stages if result.stage_times else [], ["Next:", *advice] if advice else [], warnings]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def stage_lines(times: Sequence[StageTime], most: int = SHOWN_STAGES) -> list[str]:
    """The longest stages, one a line: its share of a sample's time, whether that is computing, and where."""
    whole_s = sum(each.wall_s for each in times)
    shown = [each for each in times[:most] if max(each.wall_s, each.cpu_s) >= SMALL_STAGE * whole_s]
    longest = max((len(each.stage) for each in shown), default=0)
    return [
        f"{each.stage:{longest}} {share_text(each.wall_share):>5} of the time, {share_text(each.cpu_share):>5} of the CPU  "
        f"{seconds_text(each.wall_s)}  {each.where}"
        for each in shown
    ]


def _facts(result: TuningResult) -> list[str]:
    """The summary, without what stands elsewhere, and the figures beside it."""
    elsewhere = (result.verdict.sentence, *(result.summary[:1] if result.status == "undecided" else ()))
    facts = [sentence for sentence in result.summary or (str(result),) if sentence not in elsewhere]
    if result.ceiling is not None:
        facts.append(f"Ceiling: {rate_text(result.ceiling.value)}, the training step alone on a batch that is there.")
    elif result.measured.ceiling_doubt is not None:
        facts.append(f"Ceiling: unknown; {result.measured.ceiling_doubt}.")
    if result.measured.gpu_busy_share is not None:
        util = result.measured.gpu_util
        nvml = "" if util is None else f"; NVML saw it busy for {share_text(util)}, whoever kept it so"
        facts.append(f"GPU: at work on a step for {share_text(result.measured.gpu_busy_share)} of the time{nvml}.")
    if result.spent.bursts:
        facts.append(f"Spent: {seconds_text(result.spent.seconds)} on {counted(result.spent.bursts, 'burst')}.")
    return facts


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
    state = random.getstate()
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    random.setstate(state)  # rich draws a number as it is imported, and the caller may train afterwards
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False, collapse_padding=True)
    for index, header in enumerate(headers):
        right = index in numeric
        table.add_column(header, justify="right" if right else "left", no_wrap=right or not header)
    for rows in groups:
        for row in rows:
            table.add_row(*row, end_section=row is rows[-1])
    buffer = io.StringIO()
    # User text is not markup: "[/]" in a message must not end a style. In a notebook rich would show the text itself.
    plain = {"color_system": None, "markup": False, "emoji": False, "highlight": False}
    Console(file=buffer, width=width, force_jupyter=False, **plain).print(table)  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in buffer.getvalue().rstrip("\n").splitlines())
