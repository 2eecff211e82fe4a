"""Workers that nobody asked for: looked at first, then proven; each kind of dataset either gives the same or is refused."""

from __future__ import annotations

import bz2
import collections
import concurrent.futures
import contextlib
import csv
import functools
import gc
import gzip
import io
import itertools
import logging
import mmap
import multiprocessing
import multiprocessing.managers
import os
import random
import select
import signal
import socket
import sqlite3
import tarfile
import tempfile
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from autotune_loader.live.seeds import LoopSeeds
from autotune_loader.live.trust import TRUSTED, Refusal, Trust
from autotune_loader.values.config import LoaderConfig

pytestmark = pytest.mark.process

SIZE, BATCH = 400, 4
NOTES: list[int] = []
SEEN = 0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_data(tmp_path)


def make_data(tmp_path: Path) -> Path:
    """A file of whole numbers, and the same packed in several ways."""
    numbers = np.arange(SIZE, dtype=np.int64)
    numbers.tofile(tmp_path / "raw")
    (tmp_path / "gz").write_bytes(gzip.compress(numbers.tobytes()))
    (tmp_path / "bz2").write_bytes(bz2.compress(numbers.tobytes()))
    (tmp_path / "csv").write_text("\n".join(map(str, range(SIZE))))
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("x", numbers.tobytes())
    with tarfile.open(tmp_path / "tar", "w") as tar:
        tar.add(tmp_path / "raw", "x")
    with sqlite3.connect(tmp_path / "db") as database:
        database.execute("create table t (i integer)")
        database.executemany("insert into t values (?)", [(index,) for index in range(SIZE)])
    database.close()
    for index in range(8):
        Image.fromarray(np.full((8, 8, 3), index, dtype=np.uint8)).save(tmp_path / f"{index}.jpg")
    return tmp_path


class Items(Dataset[Any]):
    """A dataset of a function of (itself, index)."""

    def __init__(self, get: Callable[[Any, int], Any], **values: Any) -> None:
        self.get = get
        self.__dict__.update(values)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.get(self, index)


def prove(
    dataset: Any,
    collate: Callable[[Any], Any] = default_collate,
    *,
    sampler: Any = None,
    step: Callable[[Any], None] | None = None,
    context: Any = None,
    most: int = 80,
) -> Any:
    """The verdict on a dataset, fetched as a loop does, with time for the shadow's answers."""
    seeds = LoopSeeds()
    parts = SimpleNamespace(
        dataset=dataset, collate_fn=collate, batched=True, worker_init_fn=None, context=context, loop_seeds=seeds
    )
    sampler = (
        sampler if sampler is not None else BatchSampler(SequentialSampler(range(len(dataset))), BATCH, drop_last=True)
    )
    trust = Trust(parts, LoaderConfig(), sampler)
    try:
        items = ((n, epoch, indices) for epoch in itertools.count() for n, indices in enumerate(sampler))
        for item in itertools.islice(items, most):
            with trust.fetching(item):
                seeds.begin(item[1], item[0])
                batch = collate([dataset[index] for index in item[2]])
                seeds.end()
            trust.made(item, batch)
            if trust.verdict is not None:
                return trust.verdict
            if step is not None:
                step(batch)
            time.sleep(0.02)
        return None
    finally:
        trust.close()


def read_at(file: Any, index: int) -> torch.Tensor:
    file.seek(index * 8)
    return torch.tensor(int.from_bytes(file.read(8), "little"))


def counted(self: Any, index: int) -> int:
    self.count += 1
    return index


def noted(_: Any, index: int) -> int:
    NOTES.append(index)
    return index


def global_count(_: Any, index: int) -> int:
    global SEEN
    SEEN += 1
    return index


class ClassCount(Items):
    total = 0

    def __getitem__(self, index: int) -> int:
        ClassCount.total += 1
        return index


class Overriding(Items):
    """Its `__getitem__` is inherited and calls what it defines itself."""

    def __getitem__(self, index: int) -> int:
        return self.inner(index)

    def inner(self, index: int) -> int:
        raise NotImplementedError


class Overridden(Overriding):
    def inner(self, index: int) -> int:
        NOTES.append(index)
        return index


@functools.cache
def loaded(index: int) -> int:
    return index * 2


def shifted(self: Any, index: int) -> int:
    with self.value.get_lock():
        self.value.value += 1
    return index


