"""The shared memory that dead processes leave."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from autotune_loader.machine import shm
from autotune_loader.machine.shm import remove_segments_of, segments

OURS = 4_000_001


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
