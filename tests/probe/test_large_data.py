"""Data held in memory are tuned without a second copy in the caller; what cannot travel is tuned where it is."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.opening import open_probe

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

ROOT = Path(__file__).resolve().parents[2]
# What a caller holds beyond its data at the worst, where these travel, and where they are too large to do so.
# `clear_refs` resets the peak.
SCRIPT = """
import torch
from pathlib import Path
from torch.utils.data import TensorDataset
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe import opening
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

def run(dataset):
    workload = Workload(data=DataSide.from_dataset(dataset, batch_size=32), training=TrainingSide())
    with opening.open_probe(workload, inspect_machine(), "auto", None) as opened:
        assert isinstance(opened.probe.burst(LoaderConfig(num_workers=1), BurstPlan(max_s=0.2)), Measurement)
        return any("in forks of this process" in note for note in opened.notes)

run(TensorDataset(torch.zeros(256, 4)))
data = TensorDataset(torch.ones(75_000, 1000))  # 300 MB
for limit in (1 << 30, 100 << 20):
    opening.LARGEST_PAYLOAD_BYTES = limit
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_kib()
    print(run(data), (peak_kib() - before) * 1024)
"""


def test_300_megabytes_in_memory_cost_the_caller_next_to_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    sent, forked = (line.split() for line in done.stdout.splitlines())
    assert (sent[0], forked[0]) == ("False", "True")
    assert max(int(sent[1]), int(forked[1])) < 100e6


def open_in(workload: Workload, isolation: Any = "auto") -> Any:
    return open_probe(workload, inspect_machine(), isolation, None)


def workload(dataset: Any) -> Workload:
    return Workload(data=DataSide.from_dataset(dataset, batch_size=4), training=TrainingSide())


class Managed(Dataset[Any]):
    """Reads from a list in another process, which lets in nobody but children of this one."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def test_what_cannot_be_unpickled_in_another_process_is_tuned_in_a_fork_of_this_one() -> None:
    with multiprocessing.Manager() as manager:
        dataset = Managed(manager.list(torch.zeros(8, 3).tolist()))

        with open_in(workload(dataset)) as opened:
            (note,) = [note for note in opened.notes if "unpickled in another process" in note]
            assert "in forks of this process" in note
