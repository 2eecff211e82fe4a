"""Is a dataset that is read from a disk measured from the disk? `python -m studies.cold [--only shuffled] [--files DIR]`

The first read of a sample waits 10 ms, whoever reads it, and later ones nothing; with `--files` there are files as well, which
are dropped from the page cache (posix_fadvise). The dataset is larger than what a run reads. After `tune()` everything is
forgotten, and each number of workers trains over samples that were never read, in turns; what was chosen does so as well, and
once more for twice as long.

Goals: what was chosen is within 2% of the best measured cold, and the rate told within 10% of a cold epoch.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, SubsetRandomSampler

from autotune_loader import LoaderConfig, tune

WAIT_S = 0.01
"""What the first read of a sample waits, whoever reads it."""
FILE_BYTES = 1 << 18
MARKS = "/dev/shm"
BATCH = 16
STEP_S = 0.02
"""A step on an accelerator; 8 workers are in time for it when samples wait."""
WORKERS = (0, 1, 2, 4, 6, 8, 12, 16)
WARM_BATCHES = 4
"""Of each worker, before its rate counts."""
LOSS_GOAL, TOLD_GOAL = 0.02, 0.10
COLUMNS = ("job", "chosen", "told", "cold epoch", "told wrong by", "best cold", "loss")


def step(_model: Any, _batch: Any) -> None:
    """As on an accelerator: the CPU is free meanwhile."""
    time.sleep(STEP_S)


class FirstReadWaits(Dataset[torch.Tensor]):
    """A note for each sample, in memory that all processes share, says whether it was read before.

    Args:
        samples: of an epoch.
        slope: how much less the first samples of an epoch wait, and the last ones more: 1 is nothing and twice as long.
    """

    def __init__(self, samples: int, slope: float = 0.0) -> None:
        self.samples, self.slope = samples, slope
        descriptor, self.path = tempfile.mkstemp(prefix="cold-", dir=MARKS)
        os.close(descriptor)
        self._marks: np.ndarray | None = None
        self.forget()

    def forget(self) -> None:
        """As after a restart: nothing was read."""
        self._marks = None
        with Path(self.path).open("wb") as file:
            file.truncate(self.samples)

    def remove(self) -> None:
        """Leave nothing."""
        self._marks = None
        Path(self.path).unlink()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._marks is None:
            self._marks = np.memmap(self.path, np.uint8, "r+")
        if not self._marks[index]:
            self._marks[index] = 1
            time.sleep(WAIT_S * (1 + self.slope * (2 * index / self.samples - 1)))
        return torch.full((8,), float(index))


class Files(Dataset[torch.Tensor]):
    """Files of random bytes, a sample each; `forget` has the kernel drop them from memory."""

    def __init__(self, samples: int, folder: Path) -> None:
        self.paths = [str(folder / f"{number}.bin") for number in range(samples)]
        for path in self.paths:
            Path(path).write_bytes(os.urandom(FILE_BYTES))
        self.forget()

    def forget(self) -> None:
        """Evict them; what was just written goes to the disk first."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def remove(self) -> None:
        """The folder goes with what is in it."""

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(Path(self.paths[index]).read_bytes()), dtype=torch.uint8)[:64].float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A dataset and how it is read."""

    make: Callable[[], Any]
    loader: Callable[[Any], dict[str, Any]] = lambda dataset: {"batch_size": BATCH}
    spread: Callable[[Any], dict[str, Any]] | None = None
    """The same batches in an order of which every part is like the epoch, for cold runs that see only a part."""


def by_length(dataset: Any) -> list[list[int]]:
    """Batches of one's own, whose samples wait longer and longer."""
    return list(BatchSampler(SequentialSampler(dataset), BATCH, False))


def in_another_order(dataset: Any) -> dict[str, Any]:
    batches = by_length(dataset)
    return {"batch_sampler": random.Random(1).sample(batches, len(batches))}


def jobs(samples: int, folder: Path | None) -> dict[str, Job]:
    """By name."""

    found = {
        "shuffled": Job(make=partial(FirstReadWaits, samples), loader=lambda _: {"batch_size": BATCH, "shuffle": True}),
        "in order": Job(make=partial(FirstReadWaits, samples)),
        "a subset": Job(
            make=partial(FirstReadWaits, samples),
            loader=lambda dataset: {"batch_size": BATCH, "sampler": SubsetRandomSampler(range(0, len(dataset), 2))},
        ),
        "by length": Job(
            make=partial(FirstReadWaits, samples, slope=0.5),
            loader=lambda dataset: {"batch_sampler": by_length(dataset)},
            spread=in_another_order,
        ),
    }
    return found if folder is None else found | {"files": Job(make=lambda: Files(min(samples, 20_000), folder))}


def cold_rate(job: Job, dataset: Any, config: LoaderConfig, seconds: float) -> float:
    """Samples/s of training over samples that nobody has read, once all workers are at work."""
    dataset.forget()
    batches = iter(DataLoader(dataset, **(job.spread or job.loader)(dataset), **config.to_kwargs()))
    for _ in range(1 + WARM_BATCHES * config.num_workers):
        step(None, next(batches))
    begun, samples = time.monotonic(), 0
    while time.monotonic() - begun < seconds:
        batch = next(batches)
        step(None, batch)
        samples += len(batch)
    return samples / (time.monotonic() - begun)


def study(name: str, job: Job, seconds: float, rounds: int) -> str:
    """One row of the table."""
    dataset = job.make()
    try:
        result = tune(DataLoader(dataset, **job.loader(dataset)), train_step=step, progress=False)
        told = 0.0 if result.rate is None else result.rate.value
        configs = [*(LoaderConfig(num_workers=workers) for workers in WORKERS), result.best]
        rates: list[list[float]] = [[] for _ in configs]
        for number in range(rounds):
            for position in sorted(range(len(configs)), reverse=number % 2 > 0):  # forwards, backwards
                rates[position].append(cold_rate(job, dataset, configs[position], seconds))
                print(f"RECORD {name} | {configs[position]} | {rates[position][-1]:.0f}/s", flush=True)
        *medians, chosen = map(statistics.median, rates)
        epoch = cold_rate(job, dataset, result.best, 2 * seconds)
    finally:
        dataset.remove()
    wrong, loss = told / epoch - 1, max(0.0, 1 - chosen / max(*medians, chosen))
    beyond = [" !" if missed else "" for missed in (abs(wrong) > TOLD_GOAL, loss > LOSS_GOAL)]
    rates_told = (
        f"{told:.0f}/s | {epoch:.0f}/s | {wrong:+.1%}{beyond[0]} | {max(medians):.0f}/s | {loss:.1%}{beyond[1]}"
    )
    return f"| {name} | {result.best} | {rates_told} |"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="one job by its name")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each cold run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=400_000, help="of an epoch; more than a run reads")
    parser.add_argument("--files", type=Path, help="a folder on the disk, for 20,000 files of 256 KiB")
    options = parser.parse_args(arguments)
    # Where workers wait, more than cores are right.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    with tempfile.TemporaryDirectory(dir=options.files) as folder:
        known = jobs(options.samples, Path(folder) if options.files else None)
        chosen = {name: job for name, job in known.items() if options.only in (None, name)}
        rows = [study(name, job, options.seconds, options.rounds) for name, job in chosen.items()]
    print(f"goals: loss {LOSS_GOAL:.0%}, told wrong by {TOLD_GOAL:.0%} (beyond: !)")
    print("\n".join([f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS), *rows]))


if __name__ == "__main__":
    main()
