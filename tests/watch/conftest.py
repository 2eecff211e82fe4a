import pytest

from tests.support.bench import Bench

HEAD = """
import os, random, signal, sys, time
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Numbers(Dataset):
    def __init__(self, size=96):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        time.sleep(0.002)
        if index == int(os.environ.get("BAD", -1)):
            raise ValueError(f"no sample {index}")
        return torch.randn(4) + index / self.size + random.random() + np.random.rand()

class Waiting(Numbers):
    def __getitem__(self, index):
        time.sleep(float(os.environ.get("FETCH_S", 0.004)))
        return torch.tensor(index)

class Stream(IterableDataset):
    def __iter__(self):
        first = torch.rand(1)  # drawn when the epoch begins, not when its first batch is asked for
        info = get_worker_info()
        step = 1 if info is None else info.num_workers
        return iter([first + n for n in range(0 if info is None else info.id, 40, step)])
"""


@pytest.fixture
def bench(preloaded, tmp_path):
    return Bench(preloaded, tmp_path, HEAD)
