"""Attempts with libraries for pictures and volumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from studies.libraries.attempt import Attempts, Job
from studies.libraries.structures import BATCH, CLASSES, folder

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
    data = image_folder()
    return Job(
        given=data,
        model=convolutions(),
        options={"batch_size": BATCH},
        batch=BATCH,
        epoch=lambda result: DataLoader(data, BATCH, shuffle=True, **result.best.to_kwargs()),
    )


def timm_loader(**arguments: Any) -> Any:
    from timm.data import create_dataset, create_loader

    data = create_dataset("", root=pictures())
    return create_loader(
        data, (3, SIDE, SIDE), BATCH, is_training=True, device=torch.device("cpu"), **{"num_workers": 0, **arguments}
    )


@ATTEMPTS.of("timm", "`create_loader(..., use_prefetcher=True)`")
def timm_prefetcher() -> Job:
    return Job(given=timm_loader(), model=convolutions(), batch=BATCH, epoch=lambda result: [])


@ATTEMPTS.of("timm", "the same with `train_step=`, which takes the bytes that the inner loader gives")
def timm_prefetcher_with_step() -> Job:
    def step(model: Any, batch: Any) -> Any:
        return functional.cross_entropy(model(batch[0].float()), batch[1])

    return Job(
        given=timm_loader(),
        model=convolutions(),
        options={"train_step": step},
        batch=BATCH,
        epoch=lambda result: timm_loader(num_workers=result.best.num_workers),
    )


@ATTEMPTS.of("timm", "`create_loader(..., use_prefetcher=False, use_multi_epochs_loader=True)`")
def timm_multi_epochs() -> Job:
    from autotune_loader.pipeline.build import rebuild

    loader = timm_loader(use_prefetcher=False, use_multi_epochs_loader=True)
    return Job(
        given=loader,
        model=convolutions(),
        batch=BATCH,
        epoch=lambda result: rebuild(loader, result.best),
        after=lambda: list(loader),
    )


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
    return Job(
        given=DataLoader(data, BATCH, shuffle=True),
        model=convolutions(),
        batch=BATCH,
        epoch=lambda result: DataLoader(data, BATCH, shuffle=True, **result.best.to_kwargs()),
    )


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
    return Job(given=fastai_loaders(num_workers=0), model=convolutions(), epoch=lambda result: [])


@ATTEMPTS.of("fastai", "`dls.train`")
def fastai_train() -> Job:
    return Job(given=fastai_loaders(num_workers=0).train, model=convolutions(), epoch=lambda result: [])


@ATTEMPTS.of("fastai", "`AsDataset(dls.train)`, with `collate_fn=dls.train.do_batch`")
def fastai_as_dataset() -> Job:
    def step(model: Any, batch: Any) -> Any:
        return functional.cross_entropy(
            model(batch[0].float().as_subclass(torch.Tensor)), batch[1].as_subclass(torch.Tensor)
        )

    dl = fastai_loaders(num_workers=0).train
    return Job(
        given=AsDataset(dl),
        model=convolutions(),
        options={"batch_size": dl.bs, "collate_fn": dl.do_batch, "train_step": step},
        batch=BATCH,
        epoch=lambda result: fastai_loaders(num_workers=result.best.num_workers).train,
    )


def monai_data() -> list[dict[str, Any]]:
    return [
        {"image": np.full((1, 8, 8, 8), index, dtype=np.float32), "label": index % CLASSES} for index in range(PICTURES)
    ]


def monai_dataset(kind: str = "Dataset") -> Any:
    import monai
    from monai.transforms import Compose, EnsureTyped, RandFlipd, ScaleIntensityd

    steps = [ScaleIntensityd(keys="image"), RandFlipd(keys="image", prob=0.5), EnsureTyped(keys="image")]
    return getattr(monai.data, kind)(monai_data(), Compose(steps))


@ATTEMPTS.of("monai", "`monai.data.DataLoader(Dataset(...))`")
def monai_loader() -> Job:
    import monai

    def loader(**config: Any) -> Any:
        return monai.data.DataLoader(monai_dataset(), batch_size=BATCH, shuffle=True, **config)

    return Job(
        given=loader(), model=convolutions(3, 1), batch=BATCH, epoch=lambda result: loader(**result.best.to_kwargs())
    )


@ATTEMPTS.of("monai", "`ThreadDataLoader(CacheDataset(...))`, rebuilt by `rebuild()`")
def monai_threads() -> Job:
    import monai

    from autotune_loader.pipeline.build import rebuild

    loader = monai.data.ThreadDataLoader(monai_dataset("CacheDataset"), batch_size=BATCH, shuffle=True)
    return Job(
        given=loader,
        model=convolutions(3, 1),
        batch=BATCH,
        epoch=lambda result: rebuild(loader, result.best),
        after=lambda: list(loader),
    )


def subjects() -> Any:
    import torchio as tio

    made = [
        tio.Subject(ct=tio.ScalarImage(tensor=torch.rand(1, 16, 16, 16)), label=index % CLASSES) for index in range(64)
    ]
    return tio.SubjectsDataset(made, transform=tio.RandomFlip())


def torchio_step(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["ct"]["data"]), torch.as_tensor(batch["label"]))


def subjects_loader(data: Any, **config: Any) -> Any:
    import torchio as tio

    return tio.SubjectsLoader(data, batch_size=8, **config)


@ATTEMPTS.of("torchio", "`SubjectsLoader(SubjectsDataset(...))`")
def torchio_subjects() -> Job:
    return Job(
        given=subjects_loader(subjects()),
        model=convolutions(3, 1),
        options={"train_step": torchio_step},
        batch=8,
        epoch=lambda result: subjects_loader(subjects(), **result.best.to_kwargs()),
    )


@ATTEMPTS.of("torchio", "the same without a `train_step`")
def torchio_inferred() -> Job:
    return Job(given=subjects_loader(subjects()), model=convolutions(3, 1), epoch=lambda result: [])


def queue(workers: int) -> Any:
    import torchio as tio

    return tio.Queue(
        subjects(), max_length=32, samples_per_volume=4, sampler=tio.UniformSampler(8), num_workers=workers
    )


@ATTEMPTS.of("torchio", "`SubjectsLoader(Queue(..., num_workers=0))`")
def torchio_queue() -> Job:
    loader = subjects_loader(queue(0))
    return Job(
        given=loader,
        model=convolutions(3, 1),
        options={"train_step": torchio_step},
        batch=8,
        epoch=lambda result: subjects_loader(queue(0), **result.best.to_kwargs()),
        after=lambda: list(loader),
    )


@ATTEMPTS.of("torchio", "`SubjectsLoader(Queue(..., num_workers=2))`")
def torchio_queue_with_workers() -> Job:
    loader = subjects_loader(queue(2))
    return Job(
        given=loader,
        model=convolutions(3, 1),
        options={"train_step": torchio_step},
        batch=8,
        epoch=lambda result: subjects_loader(queue(2), **result.best.to_kwargs()),
        after=lambda: list(loader),
    )


@ATTEMPTS.of("nvidia-dali-cuda120", "`DALIGenericIterator(pipeline)`, on the CPU")
def dali() -> Job:
    import nvidia.dali as dali_module
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @dali_module.pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline() -> Any:
        return dali_module.fn.random.uniform(range=[0.0, 1.0], shape=[16])

    made = pipeline()
    made.build()
    return Job(given=DALIGenericIterator([made], ["x"], size=256), epoch=lambda result: [])
