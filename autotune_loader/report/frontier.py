"""What about half of the cores would do, in one sentence, from what was measured."""

from __future__ import annotations

from autotune_loader.report.standings import standings
from autotune_loader.report.units import share_text
from autotune_loader.results.result import TuningResult

FEWER_CORES = 0.6
"""Of the cores: the sentence is about half of them ..."""
WORTH_TELLING = 0.7
"""... and most of the rate."""
LEAST_CORES = 0.5
"""Who keeps less than this of one core busy has nothing to save."""


def frontier_sentence(result: TuningResult) -> str:
    """The fastest measured configuration on about half of the cores; "" where that is slow, or cores were not measured."""
    cores_of = {
        row.config: (row.rate.value, row.measurement.cpu_share * result.twin.usable_cores)
        for row in standings(result)
        if result.twin and row.rate and row.measurement and row.measurement.cpu_share is not None
    }
    rate, cores = cores_of.get(result.best, (0.0, 0.0))
    fewer = [(known, config) for config, known in cores_of.items() if known[1] <= FEWER_CORES * cores]
    if cores < LEAST_CORES or not fewer:
        return ""
    (slower, busy), config = max(fewer, key=lambda each: each[0])
    if not WORTH_TELLING <= slower / rate <= 1:
        return ""
    return f"Fewer cores: {share_text(slower / rate)} of the rate with {busy:.1f} instead of {cores:.1f} cores busy ({config})."
