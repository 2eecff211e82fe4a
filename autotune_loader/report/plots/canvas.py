"""What all pictures share: colours that colour-blind people tell apart, one style, figures that show themselves."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune_loader.report.units import is_telling, rate_text
from autotune_loader.values.errors import MissingExtraError
from autotune_loader.values.statistics import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito, "Color universal design" (2008); yellow is left out, it vanishes on white.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#999999"
DARK_GREY = "#555555"
# A ceiling so many times as high would press everything else flat onto the axis.
FAR_ABOVE = 1.6
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",
    "hatch.linewidth": 0.6,
}


@contextmanager
def canvas(title: str, width: float = 7.0, height: float = 4.2) -> Iterator[tuple[Figure, Axes]]:
    """A titled figure of so many inches with one set of axes; what is drawn inside the block has our style.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plotting", "matplotlib", "plots") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        # A figure made without pyplot is unknown to IPython's inline backend.
        figure._repr_png_ = partial(png_bytes, figure)  # type: ignore[attr-defined, unused-ignore]
        axes = figure.add_subplot()
        axes.set_title(title)
        yield figure, axes


def png_bytes(figure: Figure, dpi: int = 120) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg_bytes(figure: Figure) -> bytes:
    """The figure as an SVG file, the same for the same figure."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "autotune_loader", **_STYLE}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def error_bars(rates: list[Interval]) -> list[list[float]]:
    """Distances from the values to their limits, as matplotlib wants them; none where the interval tells nothing."""
    below = [max(0.0, rate.value - rate.low) if is_telling(rate) else 0.0 for rate in rates]
    return [below, [max(0.0, rate.high - rate.value) if is_telling(rate) else 0.0 for rate in rates]]


def say_nothing_to_show(axes: Axes, text: str) -> None:
    """An empty picture that says why it is empty."""
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=GREY, wrap=True)


def draw_ceiling(axes: Axes, ceiling: Interval | None, top: float) -> None:
    """The rate that no loader can exceed, as a labelled line; only told where it lies far above the `top` of the rest."""
    if ceiling is None:
        return
    if ceiling.value > FAR_ABOVE * top:
        axes.plot([], [], " ", label=f"ceiling {rate_text(ceiling.value)}, far above")
        return
    axes.axhline(ceiling.value, color=BLACK, linewidth=1.2, linestyle=(0, (6, 3)), label="ceiling: the step alone")


def legend_below(figure: Figure, columns: int = 3) -> None:
    """The legend outside the axes, where it hides nothing."""
    figure.legend(loc="outside lower center", ncols=columns)


def thousands(axis: Any) -> None:
    """Write the axis' numbers with their thousands separated."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(_tick_text))


def _tick_text(value: float, _position: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 else f"{value:g}"


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
