"""Training jobs that each lose their time, or their memory, by one cause, and healthy ones: what `live.causes` runs.

Each is a function of a process of its own and tells the seconds of its `for` loops and, where memory is the cause, the MB (10^6
bytes of PSS) of all its processes in the loop. With `cured` the one thing that helps is done. Steps that sleep stand for steps
of an accelerator.
"""

from __future__ import annotations

import functools
import gc
import io
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune_loader.machine.processes import tree, tree_pss

Found = dict[str, float]
Step = Callable[[Any], object]


class Samples(Dataset[Any]):
    """So many, each of which waits for so long, as from storage."""

    def __init__(self, length: int, wait_s: float = 0.0) -> None:
        self.length, self.wait_s = length, wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if self.wait_s:
            time.sleep(self.wait_s)
        return torch.full((64,), float(index))


def sleeps(seconds: float) -> Step:
    return lambda batch: time.sleep(seconds)


def loop_s(loader: Iterable[Any], step: Step, epochs: int = 1) -> float:
    """Seconds of the loops over a loader, each from before `iter()` until after its end."""
    seconds = 0.0
    for _ in range(epochs):
        begun = time.perf_counter()
        for batch in loader:
            step(batch)
        seconds += time.perf_counter() - begun
    return seconds


def memory_mb() -> float:
    return float((tree_pss(tree(os.getpid())) or 0) / 1e6)


class MemoryAt:
    """A step that looks at the memory after so many batches."""

    def __init__(self, step: Step, batches: int) -> None:
        self.step, self.left, self.mb = step, batches, 0.0

    def __call__(self, batch: Any) -> None:
        self.step(batch)
        self.left -= 1
        if not self.left:
            self.mb = memory_mb()


# Causes, in the order of issue 88.


def worker_starts(cured: bool) -> Found:
    loader = DataLoader(Samples(40), batch_size=8, num_workers=2, persistent_workers=cured)
    return {"s": loop_s(loader, sleeps(0.005), 100)}


class Index(Samples):
    """Entries that a worker unpickles."""

    def __init__(self, length: int, entries: int) -> None:
        super().__init__(length)
        self.names = [f"train/class_{number % 1000:04d}/image_{number:08d}.jpg" for number in range(entries)]


def worker_imports(cured: bool) -> Found:
    """The cure is `run`."""
    loader = DataLoader(
        Index(1200, 1_500_000), batch_size=16, num_workers=2, persistent_workers=True, multiprocessing_context="spawn"
    )
    return {"s": loop_s(loader, sleeps(0.02), 2)}


class Texts(Samples):
    """A sample looks at texts from all over, as one with negative examples does."""

    def __init__(self, length: int, texts: int, is_array: bool) -> None:
        super().__init__(length)
        self.texts: Any = [f"{number:0100d}" for number in range(texts)]
        if is_array:
            self.texts = np.array(self.texts, "S100")

    def __getitem__(self, index: int) -> Any:
        picks = np.random.default_rng(index).integers(len(self.texts), size=512)
        return sum(len(self.texts[pick]) for pick in picks.tolist())


def copied_pages(cured: bool) -> Found:
    loader = DataLoader(Texts(4800, 2_000_000, cured), batch_size=40, num_workers=2)
    step = MemoryAt(sleeps(0.1), len(loader) - 2)
    return {"s": loop_s(loader, step), "MB": step.mb}


def ragged(indices: list[int]) -> list[torch.Tensor]:
    """Three tensors of lengths that no other batch has."""
    return [torch.ones(1000 + 3 * indices[0] + number) for number in range(3)]


class Indices(Samples):
    def __getitem__(self, index: int) -> Any:
        return index


def to_device(seconds: float) -> Step:
    def step(batch: list[torch.Tensor]) -> None:
        for each in batch:
            each.to("sim", non_blocking=True)
        time.sleep(seconds)

    return step


def pinning(cured: bool) -> Found:
    """In one epoch, so that workers are forked before the device is used."""
    loader = DataLoader(Indices(600), batch_size=4, num_workers=2, collate_fn=ragged, pin_memory=not cured)
    return {"s": loop_s(loader, to_device(0.02))}


FEATURES = torch.arange(300.0).expand(64, 300).T


def features(indices: list[int], keys: int) -> dict[str, torch.Tensor]:
    return {f"feature_{key}": FEATURES[key].clone() for key in range(keys)}


