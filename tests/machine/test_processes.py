"""Trees and groups of processes as the system tells of them, and the shared memory that they leave."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune_loader.machine import processes, shm
from autotune_loader.machine.shm import remove_segments_of, segments

OURS = 4_000_001
# Burns CPU in a child that has ended and was waited for, starts `sleep` below itself, says so, and stays.
PARENT = """
import subprocess, sys
burn = "import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"
subprocess.run([sys.executable, "-c", burn])
print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """It, and the process ID of its child, in a session of their own."""
    command = [sys.executable, "-c", PARENT]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    yield process, int(process.stdout.readline())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def comes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.process
def test_a_tree_counts_its_children_those_that_have_ended_and_shared_pages_once(
    parent: tuple[subprocess.Popen[str], int],
) -> None:
    members = processes.tree(parent[0].pid)
    use, pss = processes.tree_use(members), processes.tree_pss(members)
    assert use is not None
    assert use.processes == 2
    assert use.cpu_s >= 0.25
    assert pss is not None
    assert 0 < pss < use.rss_bytes
    nobody = processes.tree(2**22 + 1)
    assert (nobody, processes.tree_use(nobody), processes.tree_pss(nobody)) == ([], None, None)


@pytest.mark.process
def test_the_start_of_a_process_is_its_own_and_its_group_outlives_it(
    parent: tuple[subprocess.Popen[str], int],
) -> None:
    process, child = parent
    began = processes.process_start(process.pid)

    assert began is not None
    assert processes.process_start(process.pid) == began
    process.kill()
    assert comes_true(lambda: processes.process_start(process.pid) is None), "a zombie has ended"
    process.wait()
    assert processes.process_group_members(process.pid) == (child,)


def segment(root: Path, pid: int, number: int = 0) -> Path:
    path = root / f"torch_{pid}_123_{number}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def test_segments_that_our_dead_processes_left_are_removed_and_no_others(tmp_path: Path) -> None:
    # GIVEN one of a process that had the same ID, in another container or long ago
    old = segment(tmp_path, OURS)
    before = segments(tmp_path)
    left, other = segment(tmp_path, OURS, 1), segment(tmp_path, OURS + 1)

    assert remove_segments_of([OURS], before, tmp_path) == 1
    assert not left.exists()
    assert other.exists()
    assert old.exists()


def test_a_segment_that_somebody_has_open_or_mapped_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "PATIENCE_S", 0.0)
    before = segments(tmp_path)
    opened, mapped = segment(tmp_path, OURS, 1), segment(tmp_path, OURS, 2)

    with opened.open("rb"), mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        file.close()
        assert remove_segments_of([OURS], before, tmp_path) == 0
        memory.close()

    assert opened.exists()
    assert mapped.exists()
