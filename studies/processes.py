"""A function in a process of its own, of which nothing is left: what most studies measure in; neighbours that slow it.

python studies/processes.py studies.live.births:start '{"workers": 2}'     # the process: prints what the function returns
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""Keeps a core busy until the process that started it ends, however it does."""


class NoAnswerError(RuntimeError):
    """A process failed, hung or said nothing."""


def answer(
    function: Callable[..., Any], *, under: tuple[str, ...] = (), python: str = sys.executable, timeout_s: float = 600.0,
    environ: dict[str, str] | None = None, **given: Any,
) -> Any:  # fmt: skip
    """What a function of a module returns in a fresh process, as JSON has it; `under` comes before the script.

    Raises:
        NoAnswerError: it failed, printed nothing, or took longer.
    """
    job = [__file__, f"{function.__module__}:{function.__name__}", json.dumps(given)]
    line = last_line(*under, *job, python=python, timeout_s=timeout_s, **(environ or {}))
    return json.loads(line)


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


def forked(function: Callable[..., Any], *given: Any) -> Any:
    """What a function returns in a fork of this process, which has imported what it needs."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(function(*given)))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        raise NoAnswerError(f"{function.__name__}{given} failed") from None
    finally:
        process.join()


def cores_free(seconds: float = 0.3) -> float:
    """The least share of a core that one process for each core gets, that is 1 where nobody else wants them."""
    with concurrent.futures.ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), multiprocessing.get_context("fork")
    ) as pool:
        return min(pool.map(_share, [seconds] * len(os.sched_getaffinity(0))))


def _share(seconds: float) -> float:
    begun, used = time.perf_counter(), time.process_time()
    while time.perf_counter() < begun + seconds:
        pass
    return (time.process_time() - used) / (time.perf_counter() - begun)


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """So many processes want a core each while the block runs. Ctrl-C does not reach them; it ends the block, and that them."""
    started = list[subprocess.Popen[bytes]]()
    try:
        started += (subprocess.Popen([sys.executable, "-c", BUSY], start_new_session=True) for _ in range(count))
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this folder, whose names are not those of modules
    module, _, name = sys.argv[1].partition(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))), flush=True)
