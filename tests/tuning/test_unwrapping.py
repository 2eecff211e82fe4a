"""What libraries hand out in place of a dataset or a DataLoader, imitated: unwrapped, or answered with a call that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autotune_loader import tune
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.values.errors import WorkloadError

ROWS = TensorDataset(torch.zeros(10, 2))


class WebLoader(IterableDataset[Any]):
    """A pipeline whose first stage is a DataLoader."""

    def __init__(self, loader: DataLoader[Any], *stages: Callable[[Any], Any]) -> None:
        self.pipeline = [loader, *stages]

    def __iter__(self) -> Iterator[Any]:
        yield from self.pipeline[0]


class PrefetchLoader:
    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader

    def __len__(self) -> int:
        return len(self.loader)


class CombinedLoader:
    def __init__(self, iterables: Any) -> None:
        self._iterables, self._flat = iterables, [iterables["a"]] if isinstance(iterables, dict) else iterables

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __next__(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("wrapper", [WebLoader, PrefetchLoader, lambda loader: CombinedLoader({"a": loader})])
def test_a_wrapper_around_one_loader_is_unwrapped_and_the_note_says_what_is_left_out(wrapper: Any) -> None:
    # GIVEN what a library made of a DataLoader
    wrapped = wrapper(DataLoader(ROWS, batch_size=5))
    # WHEN it is tuned
    workload, notes = make_workload(wrapped)
    # THEN it is that DataLoader which is tuned, in its own batches
    assert (workload.data.dataset, workload.data.batch_size) == (ROWS, 5)
    assert any(type(wrapped).__name__ in note and "holds a DataLoader" in note for note in notes)


@pytest.mark.parametrize(
    "group", [CombinedLoader([DataLoader(ROWS), DataLoader(ROWS)]), [DataLoader(ROWS), DataLoader(ROWS)]]
)
def test_several_loaders_are_tuned_one_at_a_time(group: Any) -> None:
    with pytest.raises(TypeError, match=r"2 DataLoaders .*; one at a time, tune\(loader, model\), would work"):
        make_workload(group)


class HuggingFaceTrainer:
    def get_train_dataloader(self) -> Any: ...


class LightningTrainer:
    fit_loop = None


class DataModule:
    def train_dataloader(self) -> Any: ...


class ForeignLoader:
    dataset = ROWS

    def __iter__(self) -> Iterator[Any]: ...


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (HuggingFaceTrainer(), r"tune_trainer\(trainer\) would work"),
        (LightningTrainer(), r"lightning.tuned\(model, .*would work"),
        (DataModule(), r"tune\(datamodule.train_dataloader\(\), model\).* would work"),
        (ForeignLoader(), r"tune\(foreignloader.dataset, .*would work"),
    ],
)
def test_what_is_neither_dataset_nor_loader_is_answered_with_the_call_that_works(given: Any, answer: str) -> None:
    with pytest.raises(TypeError, match=f"dataset_or_loader=.*{answer}"):
        make_workload(given)


def test_a_data_frame_is_told_from_a_dataset() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [0, 1]})
    with pytest.raises(TypeError, match=r"DataFrame looks up columns.*TensorDataset\(.*would work"):
        make_workload(frame, batch_size=2)


def test_a_dict_of_datasets_names_one_of_them() -> None:
    with pytest.raises(TypeError, match=r"looks up 'train', .*data\['train'\] would work"):
        make_workload({"train": ROWS, "test": ROWS}, batch_size=2)


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
def test_a_generator_of_indices_is_refused_also_in_a_loader(name: str) -> None:
    indices: Any = [0, 1] if name == "sampler" else [[0, 1]]
    with pytest.raises(TypeError, match=f"^{name}=.*only once.*a list of it would work"):
        make_workload(ROWS, **{name: (each for each in indices)})
    with pytest.raises(TypeError, match=f"^{name}=.*only once.*a list of it would work"):
        make_workload(DataLoader(ROWS, **{name: (each for each in indices)}))


class LengthRaises(Dataset[int]):
    def __len__(self) -> int:
        raise RuntimeError("index the files first")

    def __getitem__(self, index: int) -> int:
        return index


def test_a_length_that_raises_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"LengthRaises has no length: len\(\) raises RuntimeError: index the files first;"
    ):
        make_workload(LengthRaises(), batch_size=2)
    # WHEN a sampler says which indices there are THEN nobody asks
    workload, _ = make_workload(LengthRaises(), batch_size=2, sampler=range(4))
    assert workload.data.batches_per_epoch() == 2


class StreamWithoutLength(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def __len__(self) -> int:
        raise AttributeError("_length")


def test_a_stream_whose_length_raises_has_none() -> None:
    workload, _ = make_workload(StreamWithoutLength(), batch_size=2)
    assert workload.data.batches_per_epoch() is None


class Coordinated(IterableDataset[int]):
    """A stream whose copies tell each other what comes next, as MosaicML's do."""

    def __init__(self, memory: SharedMemory) -> None:
        self.shared = {"epoch": memory}

    def __iter__(self) -> Iterator[int]: ...


