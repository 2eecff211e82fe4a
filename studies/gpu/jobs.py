"""Three training jobs on a GPU, each with a bottleneck that is known by construction; pure torch, and small copies for a CPU.

    jpeg              loader     JPEG files decoded and augmented, the demo's small CNN in bfloat16: faster than cores decode
    transformer       step       token sequences that cost nothing to make, 8 layers of 512
    large_batches     copy       batches of 64 MiB that lie in memory, a step that reads them once

Everything is importable, so that any start method can send it to another process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset

from autotune_loader.demo import JpegFolder, SmallCnn, make_jpegs

VOCABULARY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the jobs are."""

    pictures: int = 512
    times: int = 128
    """So often each picture is in an epoch; a short epoch would be mostly starts of workers where cores are many."""
    picture: tuple[int, int] = (500, 375)
    crop: int = 224
    batch: int = 64
    layers: int = 8
    embedding: int = 512
    tokens: int = 256
    large_bytes: int = 64 << 20


FULL = Size()
QUICK = Size(
    pictures=32, times=2, picture=(64, 48), crop=32, batch=8, layers=1, embedding=16, tokens=16,
    large_bytes=1 << 20,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What `tune()` is called with."""

    name: str
    binds: str
    """What binds by construction once the loader is tuned: "loader", "step" or "copy"."""
    dataset: Dataset[Any]
    model: nn.Module
    train_step: Callable[[Any, Any], torch.Tensor]
    batch_size: int | None
    """None where the dataset delivers batches."""

    def parts(self) -> dict[str, Any]:
        """DataLoader's arguments that are not tuned."""
        return {"batch_size": self.batch_size, **({} if self.batch_size is None else {"shuffle": True})}

    def samples_of(self, batch: Any) -> int:
        first = batch[0] if isinstance(batch, (tuple, list)) else batch
        return 1 if self.batch_size is None else len(first)


class Transformer(nn.Module):
    """A language model: it predicts each token from those before."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.embedding)
        self.places = nn.Parameter(torch.zeros(size.tokens, size.embedding))
        layer = nn.TransformerEncoderLayer(size.embedding, 4, 4 * size.embedding, dropout=0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.embedding, VOCABULARY)

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


def picture_step(model: Any, batch: Any) -> torch.Tensor:
    """Classify pictures, in bfloat16 on CUDA."""
    pictures, labels = batch
    with bfloat16_on(pictures.device):
        scores = model(pictures)
    return nn.functional.cross_entropy(scores.float(), labels)


def token_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Predict the next token, in bfloat16 on CUDA."""
    with bfloat16_on(batch.device):
        scores = model(batch)
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def sum_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)  # type: ignore[no-any-return]


def bfloat16_on(device: torch.device) -> torch.autocast:
    # Most CPUs only emulate it.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


class InMemory(Dataset[Any]):
    """A few distinct tensors, shown again and again; the first dimension of one that is a whole batch counts its samples."""

    def __init__(self, tensors: torch.Tensor, length: int) -> None:
        self.tensors, self.length = tensors, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.tensors[index % len(self.tensors)]


def jpeg(size: Size) -> Job:
    folder = Path(tempfile.gettempdir()) / f"autotune-loader-gpu-study-{size.picture[0]}"
    make_jpegs(folder, size.pictures, size.picture)
    return Job(
        name="jpeg", binds="loader", dataset=ConcatDataset([JpegFolder(folder, size.crop)] * size.times), model=SmallCnn(),
        train_step=picture_step, batch_size=size.batch,
    )  # fmt: skip


def transformer(size: Size) -> Job:
    tokens = torch.randint(0, VOCABULARY, (1024, size.tokens))
    return Job(
        name="transformer", binds="step", dataset=InMemory(tokens, 65536), model=Transformer(size), train_step=token_step,
        batch_size=size.batch,
    )  # fmt: skip


def large_batches(size: Size) -> Job:
    return Job(
        name="large_batches", binds="copy", dataset=InMemory(torch.rand(4, 1, size.large_bytes // 4), 4096), model=Sums(),
        train_step=sum_step, batch_size=None,
    )  # fmt: skip


JOBS: dict[str, Callable[[Size], Job]] = {make.__name__: make for make in (jpeg, transformer, large_batches)}
"""Most valuable first."""
