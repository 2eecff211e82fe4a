"""Tables and the curve of the study on real workloads, from its records alone."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune_loader.values.config import LoaderConfig
from studies.regret import OURS
from studies.regret.oracle import Regret, config_of, leader_of, surveyed_regret
from studies.regret.over_time import NEAR, seconds_to_share, share_curve
from studies.regret.plateaus import PLATEAU_LOSS, plateaus
from studies.regret.quantiles import at
from studies.regret.records import Known

# Strategies that search, of whom it makes sense to ask how regret falls with time.
SHOWN_FLOOR = 0.001
LONGEST_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One strategy on one workload with one seed."""

    workload: str
    strategy: str
    seed: int
    seconds: float
    config: LoaderConfig | None
    regret: Regret | None
    fastest: LoaderConfig | None
    """The best of the oracle's rounds."""
    failure: str | None = None

    @property
    def counted(self) -> float:
        """A strategy that failed leaves the user with nothing: all is lost."""
        return 1.0 if self.regret is None else self.regret.counted

    @property
    def point(self) -> float:
        """The same without regard to the interval."""
        return 1.0 if self.regret is None else self.regret.point


def cells_of(known: dict[str, Known]) -> list[Cell]:
    """Every choice whose regret is known, and every failure."""
    cells = []
    for workload, mine in known.items():
        leader = leader_of(mine.rounds)
        for (strategy, seed), record in mine.choices.items():
            config = config_of(record["config"]) if record.get("config") else None
            regret = mine.regret_of(record["config"]) if record.get("config") else None
            if config is not None and regret is None:
                continue
            cell = Cell(
                workload=workload,
                strategy=strategy,
                seed=seed,
                seconds=record["seconds"],
                config=config,
                regret=regret,
                fastest=config_of(leader) if leader else None,
                failure=record.get("failure"),
            )
            cells.append(cell)
    return cells


