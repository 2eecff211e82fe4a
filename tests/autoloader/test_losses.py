"""What once went wrong: lost workers, errors, forks, kernels that refuse. Each epoch is whole."""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from operator import methodcaller
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import AutoLoader
from autotune_loader.autoloader import births
from autotune_loader.autoloader import iterator as iterator_module
from autotune_loader.autoloader import live as live_module
from autotune_loader.machine import clones, nursery
from autotune_loader.machine.limits import MemoryBudget
from autotune_loader.machine.nursery import Root
from autotune_loader.values import LoaderConfig
from tests.autoloader.test_elastic import imitate_pinning
from tests.support.bursts import Made
from tests.support.schedules import FixedLoader, Numbers, Remade, Slow

pytestmark = pytest.mark.process

TWO, FOUR = LoaderConfig(num_workers=2), LoaderConfig(num_workers=4)
GIB = 1 << 30


def begun(loader: Any, config: LoaderConfig, batches: int = 20) -> Any:
    """An iterator that has delivered so many batches, and runs a configuration."""
    iterator = iter(loader)
    loader.change_to(config)
    for _ in range(batches):
        next(iterator)
    assert loader.num_workers == config.num_workers
    return iterator


def refused(*_: Any) -> Any:
    raise OSError(errno.ENOSYS, "refused")


@pytest.mark.parametrize(
    ("name", "replacement"),
    [("pidfd", refused), ("clone", lambda: -1), ("CLONE", None)],
)
@pytest.mark.parametrize("asked", [None, 2])
def test_where_the_kernel_refuses_workers_are_forked(
    name: str, replacement: Any, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clones if name == "clone" else nursery, name, replacement)
    loader = FixedLoader(Slow(200), batch_size=2, num_workers=asked)
    iterator = iter(loader)
    loader.change_to(FOUR)
    assert [batch[:, 0].tolist() for batch in iterator] == [
        [number, number + 1] for number in range(0, 200, 2)
    ]
    assert loader.num_workers == 4


