"""Loaders of this process, watched by `enable()`: which are one, what is counted, what stays."""

import contextlib
import itertools
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import util
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from autotune_loader import AutoLoader, enable
from autotune_loader.diagnosis import Caution, Kept
from autotune_loader.lines import Line
from autotune_loader.loops import figures
from autotune_loader.machine.nvml import GpuUse
from autotune_loader.machine.processes import CpuTimes
from autotune_loader.pipeline import forking
from autotune_loader.pipeline.loop_log import Marks, Site
from autotune_loader.values import LoaderConfig
from autotune_loader.watch import session, watched
from autotune_loader.watch.hook import active
from autotune_loader.watch.watched import ScriptLoader, Watch
from tests.support.data import Stream

NUMBERS = TensorDataset(torch.arange(48))


@pytest.fixture
def watching(capsys):
    with enable("watch") as enabled:
        yield enabled


def seen(enabled):
    """Epochs and batches of each loader, by name."""
    totals = {each.name: each.log.totals for each in enabled.session.loaders}
    return {name: (its.epochs, its.batches) for name, its in totals.items()}


def make(batch_size=4):
    return DataLoader(NUMBERS, batch_size=batch_size)


LINE = f"tests/watch/test_watched.py:{make.__code__.co_firstlineno + 1}"


def test_loaders_of_a_line_are_one(watching):
    for _ in range(2):  # made anew for each epoch
        list(make())
        for _ in make():
            break
    next(zip(make(), make(), strict=True))  # both at once
    kept = make(), make()
    for loader in kept * 2:  # living ones are told apart, and each is the same again
        list(loader)
    begun = iter(kept[0])  # an iterator that is kept leaves its loader one
    assert len([next(begun), *kept[0]]) == 1 + 12
    list(make(batch_size=8))
    assert seen(watching) == {
        LINE: (4 + 1 + 2, 26 + 1 + 24),
        f"{LINE} TensorDataset 2": (1 + 4, 1 + 37),
        f"{LINE} TensorDataset 3": (1, 6),
    }


