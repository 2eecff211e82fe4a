"""JPEGs decoded to the size that is needed: how large that is, how far pixels differ, and nothing but a fetch notices."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.drafts import Drafted, Drafts

Image = pytest.importorskip("PIL.Image")


def jpeg(width: int, height: int, kind: str = "JPEG") -> bytes:
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows % 256, columns % 256, (rows + columns) % 256], axis=-1).astype(np.uint8)
    made = io.BytesIO()
    Image.fromarray(pixels).save(made, kind)
    return made.getvalue()


class Photos(Dataset[Any]):
    """A JPEG of 800 x 600, made as small as `change` says."""

    def __init__(self, change: Any, kind: str = "JPEG") -> None:
        self.content, self.change = jpeg(800, 600, kind), change

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(self.content))
        self.size = image.size
        return np.asarray(self.change(image.convert("RGB"))), index


def small(image: Any) -> Any:
    return image.resize((160, 120))


def cropped(image: Any) -> Any:
    return image.crop((100, 100, 500, 400)).resize((100, 75))


def side_of(dataset: Dataset[Any]) -> DataSide:
    return DataSide.from_loader(DataLoader(dataset, batch_size=4))


def test_a_picture_keeps_the_size_that_it_is_resized_to() -> None:
    found = Drafts.of(side_of(Photos(small)))
    assert found.size == (160, 120)
    assert found.facts.code == "after Image.open(path): image.draft('RGB', (160, 120))"
    assert found.facts.difference is not None
    assert 0 < found.facts.difference < 0.05


def test_what_is_cropped_first_needs_a_larger_picture() -> None:
    assert Drafts.of(side_of(Photos(cropped))).size == (200, 150)


def test_pictures_are_opened_smaller_within_a_fetch_only() -> None:
    dataset = Photos(small)
    before = Image.open
    drafted = Drafts.of(side_of(dataset)).after(side_of(dataset)).dataset
    sample, label = drafted[3]
    assert label == 3
    assert sample.shape == (120, 160, 3)
    assert dataset.size == (200, 150)
    assert drafted.__getitems__([1, 2])[1][1] == 2
    assert Image.open is before
    assert len(drafted) == 16


def test_it_travels_to_a_worker() -> None:
    again = pickle.loads(pickle.dumps(Drafted(Photos(small), (160, 120))))
    assert again[0][0].shape == (120, 160, 3)
    assert again.size == (200, 150)


def whole(image: Any) -> Any:
    return image


def hardly_smaller(image: Any) -> Any:
    return image.resize((500, 375))


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Photos(whole), "or resizes none"),
        (Photos(small, "PNG"), "opens no JPEG"),
        (Photos(hardly_smaller), "at most 1.6 times"),
    ],
    ids=["not resized", "PNG", "not large"],
)
def test_where_nothing_is_to_gain_it_is_said_why(dataset: Dataset[Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Drafts.of(side_of(dataset))
