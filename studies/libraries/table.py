"""The attempts with each library, as somebody would write them; by the name of its distribution, in the order of the page.

A text makes what is passed. Then each attempt has a line `#> ` with what is passed, in the page's words, and the expression
of its job. `attempt.py` runs them in the library's environment, with all that it imports and defines in reach.
"""

LIBRARIES = {
    "torchdata": """
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
batches = nodes.Batcher(nodes.SamplerWrapper(torch.utils.data.RandomSampler(range(ROWS))), BATCH)
#> `StatefulDataLoader(ds)`
loader_of(rows(), kind=StatefulDataLoader)
#> `nodes.Loader(...)`
Job(given=nodes.Loader(nodes.ParallelMapper(batches, torch.tensor, 2)))
""",
    "datasets": """
from datasets import Dataset, DatasetDict, disable_progress_bars
disable_progress_bars()
data = Dataset.from_dict({"x": torch.rand(ROWS, WIDTH).tolist(), "label": LABELS})
stream = data.to_iterable_dataset(num_shards=4).with_format("torch")
class Labelled(torch.nn.Module):  # takes labels and returns its loss, as transformers' models do
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x, label):
        logits = self.net(x)
        return {"loss": functional.cross_entropy(logits, label), "logits": logits}
#> `ds.with_format('torch')`, `batch_size=16`
dataset(data.with_format("torch"), Labelled())
#> `ds.to_iterable_dataset(num_shards=4).with_format('torch')`
dataset(stream, Labelled())
#> `DataLoader(iterable.batch(16), batch_size=None)`
loader(lambda **config: DataLoader(stream.batch(BATCH), batch_size=None, **config), Labelled())
#> a `DatasetDict`
Job(given=DatasetDict(train=data, test=data), model=Labelled())
""",
    "transformers": """
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
def collate(samples):
    ids = [torch.tensor(each["input_ids"]) for each in samples]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.tensor([each["label"] for each in samples])
    return {"input_ids": padded, "attention_mask": padded > 0, "labels": labels}
data = Dataset.from_dict({"input_ids": [[1 + i % 60] * (4 + i % 8) for i in range(ROWS)], "label": LABELS})
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_labels": CLASSES}
model = BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
arguments = TrainingArguments(folder(), use_cpu=True, report_to=[])
#> a dataset, a `BertForSequenceClassification` and `collate_fn=`
dataset(data, model, collate_fn=collate)
#> `Trainer`
Job(given=Trainer(model, arguments, train_dataset=data, data_collator=collate))
""",
    "accelerate": """
from accelerate import Accelerator
#> the loader that `prepare()` returned
loader(lambda **config: Accelerator(cpu=True).prepare(plain(**config)))
""",
    "lightning": """
import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return plain()
def trainer():
    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return pl.Trainer(max_epochs=1, accelerator="cpu", **dict.fromkeys(names, False))
def epoch(result):
    loop = trainer()
    loop.fit(Module(), plain(**result.best.to_kwargs()))
    return range(loop.global_step)
#> `tune(loader, lightning_module)`
Job(given=plain(), model=Module(), epoch=epoch)
#> `Trainer`
Job(given=trainer(), model=Module())
#> `LightningDataModule`
Job(given=Data(), model=Module())
#> `CombinedLoader({'a': loader, 'b': loader})`
Job(given=CombinedLoader({"a": plain(), "b": plain()}))
#> `CombinedLoader(loader)`
loader(lambda **config: CombinedLoader(plain(**config)))
""",
    "pandas": """
import pandas as pd
frame = pd.DataFrame(torch.rand(ROWS, WIDTH).numpy()).assign(y=LABELS)
tensors = torch.tensor(frame.drop(columns="y").values), torch.tensor(frame["y"].values)
#> a `DataFrame`
Job(given=frame)
#> its columns as a `TensorDataset`
dataset(TensorDataset(*tensors))
""",
    "litdata": """
import os
from litdata import StreamingDataLoader, StreamingDataset, optimize
path, os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = folder(), folder()
optimize(fn=numbered, inputs=list(range(ROWS)), output_dir=path, chunk_size=ROWS // SHARDS, num_workers=1)
data = StreamingDataset(path, shuffle=True)
def make(**config):
    return StreamingDataLoader(data, batch_size=BATCH, **config)
#> `StreamingDataset(folder)`, `batch_size=16`
of_dicts(data, make)
#> `StreamingDataLoader(StreamingDataset(folder))`
loader(make, train_step=dict_step)
""",
    "webdataset": """
import webdataset as wds
root = folder()
paths = [f"{root}/{shard:04d}.tar" for shard in range(SHARDS)]
for shard, path in enumerate(paths):
    with wds.TarWriter(path) as out:
        for index in range(shard, ROWS, SHARDS):
            sample = {"x.pth": torch.full((WIDTH,), float(index)), "cls": index % CLASSES}
            out.write({"__key__": f"{index:04d}", **sample})
samples = wds.WebDataset(paths, shardshuffle=False).decode().to_tuple("x.pth", "cls")
batches = samples.batched(BATCH)
def make(**config):
    return wds.WebLoader(batches, batch_size=None, **config)
#> `WebDataset(shards).decode().to_tuple(...)`, `batch_size=16`
dataset(samples)
#> `WebLoader(shards....batched(16), batch_size=None)`
loader(make)
#> `WebLoader(...).unbatched().shuffle(100).batched(16)`
loader(lambda **config: make(**config).unbatched().shuffle(100).batched(BATCH))
""",
    "mosaicml-streaming": """
from streaming import LocalDataset, MDSWriter, StreamingDataset
path = folder()
with MDSWriter(out=path, columns={"x": "ndarray:float32:16", "y": "int"}, size_limit=1 << 14) as out:
    for index in range(ROWS):
        out.write({"x": np.full(WIDTH, index, dtype=np.float32), "y": index % CLASSES})
def stream():
    return StreamingDataset(local=path, batch_size=BATCH)
#> `StreamingDataset(local=folder, batch_size=16)`
of_dicts(stream())
#> `LocalDataset(folder)`, then the configuration with `StreamingDataset`
of_dicts(LocalDataset(path), lambda **config: DataLoader(stream(), BATCH, **config))
""",
    "monai": """
from monai.data import CacheDataset, DataLoader, Dataset, ThreadDataLoader
from monai.transforms import Compose, EnsureTyped, RandFlipd, ScaleIntensityd
volumes = [np.full((1, 8, 8, 8), index, dtype=np.float32) for index in range(PICTURES)]
data = [{"image": volume, "label": label} for volume, label in zip(volumes, LABELS)]
steps = Compose([ScaleIntensityd("image"), RandFlipd("image", prob=0.5), EnsureTyped("image")])
#> `monai.data.DataLoader(Dataset(...))`
loader_of(Dataset(data, steps), convolutions(3, 1), kind=DataLoader)
#> `ThreadDataLoader(CacheDataset(...))`
applied(ThreadDataLoader(CacheDataset(data, steps), batch_size=BATCH, shuffle=True), convolutions(3, 1))
""",
    "torchio": """
import torchio as tio
volumes = [tio.ScalarImage(tensor=torch.rand(1, 16, 16, 16)) for _ in range(64)]
subjects = [tio.Subject(ct=volume, label=y) for volume, y in zip(volumes, LABELS)]
data = tio.SubjectsDataset(subjects, transform=tio.RandomFlip())
def step(model, batch):
    return functional.cross_entropy(model(batch["ct"]["data"]), torch.as_tensor(batch["label"]))
#> `SubjectsLoader(SubjectsDataset(...))`
loader_of(data, convolutions(3, 1), kind=tio.SubjectsLoader, train_step=step)
""",
    "tensordict": """
from tensordict import TensorDict
data = TensorDict({"x": torch.rand(ROWS, WIDTH), "y": torch.tensor(LABELS)}, batch_size=[ROWS])
#> a `TensorDict`, `batch_size=16`
dataset(data, collate_fn=torch.stack)
""",
    "torch_geometric": """
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NodeLoader
from torch_geometric.nn import GCNConv, global_mean_pool
from torch_geometric.sampler import BaseSampler, SamplerOutput
class GraphNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(WIDTH, 32), torch.nn.Linear(32, CLASSES)
    def forward(self, data):
        return self.head(global_mean_pool(self.conv(data.x, data.edge_index).relu(), data.batch))
class Alone(BaseSampler):  # NeighborLoader needs a compiled package that not every index has; its base is given this
    def sample_from_nodes(self, index, **_):
        none = torch.empty(0, dtype=torch.long)
        return SamplerOutput(node=index.node, row=none, col=none, edge=None, metadata=(index.input_id, index.time))
    def sample_from_edges(self, index, **_):
        raise NotImplementedError
def graph_step(model, data):
    return functional.cross_entropy(model(data), data.y)
def node_step(model, data):
    return functional.cross_entropy(model(data.x), data.y)
edges, links = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), torch.randint(ROWS, (2, 4 * ROWS))
graphs = [Data(x=torch.rand(4 + y, WIDTH), edge_index=edges, y=torch.tensor([y])) for y in LABELS]
whole = Data(x=torch.rand(ROWS, WIDTH), edge_index=links, y=torch.tensor(LABELS))
def nodes(**arguments):
    return NodeLoader(whole, node_sampler=Alone(), batch_size=32, shuffle=True, **arguments)
#> `torch_geometric.loader.DataLoader(graphs, follow_batch=[...])`
applied(DataLoader(graphs, batch_size=BATCH, shuffle=True, follow_batch=["x"]), GraphNet(), train_step=graph_step)
#> `NodeLoader(data, node_sampler=...)`, the base of `NeighborLoader`
loader(nodes, batch=None, train_step=node_step)
#> `NodeLoader(..., filter_per_worker=False)`
Job(given=nodes(filter_per_worker=False), options={"train_step": node_step})
""",
    "albumentations": """
import albumentations as A
from albumentations.pytorch import ToTensorV2
from studies.workloads import Items
transform = A.Compose([A.HorizontalFlip(), A.RandomBrightnessContrast(), A.Normalize(), ToTensorV2()])
def picture(index):
    pixels = np.full((SIDE, SIDE, 3), index % 255, dtype=np.uint8)
    return transform(image=pixels)["image"], index % CLASSES
#> a dataset with `A.Compose([..., ToTensorV2()])`
dataset(Items(picture, PICTURES), convolutions())
""",
    "torchvision": """
from torchvision import datasets, transforms
transform = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
data = datasets.ImageFolder(pictures(), transform)
#> `ImageFolder(root, transform)`, `batch_size=16`
dataset(data, convolutions())
""",
    "timm": """
from timm.data import create_dataset, create_loader
def make(num_workers=0, **arguments):
    options = {"is_training": True, "device": torch.device("cpu"), "num_workers": num_workers, **arguments}
    return create_loader(create_dataset("", root=pictures()), (3, SIDE, SIDE), BATCH, **options)
#> `create_loader(..., use_prefetcher=True)`
Job(given=make(), model=convolutions())
#> the same with `train_step=`, which takes the bytes that the inner loader gives
Job(given=make(), model=convolutions(), options={"train_step": bytes_step},
    epoch=lambda result: make(result.best.num_workers))
#> `create_loader(..., use_prefetcher=False, use_multi_epochs_loader=True)`
applied(make(use_prefetcher=False, use_multi_epochs_loader=True), convolutions())
""",
    "pytorch-metric-learning": """
from pytorch_metric_learning.losses import TripletMarginLoss
from pytorch_metric_learning.samplers import MPerClassSampler
data, sampler = rows(), MPerClassSampler(LABELS, 4, batch_size=BATCH, length_before_new_iter=ROWS)
def epoch(result):
    for batch in result.make_loader(data):
        assert batch[1].bincount(minlength=CLASSES).tolist() == [4] * CLASSES, "the sampler is not used"
        yield batch
#> `DataLoader(ds, sampler=MPerClassSampler(...))`, then `result.make_loader(ds)`
Job(given=DataLoader(data, BATCH, sampler=sampler), options={"loss_fn": TripletMarginLoss()}, epoch=epoch)
""",
    "pytorch-forecasting": """
import itertools
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
places = itertools.product(range(8), range(60))
frame = pd.DataFrame([{"series": str(s), "time": t, "value": float(s + t % 7)} for s, t in places])
lengths = {"max_encoder_length": 12, "max_prediction_length": 4, "time_varying_unknown_reals": ["value"]}
data = TimeSeriesDataSet(frame, time_idx="time", target="value", group_ids=["series"], **lengths)
model = TemporalFusionTransformer.from_dataset(data, hidden_size=8, log_interval=-1)
def make(**config):
    return data.to_dataloader(train=True, batch_size=BATCH, **{"num_workers": 0, **config})
#> `TimeSeriesDataSet.to_dataloader()` and a `TemporalFusionTransformer`
loader(make, model)
""",
    "fastai": """
from fastai.vision.all import ImageDataLoaders, Resize
from studies.workloads import Items
def make(workers=0):
    options = {"valid_pct": 0.2, "seed": 0, "item_tfms": Resize(SIDE), "bs": BATCH, "num_workers": workers}
    return ImageDataLoaders.from_folder(pictures(), **options)
def as_dataset():
    dl = make().train
    options = {"batch_size": dl.bs, "collate_fn": dl.do_batch, "train_step": bytes_step}
    epoch = lambda result: make(result.best.num_workers).train
    return Job(given=Items(dl.do_item, dl.n), model=convolutions(), options=options, epoch=epoch)
#> `ImageDataLoaders.from_folder(...)`
Job(given=make(), model=convolutions())
#> a dataset whose `__getitem__(i)` is `dls.train.do_item(i)`, with `collate_fn=dls.train.do_batch`
as_dataset()
""",
    "nvidia-dali-cuda120": """
from nvidia import dali
from nvidia.dali.plugin.pytorch import DALIGenericIterator
@dali.pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
def pipeline():
    return dali.fn.random.uniform(range=[0.0, 1.0], shape=[16])
made = pipeline()
made.build()
#> `DALIGenericIterator(pipeline)`, on the CPU
Job(given=DALIGenericIterator([made], ["x"], size=256))
""",
    "ray": """
import os
os.environ["RAY_AUTH_MODE"] = "disabled"  # or it leaves a file in the home folder
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
data = ray.data.from_items([{"x": [float(index)] * WIDTH, "y": y} for index, y in enumerate(LABELS)])
#> `ray.data.Dataset.iter_torch_batches()`
Job(given=data.iter_torch_batches(batch_size=BATCH))
""",
}
