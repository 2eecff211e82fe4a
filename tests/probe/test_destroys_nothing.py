"""What `tune()` leaves as it was: whatever a dataset holds, or does when it is finalised, nothing of the user's suffers."""

from __future__ import annotations

import gc
import multiprocessing
import queue
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.opening import open_probe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

LENGTH = 64
QUICK = BurstPlan(max_s=0.2, min_s=0.05, relative_error=0.2, deadline_s=20.0)


class Fragile(Dataset[Any]):
    """Samples in a folder of files, and something that a careless copy would break."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for number in range(LENGTH):
            (folder / f"{number}").write_text(str(number))
        self.open()

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


class InATemporaryDirectory(Fragile):
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.folder = Path(self.directory.name)
        for number in range(LENGTH):
            (self.folder / f"{number}").write_text(str(number))

    def close(self) -> None:
        self.directory.cleanup()


class Zipped(Fragile):
    def open(self) -> None:
        with zipfile.ZipFile(self.folder / "all.zip", "w") as archive:
            for number in range(LENGTH):
                archive.writestr(f"{number}", str(number))
        self.archive = zipfile.ZipFile(self.folder / "all.zip")

    def close(self) -> None:
        self.archive.close()

    def read(self, index: int) -> str:
        return self.archive.read(f"{index}").decode()


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


class ClosedByGetstate(Fragile):
    def open(self) -> None:
        self.handle: Any = (self.folder / "0").open()

    def close(self) -> None:
        self.handle.close()

    def __getstate__(self) -> Any:
        self.handle.close()
        return {"folder": self.folder, "handle": None}


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


class InSqlite(Fragile):
    def open(self) -> None:
        self.database = sqlite3.connect(self.folder / "rows.db")
        self.database.execute("create table samples (value text)")
        self.database.executemany("insert into samples values (?)", [(str(n),) for n in range(LENGTH)])

    def close(self) -> None:
        self.database.close()

    def read(self, index: int) -> str:
        return str(self.database.execute("select value from samples where rowid = ?", (index + 1,)).fetchone()[0])


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


class FromAProcess(Fragile):
    def open(self) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def close(self) -> None:
        self.process.communicate()

    def read(self, index: int) -> str:
        asked, answers = self.process.stdin, self.process.stdout
        assert asked is not None
        assert answers is not None
        asked.write(f"{index}\n")
        return answers.readline()


class WithThreads(Fragile):
    def open(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        list(self.pool.map(str, range(8)))

    def close(self) -> None:
        self.pool.shutdown()

    def read(self, index: int) -> str:
        return self.pool.submit(super().read, index).result()


class CountsInAValue(Fragile):
    def open(self) -> None:
        self.count = multiprocessing.Value("l", 0)

    def read(self, index: int) -> str:
        with self.count.get_lock():
            self.count.value += 1
        return super().read(index)


class CountsInATensor(Fragile):
    def open(self) -> None:
        self.count = torch.zeros(LENGTH, dtype=torch.int64).share_memory_()
        self.lock = multiprocessing.Lock()  # so that it cannot be pickled

    def read(self, index: int) -> str:
        with self.lock:
            self.count[index] += 1
        return super().read(index)


class CountsInAMappedFile(Fragile):
    def open(self) -> None:
        self.count = np.memmap(self.folder / "counts", dtype=np.int64, mode="w+", shape=(LENGTH,))
        self.lock = threading.Lock()

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


# Datasets, what must hold of each afterwards, and whether workers are tried.
KINDS: list[tuple[list[type[Fragile]], Callable[[Any], bool], bool]] = [
    ([RemovedInDel, RemovedByFinalizer, InATemporaryDirectory], is_whole, True),
    ([ClosedByGetstate], lambda dataset: not dataset.handle.closed, True),
    ([Zipped], is_whole, False),
    ([OneOpenFile], lambda dataset: dataset.lines.readline() == b"1\n", False),
    ([InSharedMemory], lambda dataset: Path("/dev/shm", dataset.memory.name).exists(), True),
    ([WritesToFiles], nothing_written, False),
    ([InSqlite], is_whole, False),
    ([OverASocket], is_whole, False),
    ([FromAProcess], is_whole, False),
    ([WithThreads], is_whole, False),
    ([CountsInAValue, CountsInATensor, CountsInAMappedFile], nothing_counted, True),
]


@pytest.fixture
def fragile() -> Iterator[Callable[[type[Fragile], Path], Fragile]]:
    made: list[Fragile] = []

    def make(kind: type[Fragile], folder: Path) -> Fragile:
        made.append(kind(folder))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("kinds", "is_as_before", "may_have_workers"), KINDS, ids=[kinds[0].__name__ for kinds, *_ in KINDS]
)
def test_a_dataset_is_as_it_was(
    tmp_path: Path, fragile: Any, kinds: list[Any], is_as_before: Callable[[Any], bool], may_have_workers: bool
) -> None:
    # GIVEN datasets with something that is easily broken
    parts = []
    for kind in kinds:
        (tmp_path / kind.__name__).mkdir()
        parts.append(fragile(kind, tmp_path / kind.__name__))
    data = DataSide.from_dataset(Together(parts) if parts[1:] else parts[0], batch_size=4)
    # WHEN bursts read from them, with workers where these are right
    with open_probe(Workload(data=data, training=TrainingSide()), inspect_machine(), "auto", None) as opened:
        for workers in (0, 1, 0) if opened.warmup.same_in_workers else (0, 0):
            outcome = opened.probe.burst(LoaderConfig(num_workers=workers), QUICK)
            assert isinstance(outcome, Measurement), outcome
    gc.collect()
    # THEN they are as before, and whether workers read the same was found out
    assert [part for part in parts if not is_as_before(part)] == []
    assert opened.warmup.same_in_workers is may_have_workers, opened.notes
    assert may_have_workers or any("num_workers=0" in note for note in opened.notes)


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
    import atexit

    atexit.unregister(__import__("shutil").rmtree)
    del sys.modules["cached_samples"]


def test_exit_functions_of_a_module_run_in_no_process_of_ours(tmp_path: Path, removing_module: Any) -> None:
    data = DataSide.from_dataset(removing_module.Cached(), batch_size=4)
    with open_probe(Workload(data=data, training=TrainingSide()), inspect_machine(), "process", None) as opened:
        for method in ("fork", "spawn"):
            config: Any = LoaderConfig(num_workers=1, multiprocessing_context=method)
            assert isinstance(opened.probe.burst(config, QUICK), Measurement)

    assert (tmp_path / "cache").exists()


def test_what_runs_where_is_said(tmp_path: Path, fragile: Any) -> None:
    def notes_of(dataset: Any, isolation: Any = "auto") -> str:
        data = DataSide.from_dataset(dataset, batch_size=4)
        with open_probe(Workload(data=data, training=TrainingSide()), inspect_machine(), isolation, None) as opened:
            return " ".join(opened.notes)

    assert "dataset.count._obj" in notes_of(fragile(CountsInAValue, tmp_path), "process")
    assert "run in forks of this process" in notes_of(fragile(CountsInAValue, tmp_path))
    assert "`dataset.known` is a connection to a manager" in notes_of(fragile(KnownToAManager, tmp_path))
    assert "`dataset.socket` is a socket" in notes_of(fragile(OverASocket, tmp_path))
    assert "on your own objects" in notes_of(fragile(OverASocket, tmp_path))
    with pytest.raises(ValueError, match=r"isolation='process', but dataset\.socket .* isolation='inline' would work"):
        notes_of(fragile(OverASocket, tmp_path), "process")


def test_a_step_that_waits_for_a_thread_of_this_process_is_refused() -> None:
    logged: queue.Queue[float] = queue.Queue(10)  # which a logger's own thread would empty
    data = DataSide.from_dataset([torch.zeros(2)] * 64, batch_size=4)
    training = TrainingSide(train_step=lambda model, batch: logged.put(float(batch.sum())))
    refused = r"`logged` is a queue between threads.* train_step=0\.05, the seconds of a step"
    with (
        pytest.raises(ValueError, match=refused),
        open_probe(Workload(data=data, training=training), inspect_machine(), "auto", None),
    ):
        pass


BATCHES = """
import enum
import sys
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.data import Dataset

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.opening import open_probe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan


@dataclass
class Plain:
    x: torch.Tensor


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Named(NamedTuple):
    x: torch.Tensor


class Slots:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


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
    return Plain(x), Frozen(x), Named(x), Slots(x), Split.TRAIN, inner, Connection([x])


def step(model, batch):
    kinds = Plain, Frozen, Named, Slots, Split, Outer.Inner, Connection
    assert all(isinstance(each, kind) for each, kind in zip(batch, kinds)), batch
    assert batch[4] is Split.TRAIN
    return model(batch[0].x).sum()


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def main():
    data = DataSide.from_dataset(Numbers(), batch_size=8, collate_fn=collate)
    training = TrainingSide(model=torch.nn.Linear(4, 2), train_step=step)
    with open_probe(Workload(data=data, training=training), inspect_machine(), "process", None) as opened:
        plan = BurstPlan(max_s=0.2, min_s=0.05, relative_error=0.2, deadline_s=30.0)
        for method in sys.argv[1:] or ["fork"]:
            config = LoaderConfig(num_workers=1, multiprocessing_context=method)
            print(method, type(opened.probe.burst(config, plan)).__name__)


GUARD
    main()
"""
GUARDED, ALWAYS = 'if __name__ == "__main__":', "if True:"


@pytest.mark.parametrize(
    ("arguments", "guard", "methods"),
    [
        (["train.py", "fork", "spawn"], ALWAYS, ["fork", "spawn"]),
        (["-m", "train", "fork", "spawn"], GUARDED, ["fork", "spawn"]),
        (["-"], ALWAYS, ["fork"]),
    ],
    ids=["no-guard", "module", "stdin"],
)
def test_batches_of_classes_of_the_script_come_out_of_workers(
    tmp_path: Path, arguments: list[str], guard: str, methods: list[str]
) -> None:
    text = BATCHES.replace("GUARD", guard)
    (tmp_path / "train.py").write_text(text)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, input=text, capture_output=True, text=True, timeout=110
    )

    assert done.stdout.splitlines() == [f"{method} Measurement" for method in methods], done.stderr


def test_a_batch_that_no_worker_could_send_is_found_out_before_one_hangs() -> None:
    def collate(samples: Any) -> Any:
        class Local:
            x: Any

        batch = Local()
        batch.x = torch.stack(samples)
        return batch

    data = DataSide.from_dataset([torch.zeros(2)] * 64, batch_size=4, collate_fn=collate)
    with open_probe(Workload(data=data, training=TrainingSide()), inspect_machine(), "inline", None) as opened:
        assert not opened.warmup.same_in_workers
        assert any("cannot be pickled" in note and "Local" in note for note in opened.notes)
        assert not isinstance(opened.probe.burst(LoaderConfig(), QUICK), Failure)
