"""Records what `autotune-loader watch` prints of the demo's job on a terminal: `python docs/make_recording.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autotune_loader import demo
from autotune_loader.report.table import WIDTH

DOCS = Path(__file__).parent


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, demo.store() as url:
        shutil.copy(Path(demo.__file__).with_name("train.py"), folder)
        command = ("watch", "train.py", url, str(demo.BEFORE))
        done = subprocess.run(
            [sys.executable, "-m", "autotune_loader", *command],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    console = Console(record=True, width=WIDTH, highlight=False, markup=False)
    console.print(Text(f"$ autotune-loader {' '.join(command)}", style="bold"))
    console.print(done.stdout.strip())
    console.save_svg(str(DOCS / "gallery" / "watch.svg"), title="autotune-loader watch")


if __name__ == "__main__":
    main()
