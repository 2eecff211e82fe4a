"""Whether the ceiling is one: no rate may lie above it, and the step cannot be faster in the loop than alone."""

from __future__ import annotations

from autotune_loader.decision.race import ABOVE_CEILING
from autotune_loader.report.standings import standings
from autotune_loader.report.units import rate_text, share_text
from autotune_loader.results.result import TuningResult

BURSTS_DIFFER = 0.15
"""Single bursts, which were run at another time than the step alone, may differ from it by so much, and nothing is wrong."""
HARDLY_STEPS = 0.95
"""A loop that waits for more than this tells nothing of its step."""


def ceiling_doubt(result: TuningResult) -> str | None:
    """Why the ceiling of a result is none, with both figures; None where nothing speaks against it, or there is none."""
    ceiling, rate, wait = result.ceiling, result.measured.samples_per_s, result.measured.wait_share
    if ceiling is None:
        return None
    alone = f"the step alone was measured at {rate_text(ceiling.value)}"
    for row in standings(result):
        is_mean = row.source == "finals" and row.rate is not None and row.rate.count > 1
        most = ABOVE_CEILING if is_mean else 1 + BURSTS_DIFFER
        if row.config.batch_size != result.best.batch_size or row.rate is None:
            continue
        if row.rate.value > most * ceiling.value:
            return f"{alone}, and {row.config} reached {rate_text(row.rate.value)} with it"
    if rate is None or wait is None or wait > HARDLY_STEPS or result.finals.whole_epochs:
        return None
    in_loop = rate.value / (1 - wait)
    if in_loop > (1 + BURSTS_DIFFER) * ceiling.value:
        told = f"{rate_text(rate.value)} with {share_text(wait)} waiting"
        return f"{alone}, and steps in the loop allow {rate_text(in_loop)} ({told})"
    return None
