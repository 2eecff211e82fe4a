"""Which data get workers that nobody asked for: batches are the loop's own in any case, and who gets none is told why."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import random
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

from autotune_loader import AutoLoader, LoaderConfig
from autotune_loader.autoloader import tuner
from autotune_loader.autoloader.batch_comparison import BatchComparison
from autotune_loader.autoloader.difference import difference
from tests.support.schedules import FixedLoader

pytestmark = pytest.mark.process

SIZE, BATCH, MOST_S = 240, 4, 30.0
MAIN = os.getpid()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look comes after 0.1 s."""
    monkeypatch.setattr(tuner, "GATE_S", 0.1)
    monkeypatch.setattr(tuner, "CHEAP_FETCH_S", 0.0)
    monkeypatch.setattr("autotune_loader.autoloader.epoch.PATIENCE_S", 1.0)


class Items(Dataset[Any]):
    """A dataset of a function of (itself, index)."""

    total, wait_s = 0, 0.002

    def __init__(self, get: Callable[[Any, int], Any], **values: Any) -> None:
        self.get = get
        self.__dict__.update(values)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.wait_s)
        return self.get(self, index)


def trained(make: Callable[[], Any], **arguments: Any) -> tuple[Any, Any]:
    """Epochs until workers deliver or are refused, and two more; the loader, and by what they differ from a plain loop's."""
    arguments = {"batch_size": BATCH, "collate_fn": list, **arguments}
    loader = AutoLoader(make(), max_workers=3, **arguments)
    plain = AutoLoader(make(), tune=False, **arguments)
    until, left = time.monotonic() + MOST_S, 2
    while left and time.monotonic() < until:
        epochs = []
        for each, wait_s in ((loader, 0.002), (plain, 0.0)):
            Items.wait_s = wait_s
            torch.manual_seed(3)
            epochs.append(list(each))
        found = next((each for own, other in zip(*epochs, strict=True) if (each := difference(own, other))), None)
        if found is not None:
            return loader, found
        proof, rows = loader._shared.comparison, loader.log.rows
        left -= loader.found.tuner.refused is not None or (proof.compared >= 8 and any(row.worker >= 0 for row in rows))
    return loader, None


def lazily(self: Any, index: int) -> Any:
    """As h5py or lmdb are opened: at the first sample, and not to be used by two processes."""
    if self.file is None:
        self.file = open(self.path, "rb")  # noqa: PTH123
        self.opened_by = os.getpid()
    if self.opened_by != os.getpid():
        raise RuntimeError("opened by another process")
    self.file.seek(8 * index)
    return int.from_bytes(self.file.read(8), "little")


def from_sqlite(self: Any, index: int) -> Any:
    if self.connection is None:
        self.connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
    return self.connection.execute("select number from numbers where number = ?", (index,)).fetchone()[0]


class Drawing:
    """A transform that holds its generators and keeps what it has drawn, as those of albumentations and MONAI do."""

    def __init__(self) -> None:
        self.random_generator, self.py_random = np.random.default_rng(1), random.Random(1)
        self.R, self.torch = np.random.RandomState(1), torch.Generator()
        self.params: dict[str, float] = {}

    def __call__(self, index: int) -> Any:
        self.params = {"angle": self.random_generator.normal(), "flip": self.py_random.random()}
        return index, *self.params.values(), self.R.rand(), torch.rand(2, generator=self.torch)


def of_hugging_face(_: Path) -> Any:
    def transform(rows: Any) -> Any:
        time.sleep(0.004)
        return {"x": [torch.full((3,), float(n)) + random.random() for n in rows["n"]]}

    rows = pytest.importorskip("datasets").Dataset.from_dict({"n": list(range(SIZE))})
    rows.set_transform(transform)
    return rows


