"""Attempts with datasets that are streamed from files: they share their samples out to workers by themselves."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from studies.libraries.attempt import Attempts, Job
from studies.libraries.structures import BATCH, CLASSES, ROWS, WIDTH, dataset, folder, loader, net

ATTEMPTS = Attempts()
SHARDS = 8


def litdata_sample(index: int) -> dict[str, Any]:
    return {"x": torch.full((WIDTH,), float(index)), "y": index % CLASSES}


def litdata_folder() -> str:
    from litdata import optimize

    path = folder()
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = folder()
    optimize(fn=litdata_sample, inputs=list(range(ROWS)), output_dir=path, chunk_size=ROWS // SHARDS, num_workers=1)
    return path


def dict_step(model: Any, batch: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def litdata_loads(data: Any) -> Callable[..., Any]:
    from litdata import StreamingDataLoader

    return lambda **config: StreamingDataLoader(data, batch_size=BATCH, **config)


@ATTEMPTS.of("litdata", "`StreamingDataset(folder)`, `batch_size=16`")
def litdata_dataset() -> Job:
    from litdata import StreamingDataset

    data = StreamingDataset(litdata_folder(), shuffle=True)
    make = litdata_loads(data)
    return Job(
        given=data,
        model=net(),
        options={"batch_size": BATCH, "train_step": dict_step},
        batch=BATCH,
        epoch=lambda result: make(**result.best.to_kwargs()),
        after=lambda: list(make()),
    )


@ATTEMPTS.of("litdata", "`StreamingDataLoader(StreamingDataset(folder))`")
def litdata_loader() -> Job:
    from litdata import StreamingDataset

    make = litdata_loads(StreamingDataset(litdata_folder(), shuffle=True))
    return loader(make, options={"train_step": dict_step}, after=lambda: list(make()))


@ATTEMPTS.of("litdata", "`StreamingDataLoader(CombinedStreamingDataset([a, b]))`")
def litdata_combined() -> Job:
    from litdata import CombinedStreamingDataset, StreamingDataset

    parts = [StreamingDataset(litdata_folder()) for _ in range(2)]
    data = CombinedStreamingDataset(parts, seed=0, weights=[0.5, 0.5], iterate_over_all=False)
    return loader(litdata_loads(data), options={"train_step": dict_step})


def tars() -> list[str]:
    """Shards of samples, as webdataset names them: `0003.x.pth`, `0003.cls`."""
    root, paths = folder(), []
    for shard in range(SHARDS):
        paths.append(f"{root}/{shard:04d}.tar")
        with tarfile.open(paths[-1], "w") as file:
            for index in range(shard, ROWS, SHARDS):
                tensor = io.BytesIO()
                torch.save(torch.full((WIDTH,), float(index)), tensor)
                for suffix, content in (("x.pth", tensor.getvalue()), ("cls", str(index % CLASSES).encode())):
                    info = tarfile.TarInfo(f"{index:04d}.{suffix}")
                    info.size = len(content)
                    file.addfile(info, io.BytesIO(content))
    return paths


def web_samples() -> Any:
    import webdataset as wds

    return wds.WebDataset(tars(), shardshuffle=False).decode().to_tuple("x.pth", "cls")


def web_loads(data: Any) -> Callable[..., Any]:
    import webdataset as wds

    return lambda **config: wds.WebLoader(data, batch_size=None, **config)


@ATTEMPTS.of("webdataset", "`WebDataset(shards).decode().to_tuple(...)`, `batch_size=16`")
def web_dataset() -> Job:
    return dataset(web_samples(), shuffle=False)


@ATTEMPTS.of("webdataset", "`WebDataset(shards)....batched(16)`")
def web_batched() -> Job:
    data = web_samples().batched(BATCH)
    make = web_loads(data)
    return Job(given=data, model=net(), batch=BATCH, epoch=lambda result: make(**result.best.to_kwargs()))


@ATTEMPTS.of("webdataset", "`WebLoader(dataset.batched(16), batch_size=None)`")
def web_loader() -> Job:
    return loader(web_loads(web_samples().batched(BATCH)))


@ATTEMPTS.of("webdataset", "`WebLoader(...).unbatched().shuffle(100).batched(16)`")
def web_loader_rebatched() -> Job:
    make = web_loads(web_samples().batched(BATCH))
    return loader(lambda **config: make(**config).unbatched().shuffle(100).batched(BATCH))


def mosaic_folder() -> str:
    from streaming import MDSWriter

    path = folder()
    with MDSWriter(out=path, columns={"x": "ndarray:float32:16", "y": "int"}, size_limit=1 << 14) as out:
        for index in range(ROWS):
            out.write({"x": torch.full((WIDTH,), float(index)).numpy(), "y": index % CLASSES})
    return path


@ATTEMPTS.of("mosaicml-streaming", "`StreamingDataset(local=folder, batch_size=16)`")
def mosaic() -> Job:
    from streaming import StreamingDataset

    data = StreamingDataset(local=mosaic_folder(), batch_size=BATCH, shuffle=True)
    return dataset(data, shuffle=False, train_step=dict_step)


@ATTEMPTS.of("mosaicml-streaming", "`LocalDataset(folder)`, then the configuration with `StreamingDataset`")
def mosaic_local() -> Job:
    from streaming import LocalDataset, StreamingDataset

    path = mosaic_folder()
    return Job(
        given=LocalDataset(path),
        model=net(),
        options={"batch_size": BATCH, "train_step": dict_step},
        batch=BATCH,
        epoch=lambda result: DataLoader(
            StreamingDataset(local=path, batch_size=BATCH), BATCH, **result.best.to_kwargs()
        ),
    )


@ATTEMPTS.of("ray", "`ray.data.Dataset.iter_torch_batches()`")
def ray_data() -> Job:
    os.environ["RAY_AUTH_MODE"] = "disabled"  # or it leaves a file in the home folder
    import ray

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    data = ray.data.from_items([{"x": [float(index)] * WIDTH, "y": index % CLASSES} for index in range(ROWS)])
    return Job(given=data.iter_torch_batches(batch_size=BATCH), model=net())
