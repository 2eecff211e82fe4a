"""Loaders of this process, watched by `enable()`: which of them are one, what is counted, and that nothing stays behind."""

import contextlib
import itertools
import multiprocessing
import os
import queue
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import util
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
)
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from autotune_loader import enable
from autotune_loader.autoloader.live import live_of
from autotune_loader.lines import Line
from autotune_loader.machine.nvml import GpuUse
from autotune_loader.pipeline import forking
from autotune_loader.pipeline.loop_log import Log, Marks, Site
from autotune_loader.values import LoaderConfig
from autotune_loader.watch import watched
from autotune_loader.watch.hook import active
from autotune_loader.watch.session import FirstLine
from autotune_loader.watch.watched import CpuTimes, ScriptLoader, Watch

NUMBERS = TensorDataset(torch.arange(48))


@pytest.fixture
def watching(capsys):
    with enable("watch") as enabled:
        yield enabled


def seen(enabled):
    """Name, epochs and batches of each loader."""
    return [
        (each.name, each.log.totals.epochs, each.log.totals.batches)
        for each in enabled.session.loaders
    ]


def make(batch_size=4):
    return DataLoader(NUMBERS, batch_size=batch_size)


LINE = f"tests/watch/test_watched.py:{make.__code__.co_firstlineno + 1}"


def test_loaders_of_one_line_are_one_unless_both_are_there(watching):
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
    assert [counts for _, *counts in seen(watching)] == [
        [4 + 1 + 2, 26 + 1 + 24],
        [1 + 4, 1 + 37],
        [1, 6],
    ]
    assert [name for name, *_ in seen(watching)] == [
        LINE,
        *(f"{LINE} TensorDataset {number}" for number in (2, 3)),
    ]


def test_what_is_still_iterated_or_reads_other_data_is_another_loader(watching):
    both = [iter(make()) for _ in range(2)]  # their loaders are gone
    assert [len(next(each)) for each in both] == [1, 1]
    data = [TensorDataset(torch.arange(8)) for _ in range(2)]
    for each in data:
        list(DataLoader(each, batch_size=4))
    assert [counts for _, *counts in seen(watching)] == [[1, 1], [1, 1], [1, 2], [1, 2]]


@pytest.mark.parametrize("verb", ["watch", "run"])
def test_samples_are_those_of_the_dataset_also_of_loaders_without_a_length_or_a_batch(verb, capsys):
    with enable(verb) as enabled:
        for _ in range(2):
            loader = DataLoader(
                TensorDataset(torch.arange(18.0)), batch_size=4, collate_fn=lambda items: items[:1]
            )
            assert len(list(loader)) == 5
        assert next(iter(DataLoader(NUMBERS, sampler=itertools.repeat(7))))[0].item() == 7
        assert list(DataLoader(TensorDataset(torch.empty(0)), batch_size=4)) == []
        totals = enabled.session.loaders[0].log.totals
    assert (totals.batches, totals.samples, totals.epochs) == (10, 36, 2)
    assert "TensorDataset[18], batches of 4" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_under_run_one_log_has_each_moment_of_a_loop_once(workers, monkeypatch, capsys):
    noted, note = [], Marks.note
    monkeypatch.setattr(
        Marks, "note", lambda marks, *moment: noted.append(marks) or note(marks, *moment)
    )
    loader = DataLoader(NUMBERS, batch_size=5, num_workers=workers)
    with enable("run", allow_workers=True) as enabled:
        for _ in range(2):
            assert len(list(loader)) == 10
        (known,) = enabled.session.loaders
        totals = known.log.totals
        assert (known.found.log, {*noted}) == (known.log, {known.log.marks})
        # THEN: begin, started; ask and receive of each batch; ask, end, and the end that the tuner is told of
        assert len(noted) == 2 * (2 + 2 * 10 + 3)
        assert (totals.epochs, totals.batches, totals.samples, known.epoch_samples) == (
            2,
            20,
            96,
            {48},
        )
        assert (len(known.log.rows), known.is_running) == (20, False)
    assert "TensorDataset[48], batches of 5\n  20 batches in 2 epochs" in capsys.readouterr().err


