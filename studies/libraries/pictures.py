"""Attempts with libraries for pictures and volumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from studies.libraries.attempt import Attempts, Job
from studies.libraries.structures import BATCH, CLASSES, dataset, folder, loader

ATTEMPTS = Attempts()
PICTURES, SIDE = 128, 32


def convolutions(dimensions: int = 2, channels: int = 3) -> torch.nn.Module:
    names = f"Conv{dimensions}d", f"AdaptiveAvgPool{dimensions}d"
    conv, pool = (getattr(torch.nn, name) for name in names)
    return torch.nn.Sequential(
        conv(channels, 8, 3, stride=2), torch.nn.ReLU(), pool(1), torch.nn.Flatten(), torch.nn.Linear(8, CLASSES)
    )


def pictures() -> str:
    """JPEG files, a folder for each class."""
    from PIL import Image

    root, random = folder(), np.random.default_rng(0)
    for index in range(PICTURES):
        Path(root, str(index % CLASSES)).mkdir(exist_ok=True)
        pixels = random.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"{root}/{index % CLASSES}/{index}.jpg")
    return root


def image_folder() -> Any:
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    return ImageFolder(pictures(), transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]))


@ATTEMPTS.of("torchvision", "`ImageFolder(root, transform)`, `batch_size=16`")
def folder_of_pictures() -> Job:
    return dataset(image_folder(), convolutions())


def timm_loader(**arguments: Any) -> Any:
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=pictures())
    return create_loader(
        data, (3, SIDE, SIDE), BATCH, is_training=True, device=torch.device("cpu"), **{"num_workers": 0, **arguments}
    )


def bytes_step(model: Any, batch: Any) -> Any:
    pixels, labels = (each.as_subclass(torch.Tensor) for each in batch)
    return functional.cross_entropy(model(pixels.float()), labels)


@ATTEMPTS.of("timm", "`create_loader(..., use_prefetcher=True)`")
def timm_prefetcher() -> Job:
    return Job(given=timm_loader(), model=convolutions(), batch=BATCH)


@ATTEMPTS.of("timm", "the same with `train_step=`, which takes the bytes that the inner loader gives")
def timm_prefetcher_with_step() -> Job:
    return Job(
        given=timm_loader(),
        model=convolutions(),
        options={"train_step": bytes_step},
        batch=BATCH,
        epoch=lambda result: timm_loader(num_workers=result.best.num_workers),
    )


def rebuilt(own: Any, model: Any) -> Job:
    """Of a loader that is constructed again by `rebuild()`, and is as it was afterwards."""
    from autotune_loader.pipeline.build import rebuild

    return Job(
        given=own, model=model, batch=BATCH, epoch=lambda result: rebuild(own, result.best), after=lambda: list(own)
    )


@ATTEMPTS.of("timm", "`create_loader(..., use_prefetcher=False, use_multi_epochs_loader=True)`")
def timm_multi_epochs() -> Job:
    return rebuilt(timm_loader(use_prefetcher=False, use_multi_epochs_loader=True), convolutions())


class Augmented(Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return PICTURES

    def __getitem__(self, index: int) -> Any:
        pixels = np.full((SIDE, SIDE, 3), index % 255, dtype=np.uint8)
        return self.transform(image=pixels)["image"], index % CLASSES


@ATTEMPTS.of("albumentations", "a dataset with `A.Compose([..., ToTensorV2()])`")
def albumentations() -> Job:
    import albumentations as A  # noqa: N812 - as everybody calls it
    from albumentations.pytorch import ToTensorV2

    data = Augmented(A.Compose([A.HorizontalFlip(), A.RandomBrightnessContrast(), A.Normalize(), ToTensorV2()]))
    return loader(lambda **config: DataLoader(data, BATCH, shuffle=True, **config), convolutions())


def fastai_loaders(**config: Any) -> Any:
    from fastai.data.block import CategoryBlock
    from fastai.vision.all import ImageDataLoaders, Resize

    assert CategoryBlock
    return ImageDataLoaders.from_folder(pictures(), valid_pct=0.2, seed=0, item_tfms=Resize(SIDE), bs=BATCH, **config)


class AsDataset(Dataset[Any]):
    """What the refusal of fastai's loaders says to pass."""

    def __init__(self, dl: Any) -> None:
        self.dl = dl

    def __len__(self) -> int:
        return self.dl.n

    def __getitem__(self, index: int) -> Any:
        return self.dl.do_item(index)