class Cached(Dataset[torch.Tensor]):
    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.memory.buf[index])])


@pytest.mark.process
def test_named_shared_memory_of_the_users_outlives_tuning() -> None:
    memory = SharedMemory(create=True, size=16)
    try:
        # WHEN a stream coordinates its workers through it THEN it is refused
        with pytest.raises(TypeError, match=r"Coordinated .* shared memory \(shared\['epoch'\]\).* would work"):
            make_workload(Coordinated(memory))
        # WHEN it is a cache THEN no other process attaches to it, which would remove it at its end
        result = tune(Cached(memory), batch_size=2, budget=2, max_trials=1, reuse=False, progress=False)
        assert any("dataset.memory" in note and "remove at its end" in note for note in result.warnings)
        assert Path("/dev/shm", memory.name).exists()
    finally:
        memory.close()
        memory.unlink()


def batched(samples: Any) -> Any: ...
def unbatched(samples: Any) -> Any: ...
def decode(samples: Any) -> Any: ...


class Pipeline(IterableDataset[Any]):
    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)

    def __iter__(self) -> Iterator[Any]: ...


def test_a_pipeline_that_makes_batches_is_not_batched_again() -> None:
    workload, notes = make_workload(Pipeline(decode, batched))
    assert workload.data.batch_size is None
    assert notes == ["the dataset makes its own batches, so the DataLoader makes none (batch_size=None)"]
    for stages in ([decode], [decode, batched, unbatched]):
        workload, _ = make_workload(Pipeline(*stages), batch_size=4)
        assert workload.data.batch_size == 4


class ThreadLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_a_loader_that_does_something_of_its_own_with_batches_is_told() -> None:
    _, notes = make_workload(ThreadLoader(ROWS))
    assert any(note.startswith("ThreadLoader has an __iter__ of its own") for note in notes)
    assert make_workload(DataLoader(ROWS))[1] == []


class Normalising:
    """As timm's PrefetchLoader: the workers make bytes, and it makes numbers of them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.loader:
            yield x.float() / 255, y


@pytest.mark.process
def test_a_step_that_fails_for_what_the_bursts_leave_out_is_told_so() -> None:
    data = TensorDataset(torch.zeros(16, 4, dtype=torch.uint8), torch.zeros(16, dtype=torch.long))
    with pytest.raises(WorkloadError) as caught:
        tune(Normalising(DataLoader(data, 4)), torch.nn.Linear(4, 2), budget=2, isolation="inline", progress=False)
    told = str(caught.value).splitlines()[0]
    assert "pass train_step=lambda model, batch: cross_entropy(model(batch[0]), batch[1])" in told
    assert "What Normalising itself does to batches is no part of the measurement" in told


class OwnIterator(IterableDataset[Any]):
    """Its own iterator, as litdata's datasets are; `restarts` tells whether `iter()` begins again."""

    def __init__(self, restarts: bool) -> None:
        self.restarts, self.next = restarts, 0

    def __iter__(self) -> OwnIterator:
        if self.restarts:
            self.next = 0
        return self

    def __next__(self) -> Any:
        if self.next == 64:
            raise StopIteration
        self.next += 1
        return torch.tensor([float(self.next)])


@pytest.mark.process
def test_a_dataset_that_is_its_own_iterator_is_tuned_where_it_begins_again() -> None:
    options: Any = {
        "batch_size": 4,
        "budget": 2,
        "max_trials": 1,
        "isolation": "inline",
        "reuse": False,
        "progress": False,
    }
    data = OwnIterator(restarts=True)
    assert tune(data, **options).measured.samples_per_s is not None
    assert len(list(data)) == 64  # inline it is read itself, and training reads it from its begin
    once = OwnIterator(restarts=False)
    with pytest.raises(WorkloadError, match="OwnIterator can be read only once"):
        tune(once, **options)
    assert once.next == 0
