"""Pictures of a run: workers, stages, timeline.

Figures are plain matplotlib figures, made without pyplot: nothing is kept in global state and no window opens. They
show themselves in a notebook, and `figure.savefig("picture.svg")` writes them.
"""

from autotune_loader.report.plots.canvas import Figure
from autotune_loader.report.plots.charts import plot_stages, plot_workers
from autotune_loader.report.plots.timeline import plot_timeline

__all__ = ["Figure", "plot_stages", "plot_timeline", "plot_workers"]
