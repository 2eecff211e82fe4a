"""What a burst takes in its window, as its own process reads it; the alarm for its memory."""

import os
import subprocess
import time
from types import SimpleNamespace

import pytest

from autotune_loader.machine import processes, window
from autotune_loader.machine.host import HostCpu
from autotune_loader.machine.processes import PAGE_BYTES, TICKS_PER_S, MemoryGuard, TreeUse, tree, tree_pss, tree_use
from autotune_loader.machine.window import Window
from autotune_loader.values import Interval, Measurement


def test_a_tree_has_used_what_its_processes_have_and_the_gone_count_nothing(tmp_path):
    def process(pid, ticks, pages=10, read=None):
        """A folder of `/proc`; the process has a name that looks like more fields."""
        (tmp_path / str(pid)).mkdir()
        stat = f"{pid} (a) S 1 (b)) R 1 2 3 4 5 6 7 8 9 10 {ticks} 20 0 1 0 99 1000 {pages} 18446744"
        files = {"stat": stat, "smaps_rollup": "5581-7ffc ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss: 4 kB\n"}
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
def test_the_alarm_goes_by_pss_at_90_percent_and_comes_once(rss_bytes, pss_bytes, alarms, monkeypatch):
    # GIVEN a tree that is as large as a test says, looked at every 5 ms
    looks, raised = [], []
    use = TreeUse(cpu_s=1.0, rss_bytes=rss_bytes)
    used, pss = (lambda members: looks.append(members) or use), (lambda _members: pss_bytes)
    for name, value in {"PERIOD_S": 0.005, "SUSPICION_S": 0.0, "tree_use": used, "tree_pss": pss}.items():
        monkeypatch.setattr(processes, name, value)
    with MemoryGuard(os.getpid(), 100, lambda: raised.append(True)):
        while len(looks) < 5 and not raised:
            time.sleep(0.005)
    assert len(raised) == alarms


SECONDS = dict.fromkeys(("window_s", "first_batch_s", "service_s", "service_cpu_s", "receive_s", "step_s"), 0.0)
RATE = Interval(value=1.0, low=1.0, high=1.0, count=1)
MEASURED = Measurement(samples_per_s=RATE, samples=1, batch_size=0.0, wait_share=0.0, **SECONDS)
WORKER, LATE = 7, 8


class Machine:
    """This process with its workers, as a test has it: CPU seconds and bytes read by process. Walks through all are noted."""

    def __init__(self, monkeypatch):
        self.at(0.0, 0.0, {})
        self.walks, self.pss_looks = [], []
        for name, stand_in in {
            "time": SimpleNamespace(monotonic=lambda: self.now),
            "tree": lambda pid: self.walks.append(pid) or tuple(self.uses),
            "tree_use": self.use,
            "tree_pss": lambda members: self.pss_looks.append(members) or 5,
            "host_cpu": lambda cpus: self.host,
            "usable_cores": lambda: SimpleNamespace(usable=2),
        }.items():
            monkeypatch.setattr(window, name, stand_in)

    def at(self, now, busy_s, uses):
        self.now, self.host, self.uses = now, HostCpu(cpus=4, busy_s=busy_s), uses

    def use(self, members):
        seen = [self.uses[each] for each in members if each in self.uses]
        cpu_s, read = (sum(column) for column in zip((0.0, 0), *seen, strict=True))
        return TreeUse(cpu_s=cpu_s, rss_bytes=5, read_bytes=read) if seen else None


def test_shares_and_bytes_are_those_of_the_window_alone(monkeypatch):
    # GIVEN 6 s of start-up, then 2 s on 4 CPUs: the tree takes 3 s and reads 1,000 bytes, the machine is busy for 5 s
    machine = Machine(monkeypatch)
    machine.at(0.0, 0.0, {1: (0.0, 50)})
    watched = Window()
    machine.at(1.0, 4.0, {1: (1.0, 50), WORKER: (3.0, 20)})
    watched.watch()
    machine.at(6.0, 10.0, {1: (4.0, 50), WORKER: (3.0, 20)})
    walks = len(machine.walks)
    watched.open()
    machine.at(8.0, 15.0, {1: (5.0, 50), WORKER: (4.0, 920), LATE: (1.0, 100)})
    assert len(machine.walks) == walks, "its beginning asks known processes only"
    # WHEN it is closed THEN the tree has had 1.5 of 2 usable cores, and a quarter of the CPUs was others' work
    found = watched.closed(MEASURED)
    assert (found.cpu_share, found.foreign_cpu_share) == pytest.approx((0.75, 0.25))
    assert (found.read_bytes, found.memory.rss_bytes, found.memory.pss_bytes) == (1000, 5, 5)
    # AND memory is read only where it is asked for
    assert Window(reads_pss=False).closed(MEASURED).memory is None
    assert len(machine.pss_looks) == 1


def test_what_the_system_does_not_tell_is_none_and_ticks_make_no_negative_load(monkeypatch):
    machine = Machine(monkeypatch)
    assert Window().closed(MEASURED) == MEASURED
    machine.at(0.0, 0.0, {1: (0.0, 0)})
    watched = Window()
    machine.at(1.0, 0.99, {1: (1.0, 0)})
    assert watched.closed(MEASURED).foreign_cpu_share == 0.0
