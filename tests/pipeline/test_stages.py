"""Where a sample's time goes: what is clocked in a worker, and what follows from the seconds."""

import itertools
import json
import time
from dataclasses import replace
from functools import partial

import pytest
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from autotune_loader.pipeline import stage_clock
from autotune_loader.pipeline.reading import Reading
from autotune_loader.pipeline.tracing import make_traced_loader
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig
from autotune_loader.values.trace import (
    OTHER_THREADS,
    TRANSFER,
    Seen,
    StageSamples,
    pooled,
    stage_times,
)
from tests.support.data import Stream


class Clock:
    """The clocks of a worker's thread, which its work moves, and waiting for a core."""

    now_s = queued_s = 0.0
    must_leave = False

    def works(self, seconds, sample=None):
        self.now_s += seconds
        return sample

    def monotonic(self):
        return self.now_s

    thread_time = monotonic

    def waits_for_a_core(self):
        self.now_s, self.queued_s = self.now_s + 9, self.queued_s + 9

    def pread(self, *_):
        """`schedstat`; a thread that must leave its core does at the end of the call."""
        told = f"0 {self.queued_s * 1e9:.0f} 1"
        if self.must_leave:
            self.must_leave = self.waits_for_a_core()
        return told.encode()


NOW = Clock()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(stage_clock, "time", NOW)
    monkeypatch.setattr(stage_clock.os, "pread", NOW.pread)
    # A queue of another test may have its thread here.
    monkeypatch.setattr(stage_clock, "_feeder", lambda: None)
    # On a clock that stands still, all would be let go.
    for limit in ("MOST_COST", "TOO_OFTEN"):
        monkeypatch.setattr(stage_clock, limit, 1e9)


def collate(samples):
    NOW.works(1)


def a_sample(dataset):
    return next(iter(dataset)) if isinstance(dataset, Stream) else dataset[5]


def clocked(dataset, fetch=a_sample):
    """Where and seconds of each stage of a batch that a worker would make, after a first one."""
    clock = stage_clock.StageClock(dataset)
    clock.fetch()
    assert clock.batch(5.0, 1) is None
    clock.fetch()
    fetch(dataset)
    clock.collate(collate)
    collate([])
    return {stage: (where, wall_s) for stage, where, wall_s, _ in clock.batch(5.0, 1).seen}


class Of(Dataset):
    """A dataset whose samples are what a function makes of an index; a second before and one after
    are its own."""

    def __init__(self, transform):
        self.transform = transform

    def __getitem__(self, index):
        return NOW.works(1, self.transform(NOW.works(1, index)))

    def __len__(self):
        return 8


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, sample):
        for t in self.transforms:
            sample = t(sample)
        return sample


class Flip:
    def __call__(self, sample):
        return NOW.works(3, sample)


def crop(sample, by=0):
    return NOW.works(5, sample)


def crowded(sample):
    NOW.waits_for_a_core()
    NOW.must_leave = True
    return NOW.works(4, sample)


class Photos(Of):
    def __getitem__(self, index):
        return self.augmented(self.fetch(index))

    def fetch(self, index):
        return NOW.works(6, index)

    def augmented(self, sample):
        return [self.inner(sample) for _ in range(2)]

    def inner(self, sample):
        return NOW.works(1, sample)


class Streamed(Stream):
    def __iter__(self):
        yield self.made()

    def made(self):
        return NOW.works(7, 1)


OWN = {"Of.__getitem__": 2, "collate": 1}


@pytest.mark.parametrize(
    ("dataset", "seconds"),
    [
        (Of(Compose(Compose(Flip(), Flip()), Compose(crop))), OWN | {"Flip": 6, "crop": 5}),
        (Of(Compose(lambda sample: crop(sample))), OWN | {"lambda": 5}),
        (Of(Compose(Flip(), crowded, crop)), OWN | {"Flip": 3, "crowded": 4, "crop": 5}),
        (Of(Compose(nn.Sequential(nn.Identity()), Flip())), OWN | {"Identity": 0, "Flip": 3}),
        (Of(Compose(partial(crop, by=3), partial(Flip()))), OWN | {"crop": 5, "Flip": 3}),
        (Subset(ConcatDataset([Of(crop), Of(crop)]), range(16)), OWN | {"crop": 5}),
        # what libraries read and decode has its own name, and the user's line
        (Of(lambda index: json.loads("1")), OWN | {"lambda": 0, "decode": 8}),
        # the outermost function of the user's below __getitem__
        (Photos(None), {"Photos.__getitem__": 0, "fetch": 6, "augmented": 2, "collate": 1}),
        (Streamed(None, 1), {"Streamed.__iter__": 0, "made": 7, "collate": 1}),
    ],
)  # fmt: skip
def test_calls_of_a_dataset_and_transforms_are_stages(dataset, seconds, clock, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda text: NOW.works(8))
    found = clocked(dataset)
    assert {stage: wall_s for stage, (_, wall_s) in found.items()} == seconds
    for name in found.keys() - {"Identity", "decode"}:  # which are of libraries
        assert found[name][0].startswith("test_stages.py:")
    # THEN all is as it was
    assert not hasattr(Flip.__call__, "__wrapped__")
    assert not hasattr(crop, "__wrapped__")


