"""What is the same each time is made once, what is random is not, and samples are those that there are without the cache."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune_loader import CachedPrefix
from autotune_loader.pipeline.cached_prefix import same


class Compose:
    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = list(transforms)

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Photos(Dataset[Any]):
    """(picture, label) of an index; notes what was read and decoded in a file, which workers share."""

    classes = ("cat", "dog")

    def __init__(self, log: Path, transform: Any = None) -> None:
        self.log, self.transform = log, transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        with self.log.open("a") as file:
            file.write(f"{index}\n")
        picture = torch.arange(4.0) + index
        return (picture if self.transform is None else self.transform(picture)), index % 2

    def read(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


def double(picture: torch.Tensor) -> torch.Tensor:
    return picture * 2


def noisy(picture: torch.Tensor) -> torch.Tensor:
    return picture + torch.rand(1)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_a_sample_is_made_once_and_is_the_same(log: Path) -> None:
    photos = Photos(log, Compose(double))
    cached = CachedPrefix(photos)
    log.unlink()
    for _ in range(3):
        assert all(same(cached[index][0], (torch.arange(4.0) + index) * 2) for index in range(12))
    assert photos.read() == list(range(12))
    assert cached[-1][1] == 1
    assert len(cached) == 12
    assert cached.classes == ("cat", "dog")
    with pytest.raises(IndexError, match="index 12 is out of range for 12 samples"):
        cached[12]


def test_what_follows_the_cache_is_still_random_as_without_it(log: Path) -> None:
    photos = Photos(log, Compose(double, noisy, double))
    cached = CachedPrefix(photos)
    first, second = cached[3][0], cached[3][0]
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    fresh = photos[3][0]
    torch.manual_seed(5)
    assert torch.equal(cached[3][0], fresh)


def test_a_dataset_that_always_calls_its_transform(log: Path) -> None:
    class Always(Photos):
        def __getitem__(self, index: int) -> Any:
            return self.transform(torch.full((2,), float(index)))

    cached = CachedPrefix(Always(log, noisy))
    assert not torch.equal(cached[1], cached[1])


def test_only_leading_members_that_are_not_random_are_done_once(log: Path) -> None:
    done: list[str] = []

    def crop(picture: torch.Tensor) -> torch.Tensor:
        done.append("crop")
        return picture[:2]

    def flip(picture: torch.Tensor) -> torch.Tensor:
        done.append("flip")
        return picture.flip(0) if random.random() < 0.5 else picture

    cached = CachedPrefix(Photos(log, Compose(crop, flip)))
    cached[7]
    done.clear()
    cached[7]
    assert done == ["flip"]


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, lambda: np.random.rand()])  # noqa: NPY002
def test_the_callers_random_numbers_go_on_as_if_nothing_had_been_drawn(log: Path, draw: Any) -> None:
    def seeded() -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002

    seeded()
    expected = draw()
    seeded()
    CachedPrefix(Photos(log, Compose(double, noisy)))
    assert same(draw(), expected)


def test_a_dataset_that_is_random_before_the_cache_is_refused(log: Path) -> None:
    class Random(Photos):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(2)

    with pytest.raises(
        ValueError, match=r"Random gives another sample each time .* transform=the_random_part\) would work"
    ):
        CachedPrefix(Random(log))


def test_random_numbers_of_its_own_are_random_too(log: Path) -> None:
    own = np.random.default_rng(0)
    cached = CachedPrefix(Photos(log, Compose(lambda picture: picture + own.random())))
    assert not torch.equal(cached[0][0], cached[0][0])


def test_a_dataset_that_cannot_be_taken_apart_is_refused(log: Path) -> None:
    class Labels(Photos):
        def __getitem__(self, index: int) -> Any:
            label = index if self.transform is None else self.transform(torch.tensor([float(index)]))
            return torch.zeros(1), label

    with pytest.raises(ValueError, match=r"Labels cannot be taken apart at its transform: sample 0 differs"):
        CachedPrefix(Labels(log, Compose(lambda label: label + 1 + 0 * torch.rand(1))))


def test_a_transform_of_whole_samples(log: Path) -> None:
    cached = CachedPrefix(Photos(log), transform=lambda sample: (noisy(sample[0]), sample[1]))
    assert not torch.equal(cached[2][0], cached[2][0])
    assert cached[2][1] == 0


def test_no_more_is_kept_than_may_be(log: Path) -> None:
    photos = Photos(log)
    cached = CachedPrefix(photos, max_bytes=0)
    log.unlink()
    assert torch.equal(cached[1][0], cached[1][0])
    assert photos.read() == [1, 1]
    assert cached.cached_bytes == 0


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"dataset": iter(())}, TypeError, "is no map-style dataset with a length"),
    ({"max_bytes": -1}, ValueError, "max_bytes=-1 is not 0 bytes or more; max_bytes="),
    ({"max_bytes": "8GB"}, ValueError, "max_bytes='8GB' is not 0 bytes"),
])  # fmt: skip
def test_wrong_arguments_are_named(log: Path, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CachedPrefix(**{"dataset": Photos(log), **arguments})


def test_its_files_go_with_it(log: Path, tmp_path: Path) -> None:
    cached = CachedPrefix(Photos(log), folder=tmp_path)
    cached[0]
    (folder,) = tmp_path.glob("autotune-loader-cache-*")
    again = pickle.loads(pickle.dumps(cached))
    del again  # a copy in a worker does not own them
    assert folder.exists()
    del cached
    assert not folder.exists()


def test_samples_of_all_kinds_compare() -> None:
    nested = {"x": [torch.ones(2), np.zeros(3)], "y": ("a", 1)}
    assert same(nested, pickle.loads(pickle.dumps(nested)))
    assert not same(nested, {**nested, "y": ("a", 2)})
    assert not same(torch.ones(1), torch.ones(1, dtype=torch.float64))
    assert not same(1, True)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_share_what_each_has_made(log: Path, start: str) -> None:
    photos = Photos(log, nn.Sequential())
    cached = CachedPrefix(photos)
    log.unlink()
    loader = DataLoader(cached, batch_size=2, num_workers=2, multiprocessing_context=start)
    for _ in range(3):  # other workers in each epoch
        batches = list(loader)
    assert torch.equal(
        torch.cat([batch[0] for batch in batches]), torch.stack([torch.arange(4.0) + i for i in range(12)])
    )
    assert sorted(photos.read()) == list(range(12))
