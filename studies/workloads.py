"""The workloads that all studies share, so that their figures can be compared; `README.md` says what binds in each.

Everything here is an importable class or function, so that any start method can send it to another process. The sizes
suit a machine with a handful of cores; a study that needs others builds its own `StudyWorkload` and says so.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler

TrainStep = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyWorkload:
    """A training job whose bottleneck is known."""

    dataset: Dataset[Any]
    batch_size: int
    model: nn.Module | None
    """None is a job that only reads, such as taking statistics."""
    train_step: TrainStep | None = None
    """None leaves it to `tune()` to infer the step from model and batch."""
    sampler: Sampler[int] | None = None
    """None shuffles."""

    def loader(self) -> DataLoader[Any]:
        """The loader that `tune()` is given."""
        order: dict[str, Any] = {"shuffle": True} if self.sampler is None else {"sampler": self.sampler}
        return DataLoader(self.dataset, self.batch_size, drop_last=True, **order)

    def to_tune_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `tune()`."""
        return {"data": self.loader(), "model": self.model, "train_step": self.train_step}


def workload_of(study: StudyWorkload) -> Any:
    """The study's workload as `tune()` would make it, on the CPU."""
    from autotune_loader.tuning.arguments import make_workload

    return make_workload(study.loader(), study.model, train_step=study.train_step, device="cpu")


class AccelStep:
    """A training step on an accelerator, seen from the host: the CPU is free while it lasts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, model: nn.Module, batch: Any) -> None:
        time.sleep(self.seconds)


class Items(Dataset[Any]):
    """A function of the index."""

    def __init__(self, get: Callable[[int], Any], length: int) -> None:
        self.get, self.length = get, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


def sleeping(
    length: int, median_s: float, *, sigma: float = 0.0, slow_every: int = 0, slow_s: float = 0.0
) -> Dataset[Any]:
    """Samples that are waited for, as from remote storage, and cost no CPU: lognormal waits, each index always the same."""
    waits_s = median_s * np.exp(sigma * np.random.default_rng(0).standard_normal(length))
    if slow_every:
        waits_s[slow_every - 1 :: slow_every] = slow_s
    return Items(partial(sleep, waits_s), length)


def sleep(waits_s: np.ndarray, index: int) -> tuple[torch.Tensor, int]:
    time.sleep(waits_s[index])
    return torch.full((16,), float(index)), index % 10


def spin(rounds: int, block: bytes, index: int) -> tuple[torch.Tensor, int]:
    """A fixed amount of work on one core, with no thread pool involved: `rounds` hashes of a block."""
    digest = index.to_bytes(8, "little")
    for _ in range(rounds):
        digest = hashlib.blake2b(block, key=digest[:64]).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).float(), index % 10


def turn(turns: int, index: int) -> tuple[torch.Tensor, int]:
    """A loop in Python, as augmentations written by hand are."""
    total = index
    for number in range(turns):
        total = (total * 31 + number) & 0xFFFF
    return torch.full((64,), float(total)), index % 10


def give(sample: torch.Tensor, index: int) -> torch.Tensor:
    """A sample that costs nothing to make; a large one costs much to move."""
    return sample


def random_picture(side: int, wait_s: float, index: int) -> tuple[torch.Tensor, int]:
    """What the PyTorch tutorial on data loading uses: random pictures, each after a wait of a few milliseconds."""
    time.sleep(wait_s)
    return torch.randn(3, side, side), index % 10


def spectrum(sound: np.ndarray, count: int, labels: np.ndarray, index: int) -> tuple[torch.Tensor, int]:
    """Sound turned into logarithmic spectra with numpy."""
    start = index * 37 % (len(sound) - count)
    frames = np.lib.stride_tricks.sliding_window_view(sound[start : start + count], 512)[::160]
    power = np.abs(np.fft.rfft(frames * np.hanning(512))) ** 2
    return torch.from_numpy(np.log1p(power).astype(np.float32)), int(labels[index])


class TextDataset(Dataset[dict[str, torch.Tensor]]):
    """Sentences tokenised a batch at a time (`__getitems__`), as Hugging Face datasets do, to dicts of fixed length."""

    def __init__(self, length: int, tokens: int = 128, vocabulary: int = 5000, repeats: int = 8) -> None:
        rng = np.random.default_rng(0)
        self.words = {f"w{number}": number for number in range(vocabulary)}
        self.sentences = [
            " ".join(f"w{number}" for number in row) for row in rng.integers(0, vocabulary, (256, tokens))
        ]
        self.length, self.repeats = length, repeats

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        sentences = [self.sentences[index % len(self.sentences)] for index in indices]
        for _ in range(self.repeats):  # a real tokeniser does more than one look-up a word
            rows = [[self.words[word] for word in sentence.split()] for sentence in sentences]
        return [{"input_ids": torch.tensor(row), "labels": torch.tensor(row[-1])} for row in rows]


class Repeated(Dataset[Any]):
    """A dataset shown several times in one epoch, so that a study's epoch is long although its data are few."""

    def __init__(self, dataset: Any, times: int) -> None:
        self.dataset, self.times = dataset, times

    def __len__(self) -> int:
        return len(self.dataset) * self.times

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % len(self.dataset)]


