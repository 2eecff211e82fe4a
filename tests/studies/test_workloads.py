"""The studies' workloads reach another process whole, and give what their names say."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from studies import workloads

# These read the demo's pictures, or files that they keep in the user's cache.
FILL_THE_CACHE = {"jpeg", "guide", "lesson", "article"}
NAMES = sorted({*workloads.WORKLOADS, *workloads.DOCUMENTS} - FILL_THE_CACHE)


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES)
def test_a_workload_survives_pickling_and_yields_a_batch(name: str) -> None:
    workload = pickle.loads(pickle.dumps((workloads.WORKLOADS | workloads.DOCUMENTS)[name]()))
    batch = next(iter(DataLoader(workload.dataset, batch_size=workload.batch_size)))
    if name == "text":
        assert workload.model(**batch).loss.requires_grad
        assert torch.equal(batch["input_ids"][3], workload.dataset[3]["input_ids"])
        batch = batch["labels"]
    assert len(batch[0] if isinstance(batch, list) else batch) == workload.batch_size


def test_memory_mapped_pictures_are_written_once_and_read_in_any_process(tmp_path: Path) -> None:
    made = workloads.MemmapDataset(tmp_path / "pictures.bin", 4, 8)
    written = (tmp_path / "pictures.bin").read_bytes()
    found = pickle.loads(pickle.dumps(workloads.MemmapDataset(tmp_path / "pictures.bin", 4, 8)))
    samples = []
    for dataset in (made, found):
        torch.manual_seed(0)
        samples.append(dataset[3][0])
    assert torch.equal(*samples)
    assert samples[0].shape == (3, 8, 8)
    assert (tmp_path / "pictures.bin").read_bytes() == written


def test_a_repeated_dataset_fetches_as_the_one_it_repeats() -> None:
    plain, batched = torch.arange(6), workloads.TextDataset(8)
    assert len(workloads.repeated(plain, 3)) == 18
    assert workloads.repeated(plain, 3)[7] == plain[1]
    assert not hasattr(workloads.repeated(plain, 3), "__getitems__")
    twice = workloads.repeated(batched, 2).__getitems__([1, 9])
    assert torch.equal(twice[0]["input_ids"], twice[1]["input_ids"])
