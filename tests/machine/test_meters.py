"""What the processes of a tree have used; the alarm for their memory."""

import os
import subprocess
import time

import pytest

from autotune_loader.machine import processes
from autotune_loader.machine.processes import (
    PAGE_BYTES,
    TICKS_PER_S,
    TreeUse,
    memory_guarded,
    private_bytes,
    tree,
    tree_pss,
    tree_use,
    without_nursery,
)

ROLLUP = """55ab7c6b4000-7ffd4c9f2000 ---p 00000000 00:00 0                          [rollup]
Rss:                9284 kB
Pss:                5210 kB
Shared_Clean:       4100 kB
Shared_Dirty:       1024 kB
Private_Clean:        96 kB
Private_Dirty:      4064 kB
Private_Hugetlb:       0 kB
Swap:                  0 kB
"""


def test_a_tree_has_used_what_its_processes_have_and_the_gone_count_nothing(tmp_path):
    def process(pid, ticks, pages=10, read=None):
        """A folder of `/proc`; the process has a name that looks like more fields."""
        (tmp_path / str(pid)).mkdir()
        stat = (
            f"{pid} (a) S 1 (b)) R 1 2 3 4 5 6 7 8 9 10 {ticks} 20 0 1 0 99 1000 {pages} 18446744"
        )
        files = {
            "stat": stat,
            "smaps_rollup": "5581-7ffc ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss: 4 kB\n",
        }
        if read is not None:
            files["io"] = f"rchar: 5\nread_bytes: {read}\nwrite_bytes: 7\n"
        for name, text in files.items():
            (tmp_path / str(pid) / name).write_text(text)
        return pid

    # GIVEN a process with waited-for children, one that ends, and one that is gone
    two = [process(1, "30 10 40 20", read=4096), process(2, "1 0 0 0", read=0)]
    zombie = process(3, "100 0 0 0", pages=0, read=0)
    (tmp_path / "3" / "smaps_rollup").unlink()
    use = TreeUse(cpu_s=201 / TICKS_PER_S, rss_bytes=20 * PAGE_BYTES, read_bytes=4096)
    assert tree_use([*two, zombie, 4], tmp_path) == use
    assert tree_pss([*two, zombie, 4], tmp_path) == 8192
    assert tree_use([zombie, 4], tmp_path) is tree_pss([4], tmp_path) is None
    # AND where one does not tell what it has read, that is not known
    assert tree_use([*two, process(5, "0 0 0 0")], tmp_path).read_bytes is None


@pytest.mark.parametrize(
    ("rollup", "found"),
    [
        (ROLLUP, (96 + 4064) << 10),
        ("", None),
        ("Private_Clean:\n", None),
        ("Private_Dirty: much kB\n", None),
        (None, None),
    ],
)
def test_what_is_private_to_a_process_is_what_its_end_would_free(rollup, found, tmp_path):
    if rollup is not None:
        (tmp_path / "7").mkdir()
        (tmp_path / "7" / "smaps_rollup").write_text(rollup)
    assert private_bytes(7, tmp_path) == found


def test_without_a_nursery_workers_have_its_pages_of_libraries_and_nobody_has_its_own(tmp_path):
    for pid, rss, anonymous, own in (
        (1, 310, 200, 100),
        (2, 20, 10, 8),
        (3, 217, 196, 196),
        (4, 230, 206, 206),
    ):
        (tmp_path / str(pid)).mkdir()
        rows = f"Rss: {rss} kB\nPss_Anon: {own} kB\nAnonymous: {anonymous} kB\n"
        (tmp_path / str(pid) / "smaps_rollup").write_text(
            f"5581-7ffc ---p 0 00:00 0 [rollup]\n{rows}"
        )
    libraries = (110 - 21) + (110 - 24)
    assert without_nursery([3, 4], [1, 2], tmp_path) == (1024 * (libraries - 330), -1024 * 108)
    assert without_nursery([3, 5], [1, 2], tmp_path) is None


@pytest.mark.process
def test_what_a_fork_shares_with_its_parent_is_not_private_to_it():
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
def test_this_process_and_its_children_are_a_tree_with_what_the_system_says():
    with subprocess.Popen(["cat"], stdin=-1) as child:
        own, both = tree_use([os.getpid()]), tree_use(tree(os.getpid()))
        assert both.rss_bytes > own.rss_bytes > 1 << 20
        assert own.cpu_s == pytest.approx(sum(os.times()[:4]), abs=0.1)
        assert tree_pss([child.pid]) is not None
        child.communicate()


@pytest.mark.parametrize(
    ("rss_bytes", "pss_bytes", "alarms"),
    [
        (89, 1000, 0),  # RSS is an upper bound: no need to look closer
        (500, 80, 0),  # shared pages, counted once each
        (500, 95, 1),
        (91, None, 1),  # no PSS here: RSS must do
    ],
)
@pytest.mark.process
def test_the_alarm_goes_by_pss_at_90_percent_and_comes_once(
    rss_bytes, pss_bytes, alarms, monkeypatch
):
    # GIVEN a tree that is as large as a test says, looked at every 5 ms
    looks, raised = [], []
    use = TreeUse(cpu_s=1.0, rss_bytes=rss_bytes)
    used, pss = (lambda members: looks.append(members) or use), (lambda _members: pss_bytes)
    for name, value in {
        "PERIOD_S": 0.005,
        "SUSPICION_S": 0.0,
        "tree_use": used,
        "tree_pss": pss,
    }.items():
        monkeypatch.setattr(processes, name, value)
    with memory_guarded(os.getpid(), 100, lambda: raised.append(True)):
        while len(looks) < 5 and not raised:
            time.sleep(0.005)
    assert len(raised) == alarms
