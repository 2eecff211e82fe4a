"""Workers that nobody asked for: looked at first, then proven; each kind of dataset either gives the same or is refused."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
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
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    get_worker_info,
)

from autotune_loader import AutoLoader
from autotune_loader.live import rebuilt
from autotune_loader.live.trust import TRUSTED, Refusal

pytestmark = pytest.mark.process

SIZE, BATCH, LARGE, PATIENCE_S = 400, 4, 100_000, 30.0
NOTES: list[int] = []
SEEN = 0


@pytest.fixture(autouse=True)
def looks_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine one would be over before it has seen what a test is about."""
    monkeypatch.setattr("autotune_loader.pipeline.look.MOST_S", 5.0)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with a file of whole numbers."""
    np.arange(SIZE, dtype=np.int64).tofile(tmp_path / "raw")
    return tmp_path


class Items(Dataset[Any]):
    """A dataset of a function of (itself, index)."""

    total = 0

    def __init__(self, get: Callable[[Any, int], Any], **values: Any) -> None:
        self.get = get
        self.__dict__.update(values)

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.get(self, index)


def prove(dataset: Any, *, step: Callable[[Any], None] | None = None, **arguments: Any) -> Any:
    """The verdict on a dataset, after as many batches as it takes, with time for the shadow's answers."""
    rebuilt._left.clear()  # a loader of this line
    loader = AutoLoader(dataset, **({"batch_size": BATCH} | arguments))
    trust: Any = loader.learnt[0].trust
    until = time.monotonic() + PATIENCE_S
    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        if trust.verdict is not None:
            break
        if step is not None:
            step(batch)
        time.sleep(0.02)
        assert time.monotonic() < until
    return trust.verdict


def global_count(_: Any, index: int) -> int:
    global SEEN
    SEEN += 1
    return index


def bumped(values: Any, key: Any, index: int) -> int:
    values[key] += 1
    return index


def identity(self: Any, index: int) -> int:
    return index


class Overridden(Items):
    """What is called is defined next to it, not passed in."""

    def __getitem__(self, index: int) -> int:
        return self.inner(index)

    def inner(self, index: int) -> int:
        NOTES.append(index)
        return index


@functools.cache
def loaded(index: int) -> int:
    return index * 2


def lazily(self: Any, index: int) -> int:
    if self.file is None:
        self.file = (self.folder / "raw").open("rb")
    return index


def held(lock: Any) -> Any:
    lock.acquire()
    return lock


def opened_once() -> Any:
    opened = functools.lru_cache(lambda: socket.socketpair()[0])
    opened()
    return opened


