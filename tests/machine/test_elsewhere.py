"""What a process that runs the user's code may not do to the one that started it, and how it ends with it."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest

from autotune_loader.machine import elsewhere

pytestmark = pytest.mark.process
PATIENCE_S = 10.0


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


def is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def write(path: Path, mode: str = "w") -> None:
    with path.open(mode) as file:
        file.write("changed")


def save(path: Path) -> None:
    import torch

    torch.save({}, str(path))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "write": write,
    "append": lambda path: write(path, "a"),
    "new file": lambda path: write(path.with_name("new")),
    "unlink": Path.unlink,
    "truncate": lambda path: os.truncate(path, 0),
    "rename": lambda path: path.rename(path.with_name("other")),
    "rename away": lambda path: path.rename(os.environ["SCRATCH"] + "/away"),
    "link away": lambda path: os.link(path, os.environ["SCRATCH"] + "/linked"),
    "mkdir": lambda path: path.with_name("folder").mkdir(),
    "in C++": save,
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
        write(scratch / "ok")
        return held, raised, mine.read_text() == "mine"

    held, raised, is_same = in_fork(confined)
    # THEN the user's is what it was, and reading it works
    assert held
    assert is_same
    assert raised in ("PermissionError", "OSError", "RuntimeError", "CalledProcessError")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last.pt", "scratch"]
    assert [each.name for each in scratch.iterdir()] == ["ok"]


def test_without_landlock_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # GIVEN a kernel that does not know the call
    monkeypatch.setattr(elsewhere, "LANDLOCK_CREATE", 100_000)
    # WHEN a process asks to be confined THEN it hears no, and can write
    held, _ = in_fork(lambda: (elsewhere.write_only_in([]), write(tmp_path / "there")))
    assert not held
    assert (tmp_path / "there").exists()


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


def test_shared_memory_is_seen_by_its_children_and_not_by_its_parent(tmp_path: Path) -> None:
    # GIVEN a count, an anonymous mapping and a file that is mapped for writing
    count: Synchronized[int] = multiprocessing.Value("i", 7)
    anonymous = mmap.mmap(-1, 4096)
    (tmp_path / "map").write_bytes(bytes(4096))
    with (tmp_path / "map").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4096)

    # WHEN a child of a fork changes them
    def use() -> tuple[int, int]:
        elsewhere.own_shared_memory()

        def change() -> None:
            with count.get_lock():
                count.value += 1
            anonymous[0] = mapped[0] = 9

        in_fork(change)
        return count.value, anonymous[0]

    # THEN the fork sees it, and the parent does not
    assert in_fork(use) == (8, 9)
    assert (count.value, anonymous[0], mapped[0], (tmp_path / "map").read_bytes()[0]) == (7, 0, 0, 0)


KILLED = """
import os, subprocess, sys, time
sys.path.insert(0, {root!r})
from autotune_loader.machine.elsewhere import die_with_parent, ended_with_us
parent = os.getpid()
if not (pid := os.fork()):
    os.setpgid(0, 0)
    {ending}
    beside = subprocess.Popen(["sleep", "1000"])
    open("pids", "w").write(f"{{os.getpid()}} {{beside.pid}}")
    while True:  # holds the GIL as well as any hang
        pass
with {block}:
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize(
    ("ending", "block", "dead"),
    [
        ("die_with_parent(parent)", "open(os.devnull)", 1),
        ("pass", "ended_with_us(pid, 'scratch')", 2),
    ],
)
def test_what_was_started_ends_with_a_process_that_is_killed(
    ending: str, block: str, dead: int, tmp_path: Path
) -> None:
    # GIVEN a process that hangs, a program that it has started, and a folder of theirs
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "file").touch()
    root = str(Path(elsewhere.__file__).parents[2])
    script = KILLED.format(root=root, ending=ending, block=block)
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    pids = tmp_path / "pids"
    assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    time.sleep(0.3)  # for the process beside it to begin
    # WHEN their parent is killed
    parent.kill()
    parent.wait()
    children = [int(each) for each in pids.read_text().split()]
    try:
        # THEN they end, and the folder goes
        assert wait_until(lambda: all(map(is_gone, children[:dead])))
        assert dead == 1 or wait_until(lambda: not (tmp_path / "scratch").exists())
    finally:
        for pid in children:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    # GIVEN a process that is told of a parent that is not its own any more
    # WHEN it asks to end with it THEN it ends
    code = "from autotune_loader.machine.elsewhere import die_with_parent; die_with_parent(1 << 22); print('lives')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")


def test_a_block_that_ends_kills_nobody(tmp_path: Path) -> None:
    # GIVEN a program in a group of its own
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as program:
        # WHEN the block around it ends THEN it still runs, and the folder is there
        with elsewhere.ended_with_us(program.pid, str(tmp_path)):
            pass
        assert program.poll() is None
        assert tmp_path.exists()
        program.kill()
