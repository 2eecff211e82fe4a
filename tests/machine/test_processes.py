"""Trees and groups of processes as the system tells of them, and the shared memory that they leave."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time
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


@pytest.mark.process
def test_a_tree_and_a_group_are_told_as_long_as_anything_of_them_lives() -> None:
    command = [sys.executable, "-c", PARENT]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        members = processes.tree(parent.pid)
        use, pss, began = processes.tree_use(members), processes.tree_pss(members), processes.process_start(parent.pid)
        # THEN what has ended counts its CPU, and shared pages count once
        assert use is not None
        assert (use.processes, use.cpu_s >= 0.25) == (2, True)
        assert pss is not None
        assert 0 < pss < use.rss_bytes
        assert began is not None
        assert processes.process_start(parent.pid) == began
        # WHEN the parent is killed THEN it has ended, though it is a zombie, and its group lives on
        parent.kill()
        deadline = time.monotonic() + 20.0
        while processes.process_start(parent.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert processes.process_start(parent.pid) is None
        parent.wait()
        assert processes.process_group_members(parent.pid) == (child,)
        nobody = processes.tree(parent.pid)
        assert (nobody, processes.tree_use(nobody), processes.tree_pss(nobody)) == ([], None, None)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def test_segments_that_our_dead_processes_left_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def segment(pid: int, number: int = 0) -> Path:
        path = tmp_path / f"torch_{pid}_123_{number}"
        path.write_bytes(bytes(mmap.PAGESIZE))
        return path

    monkeypatch.setattr(shm, "PATIENCE_S", 0.0)
    # GIVEN one of a process that had the same ID, in another container or long ago, and such as somebody has open or mapped
    old = segment(OURS)
    before = segments(tmp_path)
    left, other, opened, mapped = segment(OURS, 1), segment(OURS + 1), segment(OURS, 2), segment(OURS, 3)
    with opened.open("rb"), mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        file.close()
        assert remove_segments_of([OURS], before, tmp_path) == 1
        memory.close()
    assert [path.exists() for path in (left, old, other, opened, mapped)] == [False, True, True, True, True]
