"""Attempts with tables, graphs, samplers of other libraries, and batches that are objects."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from studies.libraries.attempt import Attempts, Job

ROWS, WIDTH, CLASSES, BATCH = 512, 16, 4, 16
SAMPLE_S = 0.001
ATTEMPTS = Attempts()


def loader(make: Callable[..., Any], model: Any = None, *, batch: float | None = BATCH, **more: Any) -> Job:
    """Of a loader that `make(**kwargs)` constructs: it is constructed again with what was chosen."""
    return Job(
        given=make(), model=model or net(), batch=batch, epoch=lambda result: make(**result.best.to_kwargs()), **more
    )


def dataset(data: Any, model: Any = None, *, shuffle: bool = True, **options: Any) -> Job:
    """Of a dataset that is passed with a batch size."""

    def epoch(result: Any) -> Any:
        kwargs = {name: options[name] for name in ("collate_fn",) if name in options}
        return DataLoader(data, BATCH, shuffle=shuffle, **kwargs, **result.best.to_kwargs())

    return Job(given=data, model=model or net(), options={"batch_size": BATCH, **options}, batch=BATCH, epoch=epoch)


def folder() -> str:
    """A place for files that the process leaves behind."""
    return tempfile.mkdtemp(prefix="autotune_loader_libraries_")


def net(inputs: int = WIDTH) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES))


class Rows(TensorDataset):
    """Samples that take about a millisecond, so that workers are worth something."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(SAMPLE_S)
        return super().__getitem__(index)


def rows() -> TensorDataset:
    return Rows(torch.rand(ROWS, WIDTH), torch.arange(ROWS) % CLASSES)


def as_it_is(batch: Any) -> Any:
    return batch


@ATTEMPTS.of("pandas", "a `DataFrame`")
def data_frame() -> Job:
    import pandas as pd

    return Job(given=pd.DataFrame({"x": range(ROWS), "y": range(ROWS)}), model=net())


@ATTEMPTS.of("pandas", "its columns as a `TensorDataset`")
def data_frame_as_tensors() -> Job:
    import pandas as pd

    frame = pd.DataFrame(torch.rand(ROWS, WIDTH).numpy()).assign(y=[index % CLASSES for index in range(ROWS)])
    return dataset(TensorDataset(torch.tensor(frame.drop(columns="y").values), torch.tensor(frame["y"].values)))


def graphs() -> list[Any]:
    from torch_geometric.data import Data

    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    return [
        Data(x=torch.rand(4 + index % 3, WIDTH), edge_index=edges, y=torch.tensor([index % CLASSES]))
        for index in range(ROWS)
    ]


class GraphNet(torch.nn.Module):
    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.conv, self.head = GCNConv(WIDTH, 32), torch.nn.Linear(32, CLASSES)

    def forward(self, x: Any, edge_index: Any, batch: Any) -> Any:
        from torch_geometric.nn import global_mean_pool

        return self.head(global_mean_pool(self.conv(x, edge_index).relu(), batch))


def graph_step(model: Any, data: Any) -> Any:
    return functional.cross_entropy(model(data.x, data.edge_index, data.batch), data.y)


@ATTEMPTS.of(
    "torch_geometric", "`torch_geometric.loader.DataLoader(graphs, follow_batch=[...])`, rebuilt by `rebuild()`"
)
def graph_loader() -> Job:
    from torch_geometric.loader import DataLoader as GraphLoader

    from autotune_loader.pipeline.build import rebuild

    own = GraphLoader(graphs(), batch_size=BATCH, shuffle=True, follow_batch=["x"])

    def epoch(result: Any) -> Iterator[Any]:
        for batch in rebuild(own, result.best):
            assert hasattr(batch, "x_batch"), "follow_batch is dropped"
            yield batch

    return Job(given=own, model=GraphNet(), options={"train_step": graph_step}, batch=BATCH, epoch=epoch)


@ATTEMPTS.of("torch_geometric", "the same without a `train_step`")
def graph_loader_inferred() -> Job:
    from torch_geometric.loader import DataLoader as GraphLoader

    return loader(lambda **config: GraphLoader(graphs(), batch_size=BATCH, shuffle=True, **config), GraphNet())


