"""Busy neighbours on the same machine, as long as a block lasts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence

BUSY = (sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))")
"""A command that keeps one core busy until it is killed, or until the study that started it is gone."""


@contextlib.contextmanager
def beside(commands: Iterable[Sequence[str]]) -> Iterator[None]:
    """Run these as long as the block lasts."""
    running = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()
