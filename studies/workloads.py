"""The workloads that all studies share, so that their figures can be compared.

    python -m studies.workloads              # what there is, with the fetch time on this machine

Everything here is an importable class or function, so that any start method can send it to another process. The sizes
suit a machine with a handful of cores; a study that needs others builds its own `StudyWorkload` and says so.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler

Kind = Literal["wait", "cpu", "mixed", "transport", "memory", "step", "start-up"]
TrainStep = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyWorkload:
    """A training job whose bottleneck is known."""

    name: str
    dataset: Dataset[Any]
    model: nn.Module | None
    """None is a job that only reads, such as taking statistics."""
    train_step: TrainStep | None
    """None leaves it to `tune()` to infer the step from model and batch."""
    batch_size: int
    description: str
    kind: Kind
    """What binds with torch's defaults, by construction."""
    sampler: Sampler[int] | None = None
    """None shuffles."""

    def to_tune_kwargs(self) -> dict[str, Any]:
        """Keyword arguments for `tune()`."""
        kwargs = {"dataset_or_loader": self.dataset, "model": self.model, "batch_size": self.batch_size}
        optional = {"train_step": self.train_step, "sampler": self.sampler}
        return {**kwargs, **{name: value for name, value in optional.items() if value is not None}}


def workload_of(study: StudyWorkload) -> Any:
    """The study's workload as `tune()` would make it, on the CPU."""
    from autotune_loader.tuning.arguments import make_workload

    workload, _ = make_workload(
        study.dataset,
        study.model,
        batch_size=study.batch_size,
        train_step=study.train_step,
        device="cpu",
        drop_last=True,
    )
    return workload


class AccelStep:
    """A training step on an accelerator, seen from the host: the CPU is free while it lasts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, model: nn.Module, batch: Any) -> None:
        time.sleep(self.seconds)


class SleepDataset(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are waited for, as from remote storage, and cost no CPU. The wait of an index is always the same.

    Args:
        length: samples.
        median_s: median wait in seconds.
        sigma: spread of the waits: the standard deviation of their logarithm; 0 makes all equal.
        slow_every: every so many samples one takes `slow_s`; 0 for never.
        slow_s: wait of a slow sample in seconds.
    """

    def __init__(
        self, length: int, median_s: float, sigma: float = 0.0, slow_every: int = 0, slow_s: float = 0.0
    ) -> None:
        self.waits_s = median_s * np.exp(sigma * np.random.default_rng(0).standard_normal(length))
        if slow_every:
            self.waits_s[slow_every - 1 :: slow_every] = slow_s

    def __len__(self) -> int:
        return len(self.waits_s)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.waits_s[index])
        return torch.full((16,), float(index)), index % 10


class SpinDataset(Dataset[tuple[torch.Tensor, int]]):
    """Samples that cost a fixed amount of work on one core, with no thread pool involved: `rounds` hashes of 64 KiB."""

    def __init__(self, length: int, rounds: int) -> None:
        self.length, self.rounds = length, rounds
        self.block = np.random.default_rng(0).bytes(1 << 16)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        digest = index.to_bytes(8, "little")
        for _ in range(self.rounds):
            digest = hashlib.blake2b(self.block, key=digest[:64]).digest()
        return torch.frombuffer(bytearray(digest), dtype=torch.uint8).float(), index % 10


class LoopDataset(Dataset[tuple[torch.Tensor, int]]):
    """Samples that are computed by a loop in Python, as augmentations written by hand are."""

    def __init__(self, length: int, turns: int) -> None:
        self.length, self.turns = length, turns

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        total = index
        for turn in range(self.turns):
            total = (total * 31 + turn) & 0xFFFF
        return torch.full((64,), float(total)), index % 10


class LargeTensorDataset(Dataset[torch.Tensor]):
    """Samples that cost little to make and much to move: 1 MiB each."""

    def __init__(self, length: int, sample_bytes: int = 1 << 20) -> None:
        self.length = length
        self.sample = torch.rand(sample_bytes // 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


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


class SpectrumDataset(Dataset[tuple[torch.Tensor, int]]):
    """Sound turned into logarithmic spectra with numpy; one class is rare."""

    def __init__(self, length: int, seconds: float = 1.0) -> None:
        self.length = length
        self.sound = np.random.default_rng(0).standard_normal(int(16000 * (seconds + 1))).astype(np.float32)
        self.labels = (np.arange(length) % 50 == 0).astype(int)
        self.count = int(16000 * seconds)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        start = index * 37 % (len(self.sound) - self.count)
        frames = np.lib.stride_tricks.sliding_window_view(self.sound[start : start + self.count], 512)[::160]
        power = np.abs(np.fft.rfft(frames * np.hanning(512))) ** 2
        return torch.from_numpy(np.log1p(power).astype(np.float32)), int(self.labels[index])


class RandomPictures(Dataset[tuple[torch.Tensor, int]]):
    """What the PyTorch tutorial on data loading uses: random pictures, each after a wait of a few milliseconds."""

    def __init__(self, length: int, side: int, wait_s: float) -> None:
        self.length, self.side, self.wait_s = length, side, wait_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.wait_s)
        return torch.randn(3, self.side, self.side), index % 10


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


