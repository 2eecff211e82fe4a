"""Four training jobs on a GPU, each with a bottleneck that is known by construction; pure torch, and small copies for a CPU.

    resnet_jpeg       loader     JPEG files decoded and augmented, a ResNet-18 in bfloat16, faster than 16 cores decode
    resnet_compute    step       the same pictures from memory, as bytes, a ResNet four times as wide
    transformer       step       token sequences that cost nothing to make, 8 layers of 512
    large_batches     h2d        batches of 64 MiB that lie in memory, a step of a few milliseconds

Everything is importable, so that any start method can send it to another process.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from autotune_loader.demo import JpegFolder, make_jpegs

CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the jobs are."""

    pictures: int = 2048
    picture: tuple[int, int] = (500, 375)
    crop: int = 224
    batch: int = 64
    width: int = 64
    depth: tuple[int, ...] = (2, 2, 2, 2)
    layers: int = 8
    embedding: int = 512
    tokens: int = 256
    large_bytes: int = 64 << 20


FULL = Size()
QUICK = Size(
    pictures=32,
    picture=(64, 48),
    crop=32,
    batch=8,
    width=4,
    depth=(1, 1),
    layers=1,
    embedding=16,
    tokens=16,
    large_bytes=1 << 20,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `tune()` is called with."""

    name: str
    binds: str
    """What binds by construction once the loader is tuned: "loader", "step" or "h2d"."""
    dataset: Dataset[Any]
    model: nn.Module
    train_step: Any
    batch_size: int | None
    """None where the dataset delivers batches."""

    def parts(self) -> dict[str, Any]:
        """DataLoader's arguments that are not tuned."""
        return {"batch_size": self.batch_size, **({} if self.batch_size is None else {"shuffle": True})}


class BasicBlock(nn.Module):
    """Two convolutions and a way around them (He et al. 2015, fig. 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        within = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(within + self.around(x))


class ResNet(nn.Module):
    """ResNet-18 at width 64 and depth (2, 2, 2, 2)."""

    def __init__(self, width: int, depth: tuple[int, ...]) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        blocks: list[nn.Module] = []
        inputs = width
        for stage, count in enumerate(depth):
            outputs = width << stage
            blocks += [
                BasicBlock(inputs if i == 0 else outputs, outputs, 2 if i == 0 < stage else 1) for i in range(count)
            ]
            inputs = outputs
        self.layers = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A language model: it predicts each token from those before."""

    def __init__(self, size: Size, vocabulary: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size.embedding)
        self.places = nn.Parameter(torch.zeros(size.tokens, size.embedding))
        layer = nn.TransformerEncoderLayer(size.embedding, 4, 4 * size.embedding, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.embedding, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden: torch.Tensor = self.body(self.tokens(tokens) + self.places, mask=later, is_causal=True)
        return self.head(hidden)  # type: ignore[no-any-return]


class Sums(nn.Module):
    """A step that reads its batch once and hardly computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).mean()


class PictureStep:
    """Classify pictures, in bfloat16 on CUDA; bytes become floats on the device."""

    def __init__(self, in_half: bool = True) -> None:
        self.in_half = in_half

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        pictures, labels = batch
        with _bfloat16_on(pictures.device, self.in_half):
            scores = model(pictures.float() / 255 if pictures.dtype == torch.uint8 else pictures)
        return nn.functional.cross_entropy(scores.float(), labels)


class TokenStep:
    """Predict the next token, in bfloat16 on CUDA."""

    def __init__(self, in_half: bool = True) -> None:
        self.in_half = in_half

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with _bfloat16_on(batch.device, self.in_half):
            scores = model(batch)
        return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


class SumStep:
    """What `Sums` says of a batch is its loss."""

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        return loss


def _bfloat16_on(device: torch.device, in_half: bool) -> torch.autocast:
    # Most CPUs only emulate it.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=in_half and device.type == "cuda")


class Bytes(Dataset[tuple[torch.Tensor, int]]):
    """Pictures in memory, as bytes."""

    def __init__(self, crop: int, length: int = 8192, distinct: int = 256) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randint(0, 256, (distinct, 3, crop, crop), dtype=torch.uint8, generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pictures[index % len(self.pictures)], index % CLASSES


class Tokens(Dataset[torch.Tensor]):
    """Sequences in memory."""

    def __init__(self, tokens: int, length: int = 65536, distinct: int = 1024, vocabulary: int = 1024) -> None:
        generator = torch.Generator().manual_seed(0)
        self.sequences = torch.randint(0, vocabulary, (distinct, tokens), generator=generator)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sequences[index % len(self.sequences)]


class LargeBatches(Dataset[torch.Tensor]):
    """Whole batches that lie in memory."""

    def __init__(self, batch_bytes: int, length: int = 4096, distinct: int = 4) -> None:
        self.batches = [torch.rand(batch_bytes // 4) for _ in range(distinct)]
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.batches[index % len(self.batches)]


def resnet_jpeg(size: Size) -> Job:
    folder = Path(tempfile.gettempdir()) / f"autotune-loader-gpu-study-{size.picture[0]}"
    make_jpegs(folder, size.pictures, size.picture)
    return Job(
        name="resnet_jpeg",
        binds="loader",
        dataset=JpegFolder(folder, size.crop),
        model=ResNet(size.width, size.depth),
        train_step=PictureStep(),
        batch_size=size.batch,
    )


def resnet_compute(size: Size) -> Job:
    return Job(
        name="resnet_compute",
        binds="step",
        dataset=Bytes(size.crop),
        model=ResNet(4 * size.width, size.depth),
        train_step=PictureStep(),
        batch_size=size.batch,
    )


def transformer(size: Size) -> Job:
    return Job(
        name="transformer",
        binds="step",
        dataset=Tokens(size.tokens),
        model=Transformer(size),
        train_step=TokenStep(),
        batch_size=size.batch,
    )


def large_batches(size: Size) -> Job:
    return Job(
        name="large_batches",
        binds="h2d",
        dataset=LargeBatches(size.large_bytes),
        model=Sums(),
        train_step=SumStep(),
        batch_size=None,
    )


JOBS = {make.__name__: make for make in (resnet_jpeg, resnet_compute, transformer, large_batches)}
