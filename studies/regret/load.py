"""A neighbour on the same machine: two processes that each burn 0 to 50 % of a core in bursts of random length."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

PROCESSES = 2
MOST_SHARE = 0.5
SLICE_S = 0.02
BURST_S = (0.3, 3.0)
BUSY = (sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))")
"""A command that keeps one core busy until it is killed, or until the study that started it is gone."""


@contextlib.contextmanager
def neighbours(seed: int) -> Iterator[None]:
    """Run them as long as the block lasts."""
    command = [sys.executable, "-W", "ignore", "-m", "studies.regret.load"]
    with beside([*command, str(seed * PROCESSES + number)] for number in range(PROCESSES)):
        yield


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


def burn(seed: int) -> None:
    """Until killed, or until the study that started it is gone."""
    rng, parent = random.Random(seed), os.getppid()
    while os.getppid() == parent:
        share, until = rng.uniform(0, MOST_SHARE), time.perf_counter() + rng.uniform(*BURST_S)
        while time.perf_counter() < until:
            stop = time.perf_counter() + share * SLICE_S
            while time.perf_counter() < stop:
                pass
            time.sleep((1 - share) * SLICE_S)


if __name__ == "__main__":
    burn(int(sys.argv[1]))
