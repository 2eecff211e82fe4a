"""What came of one injected bottleneck, kept as JSON lines, and the tables made of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
GOAL = 0.95
# Sizes of the real workloads, by how many times as much of everything a batch takes.
SCALES = {"small": 1, "medium": 2, "large": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One bottleneck of one size."""

    injected: str
    expected: tuple[str, ...]
    """Bindings that count as right: with some sizes two resources are equally short."""
    size: str
    verdict: str
    best: str
    samples_per_s: float
    advice: str | None = None
    """The first piece of advice."""
    promised: float | None = None
    """The relative gain that it promises."""
    gain: float | None = None
    """The relative gain measured after it was followed; None where it was not."""

    @property
    def is_right(self) -> bool:
        return self.verdict in self.expected


def save(outcomes: Iterable[Outcome], name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))


def table(outcomes: Sequence[Outcome]) -> str:
    """Right verdicts, and gains by promise, as a Markdown table."""
    lines = [
        "| injected | sizes | right | followed | it helped | gain p50 | promised p50 |",
        "|---|---|---|---|---|---|---|",
    ]
    for injected in dict.fromkeys(outcome.injected for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.injected == injected]
        gains = [outcome.gain for outcome in mine if outcome.gain is not None]
        promises = [outcome.promised for outcome in mine if outcome.promised is not None]
        helped = f"{sum(gain > 0 for gain in gains)}" if gains else "-"
        lines.append(
            f"| {injected} | {len(mine)} | {sum(o.is_right for o in mine)} | {len(gains)} | {helped} "
            f"| {_median(gains)} | {_median(promises)} |"
        )
    share = sum(outcome.is_right for outcome in outcomes) / len(outcomes)
    wrong = [f"{o.injected} {o.size}: {o.verdict} ({o.best})" for o in outcomes if not o.is_right]
    return "\n".join([*lines, "", f"right verdicts: {share:.1%} of {len(outcomes)} (goal {GOAL:.0%})", *wrong])


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):+.0%}" if values else "-"
