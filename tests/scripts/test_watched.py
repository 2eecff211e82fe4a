"""Loaders of this process, watched by `enable()`; that a script sees nothing of it is shown by tests/live/test_as_torch.py."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing import util
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from autotune_loader import enable
from autotune_loader.scripts.enabling import Enabled
from autotune_loader.scripts.hook import active

NUMBERS = TensorDataset(torch.arange(48))


@pytest.fixture
def watching(capsys: pytest.CaptureFixture[str]) -> Iterator[Enabled]:
    with enable("watch") as enabled:
        yield enabled


def test_loaders_of_one_line_are_one_unless_they_are_iterated_together(watching: Enabled) -> None:
    def make(batch_size: int = 4) -> DataLoader[Any]:
        return DataLoader(NUMBERS, batch_size=batch_size)

    for _ in range(2):  # made anew for each epoch
        list(make())
        for _ in make():
            break
    for pair in zip(make(), make(), strict=True):  # both at once
        assert len(pair) == 2
        break
    list(make(batch_size=8))

    line = f"tests/scripts/test_watched.py:{make.__code__.co_firstlineno + 1}"
    assert [(each.name, each.log.batches) for each in watching._hook.session.loaders] == [
        (line, 27),
        (f"{line} TensorDataset", 1),
        (f"{line} TensorDataset 2", 6),
    ]


@pytest.mark.parametrize("verb", ["watch", pytest.param("run", marks=pytest.mark.process)])  # its proof forks
def test_samples_are_those_of_the_dataset_also_of_loaders_without_a_length_or_a_batch(
    verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with enable(verb) as enabled:
        for _ in range(2):
            loader = DataLoader(TensorDataset(torch.arange(18.0)), batch_size=4, collate_fn=lambda items: items[:1])
            assert len(list(loader)) == 5
        assert next(iter(DataLoader(NUMBERS, sampler=itertools.repeat(7))))[0].item() == 7
        assert list(DataLoader(TensorDataset(torch.empty(0)), batch_size=4)) == []
        log = enabled._hook.session.loaders[0].log
    assert (log.batches, log.samples, log.epochs) == (10, 36, 2)


def test_enabling_again_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with enable("watch"):
        list(DataLoader(NUMBERS))
    before, finders = len(util._finalizer_registry), list(sys.meta_path)
    for _ in range(3):
        with enable("watch"):
            list(DataLoader(NUMBERS))
    assert (len(util._finalizer_registry), sys.meta_path, active) == (before, finders, [])
    assert capsys.readouterr().err.count("48 batches, ") == 4
    assert type(iter(DataLoader(NUMBERS))) is _SingleProcessDataLoaderIter


@pytest.mark.process
@pytest.mark.parametrize("verb", ["watch", "run"])
def test_kept_workers_end_with_their_loader(verb: Any) -> None:
    with enable(verb):
        loader = DataLoader(NUMBERS, batch_size=8, num_workers=1, persistent_workers=True)
        list(loader)
        assert len(multiprocessing.active_children()) == 1
        del loader
        assert not multiprocessing.active_children()


@pytest.mark.process
def test_workers_tell_when_batches_were_made_and_end_as_soon_as_nobody_wants_theirs(watching: Enabled) -> None:
    batches = iter(DataLoader(NUMBERS, batch_size=8, num_workers=1))
    for _ in range(4):
        next(batches)
    traces = watching._hook.session.loaders[0].log.latest(9)
    assert {trace.worker for trace in traces} == {0}
    assert all(trace.fetch_start < trace.collate_end <= trace.received for trace in traces)

    (worker,) = batches._workers  # type: ignore[attr-defined]
    del batches
    assert not worker.is_alive()
