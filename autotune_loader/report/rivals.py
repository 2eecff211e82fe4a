"""Every configuration once: its rate in the search, in the rounds and by the twin, and why it was not chosen."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from autotune_loader.report.standings import Standing, final_ratios, predicted_rates, standings
from autotune_loader.report.units import rate_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ["configuration", "search_samples_per_s", "finals_samples_per_s", "predicted_samples_per_s", "rounds", "why"]


def rivals_frame(result: TuningResult) -> pd.DataFrame:
    """One row for each configuration in the order of the report's table; what was not measured is NA.

    `search_samples_per_s` is its last burst that worked in the search, `finals_samples_per_s` its mean over the paired rounds,
    `predicted_samples_per_s` what the twin makes of all bursts, `why` the reason for or against it.
    """
    import pandas as pd

    rows = standings(result)
    chosen = next((row.rate for row in rows if row.is_best), None)
    predicted = predicted_rates(result, [row.config for row in rows]) or [math.nan] * len(rows)
    found = [
        (
            str(row.config),
            _in_search(result, row),
            fmean(rates) if (rates := result.finals.rates_of(row.config)) else math.nan,
            rate,
            len(rates),
            _why(result, row, chosen),
        )
        for row, rate in zip(rows, predicted, strict=True)
    ]
    frame: pd.DataFrame = pd.DataFrame(found, columns=COLUMNS)
    return frame


def _in_search(result: TuningResult, row: Standing) -> float:
    rates = [trial.samples_per_s for trial in result.trials if trial.config.key() == row.config.key()]
    return next((rate for rate in reversed(rates) if rate is not None), math.nan)


def _why(result: TuningResult, row: Standing, chosen: Interval | None) -> str:
    best = result.best
    if row.is_best:
        return "chosen"
    if row.failure is not None:
        return f"failed: {row.failure.message}"
    ratios = [ratio for _, ratio in final_ratios(result.finals, row.config, best)]
    if ratios:
        ratio = math.exp(fmean(map(math.log, ratios)))
        paired = f"{ratio:.2f} times the chosen one's rate in {len(ratios)} shared round" + "s" * (len(ratios) > 1)
        if row.ties_with_best:
            return f"as fast, and not cheaper: {paired}"
        if round(ratio, 2) == 1:
            return f"no faster: {paired}"
        return f"slower: {paired}" if ratio < 1 else f"not shown to be faster by what it costs more: {paired}"
    rate = row.rate
    if rate is None or chosen is None:
        return "no round was completed with it"
    if rate.high < chosen.low:
        return f"not raced: {rate_text(rate.value)} in its burst, far below the chosen one's {rate_text(chosen.value)}"
    return "not raced: by all bursts together it was not expected to win by more than the tolerance"