@pytest.mark.process
def test_under_run_a_loader_whose_numbers_the_script_sets_anew_is_another_one(capsys):
    with enable("run", allow_workers=True) as enabled:
        loader = DataLoader(NUMBERS, batch_size=4)
        list(loader)
        for workers, depth in ((2, 3), (0, None)):
            loader.num_workers, loader.prefetch_factor = workers, depth
            list(loader)
        loader.collate_fn = len  # this makes it no other one
        assert list(loader) == [4] * 12
        none, two = enabled.session.loaders
        assert [(each.own.num_workers, each.log.totals.batches) for each in (none, two)] == [
            (0, 36),
            (2, 12),
        ]
        assert (none.found.log, two.found.log, two.found.tuner.asked.prefetch_factor) == (
            none.log,
            two.log,
            3,
        )


@pytest.mark.process
def test_under_run_a_loader_that_is_made_anew_goes_on_in_the_log_of_its_line(capsys):
    with enable("run", allow_workers=True) as enabled:
        for _ in range(3):
            list(make())
        (known,) = enabled.session.loaders
        assert (known.log.totals.batches, known.found.log.end, known.found.tuner.measured) == (
            36,
            36,
            {},
        )
    with enable(
        "run", allow_workers=True
    ):  # one that was tuned under an earlier hook is told of by this one's figures
        loader = make()
        list(loader)
    with enable("run", allow_workers=True) as enabled:
        list(loader)
        assert seen(enabled) == [(LINE, 1, 12)]


def test_what_tunes_a_loader_that_is_made_anew_knows_and_may_spend_what_came_since():
    log = Log()
    loop = log.begin(0.0)
    for number in range(200):  # GIVEN that another loader of its line trained for 200 s
        loop.ask(float(number))
        loop.receive(number + 0.9, 4, (number % 4, number - 3.0, number + 0.5, number + 0.8, 0.5))
    live = live_of(DataLoader(NUMBERS), None, allow_workers=True, log=log)
    assert (live.found.result.trials, live.tuner._may(0.4), live.tuner._may(0.6)) == (
        (),
        True,
        False,
    )


class Batches(IterableDataset):
    """Whole batches of 7."""

    def __iter__(self):
        return iter(torch.zeros(3, 7))


@pytest.mark.process
@pytest.mark.parametrize("verb", ["watch", "run"])
def test_samples_of_a_stream_of_batches_are_those_within_them(verb, capsys):
    with enable(verb) as enabled:
        list(DataLoader(Batches(), batch_size=None, num_workers=1))
        totals = enabled.session.loaders[0].log.totals
    assert (totals.batches, totals.samples) == (3, 21)


def test_under_run_the_report_says_why_no_autoloader_takes_a_place(monkeypatch, capsys):
    monkeypatch.setattr(
        "autotune_loader.autoloader.live.live_of", Mock(side_effect=OSError("no room"))
    )
    with enable("run"):
        assert len(list(make())) == 12
    assert "not changed: AutoLoader cannot tune it: OSError: no room" in capsys.readouterr().err


def test_enabling_again_leaves_nothing_behind(capsys):
    with enable("watch"):
        list(DataLoader(NUMBERS))
    before, finders = len(util._finalizer_registry), list(sys.meta_path)
    for _ in range(3):
        with enable("watch"):
            list(DataLoader(NUMBERS))
    assert (len(util._finalizer_registry), sys.meta_path, active) == (before, finders, [])
    assert capsys.readouterr().err.count("48 batches, ") == 4
    assert type(iter(DataLoader(NUMBERS))) is _SingleProcessDataLoaderIter


@pytest.mark.parametrize(
    ("verb", "told"), [("run", "'watch' is enabled already"), ("look", "verb='look' is not")]
)
def test_another_verb_is_refused_while_one_is_enabled_and_the_same_goes_on(
    watching, verb, told, capsys
):
    with pytest.raises(ValueError, match=told):
        enable(verb)
    with enable("watch"):
        list(make())
    assert (capsys.readouterr().err, seen(watching)) == ("", [(LINE, 1, 12)])


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
        {"sampler": Drawing()},
        {"batch_sampler": BatchSampler(Drawing(), 4, drop_last=False)},
        {"collate_fn": Own, "batch_size": 5},
        {"collate_fn": Own, "sampler": Drawing(), "batch_size": 5},
    ],
)
def test_no_code_of_the_user_s_runs_that_torch_does_not_run(arguments, capsys):
    found = []
    for look in (contextlib.nullcontext, lambda: enable("watch")):
        torch.manual_seed(0)
        data = Counted()
        with look() as enabled:
            loader = DataLoader(data, **arguments)
            batches = [
                [batch.x if isinstance(batch, Own) else batch for batch in loader] for _ in range(2)
            ]
            found.append(
                ([x.tolist() for each in batches for x in each], data.asked, torch.rand(()).item())
            )
    assert found[0] == found[1]
    (known,) = enabled.session.loaders
    assert known.log.totals.samples == sum(len(x) for each in batches for x in each)