def bumped(values: Any, index: int, result: Any = None) -> Any:
    values[index] += 1
    return index if result is None else result


CHANGES: dict[str, Callable[[], Any]] = {
    "count": lambda: Items(counted, count=0),
    "class": lambda: ClassCount(lambda self, i: i),
    "list": lambda: Items(lambda self, i: self.left.pop(), left=list(range(9999))),
    "cache": lambda: Items(lambda self, i: self.cache.setdefault(i, i), cache={}),
    "global list": lambda: Items(noted),
    "global number": lambda: Items(global_count),
    "lru_cache": lambda: Items(lambda self, i: loaded(i)),
    "visits": lambda: Items(lambda self, i: bumped(self.visits, i), visits=np.zeros(100_000)),
    "visits by name": lambda: Items(
        lambda self, i: bumped(self.visits, f"x{i + 90}"), visits=dict.fromkeys(map("x{}".format, range(9999)), 0)
    ),
    "overridden": lambda: Overridden(noted),
    "visits in a list": lambda: Items(lambda self, i: bumped(self.visits, i), visits=[0] * 100_000),
    "visits in a tensor": lambda: Items(
        lambda self, i: bumped(self.visits, i), visits=torch.zeros(100_000).share_memory_()
    ),
    "visits through a Subset": lambda: Subset(
        Items(lambda self, i: bumped(self.visits, i), visits=np.zeros(100_000)), range(300, 400)
    ),
    "samples in place": lambda: Items(lambda self, i: self.x[i].mul_(2).sum(), x=list(torch.ones(SIZE, 3))),
    "Value": lambda: Items(shifted, value=multiprocessing.Value("l", 0)),
    "Array": lambda: Items(lambda self, i: bumped(self.array, i % 4), array=multiprocessing.Array("l", 4)),
    "DataFrame": lambda: Items(
        lambda self, i: bumped(self.frame.loc, (i, "n"), i), frame=pd.DataFrame({"n": np.zeros(SIZE)})
    ),
    "RandomState": lambda: Items(lambda self, i: self.random.rand(), random=np.random.RandomState(1)),
    "Generator": lambda: Items(lambda self, i: self.random.random(), random=np.random.default_rng(1)),
    "Random": lambda: Items(lambda self, i: self.random.random(), random=random.Random(1)),
    "torch.Generator": lambda: Items(lambda self, i: torch.rand((), generator=self.g), g=torch.Generator()),
    "nested": lambda: Items(lambda self, i: self.a.b["c"].append(i) or i, a=SimpleNamespace(b={"c": []})),
    "deque": lambda: Items(lambda self, i: self.last.append(i) or i, last=collections.deque(maxlen=10_000)),
    "environment": lambda: Items(lambda self, i: os.environ.update(SAMPLE_AT_HAND=str(i)) or i),
    "BytesIO": lambda: Items(lambda self, i: self.f.read(1)[0], f=io.BytesIO(bytes(10_000))),
    "partial": lambda: Items(functools.partial(lambda notes, self, i: notes.append(i) or i, [])),
    "defaults": lambda: Items(lambda self, i, notes=[]: notes.append(i) or i),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_fetching_changes_is_refused_before_anything_is_forked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    monkeypatch.setenv("SAMPLE_AT_HAND", "")

    verdict = prove(CHANGES[kind]())

    assert isinstance(verdict, Refusal)
    assert verdict.reason.startswith(("fetching changes", "fetching draws"))
    assert "num_workers=1" in verdict.mend


def test_reasons_name_what_was_found_as_the_user_does() -> None:
    assert prove(Items(counted, count=0)).reason == "fetching changes `dataset.count`"
    assert prove(Items(noted)).reason == "fetching changes `NOTES`"
    assert prove(Items(lambda self, i: self.r.random(), r=random.Random(1))).reason == (
        "fetching draws from `dataset.r`, a random generator of its own"
    )
    notes: list[int] = []
    assert (
        prove(range(SIZE), lambda samples: notes.append(1) or default_collate(samples)).reason
        == "fetching changes `notes`"
    )


HANDLES: dict[str, Callable[[Path], Any]] = {
    "unbuffered": lambda d: Items(lambda self, i: read_at(self.f, i), f=(d / "raw").open("rb", buffering=0)),
    "buffered": lambda d: Items(lambda self, i: read_at(self.f, i), f=(d / "raw").open("rb")),
    "gzip": lambda d: Items(lambda self, i: read_at(self.f, i), f=gzip.open(d / "gz")),
    "bz2": lambda d: Items(lambda self, i: read_at(self.f, i), f=bz2.open(d / "bz2")),
    "zip": lambda d: Items(lambda self, i: self.f.read("x")[8 * i], f=zipfile.ZipFile(d / "zip")),
    "tar": lambda d: Items(lambda self, i: read_at(self.f.extractfile("x"), i), f=tarfile.open(d / "tar")),
    "csv": lambda d: Items(lambda self, i: int(next(self.f)[0]), f=csv.reader((d / "csv").open())),
    "sqlite": lambda d: Items(
        lambda self, i: self.f.execute("select i from t where i = ?", (i,)).fetchone()[0], f=sqlite3.connect(d / "db")
    ),
    "lru_cache": lambda d: Items(lambda self, i: self.f() and i, f=_opened_once(d)),
    "closure": lambda d: Items((lambda f: lambda self, i: read_at(f, i))((d / "raw").open("rb"))),
    "in a dict in a list": lambda d: Items(
        lambda self, i: read_at(self.f[0]["a"], i), f=[{"a": (d / "raw").open("rb")}]
    ),
    "generator": lambda d: Items(lambda self, i: next(self.f), f=(i for i in range(9999))),
    "cycle": lambda d: Items(lambda self, i: next(self.f), f=itertools.cycle(range(7))),
    "list iterator": lambda d: Items(lambda self, i: next(self.f), f=iter(list(range(9999)))),
    "socket": lambda d: Items(lambda self, i: i, f=socket.socketpair()),
    "executor": lambda d: Items(
        lambda self, i: self.f.submit(int, i).result(), f=concurrent.futures.ThreadPoolExecutor(1)
    ),
    "gradient": lambda d: Items(lambda self, i: self.w.detach(), w=torch.zeros(2, requires_grad=True)),
    "held lock": lambda d: Items(lambda self, i: i, f=_held(threading.Lock())),
    "held RLock": lambda d: Items(lambda self, i: i, f=_held(threading.RLock())),
    "manager": lambda d: Items(lambda self, i: i, f=_proxy()),
}


def _opened_once(data: Path) -> Any:
    opened = functools.lru_cache(lambda: sqlite3.connect(data / "db"))
    opened()
    return opened


def _held(lock: Any) -> Any:
    lock.acquire()
    return lock


def _proxy() -> Any:
    kind = type("ListProxy", (multiprocessing.managers.BaseProxy,), {"__init__": lambda self: None})
    return kind()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", HANDLES)
def test_what_no_fork_may_carry_is_refused_before_anything_is_forked(
    kind: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))

    verdict = prove(HANDLES[kind](data))

    assert isinstance(verdict, Refusal)
    assert "`" in verdict.reason
    gc.collect()  # a file in a closure is closed here, where its warning is expected


