"""The members of a dataset's `transform`: taken apart, left out, tried on a sample, and compared by what they make."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Transform = Callable[[Any], Any]
DRAWS = 4
"""So often a transform is asked for the same sample, whether it is random."""


class Members:
    """Members of a container that are applied one after the other, as its own class would."""

    def __init__(self, members: Sequence[Transform]) -> None:
        self.transforms = list(members)

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


def members_of(dataset: Any) -> list[Transform]:
    """What a dataset's `transform` does, one after the other; empty where it has none."""
    transform = getattr(dataset, "transform", None)
    if transform is None:
        return []
    listed = getattr(transform, "transforms", None)
    return list(listed) if isinstance(listed, (list, tuple)) else [transform]


def with_members(dataset: Any, members: Sequence[Transform]) -> Any:
    """A copy of the dataset whose `transform` is these; without any it is still called, as a dataset may not ask."""
    changed = copy.copy(dataset)
    changed.transform = Members(members)
    combined = getattr(changed, "transforms", None)
    if combined is not None and hasattr(combined, "target_transform"):  # torchvision keeps both once more, as one
        changed.transforms = copy.copy(combined)
        changed.transforms.transform = changed.transform
    return changed


def on_copy(member: Transform, sample: Any) -> Any:
    """What a transform makes of a sample that it may change."""
    return member(copy.deepcopy(sample))


def part_of(sample: Any) -> Any:
    """What a dataset's `transform` is for: the first of a tuple, or the sample itself."""
    return sample[0] if isinstance(sample, tuple) else sample


def is_random(make: Callable[[], Any]) -> bool:
    """Whether it draws random numbers, or gives something else for the same."""
    before = _states()
    made = make()
    return _states() != before or not all(same(made, make()) for _ in range(DRAWS - 1))


def with_seed(seed: int, make: Callable[[], Any]) -> Any:
    """What it makes with these random numbers; those of the caller go on as if nothing had been drawn."""
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 - transforms draw from it
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - as above
    try:
        return make()
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])  # noqa: NPY002 - as above


def same(one: Any, other: Any) -> bool:
    """Whether two samples hold the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes"):  # a picture
        return bool(one.tobytes() == other.tobytes())
    return pickle.dumps(one) == pickle.dumps(other)


def _states() -> tuple[Any, ...]:
    kept = np.random.get_state()  # noqa: NPY002 - transforms draw from it
    return torch.get_rng_state().tolist(), random.getstate(), [kept[0], kept[1].tolist(), *kept[2:]]  # type: ignore[index]
