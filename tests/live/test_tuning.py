"""An AutoLoader that tunes itself, with real workers: what it delivers, tells, saves and survives."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from autotune_loader import AutoLoader, LoaderConfig, TuningResult, load_config
from tests.support.schedules import Slow, Where

pytestmark = pytest.mark.process
MOST_S = 60.0


class Waiting(Slow):
    """A batch of 8 takes 32 ms of waiting."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples, seconds=0.004)


def firsts(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def stepping(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield batch
        time.sleep(0.002)


def trained_until(make: Callable[[], Any], is_done: Callable[[Any], Any], samples: int = 1600) -> Any:
    """Epochs of a loader, each of them whole and in order, until something has happened."""
    deadline = time.monotonic() + MOST_S
    while True:
        loader = make()
        assert firsts(stepping(loader)) == list(range(0, samples, 8))
        if is_done(loader):
            return loader
        assert time.monotonic() < deadline


def test_it_begins_as_asked_tunes_in_mid_epoch_and_tells_what_it_found(tmp_path: Path) -> None:
    told: list[Any] = []
    loader = AutoLoader(Waiting(800), batch_size=8, on_change=told.append)
    trained_until(lambda: loader, lambda _: told, samples=800)

    assert loader.traces.changes[0].config == LoaderConfig()
    assert any(change.reason == "change" for change in loader.traces.changes)
    assert loader.best.num_workers > 1
    assert loader.num_workers == 0  # what was asked for
    history = loader.history
    assert history["samples_per_s"].iloc[1] > history["samples_per_s"].iloc[0]
    assert str(loader.best) in loader.report()

    loader.save(tmp_path / "loader.json")
    result = TuningResult.load(tmp_path / "loader.json")
    assert (result.found_by, result.best) == ("autoloader", loader.best)
    assert load_config(tmp_path / "loader.json") == loader.best


class Photos(Waiting):
    def unpack(self) -> None:
        end = time.thread_time() + 0.006
        while time.thread_time() < end:
            pass

    def __getitem__(self, index: int) -> torch.Tensor:
        self.unpack()
        return super().__getitem__(index)


@pytest.mark.parametrize("stages", [True, False])
def test_who_only_watches_changes_nothing_and_tells_what_was_asked_for(stages: bool) -> None:
    loader, begun = AutoLoader(Photos(9999), batch_size=8, tune=False, num_workers=1, stages=stages), time.monotonic()
    for number, _ in enumerate(loader):
        if number % 20 == 19 and ("unpack" in loader.report() or time.monotonic() - begun > (6 if stages else 2)):
            break

    assert {change.config.num_workers for change in loader.traces.changes} == {1}
    assert loader.history["waiting"].iloc[0] > 0.5
    assert ("unpack" in loader.report()) is stages


def test_loaders_that_are_made_anew_for_each_epoch_settle_as_one_does() -> None:
    told: list[Any] = []
    loader = trained_until(
        lambda: AutoLoader(Waiting(160), batch_size=8, num_workers=1, on_change=told.append, max_workers=4),
        lambda _: told,
        samples=160,
    )

    assert loader.traces.end > 40
    for others in ({"max_workers": 3}, {"stages": True}, {"max_cores": 1}, {"step_threads": "auto"}):
        asked = {"max_workers": 4, **others}
        assert AutoLoader(Waiting(160), batch_size=8, num_workers=1, **asked).traces.end == 0  # type: ignore[arg-type]


def test_the_tuner_may_fail_and_training_may_not(caplog: pytest.LogCaptureFixture) -> None:
    # GIVEN a logger of the user's that raises where it is told what was settled on
    settled: list[Any] = []

    def tell(event: Any) -> None:
        settled.append(event)
        raise RuntimeError("the logger is closed")

    loader = AutoLoader(Waiting(800), batch_size=8, num_workers=1, max_workers=3, on_change=tell)
    with caplog.at_level(logging.WARNING, "autotune_loader"):
        trained_until(lambda: loader, lambda _: settled, samples=800)
        assert firsts(loader) == list(range(0, 800, 8))

    assert "tuning has ended" in caplog.text
    assert str(loader.best) in loader.report()


PORTS = [2000, 2004]


class Simulated(Waiting):
    port = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([super().__getitem__(index)[0], self.port])


def connect(worker: int) -> None:
    get_worker_info().dataset.port = PORTS[worker]  # type: ignore[union-attr]


class OwnRandom(Waiting):
    """Each worker has a copy of its generator, and so draws the same."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.own = random.Random(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([super().__getitem__(index)[0], self.own.random() > 2])


@pytest.mark.parametrize(
    ("dataset", "init", "seen"), [(Where, None, {2}), (Simulated, connect, {2000, 2004}), (OwnRandom, None, {0})]
)
def test_the_number_of_workers_stays_where_samples_may_depend_on_it(
    dataset: Any, init: Any, seen: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    loader = AutoLoader(dataset(1600), batch_size=8, num_workers=2, worker_init_fn=init)
    begun, found = time.monotonic(), set()
    with caplog.at_level(logging.INFO, "autotune_loader"):
        while time.monotonic() - begun < 2:
            found |= {int(value) for batch in stepping(loader) for value in batch[:, -1]}

    assert found == seen
    assert {change.config.num_workers for change in loader.traces.changes} == {2}
    assert "No other number of workers is tried" in loader.report()


def test_an_iterator_lives_on_without_its_loader() -> None:
    iterator = iter(AutoLoader(Waiting(400), batch_size=8, num_workers=2))

    assert firsts(iterator) == list(range(0, 400, 8))
