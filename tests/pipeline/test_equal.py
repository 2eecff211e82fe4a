"""Two batches are equal if their types and values are, whatever they are made of."""

import array
import collections
import dataclasses
import io
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from autotune_loader.autoloader.look import NEAR
from autotune_loader.bursts.repeats import are_repeated
from autotune_loader.pipeline.equal import is_equal

NAN = float("nan")
JAGGED = "jagged"  # imports torch's compiler, which takes seconds


@dataclasses.dataclass
class Node:
    """As PyTorch Geometric's stores, which hold the batch that holds them."""

    value: object
    owner: object = None

    def __post_init__(self):
        self.owner = [self, self]


Tagged = type("Tagged", (torch.Tensor,), {})  # as a box of torchvision, with its picture's size


class Odd:
    def __reduce__(self):
        raise TypeError("not this way")


def tagged(size):
    tensor = torch.zeros(2).as_subclass(Tagged)
    tensor.size_of_picture = size
    return tensor


def quantised(value):
    return torch.quantize_per_tensor(torch.tensor([value, 1.0]), 0.1, 0, torch.qint8)


def nested(value, layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.tensor([value])], layout=layout)


DIFFERENT = {
    "tensors": lambda: ({"x": [1, torch.ones(3)]}, {"x": [1, torch.zeros(3)]}),
    "kinds of numbers": lambda: (torch.ones(3), torch.ones(3, dtype=torch.float64)),
    "shapes": lambda: (torch.ones(4, 1), torch.ones(2, 2)),
    "NaN elsewhere": lambda: (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])),
    "NaN of half a float": lambda: [torch.tensor([NAN, x]).bfloat16() for x in (1.0, 2.0)],
    "complex": lambda: (torch.tensor([1 + 1j, NAN]), torch.tensor([1 + 2j, NAN])),
    "a conjugate": lambda: (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
    "sparse": lambda: (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "rows of sparse": lambda: (torch.eye(3).to_sparse_csr(), torch.eye(3).flip(0).to_sparse_csr()),
    "quantised": lambda: (quantised(1.0), quantised(2.0)),
    "nested": lambda: (nested(1.0, torch.strided), nested(2.0, torch.strided)),
    "parts of nested": lambda: [torch.nested.nested_tensor([torch.ones(2)] * n) for n in (1, 2)],
    "nested or not": lambda: (nested(1.0, torch.strided), torch.ones(2)),
    "gradients": lambda: [torch.ones(2, requires_grad=needs) for needs in (True, False)],
    JAGGED: lambda: (nested(1.0, torch.jagged), nested(2.0, torch.jagged)),
    "what a tensor has beside": lambda: (tagged(1), tagged(2)),
    "long arrays": lambda: [np.append(np.zeros(5000), last) for last in (1.0, 2.0)],
    "arrays with NaN": lambda: (np.array([NAN, 1.0]), np.array([NAN, 2.0])),
    "unsigned arrays": lambda: (np.array([1, 70_000], ">u4"), np.array([1, 70_001], ">u4")),
    "long doubles": lambda: (np.array([1, NAN], np.longdouble), np.array([2, NAN], np.longdouble)),
    "dates": lambda: (np.array(["NaT", "2020"], "M8[Y]"), np.array(["NaT", "2021"], "M8[Y]")),
    "records": lambda: (np.array([(1, NAN)], "i4,f4"), np.array([(2, NAN)], "i4,f4")),
    "arrays of objects": lambda: [np.array(["a", x], dtype=object) for x in (None, 1)],
    "numbers of numpy": lambda: (np.int64(1_000_001), np.int64(1_000_002)),
    "containers": lambda: ((1, "a"), [1, "a"]),
    "orders of keys": lambda: ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "lengths": lambda: ([NAN, 1], [NAN]),
    "bytes": lambda: (b"a" * 5000 + b"b", b"a" * 5000 + b"c"),
    "objects": lambda: (SimpleNamespace(x=1, y={2}, z=NAN), SimpleNamespace(x=1, y={3}, z=NAN)),
    "objects that hold themselves": lambda: (Node(torch.zeros(1)), Node(torch.ones(1))),
    "queues": lambda: (collections.deque([1, NAN]), collections.deque([2, NAN])),
    "arrays of Python": lambda: (array.array("d", [1.0]), array.array("d", [2.0])),
    "files in memory": lambda: (io.BytesIO(b"a"), io.BytesIO(b"b")),
    "tables": lambda: (pd.DataFrame({"x": [1.0, NAN]}), pd.DataFrame({"x": [2.0, NAN]})),
    "pictures": lambda: [Image.new("RGB", (4, 4), color) for color in ("red", "blue")],
    "patterns": lambda: ([re.compile("a")], [re.compile("b")]),
}


KINDS = [pytest.param(kind, marks=[pytest.mark.system] * (kind == JAGGED)) for kind in DIFFERENT]


@pytest.mark.filterwarnings("ignore:.*(quantiz|nested tensors|Sparse|TypedStorage).*")
@pytest.mark.parametrize("kind", KINDS)
def test_batches_made_alike_alone_are_equal(kind):
    (one, other), (same, _) = DIFFERENT[kind](), DIFFERENT[kind]()
    for near in (0.0, NEAR):
        assert is_equal(one, same, near)
        assert not is_equal(one, other, near)
    assert are_repeated(one, same)
    assert not are_repeated(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0, NAN]), torch.tensor([1.0 + 1e-6, NAN])),
        (np.array([1.0, NAN]), np.array([1.0 + 1e-6, NAN])),
        (0.1 + 0.2, 0.3),
        (np.float64(0.3) * 1j, np.float64(0.3000001) * 1j),
    ],
)
def test_floats_may_differ_by_rounding(one, other):
    assert not is_equal(one, other)
    assert is_equal([one], [other], NEAR)


def test_batches_that_cannot_be_compared_are_repeated():
    assert are_repeated((1, Odd()), (1, Odd()))
    assert not are_repeated((Odd(), 1), (Odd(), 2))
