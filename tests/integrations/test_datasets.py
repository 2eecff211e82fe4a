from __future__ import annotations

from typing import Any

import pytest
import torch

from autotune_loader import tune
from autotune_loader.integrations.datasets import as_shards, as_tensors

datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.system


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), y)}


@pytest.fixture
def rows() -> Any:
    return datasets.Dataset.from_dict(
        {"x": [[i / 512, 1.0, 0.0] for i in range(512)], "y": [i % 2 for i in range(512)]}
    )


def train_an_epoch(loader: Any) -> int:
    model, losses = Model(), []
    for batch in loader:
        losses.append(model(**batch)["loss"])
        losses[-1].backward()
    assert model.layer.weight.grad is not None
    return len(losses)


def test_a_map_style_dataset_is_tuned_and_trained_on(rows: Any, quick: Any) -> None:
    # GIVEN rows in torch format
    dataset = as_tensors(rows)

    # WHEN they are tuned THEN the tuned loader trains a whole epoch
    result = tune(dataset, Model(), batch_size=32, **quick)
    assert train_an_epoch(result.make_loader(dataset, shuffle=True)) == 16


def test_an_iterable_dataset_gets_no_more_workers_than_shards(rows: Any, quick: Any) -> None:
    # GIVEN the same rows as a stream of two shards
    dataset = as_shards(rows, num_shards=2)

    # WHEN it is tuned
    result = tune(dataset, Model(), batch_size=32, **quick)

    # THEN no worker is left without a shard, and every row comes once
    assert max(trial.config.num_workers for trial in result.trials) <= 2
    samples = sum(len(batch["y"]) for batch in result.make_loader(dataset))
    assert samples == 512
    assert train_an_epoch(result.make_loader(dataset)) >= 16


def test_a_format_that_is_set_is_kept(rows: Any) -> None:
    # GIVEN rows in a format of the user's WHEN THEN it stays
    formatted = rows.with_format("numpy")
    assert as_tensors(formatted) is formatted


def test_a_stream_cannot_be_cut_into_other_shards(rows: Any) -> None:
    with pytest.raises(TypeError, match="iterable already, with 4 shards"):
        as_shards(rows.to_iterable_dataset(num_shards=4))
