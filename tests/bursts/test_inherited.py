"""Workers of a burst begin as those of the training do: they inherit nothing that a batch has made in another process."""

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

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
    if get_worker_info() is None:
        HELD.append(threading.Thread(target=time.sleep, args=(1000,), daemon=True))
        HELD[-1].start()
        return torch.zeros(1)
    assert not HELD
    return torch.zeros(1)


@pytest.mark.parametrize("lock", [None, LOCK], ids=["fresh", "forked"])
def test_workers_inherit_nothing_that_bursts_without_workers_have_made(lock):
    probe, _ = run(
        workload(Made(lambda key: None if lock is not None and lock.locked() else held(key))),
        *(ONE_WORKER, ALONE, TWO_WORKERS, ALONE, ONE_WORKER),
    )
    assert probe.warmup.most_workers is None


class Rows(Dataset):
    """Opened on first use in each process, as everybody recommends."""

    def __init__(self, path):
        self.path, self.connection = path, None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.connection = self.connection or sqlite3.connect(self.path)
        return torch.tensor(self.connection.execute("SELECT ?", (index,)).fetchone())


def test_a_handle_that_is_opened_on_first_use_is_no_reason_against_workers(tmp_path):
    sqlite3.connect(tmp_path / "rows.db").close()
    probe, _ = run(workload(Rows(tmp_path / "rows.db")), TWO_WORKERS, ALONE)
    assert probe.warmup.most_workers is None
    assert "first use" not in " ".join(probe.notes)


class Shared(IterableDataset):
    """Shares its rows out among workers, and has none without."""

    def __init__(self, raises):
        self.raises = raises

    def __iter__(self):
        info = get_worker_info()
        if info is None and not self.raises:
            return
        yield from map(float, range(info.id, 64, info.num_workers))


@pytest.mark.parametrize("raises", [True, False], ids=["raises", "is empty"])
def test_a_stream_that_needs_workers_is_looked_at_with_one(raises):
    probe, bursts = run(workload(Shared(raises)), ONE_WORKER, TWO_WORKERS)
    assert (probe.warmup.least_workers, probe.warmup.most_workers, len(bursts)) == (1, None, 2)
    assert "cannot be read without workers" in " ".join(probe.notes)


def test_the_first_batch_is_that_of_a_worker_and_what_is_made_once_counts_once():
    made = []

    def sample(key):
        if not made:
            made.append(time.sleep(1.5))
        assert torch.get_num_threads() == 1
        return torch.zeros(1)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        probe, _ = run(workload(Made(sample)))
    finally:
        torch.set_num_threads(threads)
    assert probe.warmup.first_fetch_s < 0.5 < 1.5 < probe.warmup.first_batch_s
    assert probe.warmup.default_threads == 2


class WithPool(Rows):
    """Has a pool of threads from the moment it is unpickled."""

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def __getitem__(self, index):
        return self.pool.submit(torch.zeros, 1).result()


def test_what_needs_threads_of_its_process_is_read_there():
    dataset = WithPool("")
    run(workload(dataset), ALONE, ALONE)


class Slow(Made):
    """Takes a second to unpickle."""

    def __reduce__(self):
        made, arguments = super().__reduce__()
        return _slowly, (made, arguments)


def _slowly(made, arguments):
    time.sleep(1.0)
    return made(*arguments)


def test_unpickling_the_data_is_no_hang():
    run(workload(Slow(lambda key: torch.zeros(1))), ALONE, plan=replace(QUICK, deadline_s=1.0))
