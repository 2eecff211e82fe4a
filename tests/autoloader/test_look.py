"""Where nobody asked for workers: two batches are made twice before workers take over.

If they differ, the data get none, and a sentence says why.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

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
    """The loader after epochs until workers deliver or are refused and two more; are all plain?"""
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


class Drawing:
    """A transform that holds generators and keeps what it has drawn, as of albumentations."""

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


def having(get: Callable[[Any, int], Any], **values: Any) -> Callable[[Path], Any]:
    return lambda d: Items(get, **values)


GOOD: dict[str, Callable[[Path], Any]] = {
    "draws": having(lambda self, i: torch.rand(3) * random.random() + np.random.rand()),
    "transforms": lambda d: Items(lambda self, i: [t(i) for t in self.t], t=[Drawing(), Drawing()]),
    "opened by the first fetch": lambda d: Items(lazily, file=None, path=d / "raw"),
    "a file": lambda d: Items(
        lambda self, i: os.pread(self.f.fileno(), 8, 8 * i), f=(d / "raw").open("rb")
    ),
    "a table made once": having(lambda self, i: vars(self).setdefault("t", [*range(SIZE)])[i]),
    "logger": having(lambda self, i: self.log.debug("%d", i) or i, log=logging.getLogger("user")),
    "lock": having(lambda self, i: (self.l.acquire(), self.l.release()) and i, l=threading.Lock()),
    "socket": lambda d: Items(lambda self, i: i, s=socket.socketpair()),
    "Hugging Face with set_transform": of_hugging_face,
    "NaN": having(lambda self, i: {"x": torch.tensor([float("nan"), i]), "box": ("a", (1.0, i))}),
    "sums": having(lambda self, i: self.x.mul(i).sum() / 3, x=torch.linspace(0, 1, 20_000)),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    np.arange(SIZE, dtype=np.int64).tofile(tmp_path / "raw")
    return tmp_path


IN_FULL = {"transforms", "a table made once", "logger", "socket", "NaN", "sums"}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.system] * (kind in IN_FULL)) for kind in GOOD],
)
def test_common_data_get_workers_and_equal_batches(kind: str, data: Path) -> None:
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
    return having(lambda self, i: 1 if os.getpid() == MAIN else there())


CHANGES, DIFFER = "dataset_changes", "samples_differ"
REFUSED: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "count": (having(lambda self, i: bumped(vars(self), "n", i), n=0), CHANGES, "Items.n"),
    "cache": (having(lambda self, i: self.c.setdefault(i, i), c={}), CHANGES, "Items.c"),
    "lru_cache": (lambda d: Cached(lambda self, i: i), CHANGES, "the cache of remembered"),
    "reads on": (having(lambda self, i: next(self.f), f=itertools.count()), DIFFER, "Batch"),
    "worker": (having(lambda self, i: get_worker_info() is None), DIFFER, "Batch"),
    "a closure": (having(lambda self, i: {"f": lambda: i}), "worker_error", "local object"),
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
    assert loader.kept.kind == reason
    assert words in loader.kept.sentence
    assert loader.config == loader.best == LoaderConfig()
    assert "the number of workers stays" in caplog.text
    assert loader.kept.sentence in loader.report().replace("\n  ", " ")


def test_a_worker_that_hangs_is_not_waited_for() -> None:
    # As after a fork while another thread holds a lock.
    Items.wait_s = 0.002
    hangs = in_worker(lambda: time.sleep(1000))(Path())
    loader = AutoLoader(hangs, batch_size=BATCH, collate_fn=list)
    begun = time.monotonic()
    for _ in range(4):
        assert [list(batch) for batch in loader] == [[1] * BATCH] * (SIZE // BATCH)
    assert time.monotonic() - begun < 60  # of 1000


def test_workers_lost_later_leave_the_loop_to_itself() -> None:
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


class DrawnLate:
    """A sampler that draws each batch when it is asked for it."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([int(100 * random.random())] for _ in range(200))

    def __len__(self) -> int:
        raise AssertionError("nobody asks for it")


@pytest.mark.parametrize("asked", [0, 2])
def test_where_a_sampler_draws_the_number_stays(asked: int) -> None:
    def rows(base: Any, **rest: Any) -> Any:
        random.seed(4)
        rest |= {"multiprocessing_context": "fork"} if asked else {}
        loader = base(Items(lambda self, i: i), batch_sampler=DrawnLate(), **rest)
        both = itertools.chain(loader, loader)
        return loader, [(batch.tolist(), random.random()) for batch in both]

    Items.wait_s = 0.02 if asked else 0.002
    loader, seen = rows(AutoLoader, num_workers=asked or None, max_workers=4)
    assert seen == rows(DataLoader, num_workers=asked)[1]
    assert loader.kept is not None
    assert loader.kept.kind == "sampler_draws"


SCRIPT = """
import itertools, multiprocessing, sys, time
import torch
from torch.utils.data import Dataset
from autotune_loader import AutoLoader
from autotune_loader.autoloader import tuner

tuner.GATE_S = 0.1

class Slow(Dataset):
    def __init__(self, file=None):
        self.file = file
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.tensor(index)

def main(method, data):
    if method != "default":
        multiprocessing.set_start_method(method)
    loader, until = AutoLoader(data, batch_size=4, max_workers=3), time.monotonic() + 60
    for number, batch in enumerate(loader):
        assert batch.tolist() == [*range(4 * number, 4 * number + 4)]
        rows, refused = loader.log.rows, loader.found.tuner.refused
        if refused or (rows and rows[-1].worker >= 0) or time.monotonic() > until:
            break
    made_by = "workers" if rows[-1].worker >= 0 else refused and refused.kind
    print("ran", made_by, multiprocessing.get_start_method(True), flush=True)

"""
UNGUARDED, GUARDED = (
    "main(sys.argv[1], Slow())",
    """
if __name__ == "__main__":
    main(sys.argv[1], Slow())
""",
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("method", "start", "made_by"),
    [
        ("default", UNGUARDED, "workers"),  # forked, whatever Python's default is
        pytest.param("spawn", GUARDED, "workers", marks=pytest.mark.system),
        pytest.param("forkserver", GUARDED, "workers", marks=pytest.mark.system),
        ("spawn", UNGUARDED, "no_guard"),
        ("spawn", GUARDED.replace("Slow()", "Slow(open(__file__))"), "not_begun"),
    ],
)
def test_workers_start_as_the_script_says_or_not(
    method: str, start: str, made_by: str, tmp_path: Path, preloaded: Any
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + start)
    run = preloaded.start("train.py", method, folder=tmp_path)
    assert run.wait(100) == 0, run.output
    said = [line for line in run.output.splitlines() if line.startswith("ran ")]
    assert said == [f"ran {made_by} {method.replace('default', 'None')}"]
