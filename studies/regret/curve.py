"""Draw regret against seconds on simulated machines: `python -m studies.regret.curve`.

One point per strategy and machine, and the median of each strategy; from the record of `studies.regret.simulated`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from studies.regret.simulated import RESULTS, Outcome

PICTURE = Path(__file__).parent / "results" / "simulated.png"
LEAST_REGRET = 1e-4
"""Smaller ones are drawn here: the axis is logarithmic, and the oracle knows no better."""


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    outcomes = [Outcome(**json.loads(line)) for line in RESULTS.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == name]
        seconds = [max(outcome.seconds, 1.0) for outcome in mine]
        regrets = [max(outcome.regret, LEAST_REGRET) for outcome in mine]
        dots = axes.scatter(seconds, regrets, s=6, alpha=0.3)
        middle = statistics.median(seconds), statistics.median(regrets)
        within = sum(outcome.regret <= 0.02 for outcome in mine) / len(mine)
        label = f"{name}: {within:.0%} of {len(mine)} within 2 %"
        axes.scatter(*middle, s=90, color=dots.get_facecolor()[0][:3], edgecolor="black", label=label)
    axes.axhline(0.02, color="grey", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="simulated seconds", ylabel="regret", title="Simulated machines")
    axes.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
