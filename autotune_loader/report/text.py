"""A result as text for a terminal, a log or an e-mail: what to use, the table, what it means and what to do next.

A comparison, too: the sides in a table, who is faster, what limits each.

A result goes in and a string comes out; whoever calls prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autotune_loader.diagnosis.ranking import Standing, ranking
from autotune_loader.diagnosis.tables import Answer, Choice, Ended, Undecided, answer
from autotune_loader.diagnosis.units import (
    MUCH_FASTER,
    UNKNOWN,
    bytes_text,
    counted,
    is_claimed,
    number_text,
    range_text,
    rate_text,
    ratio_text,
    seconds_text,
    share_text,
)
from autotune_loader.machine.facts import NO_GPU
from autotune_loader.report.table import WIDTH, table_text, tail_of, wrapped
from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.record import Finding
from autotune_loader.results.result import TuningResult
from autotune_loader.values import Interval, StageTime

MAX_ROWS = 16
"""Slower configurations than these are counted, not listed; the frame has them all."""
SHOWN_STAGES, SMALL_STAGE = 6, 0.01
"""So many stages, and none below this share, are listed; the frame has them all."""
LONGEST_NAME = 32
"""Of a function in the table of stages."""
HEADERS = ("", "workers", "prefetch", "options", "{rate_unit}", "95% range", "rounds", "wait", "memory")
NUMERIC = (1, 2, 4, 5, 6, 7, 8)
OPTIONS, ROUNDS = HEADERS.index("options"), HEADERS.index("rounds")
EQUAL = "equal: counts as equally fast, but is no cheaper than the chosen setting."
ROUNDS_WORDS = "rounds: A/B rounds (settings alternate, so drift cancels); -: a single trial."
WAIT_WORDS = "wait: share of the time that the training loop waits for data."


def summary_of(result: TuningResult) -> str:
    """What to use, what it brings, and where the report is: what `print(result)` shows."""
    name = "loader" if result.found_by == "autoloader" else "result"
    return wrapped(_sentences([*_choice(result), Choice.REPORT(name=name)]), indent="")


def sentences_of(result: TuningResult) -> list[Finding]:
    """Everything that is said of a result apart from its table."""
    said = [*_choice(result), result.bottleneck, result.ended]
    return [*(each for each in said if each is not None), *result.advice, *result.warnings]


def report_of(result: TuningResult, width: int = WIDTH) -> str:
    """The whole result: choice, table, bottleneck, stages, advice, warnings, how it was found."""
    blocks = [
        [wrapped(_sentences(_choice(result)), width, indent="")],
        [configurations_of(result, width)],
        *findings_of(result, width),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _sentences(findings: Sequence[Finding]) -> str:
    return " ".join(each.sentence for each in findings)


def _choice(result: TuningResult) -> list[Finding]:
    """What to use, and what it brings."""
    best, ratio, rate = result.best, result.speedup, _rate_words(result.rate, result.rate_unit)
    if result.status == "fallback":
        return [Ended.FALLBACK()]
    if result.status == "partial" and result.found_by != "tune" and (so_far := _so_far(result)) is not None:
        return [so_far]
    said = [result.undecided or Undecided.NO_ROUNDS()] if result.status == "undecided" else []
    if best == result.baseline:
        said.append(Choice.KEEP(best=best, rate=rate))
        said += [] if said[:-1] or result.status == "partial" else [Choice.NOTHING_FASTER(tolerance=result.tolerance)]
    else:
        said.append(Choice.USE(best=best, rate=rate))
        before = f"{result.baseline} (before tuning)"
        said.append(
            Choice.NOT_COMPARED(baseline=before) if ratio is None else answer("It", ratio, before, result.tolerance)
        )
        if ratio is not None and not is_claimed(ratio) and ratio.value < MUCH_FASTER:
            sizes = [(each.num_workers, each.batches_in_flight) for each in (best, result.baseline)]
            said.append(Choice.COSTS_LESS() if sizes[0] < sizes[1] else Choice.IF_MEMORY())
    if result.status == "undecided" and ratio is not None and is_claimed(ratio):
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


def _rate_words(rate: Interval | None, unit: str = "samples/s") -> str:
    """Such as ": 1,486 samples/s (1,428 to 1,544)"; nothing where there is no rate."""
    if rate is None:
        return ""
    if not rate.is_telling:
        return f": about {number_text(rate.value)} {unit}"
    return f": {number_text(rate.value)} {unit} ({number_text(rate.low)} to {number_text(rate.high)})"


def configurations_of(result: TuningResult, width: int = WIDTH) -> str:
    """The table of configurations with a legend: those of the rounds, those of the search, those that failed and why."""
    rows = ranking(result)
    if not rows:
        return "No configuration was tried."
    shown = _shown(rows)
    groups = [
        [_cells(row, result) for row in shown if row.source == source] for source in ("rounds", "search", "failed")
    ]
    headers, columns = [header.format(rate_unit=result.rate_unit) for header in HEADERS], list(range(len(HEADERS)))
    if len({tuple(row.config.words()) for row in shown if row.config.num_workers}) < 2:  # the first sentence has them
        columns.remove(OPTIONS)
    legend = [EQUAL] if any(row.is_as_fast for row in shown) else []
    if any(row.source == "rounds" for row in shown):
        legend.append(ROUNDS_WORDS)
    else:
        columns.remove(ROUNDS)
    lines = [
        table_text(
            [headers[column] for column in columns],
            [[[cells[column] for column in columns] for cells in group] for group in groups if group],
            numeric=[number for number, column in enumerate(columns) if column in NUMERIC],
            wraps=columns.index(OPTIONS) if OPTIONS in columns else 0,
            width=width,
        )
    ]
    if len(shown) < len(rows):
        lines.append(f"{counted(len(rows) - len(shown), 'more configuration')} in result.to_dataframe()")
    words = (wrapped(line, width) for line in (*legend, WAIT_WORDS))
    return "\n".join([*lines, "", *words, *_failure_lines(shown, width)])


def _shown(rows: Sequence[Standing]) -> list[Standing]:
    """The fastest, and always the chosen one, the baseline and some of the failed."""
    worked = [row for row in rows if row.rate]
    failed = [row for row in rows if not row.rate][: MAX_ROWS // 2]
    kept = worked[: MAX_ROWS - len(failed)]
    return [*kept, *(row for row in worked if row not in kept and (row.is_best or row.is_baseline)), *failed]


def _cells(row: Standing, result: TuningResult) -> tuple[str, ...]:
    chosen = "chosen" if result.status == "complete" else "so far"
    of_baseline = "kept" if row.is_best and result.status != "partial" else "before"
    marks = (
        (of_baseline, row.is_baseline),
        (chosen, row.is_best),
        ("failed", row.rate is None),
        ("equal", row.is_as_fast),
    )
    mark = next((mark for mark, applies in marks if applies), "")
    rate = number_text(row.rate.value) if row.rate else UNKNOWN
    ahead = UNKNOWN if row.config.prefetch_factor is None else str(row.config.prefetch_factor)
    rounds = str(row.rate.count) if row.rate and row.source == "rounds" else UNKNOWN
    measured = row.measurement
    wait, memory = (None, None) if measured is None else (measured.wait_share, measured.taken_bytes)
    knobs = (mark, str(row.config.num_workers), ahead, ", ".join(row.config.words()))
    return (*knobs, rate, range_text(row.rate), rounds, share_text(wait), bytes_text(memory))


def _failure_lines(rows: Sequence[Standing], width: int) -> list[str]:
    """Each reason once, with the first configuration that failed for it."""
    failed: dict[str, str] = {}
    for row in rows:
        if row.failure is not None:
            kind, phase = (word.replace("_", " ") for word in (row.failure.kind, row.failure.phase))
            failed.setdefault(row.failure.message, f"{row.config} failed: {kind} ({phase}): {row.failure.message}")
    return ["", *(wrapped(text, width) for text in failed.values())] if failed else []


def findings_of(result: TuningResult, width: int = WIDTH) -> list[list[str]]:
    """What the table means, in blocks of lines."""
    facts = [wrapped(sentence, width) for sentence in _facts(result)]
    stages = ["Time of a sample in a worker:", *stage_lines(result.stages, width)] if result.stages else []
    advice = ["Next:", *(wrapped(f"- {each}", width) for each in result.advice)] if result.advice else []
    warnings = [wrapped(f"Warning: {each}", width) for each in result.warnings]
    how = [wrapped(" ".join(_how(result)), width, indent="")]
    return [facts, stages, advice, warnings, how]


def _facts(result: TuningResult) -> Iterator[str]:
    if result.bottleneck is not None:
        yield result.bottleneck.sentence
    if result.ceiling is not None:
        yield f"Ceiling: {rate_text(result.ceiling.value)}, the rate of the training step alone, with its data in memory."
    if result.gpu_busy_share is not None:
        yield f"GPU: busy {share_text(result.gpu_busy_share)} of the time (from the first to the last kernel of each step)."
    if result.source is not None:
        yield result.source.sentence


def _how(result: TuningResult) -> Iterator[str]:
    if result.step:
        yield f"Step: {result.step}."
    if result.ended is not None and result.status != "fallback":
        yield result.ended.sentence
    if result.trials:
        yield f"{counted(len(result.trials), 'trial')} in {seconds_text(result.seconds)}."
    if result.machine is not None:
        yield f"{_machine_words(result.tuned_at, result.machine)}."


def _machine_words(tuned_at: str | None, machine: Any) -> str:
    """When and where, such as "2026-11-26, photos.Photos[1200], 4 cores, 16 GiB, no GPU, torch 2.6.0"."""
    told = [(tuned_at or "")[:10], machine.dataset, counted(machine.usable_cores, "core")]
    gpu = "no GPU" if machine.gpu == NO_GPU else machine.gpu
    told += [bytes_text(machine.memory_bytes), gpu, f"torch {machine.torch}"]
    return ", ".join(filter(None, told))


def stage_lines(times: Sequence[StageTime], width: int = WIDTH) -> list[str]:
    """The longest stages as a table: share of a sample's time, how much of that is computing, seconds, where."""
    whole_s = sum(each.wall_s for each in times)
    shown = [each for each in times[:SHOWN_STAGES] if max(each.wall_s, each.cpu_s) >= SMALL_STAGE * whole_s]
    rows = [
        (
            each.stage,
            share_text(each.wall_share),
            seconds_text(each.wall_s),
            seconds_text(each.cpu_s),
            _short(each.where),
        )
        for each in shown
    ]
    headers = ("stage", "share", "time", "CPU time", "where")
    return [table_text(headers, [rows], numeric=(1, 2, 3), wraps=4, width=width)] if rows else []