def lazily(self: Any, index: int) -> Any:
    if self.file is None:
        self.file = self.path.open("rb")
    return read_at(self.file, index)


def test_a_file_opened_by_the_first_fetch_is_refused(data: Path) -> None:
    dataset = Items(lazily, file=None, path=data / "raw")

    verdict = prove(dataset)

    assert "an open file" in verdict.reason
    assert verdict.mend == "num_workers=1 opts in: each worker then opens its own"
    dataset.file.close()


def test_a_descriptor_that_is_read_by_number_is_refused_and_pread_is_not(data: Path) -> None:
    number = os.open(data / "raw", os.O_RDONLY)
    try:
        assert "fetching moves the position" in prove(Items(lambda self, i: os.read(number, 1)[0])).reason
        assert prove(Items(lambda self, i: os.pread(number, 1, 8 * i)[0])) == TRUSTED
    finally:
        os.close(number)


def remembered(self: Any, index: int) -> int:
    if self.table is None:
        self.table = list(range(SIZE))
    return self.table[index]


def _folder(data: Path) -> Any:
    def get(self: Any, index: int) -> Any:
        with Image.open(data / f"{index % 8}.jpg") as image:
            image = image.rotate(random.uniform(-9, 9)).convert("RGB")
        return torch.from_numpy(np.array(image)) * torch.rand(()) + np.random.rand()

    return Items(get)


def _connects(data: Path) -> Any:
    def get(self: Any, index: int) -> Any:
        with sqlite3.connect(data / "db") as database:
            row = database.execute("select i from t where i = ?", (index,)).fetchone()
        database.close()
        return row[0]

    return Items(get)


