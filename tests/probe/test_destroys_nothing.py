"""What `tune()` leaves as it was: whatever a dataset holds, or does when it is finalised, nothing of the user's suffers."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import queue
import shutil
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded import PreloadedPython
from torch.utils.data import Dataset

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from tests.support.bursts import ALONE, ONE_WORKER, measured, opened, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

LENGTH = 64


class Fragile(Dataset[Any]):
    """Samples in a folder of files, and something that a careless copy would break."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open()
        for number in range(LENGTH):
            (self.folder / f"{number}").write_text(str(number))

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(self.read(index)))

    def read(self, index: int) -> str:
        return (self.folder / f"{index}").read_text()


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


class RemovedInDel(Fragile):
    def __del__(self) -> None:
        remove(self.folder)


class RemovedByFinalizer(Fragile):
    def open(self) -> None:
        weakref.finalize(self, remove, self.folder)

    def __reduce__(self) -> Any:
        return RemovedByFinalizer, (self.folder,)


class OneOpenFile(Fragile):
    """Its position must not move: the next line is read where the last one ended."""

    def open(self) -> None:
        (self.folder / "lines").write_text("".join(f"{number}\n" for number in range(100_000)))
        self.lines = (self.folder / "lines").open("rb", buffering=0)
        self.lines.readline()

    def close(self) -> None:
        self.lines.close()

    def read(self, index: int) -> str:
        self.lines.readline()
        return str(index)


class WritesToFiles(Fragile):
    """A log, of which a line is still in the buffer, and a file that remembers what was read."""

    def open(self) -> None:
        self.log = (self.folder / "log").open("w")
        self.log.write("begins\n")
        self.known = (self.folder / "known").open("w+b", buffering=0)
        self.known.write(bytes(LENGTH))

    def close(self) -> None:
        self.log.close()
        self.known.close()

    def read(self, index: int) -> str:
        print(index, file=self.log, flush=True)
        self.known.seek(index)
        self.known.write(b"x")
        return super().read(index)


class InSharedMemory(Fragile):
    """Each process attaches to it by its name."""

    def open(self) -> None:
        self.memory = SharedMemory(create=True, size=LENGTH)

    def close(self) -> None:
        self.memory.close()
        self.memory.unlink()

    def __getstate__(self) -> Any:
        return {"folder": self.folder, "name": self.memory.name}

    def read(self, index: int) -> str:
        if "memory" not in vars(self):
            self.memory = SharedMemory(vars(self)["name"])
        return super().read(index)


class KnownToAManager(Fragile):
    def open(self) -> None:
        self.manager = multiprocessing.Manager()
        self.known = self.manager.dict()

    def close(self) -> None:
        self.manager.shutdown()

    def read(self, index: int) -> str:
        self.known[index] = True
        return super().read(index)


class OverASocket(Fragile):
    """A server in a thread answers each number with itself."""

    def open(self) -> None:
        self.socket, other = socket.socketpair()
        threading.Thread(target=self.serve, args=(other,), daemon=True).start()

    def close(self) -> None:
        self.socket.close()

    @staticmethod
    def serve(other: socket.socket) -> None:
        with other:
            while asked := other.recv(64):
                other.send(asked)

    def read(self, index: int) -> str:
        self.socket.send(f"{index}".encode())
        return self.socket.recv(64).decode()


class CountsInAValue(Fragile):
    def open(self) -> None:
        self.count = multiprocessing.Value("l", 0)

    def read(self, index: int) -> str:
        with self.count.get_lock():
            self.count.value += 1
        return super().read(index)


class CountsInAMappedFile(Fragile):
    def open(self) -> None:
        self.count: Any = np.memmap(self.folder / "counts", dtype=np.int64, mode="w+", shape=(LENGTH,))
        self.lock = multiprocessing.Lock()  # so that it cannot be pickled

    def read(self, index: int) -> str:
        with self.lock:
            self.count[index] += 1
        return super().read(index)


def is_whole(dataset: Any) -> bool:
    return [float(dataset[index]) for index in range(LENGTH)] == [float(number) for number in range(LENGTH)]


def nothing_written(dataset: Any) -> bool:
    dataset.log.flush()
    return (dataset.folder / "log").read_text() == "begins\n" and not any((dataset.folder / "known").read_bytes())


def nothing_counted(dataset: Any) -> bool:
    count = dataset.count
    return not (count.value if hasattr(count, "value") else int(count.sum()))


