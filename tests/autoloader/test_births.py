"""Workers of `spawn` and `forkserver` are what torch's are, and are born once."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from autotune_loader import AutoLoader
from autotune_loader.machine.nursery import Root
from autotune_loader.values import LoaderConfig
from tests.support.schedules import FixedLoader, Remade

pytestmark = pytest.mark.process

SAMPLES = 64
UNSEEDED, SEEDED = np.random.default_rng(), np.random.default_rng(0)
HELD = {"rng": np.random.default_rng()}


class Told(Dataset[Any]):
    """Sample i is (i, the process that made it, what `tell` says there)."""

    value = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, int, Any]:
        time.sleep(0.002)
        return index, os.getpid(), self.tell()

    def tell(self) -> Any:
        return self.value


def loader_of(data: Any, method: str = "spawn", **arguments: Any) -> AutoLoader[Any]:
    how: dict[str, Any] = {"num_workers": 2, "tune": False, "multiprocessing_context": method}
    return AutoLoader(data, batch_size=4, collate_fn=list, **how | arguments)


def epoch_of(loader: Any) -> tuple[set[int], list[Any]]:
    """The processes of one epoch and what they told, once its samples are right."""
    rows = [row for batch in loader for row in batch]
    assert [index for index, *_ in rows] == list(range(SAMPLES))
    return {process for _, process, _ in rows}, [told for *_, told in rows]


def nursery_of(loader: Any) -> Any:
    return loader._live.home.nursery


def inherited() -> Any:
    """What a new process has from the one that starts it."""
    mask = Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0]
    cores, limit = tuple(sorted(os.sched_getaffinity(0))), resource.getrlimit(resource.RLIMIT_CORE)
    return os.environ.get("TOLD"), mask, cores, limit, str(Path.cwd()), tuple(sys.argv)


class Changing(Told):
    def __init__(self) -> None:
        self.names = [f"image_{index}" for index in range(5000)]
        self.rng = np.random.default_rng(0)

    def tell(self) -> Any:
        return self.value, self.names[7], inherited()


def name_changes(rows: Changing, _: pytest.MonkeyPatch) -> None:
    rows.names[7] = "other"


def value_changes(rows: Changing, _: pytest.MonkeyPatch) -> None:
    rows.value = 1


def process_changes(_: Changing, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("TOLD", "other")
    os.umask(0o77)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def preparation_changes(_: Changing, patch: pytest.MonkeyPatch) -> None:
    patch.chdir("/")
    patch.setattr(sys, "argv", ["other"])


CHANGES = [name_changes, value_changes, process_changes, preparation_changes]


@pytest.fixture
def process_is_put_back() -> Iterator[None]:
    cores, limit = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CORE)
    os.umask(mask := os.umask(0))
    yield
    os.umask(mask)
    os.sched_setaffinity(0, cores)
    resource.setrlimit(resource.RLIMIT_CORE, limit)


@pytest.mark.system
@pytest.mark.usefixtures("process_is_put_back")
def test_a_nursery_is_kept_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Changing()
    loader, processes, nurseries = loader_of(rows), set[int](), list[int]()
    for change in [None, None, *CHANGES]:
        if change is not None:
            change(rows, monkeypatch)
        now, told = epoch_of(loader)
        assert not now & processes  # workers are new in each epoch, as torch's
        processes |= now
        nurseries.append(nursery_of(loader).pid)
        assert set(told) == {(rows.value, rows.names[7], inherited())}
    assert nurseries[0] == nurseries[1]
    assert len(set(nurseries)) == 1 + len(CHANGES)


ROWS = """
import os
from tests.autoloader.test_births import Told

IMPORTED_BY = os.getpid()

class Rows(Told):
    def tell(self):
        return IMPORTED_BY
