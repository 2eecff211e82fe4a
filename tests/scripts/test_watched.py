"""Loaders of this process, watched by `enable()`: nothing that a script can see is other than without."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info

from autotune_loader import enable
from autotune_loader.scripts.enabling import Enabled
from autotune_loader.scripts.hook import active

NUMBERS = TensorDataset(torch.arange(48))


class Bad(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        warnings.warn("before", stacklevel=2)
        raise KeyError(f"no sample {index}")


class Stream(IterableDataset[Any]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


@dataclasses.dataclass
class Unhashable(DataLoader[Any]):
    name: str = "own"

    def __post_init__(self) -> None:
        super().__init__(NUMBERS, batch_size=8)


@pytest.fixture
def watching(capsys: pytest.CaptureFixture[str]) -> Iterator[Enabled]:
    with enable("watch") as enabled:
        yield enabled


def loaders(enabled: Enabled) -> list[Any]:
    return enabled._hook.session.loaders


def seen(loader: Any) -> list[Any]:
    return [batch[0].tolist() for batch in loader]


def raised(loader: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            list(loader)
        except Exception:
            return traceback.format_exc() + "".join(f"{each.filename}:{each.lineno}" for each in caught)
    return "".join(f"{each.message} {each.filename}:{each.lineno}" for each in caught)


def a_warning_stream() -> Any:
    loader = DataLoader(Stream(), batch_size=None)
    len(loader)
    return loader


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Bad(), batch_size=2),
        lambda: DataLoader(NUMBERS, batch_size=2, collate_fn=lambda items: items[9]),
        lambda: DataLoader(NUMBERS, batch_size=2, pin_memory=True),
        a_warning_stream,
    ],
    ids=["dataset", "collate", "pinning", "length"],
)
def test_errors_and_warnings_have_the_same_text(make: Callable[[], Any]) -> None:
    plain = raised(make())
    with enable("watch"):
        watched = raised(make())
    assert [line for line in watched.splitlines() if "0x" not in line] == [
        line for line in plain.splitlines() if "0x" not in line
    ]


def test_the_loader_is_not_changed_and_has_its_own_iterator(watching: Enabled) -> None:
    loader = DataLoader(NUMBERS, batch_size=8)
    own = dict(vars(loader))
    batches = iter(loader)

    assert sum(len(x) for (x,) in batches) == 48
    assert vars(loader) == own
    assert isinstance(batches, torch.utils.data.dataloader._SingleProcessDataLoaderIter)
    assert type(batches).__name__ == "_SingleProcessDataLoaderIter"
    assert (batches._dataset, batches._collate_fn, batches._num_yielded) == (NUMBERS, loader.collate_fn, 6)
    assert inspect.signature(DataLoader) == inspect.signature(DataLoader.__init__).replace(
        parameters=list(inspect.signature(DataLoader.__init__).parameters.values())[1:]
    )
    assert seen(pickle.loads(pickle.dumps(loader))) == seen(copy.deepcopy(loader)) == seen(loader)
    assert loaders(watching)[0].name.startswith("tests/scripts/test_watched.py:")


def test_threads_may_iterate_one_loader_at_once(watching: Enabled) -> None:
    loader, found = DataLoader(NUMBERS, batch_size=4), list[list[Any]]()
    threads = [threading.Thread(target=lambda: found.append(seen(loader))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[list(range(first, first + 4)) for first in range(0, 48, 4)]] * 4
    assert loaders(watching)[0].log.batches == 48


def test_loaders_of_one_line_are_one_unless_they_are_iterated_together(watching: Enabled) -> None:
    def make(batch_size: int = 4) -> DataLoader[Any]:
        return DataLoader(NUMBERS, batch_size=batch_size)

    for _ in range(2):
        list(make())  # made anew for each epoch
    first, second = make(), make()
    one, other = iter(first), iter(second)  # both at once
    next(one), next(other)
    list(make(batch_size=8))

    line = f"tests/scripts/test_watched.py:{make.__code__.co_firstlineno + 1}"
    assert [(each.name, each.log.batches) for each in loaders(watching)] == [
        (line, 25),
        (f"{line} TensorDataset", 1),
        (f"{line} TensorDataset 2", 6),
    ]


@pytest.mark.parametrize("verb", ["watch", pytest.param("run", marks=pytest.mark.process)])  # whose proof forks
def test_samples_are_those_of_the_dataset_whatever_a_batch_holds(verb: Any) -> None:
    with enable(verb) as enabled:
        for _ in range(2):
            loader = DataLoader(TensorDataset(torch.arange(18.0)), batch_size=4, collate_fn=lambda items: items[:1])
            assert len(list(loader)) == 5
        (known,) = loaders(enabled)
        assert (known.log.batches, known.log.samples, known.log.epochs) == (10, 36, 2)


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 7


@pytest.mark.parametrize("verb", ["watch", pytest.param("run", marks=pytest.mark.process)])  # whose proof forks
def test_loaders_without_a_length_or_a_batch_are_iterated_once(
    verb: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = list[Any]()
    original = torch.utils.data.dataloader._SingleProcessDataLoaderIter.__init__
    monkeypatch.setattr(
        torch.utils.data.dataloader._SingleProcessDataLoaderIter,
        "__init__",
        lambda iterator, loader: (made.append(iterator), original(iterator, loader))[1],
    )
    with enable(verb):
        assert next(iter(DataLoader(NUMBERS, sampler=Endless())))[0].item() == 7
        assert list(DataLoader(TensorDataset(torch.empty(0)), batch_size=4)) == []
    assert len(made) == (2 if verb == "watch" else 0)


@pytest.mark.parametrize(
    "use",
    [
        lambda: [batch for batch, _ in zip(DataLoader(NUMBERS, batch_size=8), range(2), strict=False)],
        lambda: (x for x in DataLoader(NUMBERS, batch_size=8)).close(),
        lambda: list(Unhashable()),
        lambda: list(DataLoader(Stream(), batch_size=None)),
        lambda: next(iter(DataLoader(NUMBERS))),
        lambda: iter(DataLoader(NUMBERS)),
        lambda: hasattr(iter(DataLoader(NUMBERS)), "__next__"),
    ],
)
def test_whatever_is_done_with_a_loader_leaves_none_under_way(watching: Enabled, use: Callable[[], Any]) -> None:
    use()
    assert [each.log.running for each in loaders(watching)] == [0]


def test_enabling_again_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    from multiprocessing import util

    with enable("watch"):
        list(DataLoader(NUMBERS))
    before, finders = len(util._finalizer_registry), list(sys.meta_path)
    for _ in range(3):
        with enable("watch"):
            list(DataLoader(NUMBERS))
    assert (len(util._finalizer_registry), sys.meta_path, active) == (before, finders, [])
    assert capsys.readouterr().err.count("48 batches, ") == 4
    assert type(iter(DataLoader(NUMBERS))) is torch.utils.data.dataloader._SingleProcessDataLoaderIter


def identity(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert (type(info.dataset), sorted(vars(info.dataset))) == (TensorDataset, ["tensors"])


@pytest.mark.process
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_get_the_users_own_dataset_and_tell_when_batches_were_made(watching: Enabled, context: str) -> None:
    loader = DataLoader(NUMBERS, batch_size=8, num_workers=2, worker_init_fn=identity, multiprocessing_context=context)

    assert seen(loader) == seen(DataLoader(NUMBERS, batch_size=8))
    traces = loaders(watching)[0].log.latest(9)
    assert {trace.worker for trace in traces} == {0, 1}
    assert all(trace.fetch_start < trace.collate_end <= trace.received for trace in traces)


@pytest.mark.process
def test_workers_end_as_soon_as_nobody_wants_their_batches(watching: Enabled) -> None:
    batches = iter(DataLoader(NUMBERS, batch_size=8, num_workers=1))
    next(batches)
    (worker,) = batches._workers  # type: ignore[attr-defined]
    del batches
    assert not worker.is_alive()


@pytest.mark.process
def test_persistent_workers_begin_epoch_after_epoch(watching: Enabled) -> None:
    loader = DataLoader(NUMBERS, batch_size=8, num_workers=1, persistent_workers=True)
    assert iter(loader) is iter(loader)
    assert [len(seen(loader)) for _ in range(3)] == [6, 6, 6]
    assert (loaders(watching)[0].log.epochs, loaders(watching)[0].log.batches) == (3, 18)