class RepeatedBatched(Repeated):
    """The same for a dataset that fetches a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return self.dataset.__getitems__([index % len(self.dataset) for index in indices])  # type: ignore[no-any-return]


def repeated(dataset: Any, times: int) -> Repeated:
    return (RepeatedBatched if hasattr(dataset, "__getitems__") else Repeated)(dataset, times)


class MemmapDataset(Dataset[tuple[torch.Tensor, int]]):
    """Pictures in one memory-mapped file of bytes, flipped, shifted and normalised with numpy."""

    def __init__(self, path: Path, length: int, side: int) -> None:
        self.path, self.length, self.side = path, length, side
        self._pixels: Any = None
        if not path.exists() or path.stat().st_size != length * 3 * side * side:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(np.random.default_rng(0).integers(0, 256, length * 3 * side * side, np.uint8).tobytes())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._pixels is None:
            self._pixels = np.memmap(self.path, np.uint8, "r", shape=(self.length, 3, self.side, self.side))
        flip, down, across = torch.randint(0, 8, (3,)).tolist()
        picture = self._pixels[index].astype(np.float32) / 255
        picture = np.roll(picture[:, :, ::-1] if flip < 4 else picture, (down, across), axis=(1, 2))
        return torch.from_numpy(np.ascontiguousarray((picture - 0.45) / 0.22)), index % 10


class SmallTransformer(nn.Module):
    """Two convolutions and two transformer layers over 49 places, about the size of that tutorial's model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 7, stride=4, padding=3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(7),
            nn.Flatten(2),
        )
        layer = nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(64, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        places = self.stem(pictures).transpose(1, 2)
        return self.head(self.layers(places).mean(dim=1))  # type: ignore[no-any-return]


class TextModel(nn.Module):
    """A bag of words whose forward takes a batch's keys and returns an object with `.loss`, as in transformers."""

    def __init__(self, vocabulary: int = 5000, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.embedding(input_ids))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def accelerated(
    dataset: Dataset[Any], batch_size: int, step_s: float, sampler: Sampler[int] | None = None
) -> StudyWorkload:
    """Behind a step of an accelerator."""
    step = AccelStep(step_s)
    return StudyWorkload(dataset=dataset, batch_size=batch_size, model=nn.Identity(), train_step=step, sampler=sampler)


def demo_pictures() -> Dataset[Any]:
    from autotune_loader.demo import JpegFolder, cache_folder, make_jpegs

    make_jpegs(cache_folder())
    return JpegFolder(cache_folder())


def memory_map(side: int) -> Dataset[Any]:
    """Kept between runs in the user's cache."""
    import platformdirs

    folder = Path(platformdirs.user_cache_dir("autotune_loader")) / "studies"
    return repeated(MemmapDataset(folder / f"pictures-{side}.bin", 2048, side), 32)


def jpeg() -> StudyWorkload:
    from autotune_loader.demo import BATCH_SIZE, SmallCnn

    return StudyWorkload(dataset=demo_pictures(), batch_size=BATCH_SIZE, model=SmallCnn())


def in_memory() -> StudyWorkload:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand((65536, 32), generator=generator)
    labels = torch.randint(0, 10, (65536,), generator=generator)
    return StudyWorkload(dataset=TensorDataset(pictures, labels), batch_size=64, model=nn.Linear(32, 10))


def imbalance() -> StudyWorkload:
    """One class is rare, and drawn more often."""
    labels = (np.arange(8192) % 50 == 0).astype(int)
    sound = np.random.default_rng(0).standard_normal(16000 * 9).astype(np.float32)
    weights = np.where(labels == 1, 49.0, 1.0).tolist()
    sampler = WeightedRandomSampler(weights, 65536, generator=torch.Generator().manual_seed(0))
    return accelerated(Items(partial(spectrum, sound, 16000 * 8, labels), 8192), 16, 0.012, sampler)


def cpu_bound() -> StudyWorkload:
    return accelerated(Items(partial(spin, 50, np.random.default_rng(0).bytes(1 << 16)), 4096), 8, 0.005)


def large_tensors() -> StudyWorkload:
    sample = torch.rand(1 << 18, generator=torch.Generator().manual_seed(0))
    return accelerated(Items(partial(give, sample), 4096), 8, 0.001)


def tutorial() -> StudyWorkload:
    pictures = Items(partial(random_picture, 224, 0.005), 512)
    return StudyWorkload(dataset=pictures, batch_size=32, model=SmallTransformer())


Factory = Callable[[], StudyWorkload]
WORKLOADS: dict[str, Factory] = {
    "wait_light_tail": lambda: accelerated(sleeping(4096, 0.004, sigma=0.2), 8, 0.004),
    "wait_heavy_tail": lambda: accelerated(sleeping(4096, 0.002, sigma=0.8, slow_every=32, slow_s=0.2), 8, 0.004),
    # More workers than a multiple of a few cores would allow are best: 128 ms of waiting a batch over a step of 12 ms.
    "wait_behind_step": lambda: accelerated(sleeping(4096, 0.004), 32, 0.012),
    "cpu_bound": cpu_bound,
    "python_loops": lambda: accelerated(Items(partial(turn, 20_000), 4096), 16, 0.010),
    "jpeg": jpeg,
    "large_tensors": large_tensors,
    "in_memory": in_memory,
    "step_bound": lambda: accelerated(sleeping(4096, 0.0005), 16, 0.060),
    "short_epoch": lambda: accelerated(sleeping(64, 0.002), 8, 0.002),
    "text": lambda: StudyWorkload(dataset=TextDataset(16384), batch_size=64, model=TextModel()),
}
DOCUMENTS: dict[str, Factory] = {
    # (a): image files, decoded and augmented on the fly, behind an accelerator.
    "guide": lambda: accelerated(repeated(demo_pictures(), 16), 32, 0.020),
    # (b): the mean and deviation of each channel over a loader; there is no model.
    "lesson": lambda: StudyWorkload(dataset=memory_map(128), batch_size=64, model=None),
    # (c): a memory-mapped array on a fast disk.
    "article": lambda: accelerated(memory_map(160), 16, 0.008),
    # (d), the PyTorch tutorial: its sizes, short epochs of 16 batches, on the CPU.
    "tutorial": tutorial,
    # (e): a rare class drawn more often, one process' share of several.
    "imbalance": imbalance,
}
"""What the documents that started this project load, in their order."""
