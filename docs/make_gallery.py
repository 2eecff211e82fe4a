"""Draws the gallery, and writes what README and tutorial show: `python docs/make_gallery.py`, about five minutes."""

from __future__ import annotations

import re
import subprocess
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
    local = tune(*demo.job(latency_s=0), budget=budget, progress=False)
    printed = {**what_is_shown(result), "local": local.report().partition("\n\n")[0], "gain": gain()}
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
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seconds": f"{result.seconds:.0f} seconds",
        "result": str(result),
        "parts": "\n".join(map(str, parts)),
        "report": result.report(),
        "predictions": "\n".join(str(each.samples_per_s) for each in asked),
    }


def gain() -> str:
    """What `autotune-loader demo` says of before and after."""
    done = subprocess.run(
        [sys.executable, "-m", "autotune_loader", "demo"], stdout=subprocess.PIPE, text=True, check=True
    )
    return next(line for line in done.stdout.splitlines() if line.startswith("Before: "))


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
