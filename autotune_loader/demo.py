"""A real training job in small: JPEG files on disk, decoded and augmented with Pillow and numpy, and a CNN.

`autotune-loader demo` tunes it. Then `python -m autotune_loader.demo loader.json`, a process of its own as a training
job is one, loads the result and trains one epoch with torch's defaults and one with the tuned loader.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

from autotune_loader.machine.host import host_cpu
from autotune_loader.machine.limits import affinity
from autotune_loader.pipeline.build import build_loader
from autotune_loader.pipeline.prefetch import move, prefetched_as_tuned
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import MissingExtraError, TunerError

try:
    from PIL import Image, ImageDraw
except ImportError as error:
    raise MissingExtraError("the demo", "Pillow", "demo") from error
BATCH_SIZE, CLASSES, CROP = 32, 10, 160  # small enough that an epoch takes seconds on two cores
# Goes up when the same arguments give other pictures: an older cache is then made again.
RECIPE_VERSION = 1
# Mean and deviation of each colour, as ImageNet training pipelines have them.
MEAN, STD = np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32)


def cache_folder() -> Path:
    """Where the demo keeps its pictures between runs."""
    return Path(platformdirs.user_cache_dir("autotune-loader")) / "demo-jpegs"


def make_jpegs(folder: Path, count: int = 1200, size: tuple[int, int] = (500, 375), seed: int = 0) -> list[Path]:
    """See to it that `folder` holds `count` photo-like JPEG files of `size`, and return their paths in order.

    What is there already is kept, so that a second call returns at once and a call after an interrupted one makes
    what is missing: a file gets its name only when it is whole, and a picture depends on its number, `size` and `seed`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _forget_other_recipe(folder, {"version": RECIPE_VERSION, "size": list(size), "seed": seed})
    paths = [folder / f"{index:05d}.jpg" for index in range(count)]
    missing = [index for index, path in enumerate(paths) if not path.exists()]
    scenes = [_scene(np.random.default_rng([seed, label]), size) for label in range(CLASSES)] if missing else []
    for index in missing:
        picture = _view(scenes[index % CLASSES], np.random.default_rng([seed, CLASSES + index]), size)
        with _whole_or_not(paths[index]) as unfinished:
            picture.save(unfinished, "JPEG", quality=90)
    return paths


def _forget_other_recipe(folder: Path, recipe: dict[str, Any]) -> None:
    """Delete pictures that were made in another way than `recipe` says, then note `recipe`."""
    note, text = folder / "recipe.json", json.dumps(recipe)
    if note.exists() and note.read_text() == text:
        return
    note.unlink(missing_ok=True)  # first, so that an interruption here deletes the rest the next time
    for path in folder.glob("*.jpg"):
        path.unlink(missing_ok=True)
    with _whole_or_not(note) as unfinished:
        unfinished.write_text(text)