@ATTEMPTS.of("torch_geometric", "`DynamicBatchSampler(max_num=64)`")
def dynamic_batches() -> Job:
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.loader import DynamicBatchSampler

    data = graphs()

    def make(**config: Any) -> Any:
        return GraphLoader(data, batch_sampler=DynamicBatchSampler(data, max_num=64, mode="node"), **config)

    return loader(make, GraphNet(), batch=None, options={"train_step": graph_step})


def node_loader(**arguments: Any) -> Any:
    """`NeighborLoader` needs a compiled package that not every index has; this is its base, with a sampler of nodes."""
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader
    from torch_geometric.sampler import BaseSampler, SamplerOutput

    class Alone(BaseSampler):  # type: ignore[misc]
        def sample_from_nodes(self, index: Any, **_: Any) -> Any:
            none = torch.empty(0, dtype=torch.long)
            return SamplerOutput(node=index.node, row=none, col=none, edge=None, metadata=(index.input_id, index.time))

        def sample_from_edges(self, index: Any, **_: Any) -> Any:
            raise NotImplementedError

    whole = Data(
        x=torch.rand(ROWS, WIDTH), edge_index=torch.randint(ROWS, (2, 4 * ROWS)), y=torch.arange(ROWS) % CLASSES
    )

    return NodeLoader(whole, node_sampler=Alone(), batch_size=32, shuffle=True, **arguments)


def node_step(model: Any, data: Any) -> Any:
    return functional.cross_entropy(model(data.x), data.y)


@ATTEMPTS.of("torch_geometric", "`NodeLoader(data, node_sampler=...)`, the base of `NeighborLoader`")
def nodes() -> Job:
    return loader(node_loader, batch=None, options={"train_step": node_step})


@ATTEMPTS.of("torch_geometric", "`NodeLoader(..., filter_per_worker=False)`")
def nodes_filtered_outside() -> Job:
    return Job(given=node_loader(filter_per_worker=False), model=net(), options={"train_step": node_step})


def tensor_dict() -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": torch.rand(ROWS, WIDTH), "y": torch.arange(ROWS) % CLASSES}, batch_size=[ROWS])


@ATTEMPTS.of("tensordict", "`DataLoader(TensorDict(...), collate_fn=lambda batch: batch)`")
def tensordict_loader() -> Job:
    return loader(lambda **config: DataLoader(tensor_dict(), BATCH, shuffle=True, collate_fn=as_it_is, **config))


@ATTEMPTS.of("tensordict", "a `TensorDict`, `batch_size=16`")
def bare_tensordict() -> Job:
    return dataset(tensor_dict(), collate_fn=torch.stack)


@ATTEMPTS.of(
    "pytorch-metric-learning", "`DataLoader(ds, sampler=MPerClassSampler(...))`, then `result.make_loader(ds)`"
)
def per_class() -> Job:
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.samplers import MPerClassSampler

    data, labels = rows(), (torch.arange(ROWS) % CLASSES).tolist()
    own = DataLoader(data, BATCH, sampler=MPerClassSampler(labels, 4, batch_size=BATCH, length_before_new_iter=ROWS))

    def epoch(result: Any) -> Iterator[Any]:
        for batch in result.make_loader(data):
            assert batch[1].bincount(minlength=CLASSES).tolist() == [4] * CLASSES, "the sampler is not used"
            yield batch

    return Job(given=own, model=net(), options={"loss_fn": TripletMarginLoss()}, batch=BATCH, epoch=epoch)


@ATTEMPTS.of("pytorch-forecasting", "`TimeSeriesDataSet.to_dataloader()` and a `TemporalFusionTransformer`")
def time_series() -> Job:
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    frame = pd.DataFrame(
        [{"series": str(s), "time": t, "value": float(s + t % 7)} for s, t in itertools.product(range(8), range(60))]
    )
    data = TimeSeriesDataSet(
        frame, time_idx="time", target="value", group_ids=["series"], max_encoder_length=12, max_prediction_length=4,
        time_varying_unknown_reals=["value"],
    )  # fmt: skip
    model = TemporalFusionTransformer.from_dataset(data, hidden_size=8, log_interval=-1)
    return loader(
        lambda **config: data.to_dataloader(train=True, batch_size=32, **{"num_workers": 0, **config}), model, batch=32
    )
