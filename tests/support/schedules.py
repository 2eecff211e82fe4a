"""Random schedules of changes over random loaders, run beside a plain DataLoader that never changes.

A case is drawn from its seed alone, so that a difference can be run again: `python -m studies.live.mechanism --case 17`.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader.autoloader.iterator import LOOKS
from autotune_loader.autoloader.loader import AutoLoader
from autotune_loader.autoloader.tuner import Frozen, Tuner
from autotune_loader.values import LoaderConfig

KINDS = ("map", "getitems", "batch_sampler", "unbatched", "stream")


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
        if tuner.refused is None:
            tuner.wanted = (
                tuner.asked.with_workers(1, 2)
                if tuner.asked.num_workers and not config.num_workers
                else config
            )


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
    """Makes its generator anew where it is unpickled, as people do who do not want workers to have the same."""

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
        return torch.tensor(
            [super().__getitem__(index)[0], *((info.id, info.num_workers) if info else (-1, 0))]
        )


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


class Eager(Numbers):
    """A sampler that draws from all three global generators as soon as it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.samples).tolist()
        random.shuffle(order)
        return iter([order[i] for i in np.random.permutation(self.samples)])


SAMPLERS: dict[str, Callable[[Any, torch.Generator, int], Any]] = {
    "none": lambda dataset, generator, seed: data.SequentialSampler(dataset),
    "shuffle": lambda dataset, generator, seed: data.RandomSampler(dataset),
    "generator": lambda dataset, generator, seed: data.RandomSampler(dataset, generator=generator),
    "random": lambda dataset, generator, seed: data.RandomSampler(
        dataset, num_samples=len(dataset) * 2
    ),
    "replacement": lambda dataset, generator, seed: data.RandomSampler(
        dataset, replacement=True, generator=generator
    ),
    "subset": lambda dataset, generator, seed: data.SubsetRandomSampler(range(0, len(dataset), 2)),
    "weighted": lambda dataset, generator, seed: data.WeightedRandomSampler(
        range(1, len(dataset) + 1), len(dataset)
    ),
    "distributed": lambda dataset, generator, seed: data.DistributedSampler(
        dataset, num_replicas=2, rank=seed % 2
    ),
    "eager": lambda dataset, generator, seed: Eager(len(dataset)),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A loader, and when it changes to what."""

    seed: int
    kind: str
    sampler: str
    samples: int
    batch_size: int
    epochs: int
    asked: dict[str, Any]  # Arguments of DataLoader for both
    changes: dict[tuple[int, int], LoaderConfig]  # By (epoch, batch): asked for after that batch
    leaves: dict[int, int]  # Epochs that are left by `break` after so many batches
    draws: bool  # Whether the loop draws random numbers, too, as dropout does


def draw_case(seed: int, kind: str | None = None) -> Case:
    rng = random.Random(seed)
    kind = kind or rng.choice(KINDS)
    samples, batch_size, epochs = rng.randint(1, 90), rng.randint(1, 7), rng.randint(1, 3)
    batches = -(-samples // (1 if kind == "unbatched" else batch_size))
    asked: dict[str, Any] = {}
    if rng.random() < 0.4:
        asked = {"num_workers": rng.randint(1, 3), "prefetch_factor": rng.randint(1, 3)}
        asked["persistent_workers"] = rng.random() < 0.4
    if kind in ("map", "getitems", "stream") and rng.random() < 0.3:
        asked["drop_last"] = True
    sampler = "none" if kind == "stream" else rng.choice(list(SAMPLERS))
    changes = {
        (rng.randrange(epochs), rng.randrange(batches + 1)): draw_config(rng)
        for _ in range(0 if kind == "stream" else rng.randint(1, 4))
    }
    leaves = (
        {rng.randrange(epochs): rng.randint(1, batches)}
        if rng.random() < 0.2 and kind != "stream"
        else {}
    )
    return Case(
        seed,
        kind,
        sampler,
        samples,
        batch_size,
        epochs,
        asked,
        changes,
        leaves,
        draws=rng.random() < 0.5,
    )


def draw_config(rng: random.Random) -> LoaderConfig:
    if (workers := rng.choice([0, 1, 2, 3])) == 0:
        return LoaderConfig()
    return LoaderConfig(
        num_workers=workers,
        prefetch_factor=rng.randint(1, 4),
        persistent_workers=rng.random() < 0.3,
    )


def arguments(case: Case) -> dict[str, Any]:
    """Fresh arguments of the case's loader, samplers and generators included."""
    if case.kind == "stream":
        return {"dataset": Stream(case.samples), "batch_size": case.batch_size, **case.asked}
    dataset = Fetched(case.samples) if case.kind == "getitems" else Numbers(case.samples)
    generator = torch.Generator().manual_seed(case.seed)
    sampler = SAMPLERS[case.sampler](dataset, generator, case.seed)
    asked: dict[str, Any] = {"dataset": dataset, **case.asked}
    if case.sampler in ("generator", "replacement"):
        asked["generator"] = generator
    if case.kind == "batch_sampler":
        return asked | {
            "batch_sampler": data.BatchSampler(sampler, case.batch_size, case.seed % 2 == 0)
        }
    asked["batch_size"] = None if case.kind == "unbatched" else case.batch_size
    if case.kind != "unbatched" and case.sampler in ("none", "shuffle", "generator"):
        return asked | {"shuffle": case.sampler != "none"}
    return asked | {"sampler": sampler}


def run(case: Case, loader_class: type[Any], change: bool) -> tuple[list[Any], Any]:
    """All batches of all epochs, and the state of every generator afterwards."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(case.seed)
    asked, seen = arguments(case), list[Any]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = loader_class(**asked)
        for epoch in range(case.epochs):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                seen.append((epoch, torch.as_tensor(batch).tolist()))
                if case.draws:
                    seen.append((torch.rand(1).item(), random.random(), np.random.random()))
                if change and (epoch, number) in case.changes:
                    loader.change_to(case.changes[epoch, number])
                if number + 1 == case.leaves.get(epoch):
                    break
            seen.append("end of epoch")
        return seen, states(asked.get("generator"))


def states(generator: torch.Generator | None = None) -> Any:
    _, words, *others = np.random.get_state()
    own = generator.get_state().tolist() if generator else None
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(x) for x in others],
        words.tolist(),
        own,
    )


def differences(case: Case) -> list[str]:
    """In what the changing loader differs from the plain one; nothing where it keeps its promise."""
    plain, plain_state = run(case, DataLoader, change=False)
    ours, our_state = run(case, FixedLoader, change=True)
    found = [] if plain == ours else [f"batches: {len(plain)} and {len(ours)}"]
    # After `break` a sampler that draws batch by batch has drawn as far ahead as there are workers, in torch as here.
    if plain_state != our_state and not case.leaves:
        found.append("state of the generators")
    return found
