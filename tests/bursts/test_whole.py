"""What a dataset holds, or does when it is finalised, is as it was after bursts have read copies of it, or forks."""

import gc
import multiprocessing
import re
import socket
import sqlite3
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.values.errors import WorkloadError
from tests.support.bursts import ALONE, ONE_WORKER, opened, run, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]
LENGTH = 64


class Numbers(Dataset):
    """Sample i is i, as `read` has it from what the dataset holds."""

    def __init__(self, held, read):
        self.held, self.read = held, read

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor(float(self.read(self.held, index)))


class RemovesItsFiles:
    """When it is finalised."""

    def __init__(self, folder):
        self.folder = folder

    def __del__(self):
        for path in self.folder.iterdir():
            path.unlink()


def lines(folder):
    (folder / "lines").write_text("".join(f"{number}\n" for number in range(300_000)))
    return (folder / "lines").open("rb", buffering=0)


def counts(folder):
    """A value that processes share and that cannot be pickled, a mapped file, and a cache."""
    mapped = np.memmap(folder / "counts", dtype=np.int64, mode="w+", shape=(LENGTH,))
    return multiprocessing.Value("l", 0), mapped, {}


def counted(held, index):
    value, mapped, cache = held
    with value.get_lock():
        value.value += 1
        mapped[index] += 1
    cache[index] = True
    return index


KINDS = {
    "removes its files": (
        RemovesItsFiles, lambda held, index: (held.folder / f"{index}").read_text(),
        lambda held: len(list(held.folder.iterdir())) == LENGTH, True, "",
    ),
    # every forked worker would share its position: the next line is read where the last one ended
    "one open file": (
        lines, lambda held, index: held.readline() and index,
        lambda held: held.readline() == b"0\n", False, "would share its position",
    ),
    # SQLite forbids to carry it across a fork
    "a connection to a database": (
        lambda folder: sqlite3.connect(folder / "numbers.db", check_same_thread=False),
        lambda held, index: held.execute("SELECT ?", (index,)).fetchone()[0],
        lambda held: held.execute("SELECT 3").fetchone() == (3,), False, "dataset.held is an open Connection",
    ),
    # each process attaches to it by its name
    "shared memory": (
        lambda folder: SharedMemory(create=True, size=LENGTH), lambda held, index: index,
        lambda held: Path("/dev/shm", held.name).exists(), True, "",
    ),
    "counts": (counts, counted, lambda held: not (held[0].value or held[1].any() or held[2]), True, "in forks of"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_dataset_holds_is_as_it_was(kind, tmp_path):
    make, read, is_as_before, may_have_workers, says = KINDS[kind]
    for number in range(LENGTH):
        (tmp_path / f"{number}").write_text(str(number))
    held = make(tmp_path)
    # WHEN bursts read from it, with workers where these are right
    configs = (ALONE, ONE_WORKER, ALONE) if may_have_workers else (ALONE, ALONE)
    probe, _ = run(workload(Numbers(held, read)), *configs)
    gc.collect()
    # THEN it is as before, and it was found out whether workers read the same
    assert is_as_before(held)
    assert (probe.warmup.most_workers is None) is may_have_workers, probe.notes
    assert re.search(says, " ".join(probe.notes))
    for name in ("close", "unlink"):
        getattr(held, name, lambda: None)()


def test_what_no_other_process_can_read_is_named():
    says = r"^dataset\.held cannot be taken to another process .*make it on first use in each process"
    ours, other = socket.socketpair()
    dataset = Numbers(ours, lambda held, index: held.send(b"7") and other.recv(1))
    with ours, other:
        with pytest.raises(WorkloadError, match=says), opened(workload(dataset)):
            pass
        assert dataset[0] == 7  # nobody has taken anything of it
