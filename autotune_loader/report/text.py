"""A result or a comparison as text for a terminal, a log or an e-mail; no colour codes. Below, the plain tables they use."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from autotune_loader.diagnosis.messages import Answer, Bottleneck, Caution, Choice, Ended, Undecided, answer
from autotune_loader.machine.facts import NO_GPU
from autotune_loader.report.ranking import Standing, ranking, rate_of
from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.result import Finding, TuningResult
from autotune_loader.values import WORTH_CLAIMING, Interval, units

WIDTH = 80
"""Columns that every terminal, log and e-mail has."""
NARROWEST = 11
"""The least width of a wrapped column: its longest word is "persistent,"."""
MAX_ROWS = 16
"""Slower configurations than these are counted, not listed; the frame has them all."""
SHOWN_STAGES, SMALL_STAGE = 6, 0.01
"""At most so many stages are listed, and none below this share; the frame has them all."""
MUCH_FASTER = 1.5
"""Single trials may be lucky, but not by so much."""
TEXT_COLUMNS = ("", "options", "bottleneck", "stage", "where")
"""Columns that are aligned left; all others have numbers."""
EQUAL = "equal: equally fast, but no cheaper than the chosen setting."
ROUNDS = "rounds: A/B rounds (settings alternate, so drift cancels); -: a single trial."
WAIT = "wait: share of time the training loop spends waiting for data."


def summary_of(result: TuningResult) -> str:
    """What to use, what it brings, and where the report is: what `print(result)` shows."""
    name = "loader" if result.found_by == "autoloader" else "result"
    return wrapped(" ".join([*_choice(result), Choice.REPORT(name=name)]), indent="")


def sentences_of(result: TuningResult) -> list[Finding]:
    """Everything that is said of a result apart from its table."""
    said = [*_choice(result), result.bottleneck, result.ended]
    return [*(each for each in said if each is not None), *result.advice, *result.warnings]


def report_of(result: TuningResult, width: int = WIDTH) -> str:
    """The whole result: choice, table, bottleneck, stages, advice, warnings, how it was found."""
    differs = [each for each in result.warnings if Caution.LACKS.said_by(each)]
    blocks = [
        [wrapped(each, width, indent="") for each in differs],
        [wrapped(" ".join(_choice(result)), width, indent="")],
        [configurations_of(result, width)],
        [wrapped(each, width) for each in _facts(result)],
        _stage_lines(result, width),
        ["Next:", *(wrapped(f"- {each}", width) for each in result.advice)] if result.advice else [],
        [wrapped(f"Warning: {each}", width) for each in result.warnings if each not in differs],
        [wrapped(" ".join(_how(result)), width, indent="")],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _choice(result: TuningResult) -> list[Finding]:
    """What to use, and what it brings."""
    best, ratio = result.best, result.speedup
    rate = _rate_words(result.rate and rate_of(best, result), result.rate_unit)
    if result.status == "fallback":
        return [Ended.FALLBACK()]
    if result.status == "partial" and result.found_by != "tune" and (so_far := _so_far(result)) is not None:
        return [so_far]
    said = [result.undecided or Undecided.NO_ROUNDS()] if result.status == "undecided" else []
    if best == result.baseline:
        said.append(Choice.KEEP(best=best, rate=rate))
        if result.status == "complete":
            said.append(Choice.NOTHING_FASTER(tolerance=result.tolerance))
    else:
        said.append(Choice.USE(best=best, rate=rate))
        before = f"your current setting, {result.baseline}"
        if ratio is not None and result.found_by != "tune" and not ratio.is_telling:
            said.append(Answer.AT_SWITCH(name="It", ratio=ratio, other=before))
        elif ratio is not None:
            said.append(answer("It", ratio, before, result.tolerance))
        else:
            said.append(Choice.NOT_COMPARED(baseline=before))
        if ratio is not None and not ratio > WORTH_CLAIMING and ratio.value < MUCH_FASTER:
            sizes = [(each.num_workers, each.batches_in_flight) for each in (best, result.baseline)]
            said.append(Choice.COSTS_LESS() if sizes[0] < sizes[1] else Choice.IF_MEMORY())
    if result.status == "undecided" and ratio is not None and ratio > WORTH_CLAIMING:
        said = [*said[1:], said[0]]  # what is sure comes first
    return [*said, *([Choice.SO_FAR()] if result.status == "partial" else [])]


def _so_far(result: TuningResult) -> Finding | None:
    """What an AutoLoader has while it tries; None where its best is the fastest of several that it has measured."""
    rates, baseline = {each.config: each.samples_per_s or 0.0 for each in result.trials}, result.baseline
    if len(rates) < 2 or not rates.get(baseline):
        return Choice.NOTHING_YET(baseline=baseline)
    fastest = max(rates, key=rates.__getitem__)
    if rates[fastest] <= (1 + result.tolerance) * rates.get(result.best, 0.0):
        return None
    return Choice.NOT_SETTLED(best=fastest, factor=rates[fastest] / rates[baseline], baseline=baseline)


def _rate_words(rate: Interval | None, unit: str) -> str:
    """Such as ": 1,486 samples/s (1,428 to 1,544)"; nothing where there is no rate."""
    if rate is None:
        return ""
    told = units.rate_text(rate.value, unit)
    return f": {told} ({rate.limits()})" if rate.is_telling else f": about {told}"


def configurations_of(result: TuningResult, width: int = WIDTH) -> str:
    """The table of configurations with a legend: those of the rounds, those of the search, those that failed and why."""
    rows = ranking(result)
    if not rows:
        return "No configuration was tried."
    shown = _shown(rows, result)
    has_rounds = any(row.source == "rounds" for row in shown)
    options = {tuple(row.config.words()) for row in shown if row.config.num_workers}
    left_out = [*(["options"] if len(options) < 2 else []), *([] if has_rounds else ["rounds", "95% CI"])]
    groups = [[_cells(row, result) for row in shown if row.source == each] for each in ("rounds", "search", "failed")]
    kept = [[{n: cell for n, cell in cells.items() if n not in left_out} for cells in group] for group in groups]
    lines = [table_text(kept, wraps="options" if len(options) > 1 else "", width=width)]
    if len(shown) < len(rows):
        lines.append(f"{units.counted(len(rows) - len(shown), 'more configuration')} in result.to_dataframe()")
    legend = [
        *([EQUAL] if any(row.config in result.as_fast for row in shown) else []),
        *([ROUNDS] if has_rounds else []),
        WAIT,
    ]
    # Each reason once, with the first configuration that failed for it.
    failed: dict[str, str] = {}
    for row in shown:
        if row.failure is not None:
            kind, phase = (word.replace("_", " ") for word in (row.failure.kind, row.failure.phase))
            failed.setdefault(row.failure.message, f"{row.config} failed: {kind} ({phase}): {row.failure.message}")
    why = ["", *failed.values()] if failed else []
    return "\n".join([*lines, "", *(wrapped(line, width) for line in (*legend, *why))])


def _shown(rows: Sequence[Standing], result: TuningResult) -> list[Standing]:
    """The fastest, and always the chosen one, the baseline and some of the failed."""
    worked = [row for row in rows if row.rate]
    failed = [row for row in rows if not row.rate][: MAX_ROWS // 2]
    kept = worked[: MAX_ROWS - len(failed)]
    return [*kept, *(row for row in worked[len(kept) :] if row.config in (result.best, result.baseline)), *failed]


def _cells(row: Standing, result: TuningResult) -> dict[str, str]:
    measured, config = row.measurement, row.config
    marks = {
        "kept" if config == result.best and result.status != "partial" else "before": config == result.baseline,
        "chosen" if result.status == "complete" else "so far": config == result.best,
        "failed": row.rate is None,
        "equal": config in result.as_fast,
    }
    return {
        "": next((mark for mark, applies in marks.items() if applies), ""),
        "workers": str(config.num_workers),
        "prefetch": units.UNKNOWN if config.prefetch_factor is None else str(config.prefetch_factor),
        "options": ", ".join(config.words()),
        result.rate_unit: units.number_text(row.rate.value) if row.rate else units.UNKNOWN,
        "95% CI": (row.rate and row.rate.limits(to="–")) or units.UNKNOWN,
        "rounds": str(row.rate.count) if row.rate and row.source == "rounds" else units.UNKNOWN,
        "wait": units.share_text(None if measured is None else measured.wait_share),
        "memory": units.bytes_text(None if measured is None else measured.taken_bytes),
    }


def _facts(result: TuningResult) -> Iterator[str]:
    if result.bottleneck is not None:
        yield result.bottleneck
    if result.ceiling is not None:
        rate = units.rate_text(result.ceiling.value, result.rate_unit)
        yield f"Ceiling: {rate}, the rate of training that never waits for data."
    if result.transfer_ceiling is not None:
        rate = units.rate_text(result.transfer_ceiling.value, result.rate_unit)
        yield f"Transfer: about {rate}, the most that DataLoader's workers can hand over to this step."
    if result.gpu_busy_share is not None:
        busy = units.share_text(result.gpu_busy_share)
        yield f"GPU: busy {busy} of the time (from the first to the last kernel of each step)."
    if result.gpu_utilization is not None:
        yield f"GPU {units.share_text(result.gpu_utilization)} busy (NVML)."
    if result.source is not None:
        yield result.source


def _stage_lines(result: TuningResult, width: int) -> list[str]:
    """The longest stages as a table: seconds, seconds of computing, place, and the share of what limits training."""
    by_cpu = Bottleneck.CPU.said_by(result.bottleneck)
    name, field = ("CPU share", "cpu_share") if by_cpu else ("share", "wall_share")
    shares = sorted(((getattr(each, field), each) for each in result.stages), key=lambda row: -row[0])
    rows = [
        {
            "stage": each.stage,
            name: units.share_text(share),
            "time": units.seconds_text(each.wall_s),
            "CPU time": units.seconds_text(each.cpu_s),
            "where": each.where,
        }
        for share, each in shares[:SHOWN_STAGES]
        if share >= SMALL_STAGE
    ]
    return ["Time of a sample in a worker:", table_text([rows], wraps="where", width=width)] if rows else []


def _how(result: TuningResult) -> Iterator[str]:
    if result.step:
        yield f"Step: {result.step}."
    if result.ended is not None and result.status != "fallback":
        yield result.ended
    if result.trials:
        yield f"{units.counted(len(result.trials), 'trial')} in {units.seconds_text(result.seconds)}."
    if (machine := result.machine) is not None:
        told = [(result.tuned_at or "")[:10], machine.dataset, units.counted(machine.usable_cores, "core")]
        gpu = "no GPU" if machine.gpu == NO_GPU else machine.gpu
        told += [units.bytes_text(machine.memory_bytes), gpu or "", f"torch {machine.torch}" if machine.torch else ""]
        yield f"{', '.join(filter(None, told))}."


def comparison_summary(comparison: Comparison) -> str:
    """Who is faster, a sentence for each side beside the first, and where the report is."""
    return wrapped(" ".join([*_answers_of(comparison), Choice.REPORT(name="comparison")]), indent="")


def comparison_report(comparison: Comparison) -> str:
    """The table of the sides and what it says."""
    table = table_text([[_side_cells(comparison, side) for side in comparison.sides]])
    blocks: list[Sequence[str]] = [
        _answers_of(comparison),
        [f"{side.name}: {side.bottleneck}" for side in comparison.sides if side.bottleneck is not None],
        [f"Warning: {each}" for each in comparison.notes],
        [f"{units.counted(len(comparison.rounds), 'A/B round')} in {units.seconds_text(comparison.seconds)}."],
    ]
    return "\n\n".join([table, *("\n".join(map(wrapped, block)) for block in blocks if block)])


def _answers_of(comparison: Comparison) -> list[Finding]:
    """A sentence for each side beside the first, and for each that failed."""
    rates = list(comparison.rates)
    failed = [Answer.FAILED(name=side.name, error=side.error) for side in comparison.sides if side.error is not None]
    if not rates:
        return [*failed, Answer.NONE()]
    if len(rates) == 1:
        return [*failed, Answer.ALONE(name=rates[0])]
    return [*failed, *(answer(name, ratio, rates[0]) for name, ratio in comparison.ratios.items())]


def _side_cells(comparison: Comparison, side: Side) -> dict[str, str]:
    measured, rate = side.measurement, comparison.rates.get(side.name)
    cells = dict.fromkeys(
        ("", comparison.rate_unit, "speedup", "95% CI", "wait", "workers", "memory", "bottleneck"), ""
    )
    cells |= {"": side.name, comparison.rate_unit: "failed", "workers": str(side.config.num_workers)}
    if measured is None or rate is None:
        return cells
    ratio = comparison.ratios.get(side.name)
    is_first = side.name == next(iter(comparison.rates))
    return cells | {
        comparison.rate_unit: units.number_text(rate.value),
        "speedup": "1" if is_first else units.UNKNOWN if ratio is None else ratio.as_ratio(),
        "95% CI": "" if is_first else (ratio and ratio.limits(units.factor_text)) or units.UNKNOWN,
        "wait": units.share_text(measured.wait_share),
        "memory": units.bytes_text(measured.taken_bytes),
        "bottleneck": units.UNKNOWN if side.bottleneck is None else side.bottleneck.kind.replace("_", " "),
    }


def wrapped(text: str, width: int = WIDTH, indent: str = "  ") -> str:
    """Each line of a text, wrapped; continuation lines are indented."""
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.splitlines() or [""]))


def tail_of(name: str, longest: int) -> str:
    """A name that is too long for its place, by its end, which tells most."""
    return name if len(name) <= longest else f"...{name[3 - longest :]}"


def table_text(groups: Sequence[Sequence[Mapping[str, str]]], *, wraps: str = "", width: int = WIDTH) -> str:
    """A table of rows, which are cells by column, with an empty line between groups.

    The column `wraps` is wrapped where the table would be wider than `width`.
    """
    rows = [row for group in groups for row in group]
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in rows[0]}
    own, gaps = widths[wraps], 2 * (len(widths) - 1)
    widths[wraps] = min(own, max(NARROWEST, len(wraps), own + width - sum(widths.values()) - gaps))
    gap = "  " if sum(widths.values()) + gaps <= width else " "
    line = "─" * (sum(widths.values()) + len(gap) * (len(widths) - 1))
    body = ["\n".join(_row_text(row, widths, wraps, gap) for row in group) for group in groups if group]
    return f"{_row_text({column: column for column in widths}, widths, wraps, gap)}\n{line}\n" + "\n\n".join(body)


def _row_text(row: Mapping[str, str], widths: Mapping[str, int], wraps: str, gap: str) -> str:
    """A row; more than one line where the wrapped column needs them."""
    words = " ".join(tail_of(word, widths[wraps]) for word in row[wraps].split())
    parts = textwrap.wrap(words, widths[wraps], break_on_hyphens=False) or [""]
    lines = []
    for number, part in enumerate(parts):
        cells = {column: part if column == wraps else cell if number == 0 else "" for column, cell in row.items()}
        sides = {column: "<" if column in TEXT_COLUMNS else ">" for column in cells}
        lines.append(gap.join(f"{cell:{sides[its]}{widths[its]}}" for its, cell in cells.items()).rstrip())
    return "\n".join(lines)
