"""What a dataset holds is as it was after bursts have read copies of it, or forks; every byte is
copied once."""

import contextlib
import gc
import multiprocessing
import os
import re
import socket
import sqlite3
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType

import cloudpickle
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from autotune_loader.bursts.packing import (
    Packed,
    TooLargeError,
    packed,
    pickled,
    read_archive,
    why_not_sent,
    write_archive,
)
from autotune_loader.bursts.parent import open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.kernel import memfd
from autotune_loader.machine.limits import MemoryBudget
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.values import WorkloadError
from tests.support.bursts import (
    ALONE,
    ONE_WORKER,
    QUICK,
    TWO_WORKERS,
    Made,
    measured,
    opened,
    run,
    workload,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
LENGTH, MIB = 64, 1 << 20


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


def database(folder):
    return sqlite3.connect(folder / "numbers.db", check_same_thread=False)


def its_index(held, index):
    return index


def counts(folder):
    """A value that processes share, pickled for a process that starts alone; a mapped file,
    and a cache."""
    mapped = np.memmap(folder / "counts", dtype=np.int64, mode="w+", shape=(LENGTH,))
    return multiprocessing.get_context("forkserver").Value("l", 0), mapped, {}


def counted(held, index):
    value, mapped, cache = held
    with value.get_lock():
        value.value += 1
        mapped[index] += 1
    cache[index] = True
    return index


class OnFirstUse:
    """Opened in each process, as everybody recommends."""

    connection = None

    def __init__(self, folder):
        self.path = folder / "rows.db"
        sqlite3.connect(self.path).close()

    def read(self, index):
        self.connection = self.connection or sqlite3.connect(self.path)
        return self.connection.execute("SELECT ?", (index,)).fetchone()[0]


# The user's object; how a sample is read from it; whether it is as before; what bursts without
# workers, and with, say of it.
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
        database, lambda held, index: held.execute("SELECT ?", (index,)).fetchone()[0],
        lambda held: held.execute("SELECT 3").fetchone(), False, "held is an open Connection",
    ),
    "opened on first use": (
        OnFirstUse, OnFirstUse.read, lambda held: held.connection is None, True, "^(?!.*first use)",
    ),
    # each process attaches to it by its name
    "shared memory": (
        lambda folder: SharedMemory(create=True, size=LENGTH), its_index,
        lambda held: Path("/dev/shm", held.name).exists(), True, "",
    ),
    "counts": (
        counts, counted, lambda held: not (held[0].value or held[1].any() or held[2]),
        True, "in forks of",
    ),
}  # fmt: skip
METHODS = [
    pytest.param(kind, "forkserver", marks=pytest.mark.system)
    for kind in ("shared memory", "counts")
]


@pytest.mark.process
@pytest.mark.parametrize(("kind", "method"), [*((kind, "fork") for kind in KINDS), *METHODS])
def test_what_a_dataset_holds_is_as_it_was(kind, method, tmp_path):
    make, read, is_as_before, may_have_workers, says = KINDS[kind]
    for number in range(LENGTH):
        (tmp_path / f"{number}").write_text(str(number))
    held = make(tmp_path)
    # WHEN bursts read from it, with workers where these are right
    configs = (ALONE, ONE_WORKER, ALONE) if may_have_workers else (ALONE, ALONE)
    probe, _ = run(workload(Numbers(held, read), multiprocessing_context=method), *configs)
    gc.collect()
    assert is_as_before(held)
    assert (probe.warmup.most_workers is None) is may_have_workers, probe.notes
    assert re.search(says, " ".join(probe.notes))
    for name in ("close", "unlink"):
        getattr(held, name, lambda: None)()


LONG = replace(QUICK, max_s=5.0, min_s=0.5)
"""However much later than the first the second worker begins."""


@pytest.mark.process
@pytest.mark.parametrize(
    "lock",
    [None, pytest.param(threading.Lock(), marks=pytest.mark.system)],
    ids=["fresh", "forked"],
)
def test_two_configurations_may_read_the_same_samples(lock):
    # GIVEN samples as long as their index, in no batches
    def sample(index):
        return torch.zeros(index + (1 if lock is None else 1 + lock.locked()))

    def first(config, **plan):
        found = measured(probe.probe, config, replace(LONG, **plan))
        return [each.samples for each in found.traces[:8]]

    method = None if lock is None else "fork"
    job = workload(Made(sample, 20_000), None, multiprocessing_context=method)
    with opened(job) as probe:
        read = first(ALONE)
        at_a_place = first(TWO_WORKERS, place=3)
        assert at_a_place == first(ALONE, place=3)
        elsewhere = first(ALONE)
    assert at_a_place != elsewhere
    assert elsewhere != read


