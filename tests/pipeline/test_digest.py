"""Batches are compared by short records: same bytes, or same up to rounding, else the first place that differs."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autotune_loader.pipeline.digest import TooManyLeavesError, difference, digest

Pair = namedtuple("Pair", "x y")
RAMP = torch.linspace(0.1, 0.9, 1000)


@dataclass
class Record:
    image: Any
    label: int


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
        (RAMP, RAMP * (1 + 2e-7)),  # sums in another order
        ({"x": [RAMP.double()]}, {"x": [RAMP.double() * (1 + 1e-15)]}),
        (np.array(["a", None], dtype=object), np.array(["a", None], dtype=object)),
        ({3, 1, 2}, {2, 3, 1}),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
        (SimpleNamespace(a=object()), SimpleNamespace(a=object())),
    ],
)
def test_same(one: Any, other: Any) -> None:
    assert difference(digest(one), digest(other)) is None


@pytest.mark.parametrize(
    ("one", "other", "path"),
    [
        ({"x": torch.tensor([1, 2])}, {"x": torch.tensor([1, 3])}, "`batch['x']`"),
        ([RAMP, RAMP], [RAMP, RAMP * (1 + 1e-4)], "`batch[1]`"),
        (torch.tensor([1e7]), torch.tensor([1e7 + 1]), "`batch`"),  # whole numbers are not rounded
        (Pair(1, "a"), Pair(1, "b"), "`batch[1]`"),
        (Pair(1, 2), (1, 2), "`batch`"),
        ((1, 2), [1, 2], "`batch`"),
        (Record(RAMP, 1), Record(RAMP, 2), "`batch.label`"),
        (Slotted(1), Slotted(2), "`batch.value`"),
        (SimpleNamespace(a=SimpleNamespace(b=b"1")), SimpleNamespace(a=SimpleNamespace(b=b"2")), "`batch.a.b`"),
        (OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), "`batch['a']`"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "`batch`"),
        (torch.zeros(2), torch.zeros(2, requires_grad=True), "`batch`"),
        (True, 1, "`batch`"),
        ("x" * 100, "x" * 99 + "y", "`batch`"),
        (torch.zeros(9_000_000, dtype=torch.uint8), torch.ones(9_000_000, dtype=torch.uint8), "`batch`"),
    ],
)
def test_other(one: Any, other: Any, path: str) -> None:
    found = difference(digest(one), digest(other))
    assert found is not None
    assert found.startswith(path)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_circles_too_many_values_and_other_kinds_of_tensors_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for batch in (circle, list(range(30_000))):
        with pytest.raises(TooManyLeavesError):
            digest(batch)
    with pytest.raises(TypeError, match=r"`batch\['x'\]` is a tensor of a kind that is not compared"):
        digest({"x": torch.eye(3).to_sparse_csr()})
