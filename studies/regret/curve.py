"""Draw regret against seconds on simulated machines: `python -m studies.regret.curve`.

One point per strategy and machine, and the median of each strategy; beside it, the share of the machines on which each
searching strategy would have been within 2 % of the best, had it been stopped earlier. From the record of
`studies.regret.simulated`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from studies.regret.over_time import NEAR, share_curve
from studies.regret.simulated import RESULTS, Outcome

PICTURE = Path(__file__).parent / "results" / "simulated.png"
LEAST_REGRET = 1e-4
"""Smaller ones are drawn here: the axis is logarithmic, and the oracle knows no better."""


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    outcomes = [Outcome(**json.loads(line)) for line in RESULTS.read_text().splitlines()]
    figure, (axes, share_axes) = pyplot.subplots(1, 2, figsize=(13, 5))
    for name in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == name]
        seconds = [max(outcome.seconds, 1.0) for outcome in mine]
        regrets = [max(outcome.regret, LEAST_REGRET) for outcome in mine]
        dots = axes.scatter(seconds, regrets, s=6, alpha=0.3)
        middle = statistics.median(seconds), statistics.median(regrets)
        within = sum(outcome.regret <= NEAR for outcome in mine) / len(mine)
        label = f"{name}: {within:.0%} of {len(mine)} within 2 %"
        colour = tuple(dots.get_facecolor()[0][:3])
        axes.scatter(*middle, s=90, color=colour, edgecolor="black", label=label)
        if mine[0].history:
            curve = share_curve([outcome.history for outcome in mine])
            share_axes.step(*curve, where="post", color=colour, label=name)
    axes.axhline(NEAR, color="grey", linestyle=":", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="simulated seconds", ylabel="regret", title="Simulated machines")
    axes.legend(fontsize=7, loc="lower left")
    share_axes.set(
        xscale="log", ylim=(0, 1), xlabel="simulated seconds", ylabel="share of machines within 2 % of the best"
    )
    share_axes.set_title("Had it been stopped earlier")
    share_axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
