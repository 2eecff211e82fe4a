"""What is seen of a loader that is not read: its dataset's epochs, its name, another like it."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Subset,
    TensorDataset,
)

from autotune_loader.lines import Line
from autotune_loader.pipeline.build import rebuild
from autotune_loader.pipeline.loop_log import Site
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values import LoaderConfig
from tests.support.data import Rows, Stream

PLAIN = TensorDataset(torch.zeros(8))
LINE = Line("/job/train.py", 41)
STREAM = Stream(int, 8)


def holding(**held):
    """A dataset with these attributes, as users write them; it may hold itself."""
    dataset = Rows(int, 8)
    dataset.__dict__.update({"dataset": dataset, **held})
    return dataset


TOLD = holding(set_epoch=lambda epoch: None)


@pytest.mark.parametrize(
    ("dataset", "has_epochs"),
    [
        (holding(current_epoch=0), True),
        (Subset(ConcatDataset([PLAIN, Subset(TOLD, [0])]), [0]), True),
        (ChainDataset([TOLD]), True),
        (holding(dataset=SimpleNamespace(epoch=1)), True),
        (holding(by_name={"a": PLAIN, "b": TOLD}, transform=len), True),
        (holding(base=PLAIN, epochs=90), False),
        ([1, 2, 3], False),
    ],
)
def test_an_epoch_is_found_in_a_datasets_wrappers(dataset, has_epochs):
    # persistent workers would never hear of the next
    assert DataSide(dataset=dataset, batch_size=2).has_epochs is has_epochs


@pytest.mark.parametrize(
    ("loader", "contents"),
    [
        (DataLoader(PLAIN, 4, shuffle=True), "TensorDataset, batches of 4, shuffled"),
        (
            DataLoader(PLAIN, batch_sampler=BatchSampler(RandomSampler(PLAIN), 8, True)),
            "TensorDataset, batches of 8, shuffled",
        ),
        (DataLoader(STREAM), "Stream, batches of 1"),
    ],
)
def test_a_site_is_its_line_and_contents(loader, contents):
    site = Site.of(loader, LINE)
    assert site.contents() == contents
    assert site.contents(8) == contents.replace(site.dataset, f"{site.dataset}[8]")
    assert site == Site.of(loader, LINE)
    assert site != Site.of(loader, Line("/job/train.py", 42))
    assert site != Site.of(DataLoader(PLAIN, batch_size=2), LINE)


class Repeated:
    """A sampler of batches that never ends."""

    def __init__(self, batches):
        self.sampler = batches

    def __iter__(self):
        while True:
            yield from self.sampler


class Steps(DataLoader):
    """As timm's and ultralytics', it keeps one iterator for all epochs, and a loader inside."""

    def __init__(self, steps, dataset, **kwargs):
        super().__init__(dataset, **kwargs)
        object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
        self.iterator, self.steps, self.plain = super().__iter__(), steps, DataLoader(dataset)

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


def test_a_running_loader_is_not_shared():
    own = Steps(3, TensorDataset(torch.arange(10)), batch_size=4)
    made, sized = rebuild(own, LoaderConfig()), rebuild(own, LoaderConfig(batch_size=5))
    assert [batch[0].tolist() for batch in made] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert next(iter(own))[0].tolist() == [0, 1, 2, 3]
    assert next(iter(sized))[0].tolist() == [0, 1, 2, 3, 4]
    # THEN a loader within has the size as well, and the user's stays as it was
    assert sized.plain.batch_size == 5
    assert own.plain.batch_size == 1


@pytest.mark.filterwarnings("error:This DataLoader will create")
def test_more_workers_than_cores_may_be_asked():
    more = (os.cpu_count() or 1) + 1
    assert rebuild(DataLoader(PLAIN), LoaderConfig(num_workers=more)).num_workers == more


def test_what_keeps_an_iterator_is_refused():
    own = Steps(3, PLAIN)
    own.batches = iter(own)
    with pytest.raises(ValueError, match=r"Try Steps\(\.\.\., \*\*result\.best\.to_kwargs\(\)\)"):
        rebuild(own, LoaderConfig())