class Together(Dataset[Any]):
    """Several of them, read as one."""

    def __init__(self, parts: list[Fragile]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return torch.stack([part[index] for part in self.parts])


# Datasets, what must hold of each afterwards, whether workers are tried, and what is said of where it runs.
KINDS: list[tuple[list[type[Fragile]], Callable[[Any], bool], bool, str]] = [
    ([RemovedInDel, RemovedByFinalizer], is_whole, True, ""),
    ([OneOpenFile], lambda dataset: dataset.lines.readline() == b"1\n", False, "num_workers=0"),
    ([InSharedMemory], lambda dataset: Path("/dev/shm", dataset.memory.name).exists(), True, ""),
    ([KnownToAManager], is_whole, True, "what bursts write there stays"),
    ([WritesToFiles], nothing_written, False, "num_workers=0"),
    ([OverASocket], is_whole, False, "on your own objects"),
    ([CountsInAValue, CountsInAMappedFile], nothing_counted, True, "run in forks of this process"),
]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[type[Fragile]], Fragile]]:
    made: list[Fragile] = []

    def make_it(kind: type[Fragile]) -> Fragile:
        (tmp_path / kind.__name__).mkdir()
        made.append(kind(tmp_path / kind.__name__))
        return made[-1]

    yield make_it
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("kinds", "is_as_before", "may_have_workers", "says"), KINDS, ids=[kinds[0].__name__ for kinds, *_ in KINDS]
)
def test_a_dataset_is_as_it_was(
    make: Any, kinds: list[Any], is_as_before: Callable[[Any], bool], may_have_workers: bool, says: str
) -> None:
    # GIVEN datasets with something that is easily broken
    parts = [make(kind) for kind in kinds]
    # WHEN bursts read from them, with workers where these are right
    with opened(workload(Together(parts) if parts[1:] else parts[0]), "auto") as probe:
        for config in (ALONE, ONE_WORKER, ALONE) if probe.warmup.same_in_workers else (ALONE, ALONE):
            measured(probe.probe, config)
    gc.collect()
    # THEN they are as before, and it was found out whether workers read the same
    assert [part for part in parts if not is_as_before(part)] == []
    assert probe.warmup.same_in_workers is may_have_workers, probe.notes
    assert says in " ".join(probe.notes)


def test_what_no_other_process_can_read_is_named_where_one_was_asked_for(make: Any) -> None:
    with (
        pytest.raises(ValueError, match=r"isolation='process', but dataset\.socket .* isolation='inline' would work"),
        opened(workload(make(OverASocket))),
    ):
        pass


def test_a_step_that_waits_for_a_thread_of_this_process_is_refused() -> None:
    logged: queue.Queue[float] = queue.Queue(10)  # which a logger's own thread would empty
    step = TrainingSide(train_step=lambda model, batch: logged.put(float(batch.sum())))
    refused = r"`logged` is a queue between threads.* train_step=0\.05, the seconds of a step"
    with pytest.raises(ValueError, match=refused), opened(workload([torch.zeros(2)] * 64, training=step), "auto"):
        pass


@pytest.fixture
def removing_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that removes its folder when the interpreter ends."""
    text = f"import atexit, shutil\natexit.register(shutil.rmtree, {str(tmp_path / 'cache')!r})\n"
    text += "class Cached:\n    def __len__(self): return 64\n    def __getitem__(self, index): return float(index)\n"
    (tmp_path / "cached_samples.py").write_text(text)
    (tmp_path / "cache").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    import cached_samples

    yield cached_samples
    atexit.unregister(shutil.rmtree)
    del sys.modules["cached_samples"]


def test_exit_functions_of_a_module_run_in_no_process_of_ours(tmp_path: Path, removing_module: Any) -> None:
    with opened(workload(removing_module.Cached())) as probe:
        measured(probe.probe, LoaderConfig(num_workers=1, multiprocessing_context="spawn"))

    assert (tmp_path / "cache").exists()


BATCHES = """
import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from tests.support.bursts import measured, opened, workload


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Named(NamedTuple):
    x: torch.Tensor


class Split(enum.Enum):
    TRAIN = "train"


class Outer:
    class Inner:
        x = None


class Connection(list):  # a name that we use, too
    pass


def collate(samples):
    x, inner = torch.stack(samples), Outer.Inner()
    inner.x = x
    return Frozen(x), Named(x), Split.TRAIN, inner, Connection([x])


def step(model, batch):
    kinds = Frozen, Named, Split, Outer.Inner, Connection
    assert all(isinstance(each, kind) for each, kind in zip(batch, kinds)), batch
    assert batch[2] is Split.TRAIN
    return model(batch[0].x).sum()


training = TrainingSide(model=torch.nn.Linear(4, 2), train_step=step)
with opened(workload(torch.rand(64, 4), 8, training, collate_fn=collate)) as probe:
    for method in ("fork", "spawn"):
        measured(probe.probe, LoaderConfig(num_workers=1, multiprocessing_context=method))
        print(method)
"""


def test_batches_of_classes_of_a_script_without_a_guard_come_out_of_workers(
    tmp_path: Path, preloaded: PreloadedPython
) -> None:
    (tmp_path / "train.py").write_text(BATCHES)
    run = preloaded.start("train.py", folder=tmp_path)

    assert run.wait(timeout=110) == 0, run.output
    assert run.output.split() == ["fork", "spawn"]


def test_a_batch_that_no_worker_could_send_is_found_out_before_one_hangs() -> None:
    def collate(samples: Any) -> Any:
        class Local:
            x: Any

        batch = Local()
        batch.x = torch.stack(samples)
        return batch

    with opened(workload([torch.zeros(2)] * 64, collate_fn=collate), "inline") as probe:
        assert not probe.warmup.same_in_workers
        assert any("cannot be pickled" in note and "Local" in note for note in probe.notes)
        measured(probe.probe)
