"""A batch that is late holds up nobody: all come in order, each once, whoever makes them."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from autotune_loader.autoloader import live as live_module
from autotune_loader.values import LoaderConfig
from tests.support.bursts import Made
from tests.support.schedules import FixedLoader

pytestmark = pytest.mark.process

SLOW = 40


def late(index: int) -> torch.Tensor:
    """One sample takes as long as two hundred others."""
    time.sleep(0.4 if index == SLOW else 0.002)
    return torch.tensor([index, os.getpid()])


def quick(index: int) -> torch.Tensor:
    time.sleep(0.002)
    return torch.tensor([index, os.getpid()])


def fixed(dataset: Made, *, num_workers: int, **rest: Any) -> FixedLoader:
    loader = FixedLoader(dataset, num_workers=num_workers, **rest)
    loader.change_to(loader.config)  # it is frozen from the first time that it is asked
    return loader


class Order:
    """A sampler that notes how far it was drawn."""

    def __init__(self, samples: int, *, draws: bool = False) -> None:
        self.samples, self.draws, self.given = samples, draws, 0

    def __iter__(self) -> Iterator[int]:
        while self.given < self.samples:
            self.given += 1
            if self.draws:
                random.random()
            yield self.given - 1


@pytest.mark.parametrize("asked", [None, 4])
def test_while_a_batch_is_late_others_are_made(
    asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a sampler of the script's own, of which 16 draws have shown that it is quiet
    monkeypatch.setattr(live_module, "MOST_AHEAD", 50)
    order, seen = Order(200), list[int]()
    loader = FixedLoader(Made(late, 200), batch_size=1, sampler=order, num_workers=asked)
    loader.change_to(LoaderConfig(num_workers=4))
    for batch in loader:
        seen.append(int(batch[0, 0]))
        if seen[-1] == SLOW:  # WHEN the loop has waited THEN what is behind it has been made
            assert 30 < order.given - len(seen) <= 4 * 2 + 50
    assert seen == list(range(200))


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 2, "shuffle": True},
        pytest.param({"batch_size": None}, marks=pytest.mark.system),
    ],
)
def test_a_heavy_tail_of_batches_changes_nothing(arguments: dict[str, Any]) -> None:
    def tailed(index: int) -> torch.Tensor:
        time.sleep(random.Random(index).paretovariate(1.2) / 2000)
        return torch.tensor(index)

    def epochs(make: Any) -> list[Any]:
        torch.manual_seed(3)
        loader = make(Made(tailed, 400), num_workers=4, persistent_workers=True, **arguments)
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    assert epochs(AutoLoader) == epochs(DataLoader)


def with_init(worker: int) -> None:
    os.environ["WORKER"] = str(worker)


@pytest.mark.parametrize("arguments", [{"tune": False}, {"worker_init_fn": with_init}])
def test_where_the_number_stays_workers_take_turns(arguments: dict[str, Any]) -> None:
    loader = AutoLoader(Made(late, 200), batch_size=2, num_workers=4, **arguments)
    pids = [int(batch[0, 1]) for batch in loader]
    assert len(set(pids[:4])) == 4
    assert pids == [pids[number % 4] for number in range(100)]


def test_a_drawing_sampler_is_ahead_as_dataloaders() -> None:
    order, furthest = Order(120, draws=True), 0
    loader = fixed(Made(late, 120), batch_size=1, sampler=order, num_workers=4)
    for number, _ in enumerate(loader):
        furthest = max(furthest, order.given - number - 1)
    assert furthest == 4 * 2


class Stuck(Made):
    """The first read of one sample takes a minute."""

    def __init__(self, mark: Path) -> None:
        super().__init__(torch.tensor, 300)
        self.mark = mark

    def __reduce__(self) -> Any:
        return type(self), (self.mark,)

    def __getitem__(self, index: int) -> Any:
        if index == 100 and not self.mark.exists():
            self.mark.touch()
            time.sleep(60.0)
        time.sleep(0.002)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("asked", "workers", "kept"),
    [(None, 3, False), (3, 3, True), (3, 1, False)],
)
def test_a_stuck_read_is_done_by_another(
    asked: int | None, workers: int, kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = FixedLoader(
        Stuck(tmp_path / "mark"), batch_size=4, num_workers=asked, persistent_workers=kept
    )
    loader.change_to(LoaderConfig(num_workers=workers))
    begun = time.monotonic()
    for _ in range(2):
        assert torch.cat(list(loader)).tolist() == list(range(300))
    assert time.monotonic() - begun < 30  # of 60
    assert [each for each in caplog.records if each.levelname == "WARNING"] == []
    assert (tmp_path / "mark").exists()
    assert loader.num_workers == workers


def test_kills_and_changes_while_others_are_ahead(caplog: pytest.LogCaptureFixture) -> None:
    def tailed(index: int) -> int:
        time.sleep(0.2 if index % 32 == 7 else 0.002)
        return index

    rng, seen = random.Random(0), list[int]()
    loader = fixed(Made(tailed, 640), batch_size=1, num_workers=4)
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        seen += batch.tolist()
        if number % 64 == 5:
            os.kill(rng.choice(iterator._workers).pid, signal.SIGKILL)
        if number % 70 == 30:
            loader.change_to(
                LoaderConfig(num_workers=rng.randint(4, 6), prefetch_factor=rng.randint(1, 3))
            )
    assert seen == list(range(640))
    assert caplog.text.count("Its batches are fetched again") >= 5


@pytest.mark.parametrize("fetch", [late, quick])
def test_generators_draw_the_same_whether_batches_are_late(fetch: Any) -> None:
    orders = []
    for kind in (DataLoader, fixed):
        generator = torch.Generator().manual_seed(0)
        loader = kind(Made(fetch, 120), shuffle=True, generator=generator, num_workers=2)
        for _ in itertools.islice(loader, 100):
            pass
        orders.append([int(batch[0, 0]) for batch in loader])
    assert orders[0] == orders[1]


def test_who_is_frozen_draws_no_further_ahead() -> None:
    order = Order(400)
    loader = AutoLoader(Made(late, 400), sampler=order, num_workers=2)
    loader.found.tuner.wake = math.inf
    iterator = iter(loader)
    for _ in range(SLOW + 1):
        next(iterator)
    assert order.given > SLOW + 1 + 4
    loader.freeze()
    seen = SLOW + 1
    while order.given > seen + 4:
        next(iterator)
        seen += 1
    assert order.given < 400


def test_a_job_outlives_its_lost_copy(tmp_path: Path) -> None:
    def waits(index: int) -> torch.Tensor:
        while index >= 12 and not (tmp_path / "go").exists():
            time.sleep(0.002)
        return torch.tensor([index])

    loader = fixed(Made(waits, 40), num_workers=4)
    iterator = iter(loader)
    for _ in range(8):
        next(iterator)
    first = next(
        each for each in iterator._index_queues if any(map(iterator._is_awaited, each.jobs))
    )
    last = next(each for each in iterator._index_queues if each is not first)
    job = next(each for each in first.jobs if iterator._is_awaited(each))
    last.jobs.append(job)
    iterator._task_info[job] = (last.number,)
    iterator._give_again([last])
    assert iterator._task_info[job][0] == first.number
    last.jobs.remove(job)
    (tmp_path / "go").touch()
    assert len(list(iterator)) == 32
    # AND what is given again is in order
    iterator._queued, iterator._hand_out = deque([40, 31]), list
    iterator._give_again([])
    assert list(iterator._queued) == [31, 40]