def in_a_pool(loader):
    batches = iter(loader)
    with ThreadPoolExecutor(1, "ahead") as pool:
        while pool.submit(next, batches, None).result() is not None:
            pass


def in_a_queue(loader):
    full = queue.Queue()
    threading.Thread(
        target=lambda: [full.put(batch) for batch in [*loader, None]], name="ahead"
    ).start()
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
def test_a_thread_that_reads_ahead_is_told_and_not_judged(way, is_ahead, capsys):
    slow = DataLoader(NUMBERS, batch_size=4, collate_fn=lambda items: time.sleep(0.002) or items)
    with enable("watch") as enabled:
        enabled.plan = replace(enabled.plan, most_waiting=0.0)
        way(slow)
        assert enabled.is_waiting_too_long != is_ahead
    assert ("Thread ahead" in capsys.readouterr().err) == is_ahead


@pytest.mark.process
def test_something_is_said_within_10_seconds_also_where_no_batch_has_come(capfd):
    forked, begun = multiprocessing.get_context("fork").Event(), time.monotonic()

    def one_by_one(items):
        if (
            not forked.is_set()
        ):  # a process that is forked meanwhile has no thread, nor is the first line lost
            forked.set()
            if os.fork() == 0:
                os._exit(len(os.listdir("/proc/self/task")) - 1)  # noqa: PTH208
            assert os.wait()[1] == 0
        while "has waited" not in "".join(said) and time.monotonic() - begun < 5:
            time.sleep(0.01)
            said.append(capfd.readouterr().err)
        return items

    said = []
    with enable("watch") as enabled:
        enabled.session.first_line = FirstLine(enabled.session._say_so_far, seconds=0.2)
        list(DataLoader(NUMBERS, batch_size=24, collate_fn=one_by_one))
    assert "the training loop has waited 0 s for its first batch so far" in "".join(said)


@pytest.mark.parametrize(
    ("arguments", "accelerator", "is_told"),
    [
        ({"num_workers": 2, "multiprocessing_context": "fork"}, "cuda", True),
        ({"num_workers": 2, "multiprocessing_context": "fork"}, None, True),
        ({"num_workers": 2, "multiprocessing_context": "forkserver"}, "cuda", False),
        ({"num_workers": 2, "multiprocessing_context": "spawn"}, "cuda", False),
        ({}, "cuda", False),
    ],
)
def test_the_process_that_workers_are_forked_from_is_looked_at_before(
    arguments, accelerator, is_told, monkeypatch
):
    monkeypatch.setattr(forking, "initialized_accelerator", lambda: accelerator)
    loader = DataLoader(NUMBERS, **arguments)
    known = ScriptLoader(
        Site.of(loader, None), "train.py:15", LoaderConfig.from_loader(loader), lambda _: None
    )
    Watch(known, loader, 0.0)
    found = known.log.parent
    assert (found is not None) == is_told
    assert not is_told or (found.accelerator, found.is_elastic, found.own_bytes > 0) == (
        accelerator,
        False,
        True,
    )


