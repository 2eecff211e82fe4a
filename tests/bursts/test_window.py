"""What a burst takes of the machine in its window, as its own process reads it."""

from types import SimpleNamespace

import pytest

from autotune_loader.bursts import loop
from autotune_loader.bursts.loop import Window
from autotune_loader.machine.processes import TreeUse

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
            "host_busy_s": lambda cpus: self.host,
        }.items():
            monkeypatch.setattr(loop, name, stand_in)

    def at(self, now, busy_s, uses):
        self.now, self.host, self.uses = now, [busy_s / 4] * 4, uses

    def use(self, members):
        seen = [self.uses[each] for each in members if each in self.uses]
        cpu_s, read = (sum(column) for column in zip((0.0, 0), *seen, strict=True))
        return TreeUse(cpu_s=cpu_s, rss_bytes=5, read_bytes=read) if seen else None


def test_shares_and_bytes_are_those_of_the_window_alone(monkeypatch):
    # GIVEN 6 s of start-up, then 2 s on 4 CPUs: the tree takes 3 s and reads 1,000 bytes, the machine is busy for 5 s
    machine = Machine(monkeypatch)
    watched, silent = windows = [Window(2, reads_pss=reads_pss) for reads_pss in (True, False)]
    machine.at(1.0, 4.0, {1: (1.0, 50), WORKER: (3.0, 20)})
    for each in windows:
        each.watch()
    machine.at(6.0, 10.0, {1: (4.0, 50), WORKER: (3.0, 20)})
    walks = len(machine.walks)
    for each in windows:
        each.open()
    machine.at(8.0, 15.0, {1: (5.0, 50), WORKER: (4.0, 920), LATE: (1.0, 100)})
    assert len(machine.walks) == walks, "its beginning asks known processes only"
    # WHEN it is closed THEN the tree has had 1.5 of 2 usable cores, and a quarter of the CPUs was others' work
    found = watched.close()
    assert (found["cpu_share"], found["foreign_cpu_share"]) == pytest.approx((0.75, 0.25))
    assert (found["read_bytes"], found["memory"].rss_bytes, found["memory"].pss_bytes) == (1000, 5, 5)
    # AND memory is read only where it is asked for
    assert (silent.close()["memory"], len(machine.pss_looks)) == (None, 1)


@pytest.mark.parametrize(("begun", "ended", "told"), [({}, {}, None), ({1: (0.0, 0)}, {1: (1.0, 0)}, 0.0)])
def test_what_the_system_does_not_tell_is_none_and_ticks_make_no_negative_load(begun, ended, told, monkeypatch):
    machine, watched = Machine(monkeypatch), Window(2, reads_pss=True)
    machine.at(0.0, 0.0, begun)
    watched.watch()
    watched.open()
    machine.at(1.0, 0.99, ended)
    found = watched.close()
    assert (found["foreign_cpu_share"], set(found.values()) == {None}) == (told, told is None)