GOOD: dict[str, Callable[[Path], Any]] = {
    "draws": lambda d: Items(lambda self, i: torch.rand(3) * random.random() + np.random.rand()),
    "a seed": lambda d: Items(lambda self, i: torch.initial_seed() + i),
    "transforms that hold generators": lambda d: Items(lambda self, i: self.t(i), t=Drawing()),
    "a list of them": lambda d: Items(lambda self, i: [t(i) for t in self.t], t=[Drawing(), Drawing()]),
    "opened by the first fetch": lambda d: Items(lazily, file=None, path=d / "raw"),
    "sqlite opened by the first fetch": lambda d: Items(from_sqlite, connection=None, path=d / "db"),
    "an open file": lambda d: Items(lambda self, i: os.pread(self.f.fileno(), 8, 8 * i), f=(d / "raw").open("rb")),
    "memmap": lambda d: Items(lambda self, i: int(self.x[i]), x=np.memmap(d / "raw", dtype="i8", mode="r")),
    "pandas": lambda d: Items(lambda self, i: self.f["n"].iloc[i], f=pd.DataFrame({"n": np.arange(SIZE), "s": "x"})),
    "a table that is made once": lambda d: Items(lambda self, i: vars(self).setdefault("t", list(range(SIZE)))[i]),
    "nested": lambda d: ConcatDataset([Subset(Items(lambda self, i: {"x": i}), range(120)) for _ in range(2)]),
    "logger": lambda d: Items(lambda self, i: self.log.debug("%d", i) or i, log=logging.getLogger("user")),
    "a lock": lambda d: Items(lambda self, i: (self.lock.acquire(), self.lock.release()) and i, lock=threading.Lock()),
    "a socket that is held": lambda d: Items(lambda self, i: i, s=socket.socketpair()),
    "Hugging Face with set_transform": of_hugging_face,
    "NaN": lambda d: Items(lambda self, i: {"x": torch.tensor([float("nan"), i]), "box": ("name", (1.0, i))}),
    "sums": lambda d: Items(lambda self, i: self.x.mul(i).sum() / 3, x=torch.linspace(0, 1, 20_000)),
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.arange(SIZE, dtype=np.int64).tofile(tmp_path / "raw")
    with contextlib.closing(sqlite3.connect(tmp_path / "db")) as known, known:
        known.execute("create table numbers (number integer)")
        known.executemany("insert into numbers values (?)", [(number,) for number in range(SIZE)])
    return tmp_path


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", GOOD)
def test_common_data_get_workers_and_the_batches_of_the_loop(kind: str, data: Path) -> None:
    loader, found = trained(lambda: GOOD[kind](data))
    assert found is None
    assert loader.found.tuner.refused is None
    assert {trace.worker for trace in loader.log.rows} > {-1}


def bumped(values: Any, key: Any, index: int) -> int:
    values[key] += 1
    return index


def writes(self: Any, index: int) -> int:
    with self.path.open("a") as file:
        file.write("x")
    return index


def in_worker(there: Callable[[], Any]) -> Callable[[Path], Any]:
    return lambda d: Items(lambda self, i: 1 if os.getpid() == MAIN else there())


REFUSED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "count": (lambda d: Items(lambda self, i: bumped(vars(self), "n", i), n=0), "dataset_changes", "dataset.n"),
    "class": (lambda d: Items(lambda self, i: setattr(Items, "total", i) or i), "dataset_changes", "class Items"),
    "cache": (lambda d: Items(lambda self, i: self.c.setdefault(i, i), c={}), "dataset_changes", "dataset.c"),
    "cache of a part": (
        lambda d: Items(lambda self, i: self.r.c.setdefault(i, i), r=SimpleNamespace(c={})), "dataset_changes", "dataset.r.c"
    ),
    "visits": (lambda d: Items(lambda self, i: bumped(self.n, i % 60, i), n=np.zeros(60)), "dataset_changes", "dataset.n"),
    "reads on": (lambda d: Items(lambda self, i: next(self.f), f=itertools.count()), "samples_differ", "batch"),
    "BytesIO": (lambda d: Items(lambda self, i: self.f.read(1)[0], f=io.BytesIO(bytes(range(250)) * 9)), "samples_differ", "b"),
    "process": (lambda d: Items(lambda self, i: os.getpid()), "samples_differ", "batch"),
    "worker": (lambda d: Items(lambda self, i: get_worker_info() is None), "samples_differ", "batch"),
    "a closure in a batch": (lambda d: Items(lambda self, i: {"f": lambda: i}), "worker_error", "pickle"),
    "exception": (in_worker(lambda: int("x")), "worker_error", "invalid literal"),
    "exit": (in_worker(lambda: os._exit(3)), "workers_lost", "exited unexpectedly"),
    "no answer": (in_worker(lambda: time.sleep(1000)), "worker_silent", "no answer"),
    "appends": (lambda d: Items(writes, path=d / "log"), "writes_files", "log"),
    "removes": (lambda d: Items(lambda self, i: ((d / "x").touch(), (d / "x").unlink()) and i), "writes_files", "x"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_workers_cannot_make_is_refused_and_why(kind: str, data: Path, caplog: pytest.LogCaptureFixture) -> None:
    make, reason, words = REFUSED[kind]
    caplog.set_level(logging.INFO, "autotune_loader")
    Items.wait_s, until = 0.002, time.monotonic() + MOST_S
    loader = AutoLoader(make(data), batch_size=BATCH, collate_fn=list, max_workers=3)
    while loader.found.tuner.refused is None and time.monotonic() < until:
        assert len(list(loader)) == SIZE // BATCH
    assert loader.kept is not None
    assert (loader.kept.kind, words in loader.kept.sentence) == (reason, True)
    assert loader.config == loader.best == LoaderConfig()
    assert "the number of workers stays" in caplog.text
    assert loader.kept.sentence in loader.report().replace("\n  ", " ")


def labelled() -> Any:
    Items.wait_s = 0.002
    return Items(lambda self, i: torch.tensor([i, self.labels[i]]), labels=np.zeros(SIZE, dtype=np.int64))


def test_what_the_training_changes_in_mid_epoch_the_loop_sees_at_once() -> None:
    data, seen = labelled(), list[tuple[int, set[int]]]()
    loader = FixedLoader(data, batch_size=BATCH)
    for epoch in range(4):
        loader.change_to(LoaderConfig(num_workers=2))
        for number, batch in enumerate(loader):
            seen.append((data.labels[0], set(batch[:, 1].tolist())))
            if number == 40:
                data.labels[:] += 1 + epoch
    assert all(labels == {wanted} for wanted, labels in seen)
    assert any(row.worker >= 0 for row in loader.log.rows)
    assert loader.found.tuner.refused is not None
    assert loader.found.tuner.refused.kind == "training_changes"


def test_a_second_iterator_does_not_hide_from_the_first_what_the_training_has_changed() -> None:
    data = labelled()
    loader = FixedLoader(data, batch_size=BATCH)
    loader.change_to(LoaderConfig(num_workers=2))
    first = iter(loader)
    for _ in range(5):
        next(first)
    assert any(row.worker >= 0 for row in loader.log.rows)
    data.labels[:] = 7
    second = iter(loader)
    next(second)
    assert {label for batch in first for label in batch[:, 1].tolist()} == {7}


class Sampler:
    """Draws each batch when it is asked for it, from where the training loop says."""

    def __init__(self, draw: Callable[[int], list[int]]) -> None:
        self.draw, self.start = draw, 0

    def __iter__(self) -> Iterator[list[int]]:
        return (self.draw(self.start) for _ in range(200))

    def __len__(self) -> int:
        return 200


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda start: [(start + offset) % SIZE for offset in range(4)], "training_changes"),
        (lambda _: [int(100 * random.random())], "sampler_draws"),
    ],
)
def test_a_sampler_that_follows_the_training_is_not_drawn_ahead(draw: Any, reason: str) -> None:
    def rows(base: Any, **rest: Any) -> Any:
        random.seed(4)
        sampler, data, seen = Sampler(draw), labelled(), []
        Items.wait_s = 0.002 if rest else 0.0
        loader = base(data, batch_sampler=sampler, **rest)
        for batch in itertools.chain(loader, loader):
            seen.append((batch[:, 0].tolist(), random.random()))
            sampler.start += 5
        return loader, seen

    loader, seen = rows(AutoLoader, max_workers=3)
    assert seen == rows(DataLoader)[1]
    assert loader.kept is not None
    assert loader.kept.kind == reason