class FakeLoop:
    """A loop over batches of 8, with clocks of its own; what is told of it is in `told`."""

    def __init__(self, batches, monkeypatch):
        self.now, self.cpu, self.told = 0.0, CpuTimes(0.0, 0.0), []
        monkeypatch.setattr(watched, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(CpuTimes, "of_thread", lambda: self.cpu)
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
        """It takes so long to fetch, half of it on a core, and a quarter in the queue for one; then there is a step."""

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
def test_the_first_line_comes_after_50_batches_or_10_seconds_once(
    wait_s, step_s, silent, share, monkeypatch
):
    loop, said = FakeLoop(60, monkeypatch), []
    for _ in range(60):
        loop.batch(wait_s, step_s)
        said.append(list(loop.told))
    assert said == [[]] * silent + [[f"the training loop waits for data {share}% of the time"]] * (
        60 - silent
    )


def test_waiting_pauses_and_starts_of_epochs_are_told_apart(monkeypatch):
    loop = FakeLoop(4, monkeypatch)
    for pause_s in (60.0, 0.1):  # an evaluation of a minute is no step
        loop.watch.reset(None, lambda: loop.passes(1.0))
        for wait_s, step_s in ((1.1, 0.1), (0.1, pause_s), (0.1, 0.1), (0.1, 0.1)):
            loop.batch(wait_s, step_s)
        with pytest.raises(StopIteration):
            loop.watch.take(next, iter(()))
    totals = loop.known.log.totals
    assert (totals.batches, totals.samples, totals.epochs, loop.watch.loop.is_over) == (
        8,
        64,
        2,
        True,
    )
    assert (totals.waited_s, totals.stepped_s) == pytest.approx((4.8, 0.7))
    assert totals.starting_share == pytest.approx((2 * 2.1 - 2 * 0.1) / 5.5)
    assert loop.known.in_loop.of_one == pytest.approx((1.4 / 8, 0.7 / 8))
    assert loop.known.batch_bytes == 32


class Meter:
    """NVML of a GPU that is busy for 64% of the time, of which it keeps samples or tells what is so of late."""

    def __init__(self, keeps):
        self.keeps, self.windows = keeps, []

    def end(self, start, end):
        self.windows.append((start, end))
        return GpuUse(0.64 if self.keeps else None)

    def now(self):
        return GpuUse(0.64)


@pytest.mark.parametrize(("keeps", "uses_cuda"), [(True, True), (False, True), (True, False)])
def test_nvml_is_asked_every_2_s_at_most_once_the_script_uses_cuda(keeps, uses_cuda, monkeypatch):
    meter, loop = Meter(keeps), FakeLoop(60, monkeypatch)
    monkeypatch.setattr(watched, "gpu_meter", lambda: meter)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses_cuda)
    for _ in range(60):
        loop.batch(0.1, 0.1)
    assert (loop.known.gpu_s > 9.0) == uses_cuda == bool(meter.windows)
    assert loop.known.gpu_busy_s == pytest.approx(0.64 * loop.known.gpu_s)
    # each window begins where the one before ended
    assert all(begun == ended for (_, ended), (begun, _) in itertools.pairwise(meter.windows))
    assert all(end - start >= 2.0 for start, end in meter.windows)


@pytest.mark.process
def test_workers_tell_what_cpu_they_take(watching, monkeypatch):
    own, a_workers = (
        itertools.count(0, 0.25),
        itertools.count(0, 0.5),
    )  # seconds of CPU between two readings
    times = lambda pid: CpuTimes(next(own if pid == os.getpid() else a_workers), 0.0)  # noqa: E731
    for name, value in (("READ_EVERY_S", 0.0), ("LOOK_EVERY_S", 0.0)):
        monkeypatch.setattr(watched, name, value)
    monkeypatch.setattr(CpuTimes, "of_process", times)
    list(DataLoader(NUMBERS, batch_size=8, num_workers=1))
    (known,) = watching.session.loaders
    assert (known.in_workers.batches, known.in_workers.cpu_s) == (
        5,
        2.5,
    )  # from the first batch to the last
    assert known.busy_s == 2.5 + 5 * 0.25


def burn(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.process
def test_what_waits_for_a_core_is_told_from_what_waits_for_data():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # what is forked shares this core
    busy = multiprocessing.get_context("fork").Process(target=burn, args=(20.0,))
    busy.start()
    try:
        times = [work(0.4) or CpuTimes.of_thread() for work in (time.sleep, time.sleep, burn)]
    finally:
        busy.kill()
        os.sched_setaffinity(0, cores)
    waited, computed = (
        after.queued_s - before.queued_s for before, after in itertools.pairwise(times)
    )
    assert computed > 0.1 > waited
    assert CpuTimes.of_process(os.getpid()).cpu_s > times[2].cpu_s - times[0].cpu_s
