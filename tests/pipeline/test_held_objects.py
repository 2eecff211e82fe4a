"""Large lists that a dataset holds are found, with what takes their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from autotune_loader.pipeline.held_objects import LARGE, largest_held


class Photos(Dataset[Any]):
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("held", "code"),
    [
        (["a.jpg"] * LARGE, "self.held = np.array(self.held)"),
        ([torch.zeros(1)] * LARGE, "self.held = torch.stack(self.held)"),
        ([np.zeros(1)] * LARGE, "self.held = np.stack(self.held)"),
        ([{"path": "a.jpg"}] * LARGE, "one array for each field"),
        (dict.fromkeys(range(LARGE), "a.jpg"), "one array for each field"),
    ],
    ids=["texts", "tensors", "arrays", "records", "dict"],
)
def test_what_takes_its_place_is_told(held: Any, code: str) -> None:
    found = largest_held(Photos(held=held, few=[1] * 10))
    assert found is not None
    assert code in found.code()


def test_the_longest_is_found_in_what_is_wrapped() -> None:
    photos = Photos(paths=["a.jpg"] * (2 * LARGE), labels=[1] * LARGE)
    assert str(largest_held(Subset(photos, [0]))) == "Photos.paths is a list of 20,000 objects (str)"


def test_arrays_and_short_lists_are_none() -> None:
    assert largest_held(Photos(paths=np.zeros(2 * LARGE), labels=[1, 2], stacked=torch.zeros(2 * LARGE))) is None
    assert largest_held(7) is None
