"""What torch's workers note under `watch`, by each start method, and their memory."""

import gc
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader import AutoLoader, enable
from autotune_loader.loops import figures as workers
from autotune_loader.loops import worker_notes
from autotune_loader.loops.figures import LoopFigures, Workers
from autotune_loader.loops.worker_notes import Notes
from autotune_loader.machine import clocks, processes
from autotune_loader.machine.processes import copied_bytes
from autotune_loader.values import LoaderConfig
from tests.support.data import Stream

METHODS = ["fork", "forkserver", "spawn"]


def waited(index):
    time.sleep(0.005)
    return float(index)


class Quick(Dataset):
    """Of batches of two, the 26th and the 101st are waited for."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.06 if index in (50, 200) else 0.0)
        return index


class Slow(Dataset):
    """Each sample is waited for; the sixth for longer."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.05 if index == 5 else 0.002)
        if index == 23:
            gc.collect()
        return torch.full((2,), index)


def raises(index):
    raise KeyError("a sample of mine")


@pytest.fixture
def watching(capsys):
    with enable("watch") as enabled:
        yield enabled


@pytest.fixture
def noting(watching, monkeypatch):
    """All batches are noted, as if each was waited for."""
    monkeypatch.setattr(Workers, "quick_s", -1.0)
    return watching


@pytest.mark.process
@pytest.mark.parametrize("method", METHODS)
def test_each_batch_has_its_history(method, noting):
    options = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    loader = DataLoader(Slow(), batch_size=4, **options)
    for _ in range(2):
        assert len(list(loader)) == 6
    (known,) = noting._session.loaders
    rows = known.log.rows
    assert [row.worker for row in rows] == [0, 1] * 6
    # THEN a batch is begun when it is asked of its worker, and whole before the loop has it
    assert all(row.fetch_start <= row.collate_end <= row.received for row in rows)
    assert all(
        later.fetch_start >= row.collate_end for row, later in zip(rows, rows[2:], strict=False)
    )
    assert all(row.service_s >= 0.008 for row in rows)
    assert rows[1].service_s >= 0.056
    assert all(row.cpu_s < row.service_s for row in rows if row is not rows[5])
    # AND workers have told of themselves, once for both epochs
    seen = known.of_workers
    assert seen.started == 2
    assert seen.batches == 12
    assert seen.ready_s > (0.2 if method == "spawn" else 0.0)
    assert seen.on_device == 0
    assert seen.garbage_s > 0


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_quick_batches_are_counted_and_some_noted(workers, watching):
    loader = DataLoader(Quick(), batch_size=2, num_workers=workers)
    begun = time.monotonic()
    assert len(list(loader)) == 200
    seconds = time.monotonic() - begun
    (known,) = watching._session.loaders
    log = known.log
    assert (log.totals.batches, log.totals.samples) == (200, 400)
    assert log.totals.wall_s == pytest.approx(seconds, rel=0.2)
    assert len(log.rows) < 100
    # THEN each slow one is noted, as itself, and others stand for those that are not
    log.waits.settle()
    assert log.waits.slow == 2
    assert 0.9 < log.waits.slow_fetches_s / (2 * 0.06) < 2
    assert 20 < log.waits.batches <= 199
    # AND a trace has all
    log.sampled = SimpleNamespace(add=id, rows={})
    rows = len(log.rows)
    assert len(list(loader)) == 200
    assert len(log.rows) == rows + 200