def _short(where: str) -> str:
    """Names that are too long for their column, by their ends: the line of the user's and the function tell most."""
    return " ".join(tail_of(word, LONGEST_NAME) for word in where.split())


def comparison_summary(comparison: Comparison) -> str:
    """Who is faster, a sentence for each side beside the first, and where the report is."""
    said = [*_answers_of(comparison), Choice.REPORT(name="comparison")]
    return wrapped(_sentences(said), indent="")


def comparison_report(comparison: Comparison, width: int = WIDTH) -> str:
    """The table of the sides and what it says."""
    headers = ("", comparison.rate_unit, "times as fast", "wait", "workers", "memory", "bottleneck")
    rows = [_side_row(comparison, side) for side in comparison.sides]
    limits = [f"{side.name}: {side.bottleneck}" for side in comparison.sides if side.bottleneck is not None]
    said = [each.sentence for each in _answers_of(comparison)]
    how = f"{counted(len(comparison.rounds), 'A/B round')} in {seconds_text(comparison.seconds)}."
    blocks = [said, limits, [f"Warning: {each}" for each in comparison.notes], [how]]
    text = ["\n".join(wrapped(line, width) for line in block) for block in blocks if block]
    return "\n\n".join([table_text(headers, [rows], numeric=(1, 3, 4, 5), width=width), *text])


def _answers_of(comparison: Comparison) -> list[Finding]:
    """A sentence for each side beside the first, and for each that failed."""
    rates = comparison.rates
    first = next(iter(rates), "")
    failed = [Answer.FAILED(name=side.name, error=side.error) for side in comparison.sides if side.error is not None]
    said = [answer(name, ratio, first) for name, ratio in comparison.ratios.items()]
    if not rates:
        return [*failed, Answer.NONE()]
    alone = [Answer.ALONE(name=name) for name in rates if len(rates) == 1]
    return [*failed, *said, *alone]


def _side_row(comparison: Comparison, side: Side) -> tuple[str, ...]:
    measured, rate, workers = side.measurement, comparison.rates.get(side.name), str(side.config.num_workers)
    if measured is None or rate is None:
        return (side.name, "failed", "", "", workers, "", "")
    times = "1" if side.name == next(iter(comparison.rates)) else ratio_text(comparison.ratios.get(side.name))
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
