"""Workers of spawned loaders are cloned, in milliseconds; what is told of them is as in training,
which starts them anew."""

import gc
import multiprocessing
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from tests.support.bursts import QUICK, measured, opened, workload
from tests.support.tuned import with_workers

pytestmark = pytest.mark.process
CLONED = replace(QUICK, anew=False)
HELD_BYTES = 200 << 20


def spawned(workers, prefetch_factor=2, method="spawn"):
    return with_workers(workers, prefetch_factor, multiprocessing_context=method)


class Rows(Dataset):
    """Samples from a list of objects, with a cache that only a worker fills."""

    def __init__(self, count=50_000):
        self.names, self.cache = [f"{number:06d}.jpg" for number in range(count)], {}

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return torch.tensor(float(self.cache.setdefault(index, self.names[index])[:6]))


class WithThread(Rows):
    """Starts a thread wherever it is unpickled, which no clone would have."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="reader").start()


def is_clone():
    return gc.get_freeze_count() > 0


def begin(worker):
    assert not get_worker_info().dataset.cache, "of an earlier burst"
    if is_clone():
        parent = multiprocessing.parent_process().pid
        assert parent == os.getppid(), "it ends with the process of the bursts"


@pytest.mark.system
def test_later_bursts_start_at_once():
    def seconds_of(plan):
        begun = time.monotonic()
        return measured(probe.probe, spawned(2), plan), time.monotonic() - begun

    with opened(workload(Rows(), worker_init_fn=begin)) as probe:
        first, first_s = seconds_of(QUICK)
        seconds_of(CLONED)  # makes the nursery
        later, later_s = seconds_of(replace(CLONED, stages=True))
        assert later_s < first_s / 2
        # AND what the first start took is told; what no burst has measured is not known
        assert first.first_batch_s == later.first_batch_s
        one = measured(probe.probe, spawned(1), CLONED)
        assert one.first_batch_s is None


@pytest.mark.system
def test_memory_of_clones_is_as_without():
    """What is held is far more than what other processes change by sharing torch's libraries."""

    def hold(worker):
        held.append(b"x" * HELD_BYTES)

    held = []
    with opened(workload(Rows(200_000), worker_init_fn=hold)) as probe:
        anew = measured(probe.probe, spawned(2), QUICK).memory
        cloned = measured(probe.probe, spawned(2, 3), CLONED).memory
    assert cloned.pss_bytes == pytest.approx(anew.pss_bytes, rel=0.1)
    assert cloned.rss_bytes == pytest.approx(anew.rss_bytes, rel=0.1)


@pytest.mark.parametrize(
    ("dataset", "method"),
    [pytest.param(Rows(), "forkserver", marks=pytest.mark.system), (WithThread(), "spawn")],
)
def test_what_cannot_be_cloned_starts_as_in_training(dataset, method):
    def begin_unless_cloned(worker):
        if is_clone():
            raise OSError("only in a clone")

    with opened(workload(dataset, worker_init_fn=begin_unless_cloned)) as probe:
        found = measured(probe.probe, spawned(1, method=method), CLONED)
        assert found.first_batch_s is not None
