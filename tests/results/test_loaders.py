"""`apply_to` and `make_loader`: the user's loader with exactly the settings that were measured."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from report.example import synthetic_result
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.values import LoaderConfig
from tests.support.schedules import Stream

DATA = TensorDataset(torch.arange(10))
TUNED = LoaderConfig(num_workers=3, prefetch_factor=4, persistent_workers=True)


def collate(rows):
    return torch.stack([row for (row,) in rows])


def result_of(loader, best=TUNED):
    """As `tune(loader)` gives it back, of parts of this loader."""
    workload = make_workload(loader)
    own = {
        "batch_size": best.batch_size or workload.data.batch_size,
        "drop_last": workload.data.drop_last,
    }
    parts = {"shuffle": workload.shuffles, "parts": workload.data.parts}
    return replace(synthetic_result(), best=best, **own, **parts)


class Owned(DataLoader):
    """As a library's: called with other things than a dataset."""

    def __init__(self, name, **kwargs):
        super().__init__(DATA, **kwargs)
        self.name = name


BATCHES = [[1, 2], [4, 5, 6]]
LOADERS = {
    "shuffled": lambda: DataLoader(
        DATA, batch_size=4, shuffle=True, drop_last=True, collate_fn=collate
    ),
    "in order": lambda: DataLoader(DATA, batch_size=4),
    "a sampler": lambda: DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler([3, 5])),
    "a batch_sampler": lambda: DataLoader(DATA, batch_sampler=BATCHES),
    "no batches": lambda: DataLoader(DATA, batch_size=None),
    "a stream": lambda: DataLoader(Stream(10), batch_size=4),
    "of a library": lambda: Owned("mine", batch_size=4, shuffle=True),
    "seeded": lambda: DataLoader(
        DATA, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
}
PARTS = ("dataset", "batch_size", "drop_last", "collate_fn", "worker_init_fn", "generator")
DRAWN = ("shuffled", "of a library", "seeded")


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_comes_back_with_the_settings(name):
    own = LOADERS[name]()
    applied, made = result_of(own).apply_to(own), result_of(own).make_loader(own.dataset)
    for loader in (applied, made, TUNED.apply_to(own)):
        assert LoaderConfig.from_loader(loader) == TUNED
        assert type(loader.sampler) is type(own.sampler)
        for part in PARTS:
            assert getattr(loader, part) is getattr(own, part), part
    assert type(applied) is type(own)
    assert (own.num_workers, own.prefetch_factor) == (0, None)
    # AND the batches are those of the user's loader
    torch.manual_seed(0)
    expected = list(own)
    torch.manual_seed(0)
    again = list(result_of(own, LoaderConfig()).apply_to(own))
    assert len(again) == len(expected)
    assert name in DRAWN or str(again) == str(expected)


@pytest.mark.filterwarnings("ignore:pin memory device is set")  # by torch 2.6
def test_what_needs_workers_is_left_out_without():
    of_workers = {"timeout": 9, "prefetch_factor": 5, "persistent_workers": True}
    of_workers |= {"multiprocessing_context": "spawn"}
    own = DataLoader(DATA, batch_size=4, num_workers=1, pin_memory_device="meta", **of_workers)
    result = result_of(own, LoaderConfig())
    for loader in (result.apply_to(own), result.make_loader(DATA, **of_workers)):
        assert (loader.timeout, len(list(loader))) == (0, 3)
    with_workers = result_of(own).apply_to(own)
    assert (with_workers.timeout, with_workers.pin_memory_device, own.num_workers) == (9, "meta", 1)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata imports all of torch
@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="needs torchdata")
def test_a_loader_with_state_stays_one():
    from torchdata.stateful_dataloader import StatefulDataLoader

    own = StatefulDataLoader(DATA, batch_size=4, shuffle=True, snapshot_every_n_steps=3)
    made = result_of(own, LoaderConfig()).apply_to(own)
    assert (type(made), made.snapshot_every_n_steps) == (StatefulDataLoader, 3)
    next(iter(made))
    assert made.state_dict()


def test_shuffling_survives_the_file_and_arguments_win(tmp_path):
    own = LOADERS["shuffled"]()
    result_of(own).save(tmp_path / "loader.json")
    loaded = TuningResult.load(tmp_path / "loader.json")
    assert type(loaded.make_loader(DATA).sampler) is RandomSampler
    assert type(loaded.make_loader(DATA, shuffle=False).sampler) is SequentialSampler
    made = loaded.make_loader(DATA, batch_size=5, num_workers=1, drop_last=False, collate_fn=len)
    assert (made.batch_size, made.num_workers, made.prefetch_factor) == (5, 1, 4)
    assert not made.drop_last
    assert loaded.make_loader(DATA, batch_sampler=BATCHES).batch_sampler == BATCHES


@pytest.mark.parametrize(
    ("order", "size", "batches"),
    [
        ({"sampler": SubsetRandomSampler([3])}, {"batch_size": 1}, [[3]]),
        ({"batch_sampler": BATCHES}, {}, BATCHES),
    ],
)
def test_an_own_sampler_belongs_to_its_dataset(order, size, batches):
    result = result_of(DataLoader(DATA, **order, **size), LoaderConfig())
    other = TensorDataset(torch.arange(10))
    (name,) = order
    assert [batch[0].tolist() for batch in result.make_loader(DATA)] == batches
    # WHEN one is made over another dataset, or after loading THEN it is asked for, and used
    with pytest.raises(ValueError, match=rf"{name} was not given, .*{name}=... for this dataset"):
        result.make_loader(other)
    with pytest.raises(ValueError, match="Try shuffle=True, or sampler"):
        TuningResult.from_dict(result.to_dict()).make_loader(DATA)
    assert [batch[0].tolist() for batch in result.make_loader(other, **order)] == batches


def test_a_batch_sampler_refuses_a_tuned_batch_size():
    sized = result_of(LOADERS["in order"](), LoaderConfig(batch_size=2))
    assert [len(batch) for (batch,) in sized.apply_to(LOADERS["in order"]())] == [2] * 5
    assert sized.make_loader(DATA).batch_size == 2
    with pytest.raises(ValueError, match="batch_sampler decides it"):
        sized.apply_to(LOADERS["a batch_sampler"]())
