"""What all pictures share: colours that colour-blind people tell apart, one style, figures that show themselves."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from autotune_loader.values import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:
    Axes = Figure = Any  # matplotlib is imported when something is drawn

# Okabe and Ito, "Color universal design" (2008); yellow is left out, it vanishes on white.
BLACK, ORANGE, SKY = "#000000", "#E69F00", "#56B4E9"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"  # of the same palette
GREY, DARK_GREY = "#999999", "#555555"  # what stays in the background, and text there
# One look for all pictures, which neither reads nor changes the user's own settings of matplotlib.
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
    "svg.hashsalt": "autotune_loader",
}


def picture(
    title: str,
    content: Callable[[Axes], None] | str,
    *,
    width: float = 7.0,
    height: float = 4.2,
    legend_columns: int = 3,
) -> Figure:
    """A titled figure with one set of axes in our style.

    Args:
        title: above the axes.
        content: what draws on the axes; or the reason why there is nothing to draw, which is then written instead.
        width: of the figure in inches.
        height: of the figure in inches.
        legend_columns: of the legend below the axes, where it hides nothing.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plotting", "matplotlib") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        # A figure made without pyplot is unknown to IPython's inline backend.
        figure._repr_png_ = partial(png_bytes, figure)  # type: ignore[attr-defined, unused-ignore]
        axes = figure.add_subplot()
        axes.set_title(title, wrap=True)
        if isinstance(content, str):
            axes.set_axis_off()
            axes.text(0.5, 0.5, content, ha="center", va="center", transform=axes.transAxes, color=GREY, wrap=True)
        else:
            content(axes)
            figure.legend(loc="outside lower center", ncols=legend_columns)
    return figure


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def svg_bytes(figure: Figure) -> bytes:
    """The figure as an SVG file, the same for the same figure."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
