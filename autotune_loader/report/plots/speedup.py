"""The proof: chosen configuration over baseline, round by round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from autotune_loader.report.plots import canvas
from autotune_loader.report.standings import final_ratios
from autotune_loader.report.units import ratio_text
from autotune_loader.results.result import TuningResult
from autotune_loader.values.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedupInfo:
    """What the picture shows."""

    ratios: tuple[tuple[int, float], ...]
    """(round from 1, rate of the chosen over rate of the baseline)."""
    speedup: Interval | None
    rounds: int
    """All rounds; the baseline sits out once it is known."""


def speedup_info(result: TuningResult) -> SpeedupInfo:
    """Gather what `plot_speedup` draws."""
    is_changed = result.best != result.baseline
    ratios = final_ratios(result.finals, result.best, result.baseline) if is_changed else []
    numbered = tuple((number + 1, ratio) for number, ratio in ratios)
    return SpeedupInfo(ratios=numbered, speedup=result.speedup, rounds=len(result.finals.rounds))


def plot_speedup(result: TuningResult) -> canvas.Figure:
    """The speed-up in each paired round, with its mean and interval; 1 means no faster than before tuning."""
    info = speedup_info(result)
    nothing = "No paired rounds were run, or the configuration before tuning is the best."
    content = partial(_draw, info) if info.ratios else nothing
    return canvas.picture("Speed-up over the configuration before tuning", content, height=3.4)


def _draw(info: SpeedupInfo, axes: canvas.Axes) -> None:
    axes.axhline(1, color=canvas.BLACK, linewidth=1, linestyle=(0, (6, 3)), label="no faster")
    limits = info.speedup if info.speedup is not None and info.speedup.is_telling else None
    if limits is not None:
        axes.axhspan(limits.low, limits.high, color=canvas.GREEN, alpha=0.25, linewidth=0)
    if info.speedup is not None:
        label = f"mean {ratio_text(info.speedup)}" + ("" if limits is None else ", 95 %")
        axes.axhline(info.speedup.value, color=canvas.GREEN, linewidth=2, label=label)
    axes.plot(*zip(*info.ratios, strict=True), "o", color=canvas.BLUE, label="paired round")
    top = max([1.0, *(ratio for _, ratio in info.ratios), *([] if limits is None else [limits.high])])
    axes.set(xlabel="round of the finals", ylabel="times as fast", ylim=(0, top * 1.15), xlim=(0.5, info.rounds + 0.5))
    axes.set_xticks(range(1, info.rounds + 1, 1 + info.rounds // 20))
