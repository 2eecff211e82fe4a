"""Following an advice: the job is changed as the advice says, tuned again, and runs in turn with what it was before."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune_loader import LoaderConfig, TuningResult, tune
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.tuning.schedule import FINAL_BURST
from autotune_loader.values.measurement import Failure
from autotune_loader.values.statistics import mean_interval
from studies.fidelity.measure import workload_of
from studies.workloads import StudyWorkload

RESULTS = Path(__file__).parent / "results"
ROUNDS = 4
WINDOW_BATCHES, SHORTEST_S, LONGEST_S = 12, 1.0, 3.0
"""A burst of the comparison: so many batches, within these seconds."""
GOAL = 0.20
"""Of the median error."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A job as it is tuned and run."""

    make: Callable[[], StudyWorkload]
    options: dict[str, Any] = field(default_factory=dict)
    """Of `tune()`."""
    cores: int | None = None
    """That it may use; None is all."""

    def tune(self, workload: StudyWorkload, budget: str, **options: Any) -> TuningResult:
        with on_cores(self.cores):
            given = {**workload.to_tune_kwargs(), **self.options, **options}
            return tune(**given, budget=budget, reuse=False, progress=False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and what follows which advice, by the beginning of its action."""

    name: str
    before: Way
    after: dict[str, Way]
    budget: str = "15s"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One piece of advice, promised and measured."""

    job: str
    chosen: str
    samples_per_s: float
    verdict: str
    advice: str
    promised: float | None
    """Relative gain."""
    chosen_after: str = ""
    measured: float | None = None
    """Relative gain after it was followed, in rounds that took turns; None where it was not."""
    low: float | None = None
    high: float | None = None

    @property
    def error(self) -> float | None:
        """Of the promised gain, relative to the one measured."""
        if self.promised is None or self.measured is None or not self.measured:
            return None
        return abs(self.promised - self.measured) / abs(self.measured)

    @property
    def rate_error(self) -> float | None:
        """Of the promised rate, relative to the one measured."""
        if self.promised is None or self.measured is None:
            return None
        return abs((1 + self.promised) / (1 + self.measured) - 1)


def follow(case: Case, *, only_first: bool, after_budget: str = "8s") -> Iterator[Row]:
    """The job tuned, and each advice that promises something and has its variant followed."""
    workload = case.before.make()
    result = case.before.tune(workload, case.budget)
    rate = result.measured.samples_per_s
    assert rate is not None, result.summary
    row = Row(
        job=case.name,
        chosen=str(result.best),
        samples_per_s=rate.value,
        verdict=result.verdict.binding,
        advice=result.advice[0].action if result.advice else "",
        promised=result.advice[0].expected_gain if result.advice else None,
    )
    print(f"{case.name}: {rate.value:.0f}/s, {result.best}: {result.verdict.sentence}", flush=True)
    for each in result.advice:
        print(f"    {each}", flush=True)
    followed = 0
    for advice in result.advice[: 1 if only_first else None]:
        way = next((way for start, way in case.after.items() if advice.action.startswith(start)), None)
        if way is None or advice.expected_gain is None:
            continue
        later = way.make()
        best = way.tune(later, after_budget).best
        gain = compared((case.before, workload, result.best), (way, later, best), rate.value)
        followed += 1
        print(
            f"    followed: {gain[0]:+.0%} ({gain[1]:+.0%} to {gain[2]:+.0%}), promised {advice.expected_gain:+.0%}",
            flush=True,
        )
        yield replace(
            row,
            advice=advice.action,
            promised=advice.expected_gain,
            chosen_after=str(best),
            measured=gain[0],
            low=gain[1],
            high=gain[2],
        )
    if not followed:
        yield row


def compared(
    before: tuple[Way, StudyWorkload, LoaderConfig], after: tuple[Way, StudyWorkload, LoaderConfig], rate: float
) -> tuple[float, float, float]:
    """Relative gain with its 95 % interval, from bursts that take turns."""
    logs = []
    with contextlib.ExitStack() as stack:
        probes = []
        for way, workload, _ in (before, after):
            with on_cores(way.cores):
                opened = open_probe(workload_of(workload), inspect_machine(), "process", None)
                probes.append(stack.enter_context(opened).probe)
        window_s = min(LONGEST_S, max(SHORTEST_S, WINDOW_BATCHES * before[1].batch_size / rate))
        plan = replace(FINAL_BURST, min_s=window_s, max_s=window_s, relative_error=0.0)
        for number in range(ROUNDS):
            rates = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                outcome = probes[which].burst((before, after)[which][2], replace(plan, seed=number))
                if isinstance(outcome, Failure):
                    raise RuntimeError(outcome.message)
                rates[which] = outcome.samples_per_s.value
            logs.append(math.log(rates[1] / rates[0]))
    mean = mean_interval(logs)
    return math.expm1(mean.value), math.expm1(mean.low), math.expm1(mean.high)


@contextlib.contextmanager
def on_cores(count: int | None) -> Iterator[None]:
    """Within the block this process, and those that it starts, may use the first so many cores."""
    allowed = os.sched_getaffinity(0)
    if count is not None:
        os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def read(name: str) -> list[Row]:
    path = RESULTS / name
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def keep(name: str, rows: Sequence[Row]) -> None:
    """The rows in place of earlier ones of the same jobs."""
    jobs = {row.job for row in rows}
    RESULTS.mkdir(exist_ok=True)
    kept = [row for row in read(name) if row.job not in jobs]
    (RESULTS / name).write_text("".join(json.dumps(asdict(row)) + "\n" for row in [*kept, *rows]))


def table(rows: Sequence[Row]) -> str:
    """As Markdown, with the median error of what was promised."""
    lines = [
        "| job | chosen | samples/s | verdict | advice | promised | measured | 95 % | error of the gain | of the rate |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        between = "" if row.low is None or row.high is None else f"{row.low:+.0%} to {row.high:+.0%}"
        action = row.advice if len(row.advice) <= 60 else row.advice[:57] + "..."
        lines.append(
            f"| {row.job} | {row.chosen} | {row.samples_per_s:,.0f} | {row.verdict} | {action} | {_percent(row.promised, '+')} "
            f"| {_percent(row.measured, '+')} | {between} | {_percent(row.error)} | {_percent(row.rate_error)} |"
        )
    errors = [row.error for row in rows if row.error is not None]
    if errors:
        rates = [row.rate_error for row in rows if row.rate_error is not None]
        kept = sum(
            row.measured >= 0.7 * row.promised for row in rows if row.measured is not None and row.promised is not None
        )
        lines += [
            "",
            f"{len(errors)} pieces of advice: median error of the gain {statistics.median(errors):.0%}, of the rate "
            f"{statistics.median(rates):.0%} (goal {GOAL:.0%}); {kept} brought at least 70 % of what was promised",
        ]
    return "\n".join(lines)


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.0%}"