OPENED = []


def at(path, index):
    """The line of this number; the file is opened once, and kept by a module."""
    OPENED[:] = OPENED or [path.open("rb", buffering=0)]
    OPENED[0].seek(2 * index)
    time.sleep(0.001)
    assert OPENED[0].read(1) == str(index % 10).encode()
    return index


@pytest.mark.process
def test_a_modules_file_is_each_workers_own(tmp_path):
    (tmp_path / "lines").write_text("".join(f"{index % 10}\n" for index in range(LENGTH)))
    run(workload(Numbers(tmp_path / "lines", at)), TWO_WORKERS, ALONE, TWO_WORKERS)


def tensors(count):
    return [torch.zeros(1) for _ in range(count)]


FORK_LOCK, THREAD_LOCK = multiprocessing.get_context("fork").Lock(), threading.Lock()
UNNAMED = {"collate_fn": lambda samples: samples}
OF_MODULE = {"collate_fn": its_index, "worker_init_fn": at}
LARGE = ["word" * 1000, np.zeros(1 << 30), torch.zeros(1 << 20)] * 100


SINCE_3_11 = pytest.mark.skipif(sys.version_info < (3, 11, 5), reason="Python itself sends it")


@pytest.mark.parametrize(("dataset", "parts", "says"), [
    (THREAD_LOCK, {}, "dataset .*lock"),
    pytest.param(FORK_LOCK, {}, "dataset .*fork context", marks=SINCE_3_11),
    (0, UNNAMED, "collate_fn .*lambda"),
    (tensors(246), {}, "dataset .*more than 245 tensors"),
    (tensors(245), {}, None),
    (LARGE, {}, None),  # which is not copied to see
    (Path("lines"), OF_MODULE, None),
])  # fmt: skip
def test_what_no_worker_could_be_sent_is_named(dataset, parts, says):
    data = DataSide(dataset=dataset, batch_size=1, **parts)
    why = why_not_sent(data, "forkserver")
    assert why is None if says is None else re.match(says, why)
    assert says or why_not_sent(data, "spawn") is None
    assert why_not_sent(data, "fork") is None


@pytest.mark.process
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_what_processes_share_can_be_sent(method):
    start = multiprocessing.get_context(method)
    held = start.Lock(), start.Value("l"), start.Queue(), start.Pipe()
    assert why_not_sent(DataSide(dataset=held, batch_size=1), method) is None


def module_of(name, code):
    """A module without a file."""
    module = ModuleType(name)
    exec(code, vars(module))
    return module


def test_classes_of_a_notebook_cannot_be_sent(monkeypatch):
    cell = module_of("__main__", "class Rows: pass")
    monkeypatch.setitem(sys.modules, "__main__", cell)
    data = DataSide(dataset=cell.Rows(), batch_size=1)
    assert "Rows is of a notebook" in why_not_sent(data, "spawn")


def test_classes_of_a_spawned_script_travel(monkeypatch):
    script = module_of("__mp_main__", "class Rows:\n    def count(self): return 7")
    registered = cloudpickle.list_registry_pickle_by_value()
    with archive() as file:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "__mp_main__", script)
            write_archive(file, script.Rows(), MIB)
        assert cloudpickle.list_registry_pickle_by_value() == registered
        monkeypatch.setitem(sys.modules, "__mp_main__", ModuleType("__mp_main__"))  # another one
        assert read_archive(file).count() == 7
    cloudpickle.unregister_pickle_by_value(sys.modules["__mp_main__"])


@pytest.mark.process
def test_what_no_other_process_can_read_is_named():
    ours, other = socket.socketpair()
    dataset = Numbers(ours, lambda held, index: held.send(b"7") and other.recv(1))
    says = r"^dataset\.held cannot be sent to another process .*make it on first use in each"
    with ours, other:
        with pytest.raises(WorkloadError, match=says), opened(workload(dataset)):
            pass
        assert dataset[0] == 7  # nobody has taken anything of it


@contextlib.contextmanager
def archive():
    """The descriptor of a file in memory."""
    with os.fdopen(memfd("test"), "rb") as file:
        yield file.fileno()


