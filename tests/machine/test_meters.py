"""What the processes of a tree have used; the alarm for their memory."""

import os
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest

from autotune_loader.machine import processes
from autotune_loader.machine.processes import (
    PAGE_BYTES,
    TICKS_PER_S,
    TreeUse,
    host_busy_s,
    memory_guarded,
    private_bytes,
    tree,
    tree_pss,
    tree_use,
    without_nursery,
)

HEAD = "55ab7c6b4000-7ffd4c9f2000 ---p 00000000 00:00 0                          [rollup]\n"


@pytest.fixture
def proc(tmp_path):
    """Writes the files of a process below a `/proc` of our own, whose path it has as `root`."""

    def write(pid, **files):
        (tmp_path / str(pid)).mkdir()
        for name, text in files.items():
            (tmp_path / str(pid) / name).write_text(text)

    write.root = tmp_path
    return write


def rollup(**kib):
    """The text of `smaps_rollup` with these rows."""
    return HEAD + "".join(f"{name}:{size:>20} kB\n" for name, size in kib.items())


def stat(pid, ticks, pages=10):
    """The text of `stat`; the process has a name that looks like more fields."""
    return f"{pid} (a) S 1 (b)) R 1 2 3 4 5 6 7 8 9 10 {ticks} 20 0 1 0 99 1000 {pages} 18446744"


def io(read):
    return f"rchar: 5\nread_bytes: {read}\nwrite_bytes: 7\n"


def test_a_cpu_is_busy_with_all_but_idling(monkeypatch):
    times = SimpleNamespace(
        user=1, nice=2, system=4, irq=8, softirq=16, idle=32, iowait=64, steal=128
    )
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [times, times])
    assert host_busy_s() == [31, 31]


def test_a_tree_has_used_what_its_processes_have(proc):
    # GIVEN a process with waited-for children, another, a zombie, and one that is gone (4)
    used = rollup(Rss=9, Pss=4)
    proc(1, stat=stat(1, "30 10 40 20"), smaps_rollup=used, io=io(4096))
    proc(2, stat=stat(2, "1 0 0 0"), smaps_rollup=used, io=io(0))
    proc(3, stat=stat(3, "100 0 0 0", pages=0), io=io(0))
    use = TreeUse(cpu_s=201 / TICKS_PER_S, rss_bytes=20 * PAGE_BYTES, read_bytes=4096)
    assert tree_use([1, 2, 3, 4], proc.root) == use
    assert tree_pss([1, 2, 3, 4], proc.root) == 8192
    assert tree_use([3, 4], proc.root) is None
    assert tree_pss([4], proc.root) is None
    # AND where one does not tell what it has read, that is not known
    proc(5, stat=stat(5, "0 0 0 0"))
    assert tree_use([1, 2, 5], proc.root).read_bytes is None


@pytest.mark.parametrize(("files", "found"), [
    ({"smaps_rollup": rollup(Rss=9284, Private_Clean=96, Private_Dirty=4064)}, (96 + 4064) << 10),
    ({"smaps_rollup": ""}, None),
    ({"smaps_rollup": "Private_Clean:\n"}, None),
    ({"smaps_rollup": "Private_Dirty: much kB\n"}, None),
    ({}, None),
])  # fmt: skip
def test_private_bytes_are_what_an_end_frees(files, found, proc):
    proc(7, **files)
    assert private_bytes(7, proc.root) == found


def test_memory_is_told_as_if_without_nursery(proc):
    # GIVEN root and nursery (1, 2) and two workers: RSS, anonymous memory, proportional part
    sizes = {1: (310, 200, 100), 2: (20, 10, 8), 3: (217, 196, 196), 4: (230, 206, 206)}
    for pid, (rss, anonymous, own) in sizes.items():
        proc(pid, smaps_rollup=rollup(Rss=rss, Pss_Anon=own, Anonymous=anonymous))
    # THEN workers have its pages of libraries, and nobody has its own
    libraries = (110 - 21) + (110 - 24)
    rss_bytes, pss_bytes = without_nursery([3, 4], [1, 2], proc.root)
    assert rss_bytes == 1024 * (libraries - 330)
    assert pss_bytes == -1024 * 108
    assert without_nursery([3, 5], [1, 2], proc.root) is None


@pytest.mark.process
def test_what_a_fork_shares_is_not_private():
    held = bytearray(b"x") * (32 << 20)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(writer)
        os.read(reader, 1)  # until the parent has looked
        os._exit(0)
    os.close(reader)
    try:
        assert private_bytes(child) < len(held) // 2 < len(held) < tree_use([child]).rss_bytes
    finally:
        os.close(writer)
        os.waitpid(child, 0)
    assert private_bytes(child) is None


@pytest.mark.process
def test_this_process_and_its_children_are_a_tree():
    with subprocess.Popen(["cat"], stdin=-1) as child:
        own, both = tree_use([os.getpid()]), tree_use(tree(os.getpid()))
        assert both.rss_bytes > own.rss_bytes > 1 << 20
        assert own.cpu_s == pytest.approx(sum(os.times()[:4]), abs=0.1)
        assert tree_pss([child.pid]) is not None
        child.communicate()


@pytest.mark.process
@pytest.mark.parametrize(("rss_bytes", "pss_bytes", "alarms"), [
    (89, 1000, 0),  # RSS is an upper bound: no need to look closer
    (500, 80, 0),  # shared pages, counted once each
    (500, 95, 1),
    (91, None, 1),  # no PSS here: RSS must do
])  # fmt: skip
def test_the_alarm_goes_by_pss_at_90_percent(rss_bytes, pss_bytes, alarms, monkeypatch):
    # GIVEN a tree that is as large as a test says, looked at every 5 ms
    looks, raised = [], []
    use = TreeUse(cpu_s=1.0, rss_bytes=rss_bytes)
    monkeypatch.setattr(processes, "PERIOD_S", 0.005)
    monkeypatch.setattr(processes, "SUSPICION_S", 0.0)
    monkeypatch.setattr(processes, "tree_use", lambda members: looks.append(members) or use)
    monkeypatch.setattr(processes, "tree_pss", lambda members: pss_bytes)
    # WHEN it has been looked at five times THEN the alarm has come once or not at all
    with memory_guarded(os.getpid(), 100, lambda: raised.append(True)):
        while len(looks) < 5 and not raised:
            time.sleep(0.005)
    assert len(raised) == alarms