def many_tensors(cured: bool) -> Found:
    from autotune_loader import AutoLoader

    collate = functools.partial(features, keys=300)
    kind, own = (AutoLoader, {"tune": False}) if cured else (DataLoader, {})
    loader: Any = kind(Indices(64 * 80), batch_size=64, num_workers=2, collate_fn=collate, **own)
    return {"s": loop_s(loader, sleeps(0.005))}


class Parsed(Samples):
    """A sample is made of many small lists, as a parsed document is."""

    def __init__(self, length: int, lists: int) -> None:
        super().__init__(length)
        self.lists = lists

    def __getitem__(self, index: int) -> Any:
        return [[number, index] for number in range(self.lists)]


def total(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([len(each) for each in samples])


def garbage_in_workers(cured: bool) -> Found:
    kept = [[number] for number in range(1_000_000)]
    if cured:
        gc.freeze()
    loader = DataLoader(Parsed(6000, 4000), batch_size=32, num_workers=2, collate_fn=total)
    found = {"s": loop_s(loader, sleeps(0.005))}
    kept.clear()
    return found


def garbage_in_loop(cured: bool) -> Found:
    kept = [[number] for number in range(1_000_000)]
    if cured:
        gc.freeze()
    loader = DataLoader(Samples(1200), batch_size=8, num_workers=2)
    found = {"s": loop_s(loader, lambda batch: [[number] for number in range(100_000)])}
    kept.clear()
    return found


class SlowSometimes(Samples):
    def __getitem__(self, index: int) -> Any:
        time.sleep(1.0 if index % 60 == 30 else 0.002)
        return torch.full((64,), float(index))


def slow_samples(cured: bool) -> Found:
    """The cure is `run`."""
    return {"s": loop_s(DataLoader(SlowSometimes(720), batch_size=8, num_workers=2), sleeps(0.01))}


def rank_of_two(rank: int, folder: str, waits_s: list[float], workers: list[int], batches: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    gradients = torch.ones(1000)

    def step(batch: Any) -> None:
        time.sleep(0.05)
        distributed.all_reduce(gradients)
        gradients.div_(2)

    data = Samples(8 * batches, waits_s[rank])
    # A spawned process would spawn its workers, too.
    loader = DataLoader(data, batch_size=8, num_workers=workers[rank], multiprocessing_context="fork")
    distributed.barrier()
    Path(folder, str(rank)).write_text(json.dumps(loop_s(loader, step)))
    distributed.barrier()
    distributed.destroy_process_group()


def two_ranks(waits_s: list[float], workers: list[int], batches: int) -> Found:
    """The seconds of rank 0, which is reported."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_of_two, (folder, waits_s, workers, batches), nprocs=2)
        return {"s": json.loads(Path(folder, "0").read_text())}


def slow_rank(cured: bool) -> Found:
    return two_ranks([0.001, 0.04], [2, 8 if cured else 2], 80)


class Cached(Samples):
    """A sample of 1 MB is kept by the worker that has made it."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = torch.full((250_000,), float(index))
        return self.cache[index][:64]


def idle_memory(cured: bool) -> Found:
    training = DataLoader(Samples(1200, 0.001), batch_size=8, num_workers=2, persistent_workers=True)
    validation = DataLoader(Cached(600), batch_size=8, num_workers=2, persistent_workers=not cured)
    seconds, step = 0.0, MemoryAt(sleeps(0.04), 250)
    for _ in range(2):
        seconds += loop_s(training, step)
        seconds += loop_s(validation, sleeps(0.005))
    return {"s": seconds, "MB": step.mb}


class Multiplied(Samples):
    """A sample is a product of matrices, for which numpy takes a thread a core: in each worker."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.matrix = np.random.default_rng(0).random((300, 300), dtype=np.float32)

    def __getitem__(self, index: int) -> Any:
        return torch.full((64,), float((self.matrix @ self.matrix)[0, 0]))


def trains() -> Step:
    """A step on the CPU, on one thread."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
    optimizer, inputs = torch.optim.SGD(model.parameters(), 1e-6), torch.rand(64, 256)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

    return step


def cores(cured: bool) -> Found:
    return {"s": loop_s(DataLoader(Multiplied(1200), batch_size=8, num_workers=0 if cured else 8), trains())}


def storage(cured: bool) -> Found:
    loader = DataLoader(Samples(3200, 0.005), batch_size=16, num_workers=12 if cured else 2)
    return {"s": loop_s(loader, sleeps(0.005))}


class Encoded(Samples):
    """A sample goes through an encoder of 200 MB, which each worker has on the device."""

    encoder: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.encoder is None:
            self.encoder = torch.ones(50_000_000).to("sim")
        return torch.full((64,), float(self.encoder[index]))


def device_in_worker(cured: bool) -> Found:
    """Workers are forked before the training uses the device. The cure: the loop encodes."""
    data = Samples(1600) if cured else Encoded(1600)
    loader, encoders = DataLoader(data, batch_size=8, num_workers=2), list[torch.Tensor]()

    def encodes(batch: torch.Tensor) -> None:
        if cured and not encoders:
            encoders.append(torch.ones(50_000_000).to("sim"))
        batch.to("sim")
        time.sleep(0.06)

    step = MemoryAt(encodes, len(loader) - 2)
    return {"s": loop_s(loader, step), "MB": step.mb}


def training_memory(cured: bool) -> Found:
    """A training that holds 4.5 GB and changes all of it; the cure is forkserver, under `run`."""
    states = [np.ones(1 << 25) for _ in range(17)]
    loader = DataLoader(
        Samples(1600, 0.002), batch_size=8, num_workers=2, multiprocessing_context="forkserver" if cured else "fork"
    )
    batches = itertools.count()

    def update(batch: Any) -> None:
        states[next(batches) % 17] += 1.0

    step = MemoryAt(update, len(loader) - 2)
    return {"s": loop_s(loader, step), "MB": step.mb}


# Healthy jobs.


class Decoded(Samples):
    """JPEG files in memory."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        picture = io.BytesIO()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (160, 160, 3), np.uint8)).save(picture, "JPEG")
        self.file = picture.getvalue()

    def __getitem__(self, index: int) -> Any:
        image = Image.open(io.BytesIO(self.file)).resize((96, 96))
        return torch.from_numpy(np.asarray(image).copy()).float()


def decoded() -> Found:
    return {"s": loop_s(DataLoader(Decoded(2400), batch_size=16, num_workers=2), sleeps(0.06))}


def in_memory() -> Found:
    data = TensorDataset(torch.randn(16_000, 64), torch.arange(16_000))
    return {"s": loop_s(DataLoader(data, batch_size=64, shuffle=True), sleeps(0.04))}


def step_bound() -> Found:
    torch.set_num_threads(1)
    weights = torch.rand(1300, 1300)
    return {"s": loop_s(DataLoader(Samples(1200, 0.001), batch_size=8, num_workers=2), lambda batch: weights @ weights)}


def persistent() -> Found:
    data = TensorDataset(torch.randn(640, 64))
    loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)
    return {"s": loop_s(loader, sleeps(0.04), 25)}


def validated() -> Found:
    training = DataLoader(Samples(1200, 0.001), batch_size=8, num_workers=2, persistent_workers=True)
    validation = DataLoader(Samples(160, 0.001), batch_size=8, num_workers=2)
    return {"s": sum(loop_s(training, sleeps(0.04)) + loop_s(validation, sleeps(0.01)) for _ in range(2))}


def checkpointed() -> Found:
    """Evaluation and checkpoints inside the loop."""
    training = DataLoader(Samples(1600, 0.001), batch_size=8, num_workers=2)
    validation, weights = DataLoader(Samples(160), batch_size=8), torch.rand(10_000_000)
    seconds, batches = 0.0, itertools.count(1)
    with tempfile.TemporaryDirectory() as folder:

        def step(batch: Any) -> None:
            nonlocal seconds
            time.sleep(0.04)
            if next(batches) % 50 == 0:
                seconds += loop_s(validation, sleeps(0.01))
                torch.save(weights, f"{folder}/weights.pt")

        return {"s": loop_s(training, step) + seconds}


def equal_ranks() -> Found:
    return two_ranks([0.001, 0.001], [2, 2], 180)


def spawned() -> Found:
    loader = DataLoader(Samples(8000), batch_size=8, num_workers=1, multiprocessing_context="spawn")
    return {"s": loop_s(loader, sleeps(0.06))}


def pinned() -> Found:
    loader = DataLoader(Indices(800), batch_size=4, num_workers=2, collate_fn=ragged, pin_memory=True)
    return {"s": loop_s(loader, to_device(0.04))}


def twenty_keys() -> Found:
    collate = functools.partial(features, keys=20)
    return {"s": loop_s(DataLoader(Indices(64 * 100), 64, num_workers=2, collate_fn=collate), sleeps(0.1))}