def written(value, max_bytes=256 * MIB):
    """The value as it is read, and the bytes of its file."""
    with archive() as file:
        write_archive(file, value, max_bytes)
        return read_archive(file), os.fstat(file).st_size


def named(tensor):
    tensor.of_file = "a.jpg"
    return tensor


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("held", [
    torch.zeros(0), torch.rand(30, 30).T, torch.ones(9, 9, dtype=torch.bfloat16)[::2],
    torch.nn.Parameter(torch.rand(99)), torch.rand(99, dtype=torch.complex64).conj(),
    torch.rand(9, 9).to_sparse(), named(torch.rand(9)),
])  # fmt: skip
def test_unusual_tensors_travel(held):
    default = "cpu" if held.is_sparse else "meta"
    with torch.device(default):  # of the caller's, such as "cuda"
        back, _ = written(held)
    assert torch.equal(back.detach().to_dense(), held.detach().to_dense())
    for name in ("dtype", "requires_grad", "layout", "__class__", "__dict__"):
        assert getattr(back, name) == getattr(held, name)


def test_shared_memory_travels_once():
    rows = torch.rand(1000, 4096)
    back, size = written(list(rows))
    assert size < rows.nbytes + MIB
    assert all(map(torch.equal, rows, back))


def test_a_mapped_file_travels_by_name_safely(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(MIB, dtype=np.int64).tofile(path)
    tokens = np.memmap(path, dtype=np.int64, mode="r+")
    (whole, part), size = written([tokens, tokens[1000:2000]])
    assert size < MIB // 8
    assert np.array_equal(whole, tokens)
    assert np.array_equal(part, tokens[1000:2000])
    whole[0] = 7
    assert np.fromfile(path, dtype=np.int64)[0] == 0


@pytest.mark.parametrize(("rows", "size"), [
    (torch.rand(MIB), 4 * MIB), (np.arange(MIB), 8 * MIB),
    ([torch.rand(MIB // 16) for _ in range(16)], 4 * MIB),
], ids=("tensor", "array", "list"))  # fmt: skip
def test_workloads_beside_each_other_share_their_data(rows, size):
    sides = [DataSide(dataset=Numbers(rows, its_index), batch_size=each) for each in (3, 4, 5)]
    other, files = DataSide(dataset=TensorDataset(torch.rand(99)), batch_size=4), []
    with contextlib.ExitStack() as exits:
        beside = exits.enter_context(Packed())
        for side in (sides[0], other, *sides[1:]):
            job = Workload(data=side, training=TrainingSide())
            # GIVEN one that has ended by the next, as it failed
            with packed(job, None, 64 * MIB, beside) as fds:
                files.append(list(fds))
            for of_one in (fds[0], fds[2]):  # settings and training
                with pytest.raises(OSError, match="descriptor"):
                    os.fstat(of_one)
        sizes = [os.fstat(fds[1]).st_size for fds in files]
        assert sizes[0] > size > 50 * max(sizes[1:])
        # THEN each side has the files to which its own refers, and memory of its own
        first, second, _ = (read_archive(files[at][1]).dataset.held for at in (0, 2, 3))
        assert files[0][1] in files[2]
        assert torch.equal(torch.as_tensor(second[7]), torch.as_tensor(rows[7]))
        first[7] = second[8]
        assert torch.equal(torch.as_tensor(second[7]), torch.as_tensor(rows[7]))
    for fds in files:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fds[1])


@pytest.mark.parametrize("held", [torch.zeros(MIB), b"x" * 2 * MIB, ["word"] * MIB])
def test_what_is_too_large_is_refused(held):
    with pytest.raises(TooLargeError, match="larger than 1 MiB"):
        written(held, MIB)
    # AND of settings each byte counts once
    size = len(pickled(held, 16 * MIB))
    assert len(pickled(held, size)) == size
    with pytest.raises(TooLargeError):
        pickled(held, size - 1)


@pytest.mark.process
def test_data_are_sent_in_30_percent_of_memory():
    left = MemoryBudget(available_bytes=100 * MIB, total_bytes=200 * MIB, inputs=())
    machine = replace(inspect_machine(environ={}), memory=left)
    job = workload(Numbers(np.zeros(40 * MIB, np.uint8), its_index))
    # THEN what is larger is read in forks, which have it without a copy
    with open_probe(job, machine, None) as probe:
        assert "in forks of this process" in probe.notes[0]
        assert "larger than 30 MiB" in probe.notes[0]
