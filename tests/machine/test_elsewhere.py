"""What a process that runs the user's code may not do to the one that started it; the rest is seen
in tests/bursts."""

import multiprocessing
import os
import pickle
import socket
import subprocess
import tempfile
import time

import pytest

from autotune_loader.machine import elsewhere
from autotune_loader.machine.processes import private_bytes

pytestmark = pytest.mark.process


def in_fork(run):
    """What a function returns, or raises, in a fork of this process; it is given that pipe."""
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        try:
            answer = run(write_end)
        except BaseException as error:
            answer = error
        os.write(write_end, pickle.dumps(answer))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return pickle.loads(data) if data else status


CHANGES = {
    "new file": lambda path, scratch: path.with_name("new").touch(),
    "truncate": lambda path, scratch: os.truncate(path, 0),
    "unlink": lambda path, scratch: path.unlink(),
    "rename away": lambda path, scratch: path.rename(scratch / "away"),
    "link away": lambda path, scratch: os.link(path, scratch / "linked"),
    "mkdir": lambda path, scratch: path.with_name("folder").mkdir(),
    "program": lambda path, scratch: subprocess.check_call(f"echo >> {path}", shell=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_files_are_changed_in_given_places_only(change, tmp_path):
    mine, scratch = tmp_path / "last.pt", tmp_path / "scratch"
    mine.write_text("mine")
    scratch.mkdir()

    def confined(_):
        assert elsewhere.write_only_in([scratch, "/dev", tmp_path / "is not there"])
        (scratch / "ok").touch()
        change(mine, scratch)

    assert isinstance(in_fork(confined), (OSError, subprocess.CalledProcessError))
    assert mine.read_text() == "mine"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["last.pt", "ok", "scratch"]


def test_another_root_serves_without_temporary_folder(monkeypatch):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert elsewhere.scratch_root() in elsewhere.OTHER_ROOTS


def test_inherited_sockets_lead_nowhere_but_ours():
    def use(answer):
        elsewhere.cut_channels([ours.fileno(), answer])
        os.write(theirs.fileno(), b"to nobody")
        ours.send(b"heard")

    # GIVEN a socket of the user's, and one that is ours
    (theirs, peer), (ours, other) = socket.socketpair(), socket.socketpair()
    with theirs, peer, ours, other:
        # WHEN a fork writes to both THEN only ours is heard
        in_fork(use)
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(10)
        assert other.recv(10) == b"heard"


def test_a_process_without_its_parent_ends_at_once():
    assert in_fork(lambda _: elsewhere.die_with_parent(1 << 22)) == 1


def test_a_fork_without_channels_is_joined_at_end():
    def live():
        elsewhere.cut_channels([])
        time.sleep(1000)

    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    process.join(0.2)  # it returns when the time is over
    assert process.is_alive()
    process.kill()
    process.join()


def test_own_memory_is_shared_with_no_parent():
    held = bytearray(b"x") * (64 << 20)

    def taken(_):
        begun = private_bytes(os.getpid())
        elsewhere.require_own_memory()
        elsewhere.own_memory()
        return private_bytes(os.getpid()) - begun

    assert in_fork(taken) > 0.95 * len(held)
    assert held[:1] == held[-1:] == b"x"


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_starts_its_own_fork_server():
    def started(_=None):
        process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        process.start()
        process.join()
        return process.exitcode

    def in_the_fork(_):
        elsewhere.leave_fork_server()
        return started()

    assert started() == 0
    assert in_fork(in_the_fork) == 0
    assert started() == 0