def _with_lock(self: Any, index: int) -> int:
    with self.lock:
        return index


GOOD: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda d: TensorDataset(torch.rand(SIZE, 10), torch.arange(SIZE)),
    "list of arrays": lambda d: [np.full(5, index) for index in range(SIZE)],
    "range": lambda d: range(SIZE),
    "images": _folder,
    "memmap": lambda d: np.memmap(d / "raw", dtype=np.int64, mode="r"),
    "written memmap": lambda d: Items(
        lambda self, i: int(self.x[i]), x=np.memmap(d / "raw", dtype=np.int64, mode="r+")
    ),
    "mmap": lambda d: Items(
        lambda self, i: self.m[8 * i], m=mmap.mmap(os.open(d / "raw", os.O_RDONLY), 0, access=mmap.ACCESS_READ)
    ),
    "opens in getitem": lambda d: Items(lambda self, i: np.fromfile(d / "raw", dtype=np.int64, count=1, offset=8 * i)),
    "connects in getitem": _connects,
    "dicts": lambda d: Items(lambda self, i: {"x": torch.rand(3), "meta": {"name": str(i), "box": (1.0, i)}}),
    "nested": lambda d: ConcatDataset([Subset(TensorDataset(torch.rand(50, 2)), range(40)) for _ in range(5)]),
    "large": lambda d: Items(lambda self, i: torch.full((3, 256, 256), i / 7)),
    "free lock": lambda d: Items(_with_lock, lock=threading.Lock()),
    "logger": lambda d: Items(lambda self, i: self.log.debug("%d", i) or i, log=logging.getLogger("user")),
    "prints": lambda d: Items(lambda self, i: print(i) or i),
    "fills a table once": lambda d: Items(remembered, table=None),
    "weak": lambda d: Items(lambda self, i: i, w=weakref.ref(HERE)),
    "millions": lambda d: Items(lambda self, i: self.x[i], x=list(range(2_000_000))),
    "NaN": lambda d: Items(lambda self, i: torch.tensor([float("nan"), i])),
    "sums": lambda d: Items(lambda self, i: self.x.mul(i).sum() / 3, x=torch.rand(200_000)),
}
HERE = Items(counted)


@pytest.mark.parametrize("kind", GOOD)
def test_what_gives_the_same_is_trusted(kind: str, data: Path) -> None:
    assert prove(GOOD[kind](data)) == TRUSTED


MAIN = os.getpid()


def _in_worker(here: Callable[[], Any], there: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: Items(lambda self, i: here() if os.getpid() == MAIN else there())


def _raises() -> Any:
    raise ValueError("not here")


class _Uncopied:
    def __init__(self, path: str) -> None:
        self.path, self.note = path, 1

    def __getstate__(self) -> Any:
        return {"path": self.path}


OTHER: dict[str, tuple[Callable[[], Any], str]] = {
    "process": (lambda: Items(lambda self, i: os.getpid()), "another batch 4: `batch` differs"),
    "time": (lambda: Items(lambda self, i: time.time()), "another batch 4"),
    "exception": (_in_worker(lambda: 1, _raises), "batch 4 raises in a worker: ValueError: not here"),
    "closure": (lambda: Items(lambda self, i: {"f": lambda: i}), "batch 4 cannot be sent from a worker"),
    "lossy": (lambda: Items(lambda self, i: _Uncopied("x")), "`batch[0]"),
    "gradient": (lambda: Items(lambda self, i: torch.ones(1, requires_grad=True) * i), "cannot be sent"),
    "exit": (_in_worker(lambda: 1, lambda: os._exit(3)), "fetching ends its worker (exit code 3)"),
    "writes shared memory": (
        _in_worker(lambda: 1, lambda: _shared.__setitem__(0, 1)), "memory that processes share",
    ),
    "main process": (
        lambda: Items(lambda self, i: multiprocessing.current_process().name == "MainProcess"), "another batch 4",
    ),
    "sentinel": (lambda: Items(lambda self, i: EMPTY), "which the training knows by its identity"),
    "worker": (lambda: Items(lambda self, i: (get_worker_info() or SimpleNamespace(id=0)).id), "asks who the worker is"),
    "hidden state": (lambda: Items(lambda self, i: next(HIDDEN["x"]["count"])), "generator or iterator"),
}  # fmt: skip
_shared = torch.zeros(4).share_memory_()
EMPTY = object()
HIDDEN = {"x": {"count": itertools.count()}}


def as_it_is(samples: list[Any]) -> Any:
    return samples


@pytest.mark.parametrize("kind", OTHER)
def test_what_gives_something_else_is_refused_with_batch_and_place(kind: str) -> None:
    make, reason = OTHER[kind]

    verdict = prove(make(), as_it_is if kind in ("closure", "lossy", "gradient", "sentinel") else default_collate)

    assert isinstance(verdict, Refusal)
    assert reason in verdict.reason


def test_a_worker_that_never_answers_ends_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune_loader.live.trust.SHORTEST_WAIT_S", 0.5)
    monkeypatch.setattr("autotune_loader.live.trust.WAIT_FETCHES", 0.0)

    verdict = prove(_in_worker(lambda: 1, lambda: time.sleep(1000))())

    assert "gave no answer for batch 4" in verdict.reason


def _writes(path: Path, index: int) -> int:
    with path.open("a") as file:
        file.write("x")
    return index


DEEDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "appends": (lambda d: Items(lambda self, i: _writes(d / "log", i)), "fetching writes `"),
    "renames": (lambda d: Items(lambda self, i: _ignored(os.rename, d / "no", d / "no2", i)), "fetching renames `"),
    "removes": (lambda d: Items(lambda self, i: _ignored(os.remove, d / "no", i)), "fetching removes `"),
    "temporary": (lambda d: Items(lambda self, i: tempfile.TemporaryFile().close() or i), "fetching writes `"),
    "starts": (lambda d: Items(lambda self, i: os.system("true") + i), "fetching starts a process"),
    "signals": (lambda d: Items(lambda self, i: os.kill(os.getpid(), 0) or i), "fetching signals a process"),
}


