from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune_loader.machine import processes

pytestmark = pytest.mark.process

DEADLINE_S = 20.0

# Starts `sleep` below itself, says so, and stays.
PARENT = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
# Burns CPU in a child that has ended and was waited for, says so, and stays.
BURNER = """
import subprocess, sys
burn = "import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"
subprocess.run([sys.executable, "-c", burn])
print("done", flush=True)
sys.stdin.read()
"""


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def start() -> Iterator[Callable[[str], tuple[subprocess.Popen[str], str]]]:
    """Runs a script in a session of its own until it has printed a line; ends what is left of it afterwards."""
    started: list[subprocess.Popen[str]] = []

    def run(script: str) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_tree_counts_its_children(start: Callable[[str], tuple[subprocess.Popen[str], str]]) -> None:
    # GIVEN a process with one child
    parent, _ = start(PARENT)
    # WHEN the tree is looked at
    use = processes.tree_use(processes.tree(parent.pid))
    # THEN both are in it
    assert use is not None
    assert use.processes == 2
    assert use.rss_bytes > 0


def test_cpu_time_of_children_that_have_ended_counts(
    start: Callable[[str], tuple[subprocess.Popen[str], str]],
) -> None:
    parent, _ = start(BURNER)
    use = processes.tree_use(processes.tree(parent.pid))
    assert use is not None
    assert use.cpu_s >= 0.25


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the kernel does not tell PSS")
def test_pss_is_below_rss_where_pages_are_shared(start: Callable[[str], tuple[subprocess.Popen[str], str]]) -> None:
    parent, _ = start(PARENT)
    members = processes.tree(parent.pid)
    pss, use = processes.tree_pss(members), processes.tree_use(members)
    assert pss is not None
    assert use is not None
    assert 0 < pss < use.rss_bytes


def test_the_start_of_a_process_is_its_own_and_does_not_change(
    start: Callable[[str], tuple[subprocess.Popen[str], str]],
) -> None:
    process, _ = start(PARENT)

    began = processes.process_start(process.pid)

    assert began is not None
    assert processes.process_start(process.pid) == began
    process.kill()
    assert wait_until(lambda: processes.process_start(process.pid) is None), "a zombie has ended"