def test_what_has_other_data_is_another_loader(watching):
    both = [iter(make()) for _ in range(2)]  # their loaders are gone
    assert [len(next(each)) for each in both] == [1, 1]
    data = [TensorDataset(torch.arange(8)) for _ in range(2)]
    for each in data:
        list(DataLoader(each, batch_size=4))
    assert [*seen(watching).values()] == [(1, 1), (1, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("verb", ["watch", "run"])
def test_samples_are_those_of_the_dataset(verb, capsys):
    with enable(verb) as enabled:
        data = TensorDataset(torch.arange(18.0))
        for _ in range(2):
            loader = DataLoader(data, batch_size=4, collate_fn=lambda items: items[:1])
            assert len(list(loader)) == 5
        # AND loaders without a length, or without a batch, are no trouble
        assert next(iter(DataLoader(NUMBERS, sampler=itertools.repeat(7))))[0].item() == 7
        assert list(DataLoader(TensorDataset(torch.empty(0)), batch_size=4)) == []
        totals = [each.log.totals for each in enabled.session.loaders]
    assert (totals[0].batches, totals[0].samples, totals[0].epochs) == (10, 36, 2)
    assert "TensorDataset[18], batches of 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "batch", "samples"),
    [(None, torch.zeros(7), 21), (None, [1, 2], 6), (None, "text", 3), (None, torch.tensor(1), 3),
     (2, torch.zeros(7), 4), (2, {"x": torch.zeros(1)}, 2), (2, "text", 4)],
)  # fmt: skip
def test_a_streams_samples_are_told_by_its_batches(size, batch, samples, watching):
    list(DataLoader(Stream(lambda _: batch, 3), batch_size=size, collate_fn=lambda _: batch))
    (known,) = watching.session.loaders
    assert known.log.totals.samples == samples


def test_what_an_autoloader_has_found_is_told(watching):
    loader = AutoLoader(NUMBERS, batch_size=4, tune=False)
    list(loader)
    (known,) = watching.session.loaders
    assert known.found is loader.found


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_under_run_one_log_has_each_moment_once(workers, monkeypatch, capsys):
    noted, note = [], Marks.note

    def counted(marks, *moment):
        noted.append(marks)
        note(marks, *moment)

    monkeypatch.setattr(Marks, "note", counted)
    loader = DataLoader(NUMBERS, batch_size=5, num_workers=workers)
    with enable("run", allow_workers=True) as enabled:
        for _ in range(2):
            assert len(list(loader)) == 10
        (known,) = enabled.session.loaders
        log, totals = known.log, known.log.totals
        assert known.found.log is log
        assert {*noted} == {log.marks}
        # THEN: begin, started; ask and receive of each batch; ask, end, and the end for the tuner
        assert len(noted) == 2 * (2 + 2 * 10 + 3)
        assert (totals.epochs, totals.batches, totals.samples) == (2, 20, 96)
        assert known.epoch_samples == {48}
        assert len(log.rows) == 20
        assert not known.is_running
    told = capsys.readouterr().err
    assert "TensorDataset[48], batches of 5\n  Training could win " in told
    assert "\n  20 batches in 2 epochs" in told


@pytest.mark.process
def test_under_run_numbers_set_anew_make_another_loader(capsys):
    with enable("run", allow_workers=True) as enabled:
        loader = DataLoader(NUMBERS, batch_size=4)
        list(loader)
        for workers, depth in ((2, 3), (0, None)):
            loader.num_workers, loader.prefetch_factor = workers, depth
            list(loader)
        loader.collate_fn = len  # this makes it no other one
        assert list(loader) == [4] * 12
        none, two = enabled.session.loaders
        assert (none.own.num_workers, none.log.totals.batches) == (0, 36)
        assert (two.own.num_workers, two.log.totals.batches) == (2, 12)
        assert none.found.log is none.log
        assert two.found.log is two.log
        assert two.found.tuner.asked.prefetch_factor == 3


@pytest.mark.process
def test_under_run_a_line_has_one_log(capsys):
    with enable("run", allow_workers=True) as enabled:
        for _ in range(3):
            list(make())
        (known,) = enabled.session.loaders
        assert known.log.totals.batches == 36
        assert known.found.log.end == 36
    # AND one that was tuned under an earlier hook is told of by this one's figures
    with enable("run", allow_workers=True):
        loader = make()
        list(loader)
    with enable("run", allow_workers=True) as enabled:
        list(loader)
        assert seen(enabled) == {LINE: (1, 12)}


def test_under_run_a_report_says_why_nothing_tunes(monkeypatch, capsys):
    broken = Mock(side_effect=OSError("no room"))
    monkeypatch.setattr("autotune_loader.autoloader.live.live_of", broken)
    with enable("run"):
        assert len(list(make())) == 12
    told = " ".join(capsys.readouterr().err.split())
    assert f"not changed: {Kept.NOT_TUNED(error='OSError: no room')}" in told

    class Mine(DataLoader):
        def _get_iterator(self):
            return _SingleProcessDataLoaderIter(self)

    with enable("run"):
        assert len(list(Mine(NUMBERS))) == 48
    assert f"not changed: {Kept.OWN_ITERATOR(kind='Mine')}" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "told"), [("0", True), ("1", False)])