def _ignored(function: Callable[..., Any], *arguments: Any) -> Any:
    *paths, index = arguments
    with contextlib.suppress(OSError):
        function(*paths)
    return index


@pytest.mark.parametrize("kind", DEEDS)
def test_what_fetching_would_do_outside_is_refused_before_it_is_done(kind: str, tmp_path: Path) -> None:
    make, reason = DEEDS[kind]
    fetched = 0

    def step(batch: Any) -> None:
        nonlocal fetched
        fetched += BATCH

    verdict = prove(make(tmp_path), step=step)

    assert reason in verdict.reason
    if kind == "appends":
        assert len((tmp_path / "log").read_text()) == fetched + BATCH  # by the loop alone


def test_files_of_the_training_process_are_neither_moved_nor_written_by_the_shadow(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("a") as log:
        handler = logging.StreamHandler(log)
        logger = logging.getLogger("to a file")
        logger.addHandler(handler)
        calls = 0

        def get(self: Any, index: int) -> int:
            logger.warning("%d", index)
            return index

        def step(batch: Any) -> None:
            nonlocal calls
            calls += 1

        prove(Items(get), step=step)
        logger.removeHandler(handler)

    assert len(path.read_text().split()) == (calls + 1) * BATCH


class Finalised(Items):
    def __del__(self) -> None:
        Path(self.path).unlink(missing_ok=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_of_the_users_is_finalised(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "precious"
    path.touch()
    monkeypatch.setattr("autotune_loader.live.trust._method_refusal", lambda method: None)
    dataset = Finalised(_identity, path=str(path))

    assert prove(dataset, context=method) == TRUSTED
    assert path.exists()


def _identity(self: Any, index: int) -> int:
    return index


class Listening:
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([index] for index in range(SIZE))


@pytest.mark.parametrize(
    ("sampler", "is_trusted"),
    [
        (Listening(), False),
        (BatchSampler(Listening(), 1, False), False),
        (BatchSampler(RandomSampler(range(SIZE)), BATCH, False), True),
        (([0, 1], [2, 3]) * 10, True),
        ([[0, 1], [2, 3]] * 10, False),  # it may grow
    ],
)
def test_a_sampler_of_the_users_may_listen_to_the_training(sampler: Any, is_trusted: bool) -> None:
    verdict = prove(Items(lambda self, index: index), sampler=sampler)

    assert (verdict == TRUSTED) is is_trusted
    assert is_trusted or " may depend on the training" in verdict.reason


def _level(self: Any, index: int) -> int:
    return index + self.level


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset, _: setattr(dataset, "level", dataset.level + 1),
        lambda dataset, _: dataset.labels.__setitem__(3, dataset.labels[3] + 1),
        lambda dataset, _: dataset.weights.add_(1),
        lambda dataset, _: dataset.transform.__setattr__("p", dataset.transform.p + 0.1),
        lambda dataset, batch: dataset.rows[int(batch[1])].mul_(2),  # what it handed out itself
    ],
)
def test_what_the_training_changes_while_it_iterates_is_refused(change: Callable[[Any, Any], None]) -> None:
    values = {"labels": np.zeros(SIZE), "weights": torch.zeros(9), "transform": SimpleNamespace(p=0.0)}
    dataset = Items(_level, level=0, rows=list(torch.ones(SIZE, 3)), **values)

    verdict = prove(dataset, step=lambda batch: change(dataset, batch))

    assert "the training changes `dataset." in verdict.reason


class Slotted:
    __slots__ = ("p",)


def test_workers_see_a_change_or_the_trust_is_over() -> None:
    dataset = Items(_level, level=0, labels=np.zeros(SIZE), weights=torch.zeros(9), transform=SimpleNamespace(p=0.0))
    dataset.names, dataset.table = ["a"] * SIZE, dict.fromkeys(map(str, range(SIZE)), 0)
    dataset.slotted, dataset.step = Slotted(), multiprocessing.Value("l", 0)
    parts = SimpleNamespace(
        dataset=dataset, collate_fn=default_collate, batched=True, worker_init_fn=None, context=None, loop_seeds=None
    )
    trust = Trust(parts, LoaderConfig(), BatchSampler(SequentialSampler(range(SIZE)), BATCH, False))
    for change in (
        lambda: setattr(dataset, "level", 1),
        lambda: dataset.labels.__setitem__(217, 1),
        lambda: dataset.names.__setitem__(217, "b"),
        lambda: dataset.table.__setitem__("217", 1),
        lambda: setattr(dataset.slotted, "p", 0.5),
        lambda: setattr(dataset.step, "value", 1),
        lambda: dataset.weights.add_(1),
        lambda: setattr(dataset.transform, "p", 0.5),
        lambda: setattr(dataset, "new", 0.5),
    ):
        trust.begun()
        assert trust.still_holds()
        change()
        assert not trust.still_holds()


class Bare(Dataset[Any]):
    """Without an attribute of its own."""

    level = 0

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return self.level + SEEN


def test_a_class_attribute_and_a_global_name_are_held_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Bare()
    parts = SimpleNamespace(
        dataset=dataset, collate_fn=default_collate, batched=True, worker_init_fn=None, context=None, loop_seeds=None
    )
    trust = Trust(parts, LoaderConfig(), BatchSampler(SequentialSampler(range(SIZE)), BATCH, False))
    for change in (
        lambda: setattr(dataset, "level", 1),
        lambda: monkeypatch.setattr(Bare, "level", 2),
        lambda: monkeypatch.setitem(globals(), "SEEN", 10_000),
    ):
        trust.begun()
        assert trust.still_holds()
        change()
        assert not trust.still_holds()


def test_who_waits_for_the_end_of_a_pipe_does_not_wait_for_a_shadow() -> None:
    read_end, write_end = os.pipe()
    fetched, ended = itertools.count(), []

    def step(batch: Any) -> None:
        if next(fetched) == 5:  # a shadow runs
            os.close(write_end)
        elif not ended:
            ended.extend(select.select([read_end], [], [], 0)[0])

    assert prove(range(SIZE), step=step) == TRUSTED
    assert ended
    os.close(read_end)


def test_a_proof_does_not_settle_how_processes_start() -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        assert prove(range(SIZE)) == TRUSTED
        assert multiprocessing.get_start_method(allow_none=True) is None
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this process' own, which those that it forks inherit."""
    file, own = Path("/proc/self/comm"), f"proves-{os.getpid()}"
    before = file.read_text()
    file.write_text(own)
    yield own
    file.write_text(before)


def test_nothing_is_left_and_nobody_hears_of_it(name: str) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: told.append(1))
    descriptors, children = len(list(Path("/proc/self/fd").iterdir())), psutil.Process().children()
    try:
        assert prove(range(SIZE)) == TRUSTED
        assert psutil.Process().children() == children  # who waits for a child of their own finds none of ours
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert not told
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    deadline = time.monotonic() + 5
    while left := [
        each for each in psutil.process_iter(["name"]) if each.info["name"] == name and each.pid != os.getpid()
    ]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