SPAWN, FORKSERVER = ({"multiprocessing_context": method} for method in ("spawn", "forkserver"))
# What is asked, how many run, who is killed after which batch, and how many there are then.
KILLS = [
    ({"num_workers": 3}, 3, {3: "worker", 9: "worker", 20: "worker"}, 3),
    ({"num_workers": 3, "pin_memory": True}, 3, {3: "worker", 20: "worker"}, 3),
    ({"num_workers": 2}, 4, {25: "worker"}, 2),
    ({"num_workers": 2, "pin_memory": True}, 4, {25: "worker"}, 2),
    ({"num_workers": 2, "persistent_workers": True}, 2, {3: "worker", 79: "worker"}, 2),
    ({}, 2, {40: "worker"}, None),  # they may have begun by then
    *(
        pytest.param({"num_workers": 3, **how}, 3, kills, 3, marks=pytest.mark.system)
        for how, kills in (
            (SPAWN, {2: "root", 9: "nursery", 20: "worker"}),
            (FORKSERVER, {2: "root nursery worker"}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "runs", "kills", "left"), KILLS)
def test_whoever_is_killed_each_sample_comes_once(
    asked: Any, runs: int, kills: Any, left: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "pin_memory" in asked:
        imitate_pinning(monkeypatch)
    loader = FixedLoader(Slow(320), batch_size=4, **asked)
    loader.change_to(LoaderConfig(num_workers=runs))
    for deaths in (kills, {}):  # in the second epoch nothing is left of it
        iterator, seen = iter(loader), list[int]()
        for number, batch in enumerate(iterator):
            seen += batch[:, 0].tolist()
            alive = {"nursery": iterator._context._nursery, "root": Root.latest}
            if iterator._workers:
                alive["worker"] = iterator._workers[-1]
            for name in deaths.get(number, "").split():
                if name in alive:
                    os.kill(alive[name].pid, signal.SIGKILL)
        assert seen == list(range(320))
    assert left is None or loader.num_workers == left
    assert loader._live.home.why_not is None


def failing(at: int) -> Iterator[int]:
    """A sampler whose server is down at a sample."""
    yield from range(at)
    raise OSError("index server is down")


@pytest.mark.parametrize("asked", [None, 2])
def test_a_samplers_error_belongs_to_its_batch(asked: int | None) -> None:
    loader = FixedLoader(Slow(100), sampler=failing(30), batch_size=1, num_workers=asked)
    batches = iter(loader)
    seen = [int(next(batches)[0, 0]) for _ in range(22)]
    loader.change_to(LoaderConfig(num_workers=8))
    seen += [int(next(batches)[0, 0]) for _ in range(8)]
    with pytest.raises(OSError, match="index server"):
        next(batches)
    assert seen == list(range(30))


class OwnStream(Slow):
    """Makes its generator in the worker, from the worker's own seed."""

    rng: Any = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed() % 2**32)
        super().__getitem__(index)
        return torch.tensor([os.getpid(), self.rng.random()], dtype=torch.float64)


def test_later_workers_draw_unlike_the_first_ones() -> None:
    loader = FixedLoader(OwnStream(200), batch_size=2, num_workers=2)
    firsts: dict[float, float] = {}
    for number, batch in enumerate(loader):
        for pid, drawn in batch.tolist():
            firsts.setdefault(pid, drawn)
        if number == 4:
            loader.change_to(FOUR)
    assert len(firsts) == 4
    assert len(set(firsts.values())) == 4


def test_handlers_of_the_script_run_in_training_alone(tmp_path: Path) -> None:
    told = tmp_path / "told"
    before = signal.signal(signal.SIGTERM, lambda *_: told.write_text("handled"))
    try:
        loader = FixedLoader(Slow(200), batch_size=2)
        iterator = begun(loader, TWO)
        for pid in (iterator._context._nursery.pid, *(each.pid for each in iterator._workers)):
            os.kill(pid, signal.SIGTERM)
        assert len(list(iterator)) == 80
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not told.exists()


def test_nothing_that_was_asked_for_is_cut() -> None:
    loader = AutoLoader(Numbers(8), num_workers=72)
    assert loader.found.tuner.most == 72


CORRUPT = (61, 161)


class Corrupt(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index in CORRUPT:
            raise ValueError("corrupt file")
        return super().__getitem__(index)


def test_corrupt_samples_leave_the_number_as_it_is() -> None:
    loader = FixedLoader(Corrupt(300), batch_size=1, num_workers=2)
    batches, seen = iter(loader), list[int]()
    loader.change_to(FOUR)
    for number in range(300):
        with pytest.raises(ValueError, match="corrupt") if number in CORRUPT else nullcontext():
            seen.append(int(next(batches)[0, 0]))
    assert seen == [number for number in range(300) if number not in CORRUPT]
    assert loader.num_workers == 4


@pytest.mark.parametrize("asked", [None, 2])
def test_a_start_that_fails_once_is_tried_again(
    asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failures = births.Births.start, [OSError(errno.EAGAIN, "no more processes")]

    def started(births: Any, number: int, count: int) -> Any:
        if failures:
            raise failures.pop()
        return start(births, number, count)

    monkeypatch.setattr(births.Births, "start", started)
    loader = FixedLoader(Slow(200), batch_size=2, num_workers=asked)
    iterator = iter(loader)
    loader.change_to(FOUR)
    next(iterator)
    assert not failures
    assert loader.found.tuner.refused is None
    loader.change_to(FOUR)
    assert len(list(iterator)) == 99
    assert loader.num_workers == 4


def test_parked_workers_end_and_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterator_module, "PARKED_S", 0.2)
    loader = FixedLoader(Slow(200_000), batch_size=2, num_workers=2)
    iterator = begun(loader, FOUR)
    loader.change_to(TWO)
    deadline = time.monotonic() + 60
    while len(iterator._workers) > 2 and time.monotonic() < deadline:
        next(iterator)
    assert len(iterator._workers) == 2
    while len(multiprocessing.active_children()) > 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(multiprocessing.active_children()) == 2


@pytest.mark.parametrize(
    ("free", "held", "running", "fit"),
    [
        (8 * GIB, GIB, [1, 1], 2 + 4),
        (8 * GIB, None, [], 32),  # each is counted with 128 MiB
        (GIB // 2, GIB, [1] * 8, 4),  # under 5% is left: half of them
    ],
)
def test_workers_are_counted_by_their_own_memory(
    free: int, held: int | None, running: list[int], fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = MemoryBudget(available_bytes=free, total_bytes=64 * GIB, inputs=())
    monkeypatch.setattr(live_module, "memory_budget", lambda: budget)
    monkeypatch.setattr(live_module, "private_bytes", lambda pid: held)
    assert AutoLoader(Numbers(8))._live.room(running).workers == fit


def test_freezing_keeps_the_best_not_the_one_tried() -> None:
    loader = AutoLoader(Numbers(8), num_workers=2)
    loader.found.tuner.wanted = FOUR
    loader.freeze()
    assert loader.config == loader.best == TWO


def test_a_sample_without_a_batch_is_one() -> None:
    loader = AutoLoader(Made(lambda index: torch.zeros(3, 8, 8), 8), batch_size=None, num_workers=2)
    list(loader)
    assert loader.log.totals.samples == 8


def test_a_batchs_weight_is_known_from_the_first() -> None:
    loader = AutoLoader(Made(lambda index: torch.zeros(1 << 18), 8), batch_size=2, num_workers=2)
    next(iter(loader))
    assert loader._live.batch_bytes == 2 << 20


def test_persistent_workers_nobody_asked_for_outlive_a_break() -> None:
    order, pids = list(range(80)), set()
    loader = FixedLoader(Slow(80), sampler=order, batch_size=2, persistent_workers=True)
    for last in (20, 1, 20):  # WHEN it is early THEN the next epoch drops what still comes of it
        order.reverse()
        loader.change_to(TWO)
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == order[2 * number : 2 * number + 2]
            if number == last:
                break
        pids.add(tuple(each.pid for each in multiprocessing.active_children()))
    assert len(pids) == 1


def late(index: int) -> torch.Tensor:
    """Draws only for the last samples, as where a rare class alone is augmented."""
    return torch.tensor([index, np.random.rand() if index > 150 else 0.0], dtype=torch.float64)


def test_a_dataset_that_draws_late_is_seeded() -> None:
    def epoch(asked: int | None) -> list[Any]:
        torch.manual_seed(7)
        np.random.seed(7)
        loader = AutoLoader(Made(late, 200), batch_size=4, num_workers=asked)
        return [*(batch.tolist() for batch in loader), np.random.rand()]

    assert epoch(None) == epoch(2) == epoch(3)


class Flaky:
    """An iterator that raises once and goes on, unlike a generator."""

    def __init__(self) -> None:
        self.next, self.has_failed = 0, False

    def __iter__(self) -> Flaky:
        return self

    def __next__(self) -> int:
        if self.next == 6 and not self.has_failed:
            self.has_failed = True
            raise ConnectionError("once")
        if self.next == 12:
            raise StopIteration
        self.next += 1
        return self.next - 1


@pytest.mark.parametrize("asked", [None, 2])
def test_a_sampler_that_fails_once_goes_on(asked: int | None) -> None:
    batches = iter(AutoLoader(Numbers(12), sampler=Flaky(), batch_size=None, num_workers=asked))
    assert [int(next(batches)[0]) for _ in range(6)] == list(range(6))
    with pytest.raises(ConnectionError):
        next(batches)
    assert [int(sample[0]) for sample in batches] == list(range(6, 12))


class Held(Numbers):
    """Holds what draws random numbers, and beside it much that does not."""

    def __init__(self, source: Any, draw: Any) -> None:
        super().__init__(48)
        self.tables = [{number: {"a": [number]} for number in range(200)} for _ in range(5)]
        self.transform = SimpleNamespace(steps=[SimpleNamespace(source=source)])
        self.draw = draw

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.draw(self.transform.steps[0].source)], dtype=torch.float64)


def of_torch(rng: torch.Generator) -> torch.Tensor:
    return torch.rand((), generator=rng)


def called(draw: Callable[[], float]) -> float:
    return draw()


SOURCES: dict[str, tuple[Any, Any]] = {
    "numpy": (lambda: np.random.default_rng(5), methodcaller("random")),
    "RandomState": (lambda: np.random.RandomState(5), methodcaller("rand")),
    "Python": (lambda: random.Random(5), methodcaller("random")),
    "torch": (lambda: torch.Generator().manual_seed(5), of_torch),
    "remade": (lambda: Remade(5), called),
    "global torch": (lambda: torch.default_generator, of_torch),
    "Python's method": (lambda: random.Random(5).random, called),
    "global Python": (lambda: random.random, called),
    "global numpy": (lambda: np.random.rand, called),
}


@pytest.mark.parametrize(
    "kind",
    [
        *("torch", "global numpy"),
        *(
            pytest.param(kind, marks=pytest.mark.system)
            for kind in [*SOURCES][:8]
            if kind != "torch"
        ),
    ],
)
def test_one_seed_is_one_run_whatever_holds_generators(kind: str) -> None:
    make, draw = SOURCES[kind]

    def run(asked: int | None, method: str | None = None) -> tuple[list[Any], Any]:
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
        rows, how = Held(make(), draw), {"num_workers": asked, "multiprocessing_context": method}
        loader = AutoLoader(rows, batch_size=4, shuffle=True, **how)
        first = torch.cat(list(loader)).tolist()
        rows.transform.steps[0].source = make()  # as in set_epoch
        samples = first + torch.cat(list(loader)).tolist()
        return samples, (random.random(), torch.rand(()).item())

    runs = [run(None), run(2), run(3, "spawn")]
    assert runs[0] == runs[1] == runs[2]
    assert len({drawn for _, drawn in runs[0][0][:48]}) == 48


def test_system_entropy_in_a_dataset_is_left_alone() -> None:
    data = Held(random.SystemRandom(), methodcaller("random"))
    assert len(list(AutoLoader(data, batch_size=4))) == 12


def test_on_change_gets_the_best_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    told = list[LoaderConfig]()

    def note(found: Any) -> None:
        told.append(found.best)
        raise RuntimeError("network")

    loader = AutoLoader(Numbers(400), batch_size=2, num_workers=2, on_change=note)
    iterator, tuner = iter(loader), loader.found.tuner
    next(iterator)
    tuner._look = lambda now, fit: setattr(tuner, "best", FOUR)  # type: ignore[method-assign]
    tuner.wake = 0.0
    assert len(list(iterator)) == 199
    assert told == [FOUR]
    assert "raised" in caplog.text
    assert tuner.refused is None


def test_a_timeout_is_the_patience_with_unasked_workers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(iterator_module, "FIRST_S", 0.2)  # GIVEN no patience with a first batch

    def slow_in_workers(index: int) -> int:
        time.sleep(0.002 if torch.utils.data.get_worker_info() is None else 0.8)
        return index

    loader = FixedLoader(Made(slow_in_workers, 60), timeout=60)
    batches = iter(loader)
    loader.change_to(LoaderConfig(num_workers=1))
    seen = list[int]()
    while loader.log.rows[-1:] == [] or loader.log.rows[-1].worker < 0:
        seen += next(batches).tolist()
    assert seen == list(range(len(seen)))
    assert caplog.text == ""


@pytest.mark.parametrize("asked", [None, 2])
def test_a_copy_is_asked_for_the_same(asked: int | None) -> None:
    loader = FixedLoader(Slow(200), batch_size=2, num_workers=asked)
    begun(loader, FOUR)
    pickled = pickle.loads(pickle.dumps(loader))
    for again in (copy.copy(loader), copy.deepcopy(loader), pickled):
        assert again.found.tuner.asked.num_workers == (asked or 0)
        assert again.found.tuner.refused is None


class Forking(Slow):
    """A worker has a child, which holds the worker's end of its channel."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20 and torch.utils.data.get_worker_info() is not None and os.fork() == 0:
            time.sleep(4.0)
            os._exit(0)
        return super().__getitem__(index)


def test_a_lost_worker_whose_child_lives_is_replaced() -> None:
    loader = FixedLoader(Forking(400), batch_size=2, num_workers=2)
    iterator = begun(loader, TWO, 30)
    os.kill(iterator._workers[0].pid, signal.SIGKILL)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    assert [int(batch[0, 0]) for batch in iterator] == list(range(60, 400, 2))


def answering(asked: Any, answers: Any) -> None:
    while (index := asked.get()) is not None:
        answers.put(index)


class Served(Dataset[Any]):
    """Samples come from a process of the script's own, by pipes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.asked, self.answers = context.SimpleQueue(), context.SimpleQueue()
        self.lock, ends = context.Lock(), (self.asked, self.answers)
        self.process = context.Process(target=answering, args=ends, daemon=True)
        self.process.start()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            self.asked.put(index)
            return torch.tensor(self.answers.get())


def test_unasked_workers_keep_the_pipes_of_the_dataset() -> None:
    data = Served()
    loader = FixedLoader(data, batch_size=2)
    expected, until = [[number, number + 1] for number in range(0, 100, 2)], time.monotonic() + 20
    list(loader)
    while loader.num_workers != 2 and time.monotonic() < until:
        loader.change_to(TWO)
        assert [batch.tolist() for batch in loader] == expected
    assert [batch.tolist() for batch in loader] == expected
    assert {row.worker for row in loader.log.rows} > {-1}
    data.asked.put(None)
    data.process.join()
