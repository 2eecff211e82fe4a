"""Loaders that change when they are told to, and datasets that say who made a sample, and how."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autotune_loader.autoloader.iterator import LOOKS
from autotune_loader.autoloader.loader import AutoLoader
from autotune_loader.autoloader.tuner import Frozen, Tuner
from autotune_loader.values import LoaderConfig


class Movable(Tuner):
    """A tuner that is frozen, but not for good."""

    @property
    def may_change(self) -> bool:
        return True


class FixedLoader(AutoLoader[Any]):
    """An AutoLoader that changes only when it is told to, and whose workers count as proven."""

    @property
    def _live(self) -> Any:
        live = super()._live
        if not hasattr(live, "is_fixed"):
            live.is_fixed, live.equal = True, LOOKS
            live.tuner.decide(Frozen(), 0.0)
            live.tuner.may_start = lambda: True
            live.tuner.__class__ = Movable
        return live

    def change_to(self, config: LoaderConfig) -> None:
        """From the next batch on; where workers were asked for, to at least one."""
        tuner = self.found.tuner
        if tuner.asked.num_workers and not config.num_workers:
            config = tuner.asked.with_workers(1, 2)
        if tuner.refused is None:
            tuner.wanted = config


class Numbers(Dataset[Any]):
    """Sample i is (i, i * i)."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index * index])


class Slow(Numbers):
    """The same, waited for."""

    def __init__(self, samples: int, seconds: float = 0.002) -> None:
        self.samples, self.seconds = samples, seconds

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Remade:
    """Makes its generator anew where it is unpickled, so that workers do not have the same."""

    def __init__(self, seed: int | None = None) -> None:
        self.rng = np.random.default_rng(seed)

    def __getstate__(self) -> Any:
        return {"rng": None}

    def __setstate__(self, _: Any) -> None:
        self.rng = np.random.default_rng()

    def __call__(self) -> float:
        return self.rng.random()


class Where(Slow):
    """Sample i is (i, who makes it, of how many): (i, -1, 0) in the training process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        info = get_worker_info()
        about = (info.id, info.num_workers) if info else (-1, 0)
        return torch.tensor([super().__getitem__(index)[0], *about])


class Fetched(Numbers):
    """Numbers, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Noise(Numbers):
    """Sample i with random numbers of all three kinds: an augmentation."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, random.random(), np.random.random(), torch.rand(()).item()])


class Stream(IterableDataset[Any]):
    """Numbers, every worker its share."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.samples, step))


def states(generator: torch.Generator | None = None) -> Any:
    _, words, *others = np.random.get_state()
    own = generator.get_state().tolist() if generator else None
    numpys = [str(x) for x in others]
    return torch.get_rng_state().tolist(), random.getstate(), numpys, words.tolist(), own
