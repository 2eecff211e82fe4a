"""A script in a folder of its own, run as it is and by the command line.

It runs in a Python that has imported torch already.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

HARD_DEADLINE_S = 100
FIRST_LINE = re.compile(r"\nautotune-loader \w+: (\S+: the training loop waits [^\n]*)\n")
COMMAND = "import sys\nfrom autotune_loader.cli import main\nsys.exit(main())"


class Ended(NamedTuple):
    code: int
    printed: str  # by the script
    report: str


def line_of(script: str, mark: str) -> int:
    return next(number for number, line in enumerate(script.splitlines(), 1) if f"# {mark}" in line)


class Bench:
    """Runs scripts that begin with `head`, in a `PreloadedPython`."""

    def __init__(self, python: Any, folder: Path, head: str) -> None:
        self.python, self.folder, self.head = python, folder, head
        self.first_lines: list[str] = []
        (folder / "command.py").write_text(COMMAND)

    def write(self, body: str) -> str:
        text = self.head + textwrap.dedent(body)
        (self.folder / "train.py").write_text(text)
        return text

    def run(self, *argv: str, **environ: str) -> tuple[int, str]:
        started = self.python.start(
            *argv, folder=self.folder, environ={"OMP_NUM_THREADS": "1", **environ}
        )
        code = started.wait(HARD_DEADLINE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # a killed DataLoader's own, of a fork server
        return code, started.output

    def command(self, *argv: str, **environ: str) -> Ended:
        """Run a command line; what was told while the script ran is in `first_lines`."""
        code, output = self.run("command.py", *argv, **environ)
        self.first_lines = FIRST_LINE.findall(output)
        printed, _, report = FIRST_LINE.sub("", output).partition("\nautotune-loader ")
        return Ended(code, printed, report)

    def told(self, *argv: str, **environ: str) -> tuple[str, dict[str, Any]]:
        """What a script that ends well printed, and the report as data."""
        code, printed, output = self.command(argv[0], "--json", "report.json", *argv[1:], **environ)
        assert code == 0, printed + output
        return printed, json.loads((self.folder / "report.json").read_text())
