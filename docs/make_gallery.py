"""Draws the gallery, and writes what README and tutorial show: `python docs/make_gallery.py`, about two minutes."""

from __future__ import annotations

import re
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from autotune_loader import demo, tune

if TYPE_CHECKING:
    from autotune_loader import TuningResult

DOCS = Path(__file__).parent
PAGES = (DOCS / "tutorial.md", DOCS.parent / "README.md")
BLOCK = "(<!-- printed: {name} -->\n```text\n).*?(```)"
WORD = "(<!-- printed: {name} -->).*?(<!-- end -->)"


def main(budget: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = tune(*demo.job(), budget=budget, output=str(Path(folder, "loader.json")), progress=False)
    printed = what_is_shown(result)
    sys.stdout.write("\n\n".join(printed.values()) + "\n")
    for page in PAGES:
        page.write_text(with_printed(page.read_text(encoding="utf-8"), printed), encoding="utf-8")
    for name in ("workers", "stages", "timeline"):
        path = DOCS / "gallery" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        getattr(result, f"plot_{name}")().savefig(path, dpi=110)


def what_is_shown(result: TuningResult) -> dict[str, str]:
    """What the code of the pages prints, by the name of its place."""
    parts = [result.best, result.speedup, result.bottleneck, "\n".join(map(str, result.advice))]
    asked = (result.predict(num_workers=2), result.predict(num_workers=8, cores=8))
    report = result.report()
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": f"{result.seconds:.0f} seconds",
        "result": str(result),
        "parts": "\n".join(map(str, parts)),
        "report": report,
        "table": report.partition("\n\nBottleneck")[0],
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


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "60s")
