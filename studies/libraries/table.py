"""The attempts of each library: what somebody passes to `tune()`, and how they train with the answer."""

from __future__ import annotations

import io
import itertools
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from studies.libraries.attempt import BATCH, CLASSES, WIDTH, Job, net
from studies.workloads import Items

ROWS, PICTURES, SIDE, SHARDS = 512, 128, 32, 8
Attempts = dict[str, Callable[[], Job]]
"""By what is passed, in the words of somebody who uses the library."""
LABELS = [index % CLASSES for index in range(ROWS)]
LIBRARIES: dict[str, Callable[[], Attempts]] = {}
"""By the name of the distribution; called in its environment."""


def library(name: str) -> Callable[[Callable[[], Attempts]], Callable[[], Attempts]]:
    """Take the attempts of a library into the table."""
    return lambda attempts: LIBRARIES.setdefault(name, attempts)


def loader(make: Callable[..., Any], model: Any = None, *, batch: float | None = BATCH, **options: Any) -> Job:
    """Of a loader that `make(**kwargs)` constructs: it is constructed again with what was chosen."""
    made = {"given": make(), "epoch": lambda result: make(**result.best.to_kwargs())}
    return Job(**made, model=model or net(), batch=batch, options=options)


def loader_of(data: Any, model: Any = None, kind: Callable[..., Any] = DataLoader, **options: Any) -> Job:
    """The same, of a loader that shuffles a dataset."""
    return loader(lambda **config: kind(data, batch_size=BATCH, shuffle=True, **config), model, **options)


def dataset(data: Any, model: Any = None, **options: Any) -> Job:
    """Of a dataset that is passed with a batch size."""
    own = {"batch_size": BATCH, **options}
    return Job(given=data, model=model or net(), options=own, epoch=lambda result: result.make_loader(data))


def applied(own: Any, model: Any, **options: Any) -> Job:
    """Of a loader to which `result.apply_to()` gives what was chosen."""
    return Job(given=own, model=model, options=options, epoch=lambda result: result.apply_to(own))


def folder() -> str:
    """A place for files that the process leaves behind."""
    return tempfile.mkdtemp(prefix="autotune_loader_libraries_")


def rows() -> TensorDataset:
    return TensorDataset(torch.rand(ROWS, WIDTH), torch.tensor(LABELS))


def plain(**config: Any) -> Any:
    return DataLoader(rows(), BATCH, shuffle=True, **config)


