"""The real `accelerate launch`, which starts ranks as `torchrun` does, runs `-m autotune_loader`: each rank tunes its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from autotune_loader import TuningResult
from tests.support.bench import line_of

HARD_DEADLINE_S, EPOCHS = 110, 4
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(HARD_DEADLINE_S + 20),
    pytest.mark.skipif(not find_spec("accelerate"), reason="needs accelerate"),
]
ROOT = Path(__file__).parents[2]
LAUNCH = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")
LAUNCH += ("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0")
SCRIPT = """
import json, os, sys, time
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Points(Dataset):
    def __len__(self):
        return 1024
    def __getitem__(self, index):
        time.sleep(0.004 if os.environ["RANK"] == "1" else 0.002)  # one rank's storage is slower
        return torch.full((4,), index / 1024), index % 2, index

distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(Points(), shuffle=True)
loader = DataLoader(Points(), batch_size=8, sampler=sampler)  # HERE
seen = []
for epoch in range(int(sys.argv[1])):
    sampler.set_epoch(epoch)
    seen.append([])
    for x, y, index in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        seen[-1] += index.tolist()

with open(f"rank-{os.environ['RANK']}.json", "w") as file:
    json.dump({"seen": seen, "weights": model.module.weight.flatten().tolist()}, file)
distributed.barrier()
time.sleep(0.5)  # gloo's threads drop their last all-reduce under the GIL, and torch 2.13 aborts where that meets the exit
distributed.destroy_process_group()
"""


def test_each_rank_trains_on_its_half_and_rank_0_reports(tmp_path: Path) -> None:
    # GIVEN a script of two ranks WHEN a launcher starts it through the command line
    (tmp_path / "train.py").write_text(SCRIPT)
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a longer path leaves no room for the names of torch's sockets
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    run = f"-m autotune_loader run --workers --json report.json -o loader.json train.py {EPOCHS}".split()
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCH, *run],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=HARD_DEADLINE_S,
    )  # fmt: skip

    # THEN each has trained on its half, whatever workers it has had
    assert done.returncode == 0, done.stderr
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert other["weights"] == pytest.approx(one["weights"])
    assert [sorted(ours + theirs) for ours, theirs in zip(one["seen"], other["seen"], strict=True)] == [
        list(range(1024))
    ] * EPOCHS
    # AND there is one report, of rank 0's half, and one file
    assert done.stderr.count("autotune-loader run: 1 loader in") == 1
    report = json.loads((tmp_path / "report.json").read_text())
    found = [(each["name"], each["batches"]) for each in report["loaders"]]
    assert found == [(f"train.py:{line_of(SCRIPT, 'HERE')}", 64 * EPOCHS)]
    assert report["notes"][0] == "These are the loaders of rank 0 of 2."
    assert TuningResult.load(tmp_path / "loader.json").found_by == "autoloader"
    shutil.rmtree(temporary)
