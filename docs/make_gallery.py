"""Draws the gallery, and writes what README and tutorial show: `python docs/make_gallery.py`, about two minutes."""

from __future__ import annotations

import re
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from autotune_loader import TuningResult

DOCS = Path(__file__).parent
PICTURES = ("workers", "speedup")
PAGES = (DOCS / "tutorial.md", DOCS / "gallery.md", DOCS.parent / "README.md")
BLOCK = "(<!-- printed: {name} -->\n```text\n).*?(```)"
WORD = "(<!-- printed: {name} -->).*?(<!-- end -->)"


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """The tutorial's: samples on a network drive."""

    def __len__(self) -> int:
        return 20_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.004)
        return torch.rand(32), index % 10


def main(budget: str) -> None:
    from autotune_loader import tune

    def tuned(*, reuse: bool) -> TuningResult:
        return tune(Slow(), batch_size=32, train_step=0.02, budget=budget, progress=False, reuse=reuse)

    result = tuned(reuse=False)
    printed = what_is_shown(result, tuned(reuse=True))
    sys.stdout.write("\n\n".join(printed.values()) + "\n")
    for page in PAGES:
        page.write_text(with_printed(page.read_text(encoding="utf-8"), printed), encoding="utf-8")
    for name in PICTURES:
        draw(result, name)
    few = next(trial.number for trial in result.trials if trial.config.num_workers == 2)
    draw(result, "timeline", trial=few)


def what_is_shown(result: TuningResult, again: TuningResult) -> dict[str, str]:
    """What the code of the pages prints, by the name of its place."""
    parts = [result.best, result.speedup, result.verdict.binding, " ".join(map(str, result.advice))]
    asked = (result.predict(num_workers=2), result.predict(num_workers=16, cores=8))
    assert result.speedup is not None
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "gain": f"{result.speedup.value:.1f} times",
        "seconds": f"{result.spent.seconds:.0f} seconds",
        "result": str(result),
        "reused": again.summary[0],
        "parts": "\n".join(map(str, parts)),
        "report": result.report(),
        "table": result.report().split("\n\nUse ")[0],
        "predictions": "\n".join(str(each.samples_per_s) for each in asked),
    }


def with_printed(page: str, printed: dict[str, str]) -> str:
    """The page with what was printed in its places."""
    for name, text in printed.items():
        for pattern, filled in ((BLOCK, f"{text}\n"), (WORD, text)):
            page = re.sub(
                pattern.format(name=name),
                lambda found, filled=filled: found[1] + filled + found[2],
                page,
                flags=re.DOTALL,
            )
    return page


def draw(result: TuningResult, name: str, **options: int) -> None:
    figure: Figure = getattr(result, f"plot_{name}")(**options)
    path = DOCS / "gallery" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "60s")
