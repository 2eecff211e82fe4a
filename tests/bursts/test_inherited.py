"""Workers of a burst begin as those of the training do: they inherit nothing that a batch has made
in another process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.data import get_worker_info

from tests.support.bursts import ALONE, ONE_WORKER, QUICK, TWO_WORKERS, Made, run, workload

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]
HELD = []
"""What a module keeps from its first use on."""
LOCK = threading.Lock()
"""What cannot be pickled runs in forks of the caller."""


def held(key):
    """Filled by the first sample of a process: a cache, a client, a pool of threads."""
    assert not HELD or get_worker_info() is None
    if get_worker_info() is None:
        HELD.append(threading.Thread(target=time.sleep, args=(1000,), daemon=True))
        HELD[-1].start()
    return torch.zeros(1)


SAMPLES = {"fresh": held, "forked": lambda key, lock=LOCK: lock.locked() or held(key)}


@pytest.mark.parametrize(
    "sample",
    [SAMPLES["fresh"], pytest.param(SAMPLES["forked"], marks=pytest.mark.system)],
    ids=SAMPLES,
)
def test_workers_inherit_nothing_of_bursts_without(sample):
    configs = ONE_WORKER, ALONE, TWO_WORKERS, ALONE, ONE_WORKER
    probe, _ = run(workload(Made(sample), multiprocessing_context="fork"), *configs)
    assert probe.warmup.most_workers is None


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_what_is_made_once_counts_once(two_threads):
    made = []

    def sample(key):
        if not made:
            made.append(time.sleep(1.5))
        assert torch.get_num_threads() == 1  # as in workers
        return torch.zeros(1)

    seen = run(workload(Made(sample)))[0].warmup
    assert seen.first_fetch_s < 1.5 < seen.first_batch_s
    assert seen.default_threads == 2


class WithPool(list):
    """Has a pool of threads from the moment it is unpickled."""

    def __setstate__(self, state):
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def __getitem__(self, index):
        return self.pool.submit(torch.zeros, 1).result()


def test_what_needs_its_threads_is_read_there():
    rows = WithPool(range(64))
    rows.state = "that it is unpickled with"
    run(workload(rows), ALONE, ALONE)


class Slow(Made):
    """Takes a second to unpickle."""

    def __reduce__(self):
        return _slowly, super().__reduce__()


def _slowly(made, arguments):
    time.sleep(1.0)
    return made(*arguments)


def test_unpickling_the_data_is_no_hang():
    run(workload(Slow(lambda key: torch.zeros(1))), ALONE, plan=replace(QUICK, deadline_s=1.0))
