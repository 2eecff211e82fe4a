"""What is seen of a loader that is not read: epochs its dataset is told of, its name, and another one like it."""

import os
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

from autotune_loader.lines import Line
from autotune_loader.pipeline.build import rebuild
from autotune_loader.pipeline.loop_log import Site
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig

PLAIN = TensorDataset(torch.zeros(8))
LINE = Line("/job/train.py", 41)


class Holding:
    """No Dataset of torch's, as users write them; it may hold itself."""

    def __init__(self, *, dataset=None, **held):
        self.__dict__.update(held, dataset=dataset or self)

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


class TellsEpoch(Holding):
    def set_epoch(self, epoch): ...


class Stream(IterableDataset):
    epoch = 0

    def __iter__(self):
        yield from range(8)

    def __len__(self):
        raise RuntimeError("nobody knows")


@pytest.mark.parametrize(
    ("dataset", "has_epochs"),
    [
        (Holding(current_epoch=0), True),
        (Subset(ConcatDataset([PLAIN, Subset(TellsEpoch(), [0])]), [0]), True),
        (ChainDataset([Stream()]), True),
        (Holding(dataset=SimpleNamespace(epoch=1)), True),
        (Holding(by_name={"a": PLAIN, "b": TellsEpoch()}, transform=len), True),
        (Holding(base=PLAIN, epochs=90), False),
        ([1, 2, 3], False),
    ],
)
def test_a_dataset_that_is_told_the_epoch_is_found_in_its_wrappers(dataset, has_epochs):
    """Persistent workers would never hear of the next."""
    assert DataSide(dataset=dataset, batch_size=2).has_epochs is has_epochs


@pytest.mark.parametrize(
    ("loader", "contents"),
    [
        (DataLoader(PLAIN, batch_size=4, shuffle=True), "TensorDataset, batches of 4, shuffled"),
        (
            DataLoader(PLAIN, batch_sampler=BatchSampler(RandomSampler(PLAIN), 8, True)),
            "TensorDataset, batches of 8, shuffled",
        ),
        (DataLoader(Stream()), "Stream, batches of 1"),
    ],
)
def test_a_site_says_what_its_loader_reads_and_is_one_by_line_and_contents(loader, contents):
    site = Site.of(loader, LINE)
    assert site.contents() == contents
    assert site.contents(8) == contents.replace(site.dataset, f"{site.dataset}[8]")
    assert site == Site.of(loader, LINE) != Site.of(loader, Line("/job/train.py", 42))
    assert site != Site.of(DataLoader(PLAIN, batch_size=2), LINE)


class Repeated:
    """A sampler of batches that never ends."""

    def __init__(self, batches):
        self.sampler = batches

    def __iter__(self):
        while True:
            yield from self.sampler


class Steps(DataLoader):
    """As timm's and ultralytics', it keeps one iterator for all epochs; with arguments of its own and a loader inside."""

    def __init__(self, steps, dataset, **kwargs):
        super().__init__(dataset, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator, self.steps, self.plain = super().__iter__(), steps, DataLoader(dataset)

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


@pytest.mark.filterwarnings(
    "error:This DataLoader will create"
)  # more workers than cores were measured
def test_a_loader_that_is_running_is_not_shared_and_another_may_have_more_workers_than_cores():
    own = Steps(3, TensorDataset(torch.arange(10)), batch_size=4)
    made, sized = rebuild(own, LoaderConfig()), rebuild(own, LoaderConfig(batch_size=5))
    assert [batch[0].tolist() for batch in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert next(iter(own))[0].tolist() == [0, 1, 2, 3] == next(iter(sized))[0].tolist()[:4]
    assert len(next(iter(sized))[0]) == sized.batch_size == sized.plain.batch_size == 5
    assert own.plain.batch_size == 1
    more = (os.cpu_count() or 1) + 1
    assert rebuild(DataLoader(PLAIN), LoaderConfig(num_workers=more)).num_workers == more


def test_a_loader_that_keeps_what_runs_with_its_settings_is_made_anew_by_its_owner():
    own = Steps(3, PLAIN)
    own.batches = iter(own)
    with pytest.raises(
        ValueError, match=re.escape("Steps(..., **result.best.to_kwargs()) would work")
    ):
        rebuild(own, LoaderConfig())
