"""Records a command as it looks on a terminal: `python docs/make_recording.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autotune_loader.report.table import WIDTH

DOCS = Path(__file__).parent
FOLDER = DOCS.parent
COMMAND = ("watch", "examples/train.py", "3")


def main() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune_loader", *COMMAND],
        cwd=FOLDER,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    console = Console(record=True, width=WIDTH, highlight=False, markup=False)
    console.print(Text(f"$ autotune-loader {' '.join(COMMAND)}", style="bold"))
    console.print(done.stdout.strip())
    console.save_svg(str(DOCS / "gallery" / "watch.svg"), title=f"autotune-loader {COMMAND[0]}")


if __name__ == "__main__":
    main()