def wait_light_tail() -> StudyWorkload:
    return StudyWorkload(
        name="wait_light_tail",
        dataset=SleepDataset(4096, median_s=0.004, sigma=0.2),
        model=nn.Identity(),
        train_step=AccelStep(0.004),
        batch_size=8,
        description="about 4 ms of waiting per sample, 4 ms accelerator step",
        kind="wait",
    )


def wait_heavy_tail() -> StudyWorkload:
    return StudyWorkload(
        name="wait_heavy_tail",
        dataset=SleepDataset(4096, median_s=0.002, sigma=0.8, slow_every=32, slow_s=0.2),
        model=nn.Identity(),
        train_step=AccelStep(0.004),
        batch_size=8,
        description="lognormal waits around 2 ms, every 32nd sample 200 ms, 4 ms accelerator step",
        kind="wait",
    )


def wait_behind_step() -> StudyWorkload:
    """More workers than a multiple of a few cores would allow are best: 128 ms of waiting a batch over a step of 12 ms."""
    return StudyWorkload(
        name="wait_behind_step",
        dataset=SleepDataset(4096, median_s=0.004),
        model=nn.Identity(),
        train_step=AccelStep(0.012),
        batch_size=32,
        description="4 ms of waiting per sample, 12 ms accelerator step",
        kind="wait",
    )


def python_loops() -> StudyWorkload:
    return StudyWorkload(
        name="python_loops",
        dataset=LoopDataset(4096, turns=20_000),
        model=nn.Identity(),
        train_step=AccelStep(0.010),
        batch_size=16,
        description="about 1 ms of a Python loop per sample, 10 ms accelerator step",
        kind="cpu",
    )


def cpu_bound() -> StudyWorkload:
    return StudyWorkload(
        name="cpu_bound",
        dataset=SpinDataset(4096, rounds=50),
        model=nn.Identity(),
        train_step=AccelStep(0.005),
        batch_size=8,
        description="a few ms of one core per sample, no thread pools, 5 ms accelerator step",
        kind="cpu",
    )


def jpeg() -> StudyWorkload:
    from autotune_loader.demo import BATCH_SIZE, JpegFolder, SmallCnn, cache_folder, make_jpegs

    folder: Path = cache_folder()
    make_jpegs(folder)
    return StudyWorkload(
        name="jpeg",
        dataset=JpegFolder(folder),
        model=SmallCnn(),
        train_step=None,
        batch_size=BATCH_SIZE,
        description="the demo: JPEG decoding and a CNN's step share the cores",
        kind="mixed",
    )


def large_tensors() -> StudyWorkload:
    return StudyWorkload(
        name="large_tensors",
        dataset=LargeTensorDataset(4096),
        model=nn.Identity(),
        train_step=AccelStep(0.001),
        batch_size=8,
        description="8 MiB a batch that costs little to make, 1 ms accelerator step",
        kind="transport",
    )


def in_memory() -> StudyWorkload:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand((65536, 32), generator=generator)
    labels = torch.randint(0, 10, (65536,), generator=generator)
    return StudyWorkload(
        name="in_memory",
        dataset=TensorDataset(pictures, labels),
        model=nn.Linear(32, 10),
        train_step=None,
        batch_size=64,
        description="a TensorDataset and a linear model: workers only cost",
        kind="memory",
    )


def step_bound() -> StudyWorkload:
    return StudyWorkload(
        name="step_bound",
        dataset=SleepDataset(4096, median_s=0.0005),
        model=nn.Identity(),
        train_step=AccelStep(0.060),
        batch_size=16,
        description="a 60 ms accelerator step behind 8 ms of fetching: the loader hardly matters",
        kind="step",
    )


