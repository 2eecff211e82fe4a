"""`tune()` for real, in processes of its own: what is the user's is afterwards as it was."""

import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader import tune
from tests.support.schedules import states

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


class Caching(Dataset):
    """Remembers what it read, draws random numbers and meddles with its process, as users' do."""

    def __init__(self, held=None):
        self.cache, self.held = {}, held

    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.0005)
        self.cache[index] = random.random() + float(np.random.rand())  # noqa: NPY002
        os.environ["MEDDLED"] = "yes"
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        return torch.rand(3) + self.cache[index], torch.tensor(index % 2)


def state(model, optimizer, generator):
    """What of this process and of the training loading could change."""
    return {
        "random": states(generator),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "start": multiprocessing.get_start_method(allow_none=True),
        "environment": (dict(os.environ), Path.cwd(), list(warnings.filters)),
        "signals": [signal.getsignal(getattr(signal, f"SIG{n}")) for n in ("INT", "TERM", "CHLD")],
        "model": {name: value.tolist() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "optimizer": repr(optimizer.state_dict()),
    }


def leftovers():
    """What a run could leave; segments have the name of their process, as other tests run, too."""
    return {
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
        "segments": sorted(Path("/dev/shm").glob(f"torch_{os.getpid()}_*")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": psutil.Process().num_fds(),
    }


@pytest.mark.parametrize("held", [None, pytest.param("a lock", marks=pytest.mark.system)])
def test_a_run_changes_nothing_and_leaves_nothing(held):
    # GIVEN a training under way, whose step has its optimizer; what is in no pickle is forked
    layers = (
        torch.nn.Linear(3, 4),
        torch.nn.BatchNorm1d(4),
        torch.nn.Dropout(),
        torch.nn.Linear(4, 2),
    )
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())

    def train_step(model, batch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    model.eval()
    options = {"budget": 1, "max_workers": 1, "progress": False}
    samples = [(torch.zeros(3), torch.tensor(0))] * 64
    tune(samples, model, batch_size=4, **options)  # imports what it needs, once
    generator = torch.Generator().manual_seed(5)
    dataset = Caching(held and threading.Lock())
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator, num_workers=1)
    before, left = state(model, optimizer, generator), leftovers()

    result = tune(loader, model, train_step=train_step, **options)

    assert any(trial.measurement is not None for trial in result.trials)
    assert state(model, optimizer, generator) == before
    assert loader._iterator is None
    assert dataset.cache == {}
    # AND what was killed has a moment to vanish
    deadline = time.monotonic() + 3
    while leftovers() != left and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers() == left
