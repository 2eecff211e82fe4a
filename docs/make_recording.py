"""Records what `autotune-loader watch` prints of the demo's job on a terminal: `python docs/make_recording.py`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

from autotune_loader import demo
from autotune_loader.report.text import WIDTH

DOCS = Path(__file__).parent


def on_terminal(command: list[str], folder: str) -> str:
    """What a command prints on a terminal, colours included."""
    ours, its = os.openpty()
    with subprocess.Popen(command, cwd=folder, stdout=its, stderr=its):
        os.close(its)
        parts = []
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(ours, 4096):
                parts.append(part)
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, demo.store() as url:
        shutil.copy(Path(demo.__file__).with_name("train.py"), folder)
        command = ("watch", "train.py", url, str(demo.BEFORE))
        shown = on_terminal([sys.executable, "-m", "autotune_loader", *command], folder)
    console = Console(record=True, width=WIDTH, highlight=False, markup=False)
    console.print(Text(f"$ autotune-loader {' '.join(command)}", style="bold"))
    console.print(Text.from_ansi(shown.strip()))
    console.save_svg(str(DOCS / "gallery" / "watch.svg"), title="autotune-loader watch")


if __name__ == "__main__":
    main()
