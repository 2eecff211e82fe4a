"""Draws the gallery, and prints what README and tutorial show: `python docs/make_gallery.py`, a minute on a quiet machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autotune_loader import TuningResult

DOCS = Path(__file__).parent
PICTURES = ("workers", "heatmap", "history", "timeline", "speedup")


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """The tutorial's: samples on a network drive."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return torch.rand(32), index % 10


def main(budget: str) -> None:
    from autotune_loader import tune

    options: dict[str, Any] = {"batch_size": 32, "train_step": 0.01, "budget": budget, "progress": False}
    result = tune(Slow(), **options)
    told: list[Any] = [result, result.best, result.speedup, result.verdict, *result.advice, result.report()]
    told += [result.predict(num_workers=2).samples_per_s, result.predict(num_workers=16, cores=8).samples_per_s]
    told.append(tune(Slow(), **options))
    sys.stdout.write("\n\n".join(map(str, told)) + "\n")
    for name in PICTURES:
        draw(result, name)


def draw(result: TuningResult, name: str) -> None:
    figure: Figure = getattr(result, f"plot_{name}")()
    path = DOCS / "gallery" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "30s")