def dict_step(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


# Frameworks with a loop or a loader of their own; the package's tests install these, too.


@library("torchdata")
def torchdata() -> Attempts:
    from torchdata import nodes
    from torchdata.stateful_dataloader import StatefulDataLoader

    batches = nodes.Batcher(nodes.SamplerWrapper(torch.utils.data.RandomSampler(range(ROWS))), BATCH)
    return {
        "`StatefulDataLoader(ds)`": lambda: loader_of(rows(), kind=StatefulDataLoader),
        "`nodes.Loader(...)`": lambda: Job(given=nodes.Loader(nodes.ParallelMapper(batches, torch.tensor, 2))),
    }


class Labelled(torch.nn.Module):
    """A model that takes labels and returns its loss, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> Any:
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, label), "logits": logits}


@library("datasets")
def datasets() -> Attempts:
    from datasets import Dataset, DatasetDict, disable_progress_bars

    disable_progress_bars()
    data = Dataset.from_dict({"x": torch.rand(ROWS, WIDTH).tolist(), "label": LABELS})
    stream = data.to_iterable_dataset(num_shards=4).with_format("torch")
    return {
        "`ds.with_format('torch')`, `batch_size=16`": lambda: dataset(data.with_format("torch"), Labelled()),
        "`ds.to_iterable_dataset(num_shards=4).with_format('torch')`": lambda: dataset(stream, Labelled()),
        "`DataLoader(iterable.batch(16), batch_size=None)`": lambda: loader(
            lambda **config: DataLoader(stream.batch(BATCH), batch_size=None, **config), Labelled()
        ),
        "a `DatasetDict`": lambda: Job(given=DatasetDict(train=data, test=data), model=Labelled()),
    }


def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    ids = [torch.tensor(each["input_ids"]) for each in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    marks = torch.tensor([each["label"] for each in samples])
    return {"input_ids": padded, "attention_mask": padded > 0, "labels": marks}


@library("transformers")
def transformers() -> Attempts:
    from datasets import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    data = Dataset.from_dict({"input_ids": [[1 + i % 60] * (4 + i % 8) for i in range(ROWS)], "label": LABELS})
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_labels": CLASSES}
    model = BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    arguments = TrainingArguments(folder(), use_cpu=True, report_to=[])
    return {
        "a dataset, a `BertForSequenceClassification` and `collate_fn=`": lambda: dataset(
            data, model, collate_fn=collate
        ),
        "`Trainer`": lambda: Job(given=Trainer(model, arguments, train_dataset=data, data_collator=collate)),
    }


@library("accelerate")
def accelerate() -> Attempts:
    from accelerate import Accelerator

    return {
        "the loader that `prepare()` returned": lambda: loader(
            lambda **config: Accelerator(cpu=True).prepare(plain(**config))
        )
    }


@library("lightning")
def lightning() -> Attempts:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import CombinedLoader

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Data(pl.LightningDataModule):  # type: ignore[misc, name-defined]
        def train_dataloader(self) -> Any:
            return plain()

    def trainer() -> Any:
        names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        return pl.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(names, False))

    def epoch(result: Any) -> Iterator[Any]:
        loop = trainer()
        loop.fit(Module(), plain(**result.best.to_kwargs()))
        yield from range(loop.global_step)

    return {
        "`tune(loader, lightning_module)`": lambda: Job(given=plain(), model=Module(), epoch=epoch),
        "`Trainer`": lambda: Job(given=trainer(), model=Module()),
        "`LightningDataModule`": lambda: Job(given=Data(), model=Module()),
        "`CombinedLoader({'a': loader, 'b': loader})`": lambda: Job(given=CombinedLoader({"a": plain(), "b": plain()})),
        "`CombinedLoader(loader)`": lambda: loader(lambda **config: CombinedLoader(plain(**config))),
    }


# Streams, which share their samples out to workers by themselves.


def litdata_sample(index: int) -> dict[str, Any]:
    return {"x": torch.full((WIDTH,), float(index)), "y": index % CLASSES}


@library("litdata")
def litdata() -> Attempts:
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    path, os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = folder(), folder()
    optimize(fn=litdata_sample, inputs=list(range(ROWS)), output_dir=path, chunk_size=ROWS // SHARDS, num_workers=1)
    data = StreamingDataset(path, shuffle=True)

    def make(**config: Any) -> Any:
        return StreamingDataLoader(data, batch_size=BATCH, **config)

    return {
        "`StreamingDataset(folder)`, `batch_size=16`": lambda: Job(
            given=data, options={"batch_size": BATCH, "train_step": dict_step},
            epoch=lambda result: make(**result.best.to_kwargs()),
        ),
        "`StreamingDataLoader(StreamingDataset(folder))`": lambda: loader(make, train_step=dict_step),
    }  # fmt: skip


@library("webdataset")
def webdataset() -> Attempts:
    import webdataset as wds

    root = folder()
    paths = [f"{root}/{shard:04d}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        with tarfile.open(path, "w") as file:
            for index in range(shard, ROWS, SHARDS):
                tensor = io.BytesIO()
                torch.save(torch.full((WIDTH,), float(index)), tensor)
                for suffix, content in (("x.pth", tensor.getvalue()), ("cls", str(index % CLASSES).encode())):
                    info = tarfile.TarInfo(f"{index:04d}.{suffix}")
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))
    samples = wds.WebDataset(paths, shardshuffle=False).decode().to_tuple("x.pth", "cls")
    batches = samples.batched(BATCH)

    def make(**config: Any) -> Any:
        return wds.WebLoader(batches, batch_size=None, **config)

    return {
        "`WebDataset(shards).decode().to_tuple(...)`, `batch_size=16`": lambda: dataset(samples),
        "`WebLoader(shards....batched(16), batch_size=None)`": lambda: Job(
            given=make(), epoch=lambda result: make(**result.best.to_kwargs())
        ),
        "`WebLoader(...).unbatched().shuffle(100).batched(16)`": lambda: loader(
            lambda **config: make(**config).unbatched().shuffle(100).batched(BATCH)
        ),
    }


@library("mosaicml-streaming")
def mosaic() -> Attempts:
    from streaming import LocalDataset, MDSWriter, StreamingDataset

    path = folder()
    with MDSWriter(out=path, columns={"x": "ndarray:float32:16", "y": "int"}, size_limit=1 << 14) as out:
        for index in range(ROWS):
            out.write({"x": np.full(WIDTH, index, dtype=np.float32), "y": index % CLASSES})

    def stream() -> Any:
        return StreamingDataset(local=path, batch_size=BATCH)

    return {
        "`StreamingDataset(local=folder, batch_size=16)`": lambda: Job(
            given=stream(), options={"batch_size": BATCH, "train_step": dict_step}
        ),
        "`LocalDataset(folder)`, then the configuration with `StreamingDataset`": lambda: Job(
            given=LocalDataset(path), options={"batch_size": BATCH, "train_step": dict_step},
            epoch=lambda result: DataLoader(stream(), BATCH, **result.best.to_kwargs()),
        ),
    }  # fmt: skip


@library("ray")
def ray() -> Attempts:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or it leaves a file in the home folder
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    data = ray.data.from_items([{"x": [float(index)] * WIDTH, "y": y} for index, y in enumerate(LABELS)])
    return {"`ray.data.Dataset.iter_torch_batches()`": lambda: Job(given=data.iter_torch_batches(batch_size=BATCH))}


# Pictures and volumes.


def convolutions(dimensions: int = 2, channels: int = 3) -> torch.nn.Module:
    conv, pool = (getattr(torch.nn, f"{name}{dimensions}d") for name in ("Conv", "AdaptiveAvgPool"))
    return torch.nn.Sequential(
        conv(channels, 8, 3, stride=2), torch.nn.ReLU(), pool(1), torch.nn.Flatten(), torch.nn.Linear(8, CLASSES)
    )


def pictures() -> str:
    """JPEG files, a folder for each class."""
    from PIL import Image

    root, random = folder(), np.random.default_rng(0)
    for index, label in enumerate(LABELS[:PICTURES]):
        Path(root, str(label)).mkdir(exist_ok=True)
        pixels = random.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(f"{root}/{label}/{index}.jpg")
    return root


def bytes_step(model: Any, batch: Any) -> Any:
    pixels, classes = (each.as_subclass(torch.Tensor) for each in batch)
    return functional.cross_entropy(model(pixels.float()), classes)


@library("torchvision")
def torchvision() -> Attempts:
    from torchvision import datasets, transforms

    transform = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    data = datasets.ImageFolder(pictures(), transform)
    return {"`ImageFolder(root, transform)`, `batch_size=16`": lambda: dataset(data, convolutions())}


@library("timm")
def timm() -> Attempts:
    from timm.data import create_dataset, create_loader

    def make(num_workers: int = 0, **arguments: Any) -> Any:
        options = {"is_training": True, "device": torch.device("cpu"), "num_workers": num_workers, **arguments}
        return create_loader(create_dataset("", root=pictures()), (3, SIDE, SIDE), BATCH, **options)

    return {
        "`create_loader(..., use_prefetcher=True)`": lambda: Job(given=make(), model=convolutions()),
        "the same with `train_step=`, which takes the bytes that the inner loader gives": lambda: Job(
            given=make(), model=convolutions(), options={"train_step": bytes_step},
            epoch=lambda result: make(result.best.num_workers),
        ),
        "`create_loader(..., use_prefetcher=False, use_multi_epochs_loader=True)`": lambda: applied(
            make(use_prefetcher=False, use_multi_epochs_loader=True), convolutions()
        ),
    }  # fmt: skip


@library("albumentations")
def albumentations() -> Attempts:
    import albumentations as A  # noqa: N812 - as everybody calls it
    from albumentations.pytorch import ToTensorV2

    transform = A.Compose([A.HorizontalFlip(), A.RandomBrightnessContrast(), A.Normalize(), ToTensorV2()])

    def picture(index: int) -> Any:
        pixels = np.full((SIDE, SIDE, 3), index % 255, dtype=np.uint8)
        return transform(image=pixels)["image"], index % CLASSES

    return {
        "a dataset with `A.Compose([..., ToTensorV2()])`": lambda: dataset(Items(picture, PICTURES), convolutions())
    }


@library("fastai")
def fastai() -> Attempts:
    from fastai.vision.all import ImageDataLoaders, Resize

    def make(workers: int = 0) -> Any:
        options = {"valid_pct": 0.2, "seed": 0, "item_tfms": Resize(SIDE), "bs": BATCH, "num_workers": workers}
        return ImageDataLoaders.from_folder(pictures(), **options)

    def as_dataset() -> Job:
        dl = make().train
        options = {"batch_size": dl.bs, "collate_fn": dl.do_batch, "train_step": bytes_step}
        return Job(
            given=Items(dl.do_item, dl.n), model=convolutions(), options=options,
            epoch=lambda result: make(result.best.num_workers).train,
        )  # fmt: skip

    return {
        "`ImageDataLoaders.from_folder(...)`": lambda: Job(given=make(), model=convolutions()),
        "`AsDataset(dls.train)`, with `collate_fn=dls.train.do_batch`": as_dataset,
    }


@library("monai")
def monai() -> Attempts:
    from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader
    from monai.transforms import Compose, EnsureTyped, RandFlipd, ScaleIntensityd

    volumes = [np.full((1, 8, 8, 8), index, dtype=np.float32) for index in range(PICTURES)]
    data = [{"image": volume, "label": label} for volume, label in zip(volumes, LABELS, strict=False)]
    steps = Compose([ScaleIntensityd("image"), RandFlipd("image", prob=0.5), EnsureTyped("image")])
    return {
        "`monai.data.DataLoader(Dataset(...))`": lambda: loader_of(
            Dataset(data, steps), convolutions(3, 1), kind=DataLoader
        ),
        "`ThreadDataLoader(CacheDataset(...))`": lambda: applied(
            ThreadDataLoader(CacheDataset(data, steps), batch_size=BATCH, shuffle=True), convolutions(3, 1)
        ),
    }


def torchio_step(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["ct"]["data"]), torch.as_tensor(batch["label"]))


@library("torchio")
def torchio() -> Attempts:
    import torchio as tio

    volumes = [tio.ScalarImage(tensor=torch.rand(1, 16, 16, 16)) for _ in range(64)]
    subjects = [tio.Subject(ct=volume, label=y) for volume, y in zip(volumes, LABELS, strict=False)]
    data = tio.SubjectsDataset(subjects, transform=tio.RandomFlip())

    return {
        "`SubjectsLoader(SubjectsDataset(...))`": lambda: loader_of(
            data, convolutions(3, 1), kind=tio.SubjectsLoader, train_step=torchio_step
        )
    }


@library("nvidia-dali-cuda120")
def dali() -> Attempts:
    import nvidia.dali as dali_module
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    @dali_module.pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline() -> Any:
        return dali_module.fn.random.uniform(range=[0.0, 1.0], shape=[16])

    made = pipeline()
    made.build()
    return {
        "`DALIGenericIterator(pipeline)`, on the CPU": lambda: Job(given=DALIGenericIterator([made], ["x"], size=256))
    }


# Tables, graphs, samplers of other libraries, and batches that are objects.


@library("pandas")
def pandas() -> Attempts:
    import pandas as pd

    frame = pd.DataFrame(torch.rand(ROWS, WIDTH).numpy()).assign(y=LABELS)
    tensors = torch.tensor(frame.drop(columns="y").values), torch.tensor(frame["y"].values)
    return {
        "a `DataFrame`": lambda: Job(given=frame),
        "its columns as a `TensorDataset`": lambda: dataset(TensorDataset(*tensors)),
    }


def node_step(model: Any, data: Any) -> Any:
    return functional.cross_entropy(model(data.x), data.y)


@library("torch_geometric")
def torch_geometric() -> Attempts:
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader, NodeLoader
    from torch_geometric.nn import GCNConv, global_mean_pool
    from torch_geometric.sampler import BaseSampler, SamplerOutput

    class GraphNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = GCNConv(WIDTH, 32), torch.nn.Linear(32, CLASSES)

        def forward(self, data: Any) -> Any:
            return self.head(global_mean_pool(self.conv(data.x, data.edge_index).relu(), data.batch))

    class Alone(BaseSampler):  # type: ignore[misc]
        """`NeighborLoader` needs a compiled package that not every index has; its base is given this sampler of nodes."""

        def sample_from_nodes(self, index: Any, **_: Any) -> Any:
            none = torch.empty(0, dtype=torch.long)
            return SamplerOutput(node=index.node, row=none, col=none, edge=None, metadata=(index.input_id, index.time))

        def sample_from_edges(self, index: Any, **_: Any) -> Any:
            raise NotImplementedError

    def step(model: Any, data: Any) -> Any:
        return functional.cross_entropy(model(data), data.y)

    edges, links = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.randint(ROWS, (2, 4 * ROWS))
    graphs = [Data(x=torch.rand(4 + y, WIDTH), edge_index=edges, y=torch.tensor([y])) for y in LABELS]
    whole = Data(x=torch.rand(ROWS, WIDTH), edge_index=links, y=torch.tensor(LABELS))

    def nodes(**arguments: Any) -> Any:
        return NodeLoader(whole, node_sampler=Alone(), batch_size=32, shuffle=True, **arguments)

    return {
        "`torch_geometric.loader.DataLoader(graphs, follow_batch=[...])`": lambda: applied(
            DataLoader(graphs, batch_size=BATCH, shuffle=True, follow_batch=["x"]), GraphNet(), train_step=step
        ),
        "`NodeLoader(data, node_sampler=...)`, the base of `NeighborLoader`": lambda: loader(
            nodes, batch=None, train_step=node_step
        ),
        "`NodeLoader(..., filter_per_worker=False)`": lambda: Job(
            given=nodes(filter_per_worker=False), options={"train_step": node_step}
        ),
    }


@library("tensordict")
def tensordict() -> Attempts:
    from tensordict import TensorDict

    data = TensorDict({"x": torch.rand(ROWS, WIDTH), "y": torch.tensor(LABELS)}, batch_size=[ROWS])
    return {"a `TensorDict`, `batch_size=16`": lambda: dataset(data, collate_fn=torch.stack)}


@library("pytorch-metric-learning")
def metric_learning() -> Attempts:
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.samplers import MPerClassSampler

    data, sampler = rows(), MPerClassSampler(LABELS, 4, batch_size=BATCH, length_before_new_iter=ROWS)

    def epoch(result: Any) -> Iterator[Any]:
        for batch in result.make_loader(data):
            assert batch[1].bincount(minlength=CLASSES).tolist() == [4] * CLASSES, "the sampler is not used"
            yield batch

    return {
        "`DataLoader(ds, sampler=MPerClassSampler(...))`, then `result.make_loader(ds)`": lambda: Job(
            given=DataLoader(data, BATCH, sampler=sampler), options={"loss_fn": TripletMarginLoss()}, epoch=epoch
        )
    }


@library("pytorch-forecasting")
def forecasting() -> Attempts:
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    places = itertools.product(range(8), range(60))
    frame = pd.DataFrame([{"series": str(s), "time": t, "value": float(s + t % 7)} for s, t in places])
    lengths = {"max_encoder_length": 12, "max_prediction_length": 4, "time_varying_unknown_reals": ["value"]}
    data = TimeSeriesDataSet(frame, time_idx="time", target="value", group_ids=["series"], **lengths)
    model = TemporalFusionTransformer.from_dataset(data, hidden_size=8, log_interval=-1)

    def make(**config: Any) -> Any:
        return data.to_dataloader(train=True, batch_size=BATCH, **{"num_workers": 0, **config})

    return {"`TimeSeriesDataSet.to_dataloader()` and a `TemporalFusionTransformer`": lambda: loader(make, model)}
