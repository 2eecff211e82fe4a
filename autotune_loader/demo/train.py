"""A training script like many: a small CNN on JPEG files that lie behind a URL, or in a folder.

python train.py URL_OR_FOLDER SAMPLES
"""

from __future__ import annotations

import http.client
import io
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune_loader import load_config


class Pictures(Dataset[tuple[torch.Tensor, int]]):
    """Pictures with their labels; each process has a connection of its own."""

    def __init__(self, source: str, count: int = 1200) -> None:
        self.source, self.count, self.connected_by = source, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        data = self.read(f"{index:05d}.jpg")
        pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.float32) / 255
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), index % 10

    def read(self, name: str) -> bytes:
        if not self.source.startswith("http://"):
            return Path(self.source, name).read_bytes()
        if self.connected_by != os.getpid():
            self.connection, self.connected_by = http.client.HTTPConnection(self.source[7:]), os.getpid()
        self.connection.request("GET", f"/{name}")
        return self.connection.getresponse().read()

    def __getstate__(self) -> dict[str, object]:
        return {"source": self.source, "count": self.count, "connected_by": 0}


warnings.filterwarnings("ignore", message="This DataLoader will create")  # it counts cores; these workers wait


def make_job(source: str = "") -> tuple[DataLoader[tuple[torch.Tensor, int]], nn.Module]:
    settings = load_config("loader.json").to_kwargs() if Path("loader.json").exists() else {}
    loader = DataLoader(Pictures(source or sys.argv[1]), batch_size=16, shuffle=True, **settings)
    layers = [nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)]
    return loader, nn.Sequential(*layers)


def main(samples: int) -> None:
    loader, model = make_job()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen, begun = 0, time.perf_counter()
    while seen < samples:
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(x)
            if seen >= samples:
                break
    seconds = time.perf_counter() - begun
    print(f"loss {loss.item():.2f} after {seen:,} samples in {seconds:.1f} s: {seen / seconds:,.0f} samples/s")


if __name__ == "__main__":
    main(int(sys.argv[2]))