Kinds = dict[str, tuple[Callable[[Path], Any], str]]
HERE, HIDDEN = Items(identity), {"x": {"count": itertools.count()}}
LOOKED: Kinds = {
    "count": (lambda d: Items(lambda self, i: bumped(vars(self), "n", i), n=0), "fetching changes `dataset.n`"),
    "class": (lambda d: Items(lambda self, i: setattr(Items, "total", i) or i), "fetching changes `Items.total`"),
    "cache": (lambda d: Items(lambda self, i: self.cache.setdefault(i, i), cache={}), "fetching changes `dataset.cache`"),
    "global number": (lambda d: Items(global_count), "fetching changes `SEEN`"),
    "global list of an inner method": (lambda d: Overridden(identity), "fetching changes `NOTES`"),
    "lru_cache": (lambda d: Items(lambda self, i: loaded(i)), "fetching changes `loaded`"),
    "visits": (lambda d: Items(lambda self, i: bumped(self.n, i, i), n=np.zeros(LARGE)), "fetching changes `dataset.n"),
    "visits by name": (
        lambda d: Items(lambda self, i: bumped(self.n, f"x{i + 90}", i), n={f"x{i}": 0 for i in range(9999)}),
        "fetching changes `dataset.n",
    ),
    "visits in a tensor": (
        lambda d: Items(lambda self, i: bumped(self.n, i, i), n=torch.zeros(LARGE).share_memory_()), "changes `dataset.n",
    ),
    "visits through a Subset": (
        lambda d: Subset(Items(lambda self, i: bumped(self.n, i, i), n=np.zeros(LARGE)), range(300, 400)),
        "fetching changes `dataset.dataset.n",
    ),
    "samples in place": (
        lambda d: Items(lambda self, i: self.x[i].mul_(2).sum(), x=list(torch.ones(SIZE, 3))), "fetching changes `dataset.x[",
    ),
    "Value": (
        lambda d: Items(lambda self, i: setattr(self.n, "value", i) or i, n=multiprocessing.Value("l", 0)),
        "fetching changes `dataset.n`",
    ),
    "DataFrame": (
        lambda d: Items(lambda self, i: bumped(self.f.loc, (i, "n"), i), f=pd.DataFrame({"n": np.zeros(SIZE)})),
        "fetching changes `dataset.f",
    ),
    "RandomState": (
        lambda d: Items(lambda self, i: self.r.rand(), r=np.random.RandomState(1)),
        "fetching draws from `dataset.r`, a random generator of its own",
    ),
    "Generator": (lambda d: Items(lambda self, i: self.r.random(), r=np.random.default_rng(1)), "draws from `dataset.r`"),
    "Random": (lambda d: Items(lambda self, i: self.r.random(), r=random.Random(1)), "draws from `dataset.r`"),
    "torch.Generator": (
        lambda d: Items(lambda self, i: torch.rand((), generator=self.r), r=torch.Generator()), "draws from `dataset.r`",
    ),
    "environment": (lambda d: Items(lambda self, i: os.environ.update(AT_HAND=str(i)) or i), "fetching changes `os.environ`"),
    "BytesIO": (lambda d: Items(lambda self, i: self.f.read(1)[0], f=io.BytesIO(bytes(9999))), "fetching changes `dataset.f`"),
    "partial": (lambda d: Items(functools.partial(lambda notes, self, i: notes.append(i) or i, [])), "fetching changes `"),
    "defaults": (lambda d: Items(lambda self, i, notes=[]: notes.append(i) or i), "fetching changes `"),
    "read by number": (
        lambda d: Items(lambda self, i: os.read(self.n, 1)[0], n=os.open(d / "raw", os.O_RDONLY)), "moves the position",
    ),
    "unbuffered": (lambda d: Items(identity, f=(d / "raw").open("rb", buffering=0)), "an open file"),
    "opened by the first fetch": (lambda d: Items(lazily, file=None, folder=d), "an open file"),
    "lru_cache of a handle": (lambda d: Items(lambda self, i: self.f() and i, f=opened_once()), "a socket"),
    "closure": (lambda d: Items((lambda f: lambda self, i: f.fileno())((d / "raw").open("rb"))), "in `f`"),
    "in a dict in a list": (lambda d: Items(identity, f=[{"a": (d / "raw").open("rb")}]), "in `dataset.f[0]['a']`"),
    "generator": (lambda d: Items(lambda self, i: next(self.f), f=(i for i in range(9999))), "a generator or iterator"),
    "cycle": (lambda d: Items(lambda self, i: next(self.f), f=itertools.cycle(range(7))), "a generator or iterator"),
    "hidden state": (lambda d: Items(lambda self, i: next(HIDDEN["x"]["count"])), "a generator or iterator"),
    "socket": (lambda d: Items(identity, f=socket.socketpair()), "a socket"),
    "executor": (lambda d: Items(identity, f=concurrent.futures.ThreadPoolExecutor(1)), "an executor"),
    "gradient": (lambda d: Items(identity, w=torch.zeros(2, requires_grad=True)), "requires a gradient"),
    "held lock": (lambda d: Items(identity, f=held(threading.Lock())), "a lock that is held"),
    "held RLock": (lambda d: Items(identity, f=held(threading.RLock())), "a lock that is held"),
    "manager": (
        lambda d: Items(identity, f=object.__new__(multiprocessing.managers.ListProxy)), "a connection to a manager",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", LOOKED)
def test_what_fetching_changes_or_no_fork_may_carry_is_refused_before_anything_is_forked(
    kind: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    monkeypatch.setenv("AT_HAND", "")
    make, reason = LOOKED[kind]

    verdict = prove(make(data))

    assert isinstance(verdict, Refusal)
    assert reason in verdict.reason
    assert ("the global generators" if "draws from" in reason else "num_workers=1") in verdict.mend
    gc.collect()  # a file in a closure is closed here, where its warning is expected


def remembered(self: Any, index: int) -> int:
    if self.table is None:
        self.table = list(range(SIZE))
    return self.table[index]


class Endless(list[int]):
    """Its own way to go through it never ends."""

    def __iter__(self) -> Any:
        return itertools.count()


LOCK = multiprocessing.get_context("fork").Lock()
GOOD: dict[str, Callable[[Path], Any]] = {
    "tensors": lambda d: TensorDataset(torch.rand(SIZE, 10), torch.arange(SIZE)),
    "draws": lambda d: Items(lambda self, i: torch.rand(3) * random.random() + np.random.rand()),
    "written memmap": lambda d: Items(lambda self, i: int(self.x[i]), x=np.memmap(d / "raw", dtype="i8", mode="r+")),
    "mmap": lambda d: Items(
        lambda self, i: self.m[8 * i], m=mmap.mmap(os.open(d / "raw", os.O_RDONLY), 0, access=mmap.ACCESS_READ)
    ),
    "pread": lambda d: Items(lambda self, i: os.pread(self.n, 1, 8 * i)[0], n=os.open(d / "raw", os.O_RDONLY)),
    "dicts": lambda d: Items(lambda self, i: {"x": torch.tensor([float("nan"), i]), "box": ("name", (1.0, i))}),
    "nested": lambda d: ConcatDataset([Subset(TensorDataset(torch.rand(50, 2)), range(40)) for _ in range(5)]),
    "large": lambda d: Items(lambda self, i: torch.full((3, 256, 256), i / 7)),
    "free lock": lambda d: Items(identity, lock=threading.Lock()),
    "lock of processes": lambda d: Items(lambda self, i: (self.lock.acquire() and self.lock.release()) or i, lock=LOCK),
    "logger": lambda d: Items(lambda self, i: self.log.debug("%d", i) or i, log=logging.getLogger("user")),
    "fills a table once": lambda d: Items(remembered, table=None),
    "weak": lambda d: Items(identity, w=weakref.ref(HERE)),
    "list of paths": lambda d: Items(lambda self, i: len(str(self.x[i])), x=[d / f"{i}.jpg" for i in range(SIZE)]),
    "a list with an iterator of its own": lambda d: Items(lambda self, i: self.x[i], x=Endless(range(SIZE))),
    "millions": lambda d: Items(lambda self, i: self.x[i], x=list(range(2_000_000))),
    "sums": lambda d: Items(lambda self, i: self.x.mul(i).sum() / 3, x=torch.rand(200_000)),
    "an attribute with the name of what the script counts": lambda d: Items(lambda self, i: self.SEEN + i, SEEN=1),
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_gives_the_same_is_trusted(kind: str, data: Path) -> None:
    assert prove(GOOD[kind](data), step=lambda batch: global_count(batch, 0)) == TRUSTED


MAIN = os.getpid()


def in_worker(there: Callable[[], Any]) -> Callable[[Path], Any]:
    return lambda d: Items(lambda self, i: 1 if os.getpid() == MAIN else there())


class Uncopied(SimpleNamespace):
    def __reduce__(self) -> Any:
        return Uncopied, ()


def writes(self: Any, index: int) -> int:
    with self.path.open("a") as file:
        file.write("x")
    return index


def remembers(self: Any, index: int) -> int:
    with contextlib.closing(sqlite3.connect(self.path)) as known, known:
        known.execute("create table if not exists seen (number)")
        known.execute("insert into seen values (?)", (index,))
    return index


SHADOWED: Kinds = {
    "process": (lambda d: Items(lambda self, i: os.getpid()), "another batch 4: `batch` differs"),
    "exception": (
        in_worker(lambda: int("x")),
        "batch 4 raises in a worker that may write no file: ValueError: invalid",
    ),
    "closure": (lambda d: Items(lambda self, i: {"f": lambda: i}), "batch 4 cannot be sent from a worker"),
    "lossy": (lambda d: Items(lambda self, i: Uncopied(note=1)), "`batch[0]"),
    "exit": (in_worker(lambda: os._exit(3)), "fetching ends its worker (exit code 3)"),
    "no answer": (in_worker(lambda: time.sleep(1000)), "gave no answer for batch 4"),
    "no answer from one of two": (
        lambda d: Items(lambda self, i: time.sleep(1000 * ((get_worker_info() or NOBODY).seed % 2 == 0)) or 0),
        "gave no answer for batch",
    ),
    "writes shared memory": (in_worker(lambda: SHARED.__setitem__(0, 1)), "memory that processes share"),
    "main process": (lambda d: Items(lambda self, i: len(multiprocessing.current_process().name)), "another batch 4"),
    "sentinel": (lambda d: Items(lambda self, i: EMPTY), "held elsewhere"),
    "sample": (lambda d: Items(lambda self, i: self.rows[i], rows=[[i] for i in range(SIZE)]), "a list in it is held"),
    "memory": (lambda d: Items(lambda self, i: self.rows[i], rows=torch.zeros(SIZE, 2)), "a Tensor in it is held"),
    "worker": (lambda d: Items(lambda self, i: (get_worker_info() or NOBODY).id), "asks who the worker is"),
    "appends": (lambda d: Items(writes, path=d / "log"), "fetching writes `"),
    "writes in C": (lambda d: Items(remembers, path=d / "known.db"), "may write no file: sqlite3."),
    "renames": (in_worker(lambda: Path("no").rename("no2")), "fetching renames `"),
    "removes": (in_worker(lambda: Path("no").unlink()), "fetching removes `"),
    "starts": (in_worker(lambda: os.system("true")), "fetching starts a process"),
    "signals": (in_worker(lambda: os.kill(MAIN, 0)), "fetching signals a process"),
}
WHOLE = ("closure", "lossy", "sentinel", "sample", "memory")
SHARED, NOBODY, EMPTY = torch.zeros(4).share_memory_(), SimpleNamespace(id=0, seed=1), object()


@pytest.mark.parametrize("kind", SHADOWED)
def test_what_gives_something_else_or_acts_outside_is_refused_with_batch_and_place(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune_loader.live.trust.WAIT_FETCHES", 0.0)
    monkeypatch.setattr("autotune_loader.live.trust.SHORTEST_WAIT_S", 1.0 if kind.startswith("no answer") else 60.0)
    make, reason = SHADOWED[kind]
    steps: list[Any] = []

    verdict = prove(make(tmp_path), step=steps.append, collate_fn=list if kind in WHOLE else None)

    assert isinstance(verdict, Refusal)
    assert reason in verdict.reason.replace("batch 5", "batch 4")  # whichever of the two workers is heard first
    if kind == "appends":
        assert len((tmp_path / "log").read_text()) == (len(steps) + 1) * BATCH  # by the loop alone


def test_files_that_are_open_are_not_written_by_the_shadow(tmp_path: Path) -> None:
    steps: list[Any] = []
    with (tmp_path / "log").open("a") as log:
        handler, logger = logging.StreamHandler(log), logging.getLogger("to a file")
        logger.addHandler(handler)
        assert prove(Items(lambda self, i: logger.warning("%d", i) or i), step=steps.append) == TRUSTED
        logger.removeHandler(handler)

    assert len((tmp_path / "log").read_text().split()) == (len(steps) + 1) * BATCH


class Finalised(Items):
    def __del__(self) -> None:
        Path(self.path).unlink(missing_ok=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_nothing_of_the_users_is_finalised(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "precious"
    path.touch()
    monkeypatch.setattr("autotune_loader.live.trust.start_method", lambda: method)
    monkeypatch.setattr("autotune_loader.live.trust._method_refusal", lambda method: None)
    dataset = Finalised(identity, path=str(path))

    assert prove(dataset) == TRUSTED
    assert path.exists()


class Listening:
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([index] for index in range(SIZE))


def test_a_sampler_of_the_users_may_listen_to_the_training() -> None:
    # A list may grow.
    for own in (Listening(), BatchSampler(Listening(), 1, False), [[0, 1], [2, 3]] * 10):
        assert " may depend on the training" in prove(Items(identity), batch_size=1, batch_sampler=own).reason
    for pure in (BatchSampler(RandomSampler(range(SIZE)), BATCH, False), ([0, 1], [2, 3]) * 10):
        assert prove(range(SIZE), batch_size=1, batch_sampler=pure) == TRUSTED


class Slotted:
    __slots__ = ("p",)


class Levelled(Items):
    """Its samples depend on attributes, on the class and on a global name."""

    step = 0

    def __getitem__(self, index: int) -> int:
        return index + self.level + self.step + SEEN


def levelled() -> Any:
    dataset = Levelled(identity, level=0, labels=np.zeros(SIZE), weights=torch.zeros(9), slotted=Slotted())
    dataset.names, dataset.table = ["a"] * SIZE, dict.fromkeys(map(str, range(SIZE)), 0)
    dataset.transform, dataset.shared = SimpleNamespace(p=0.0), multiprocessing.Value("l", 0)
    return dataset


Change = Callable[[Any, pytest.MonkeyPatch], Any]
SEEN_IN_EPOCH: dict[str, Change] = {
    "attribute": lambda d, _: setattr(d, "level", d.level + 1),
    "new attribute": lambda d, _: setattr(d, "new", 0.5),
    "array": lambda d, _: d.labels.__iadd__(1),
    "tensor": lambda d, _: d.weights.add_(1),
    "transform": lambda d, _: setattr(d.transform, "p", d.transform.p + 0.1),
    "class": lambda d, patch: patch.setattr(Levelled, "step", 2),
    "global": lambda d, patch: patch.setitem(globals(), "SEEN", 10_000),
}
SEEN_BETWEEN: dict[str, Change] = {
    "one number": lambda d, _: d.labels.__setitem__(217, 1),
    "one item": lambda d, _: d.names.__setitem__(217, "b"),
    "one value": lambda d, _: d.table.__setitem__("217", 1),
    "slot": lambda d, _: setattr(d.slotted, "p", 0.5),
    "Value": lambda d, _: setattr(d.shared, "value", 1),
}


@pytest.mark.parametrize("kind", [*SEEN_IN_EPOCH, *SEEN_BETWEEN])
def test_a_change_by_the_training_ends_a_trust(kind: str) -> None:
    loader = AutoLoader(levelled(), batch_size=BATCH)
    trust: Any = loader.learnt[0].trust
    with pytest.MonkeyPatch.context() as patch:
        held = trust.held()
        assert held.is_unchanged()
        (SEEN_IN_EPOCH | SEEN_BETWEEN)[kind](loader.dataset, patch)
        assert not held.is_unchanged()


@pytest.mark.parametrize("kind", SEEN_IN_EPOCH)
def test_what_the_training_changes_while_it_iterates_is_refused(kind: str) -> None:
    dataset = levelled()
    with pytest.MonkeyPatch.context() as patch:
        assert "the training changes `" in prove(dataset, step=lambda _: SEEN_IN_EPOCH[kind](dataset, patch)).reason


def test_what_the_training_changes_of_the_samples_that_it_was_given_is_refused() -> None:
    dataset = Items(identity, rows=list(torch.ones(SIZE, 3)))
    verdict = prove(dataset, step=lambda batch: dataset.rows[int(batch[1])].mul_(2))
    assert "the training changes `dataset." in verdict.reason


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


@pytest.fixture
def name() -> Iterator[str]:
    """A name of this process' own, which those that it forks inherit."""
    file, own = Path("/proc/self/comm"), f"proves-{os.getpid()}"
    before = file.read_text()
    file.write_text(own)
    yield own
    file.write_text(before)


@pytest.mark.parametrize("handler", [lambda *_: None, signal.SIG_IGN])
def test_a_script_that_is_told_when_children_end_has_none_of_ours(handler: Any) -> None:
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        assert "handles SIGCHLD" in prove(range(SIZE)).reason
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_nothing_is_left_and_how_processes_start_is_not_settled(name: str) -> None:
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    gc.collect()  # what other tests have open
    descriptors, children = len(list(Path("/proc/self/fd").iterdir())), psutil.Process().children()
    try:
        assert prove(range(SIZE)) == TRUSTED
        assert psutil.Process().children() == children  # who waits for a child of their own finds none of ours
        assert multiprocessing.get_start_method(allow_none=True) is None
    finally:
        multiprocessing.set_start_method(method, force=True)

    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    deadline = time.monotonic() + 5
    while left := [
        each for each in psutil.process_iter(["name"]) if each.info["name"] == name and each.pid != os.getpid()
    ]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)
