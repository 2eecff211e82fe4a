"""Where nobody asked for workers: two batches are made twice before workers take over, and which data get none is told."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import logging
import multiprocessing
import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info

from autotune_loader import AutoLoader, LoaderConfig
from autotune_loader.autoloader import tuner
from autotune_loader.autoloader.look import NEAR
from autotune_loader.pipeline.equal import is_equal
from tests.support.schedules import FixedLoader

pytestmark = pytest.mark.process

SIZE, BATCH, MOST_S = 240, 4, 30.0
MAIN = os.getpid()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look comes after 0.1 s."""
    monkeypatch.setattr(tuner, "GATE_S", 0.1)
    monkeypatch.setattr(tuner, "CHEAP_FETCH_S", 0.0)
    monkeypatch.setattr("autotune_loader.autoloader.iterator.PATIENCE_S", 1.0)


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


def trained(make: Callable[[], Any], **arguments: Any) -> tuple[Any, bool]:
    """Epochs until workers deliver or are refused, and two more; the loader, and whether all were a plain loop's."""
    arguments = {"batch_size": BATCH, "collate_fn": list, **arguments}
    loader = AutoLoader(make(), max_workers=3, **arguments)
    plain = FixedLoader(make(), **arguments)
    until, left = time.monotonic() + MOST_S, 2
    while left and time.monotonic() < until:
        epochs = []
        for each, wait_s in ((loader, 0.002), (plain, 0.0)):
            Items.wait_s = wait_s
            torch.manual_seed(3)
            epochs.append([copy.deepcopy(batch) for batch in each])
        if not is_equal(*epochs, NEAR):
            return loader, False
        left -= loader.found.tuner.refused is not None or any(
            row.worker >= 0 for row in loader.log.rows
        )
    return loader, True


def lazily(self: Any, index: int) -> Any:
    """As h5py or lmdb are opened: at the first sample, and not to be used by two processes."""
    if self.file is None:
        self.file = open(self.path, "rb")  # noqa: PTH123
        self.opened_by = os.getpid()
    if self.opened_by != os.getpid():
        raise RuntimeError("opened by another process")
    self.file.seek(8 * index)
    return int.from_bytes(self.file.read(8), "little")


def by_name(self: Any, index: int) -> Any:
    file = self.files.get("raw") or self.files.setdefault("raw", self.path.open("rb"))
    file.seek(8 * index)
    return int.from_bytes(file.read(8), "little")


def from_sqlite(self: Any, index: int) -> Any:
    if self.connection is None:
        self.connection = sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)
    return self.connection.execute(
        "select number from numbers where number = ?", (index,)
    ).fetchone()[0]


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
    "transforms that hold generators": lambda d: Items(lambda self, i: [t(i) for t in self.t], t=[Drawing(), Drawing()]),
    "opened by the first fetch": lambda d: Items(lazily, file=None, path=d / "raw"),
    "sqlite opened by the first fetch": lambda d: Items(from_sqlite, connection=None, path=d / "db"),
    "an open file": lambda d: Items(lambda self, i: os.pread(self.f.fileno(), 8, 8 * i), f=(d / "raw").open("rb")),
    "pandas": lambda d: Items(lambda self, i: self.f["n"].iloc[i], f=pd.DataFrame({"n": np.arange(SIZE), "s": "x"})),
    "files by name, opened when needed": lambda d: Items(by_name, files={}, path=d / "raw"),
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
    loader, is_as_plain = trained(lambda: GOOD[kind](data))
    assert is_as_plain
    assert loader.found.tuner.refused is None
    assert {trace.worker for trace in loader.log.rows} > {-1}


def bumped(values: Any, key: Any, index: int) -> int:
    values[key] += 1
    return index


@functools.cache
def remembered(index: int) -> int:
    return index


class Cached(Items):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(remembered(index))


def in_worker(there: Callable[[], Any]) -> Callable[[Path], Any]:
    return lambda d: Items(lambda self, i: 1 if os.getpid() == MAIN else there())


