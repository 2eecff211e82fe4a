"""The pictures of `studies.live.convergence`: rate over time with the changes marked, against the best fixed configuration."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BAND = 0.05
"""The band around the best fixed rate."""


def draw(records: Sequence[dict[str, Any]], folder: Path) -> None:
    import matplotlib.pyplot as plt

    cold = [record for record in records if "rounds" in record]
    figure, axes = plt.subplots(len(cold), 1, figsize=(8, 2.2 * len(cold)), squeeze=False, layout="constrained")
    for axis, record in zip(axes[:, 0], cold, strict=True):
        rounds = record["rounds"]
        best = max(statistics.median([r[arm] for r in rounds if arm in r]) for arm in set(record["arms"].values()))
        rate_over_time(axis, record["live"], [(0, len(record["live"]["per_s"]), best)])
        axis.set_title(record["workload"], loc="left", fontsize=10)
    axes[-1, 0].set_xlabel("seconds of training")
    figure.savefig(folder / "convergence.png", dpi=110)
    for record in records:
        if "two" in record:
            figure, axes = plt.subplots(2, 1, figsize=(8, 4.4), sharex=True, layout="constrained")
            for axis, (name, live) in zip(axes, record["two"].items(), strict=True):
                rate_over_time(axis, live, [])
                axis.set_title(name, loc="left", fontsize=10)
        elif "fixed" in record:
            figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
            seconds = len(record["live"]["per_s"])
            halves = zip((0, seconds / 2), (seconds / 2, seconds), record["fixed"], strict=False)
            spans = record.get("spans") or list(halves)  # older records have halves only
            rate_over_time(
                axis,
                record["live"],
                [(first, last, max(record["fixed"][when].values())) for first, last, when in spans],
            )
            for first, _, when in spans[1:]:
                axis.axvline(first, color="tab:red", linestyle=":")
                axis.annotate(when, (first, 0.9), xycoords=("data", "axes fraction"), fontsize=8, color="tab:red")
        else:
            continue
        figure.axes[-1].set_xlabel("seconds of training")
        name = "disturbance" if record["workload"] == "storage_shift" else record["workload"]
        figure.savefig(folder / f"{name}.png", dpi=110)


def rate_over_time(axis: Any, live: dict[str, Any], best: Sequence[tuple[float, float, float]]) -> None:
    for first, last, rate in best:
        axis.fill_between(
            [first, last], rate * (1 - BAND), rate * (1 + BAND), color="tab:green", alpha=0.25, linewidth=0
        )
    axis.step(range(len(live["per_s"])), live["per_s"], where="post", color="tab:blue", linewidth=1.2)
    for when, workers, prefetch, _ in live["changes"]:
        axis.axvline(when, color="0.6", linewidth=0.8)
        axis.annotate(
            f"{workers} x {prefetch}" if workers else "0",
            (when, 0.04),
            xycoords=("data", "axes fraction"),
            fontsize=7,
            rotation=90,
            color="0.3",
        )
    axis.set_ylim(bottom=0)
    axis.set_ylabel("samples/s")
