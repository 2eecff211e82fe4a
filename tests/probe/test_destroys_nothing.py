"""What `tune()` leaves as it was: whatever a dataset holds, or does when it is finalised, nothing of the user's suffers."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import queue
import re
import shutil
import socket
import sys
import threading
import weakref
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from tests.support.bursts import ALONE, ONE_WORKER, measured, opened, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

LENGTH = 64


class Fragile(Dataset):
    """Samples in a folder of files, and something that a careless copy would break."""

    def __init__(self, folder):
        self.folder = folder
        for number in range(LENGTH):
            (folder / f"{number}").write_text(str(number))
        self.open()

    def open(self):
        """Make what is fragile."""

    def close(self):
        """The end of the user's program."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor(float(self.read(index)))

    def read(self, index):
        return (self.folder / f"{index}").read_text()


def remove(folder):
    for path in folder.iterdir():
        path.unlink()


class RemovedAtItsEnd(Fragile):
    def open(self):
        weakref.finalize(self, remove, self.folder)

    def __reduce__(self):
        return RemovedAtItsEnd, (self.folder,)

    def __del__(self):
        remove(self.folder)


class OneOpenFile(Fragile):
    """Its position must not move, and every forked worker would share it: the next line is read where the last one ended."""

    def open(self):
        (self.folder / "lines").write_text("".join(f"{number}\n" for number in range(100_000)))
        self.lines = (self.folder / "lines").open("rb", buffering=0)
        self.lines.readline()

    def close(self):
        self.lines.close()

    def read(self, index):
        self.lines.readline()
        return str(index)


class OpenedOnFirstUse(Fragile):
    lines = None

    def read(self, index):
        self.lines = self.lines or (self.folder / "1").open("rb")
        self.lines.seek(0)
        return self.lines.read()


class WritesToFiles(Fragile):
    """A log, of which a line is still in the buffer, and a file that remembers what was read."""

    def open(self):
        self.log = (self.folder / "log").open("w")
        self.log.write("begins\n")
        self.known = (self.folder / "known").open("w+b", buffering=0)
        self.known.write(bytes(LENGTH))

    def close(self):
        self.log.close()
        self.known.close()

    def read(self, index):
        print(index, file=self.log, flush=True)
        self.known.seek(index)
        self.known.write(b"x")
        return super().read(index)


class InSharedMemory(Fragile):
    """Each process attaches to it by its name."""

    def open(self):
        self.memory = SharedMemory(create=True, size=LENGTH)

    def close(self):
        self.memory.close()
        self.memory.unlink()

    def __getstate__(self):
        return {"folder": self.folder, "name": self.memory.name}

    def read(self, index):
        if "memory" not in vars(self):
            self.memory = SharedMemory(vars(self)["name"])
        return super().read(index)


class KnownToAManager(Fragile):
    """Something in another process, which lets in nobody but children of this one."""

    def open(self):
        self.manager = multiprocessing.Manager()
        self.known = self.manager.dict()

    def __getstate__(self):
        return {"folder": self.folder, "known": self.known}

    def close(self):
        self.manager.shutdown()

    def read(self, index):
        self.known[index] = True
        return super().read(index)


class OverASocket(Fragile):
    """A server in a thread answers each number with itself."""

    def open(self):
        self.socket, other = socket.socketpair()
        threading.Thread(target=self.serve, args=(other,), daemon=True).start()

    def close(self):
        self.socket.close()

    @staticmethod
    def serve(other):
        with other:
            while asked := other.recv(64):
                other.send(asked)

    def read(self, index):
        self.socket.send(f"{index}".encode())
        return self.socket.recv(64).decode()


class CountsInMemory(Fragile):
    """In a value that processes share, and in a mapped file."""

    def open(self):
        self.count = multiprocessing.Value("l", 0)  # which cannot be pickled
        self.counts = np.memmap(self.folder / "counts", dtype=np.int64, mode="w+", shape=(LENGTH,))

    def read(self, index):
        with self.count.get_lock():
            self.count.value += 1
            self.counts[index] += 1
        return super().read(index)


class ReadsAhead(Fragile):
    """As torchio's queue: by a loader of its own, whose workers run already."""

    def open(self):
        samples = torch.arange(float(LENGTH)).expand(1 << 20, LENGTH)
        self.ahead = iter(DataLoader(samples, num_workers=1, multiprocessing_context="fork"))

    def read(self, index):
        return next(self.ahead)[0, index]


def is_whole(dataset):
    return [float(dataset[index]) for index in range(LENGTH)] == [float(number) for number in range(LENGTH)]


def nothing_written(dataset):
    dataset.log.flush()
    return (dataset.folder / "log").read_text() == "begins\n" and not any((dataset.folder / "known").read_bytes())


