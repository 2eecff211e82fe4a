"""An AutoLoader that tunes itself, with real workers: what it delivers, keeps, saves and survives."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

from autotune_loader import AutoLoader, LoaderConfig, TuningResult, load_config
from autotune_loader.live.budgets import Budgets
from autotune_loader.live.epoch import EpochIterator
from autotune_loader.live.loader import FIRST_WORKERS
from studies.live.schedules import Numbers, Stream

pytestmark = pytest.mark.process


class Waiting(Numbers):
    """A batch of 8 takes 32 ms of waiting."""

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.004)
        return super().__getitem__(index)


class OnlyHere(Numbers):
    """Cannot be read in a worker, as a handle that does not survive a fork."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            raise RuntimeError("this connection belongs to another process")
        return super().__getitem__(index)


class Broken(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("sample 5 is broken")
        return super().__getitem__(index)


def firsts(batches: Any) -> list[int]:
    return [int(batch[0, 0]) for batch in batches]


def stepping(loader: Any) -> Iterator[Any]:
    for batch in loader:
        yield batch
        time.sleep(0.002)


def test_it_tunes_itself_in_mid_epoch_and_tells_what_it_found(tmp_path: Path) -> None:
    told: list[Any] = []
    loader = AutoLoader(Waiting(1600), batch_size=8, on_change=told.append)
    deadline = time.monotonic() + 60
    while not told and time.monotonic() < deadline:
        assert firsts(stepping(loader)) == list(range(0, 1600, 8))

    assert any(change.reason == "change" for change in loader.traces.changes)
    assert told[0].config == loader.config
    assert loader.best.num_workers > FIRST_WORKERS
    history = loader.history
    assert list(history["event"])[:2] == ["block", "block"]
    assert history["samples_per_s"].iloc[1] > history["samples_per_s"].iloc[0]
    assert "Chosen" in loader.report()
    assert "Too few batches" not in loader.verdict.sentence

    loader.save(tmp_path / "loader.json")
    result = TuningResult.load(tmp_path / "loader.json")
    assert (result.origin, result.best) == ("live", loader.best)
    assert load_config(tmp_path / "loader.json") == loader.best
    assert AutoLoader(Waiting(8), batch_size=8).config == loader.best  # found beside the script

    (tmp_path / "loader.json").unlink()
    assert AutoLoader(Waiting(1600), batch_size=8).config == told[-1].config  # the cache knows these data
    assert AutoLoader(Waiting(8), batch_size=8).config.num_workers == FIRST_WORKERS
    assert AutoLoader(Waiting(1600), batch_size=8, max_workers=1).config.num_workers == 1


def test_who_only_watches_changes_nothing_and_still_tells() -> None:
    loader = AutoLoader(Waiting(640), batch_size=8, tune=False, num_workers=1)
    for _ in loader:
        pass

    assert {change.config.num_workers for change in loader.traces.changes} == {1}
    assert loader.history["waiting"].iloc[0] > 0.5


@pytest.mark.parametrize("batches", [3, 20])
def test_loaders_that_are_made_anew_for_each_epoch_settle_as_one_does(batches: int) -> None:
    told: list[Any] = []
    deadline, epochs = time.monotonic() + 60, 0
    while not told and time.monotonic() < deadline:
        loader = AutoLoader(Waiting(8 * batches), batch_size=8, on_change=told.append, max_workers=4)
        assert firsts(stepping(loader)) == list(range(0, 8 * batches, 8))
        epochs += 1

    assert told
    assert loader.traces.end > batches * epochs / 2
    assert AutoLoader(Waiting(8 * batches), batch_size=8, max_workers=3).traces.end == 0


def test_what_a_loader_was_told_to_run_with_is_nothing_for_the_next() -> None:
    for _ in range(2):
        loader = AutoLoader(Numbers(20), batch_size=2)
        assert len(list(loader)) == 10
        assert loader.config.num_workers == FIRST_WORKERS
        loader.change_to(LoaderConfig())


def test_a_frozen_loader_stays_as_it_is() -> None:
    loader = AutoLoader(Waiting(400), batch_size=8, num_workers=2)
    loader.freeze()
    list(loader)

    assert len(loader.traces.changes) == 1
    assert loader.best == loader.config == LoaderConfig(num_workers=2)


def test_a_dataset_that_bears_no_workers_is_loaded_without_them() -> None:
    loader = AutoLoader(OnlyHere(40), batch_size=2)

    assert loader.config.num_workers == FIRST_WORKERS
    assert firsts(loader) == list(range(0, 40, 2))
    assert firsts(loader) == list(range(0, 40, 2))
    assert loader.config.num_workers == 0


def test_a_broken_sample_raises_the_users_own_error_and_the_loop_may_go_on() -> None:
    iterator = iter(AutoLoader(Broken(12), batch_size=2))
    seen, errors = [], 0
    while True:
        try:
            seen.append(int(next(iterator)[0, 0]))
        except KeyError:
            errors += 1
        except StopIteration:
            break

    assert (seen, errors) == ([0, 2, 6, 8, 10], 1)


class Unsendable(Numbers):
    def __getstate__(self) -> Any:
        raise TypeError("cannot pickle a lock")


def test_an_unpicklable_dataset_under_spawn_is_loaded_here_unless_workers_were_asked_for() -> None:
    loader = AutoLoader(Unsendable(8), batch_size=2, multiprocessing_context="spawn")

    assert firsts(loader) == [0, 2, 4, 6]
    assert loader.config.num_workers == 0


def test_a_daemonic_process_loads_by_itself() -> None:
    queue = multiprocessing.Queue()
    child = multiprocessing.Process(target=lambda: queue.put(firsts(AutoLoader(Numbers(8), batch_size=2))), daemon=True)
    child.start()

    assert queue.get(timeout=60) == [0, 2, 4, 6]
    child.join()


def test_a_stream_is_only_watched() -> None:
    loader = AutoLoader(Stream(24), batch_size=2)

    assert len(list(loader)) == 12
    assert loader.config.num_workers == 0


@pytest.mark.parametrize("most", [0, 1])
def test_it_starts_within_its_budget(most: int) -> None:
    loader = AutoLoader(Numbers(40), batch_size=2, max_workers=most)

    assert loader.config.num_workers == most
    assert len(list(loader)) == 20


def test_two_iterators_of_one_loader_each_deliver_everything() -> None:
    loader = AutoLoader(Numbers(20), batch_size=2)
    pairs = list(zip(loader, loader, strict=True))

    assert [(int(a[0, 0]), int(b[0, 0])) for a, b in pairs] == [(i, i) for i in range(0, 20, 2)]


def dividing(loader: Any) -> None:
    for _ in loader:
        _ = 1 / 0


def test_break_and_exceptions_leave_nothing_and_the_next_epoch_is_whole() -> None:
    loader = AutoLoader(Numbers(40), batch_size=2)
    for _ in loader:
        break
    with pytest.raises(ZeroDivisionError):
        dividing(loader)

    assert len(list(loader)) == 20


def test_copies_and_pickles_tune_for_themselves() -> None:
    loader = AutoLoader(Numbers(20), batch_size=2)
    list(loader)

    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert firsts(other) == list(range(0, 20, 2))


def test_where_starting_workers_is_much_of_an_epoch_they_are_kept() -> None:
    loader = AutoLoader(Waiting(64), batch_size=8)
    for _ in range(3):
        list(loader)

    assert loader.config.persistent_workers
    reasons = [change.reason for change in loader.traces.changes]
    assert reasons.count("epoch") <= 2


def test_a_pool_that_somebody_still_holds_does_not_outlive_its_test(close_pools: Callable[[], None]) -> None:
    iterator = iter(AutoLoader(Numbers(40), batch_size=2))
    next(iterator)
    assert multiprocessing.active_children()

    close_pools()
    assert multiprocessing.active_children() == []
    del iterator


def test_an_iterator_lives_on_without_its_loader() -> None:
    iterator = iter(AutoLoader(Waiting(400), batch_size=8))

    assert isinstance(iterator, EpochIterator)
    assert firsts(iterator) == list(range(0, 400, 8))


def test_what_was_learnt_is_part_of_the_state() -> None:
    first = AutoLoader(Numbers(20), batch_size=2, num_workers=3, tune=False)
    next(iter(first))
    second = AutoLoader(Numbers(20), batch_size=2)
    second.load_state_dict(first.state_dict())

    assert second.config.num_workers == 3
    assert len(list(second)) == 9


def test_idle_workers_of_one_loader_go_where_another_needs_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = LoaderConfig(num_workers=2, persistent_workers=True)
    validation = AutoLoader(Numbers(20), batch_size=2, config=kept, tune=False)
    training = AutoLoader(Numbers(20), batch_size=2, config=LoaderConfig(num_workers=1), tune=False)
    list(validation)
    list(training)
    assert len(multiprocessing.active_children()) == 2

    monkeypatch.setattr(Budgets, "fits_now", lambda *_: len(multiprocessing.active_children()) == 0)
    list(training)
    assert multiprocessing.active_children() == []
    monkeypatch.undo()

    assert firsts(validation) == list(range(0, 20, 2))