def table(cells: Sequence[Cell]) -> str:
    """Regret and seconds by strategy."""
    lines = [
        "| strategy | runs | workloads | regret p50 | p90 | largest | within 2 % | point p50 | p90 | seconds p50 | p90 "
        "| workers, mean |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        mine = [cell for cell in cells if cell.strategy == strategy]
        regrets, seconds = [cell.counted for cell in mine], [cell.seconds for cell in mine]
        points = [cell.point for cell in mine]
        counts = [cell.config.num_workers for cell in mine if cell.config is not None]
        workers = statistics.fmean(counts) if counts else math.nan
        lines.append(
            f"| {strategy} | {len(mine)} | {len({cell.workload for cell in mine})} | {at(regrets, 0.5):.1%} "
            f"| {at(regrets, 0.9):.1%} | {max(regrets):.1%} | {share_within(mine):.0%} | {at(points, 0.5):.1%} "
            f"| {at(points, 0.9):.1%} | {at(seconds, 0.5):.1f} | {at(seconds, 0.9):.1f} | {workers:.1f} |"
        )
    return "\n".join(lines)


def details(cells: Sequence[Cell]) -> str:
    """Every single run."""
    lines = [
        "| workload | fastest | strategy | seed | chosen | ratio to the fastest | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        ratio = cell.regret.ratio if cell.regret else None
        said = (
            f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if ratio else f"failed: {_short(cell.failure)}"
        )
        lines.append(
            f"| {cell.workload} | {cell.fastest} | {cell.strategy} | {cell.seed} | {cell.config or '-'} | {said} "
            f"| {cell.seconds:.1f} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class RightSized:
    """The workers of one of our choices beside those of others (`plateaus.RightSizing`)."""

    workers: int
    fastest_workers: int
    fewest_workers: int
    """Of any configuration of the rounds that loses at most `PLATEAU_LOSS`, by point."""
    regret: float
    """By point."""


def right_sizing(cells: Sequence[Cell], known: dict[str, Known]) -> str:
    """Workers of our choices beside those of the fastest, and beside the fewest that are as fast by point."""
    lines = [
        "| workload | fastest point | its workers | chosen workers, by seed | ratio, by seed (rounds) | fewest within 1 % |",
        "|---|---|---|---|---|---|",
    ]
    runs = []
    for workload in dict.fromkeys(cell.workload for cell in cells):
        mine = [each for each in cells if each.workload == workload and each.strategy == OURS]
        fewest = _fewest_as_fast(known[workload])
        told = [(each.config, each.regret) for each in mine if each.config and each.regret]
        if not told or fewest is None or mine[0].fastest is None:
            continue
        most = mine[0].fastest.num_workers
        runs += [
            RightSized(workers=config.num_workers, fastest_workers=most, fewest_workers=fewest, regret=regret.point)
            for config, regret in told
        ]
        chosen = ", ".join(str(config.num_workers) for config, _ in told)
        ratios = ", ".join(f"{regret.ratio.value:.3f} ({regret.ratio.count})" for _, regret in told)
        lines.append(f"| {workload} | {mine[0].fastest} | {most} | {chosen} | {ratios} | {fewest} |")
    return "\n".join([*lines, "", f"{plateaus(runs)}."])


def _fewest_as_fast(mine: Known) -> int | None:
    arms = {arm for each in mine.rounds for arm in each.rates}
    regrets = {arm: mine.regret_of(arm) for arm in arms}
    near = [config_of(arm).num_workers for arm, regret in regrets.items() if regret and regret.point <= PLATEAU_LOSS]
    return min(near, default=None)


def over_time(known: dict[str, Known], strategy: str) -> list[list[tuple[float, float]]]:
    """By run: what regret the strategy would have had, had it been stopped after so many seconds.

    Before its first result it has torch's default. Regrets of what it held in between come from the survey's single burst
    where the rounds did not have that configuration.
    """
    runs = []
    for mine in known.values():
        for (name, _), record in mine.choices.items():
            if name != strategy or not record.get("config"):
                continue
            history = [(0.0, LoaderConfig()), *((at, config_of(config)) for at, config in record["history"])]
            held = [
                (at, surveyed_regret(config, mine.surveyed, mine.rounds, mine.confirming)) for at, config in history
            ]
            final = mine.regret_of(record["config"])
            steps = [(at, regret) for at, regret in held if regret is not None]
            if final is not None:
                runs.append([*steps, (record["seconds"], final.counted)])
    return runs


def equal_share(known: dict[str, Known], cells: Sequence[Cell]) -> str:
    """Seconds that others need for the share of runs within 2 % that they reach, beside ours for the same share."""
    ours = over_time(known, OURS)
    lines = [
        "| strategy | share within 2 % at its end | its seconds to that share | ours to that share |",
        "|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(cell.strategy for cell in cells):
        mine = [cell for cell in cells if cell.strategy == strategy]
        share = share_within(mine)
        runs = over_time(known, strategy)
        reached = (seconds_to_share(runs, share), seconds_to_share(ours, share)) if share else (None, None)
        theirs, own = reached
        lines.append(f"| {strategy} | {share:.0%} | {_seconds(theirs)} | {_seconds(own)} |")
    return "\n".join(lines)


def draw(cells: Sequence[Cell], known: dict[str, Known], path: Path) -> None:
    """Regret over wall seconds: a dot for each run, the curve of those that search, a cross at each median."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2), constrained_layout=True)
    strategies = list(dict.fromkeys(cell.strategy for cell in cells))
    colours = dict(zip(strategies, plt.get_cmap("tab10").colors, strict=False))
    for strategy in strategies:
        mine = [cell for cell in cells if cell.strategy == strategy]
        seconds = [max(cell.seconds, 0.5) for cell in mine]
        regrets = [max(100 * cell.counted, 100 * SHOWN_FLOOR) for cell in mine]
        colour = colours.get(strategy, "grey")
        left.scatter(seconds, regrets, s=22, alpha=0.45, color=colour, linewidths=0)
        middle = statistics.median(seconds), max(100 * at([c.counted for c in mine], 0.5), 100 * SHOWN_FLOOR)
        left.scatter(
            *middle, s=130, marker="P", color=colour, edgecolor="black", linewidth=0.8, label=strategy, zorder=3
        )
        runs = over_time(known, strategy)
        if any(run[-1][0] > 1 for run in runs):
            moments, shares = share_curve([[(max(at, 0.5), regret) for at, regret in run] for run in runs])
            # Drawn on to where the slowest ends.
            moments, shares = [*moments, LONGEST_S], [*shares, shares[-1]]
            right.step(moments, shares, where="post", color=colour, label=strategy, linewidth=1.8)
    left.set(xscale="log", yscale="log", xlabel="wall seconds from call to result (0 drawn at 0.5)")
    left.set(ylabel="regret in % (none drawn at 0.1)", title="Each run, and the median of each strategy")
    left.axhline(100 * NEAR, color="grey", linewidth=0.8, linestyle=":")
    right.set(xscale="log", ylim=(0, 1.02), xlabel="wall seconds", ylabel="share of runs within 2 % of the best")
    right.set_title("Had it been stopped earlier")
    for axes in (left, right):
        axes.grid(alpha=0.2, which="both")
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def report(known: dict[str, Known], path: Path) -> None:
    """Write the tables and the plot, and print the first table."""
    cells = cells_of(known)
    if not cells:
        print("nothing has been measured yet")
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    import torch

    machine = (
        f"`{os.cpu_count()}c-{memory:.0f}g-cpu` ({platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}), {time.strftime('%Y-%m-%d')}"
    )
    text = "\n\n".join(
        [
            "# Regret on real workloads",
            f"`python -m studies.regret.real` on {machine}. Regret is what the oracle's paired rounds show; a difference whose "
            "95 % interval includes none counts as none; `point` takes every difference as it was measured.",
            table(cells),
            "## At equal share of runs within 2 %",
            equal_share(known, cells),
            "## Workers",
            right_sizing(cells, known),
            "## Every run",
            details(cells),
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    draw(cells, known, path.with_suffix(".png"))
    print(table(cells) + "\n\n" + equal_share(known, cells))


def share_within(cells: Sequence[Cell]) -> float:
    return sum(cell.counted <= NEAR for cell in cells) / len(cells)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _short(failure: str | None) -> Any:
    return (failure or "unknown").strip().splitlines()[-1][:100]
