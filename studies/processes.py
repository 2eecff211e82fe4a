"""A command in a process of its own, of which nothing is left: what most studies measure in; neighbours that slow it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""Keeps a core busy until the process that started it ends, however it does."""
BUSY_HALF = """import os, time
parent = os.getppid()
while os.getppid() == parent:
    until = time.perf_counter() + 0.001
    while time.perf_counter() < until: pass
    time.sleep(0.001)"""
"""The same, for a millisecond of every two."""


class NoAnswerError(RuntimeError):
    """A process failed, hung or said nothing."""


def last_line(*command: str, python: str = sys.executable, timeout_s: float = 600.0, **environ: str) -> str:
    """The last line that `python *command` prints, at the repository's root and with more variables of the environment.

    It leads a session, which is killed at the end, with all that it started.

    Raises:
        NoAnswerError: it failed, printed nothing, or took longer.
    """
    process = subprocess.Popen(
        [python, "-W", "ignore", *command], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **environ}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {timeout_s:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode or not output:
        said = errors.strip().splitlines()
        raise NoAnswerError(said[-1] if said else f"exit status {process.returncode}")
    return output.splitlines()[-1]


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """So many processes want a core each while the block runs. Ctrl-C does not reach them; it ends the block, and that them."""
    with _beside([BUSY] * count):
        yield


@contextlib.contextmanager
def halved_cores() -> Iterator[None]:
    """Each core is half as fast while the block runs, for whoever uses it: a real-time process takes every other millisecond.

    Raises:
        PermissionError: The user may not start such processes (root may).
    """
    cores = sorted(os.sched_getaffinity(0))
    with _beside([BUSY_HALF] * len(cores)) as started:
        for core, each in zip(cores, started, strict=True):
            os.sched_setaffinity(each.pid, {core})
            os.sched_setscheduler(each.pid, os.SCHED_FIFO, os.sched_param(1))
        yield


@contextlib.contextmanager
def _beside(programs: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = list[subprocess.Popen[bytes]]()
    try:
        started += (subprocess.Popen([sys.executable, "-c", each], start_new_session=True) for each in programs)
        yield started
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()
