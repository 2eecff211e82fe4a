"""The real `torchrun` and `accelerate launch` start a script by `-m autotune_loader`: two ranks train, rank 0 reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune_loader import TuningResult

HARD_DEADLINE_S = 110
pytestmark = [pytest.mark.system, pytest.mark.timeout(HARD_DEADLINE_S + 20)]
ROOT = Path(__file__).parents[2]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
ACCELERATE += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
COMMON = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Points(Dataset):
    def __len__(self):
        return 1024
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((4,), index / 1024), index % 2, index

def train(model, loader, backward):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for x, y, index in loader:
        optimizer.zero_grad()
        backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        seen += index.tolist()
    with open(f"rank-{os.environ['RANK']}.json", "w") as file:
        json.dump(seen, file)
    time.sleep(0.5)  # gloo's threads drop their last all-reduce under the GIL, and torch 2.13 aborts where that meets the exit
"""
DDP = """
from torch import distributed
from torch.utils.data import DistributedSampler

distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
data = Points()
train(model, DataLoader(data, batch_size=8, sampler=DistributedSampler(data)), torch.Tensor.backward)  # HERE
distributed.destroy_process_group()
"""
ACCELERATED = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 2)
model, loader = accelerator.prepare(model, DataLoader(Points(), batch_size=8, shuffle=True))  # HERE
train(model, loader, accelerator.backward)
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("launcher", "verb", "body"),
    [(TORCHRUN, "watch", DDP), (ACCELERATE, "run", ACCELERATED)],
    ids=["torchrun watch", "accelerate launch run"],
)
def test_ranks_train_and_rank_0_reports(tmp_path: Path, launcher: tuple[str, ...], verb: str, body: str) -> None:
    # GIVEN a script of two ranks
    text = COMMON + body
    (tmp_path / "train.py").write_text(text)

    # WHEN a launcher starts it through the command line
    command = ("-m", "autotune_loader", verb, "--json", "-o", "loader.json", "train.py")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HARD_DEADLINE_S,
    )

    # THEN each rank has trained on its half, and there is one report, of rank 0's half, and one file
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert sorted(seen[0] + seen[1]) == list(range(1024))
    reports: list[dict[str, Any]] = [
        json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"verb"')
    ]
    line = next(number for number, line in enumerate(text.splitlines(), 1) if "# HERE" in line)
    assert [[(each["name"], each["batches"]) for each in report["loaders"]] for report in reports] == [
        [(f"train.py:{line}", 64)]
    ]
    assert [note for note in reports[0]["notes"] if "rank 0 of 2" in note]
    assert TuningResult.load(tmp_path / "loader.json").best.num_workers >= 0
