"""Records what `autotune-loader watch` prints of the demo's job on a terminal: `python docs/make_recording.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
COMMAND = ("watch", "examples/train.py", "3")


def main() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune_loader", *COMMAND],
        cwd=DOCS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    console = Console(record=True, width=112, highlight=False, markup=False)
    console.print(Text(f"$ autotune-loader {' '.join(COMMAND)}", style="bold"))
    console.print(done.stdout.strip())
    console.save_svg(str(DOCS / "gallery" / "watch.svg"), title="autotune-loader watch")


if __name__ == "__main__":
    main()