@pytest.fixture
def make(tmp_path):
    made = []

    def make_it(kind):
        (tmp_path / kind.__name__).mkdir()
        made.append(kind(tmp_path / kind.__name__))
        return made[-1]

    yield make_it
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("kind", "is_as_before", "may_have_workers", "says"),
    [
        (RemovedAtItsEnd, is_whole, True, ""),
        (OpenedOnFirstUse, lambda dataset: dataset.lines is None, True, ""),
        (OneOpenFile, lambda dataset: dataset.lines.readline() == b"1\n", False, "num_workers=0"),
        (WritesToFiles, nothing_written, False, "num_workers=0"),
        (InSharedMemory, lambda dataset: Path("/dev/shm", dataset.memory.name).exists(), True, ""),
        (KnownToAManager, is_whole, True, "unpickled in another process.* what bursts write there stays"),
        (OverASocket, is_whole, False, "on your own objects"),
        (ReadsAhead, is_whole, False, "num_workers=0"),
        (CountsInMemory, lambda dataset: not (dataset.count.value or dataset.counts.any()), True, "in forks of this"),
    ],
)
def test_a_dataset_is_as_it_was(make, kind, is_as_before, may_have_workers, says):
    dataset = make(kind)
    # WHEN bursts read from it, with workers where these are right
    with opened(workload(dataset), "auto") as probe:
        for config in (ALONE, ONE_WORKER, ALONE) if may_have_workers else (ALONE, ALONE):
            measured(probe.probe, config)
    gc.collect()
    # THEN it is as before, and it was found out whether workers read the same
    assert is_as_before(dataset)
    assert (probe.warmup.same_in_workers and not probe.warmup.reads_by_itself) is may_have_workers, probe.notes
    assert re.search(says, " ".join(probe.notes))


def test_what_no_other_process_can_read_is_named_where_one_was_asked_for(make):
    refused = r"isolation='process', but dataset\.socket .* isolation='inline' would work"
    with pytest.raises(ValueError, match=refused), opened(workload(make(OverASocket))):
        pass


def test_a_step_that_waits_for_a_thread_of_this_process_is_refused():
    logged = queue.Queue(10)  # which a logger's own thread would empty
    step = TrainingSide(train_step=lambda model, batch: logged.put(float(batch.sum())))
    refused = r"`logged` is a queue between threads.* train_step=0\.05, the seconds of a step"
    with pytest.raises(ValueError, match=refused), opened(workload([torch.zeros(2)] * 64, training=step), "auto"):
        pass


# Its folder is removed when the interpreter ends.
REMOVING = """
import atexit, shutil
atexit.register(shutil.rmtree, {folder!r})
class Cached:
    def __len__(self): return 64
    def __getitem__(self, index): return float(index)
"""


def test_exit_functions_of_a_module_run_in_no_process_of_ours(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    folder.mkdir()
    (tmp_path / "cached_samples.py").write_text(REMOVING.format(folder=str(folder)))
    monkeypatch.syspath_prepend(tmp_path)
    import cached_samples

    with opened(workload(cached_samples.Cached())) as probe:
        measured(probe.probe, LoaderConfig(num_workers=1, multiprocessing_context="spawn"))

    assert folder.exists()
    atexit.unregister(shutil.rmtree)
    del sys.modules["cached_samples"]


BATCHES = """
import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from tests.support.bursts import measured, opened, workload

class Split(enum.Enum):
    TRAIN = "train"

@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor

class Outer:
    class Batch(NamedTuple):
        x: Frozen
        split: Split

def collate(samples):
    return Outer.Batch(Frozen(torch.stack(samples)), Split.TRAIN)

def step(model, batch):
    assert isinstance(batch, Outer.Batch) and isinstance(batch.x, Frozen) and batch.split is Split.TRAIN

with opened(workload(torch.rand(64, 4), 8, TrainingSide(train_step=step), collate_fn=collate)) as probe:
    for method in ("fork", "spawn"):
        measured(probe.probe, LoaderConfig(num_workers=1, multiprocessing_context=method))
        print(method)
"""


def test_batches_of_classes_of_a_script_without_a_guard_come_out_of_workers(tmp_path, preloaded):
    (tmp_path / "train.py").write_text(BATCHES)
    run = preloaded.start("train.py", folder=tmp_path)
    assert run.wait(timeout=110) == 0, run.output
    assert run.output.split() == ["fork", "spawn"]


def test_a_batch_that_no_worker_could_send_is_found_out_before_one_hangs():
    class Local(list):
        pass

    with opened(workload([torch.zeros(2)] * 64, collate_fn=Local), "inline") as probe:
        assert not probe.warmup.same_in_workers
        assert any("cannot be pickled" in note and "Local" in note for note in probe.notes)
        measured(probe.probe)
