"""What a process that runs the user's code may not do to the one that started it; the rest is seen in tests/bursts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune_loader.machine import elsewhere

pytestmark = pytest.mark.process


def in_fork(run: Callable[..., Any], *, knows_pipe: bool = False) -> Any:
    """What a function returns, or raises, in a fork of this process; it may be given the pipe that its answer takes."""
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        try:
            answer = run(write_end) if knows_pipe else run()
        except BaseException as error:
            answer = error
        os.write(write_end, pickle.dumps(answer))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "new file": lambda path: path.with_name("new").touch(),
    "truncate": lambda path: os.truncate(path, 0),
    "unlink": lambda path: path.unlink(),
    "rename away": lambda path: path.rename(os.environ["SCRATCH"] + "/away"),
    "link away": lambda path: os.link(path, os.environ["SCRATCH"] + "/linked"),
    "mkdir": lambda path: path.with_name("folder").mkdir(),
    "by a program": lambda path: subprocess.run(["sh", "-c", f"echo changed >> {path}"], check=True, stderr=-3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_files_are_changed_in_the_given_places_only(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a file of the user's and a place that may be written to
    mine, scratch = tmp_path / "last.pt", tmp_path / "scratch"
    mine.write_text("mine")
    scratch.mkdir()
    monkeypatch.setenv("SCRATCH", str(scratch))

    # WHEN a confined process changes both
    def confined() -> tuple[bool, str, bool]:
        held = elsewhere.write_only_in([scratch, "/dev", tmp_path / "is not there"])
        try:
            CHANGES[name](mine)
            raised = ""
        except Exception as error:
            raised = type(error).__name__
        (scratch / "ok").touch()
        return held, raised, mine.read_text() == "mine"

    held, raised, is_same = in_fork(confined)
    # THEN the user's is what it was, and reading it works
    assert (held, is_same) == (True, True)
    assert raised in ("PermissionError", "OSError", "CalledProcessError")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.pt", "scratch"]
    assert [each.name for each in scratch.iterdir()] == ["ok"]


@pytest.mark.parametrize(
    ("mode", "writable", "expected"),
    [
        ("rb", False, (b"0123", b"4567", b"0123456789")),
        ("rb", True, (b"0123", b"4567", b"0123456789")),
        ("r+b", False, (b"0123", b"4567", b"0123456789")),  # writing to it raises
        ("r+b", True, (b"0123", b"4567", b"0123XX6789")),
        ("ab", False, (b"", b"", b"0123456789")),
        ("ab", True, (b"", b"", b"0123456789XX")),
    ],
)
def test_open_files_have_positions_of_their_own(
    mode: str, writable: bool, expected: tuple[bytes, bytes, bytes], tmp_path: Path
) -> None:
    # GIVEN a file that is open
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    with path.open(mode, buffering=0) as file:
        reads, writes = "r" in mode, mode != "rb"

        # WHEN a fork reads from it and writes to it
        def use() -> bytes:
            elsewhere.own_files(writable=writable)
            read = file.read(4) if reads else b""
            with contextlib.suppress(OSError):
                file.write(b"XX" * writes)
            return read

        in_fork_read = in_fork(use)
        if reads:
            file.seek(4)
        # THEN the parent's position is where it was, and only a writable one has reached the file
        assert (in_fork_read, file.read(4) if mode == "rb" else expected[1], path.read_bytes()) == expected


def test_inherited_pipes_and_sockets_lead_nowhere_but_ours() -> None:
    # GIVEN a socket of the user's, and one that is ours
    theirs, peer = socket.socketpair()
    ours, other = socket.socketpair()
    with theirs, peer, ours, other:

        def use(answer: int) -> None:
            elsewhere.cut_channels([ours.fileno(), answer])
            os.write(theirs.fileno(), b"to nobody")
            ours.send(b"heard")

        # WHEN a fork writes to both THEN only ours is heard
        in_fork(use, knows_pipe=True)
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(10)
        assert other.recv(10) == b"heard"


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    # GIVEN a process that is told of a parent that is not its own any more
    # WHEN it asks to end with it THEN it ends
    code = "from autotune_loader.machine.elsewhere import die_with_parent; die_with_parent(1 << 22); print('lives')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")


def test_a_forked_process_that_has_cut_its_channels_is_joined_when_it_ends_and_not_before() -> None:
    def live() -> None:
        elsewhere.cut_channels([])
        time.sleep(1000)

    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    process.join(0.5)  # WHEN the time is over it returns
    assert process.is_alive()
    process.kill()
    process.join()
