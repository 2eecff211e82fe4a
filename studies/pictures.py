"""A training job on the local disk: JPEG files, decoded and augmented with Pillow and numpy, and a small CNN."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

BATCH_SIZE, CLASSES, CROP = 32, 10, 160  # small enough that an epoch takes seconds on two cores
# Mean and deviation of each colour, as ImageNet training pipelines have them.
MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


def cache_folder() -> Path:
    """Where the pictures are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "autotune-loader" / "demo-jpegs-2"


def make_jpegs(folder: Path, count: int = 1200, size: tuple[int, int] = (500, 375), seed: int = 0) -> list[Path]:
    """The JPEG files of a folder, soft noise with grain of `size` (width, height); those that are missing are made."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:05d}.jpg" for index in range(count)]
    for index, path in enumerate(paths):
        if not path.exists():
            rng = np.random.default_rng([seed, index])
            coarse = rng.integers(0, 256, (size[1] // 12, size[0] // 12, 3), np.uint8)
            smooth = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
            grain = rng.normal(0, 7, (size[1], size[0], 3))
            picture = Image.fromarray(np.clip(np.asarray(smooth) + grain, 0, 255).astype(np.uint8))
            unfinished = path.with_suffix(f".{os.getpid()}.part")
            picture.save(unfinished, "JPEG", quality=90)
            unfinished.replace(path)
    return paths


def normalised(pixels: np.ndarray) -> torch.Tensor:
    """Colours of shape (height, width, 3), 0 to 255, as float32 of shape (3, height, width)."""
    scaled = (np.asarray(pixels, np.float32) / 255 - MEAN) / STD
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(2, 0, 1)))


class JpegFolder(Dataset[tuple[torch.Tensor, int]]):
    """The JPEG files of a folder, augmented: (normalised float32 tensor of shape (3, crop, crop), label)."""

    def __init__(self, folder: Path, crop: int = CROP) -> None:
        self.paths = sorted(folder.glob("*.jpg"))
        self.crop = crop

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        # torch's generator, because DataLoader seeds it differently in each worker
        scale, across, down, mirror = torch.rand(4).tolist()
        with Image.open(self.paths[index]) as file:
            picture = file.convert("RGB")
        side = min(picture.size) * (0.5 + 0.5 * scale)
        left, top = across * (picture.width - side), down * (picture.height - side)
        box = (left, top, left + side, top + side)
        picture = picture.resize((self.crop, self.crop), Image.Resampling.BILINEAR, box=box)
        if mirror < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return normalised(np.asarray(picture)), index % CLASSES


class SmallCnn(nn.Module):
    """A classifier of pooled pictures: its training step costs little beside decoding them, so that workers are worth it."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.AvgPool2d(4)]
        for inputs, outputs in ((3, 16), (16, 32)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.layers(pictures)  # type: ignore[no-any-return]  # Sequential's call is typed Any