REFUSED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "count": (lambda d: Items(lambda self, i: bumped(vars(self), "n", i), n=0), "dataset_changes", "Items.n"),
    "cache": (lambda d: Items(lambda self, i: self.c.setdefault(i, i), c={}), "dataset_changes", "Items.c"),
    "lru_cache": (lambda d: Cached(lambda self, i: i), "dataset_changes", "the cache of remembered"),
    "reads on": (lambda d: Items(lambda self, i: next(self.f), f=itertools.count()), "samples_differ", "Batch "),
    "BytesIO": (lambda d: Items(lambda self, i: self.f.read(1)[0], f=io.BytesIO(bytes(range(250)) * 9)), "samples_differ", "B"),
    "process": (lambda d: Items(lambda self, i: os.getpid()), "samples_differ", "Batch "),
    "worker": (lambda d: Items(lambda self, i: get_worker_info() is None), "samples_differ", "Batch "),
    "a closure in a batch": (lambda d: Items(lambda self, i: {"f": lambda: i}), "worker_error", "local object"),
    "exception": (in_worker(lambda: int("x")), "worker_error", "invalid literal"),
    "exit": (in_worker(lambda: os._exit(3)), "workers_lost", "exited unexpectedly"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", REFUSED)
def test_what_workers_cannot_make_is_refused_and_why(
    kind: str, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, reason, words = REFUSED[kind]
    caplog.set_level(logging.DEBUG, "autotune_loader")
    Items.wait_s, until = 0.002, time.monotonic() + MOST_S
    loader = AutoLoader(make(data), batch_size=BATCH, collate_fn=list, max_workers=3)
    while loader.found.tuner.refused is None and time.monotonic() < until:
        assert len(list(loader)) == SIZE // BATCH
    assert loader.kept is not None
    assert (loader.kept.kind, words in loader.kept.sentence) == (reason, True)
    assert loader.config == loader.best == LoaderConfig()
    assert "the number of workers stays" in caplog.text
    assert loader.kept.sentence in loader.report().replace("\n  ", " ")


def test_a_worker_that_hangs_is_not_waited_for_and_not_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As after a fork while another thread holds a lock."""
    Items.wait_s = 0.002
    loader = AutoLoader(
        in_worker(lambda: time.sleep(1000))(Path()), batch_size=BATCH, collate_fn=list
    )
    begun = time.monotonic()
    for _ in range(4):
        assert [list(batch) for batch in loader] == [[1] * BATCH] * (SIZE // BATCH)
    assert time.monotonic() - begun < 15


def hangs_once(self: Any, index: int) -> int:
    if index == 100 and os.getpid() != MAIN and not self.path.exists():
        self.path.touch()
        time.sleep(1000)
    return index


def test_a_proven_worker_that_hangs_is_replaced_and_tuning_goes_on(tmp_path: Path) -> None:
    Items.wait_s = 0.002
    loader = FixedLoader(
        Items(hangs_once, path=tmp_path / "hung"), batch_size=BATCH, collate_fn=list
    )
    list(loader)
    loader.change_to(LoaderConfig(num_workers=2))
    for _ in range(2):
        assert [index for batch in loader for index in batch] == list(range(SIZE))
    assert (tmp_path / "hung").exists()
    assert loader.num_workers == 2
    assert loader.found.tuner.refused is None


def test_workers_that_are_lost_after_they_were_proven_leave_the_loop_to_itself_for_a_while() -> (
    None
):
    Items.wait_s = 0.006
    loader = FixedLoader(Items(lambda self, i: i), batch_size=BATCH, collate_fn=list)
    loader.change_to(LoaderConfig(num_workers=2))
    seen, killed = [], 0
    for batch in loader:
        seen += batch
        for process in multiprocessing.active_children():
            process.kill()
            killed += 1
    assert killed
    assert seen == list(range(SIZE))
    assert loader.found.tuner.refused is None
    assert loader.num_workers == 0


class Sampler:
    """Draws each batch when it is asked for it."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return (self.draw() for _ in range(200))

    def __len__(self) -> int:
        raise AssertionError("nobody asks for it")


def test_a_sampler_that_draws_from_a_global_generator_is_not_drawn_ahead() -> None:
    def rows(base: Any, **rest: Any) -> Any:
        random.seed(4)
        Items.wait_s, seen = 0.002 if rest else 0.0, []
        loader = base(
            Items(lambda self, i: i),
            batch_sampler=Sampler(lambda: [int(100 * random.random())]),
            **rest,
        )
        for batch in itertools.chain(loader, loader):
            seen.append((batch.tolist(), random.random()))
        return loader, seen

    loader, seen = rows(AutoLoader, max_workers=3)
    assert seen == rows(DataLoader)[1]
    assert loader.kept is not None
    assert loader.kept.kind == "sampler_draws"


def raising(base: Any) -> list[Any]:
    seen: list[Any] = []
    loader = base(
        Items(lambda self, i: i),
        batch_size=BATCH,
        sampler=(i if i < 21 else int("no more") for i in range(40)),
    )
    if hasattr(loader, "change_to"):
        loader.change_to(LoaderConfig(num_workers=3))
    with contextlib.suppress(ValueError):
        for batch in loader:
            seen.append(batch.tolist())
        seen.append("not raised")
    return seen


def in_turn(base: Any) -> list[Any]:
    torch.manual_seed(0)
    loaders = [base(Items(lambda self, i: i), batch_size=BATCH, shuffle=True) for _ in range(2)]
    for each in loaders:
        if hasattr(each, "change_to"):
            each.change_to(LoaderConfig(num_workers=3))
    return [[batch.tolist() for batch in pair] for pair in zip(*loaders, strict=True)]


@pytest.mark.parametrize("loop", [raising, in_turn])
def test_samplers_are_asked_as_without_workers(loop: Callable[[Any], list[Any]]) -> None:
    assert loop(FixedLoader) == loop(DataLoader)


METHODS = """
import multiprocessing, sys, time
import torch
from torch.utils.data import Dataset
from autotune_loader import AutoLoader
from autotune_loader.autoloader import tuner

tuner.GATE_S = 0.1

class Slow(Dataset):
    def __init__(self, file=None):
        self.file = file
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.tensor(index)

def main(method, data):
    if method != "default":
        multiprocessing.set_start_method(method)
    loader, until = AutoLoader(data, batch_size=4, max_workers=3), time.monotonic() + 60
    while time.monotonic() < until:
        assert [index for batch in loader for index in batch.tolist()] == list(range(4000))
        if loader.found.tuner.refused or any(row.worker >= 0 for row in loader.log.rows):
            break
    print("ran", loader.num_workers, loader.kept and loader.kept.kind, multiprocessing.get_start_method(True), flush=True)
"""
GUARDED = 'if __name__ == "__main__":\n    main(sys.argv[1], Slow({}))\n'


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("method", "start", "expected"),
    [
        (
            "default",
            "main(sys.argv[1], Slow())",
            "workers None",
        ),  # forked, whatever Python's default is
        ("spawn", GUARDED.format(""), "workers spawn"),
        ("forkserver", GUARDED.format(""), "workers forkserver"),
        ("spawn", "main(sys.argv[1], Slow())", "0 no_guard spawn"),
        ("spawn", GUARDED.format("open(__file__)"), "0 not_begun spawn"),
    ],
)
def test_workers_start_as_the_script_says_or_a_sentence_says_why_not(
    method: str, start: str, expected: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(METHODS + start)
    command = [sys.executable, str(script), method]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    (ran,) = (line for line in done.stdout.splitlines() if line.startswith("ran "))  # once
    _, workers, kept, own = ran.split()
    assert [
        f"workers {own}"
        if workers != "0" and kept in ("None", "too_short", "not_settled")
        else f"{workers} {kept} {own}"
    ] == [expected]
