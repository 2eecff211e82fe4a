"""Which loaders are one: by line and contents, on every rank and in every epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from autotune_loader.pipeline.site import Site
from autotune_loader.values.lines import Line

LINE = Line("/job/train.py", 41)
DATA = TensorDataset(torch.arange(16.0))


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        raise RuntimeError("nobody knows")


@pytest.mark.parametrize(
    ("loader", "contents"),
    [
        (DataLoader(DATA, batch_size=4), "TensorDataset[16], batches of 4"),
        (DataLoader(DATA, batch_size=4, shuffle=True), "TensorDataset[16], batches of 4, shuffled"),
        (
            DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 8, True)),
            "TensorDataset[16], batches of 8, shuffled",
        ),
        (DataLoader(DATA, batch_size=None), "TensorDataset[16]"),
        (DataLoader(Endless()), "Endless, batches of 1"),
        (object(), "NoneType"),
    ],
)
def test_a_site_says_what_its_loader_reads(loader: Any, contents: str) -> None:
    assert Site.of(loader, LINE).contents == contents


def test_loaders_made_anew_are_one_and_others_are_not() -> None:
    first, again = (Site.of(DataLoader(TensorDataset(torch.rand(16)), batch_size=4), LINE) for _ in range(2))

    assert first == again
    assert first != Site.of(DataLoader(DATA, batch_size=8), LINE)
    assert first != Site.of(DataLoader(DATA, batch_size=4), Line("/job/train.py", 42))


def test_ranks_with_shards_of_their_own_have_one_key() -> None:
    shard = DataLoader(TensorDataset(torch.rand(15)), batch_size=4)

    assert Site.of(shard, Line("/other/train.py", 41)).key == Site.of(DataLoader(DATA, batch_size=4), LINE).key


def test_the_name_stays_where_the_script_changes_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = str(Line(__file__, 3))
    monkeypatch.chdir(tmp_path)
    assert str(Line(__file__, 3)) == name