def test_where_no_loader_is_iterated_it_says_so(rank, told, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    with enable("run"):
        pass
    said = "\nautotune-loader run: No PyTorch DataLoader was iterated: nothing to report.\n"
    assert capsys.readouterr().err == (said if told else "")


def test_enabling_writes_what_it_is_asked_for(tmp_path, capsys):
    with enable("watch", output=tmp_path / "loader.json"):
        list(make())
    assert LINE in (tmp_path / "loader.json").read_text()


def test_a_hook_has_its_report_at_any_time(watching):
    assert watching.report is None
    loader = make()
    for _ in range(2):
        list(loader)
        (told,) = watching.report.loaders
        assert told.batches == 12 * told.epochs
    assert told.epochs == 2
    assert str(told.bottleneck) in " ".join(str(watching.report).split())


def test_a_report_stays_when_its_hook_is_closed(tmp_path, capsys):
    path = tmp_path / "loader.json"
    with enable("watch", output=path) as outer:
        with enable("watch") as inner:
            list(make())
        list(make())
    # THEN each is as of its end
    assert [each.report.loaders[0].batches for each in (inner, outer)] == [12, 24]
    assert outer.report.notes == (f"Written to {path}.",)
    assert capsys.readouterr().err == f"\n{outer.report}\n"
    outer.close()
    list(make())
    assert outer.report.loaders[0].epochs == 2
    # AND nothing is known of what nobody iterated
    with enable("watch") as none:
        pass
    assert none.report is None


def test_a_watched_loader_has_metrics(watching):
    loader = make()
    assert watching.metrics(loader) == {}
    list(loader)
    names = ("num_workers", "wait_s", "wait_share", "samples_per_s")
    assert set(watching.metrics(loader, "x/")) == {f"x/{name}" for name in names}
    with enable("watch") as inner:
        assert inner.metrics(loader) == {"num_workers": 0.0}
    assert watching.metrics(make()) == {}


def test_enabling_again_leaves_nothing_behind(capsys):
    with enable("watch"):
        list(DataLoader(NUMBERS))
    before, finders = len(util._finalizer_registry), list(sys.meta_path)
    for _ in range(3):
        with enable("watch"):
            list(DataLoader(NUMBERS))
    assert len(util._finalizer_registry) == before
    assert sys.meta_path == finders
    assert active == []
    assert capsys.readouterr().err.count("48 batches, ") == 4
    assert type(iter(DataLoader(NUMBERS))) is _SingleProcessDataLoaderIter


@pytest.mark.parametrize(
    ("verb", "told"), [("run", "'watch' is enabled already"), ("look", "verb='look' is not")]
)
def test_another_verb_is_refused_while_one_is_enabled(watching, verb, told, capsys):
    with pytest.raises(ValueError, match=told):
        enable(verb)
    with enable("watch"):  # the same goes on
        list(make())
    assert capsys.readouterr().err == ""
    assert seen(watching) == {LINE: (1, 12)}


class Counted(Dataset):
    """Says how often it is asked how long it is."""

    def __init__(self):
        self.asked = 0

    def __len__(self):
        self.asked += 1
        return 48

    def __getitem__(self, index):
        return index


class Drawing(Sampler):
    """Each look at its length draws, and is an iteration."""

    def __iter__(self):
        return iter([index for index in range(48) if torch.rand(()) < 0.5])

    def __len__(self):
        return sum(1 for _ in self)


class Own:
    """A batch whose methods are not to be called."""

    def __init__(self, indices):
        self.x, self.sizes = torch.tensor(indices), []

    def __getattribute__(self, name):
        if name in ("to_dict", "keys", "__len__", "items", "__iter__"):
            raise AssertionError(name)
        return object.__getattribute__(self, name)

    def __len__(self):
        raise AssertionError("length")


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_sampler": BatchSampler(Drawing(), 4, drop_last=False)},
        {"collate_fn": Own, "batch_size": 5},
        {"collate_fn": Own, "sampler": Drawing(), "batch_size": 5},
    ],
)
def test_no_code_of_the_users_runs_for_watching(arguments, capsys):
    outcomes = []
    for look in (contextlib.nullcontext, lambda: enable("watch")):
        torch.manual_seed(0)
        data = Counted()
        with look() as enabled:
            loader = DataLoader(data, **arguments)
            batches = [getattr(batch, "x", batch).tolist() for _ in range(2) for batch in loader]
            outcomes.append((batches, data.asked, torch.rand(()).item()))
    assert outcomes[0] == outcomes[1]
    (known,) = enabled.session.loaders
    assert known.log.totals.samples == sum(map(len, batches))


def in_a_pool(loader):
    batches = iter(loader)
    with ThreadPoolExecutor(1, "ahead") as pool:
        while pool.submit(next, batches, None).result() is not None:
            pass


def in_a_queue(loader):
    full = queue.Queue()
    put = lambda: [full.put(batch) for batch in [*loader, None]]  # noqa: E731
    threading.Thread(target=put, name="ahead").start()
    while full.get() is not None:
        pass