@ATTEMPTS.of("fastai", "`ImageDataLoaders.from_folder(...)`")
def fastai() -> Job:
    return Job(given=fastai_loaders(num_workers=0), model=convolutions())


@ATTEMPTS.of("fastai", "`dls.train`")
def fastai_train() -> Job:
    return Job(given=fastai_loaders(num_workers=0).train, model=convolutions())


@ATTEMPTS.of("fastai", "`AsDataset(dls.train)`, with `collate_fn=dls.train.do_batch`")
def fastai_as_dataset() -> Job:
    dl = fastai_loaders(num_workers=0).train
    return Job(
        given=AsDataset(dl),
        model=convolutions(),
        options={"batch_size": dl.bs, "collate_fn": dl.do_batch, "train_step": bytes_step},
        batch=BATCH,
        epoch=lambda result: fastai_loaders(num_workers=result.best.num_workers).train,
    )


def monai_dataset(kind: str = "Dataset") -> Any:
    import monai
    from monai.transforms import Compose, EnsureTyped, RandFlipd, ScaleIntensityd

    volumes = [np.full((1, 8, 8, 8), index, dtype=np.float32) for index in range(PICTURES)]
    data = [{"image": volume, "label": index % CLASSES} for index, volume in enumerate(volumes)]
    steps = [ScaleIntensityd(keys="image"), RandFlipd(keys="image", prob=0.5), EnsureTyped(keys="image")]
    return getattr(monai.data, kind)(data, Compose(steps))


@ATTEMPTS.of("monai", "`monai.data.DataLoader(Dataset(...))`")
def monai_loader() -> Job:
    from monai.data import DataLoader as MonaiLoader

    return loader(
        lambda **config: MonaiLoader(monai_dataset(), batch_size=BATCH, shuffle=True, **config), convolutions(3, 1)
    )


@ATTEMPTS.of("monai", "`ThreadDataLoader(CacheDataset(...))`, rebuilt by `rebuild()`")
def monai_threads() -> Job:
    from monai.data import ThreadDataLoader

    return rebuilt(ThreadDataLoader(monai_dataset("CacheDataset"), batch_size=BATCH, shuffle=True), convolutions(3, 1))


def subjects() -> Any:
    import torchio as tio

    made = [
        tio.Subject(ct=tio.ScalarImage(tensor=torch.rand(1, 16, 16, 16)), label=index % CLASSES) for index in range(64)
    ]
    return tio.SubjectsDataset(made, transform=tio.RandomFlip())


def torchio_step(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["ct"]["data"]), torch.as_tensor(batch["label"]))


def torchio(data: Callable[[], Any]) -> Job:
    import torchio as tio

    job = loader(
        lambda **config: tio.SubjectsLoader(data(), batch_size=8, **config),
        convolutions(3, 1), batch=8, options={"train_step": torchio_step},
    )  # fmt: skip
    return replace(job, after=lambda: list(job.given))


def queue(workers: int) -> Any:
    import torchio as tio

    return tio.Queue(
        subjects(), max_length=32, samples_per_volume=4, sampler=tio.UniformSampler(8), num_workers=workers
    )


@ATTEMPTS.of("torchio", "`SubjectsLoader(SubjectsDataset(...))`")
def torchio_subjects() -> Job:
    return torchio(subjects)


@ATTEMPTS.of("torchio", "the same without a `train_step`")
def torchio_inferred() -> Job:
    return replace(torchio(subjects), options={})


@ATTEMPTS.of("torchio", "`SubjectsLoader(Queue(..., num_workers=0))`")
def torchio_queue() -> Job:
    return torchio(lambda: queue(0))


@ATTEMPTS.of("torchio", "`SubjectsLoader(Queue(..., num_workers=2))`")
def torchio_queue_with_workers() -> Job:
    return torchio(lambda: queue(2))


@ATTEMPTS.of("nvidia-dali-cuda120", "`DALIGenericIterator(pipeline)`, on the CPU")
def dali() -> Job:
    import nvidia.dali as dali_module
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @dali_module.pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline() -> Any:
        return dali_module.fn.random.uniform(range=[0.0, 1.0], shape=[16])

    made = pipeline()
    made.build()
    return Job(given=DALIGenericIterator([made], ["x"], size=256))
