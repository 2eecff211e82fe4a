"""After tuning the user's objects and process are as they were."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader import tune
from autotune_loader.bursts.parent import OpenProbe, open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import SimulatedMachine, on_simulated_machines

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Caching(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Remembers what it has read, draws random numbers and meddles with its process, as datasets of users do."""

    def __init__(self, failing: bool = False) -> None:
        self.cache: dict[int, float] = {}
        self.failing = failing

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.0005)
        if self.failing:
            raise LookupError("nothing here")
        self.cache[index] = random.random() + float(np.random.rand())  # noqa: NPY002
        os.environ["MEDDLED"] = "yes"
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        return torch.rand(3) + self.cache[index], torch.tensor(index % 2)


def net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 2)
    )


def process_state() -> dict[str, Any]:
    """Everything of this process that loading and training could change."""
    return {
        "torch random": torch.get_rng_state().tolist(),
        "python random": random.getstate(),
        "numpy random": [np.asarray(part).tolist() for part in np.random.get_state()],  # noqa: NPY002
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "environment": dict(os.environ),
        "warning filters": list(warnings.filters),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        "folder": Path.cwd(),
    }


def leftovers() -> dict[str, Any]:
    """What a run could leave behind."""
    return {
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
        "segments": sorted(path.name for path in Path("/dev/shm").glob("torch_*") if not is_a_neighbours(path)),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": psutil.Process().num_fds(),
    }


def is_a_neighbours(segment: Path) -> bool:
    """Whether a process that lives and is not this one made it: other tests may run at the same time."""
    pid = int(segment.name.split("_")[1])
    return pid != os.getpid() and Path("/proc", str(pid)).exists()


def settled(before: dict[str, Any]) -> dict[str, Any]:
    """The leftovers, once what was killed has had a moment to vanish."""
    deadline = time.monotonic() + 3
    while leftovers() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    return leftovers()


def training_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "state": {name: value.tolist() for name, value in model.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
        "training": [module.training for module in model.modules()],
        "optimizer": repr(optimizer.state_dict()),
    }


def burst(dataset: Any, model: Any, **given: Any) -> OpenProbe:
    """What a run does with the caller's objects: a probe of them is opened, and bursts with and without workers."""
    workload = make_workload(dataset, model, **given)
    with open_probe(workload, inspect_machine(), None) as opened:
        for workers in (0, 1):
            outcome = opened.probe.burst(LoaderConfig(num_workers=workers), BurstPlan(max_s=0.1, min_s=0.05))
            assert isinstance(outcome, Measurement)
    return opened


@pytest.fixture(scope="module", autouse=True)
def _everything_was_imported_and_used_once() -> None:
    data = [(torch.zeros(3), torch.tensor(0))] * 8
    burst(data, net(), batch_size=4)
    with pytest.MonkeyPatch.context() as patch:
        on_simulated_machines(patch, lambda workload: SimulatedMachine())
        tune(data, net(), batch_size=4, max_trials=1, progress=False)


def test_a_run_changes_nothing_and_leaves_nothing() -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 3)).sum().backward()
    optimizer.step()
    model.eval()
    generator = torch.Generator().manual_seed(5)
    dataset = Caching()
    loader = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator, num_workers=1)
    before = training_state(model, optimizer), process_state(), generator.get_state().tolist()
    left = leftovers()

    assert tune(loader, model, budget=1, max_trials=2, max_workers=1, optimizer=optimizer).trials

    assert (training_state(model, optimizer), process_state(), generator.get_state().tolist()) == before
    assert loader._iterator is None
    assert dataset.cache == {}
    assert settled(left) == left


def test_a_train_step_that_closes_over_the_optimizer_trains_a_copy() -> None:
    model: Any = net()
    torch.nn.utils.parametrizations.weight_norm(model[0])  # which torch copies, but refuses to pickle
    optimizer = torch.optim.Adam(model.parameters())

    def train_step(model: torch.nn.Module, batch: list[torch.Tensor]) -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    before = training_state(model, optimizer)
    burst(Caching(), model, batch_size=4, train_step=train_step)
    assert training_state(model, optimizer) == before


def test_an_exception_in_the_dataset_leaves_nothing_either() -> None:
    model = net()
    process, left = process_state(), leftovers()
    with pytest.raises(WorkloadError, match="nothing here") as caught:
        burst(Caching(failing=True), model, batch_size=4)
    assert "in __getitem__" in caught.value.user_traceback
    assert "autotune_loader/" not in caught.value.user_traceback
    del caught
    assert process_state() == process
    assert settled(left) == left