def trained_in_a_thread(loader):
    thread = threading.Thread(target=list, args=(loader,))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("way", "is_ahead"),
    [(list, False), (trained_in_a_thread, False), (in_a_pool, True), (in_a_queue, True)],
)
def test_a_thread_that_reads_ahead_is_not_judged(way, is_ahead, capsys):
    slow = DataLoader(NUMBERS, batch_size=4, collate_fn=lambda items: time.sleep(0.002) or items)
    with enable("watch") as enabled:
        enabled.plan = replace(enabled.plan, most_waiting=0.0)
        way(slow)
        assert enabled.is_waiting_too_long != is_ahead
    told = " ".join(capsys.readouterr().err.split())
    assert (str(Caution.READ_AHEAD(thread="ahead_0")) in told) == (way is in_a_pool)
    assert (str(Caution.READ_AHEAD(thread="ahead")) in told) == (way is in_a_queue)


def test_a_first_line_is_said_once_unless_stopped():
    said, never = queue.Queue(), threading.Event()
    line, late = session.FirstLine(lambda: said.put(1), 0.0), session.FirstLine(never.set, 600.0)
    for each in (line, late, late):
        each.start()
    assert session.waiting.count(late) == 1
    assert said.get(timeout=10) == 1
    for each in (line, late):
        each.stop()
        each.start()
        assert each not in session.waiting
    assert said.empty()
    assert not never.is_set()


@pytest.mark.process
def test_something_is_said_within_10_s(capfd, monkeypatch):
    now, begun, forked = 0.0, time.monotonic(), multiprocessing.get_context("fork").Event()
    clock = SimpleNamespace(monotonic=lambda: now, sleep=time.sleep)
    monkeypatch.setattr(session, "time", clock)
    said = []

    def one_by_one(items):
        nonlocal now
        if not forked.is_set():
            # WHEN 10 s have passed, and a process is forked meanwhile, which has no thread
            now = 9.99
            forked.set()
            if (pid := os.fork()) == 0:
                os._exit(len(os.listdir("/proc/self/task")) - 1)  # noqa: PTH208
            assert os.waitpid(pid, 0)[1] == 0
        while "has waited" not in "".join(said) and time.monotonic() - begun < 5:
            time.sleep(0.01)
            said.append(capfd.readouterr().err)
        return items

    with enable("watch"):
        list(DataLoader(NUMBERS, batch_size=24, collate_fn=one_by_one))
    # THEN it is said, although no batch has come
    assert "the training loop has waited 0 s for its first batch so far" in "".join(said)


@pytest.mark.parametrize(
    ("arguments", "accelerator", "is_told"),
    [
        ({"num_workers": 2, "multiprocessing_context": "fork"}, "cuda", True),
        ({"num_workers": 2, "multiprocessing_context": "fork"}, None, True),
        ({"num_workers": 2, "multiprocessing_context": "spawn"}, "cuda", False),
        ({}, "cuda", False),
    ],
)
def test_what_workers_are_forked_from_is_looked_at(arguments, accelerator, is_told, monkeypatch):
    monkeypatch.setattr(forking, "initialized_accelerator", lambda: accelerator)
    loader = DataLoader(NUMBERS, **arguments)
    own = LoaderConfig.from_loader(loader)
    known = ScriptLoader(Site.of(loader, None), "train.py:15", own, lambda _: None)
    Watch(known, loader, 0.0)
    parent = known.log.parent
    assert (parent is not None) == is_told
    if is_told:
        assert parent.accelerator == accelerator
        assert not parent.is_elastic
        assert parent.own_bytes > 0


