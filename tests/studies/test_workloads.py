"""The studies' workloads reach another process whole, and give what their names say."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from studies import workloads

NAMES = sorted(set(workloads.WORKLOADS) - {"jpeg"})  # which makes the demo's pictures in the user's cache


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_survives_pickling_and_yields_a_batch(name: str) -> None:
    workload = pickle.loads(pickle.dumps(workloads.WORKLOADS[name]()))
    batch = next(iter(DataLoader(workload.dataset, batch_size=workload.batch_size)))
    if name == "text":
        assert workload.model(**batch).loss.requires_grad
        assert torch.equal(batch["input_ids"][3], workload.dataset[3]["input_ids"])
        batch = batch["labels"]
    assert len(batch[0] if isinstance(batch, list) else batch) == workload.batch_size


def test_a_repeated_dataset_fetches_as_the_one_it_repeats() -> None:
    plain, batched = torch.arange(6), workloads.TextDataset(8)
    assert len(workloads.repeated(plain, 3)) == 18
    assert workloads.repeated(plain, 3)[7] == plain[1]
    assert not hasattr(workloads.repeated(plain, 3), "__getitems__")
    twice = workloads.repeated(batched, 2).__getitems__([1, 9])
    assert torch.equal(twice[0]["input_ids"], twice[1]["input_ids"])
