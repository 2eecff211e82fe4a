"""A loader that changes beside a plain one that never does, which says what each batch has to be.

Tests have hypothesis choose the steps (tests/autoloader/test_elastic.py), the study a seed:
`python -m studies.live.mechanism --case 17`.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader.autoloader.iterator import LOOKS, MOST_LOSSES
from autotune_loader.autoloader.loader import AutoLoader
from autotune_loader.autoloader.tuner import Frozen, Tuner
from autotune_loader.values import LoaderConfig

OWN_GENERATOR = ("generator", "replacement")
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

    def weights(self) -> range:
        return range(1, self.samples + 1)

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
    """A sampler that draws from the global generators once it is asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.samples).tolist()
        random.shuffle(order)
        return iter([order[i] for i in np.random.permutation(self.samples)])


SAMPLERS: dict[str, Callable[[Any, torch.Generator, int], Any]] = {
    "none": lambda rows, own, seed: data.SequentialSampler(rows),
    "shuffle": lambda rows, own, seed: data.RandomSampler(rows),
    "generator": lambda rows, own, seed: data.RandomSampler(rows, generator=own),
    "random": lambda rows, own, seed: data.RandomSampler(rows, num_samples=len(rows) * 2),
    "replacement": lambda rows, own, seed: data.RandomSampler(rows, True, generator=own),
    "subset": lambda rows, own, seed: data.SubsetRandomSampler(range(0, len(rows), 2)),
    "weighted": lambda rows, own, seed: data.WeightedRandomSampler(rows.weights(), len(rows)),
    "distributed": lambda rows, own, seed: data.DistributedSampler(rows, 2, seed % 2),
    "eager": lambda rows, own, seed: Eager(len(rows)),
}  # fmt: skip
GENERATORS = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of a loader."""

    seed: int
    kind: str
    sampler: str
    samples: int
    batch_size: int
    asked: dict[str, Any]  # Arguments of DataLoader for both
    draws: bool  # Whether the loop draws random numbers, too, as dropout does

    def arguments(self) -> dict[str, Any]:
        """Fresh ones, samplers and generators included."""
        if self.kind == "stream":
            return {"dataset": Stream(self.samples), "batch_size": self.batch_size, **self.asked}
        dataset = Fetched(self.samples) if self.kind == "getitems" else Numbers(self.samples)
        generator = torch.Generator().manual_seed(self.seed)
        sampler = SAMPLERS[self.sampler](dataset, generator, self.seed)
        asked: dict[str, Any] = {"dataset": dataset, **self.asked}
        if self.sampler in OWN_GENERATOR:
            asked["generator"] = generator
        if self.kind == "batch_sampler":
            batches = data.BatchSampler(sampler, self.batch_size, self.seed % 2 == 0)
            return asked | {"batch_sampler": batches}
        asked["batch_size"] = None if self.kind == "unbatched" else self.batch_size
        if self.kind != "unbatched" and self.sampler in ("none", "shuffle", "generator"):
            return asked | {"shuffle": self.sampler != "none"}
        return asked | {"sampler": sampler}


def draw_case(source: int | random.Random) -> Case:
    """A case from a seed, or from whoever draws its numbers."""
    rng = source if isinstance(source, random.Random) else random.Random(source)
    kind, asked = rng.choice(KINDS), dict[str, Any]()
    if rng.random() < 0.5:
        asked = {"num_workers": rng.randint(1, 3), "prefetch_factor": rng.randint(1, 3)}
        asked["persistent_workers"] = rng.random() < 0.4
    if kind in ("map", "getitems", "stream") and rng.random() < 0.3:
        asked["drop_last"] = True
    return Case(
        seed=rng.randint(0, 999),
        kind=kind,
        sampler="none" if kind == "stream" else rng.choice(list(SAMPLERS)),
        samples=rng.randint(1, 90),
        batch_size=rng.randint(1, 7),
        asked=asked,
        draws=rng.random() < 0.5,
    )


def draw_config(rng: random.Random) -> LoaderConfig:
    if (workers := rng.choice([0, 1, 2, 3])) == 0:
        return LoaderConfig()
    return LoaderConfig(num_workers=workers, prefetch_factor=rng.randint(1, 4))


class Side:
    """One of two loaders, with the global generators as its own training has them."""

    def __init__(self, case: Case, loader_class: type[Any]) -> None:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(case.seed)
        self.arguments, self.draws, self.iterator = case.arguments(), case.draws, None
        self.__exit__()
        with self:
            self.loader = loader_class(**self.arguments)

    def __enter__(self) -> None:
        for (_, put_back), state in zip(GENERATORS, self.global_states, strict=True):
            put_back(state)

    def __exit__(self, *_: object) -> None:
        self.global_states: list[Any] = [state() for state, _ in GENERATORS]

    @property
    def states(self) -> Any:
        with self:
            return states(self.arguments.get("generator"))

    def begin(self, epoch: int) -> None:
        with self:
            if hasattr(self.loader.sampler, "set_epoch"):
                self.loader.sampler.set_epoch(epoch)
            self.iterator = iter(self.loader)

    def take(self) -> Any:
        """The next batch, and what the loop draws then; None at the end."""
        with self:
            if (batch := next(self.iterator, None)) is None:
                self.iterator = None
                return None
            drawn = (
                (torch.rand(1).item(), random.random(), np.random.random()) if self.draws else ()
            )
            return torch.as_tensor(batch).tolist(), *drawn


class Beside:
    """A plain DataLoader, and one of the same arguments to which something happens."""

    def __init__(self, case: Case) -> None:
        self.case, self.plain, self.ours = case, Side(case, DataLoader), Side(case, FixedLoader)
        self.sides, self.epoch, self.kills, self.differs = (self.plain, self.ours), -1, 0, ""

    @property
    def is_running(self) -> bool:
        return self.ours.iterator is not None

    def begin(self) -> None:
        """A new epoch."""
        self.epoch += 1
        for side in self.sides:
            side.begin(self.epoch)

    def take(self, batches: int = 1000) -> None:
        """So many batches, or fewer at the end of the epoch."""
        for _ in range(batches if self.is_running else 0):
            plain, ours = (side.take() for side in self.sides)
            if ours != plain:
                self.differs = f"epoch {self.epoch}: {ours}, and not {plain}"
            elif plain is None and self.ours.states != self.plain.states:
                self.differs = f"the states of the generators after epoch {self.epoch}"
            assert not self.differs, self.differs
            if plain is None:
                return

    def resize(self, config: LoaderConfig) -> None:
        self.ours.loader.change_to(config)

    def pause(self) -> None:
        """Workers begin meanwhile."""
        time.sleep(0.02)

    def leave(self) -> None:
        """As by `break`."""
        for side in self.sides:
            side.iterator = None
            if self.case.sampler == "replacement":
                # It has drawn as far ahead as there are workers, in torch as here.
                side.arguments["generator"].manual_seed(self.epoch)

    def kill(self, number: int) -> None:
        """A worker, or what forks further ones. The third in a row would be torch's error."""
        iterator: Any = self.ours.iterator
        if self.case.kind == "stream" or self.kills == MOST_LOSSES - 1:
            return
        processes = [*iterator._workers, iterator._context._nursery]
        if pid := getattr(processes[number % len(processes)], "pid", None):
            self.kills += 1
            os.kill(pid, signal.SIGKILL)

    def fork(self) -> None:
        """A process of the training's own, which drops the iterator that it has inherited."""
        if (pid := os.fork()) == 0:
            with suppress(BaseException):
                getattr(self.ours.iterator, "__del__", int)()  # a stream without workers has none
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0

    def copy(self) -> None:
        """Train on with a copy of the loader; pickled where it has no generator of the script's."""
        for side in self.sides:
            loader = side.loader
            # Neither a generator nor workers that are kept can be pickled.
            is_shared = self.case.sampler in OWN_GENERATOR or loader.persistent_workers
            side.loader = copy.copy(loader) if is_shared else pickle.loads(pickle.dumps(loader))

    def close(self) -> None:
        """Nothing is left for the garbage collector, which also runs in forks."""
        for side in self.sides:
            side.iterator = side.loader = None


def differences(case: Case) -> list[str]:
    """Where a loader to which much happens differs from the plain one in one random schedule."""
    rng, beside = random.Random(case.seed), Beside(case)
    try:
        for _ in range(rng.randint(1, 3)):
            beside.begin()
            for _ in range(rng.randint(0, 4)):
                if case.kind != "stream":
                    beside.resize(draw_config(rng))
                beside.take(rng.randint(1, 30))
                if not beside.is_running:
                    break
            if beside.is_running and rng.random() < 0.2:
                beside.leave()
            elif beside.is_running:
                beside.take()
    except AssertionError:
        return [beside.differs]
    return []


def states(generator: torch.Generator | None = None) -> Any:
    _, words, *others = np.random.get_state()
    own = generator.get_state().tolist() if generator else None
    numpys = [str(x) for x in others]
    return torch.get_rng_state().tolist(), random.getstate(), numpys, words.tolist(), own