class FakeLoop:
    """A loop over batches of 8, with clocks of its own; what is told of it is in `told`."""

    def __init__(self, batches, monkeypatch):
        self.now, self.cpu, self.told = 0.0, CpuTimes(0.0, 0.0), []
        monkeypatch.setattr(
            watched, "time", SimpleNamespace(monotonic=lambda: self.now, thread_time=lambda: 0.0)
        )
        monkeypatch.setattr(CpuTimes, "of_thread", lambda: self.cpu)
        monkeypatch.setattr(CpuTimes, "of_process", lambda _: CpuTimes(self.now / 4, 0.0))
        loader = DataLoader(TensorDataset(torch.arange(8 * batches)), batch_size=8)
        site = Site.of(loader, Line("train.py", 15))
        self.known = ScriptLoader(site, "train.py:15", LoaderConfig(), self.look)
        self.watch = Watch(self.known, loader, 0.0)

    def look(self, known):
        if known.is_worth_telling:
            known.first_look = None
            self.told.append(str(known))

    def passes(self, seconds):
        self.now += seconds

    def batch(self, wait_s, step_s):
        """A wait, half of it on a core and a quarter in the queue for one, and a step."""

        def fetch(_):
            self.now += wait_s
            self.cpu = CpuTimes(self.cpu.cpu_s + wait_s / 2, self.cpu.queued_s + wait_s / 4)
            return torch.zeros(8)

        self.watch.take(fetch, None)
        self.passes(step_s)


@pytest.mark.parametrize(
    ("wait_s", "step_s", "silent", "share"),
    [
        (0.041, 0.059, 50, 41),  # batches
        (1.5, 0.5, 5, 75),  # seconds
        (20.0, 0.1, 3, 100),  # the fewest that say anything
    ],
)
def test_the_first_line_comes_once(wait_s, step_s, silent, share, monkeypatch):
    loop, told = FakeLoop(60, monkeypatch), []
    for _ in range(60):
        loop.batch(wait_s, step_s)
        told.append(list(loop.told))
    line = f"the training loop waits for data {share}% of the time"
    assert told == [[]] * silent + [[line]] * (60 - silent)


def test_a_batch_is_clocked_every_20_ms(monkeypatch):
    loop = FakeLoop(64, monkeypatch)
    for _ in range(64):
        loop.batch(0.0009, 0.0009)
    assert loop.known.in_loop.batches == 6  # the first, and each 12th


def test_the_wait_for_the_next_batch_counts(monkeypatch):
    loop, said = FakeLoop(4, monkeypatch), []
    for _ in range(4):
        loop.known.waiting_since = loop.now
        loop.passes(3.0)
        said.append(str(loop.known))
        loop.passes(-3.0)
        loop.batch(1.0, 2.0)
    assert said == [
        "the training loop has waited 3 s for its first batch so far",
        "1 batch so far; the training loop has waited 4.0 s",
        "2 batches so far; the training loop has waited 5.0 s",
        "the training loop waits for data 60% of the time",
    ]


@pytest.mark.parametrize(("rank", "told"), [("0", 3), ("1", 0)])
def test_rank_0_tells_three_loaders_early(rank, told, monkeypatch, capsys):
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.0)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    loaders = [DataLoader(NUMBERS) for _ in range(5)]
    with enable("watch") as enabled:
        for loader in loaders * 2:
            list(loader)
        assert enabled.session.first_line not in session.waiting  # which would tell one once more
        assert capsys.readouterr().err.count(": the training loop waits for data") == told


def test_waits_pauses_and_starts_are_told_apart(monkeypatch):
    loop = FakeLoop(4, monkeypatch)
    for pause_s in (60.0, 0.1):  # an evaluation of a minute is no step
        loop.watch.reset(None, lambda: loop.passes(1.0))
        for wait_s, step_s in ((1.1, 0.1), (0.1, pause_s), (0.1, 0.1), (0.1, 0.1)):
            loop.batch(wait_s, step_s)
        with pytest.raises(StopIteration):
            loop.watch.take(next, iter(()))
    totals = loop.known.log.totals
    assert (totals.batches, totals.samples, totals.epochs) == (8, 64, 2)
    assert loop.watch.loop.is_over
    assert (totals.waited_s, totals.stepped_s) == pytest.approx((4.8, 0.7))
    assert totals.starting_share == pytest.approx((2 * 2.1 - 2 * 0.1) / 5.5)
    assert loop.known.in_loop.of_one == pytest.approx((1.4 / 8, 0.7 / 8))
    assert loop.known.batch_bytes == 32
    # AND a thread that took half of the batches did not read ahead
    loop.known.ahead = 4
    assert not loop.known.is_read_ahead
    loop.known.ahead = 5
    assert loop.known.is_read_ahead