def test_an_exception_ends_its_stages(clock):
    def odd(index):
        raise ValueError(NOW.works(1, "odd"))

    def fetch(dataset):
        with pytest.raises(ValueError, match="odd"):
            dataset[1]
        dataset.transform = abs

    dataset = Of(odd)
    found = clocked(dataset, fetch)
    seconds = {stage: wall_s for stage, (_, wall_s) in found.items()}
    assert seconds == {"Of.__getitem__": 1, "odd": 1, "collate": 1}
    # THEN what the user has put there meanwhile stays
    assert dataset.transform is abs


def test_what_is_called_too_often_is_let_go(clock, monkeypatch):
    # GIVEN batches of 1 ms, in the first of which one function is called once too often
    for limit, share in (("MOST_COST", 0.005), ("TOO_OFTEN", 0.1)):
        monkeypatch.setattr(stage_clock, limit, share)
    transform = Compose(lambda sample: None, lambda sample: None)
    clock = stage_clock.StageClock(Of(transform))
    hooked = []
    for calls in ([0] * 9 + [1] * 8, [1] * 5, *[[]] * 80):
        clock.fetch()
        hooked.append([hasattr(each, "__wrapped__") for each in transform.transforms])
        for called in calls:
            transform.transforms[called](0)
        NOW.works(0.001)
        clock.batch(0.001, 1)
    # THEN it is the user's own in the next one, and batches that follow are clocked now and then
    first, second = zip(*hooked, strict=True)
    assert [number for number, is_hooked in enumerate(first) if is_hooked] == [0]
    assert [number for number, is_hooked in enumerate(second) if is_hooked] == [0, 1, 52, 79]


# 8 s of which 4 s were computed, by one thread on a quiet machine
SEEN = (
    Seen("read", "a.py:1, open", 3.0, 0.0),
    Seen("decode", "a.py:2, PIL.Image.convert", 3.0, 3.0),
    Seen("decode", "a.py:3, PIL.Image.convert", 0.5, 0.5),
    Seen("crop", "a.py:9", 1.5, 0.5),
)
BURST = StageSamples(seen=SEEN, samples=1000.0, cpu_s=5.0, queue_cpu_s=1.0)


def test_seconds_become_shares_the_longest_first():
    found = {each.stage: each for each in stage_times(BURST)}
    assert list(found) == ["decode", "read", "crop", TRANSFER]
    assert found["decode"].wall_s == pytest.approx(3.5 / 1000)
    assert found["decode"].cpu_share == pytest.approx(3.5 / 5)
    assert found["decode"].where == "a.py:2, PIL.Image.convert"
    assert found["read"].cpu_share == 0
    assert found["read"].waited_s == found["read"].wall_s
    assert found[TRANSFER].cpu_s == 0.001
    for share in ("wall_share", "cpu_share"):
        assert sum(getattr(each, share) for each in found.values()) == pytest.approx(1)


def test_reports_add_up_and_short_ones_say_nothing():
    both = pooled([BURST, None, BURST])
    assert both.samples == 2000.0
    assert both.cpu_s == 10.0
    assert stage_times(both) == stage_times(BURST)
    assert stage_times(replace(BURST, seen=(Seen("read", "", 0.01, 0.0),))) == ()
    assert stage_times(pooled([None])) == ()


def test_what_other_threads_compute_is_a_row():
    found = {each.stage: each for each in stage_times(replace(BURST, cpu_s=10.0))}
    assert found[OTHER_THREADS].cpu_share == 0.5
    assert found[OTHER_THREADS].wall_share == 0


def wait(index):
    time.sleep(0.006)
    return index


def spin(index):
    end = time.thread_time() + 0.006
    while time.thread_time() < end:
        pass
    return index


def reports(workers, batches):
    data = DataSide.from_loader(DataLoader(Of(Compose(wait, spin)), batch_size=4, shuffle=True))
    config = LoaderConfig(num_workers=workers)
    loader = make_traced_loader(data, config, Reading(data), stages=True)
    return [handed.fetch[6] for handed in itertools.islice(loader, batches)]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_waiting_is_told_from_computing_in_workers():
    found = {each.stage: each for each in stage_times(pooled(reports(workers=2, batches=12)))}
    assert found["wait"].waited_s >= 0.0059
    assert found["wait"].cpu_share < 0.1
    assert found["spin"].cpu_s >= 0.0059
    assert found["spin"].cpu_share > 0.8
    assert "test_stages.py:" in found["wait"].where


def test_nothing_is_clocked_in_the_loops_process():
    assert reports(workers=0, batches=2) == [None, None]
    assert not hasattr(wait, "__wrapped__")