"""


@pytest.mark.system
def test_what_a_nursery_imports_its_root_imports_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows_of_births.py").write_text(ROWS)
    monkeypatch.syspath_prepend(tmp_path)  # where the main module does not import it
    data, importers = importlib.import_module("rows_of_births").Rows(), list[Any]()
    loader = loader_of(data)
    for data.value in range(3):
        _, told = epoch_of(loader)
        importers.append((set(told), nursery_of(loader).pid))
    (first, nursery), (second, _), (third, _) = importers
    assert first == {nursery}
    assert second == third == {Root.latest.pid}


class Counted(Told):
    """Counts how often it is pickled, and shares memory with workers."""

    def __init__(self) -> None:
        self.pickled, self.value = 0, 7
        self.shared = torch.zeros(SAMPLES).share_memory_()

    def __getstate__(self) -> dict[str, Any]:
        self.pickled += 1
        return self.__dict__

    def __getitem__(self, index: int) -> tuple[int, int, Any]:
        self.shared[index] += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.system)])
def test_root_serves_all_loaders_and_workers_are_clones(method: str) -> None:
    roots = set[int]()
    for _ in range(2):
        data = Counted()
        how = {"multiprocessing_context": method, "timeout": 30, "collate_fn": list}
        loader = FixedLoader(data, batch_size=4, num_workers=2, **how)
        iterator = iter(loader)
        rows = list(next(iterator))
        loader.change_to(LoaderConfig(num_workers=4))
        rows += next(iterator)
        assert len(iterator._workers) == 4  # without imports, which take longer than a batch
        rows += [row for batch in iterator for row in batch]
        assert [index for index, *_ in rows] == list(range(SAMPLES))
        assert data.pickled == 1
        assert data.shared.tolist() == [1.0] * SAMPLES
        assert loader._live.home.why_not is None
        roots.add(id(Root.latest))
    assert len(roots) == 1


class Drawing(Told):
    rng = np.random.default_rng()

    def tell(self) -> Any:
        return tuple(float(each.random()) for each in (UNSEEDED, self.rng, HELD["rng"], SEEDED))


def test_generators_without_a_seed_differ_between_workers() -> None:
    loader = loader_of(Drawing())
    rows = [row for batch in loader for row in batch]
    firsts = {process: told for _, process, told in reversed(rows)}
    (*one, seeded), (*other, seeded_too) = firsts.values()
    assert not set(one) & set(other)
    assert seeded == seeded_too == np.random.default_rng(0).random()


class Stream(IterableDataset[Any]):
    def __init__(self) -> None:
        self.source = Remade()

    def __iter__(self) -> Iterator[float]:
        return (self.source() for _ in range(4))


def test_generators_made_by_unpickling_differ_between_workers() -> None:
    loader = AutoLoader(Stream(), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    drawn = [float(each) for _ in range(2) for each in loader]
    assert len(set(drawn)) == len(drawn) == 16


@pytest.mark.system
def test_a_fork_has_a_nursery_of_its_own() -> None:
    loader = loader_of(Changing())
    epoch_of(loader)
    if not (pid := os.fork()):
        try:
            epoch_of(loader)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    kept = nursery_of(loader).pid
    epoch_of(loader)
    assert nursery_of(loader).pid == kept


class StartsThread(Told):
    def __init__(self) -> None:
        self.value = 0  # else there is no state to set

    def __setstate__(self, _: Any) -> None:
        how: Any = {"args": (1000,), "daemon": True, "name": "of-the-dataset"}
        threading.Thread(target=time.sleep, **how).start()


class OpensSocket(StartsThread):
    def __setstate__(self, _: Any) -> None:
        self.ends = socket.socketpair()


class ReadsFile(Told):
    """Reads at a position of a file that it opens where it is unpickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {"path": __file__}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.file = Path(state["path"]).open("rb")

    def tell(self) -> Any:
        for position in range(1, 40):
            self.file.seek(position)
            time.sleep(0.0001)
            assert self.file.tell() == position
        return self.value


SHARED = [
    pytest.param(StartsThread, "start threads (of-the-dataset)", True, marks=pytest.mark.system),
    pytest.param(OpensSocket, "open a socket", True, marks=pytest.mark.system),
    (ReadsFile, "anew", False),
]  # fmt: skip


@pytest.mark.parametrize(("make", "why", "is_told"), SHARED)
def test_what_clones_would_share_is_told(make: Any, why: str, is_told: bool) -> None:
    loader = loader_of(make())
    epoch_of(loader)  # by workers that start as torch's
    assert (why in " ".join(loader.report().split())) is is_told


@pytest.mark.system
def test_memory_shared_by_name_has_no_nursery() -> None:
    was = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        loader = loader_of(Told())
        epoch_of(loader)
        assert nursery_of(loader) is None
        assert "file_system" in loader.report()
    finally:
        torch.multiprocessing.set_sharing_strategy(was)


class Writes(Told):
    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def tell(self) -> Any:
        self.pipe.send(1)
        return self.value


@pytest.mark.system
def test_a_pipe_of_the_dataset_ends_with_workers() -> None:
    reader, writer = multiprocessing.Pipe(duplex=False)
    loader = loader_of(Writes(writer))
    for _ in range(2):
        epoch_of(loader)
    loader.dataset.pipe = None  # type: ignore[attr-defined]
    writer.close()
    for _ in range(2 * SAMPLES):
        assert reader.poll(10)
        reader.recv()
    assert reader.poll(10)
    with pytest.raises(EOFError):
        reader.recv()