@pytest.mark.parametrize(
    ("collected", "others_s", "paused_s"),
    [
        (100, 0.0001, 0.0),  # gradients of a hundred batches, in one go
        (100, 0.01, 7 * 1.0),  # an evaluation after a hundred steps
    ],
)
def test_what_collects_batches_trains_in_between(collected, others_s, paused_s, monkeypatch):
    loop = FakeLoop(7 * collected, monkeypatch)
    for _ in range(7):
        for _ in range(collected - 1):
            loop.batch(0.0001, others_s)
        loop.batch(0.0001, 1.0)
    loop.watch.loop.ask(loop.now)
    totals = loop.known.log.totals
    assert totals.paused_s == pytest.approx(paused_s)
    assert totals.stepped_s == pytest.approx(7 * (99 * others_s + 1.0) - paused_s)


def test_of_a_batch_dense_tensors_are_looked_at():
    dense, sparse = torch.eye(2), torch.eye(2).to_sparse()
    batch = {"x": [sparse, (dense, 1)], "y": "text"}
    assert [*map(id, figures.tensors_in(batch))] == [id(dense)]


class Meter:
    """NVML of a GPU that is busy for 64% of the time; it keeps samples, or tells of late."""

    def __init__(self, keeps):
        self.keeps, self.windows = keeps, []

    def end(self, start, end):
        self.windows.append((start, end))
        return GpuUse(0.64 if self.keeps else None)

    def now(self):
        return GpuUse(0.64)


@pytest.mark.parametrize(("keeps", "uses_cuda"), [(True, True), (False, True), (True, False)])
def test_nvml_is_asked_every_2_s_at_most(keeps, uses_cuda, monkeypatch):
    meter, loop = Meter(keeps), FakeLoop(60, monkeypatch)
    monkeypatch.setattr(figures, "gpu_meter", lambda: meter)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_cuda)
    for _ in range(60):
        loop.batch(0.1, 0.1)
    assert bool(meter.windows) == uses_cuda
    assert (loop.known.gpu_s > 9.0) == uses_cuda
    assert loop.known.gpu_busy_s == pytest.approx(0.64 * loop.known.gpu_s)
    assert loop.known.read_s == pytest.approx(11.4)  # AND CPU is read every 2 s
    assert loop.known.busy_s == pytest.approx(11.4 / 4)
    # AND each window begins where the one before ended
    assert [begun for begun, _ in meter.windows[1:]] == [end for _, end in meter.windows[:-1]]
    assert all(end - start >= 2.0 for start, end in meter.windows)


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_tell_what_cpu_they_take(workers, watching, monkeypatch):
    # GIVEN seconds of CPU between two readings: 0.25 of this process, 0.5 of each worker
    clocks = defaultdict(lambda: itertools.count(0, 0.5), {os.getpid(): itertools.count(0, 0.25)})
    monkeypatch.setattr(CpuTimes, "of_process", lambda pid: CpuTimes(next(clocks[pid]), 0.0))
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.0)
    for name in ("READ_EVERY_S", "READ_FIRST_S"):
        monkeypatch.setattr(figures, name, 0.0)
    list(DataLoader(NUMBERS, batch_size=8, num_workers=workers))
    # THEN it is theirs from the first of 6 batches to the last, and each batch counts once
    (known,) = watching.session.loaders
    assert known.in_workers.batches == 5
    assert known.in_workers.cpu_s == 5 * 0.5 * workers
    assert known.busy_s == 5 * 0.5 * workers + 5 * 0.25


def on_a_busy_core():
    """What a sleep and a second's work wait for a core that another process uses, too."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread, and what it starts
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        times = [CpuTimes.of_thread()]
        for wait in (time.sleep, burn):
            wait(0.4)
            times.append(CpuTimes.of_thread())
        return [after.queued_s - before.queued_s for before, after in itertools.pairwise(times)]
    finally:
        busy.kill()
        busy.wait()


def burn(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.process
def test_waiting_for_a_core_is_told_from_sleeping():
    with ThreadPoolExecutor(1) as pool:
        slept, computed = pool.submit(on_a_busy_core).result()
    assert computed > 0.1
    assert computed > slept
