"""`apply_to` and `make_loader`: the user's loader with exactly the settings that were measured."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from report.example import synthetic_result
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.assemble import loader_parts, shuffles
from autotune_loader.values.config import LoaderConfig

DATA = TensorDataset(torch.arange(10))
TUNED = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True)
SHOWN = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")


def collate(rows):
    return torch.stack([row for (row,) in rows])


def result_of(loader, best=TUNED, **changes):
    """As `tune(loader)` gives it back, of parts of this loader."""
    workload = make_workload(loader)
    values = {
        "best": best, "batch_size": best.batch_size or workload.data.batch_size, "drop_last": workload.data.drop_last,
        "shuffle": shuffles(workload), "parts": loader_parts(workload), **changes,
    }  # fmt: skip
    return replace(synthetic_result(), **values)


class Owned(DataLoader):
    """As a library's: called with other things than a dataset."""

    def __init__(self, name, **kwargs):
        super().__init__(DATA, **kwargs)
        self.name = name


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


LOADERS = {
    "shuffled": lambda: DataLoader(DATA, batch_size=4, shuffle=True, drop_last=True, collate_fn=collate),
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "a sampler": lambda: DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler([3, 5])),
    "a batch_sampler": lambda: DataLoader(DATA, batch_sampler=[[1, 2], [4, 5, 6]]),
    "no batches": lambda: DataLoader(DATA, batch_size=None),
    "a stream": lambda: DataLoader(Stream(), batch_size=4),
    "of a library": lambda: Owned("mine", batch_size=4, shuffle=True),
    "seeded": lambda: DataLoader(DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_the_users_own_loader_comes_back_with_the_settings(name):
    own = LOADERS[name]()
    made = result_of(own).apply_to(own)
    assert {each: getattr(made, each) for each in SHOWN} == {each: getattr(TUNED, each) for each in SHOWN}
    assert type(made) is type(own)
    for part in ("dataset", "collate_fn", "worker_init_fn", "generator"):
        assert getattr(made, part) is getattr(own, part), part
    assert (made.batch_size, made.drop_last) == (own.batch_size, own.drop_last)
    assert type(made.sampler) is type(own.sampler)
    assert (own.num_workers, own.prefetch_factor) == (0, None)
    # AND the batches are those of the user's loader
    torch.manual_seed(0)
    expected = list(own)
    torch.manual_seed(0)
    again = list(result_of(own, LoaderConfig()).apply_to(own))
    assert name in ("shuffled", "of a library", "seeded") or str(again) == str(expected)
    assert len(again) == len(expected)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata imports all of torch
@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="needs torchdata")
def test_a_loader_with_state_stays_one():
    from torchdata.stateful_dataloader import StatefulDataLoader

    own = StatefulDataLoader(DATA, batch_size=4, shuffle=True, snapshot_every_n_steps=3)
    made = result_of(own, LoaderConfig()).apply_to(own)
    assert type(made) is StatefulDataLoader
    assert made.snapshot_every_n_steps == 3
    next(iter(made))
    assert made.state_dict()


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_that_is_made_has_the_order_and_the_parts_of_the_tuned_one(name):
    own = LOADERS[name]()
    made = result_of(own).make_loader(own.dataset)
    assert {each: getattr(made, each) for each in SHOWN} == {each: getattr(TUNED, each) for each in SHOWN}
    assert type(made.sampler) is type(own.sampler)
    assert (made.batch_size, made.drop_last, made.collate_fn) == (own.batch_size, own.drop_last, own.collate_fn)


def test_shuffling_survives_the_file_and_arguments_win(tmp_path):
    own = LOADERS["shuffled"]()
    result_of(own).save(tmp_path / "loader.json")
    loaded = TuningResult.load(tmp_path / "loader.json")
    assert isinstance(loaded.make_loader(DATA).sampler, RandomSampler)
    assert isinstance(loaded.make_loader(DATA, shuffle=False).sampler, SequentialSampler)
    made = loaded.make_loader(DATA, batch_size=5, num_workers=1, drop_last=False, collate_fn=len)
    assert (made.batch_size, made.num_workers, made.prefetch_factor, made.drop_last) == (5, 1, 4, False)
    assert loaded.make_loader(DATA, batch_sampler=[[0, 1], [2, 3, 4]]).batch_sampler == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("order", "batches"),
    [({"sampler": SubsetRandomSampler([3])}, [[3]]), ({"batch_sampler": [[1, 2], [4, 5, 6]]}, [[1, 2], [4, 5, 6]])],
)
def test_a_sampler_of_the_users_own_is_kept_over_its_dataset_and_asked_for_over_another(order, batches):
    (name,) = order
    own = DataLoader(DATA, **({"batch_size": 1, **order} if name == "sampler" else order))
    result = result_of(own, LoaderConfig())
    # WHEN a loader is made over the same dataset THEN it has that order
    assert [batch[0].tolist() for batch in result.make_loader(DATA)] == batches
    # WHEN over another, or after loading THEN it is asked for, and used
    other = TensorDataset(torch.arange(10))
    with pytest.raises(ValueError, match=rf"{name} was not given, .*{name}=... for this dataset would work"):
        result.make_loader(other)
    with pytest.raises(ValueError, match="shuffle=True or sampler"):
        TuningResult.from_dict(result.to_dict()).make_loader(DATA)
    assert [batch[0].tolist() for batch in result.make_loader(other, **order)] == batches


def test_a_tuned_batch_size_is_used_and_a_batch_sampler_refuses_it():
    sized = result_of(LOADERS["in order"](), LoaderConfig(batch_size=2))
    assert [len(batch) for (batch,) in sized.apply_to(LOADERS["in order"]())] == [2] * 5
    assert sized.make_loader(DATA).batch_size == 2
    with pytest.raises(ValueError, match="batch_sampler decides it"):
        sized.apply_to(LOADERS["a batch_sampler"]())