@pytest.mark.process
def test_out_of_order_batches_keep_their_histories(noting):
    loader = DataLoader(Slow(), batch_size=4, num_workers=2, in_order=False)
    numbers = [int(batch[0, 0]) // 4 for batch in loader]
    (known,) = noting._session.loaders
    assert known.log.rows[numbers.index(1)].service_s >= 0.056


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_an_autoloader_tells_its_histories_itself(workers, noting):
    loader = AutoLoader(Slow(), batch_size=4, num_workers=workers, tune=False)
    assert len(list(loader)) == 6
    (told,) = noting.report.loaders
    (known,) = noting._session.loaders
    assert known.log.waits.batches == 5
    assert known.log.waits.fetched_s >= 5 * 0.008
    assert told.time.wall == pytest.approx(known.log.totals.wall_s)


@pytest.mark.process
def test_a_stream_has_histories_too(noting):
    loader = DataLoader(Stream(waited, 6), batch_size=2, num_workers=2)
    assert len(list(loader)) == 6
    (known,) = noting._session.loaders
    assert sorted(row.worker for row in known.log.rows) == [0, 0, 0, 1, 1, 1]


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_errors_show_no_frame_of_ours(workers, watching):
    loader = DataLoader(range(8), num_workers=workers, collate_fn=raises)
    with pytest.raises(KeyError) as plain:
        next(iter(loader))
    told = str(plain.value)
    assert "worker_notes" not in told
    assert "autotune_loader/" not in told


def test_without_a_hook_workers_note_nothing(capsys):
    with enable("watch"):
        next(iter(DataLoader(range(8))))
    loop = worker_notes.worker._worker_loop
    assert isinstance(loop, worker_notes.NotedLoop)
    assert worker_notes.here.notes is None
    # AND it looks like torch's own
    assert loop.__name__ == "_worker_loop"
    assert loop.__wrapped__.__module__ == "torch.utils.data._utils.worker"


def test_notes_that_cannot_be_made_raise_once(monkeypatch):
    """Nothing is printed about what was not made, on a kernel without files in memory."""

    def full(name):
        raise OSError("no room")

    unraisable = []
    monkeypatch.setattr(worker_notes, "memfd", full)
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(OSError, match="no room"):
        Notes(forks=False, collates=False)
    gc.collect()
    assert unraisable == []


def test_notes_of_another_batch_are_not_taken():
    notes = Notes(forks=True, collates=False)
    row = 3 + worker_notes.ROWS, 1, 1.0, 1.5, 2.0, 0.5
    worker_notes.ROW.pack_into(notes._memory, worker_notes.ROW.size * 3, *row)
    assert notes.batch(3) == (None, ())
    assert notes.batch(3 + worker_notes.ROWS) == ((1, 1.0, 1.5, 2.0, 0.5), ())
    assert notes.batch(4) == (None, ())
    assert notes.of_worker(0) is None
    assert notes.of_worker(worker_notes.WORKERS) is None


@pytest.mark.process
def test_collating_is_told_apart_for_a_trace(watching):
    loader = DataLoader(Slow(), batch_size=12, num_workers=1, collate_fn=sleeps)
    begun = iter(loader)
    assert len(list(begun)) == 2
    watching._session.loaders[0].log.sampled = SimpleNamespace(add=id, rows={})
    assert len(list(loader)) == 2
    rows = watching._session.loaders[0].log.rows
    early, late = rows[:2], rows[2:]
    assert all(row.collate_end == row.fetch_end for row in early)
    assert all(row.collate_end - row.fetch_end >= 0.02 for row in late)


def sleeps(samples):
    time.sleep(0.02)
    return len(samples)


class Ends:
    """A queue, and a thread's view of it."""

    def __init__(self, *messages):
        self.messages, self.sent = [*messages], []

    def get(self, timeout=None):
        return self.messages.pop(0)

    def put(self, message, timeout=None):
        self.sent.append(message)


def test_pinning_is_noted_by_its_batch(monkeypatch):
    times = iter([1.0, 1.5, 2.0, 2.25])
    monkeypatch.setattr(worker_notes, "time", SimpleNamespace(monotonic=lambda: next(times)))
    notes, queue = Notes(forks=True, collates=False), Ends((7, "a"), (8, "b"))
    batches, pinned = notes.watch_pinning(queue, queue)
    for _ in range(2):
        pinned.put(batches.get(timeout=5), timeout=5)
    assert queue.sent == [(7, "a"), (8, "b")]
    assert notes.batch(8) == (None, (2.0, 2.25))
    assert notes.batch(7) == (None, (1.0, 1.5))
    assert notes.batch(9) == (None, ())
    assert notes.batch(7 + worker_notes.ROWS) == (None, ())


def test_collections_take_cpu():
    collector = clocks.Garbage()
    held = [[number] for number in range(300_000)]
    for _ in range(2):
        collector.watch()
    try:
        begun = time.process_time()
        for _ in range(3):
            gc.collect()
        most = time.process_time() - begun
        assert 0.5 * most < collector.read() <= most
        assert collector.read() == collector.read()  # a pair of readings counts once
    finally:
        collector.stop()
    collector.stop()
    seconds = collector.read()
    gc.collect()
    assert collector.read() == seconds
    assert len(held) == 300_000


# Memory


ROLLUP = """55d0-7ffd ---p 00000000 00:00 0 [rollup]
Rss:            500000 kB
Anonymous:      {anonymous} kB
Private_Dirty:  {dirty} kB
"""


@pytest.mark.parametrize(
    ("anonymous", "dirty", "copied"),
    [(1000, 300, 300), (1200, 300, 100), (1500, 300, 0), (900, 300, 300)],
)
def test_what_a_fork_has_copied_is_not_allocated(anonymous, dirty, copied, tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(ROLLUP.format(anonymous=anonymous, dirty=dirty))
    assert copied_bytes(7, 1000 * 1024, tmp_path) == copied * 1024
    assert copied_bytes(8, 0, tmp_path) is None


@pytest.mark.process
def test_a_fork_copies_what_it_writes():
    held = [float(number) for number in range(2_000_000)]
    statm = [*map(int, Path("/proc/self/statm").read_text().split())]
    shared = (statm[1] - statm[2]) * processes.PAGE_BYTES
    ready, go = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        total = sum(1 for each in held if each)
        os.write(ready[1], b"1")
        os.read(go[0], 1)
        os._exit(total == 0)
    os.read(ready[0], 1)
    try:
        assert copied_bytes(pid, shared) > 30 << 20
    finally:
        os.write(go[1], b"1")
        os.waitpid(pid, 0)


class Process:
    """A worker, whose memory is what a test says."""

    def __init__(self, pid):
        self.pid = pid

    def is_alive(self):
        return self.pid > 0


@pytest.fixture
def memory(monkeypatch):
    """Bytes of each process: all of it, and its own."""
    found = {"rss": 64 << 20, "own": 100, "read": 0}

    def own(pid, *_):
        found["read"] += 1
        return found["own"]

    use = lambda folder: SimpleNamespace(rss_bytes=found["rss"])  # noqa: E731
    monkeypatch.setattr(workers, "process_use", use)
    monkeypatch.setattr(workers, "private_bytes", own)
    monkeypatch.setattr(workers, "copied_bytes", own)
    return found


def workers_of(*pids, parent=True):
    figures = LoopFigures(LoaderConfig())
    log = figures.log
    log.parent = SimpleNamespace(own_bytes=0) if parent else None
    log.totals.stepped_s = 1.0
    its = Workers(figures, None, 0)
    its.started(SimpleNamespace(_workers=[Process(pid) for pid in pids]))
    return its, figures.of_workers, log


def test_workers_are_idle_once_nobody_asks(memory):
    its, found, _ = workers_of(1, 2, 0)
    for now in (1.0, 1.9):
        its.look_at_idle(now, 0.0, 10.0)
    assert (found.idle_s, memory["read"]) == (0.0, 0)
    for now in (2.0, 4.0):
        its.look_at_idle(now, 0.0, 10.0)
    assert found.idle_s == 4.0
    assert found.idle_bytes == 200  # of the two that live
    assert memory["read"] == 1
    # AND asked again, and idle again, they are looked at anew
    its.look_at_idle(5.0, 4.5, 10.0)
    memory["own"] = 300
    its.look_at_idle(7.0, 4.5, 10.0)
    assert found.idle_s == 6.5
    assert found.idle_bytes == 600


def test_workers_that_are_gone_are_not_idle(memory):
    its, found, _ = workers_of(0, 0)
    its.look_at_idle(9.0, 0.0, 10.0)
    assert (found.idle_s, found.idle_bytes) == (0.0, 0)


def test_memory_is_read_seldom_where_it_is_large(memory):
    its, found, log = workers_of(1, 2)
    memory["rss"] = 1 << 30  # 80 ms
    its._look_at_memory()
    assert memory["read"] == 0
    log.totals.stepped_s = 6.1
    for _ in range(2):
        its._look_at_memory()
    assert memory["read"] == 1
    assert found.copied_bytes == 100
    log.totals.stepped_s = 22.1
    memory["own"] = 50
    its._look_at_memory()
    assert memory["read"] == 2
    assert found.copied_bytes == 100


def test_what_is_not_forked_copies_nothing(memory):
    its, _, _ = workers_of(1, parent=False)
    its._look_at_memory()
    assert memory["read"] == 0
