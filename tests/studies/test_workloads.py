from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[2]
# jpeg is the demo's own workload, tested there without filling the user's cache.
NAMES = (
    "wait_light_tail",
    "wait_heavy_tail",
    "wait_behind_step",
    "cpu_bound",
    "python_loops",
    "large_tensors",
    "in_memory",
    "step_bound",
    "short_epoch",
    "text",
)
# guide reads the demo's pictures, the memory-mapped ones write a file of their own.
DOCUMENTS = ("tutorial", "imbalance")


@pytest.fixture
def workloads(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("studies.workloads")


def test_every_workload_is_tested_here_or_with_the_demo(workloads: ModuleType) -> None:
    assert set(workloads.WORKLOADS) == {*NAMES, "jpeg"}
    assert set(workloads.DOCUMENTS) == {*DOCUMENTS, "guide", "lesson", "article"}


@pytest.mark.process
@pytest.mark.parametrize("name", NAMES + DOCUMENTS)
def test_a_workload_survives_pickling_and_yields_a_batch(name: str, workloads: ModuleType) -> None:
    # GIVEN a workload as another process receives it
    workload = pickle.loads(pickle.dumps((workloads.WORKLOADS | workloads.DOCUMENTS)[name]()))
    # WHEN its first batch is loaded
    batch = next(iter(DataLoader(workload.dataset, batch_size=workload.batch_size)))
    # THEN it is whole
    first = next(iter(batch.values())) if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch
    assert workload.name == name
    assert len(first) == workload.batch_size


@pytest.mark.parametrize("name", ["wait_light_tail", "large_tensors"])
def test_an_accelerator_step_takes_any_batch(name: str, workloads: ModuleType) -> None:
    workload = workloads.WORKLOADS[name]()
    batch = next(iter(DataLoader(workload.dataset, batch_size=2)))
    assert workload.train_step(workload.model, batch) is None


def test_dict_batches_fit_the_text_model(workloads: ModuleType) -> None:
    # GIVEN the text workload, one sample and a whole batch at a time
    workload = workloads.text()
    batch = next(iter(DataLoader(workload.dataset, batch_size=4)))
    # WHEN the model takes the batch by its keys
    loss = workload.model(**batch).loss
    # THEN there is a loss to train on, and fetching singly gives the same samples
    assert loss.requires_grad
    assert torch.equal(batch["input_ids"][3], workload.dataset[3]["input_ids"])


def test_a_waiting_sample_takes_the_same_time_in_every_process(workloads: ModuleType) -> None:
    one, other = (workloads.wait_heavy_tail().dataset for _ in range(2))
    assert (one.waits_s == other.waits_s).all()
    assert one.waits_s[31] == pytest.approx(0.2)


def test_memory_mapped_pictures_are_written_once_and_read_in_any_process(workloads: ModuleType, tmp_path: Path) -> None:
    # GIVEN a dataset that made its file, and another that finds it
    made = workloads.MemmapDataset(tmp_path / "pictures.bin", 4, 8)
    written = (tmp_path / "pictures.bin").read_bytes()
    found = pickle.loads(pickle.dumps(workloads.MemmapDataset(tmp_path / "pictures.bin", 4, 8)))
    # WHEN the same picture is read with the same augmentation
    samples = []
    for dataset in (made, found):
        torch.manual_seed(0)
        samples.append(dataset[3][0])
    # THEN it is the same, and the file was left alone
    assert torch.equal(*samples)
    assert samples[0].shape == (3, 8, 8)
    assert (tmp_path / "pictures.bin").read_bytes() == written


def test_a_repeated_dataset_fetches_as_the_one_it_repeats(workloads: ModuleType) -> None:
    plain, batched = workloads.in_memory().dataset, workloads.text().dataset
    assert len(workloads.repeated(plain, 3)) == 3 * len(plain)
    assert workloads.repeated(plain, 3)[len(plain)][1] == plain[0][1]
    assert not hasattr(workloads.repeated(plain, 3), "__getitems__")
    twice = workloads.repeated(batched, 2).__getitems__([1, len(batched) + 1])
    assert torch.equal(twice[0]["input_ids"], twice[1]["input_ids"])
