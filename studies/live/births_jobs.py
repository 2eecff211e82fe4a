"""What a fresh process of `studies.live.births` does: datasets, and jobs that each return their figures.

A job is called with what `births.py --job` was given. Whatever is imported besides torch is imported where it is used, as a
worker of spawn or forkserver imports this module, too.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset

HEAVY = (
    "pandas", "pyarrow", "pyarrow.compute", "pyarrow.parquet", "datasets", "lightning", "scipy.stats", "optuna", "polars",
)  # fmt: skip
"""What scripts import that takes seconds; those that are not installed are left out."""
SIZE = 32
EPOCH_BATCHES = 40
FEWEST_BOUNDARIES = 3
LATE_S = 120.0
"""A further worker that has delivered nothing after this has failed."""
STEP_S, WARM_STEPS = 0.001, 50
"""Of the training while workers are waited for, so that it leaves them the cores; steps before they are."""
PICTURES, PICTURE_FILES, PICTURE_PIXELS = 27_000, 1000, 64
"""Of EuroSAT: its pictures, and their width. The files are listed again and again."""
RESIZED, CROP, PICTURE_BATCH = 256, 224, 64


class Entries(Dataset[Any]):
    """So many entries: names, labels, boxes and weights. A sample tells who made it when, and of which epoch its data are."""

    def __init__(self, count: int) -> None:
        self.names = [f"train/class_{index % 1000:04d}/image_{index:08d}.jpg" for index in range(count)]
        self.labels = np.arange(count) % 1000
        self.boxes = np.random.default_rng(0).random((count, 4), dtype=np.float32)
        self.weights = torch.ones(count)
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Any:
        begun, box = time.monotonic(), torch.from_numpy(self.boxes[index]) * self.weights[index]
        return os.getpid(), begun, self.epoch, len(self.names[index]), int(self.labels[index]), box


class Importing(Dataset[Any]):
    """Few data of a class whose module imports much: whoever unpickles it has imported that."""

    def __init__(self, count: int) -> None:
        self.count = count
        import_heavy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        import_heavy()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), time.monotonic(), torch.ones(4)


def import_heavy() -> list[str]:
    """What is missing of HEAVY."""
    missing = []
    for name in HEAVY:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    return missing


class Numbered(Dataset[Any]):
    """Sample i is (i, who makes it), waited for; names make its pickle large."""

    def __init__(self, count: int, names: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds
        self.names = [f"image_{index:08d}.jpg" for index in range(names)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, int]:
        time.sleep(self.seconds)
        return index, os.getpid()


class Endless:
    """A sampler of an epoch that does not end while anything is measured."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return 1 << 30

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(self.count))


def loader_of(which: str, data: Dataset[Any], workers: int, **other: Any) -> Any:
    """`torch`: DataLoader; `stateful`: torchdata's; `ours`: AutoLoader with as many workers as are asked for."""
    if which == "ours":
        from autotune_loader import AutoLoader

        return AutoLoader(data, num_workers=workers, tune=False, **other)
    if which == "stateful":
        import inspect

        from torchdata.stateful_dataloader import StatefulDataLoader

        if "spawn_worker_start_parallelism" in inspect.signature(StatefulDataLoader).parameters:  # from 0.12 on
            other["spawn_worker_start_parallelism"] = workers
        return StatefulDataLoader(data, num_workers=workers, **other)
    return DataLoader(data, num_workers=workers, **other)


def children_cpu_s() -> float:
    """CPU seconds of all processes below this one, of those that have ended, too."""
    from autotune_loader.machine.processes import tree, tree_use

    use, ended = tree_use(tree(os.getpid())[1:]), os.times()
    return (use.cpu_s if use else 0.0) + ended.children_user + ended.children_system


def children_pss_mb() -> float:
    from autotune_loader.machine.processes import tree, tree_pss

    return (tree_pss(tree(os.getpid())[1:]) or 0) / 1e6


def start(which: str, method: str, workers: int, data: str, entries: int, batches: int) -> dict[str, Any]:
    """From `iter()` until every worker has delivered a batch: wall and CPU; memory so many batches later.

    `iter_s` is `iter()` itself, `sample_s` ends where the first sample begins.
    """
    multiprocessing.set_start_method(method)
    samples = Entries(entries) if data == "entries" else Importing(entries)
    loader = loader_of(which, samples, workers, batch_size=SIZE, sampler=Endless(entries))
    begun, cpu_s = time.monotonic(), children_cpu_s()
    iterator = iter(loader)
    iter_s = time.monotonic() - begun
    seen, first = set[int](), list[float]()
    while len(seen) < workers:
        pids, times, *_ = next(iterator)
        seen |= set(pids.tolist())
        first.append(float(times[0]))
    all_s, cpu_s = time.monotonic() - begun, children_cpu_s() - cpu_s
    for _ in range(batches):
        next(iterator)
    missing = import_heavy() if data == "imports" else []
    took = {"iter_s": iter_s, "sample_s": min(first) - begun, "wall_s": all_s, "cpu_s": cpu_s}
    return {**took, "pss_mb": children_pss_mb(), "missing": missing}