class Refuses(Told):
    def __getstate__(self) -> Any:
        return {"a": 1}

    def __setstate__(self, _: Any) -> None:
        raise ValueError("cannot be made anew")


@pytest.mark.system
def test_errors_are_those_of_torch() -> None:
    local: Any = Told()
    local.function = lambda: 1
    errors = (AttributeError, TypeError, pickle.PicklingError)
    with pytest.raises(errors, match=r"local object|pickle"):
        epoch_of(loader_of(local))
    says = r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code 1"
    with pytest.raises(RuntimeError, match=says):
        epoch_of(loader_of(Refuses()))


def test_imports_begin_with_the_loader_and_decide_nothing() -> None:
    Root.latest = None
    AutoLoader(Told(), num_workers=0)
    loader_of(Told(), in_order=False)
    loader_of(Told(), "fork")
    assert Root.latest is None
    loader = loader_of(Told())
    root = Root.latest
    assert root is not None
    assert multiprocessing.get_start_method(allow_none=True) is None
    epoch_of(loader)
    assert Root.latest is root


FIELDS = """
import json, multiprocessing as mp, os, signal, sys, threading
import torch
from torch.utils.data import DataLoader, get_worker_info
from autotune_loader import AutoLoader

AT_IMPORT = os.getpid()

class Data:
    def __init__(self, context):
        self.lock, self.value = context.Lock(), context.Value("i", 0)
        self.queue, self.event = context.Queue(), context.Event()
        self.shared = torch.zeros(4).share_memory_()
        self.own = [0]
    def __len__(self):
        return 16
    def __getitem__(self, index):
        process, info, parent = mp.current_process(), get_worker_info(), mp.parent_process()
        with self.lock:
            self.value.value += 1
        self.shared[0] = 7
        self.own[0] += 1
        if index == 0:
            self.queue.put("hello")
            self.event.set()
        product = torch.ones(400, 400) @ torch.ones(400, 400)  # with the threads that a worker has
        return {
            "name": process.name, "identity": process._identity, "daemon": process.daemon,
            "kind": type(process).__name__, "main": sys.modules["__main__"].__name__,
            "class": Data.__module__, "method": mp.get_start_method(allow_none=True),
            "parent": parent.name, "parent pid": parent.pid == TRAINING,
            "parent lives": parent.is_alive(), "id": info.id, "workers": info.num_workers,
            "seed": info.seed is not None, "threads": torch.get_num_threads(),
            "interrupt": str(signal.getsignal(signal.SIGINT)), "arguments": sys.argv[1:-1],
            "stdin": os.fstat(sys.stdin.fileno()).st_rdev, "folder": os.getcwd(),
            "product": float(product[0, 0]), "standard": sys.stdout.fileno(), "path": sys.path,
            "imported here": AT_IMPORT == os.getpid(), "children": len(mp.active_children()),
        }

TRAINING = int(os.environ.setdefault("TRAINING", str(os.getpid())))

def main():
    method, kind = sys.argv[1:]
    mp.set_start_method(method)
    data = Data(mp.get_context(method))
    options = {"tune": False} if kind == "AutoLoader" else {}
    loader = globals()[kind](data, batch_size=4, num_workers=2, collate_fn=list, **options)
    rows = [batch[0] for batch in loader]
    shared = [data.value.value, data.shared.tolist(), data.queue.get(timeout=10)]
    print(json.dumps([rows, *shared, data.event.is_set(), data.own]))

if __name__ == "__main__":
    main()
"""


def differing(method: str, folder: Path) -> set[str]:
    """In what workers of AutoLoader differ from those of DataLoader."""
    script, told = folder / "fields.py", dict[str, Any]()
    script.write_text(FIELDS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes: Any = {"capture_output": True, "text": True, "timeout": 100, "check": True}
    for kind in ("DataLoader", "AutoLoader"):
        command = [sys.executable, "-W", "ignore", str(script), method, kind]
        told[kind] = json.loads(subprocess.run(command, env=environment, **pipes).stdout)
    (torchs, *shared), (ours, *our_shared) = told.values()
    assert our_shared == shared
    both = list(zip(torchs, ours, strict=True))
    return {name for one, other in both for name in one if one[name] != other[name]}


@pytest.mark.system
def test_a_worker_is_what_torchs_is(tmp_path: Path) -> None:
    # Clones of the root have not imported the script. The fork server is in test_at_length.py.
    assert differing("spawn", tmp_path) <= {"imported here"}