def reads_on(self: Any, _: int) -> int:
    self.step += 1
    return self.step


def test_workers_that_were_asked_for_stay_as_they_are_where_another_number_gives_other_samples() -> None:
    Items.wait_s = 0.002
    data = Items(reads_on, step=0)
    loader = AutoLoader(data, batch_size=None, num_workers=1)
    for _ in range(4):  # its one worker begins anew in each epoch
        assert [int(step) for step in loader] == [*range(1, SIZE + 1)]
    assert loader.kept is not None
    assert loader.kept.kind in ("samples_differ", "dataset_changes")
    assert data.step == 0  # the loop's own fetches have left nothing
    assert loader.config == LoaderConfig(num_workers=1)


@pytest.mark.parametrize(
    ("own", "other", "where"),
    [
        ({"x": [1, torch.ones(3)]}, {"x": [1, torch.zeros(3)]}, "batch['x'][1]"),
        (torch.ones(3), torch.ones(3, dtype=torch.float64), "batch"),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0 + 1e-7, float("nan")]), None),
        (np.array(["a", None], dtype=object), np.array(["a", 1], dtype=object), "batch[1]"),
        ((1, "a"), [1, "a"], "batch"),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "batch"),
        (SimpleNamespace(x=1, y={2}), SimpleNamespace(x=1, y={3}), "batch.y"),
        (io.BytesIO(b"a"), io.BytesIO(b"b"), "batch"),
        (0.1 + 0.2, 0.3, None),
    ],
)
def test_where_two_batches_differ(own: Any, other: Any, where: str | None) -> None:
    assert difference(own, own) is None
    if not isinstance(own, io.BytesIO):
        assert difference(own, other) == where


def test_the_first_eight_batches_and_then_ever_fewer_are_compared() -> None:
    comparison = BatchComparison({}, lambda why: None, is_asked=False)
    assert [number for number in range(1, 300) if comparison.is_due()] == [*range(1, 9), 16, 32, 64, 128, 256]