def further(which: str, method: str, workers: int, entries: int) -> dict[str, Any]:
    """So many further workers in mid-epoch, one after the other: until one is there, and until its first sample begins."""
    from autotune_loader.machine.processes import tree
    from autotune_loader.values import LoaderConfig
    from tests.support.schedules import FixedLoader

    multiprocessing.set_start_method(method)
    begin = 2
    loader = FixedLoader(Entries(entries), batch_size=SIZE, num_workers=begin, sampler=Endless(entries))
    iterator, seen = iter(loader), set[int]()
    while len(seen) < begin:
        seen.add(int(next(iterator)[0][0]))
    there, sample = list[float](), list[float]()
    for number in range(begin + 1, begin + 1 + workers):
        before, asked_at, is_there = set(tree(os.getpid())), time.monotonic(), False
        loader.change_to(LoaderConfig(num_workers=number, prefetch_factor=2))
        while len(seen) < number:
            pids, times, *_ = next(iterator)
            now = time.monotonic()
            if not is_there and set(tree(os.getpid())) - before:
                is_there = True
                there.append(now - asked_at)
            if int(pids[0]) not in seen:
                seen.add(int(pids[0]))
                sample.append(float(times[0]) - asked_at)
            if now > asked_at + LATE_S:
                raise TimeoutError(f"worker {number} has delivered nothing")
            time.sleep(STEP_S)
    return {"there_s": there, "sample_s": sample}


def unasked(which: str, method: str, entries: int) -> dict[str, Any]:
    """The longest step of a loop for which nobody asked for workers, until two have delivered; of torch's without any."""
    from autotune_loader.values import LoaderConfig
    from tests.support.schedules import FixedLoader

    multiprocessing.set_start_method(method)
    is_ours, seen, longest_s, begun = which == "ours", set[int](), 0.0, time.monotonic()
    kind = FixedLoader if is_ours else DataLoader
    loader: Any = kind(Entries(entries), batch_size=SIZE, sampler=Endless(entries))
    for number, _ in enumerate(iterator := iter(loader)):
        if number == WARM_STEPS:
            break
    if is_ours:
        loader.change_to(LoaderConfig(num_workers=2, prefetch_factor=2))
    while len(seen) < (3 if is_ours else 1) or number < 2 * WARM_STEPS:
        time.sleep(STEP_S)
        before = time.monotonic()
        batch = next(iterator)
        longest_s, number = max(longest_s, time.monotonic() - before), number + 1
        seen |= set(batch[0].tolist())
        if before > begun + LATE_S:
            raise TimeoutError("workers have delivered nothing")
    return {"longest_s": longest_s}


def boundary(
    which: str, method: str, entries: int, boundaries: int, limit_s: float, is_changed: bool
) -> dict[str, Any]:
    """From the last batch of an epoch to the first of the next, with 2 workers that are not kept."""
    multiprocessing.set_start_method(method)
    data = Entries(entries)
    loader = loader_of(which, data, 2, batch_size=SIZE, sampler=range(SIZE * EPOCH_BATCHES))
    begun, gaps, last = time.monotonic(), list[float](), 0.0
    for epoch in range(boundaries + 1):
        if is_changed:
            data.epoch = epoch
        for number, batch in enumerate(loader):
            now = time.monotonic()
            if last and not number:
                gaps.append(now - last)
            if batch[2].tolist() != [data.epoch] * SIZE:
                raise ValueError(f"epoch {epoch} has samples of epoch {batch[2].tolist()}")
            last = time.monotonic()
        if len(gaps) >= FEWEST_BOUNDARIES and last > begun + limit_s:
            break
    return {"boundary_s": statistics.median(gaps), "boundaries": len(gaps)}


def picture_files(folder: Path, count: int) -> list[Path]:
    """Paths of so many pictures, of which those that are missing are made; a file stands for several of them."""
    from studies.pictures import make_jpegs

    paths = make_jpegs(folder, min(count, PICTURE_FILES), (PICTURE_PIXELS, PICTURE_PIXELS))
    return list(itertools.islice(itertools.cycle(paths), count))


class Pictures(Dataset[Any]):
    """The pictures of EuroSAT by size and number: a list of (path, label), decoded, resized, cropped and normalised."""

    def __init__(self, folder: Path, count: int) -> None:
        paths = picture_files(folder, count)
        self.samples = [(str(path), index % 10) for index, path in enumerate(paths)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image

        from studies.pictures import normalised

        path, label = self.samples[index]
        edge = (RESIZED - CROP) // 2
        with Image.open(path) as file:
            picture = file.convert("RGB").resize((RESIZED, RESIZED), Image.Resampling.BILINEAR)
        return normalised(np.asarray(picture.crop((edge, edge, edge + CROP, edge + CROP)))), label


def first_batch(
    which: str, method: str | None, folder: str, workers: int, pictures: int, copies: int, batches: int
) -> dict[str, Any]:
    """The job of torchdata's worker_start_benchmark.py: start of an iterator, first batch, memory and rate after that."""
    from autotune_loader.machine.processes import tree, tree_pss

    if method is not None:
        multiprocessing.set_start_method(method)
    one = Pictures(Path(folder), pictures)
    data = one if copies == 1 else ConcatDataset([copy.deepcopy(one) for _ in range(copies)])
    before = tree_pss(tree(os.getpid())) or 0
    generator = torch.Generator().manual_seed(0)
    loader = loader_of(
        which, data, workers, batch_size=PICTURE_BATCH, shuffle=True, prefetch_factor=2, generator=generator
    )
    begun = time.monotonic()
    iterator = iter(loader)
    iter_s = time.monotonic() - begun
    first = next(iterator)
    first_s = time.monotonic() - begun
    digest = hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in first)).hexdigest()
    peak, begun, loaded = tree_pss(tree(os.getpid())) or 0, time.monotonic(), 0
    for number, batch in enumerate(itertools.islice(iterator, batches - 1)):
        loaded += len(batch[1])
        if number % 5 == 4:
            peak = max(peak, tree_pss(tree(os.getpid())) or 0)
    rate = loaded / (time.monotonic() - begun)
    return {"iter_s": iter_s, "first_s": first_s, "memory_mb": (peak - before) / 1e6, "rate": rate, "digest": digest}


JOBS = {each.__name__: each for each in (start, further, unasked, boundary, first_batch)}
