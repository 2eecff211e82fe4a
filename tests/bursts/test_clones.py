"""Workers of spawned loaders are cloned, in milliseconds; what is told of them is as in training, which starts them anew."""

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
ONE, TWO, DEEP = (
    with_workers(*each, multiprocessing_context="spawn") for each in ((1,), (2,), (2, 3))
)
MIB = 1 << 20


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


def seconds_of(probe, config, plan):
    begun = time.monotonic()
    return measured(probe, config, plan), time.monotonic() - begun


def begin(worker):
    assert not get_worker_info().dataset.cache, "of an earlier burst"
    assert multiprocessing.parent_process().pid == os.getppid() or not is_clone(), (
        "it ends with the process of the bursts"
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_later_bursts_start_at_once_with_empty_caches_and_tell_what_the_first_start_took(method):
    config = replace(TWO, multiprocessing_context=method)
    with opened(workload(Rows(), worker_init_fn=begin)) as probe:
        first, first_s = seconds_of(probe.probe, config, QUICK)
        measured(probe.probe, config, CLONED)  # makes the nursery
        later, later_s = seconds_of(probe.probe, config, replace(CLONED, stages=True))
        assert later_s < first_s / 2
        assert first.first_batch_s == later.first_batch_s
        # AND what no burst has measured is not known
        assert (
            measured(
                probe.probe, replace(ONE, multiprocessing_context=method), CLONED
            ).first_batch_s
            is None
        )


def test_memory_is_as_if_they_had_started_by_themselves():
    def hold(worker):
        held.append(b"x" * (50 * MIB))

    held = []
    with opened(workload(Rows(200_000), worker_init_fn=hold)) as probe:
        anew = measured(probe.probe, TWO, QUICK).memory
        cloned = measured(probe.probe, DEEP, CLONED).memory
    assert cloned.pss_bytes == pytest.approx(anew.pss_bytes, rel=0.05)
    assert cloned.rss_bytes == pytest.approx(anew.rss_bytes, rel=0.1)


@pytest.mark.parametrize("dataset", [Rows(), WithThread()])
def test_what_fails_in_clones_or_cannot_be_cloned_starts_as_in_training(dataset):
    def begin_unless_cloned(worker):
        if is_clone():
            raise OSError("only in a clone")

    with opened(workload(dataset, worker_init_fn=begin_unless_cloned)) as probe:
        assert measured(probe.probe, ONE, CLONED).first_batch_s is not None