def short_epoch() -> StudyWorkload:
    return StudyWorkload(
        name="short_epoch",
        dataset=SleepDataset(64, median_s=0.002),
        model=nn.Identity(),
        train_step=AccelStep(0.002),
        batch_size=8,
        description="64 samples an epoch: starting workers costs as much as they gain",
        kind="start-up",
    )


def text() -> StudyWorkload:
    return StudyWorkload(
        name="text",
        dataset=TextDataset(16384),
        model=TextModel(),
        train_step=None,
        batch_size=64,
        description="tokenising a batch at a time through __getitems__, dict batches, a model with .loss",
        kind="mixed",
    )


def guide() -> StudyWorkload:
    """Document (a): image files, decoded and augmented on the fly, behind an accelerator."""
    from autotune_loader.demo import JpegFolder, cache_folder, make_jpegs

    make_jpegs(cache_folder())
    return StudyWorkload(
        name="guide",
        dataset=repeated(JpegFolder(cache_folder()), 16),
        model=nn.Identity(),
        train_step=AccelStep(0.020),
        batch_size=32,
        description="document (a): JPEG files decoded and augmented, 20 ms accelerator step",
        kind="cpu",
    )


def lesson() -> StudyWorkload:
    """Document (b): the mean and deviation of each channel over a loader; there is no model."""
    return StudyWorkload(
        name="lesson",
        dataset=repeated(MemmapDataset(study_cache() / "pictures-128.bin", 2048, 128), 32),
        model=None,
        train_step=None,
        batch_size=64,
        description="document (b): statistics over a loader, no model: pictures of 128 x 128 from a memory map",
        kind="cpu",
    )


def article() -> StudyWorkload:
    """Document (c): a memory-mapped array on a fast disk."""
    return StudyWorkload(
        name="article",
        dataset=repeated(MemmapDataset(study_cache() / "pictures-160.bin", 2048, 160), 32),
        model=nn.Identity(),
        train_step=AccelStep(0.008),
        batch_size=16,
        description="document (c): pictures of 160 x 160 from a memory map, augmented, 8 ms accelerator step",
        kind="cpu",
    )


def tutorial() -> StudyWorkload:
    """Document (d), the PyTorch tutorial: its sizes, short epochs of 16 batches, on the CPU."""
    return StudyWorkload(
        name="tutorial",
        dataset=RandomPictures(512, 224, 0.005),
        model=SmallTransformer(),
        train_step=None,
        batch_size=32,
        description="document (d): random pictures after 5 ms each, a small transformer on the CPU, 16 batches an epoch",
        kind="mixed",
    )


def imbalance() -> StudyWorkload:
    """Document (e): a rare class drawn more often, one process' share of several."""
    dataset = SpectrumDataset(8192, seconds=8.0)
    weights = np.where(dataset.labels == 1, 49.0, 1.0)
    return StudyWorkload(
        name="imbalance",
        dataset=dataset,
        model=nn.Identity(),
        train_step=AccelStep(0.012),
        batch_size=16,
        description="document (e): spectra with a WeightedRandomSampler, 12 ms accelerator step",
        kind="cpu",
        sampler=WeightedRandomSampler(weights.tolist(), 65536, generator=torch.Generator().manual_seed(0)),
    )


def study_cache() -> Path:
    """Where the studies keep what they generate between runs."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("autotune_loader")) / "studies"


WORKLOADS: dict[str, Callable[[], StudyWorkload]] = {
    factory.__name__: factory
    for factory in (
        wait_light_tail,
        wait_heavy_tail,
        wait_behind_step,
        cpu_bound,
        python_loops,
        jpeg,
        large_tensors,
        in_memory,
        step_bound,
        short_epoch,
        text,
    )
}
DOCUMENTS: dict[str, Callable[[], StudyWorkload]] = {
    factory.__name__: factory for factory in (guide, lesson, article, tutorial, imbalance)
}
"""What the documents that started this project load, in their order."""


def main() -> None:
    for factory in (WORKLOADS | DOCUMENTS).values():
        workload = factory()
        order: dict[str, Any] = {"sampler": workload.sampler} if workload.sampler is not None else {"shuffle": True}
        batches = iter(DataLoader(workload.dataset, batch_size=workload.batch_size, **order))
        next(batches)
        start = time.perf_counter()
        for _ in range(5):
            next(batches)
        fetch_ms = (time.perf_counter() - start) / 5 * 1e3
        print(f"{workload.name:16} {workload.kind:9} {fetch_ms:7.1f} ms a batch   {workload.description}")


if __name__ == "__main__":
    main()