@contextlib.contextmanager
def _whole_or_not(path: Path) -> Iterator[Path]:
    """A path to write to that becomes `path` when the block ends well, and vanishes otherwise."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _scene(rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A large picture to take views of: noise with a photograph's 1/f spectrum, a few shapes, and grain."""
    width, height = 2 * size[0], 2 * size[1]
    light = np.full((height, width, 3), 128, np.float32)
    cells = 4
    while cells <= width // 2:
        coarse = rng.standard_normal((max(2, cells * height // width), cells, 3)).astype(np.float32)
        coarse = 0.4 * coarse + 1.2 * coarse.mean(axis=2, keepdims=True)  # colours of one place resemble each other
        for colour in range(3):
            smooth = Image.fromarray(coarse[..., colour]).resize((width, height), Image.Resampling.BICUBIC)
            light[..., colour] += 60 / cells**0.6 * np.asarray(smooth)
        cells *= 2
    picture = Image.fromarray(np.clip(light, 0, 255).astype(np.uint8))
    _draw_shapes(picture, rng)
    grain = rng.normal(0, rng.uniform(7, 13), light.shape)
    return Image.fromarray(np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8))


def _draw_shapes(picture: Image.Image, rng: np.random.Generator) -> None:
    draw = ImageDraw.Draw(picture, "RGBA")
    for _ in range(30):
        left, top = rng.uniform(0, picture.width), rng.uniform(0, picture.height)
        right, bottom = left + rng.uniform(20, 200), top + rng.uniform(20, 200)
        colour = (*(int(value) for value in rng.integers(0, 256, 3)), 130)
        if rng.random() < 0.5:
            draw.ellipse((left, top, right, bottom), fill=colour)
        else:
            draw.polygon([(left, bottom), (right, bottom), ((left + right) / 2, top)], fill=colour)


def _view(scene: Image.Image, rng: np.random.Generator, size: tuple[int, int]) -> Image.Image:
    """A piece of `scene` at its own scale, mirrored every other time, in its own light."""
    left, top = rng.integers(0, scene.width - size[0]), rng.integers(0, scene.height - size[1])
    view = scene.crop((int(left), int(top), int(left) + size[0], int(top) + size[1]))
    if rng.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    brightness = float(rng.uniform(0.7, 1.2))
    return view.point([min(255, round(level * brightness)) for level in range(256)] * 3)


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
        pixels = (np.asarray(picture, np.float32) / 255 - MEAN) / STD
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), index % CLASSES


class SmallCnn(nn.Module):
    """A classifier whose training step costs about as much CPU as decoding its pictures."""

    def __init__(self, classes: int = CLASSES) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        return self.layers(pictures)  # type: ignore[no-any-return]  # Sequential's call is typed Any


def demo_factory() -> dict[str, Any]:
    """Keyword arguments for `tune()`: what `autotune-loader tune autotune_loader.demo:demo_factory` tunes."""
    make_jpegs(cache_folder())
    return {"dataset_or_loader": JpegFolder(cache_folder()), "model": SmallCnn(), "batch_size": BATCH_SIZE}


def train_one_epoch(loader: Iterable[tuple[torch.Tensor, torch.Tensor]], model: nn.Module) -> float:
    """Train `model` on every batch of `loader`, and return the samples per second, the loader's start-up included."""
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    samples, start = 0, time.perf_counter()
    for pictures, labels in loader:
        optimizer.zero_grad()
        pictures, labels = move((pictures, labels), device)
        loss = nn.functional.cross_entropy(model(pictures), labels)
        loss.backward()
        optimizer.step()
        samples += len(labels)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return samples / (time.perf_counter() - start)


def compare_epochs(
    config: LoaderConfig, dataset: JpegFolder, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Samples per second of one epoch with torch's defaults and of one with `config`, under equal conditions.

    Files are read beforehand, each epoch starts with the same weights and a warmed-up step, and torch's process-wide
    settings are afterwards as they were.
    """
    for path in dataset.paths:
        path.read_bytes()
    default = _epoch_rate(build_loader(dataset, batch_size=BATCH_SIZE, shuffle=True), dataset, device)
    threads, sharing = torch.get_num_threads(), torch.multiprocessing.get_sharing_strategy()
    try:
        config.apply()
        loader = build_loader(dataset, config, batch_size=BATCH_SIZE, shuffle=True)
        return default, _epoch_rate(prefetched_as_tuned(loader, config, device), dataset, device)
    finally:
        torch.set_num_threads(threads)
        torch.multiprocessing.set_sharing_strategy(sharing)


def _epoch_rate(loader: Iterable[Any], dataset: JpegFolder, device: torch.device | str) -> float:
    torch.manual_seed(0)
    model = SmallCnn().to(device)
    # A few batches let allocators and thread pools settle, and take little beside an epoch.
    few = Subset(dataset, range(min(4 * BATCH_SIZE, len(dataset))))
    train_one_epoch(build_loader(few, batch_size=BATCH_SIZE), model)
    return train_one_epoch(loader, model)


def _foreign_cpu_s() -> float | None:
    """CPU seconds since boot on our CPUs that neither this process nor a child of it that has ended used."""
    cpu = host_cpu(affinity())
    return None if cpu is None else cpu.busy_s - sum(os.times()[:4])


def main(arguments: list[str]) -> int:
    """`python -m autotune_loader.demo loader.json`: print the rate of an epoch by default and of one as tuned."""
    from autotune_loader import load_config

    if len(arguments) != 1:
        print("usage: python -m autotune_loader.demo loader.json", file=sys.stderr)
        return 2
    try:
        config = load_config(arguments[0])
    except TunerError as error:
        print(error, file=sys.stderr)
        return 2
    make_jpegs(cache_folder())
    device = "cuda" if torch.cuda.device_count() else "cpu"
    foreign_s, start = _foreign_cpu_s(), time.perf_counter()
    default, tuned = compare_epochs(config, JpegFolder(cache_folder()), device)
    seconds, foreign_end_s = time.perf_counter() - start, _foreign_cpu_s()
    print(f"one epoch with torch's defaults   {default:7.0f} samples/s")
    print(f"one epoch with {arguments[0]:<18} {tuned:7.0f} samples/s   {tuned / default:.2f}x   ({config})")
    # A multi-threaded CPU step waits for its slowest thread: other work on few cores slows it many times over.
    if foreign_s is not None and foreign_end_s is not None and (cores := (foreign_end_s - foreign_s) / seconds) > 0.25:
        print(f"Other work kept {cores:.1f} cores busy meanwhile, so the rates may not compare: run it again.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
