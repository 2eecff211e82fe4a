"""What a process that runs the user's code may not do to the one that started it; the rest is seen in tests/bursts."""

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from autotune_loader.machine import elsewhere
from autotune_loader.machine.processes import private_bytes

pytestmark = pytest.mark.process


def in_fork(run):
    """What a function returns in a fork of this process; it is given the pipe that its answer takes."""
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
    os.waitpid(pid, 0)
    return pickle.loads(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda path, scratch: path.with_name("new").touch(),
        lambda path, scratch: os.truncate(path, 0),
        lambda path, scratch: path.unlink(),
        lambda path, scratch: path.rename(scratch / "away"),
        lambda path, scratch: os.link(path, scratch / "linked"),
        lambda path, scratch: path.with_name("folder").mkdir(),
        lambda path, scratch: subprocess.check_call(f"echo changed >> {path}", shell=True),
    ],
    ids=("new file", "truncate", "unlink", "rename away", "link away", "mkdir", "program"),
)
def test_files_are_changed_in_the_given_places_only(change, tmp_path):
    mine, scratch = tmp_path / "last.pt", tmp_path / "scratch"
    mine.write_text("mine")
    scratch.mkdir()

    def confined(_):
        held, raised = elsewhere.write_only_in([scratch, "/dev", tmp_path / "is not there"]), ""
        try:
            change(mine, scratch)
        except Exception as error:
            raised = type(error).__name__
        (scratch / "ok").touch()
        return (
            held,
            raised in ("PermissionError", "OSError", "CalledProcessError"),
            mine.read_text(),
        )

    assert in_fork(confined) == (True, True, "mine")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["last.pt", "ok", "scratch"]


def test_without_a_folder_for_temporary_files_another_one_is_taken(monkeypatch):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert elsewhere.scratch_root() in elsewhere.OTHER_ROOTS


def test_inherited_pipes_and_sockets_lead_nowhere_but_ours():
    def use(answer):
        elsewhere.cut_channels([ours.fileno(), answer])
        os.write(theirs.fileno(), b"to nobody")
        ours.send(b"heard")

    # GIVEN a socket of the user's, and one that is ours WHEN a fork writes to both THEN only ours is heard
    (theirs, peer), (ours, other) = socket.socketpair(), socket.socketpair()
    with theirs, peer, ours, other:
        in_fork(use)
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(10)
        assert other.recv(10) == b"heard"


def test_a_process_whose_parent_is_gone_already_ends_at_once():
    code = "from autotune_loader.machine.elsewhere import die_with_parent; die_with_parent(1 << 22); print('lives')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, "")


def test_a_forked_process_that_has_cut_its_channels_is_joined_when_it_ends_and_not_before():
    def live():
        elsewhere.cut_channels([])
        time.sleep(1000)

    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    process.join(0.5)  # WHEN the time is over it returns
    assert process.is_alive()
    process.kill()
    process.join()


def test_a_process_that_takes_memory_of_its_own_shares_nothing_with_its_parent():
    held = bytearray(b"x") * (64 << 20)

    def taken(_):
        begun = private_bytes(os.getpid())
        elsewhere.require_own_memory()
        elsewhere.own_memory()
        return private_bytes(os.getpid()) - begun

    assert in_fork(taken) > 0.95 * len(held)
    assert held[:1] == held[-1:] == b"x"


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_starts_a_fork_server_of_its_own():
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
