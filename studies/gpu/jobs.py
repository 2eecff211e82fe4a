"""Training jobs on a GPU, each with a bottleneck that is known by construction; pure torch, and small copies without one.

    resnet_jpeg       loader     JPEG files decoded and augmented, a ResNet-18 in bfloat16: faster than cores decode
    images            transfer   decoded pictures normalised to float32, the same model: 38.5 MB for each batch of 64
    transformer       step       token sequences that cost nothing to make, 8 layers of 512

Everything is importable, so that any start method can send it to another process.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset

from autotune_loader.pipeline.batches import move
from studies.pictures import CLASSES, JpegFolder, make_jpegs, normalised
from studies.workloads import Items, StudyWorkload

VOCABULARY = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the jobs are."""

    pictures: int = 512
    times: int = 128
    """So often each picture is in an epoch; a short epoch would be mostly starts of workers where cores are many."""
    picture: tuple[int, int] = (500, 375)
    crop: int = 224
    decoded: int = 224
    """Side of the pictures that come decoded."""
    batch: int = 64
    width: int = 64
    """Channels of the ResNet's first stage."""
    layers: int = 8
    embedding: int = 512
    tokens: int = 256


FULL = Size()
QUICK = Size(
    pictures=16, picture=(800, 600), crop=32, decoded=128, batch=4, width=4, layers=1, embedding=16, tokens=16,
)  # fmt: skip
SIMULATED_BYTES_PER_S = 4e7
"""Of the simulated accelerator's copies: what binds a small job there is what binds the large one on a GPU."""
VERDICTS = {"loader": {"cpu", "cores"}, "transfer": {"transfer", "copy"}, "step": {"step"}}
"""What `tune()` may say of a job, by what binds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(StudyWorkload):
    """What `tune()` is called with."""

    train_step: Callable[[Any, Any], torch.Tensor]
    binds: str
    """What binds by construction once the loader is tuned, a key of `VERDICTS`."""


class Block(nn.Module):
    """Two convolutions and a way around them (He et al. 2015, fig. 2)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1)
        is_same = inputs == outputs and stride == 1
        self.around = nn.Identity() if is_same else convolution(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.around(x))


def convolution(inputs: int, outputs: int, side: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, side, stride, side // 2, bias=False), nn.BatchNorm2d(outputs))


def resnet(width: int) -> nn.Module:
    """ResNet-18 where the width is 64."""
    sizes = [width, width, 2 * width, 4 * width, 8 * width]
    blocks: list[nn.Module] = []
    for stage, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        blocks += [Block(inputs, outputs, 2 if stage else 1), Block(outputs, outputs, 1)]
    stem = [convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, CLASSES))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


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


def picture_step(model: Any, batch: Any) -> torch.Tensor:
    """Classify pictures, in bfloat16 on a GPU."""
    pictures, labels = to_model(model, batch, 1e-3)
    with bfloat16_on(pictures.device):
        scores = model(pictures)
    return nn.functional.cross_entropy(scores.float(), labels)


def token_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Predict the next token, in bfloat16 on a GPU."""
    batch = to_model(model, batch, 20e-3)
    with bfloat16_on(batch.device):
        scores = model(batch)
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())


def to_model(model: Any, batch: Any, simulated_s: float) -> Any:
    """The batch where the model is: an own step gets it as the loader gives it. From pinned memory the host does not wait.

    The simulated accelerator takes so many seconds for the step, since its arithmetic takes it none.
    """
    device = next(model.parameters()).device
    batch = move(batch, device)
    if device.type == "sim":
        torch.get_device_module(device).work(simulated_s)
    return batch


def bfloat16_on(device: torch.device) -> torch.autocast:
    # Most CPUs only emulate it.
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type != "cpu")


def shown(tensors: torch.Tensor, index: int) -> torch.Tensor:
    """One of a few distinct tensors, again and again."""
    return tensors[index % len(tensors)]


def random_crop(pictures: np.ndarray, side: int, index: int) -> tuple[torch.Tensor, int]:
    """Of a decoded picture in memory."""
    top, left = torch.randint(0, pictures.shape[1] - side, (2,)).tolist()
    return normalised(pictures[index % len(pictures), top : top + side, left : left + side]), index % CLASSES


def resnet_jpeg(size: Size) -> Job:
    folder = Path(tempfile.gettempdir()) / f"autotune-loader-gpu-study-{size.picture[0]}"
    make_jpegs(folder, size.pictures, size.picture)
    data = ConcatDataset([JpegFolder(folder, size.crop)] * size.times)
    return Job(binds="loader", dataset=data, model=resnet(size.width), train_step=picture_step, batch_size=size.batch)


def images(size: Size) -> Job:
    side = size.decoded + 32
    pictures = np.random.default_rng(0).integers(0, 256, (64, side, side, 3), np.uint8)
    data = Items(partial(random_crop, pictures, size.decoded), size.pictures * size.times)
    return Job(binds="transfer", dataset=data, model=resnet(size.width), train_step=picture_step, batch_size=size.batch)


def transformer(size: Size) -> Job:
    data = Items(partial(shown, torch.randint(0, VOCABULARY, (1024, size.tokens))), 65536)
    return Job(binds="step", dataset=data, model=Transformer(size), train_step=token_step, batch_size=size.batch)


JOBS: dict[str, Callable[[Size], Job]] = {make.__name__: make for make in (resnet_jpeg, images, transformer)}
"""Most valuable first."""
