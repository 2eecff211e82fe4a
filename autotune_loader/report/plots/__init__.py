"""Pictures of a run. Each is a value computed once (`*_info`) and a function that only draws it.

Figures are plain matplotlib figures, made without pyplot: nothing is kept in global state and no window opens. They
show themselves in a notebook, and `figure.savefig("picture.svg")` writes them.
"""

from autotune_loader.report.plots.speedup import plot_speedup
from autotune_loader.report.plots.stages import plot_stages
from autotune_loader.report.plots.timeline import plot_timeline
from autotune_loader.report.plots.workers import plot_workers

__all__ = [
    "plot_speedup",
    "plot_stages",
    "plot_timeline",
    "plot_workers",
]
