"""Only segments that this run has made and nobody uses are removed, whatever process ID is in a name."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from autotune_loader.machine import shm
from autotune_loader.machine.shm import remove_segments_of, segments

OURS = 4_000_001


def make(root: Path, pid: int, number: int = 0) -> Path:
    path = root / f"torch_{pid}_123_{number}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    return path


def test_what_our_dead_processes_left_is_removed(tmp_path: Path) -> None:
    before = segments(tmp_path)
    left, other = make(tmp_path, OURS), make(tmp_path, OURS + 1)

    assert remove_segments_of([OURS], before, tmp_path) == 1
    assert not left.exists()
    assert other.exists()


def test_a_segment_that_was_there_before_stays(tmp_path: Path) -> None:
    # GIVEN one of a process that had the same ID, in another container or long ago
    old = make(tmp_path, OURS)
    before = segments(tmp_path)
    ours = make(tmp_path, OURS, 1)

    assert remove_segments_of([OURS], before, tmp_path) == 1
    assert old.exists()
    assert not ours.exists()


def test_a_segment_that_somebody_has_open_or_mapped_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "PATIENCE_S", 0.0)
    before = segments(tmp_path)
    opened, mapped = make(tmp_path, OURS, 1), make(tmp_path, OURS, 2)

    with opened.open("rb"), mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
        file.close()
        assert remove_segments_of([OURS], before, tmp_path) == 0
        memory.close()

    assert opened.exists()
    assert mapped.exists()
