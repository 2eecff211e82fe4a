"""Draws the gallery's pictures: `python docs/make_gallery.py`, about a minute on a quiet machine.

All but the failures come from a real tuning run of the demo's JPEG files; nothing fails there, so that picture is drawn from
the simulated run that the tests use.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autotune_loader import TuningResult

DOCS = Path(__file__).parent
PICTURES = ("workers", "heatmap", "memory", "history", "timeline", "speedup")


def main(budget: str) -> None:
    from autotune_loader import tune
    from autotune_loader.demo import BATCH_SIZE, JpegFolder, SmallCnn, cache_folder, make_jpegs

    make_jpegs(cache_folder())
    result = tune(JpegFolder(cache_folder()), SmallCnn(), batch_size=BATCH_SIZE, budget=budget, reuse=False)
    for name in PICTURES:
        draw(result, name)
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from report.example import synthetic_result

    draw(synthetic_result(), "failures")


def draw(result: TuningResult, name: str) -> None:
    figure: Figure = getattr(result, f"plot_{name}")()
    path = DOCS / "gallery" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "60s")
