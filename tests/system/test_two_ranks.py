"""Two ranks on gloo, as launchers start them: a script that is run unchanged, and one that calls Accelerate's integration."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autotune_loader import TuningResult
from autotune_loader.machine.limits import usable_cores
from tests.support.bench import line_of

pytest.importorskip("accelerate")
HARD_DEADLINE_S, EPOCHS = 110, 2
pytestmark = [pytest.mark.system, pytest.mark.timeout(HARD_DEADLINE_S + 20)]
ROOT = Path(__file__).parents[2]
ENVIRON = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
HEAD = """
import json, os, resource, sys, time
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Points(Dataset):
    def __len__(self):
        return 1024
    def __getitem__(self, index):
        time.sleep(0.004 if os.environ["RANK"] == "1" else 0.002)  # one rank's storage is slower
        return torch.full((4,), index / 1024), index % 2, index

def step(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def say(**said):
    with open(f"rank-{os.environ['RANK']}.json", "w") as file:
        json.dump(said, file)
    # gloo's threads drop their last all-reduce under the GIL, and torch 2.13 aborts where that meets the exit
    time.sleep(0.5)
"""
PLAIN = f"""{HEAD}
distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(Points(), shuffle=True)
loader = DataLoader(Points(), batch_size=8, sampler=sampler)  # HERE
seen = []
for epoch in range(int(sys.argv[1])):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        step(model, batch).backward()
        optimizer.step()
        seen += batch[2].tolist()
distributed.barrier()
say(seen=seen, weights=model.module.weight.flatten().tolist())
distributed.destroy_process_group()
"""
# Two ways to share out the loading, of which one is tuned.
PREPARED = f"""{HEAD}
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from autotune_loader.integrations.accelerate import tune_before_prepare

def probed_s():
    # CPU seconds of probe processes: a rank that tuned has waited for its own to end.
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

def trained(dispatch):
    before = probed_s()
    AcceleratorState._reset_state()  # as in a script that has only this one
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Points(), batch_size=16)
    try:
        loader, result = tune_before_prepare(
            accelerator, loader, model, train_step=step, budget=4, max_workers=2, progress=False
        )
    except ValueError as error:
        return str(error)
    found = dict(best=result.best.to_dict(), workers=loader.num_workers, cores=result.machine.usable_cores)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(step(model, batch))
        optimizer.step()
        seen += batch[2].tolist()
    weights = accelerator.unwrap_model(model).weight.flatten().tolist()
    return dict(found, probed=probed_s() - before > 0.5, seen=seen, weights=weights)

if __name__ == "__main__":
    say(refused=trained(True), **trained(False))
    distributed.destroy_process_group()
"""
# What `torchrun --standalone --nproc-per-node N` does, but that its ranks are forked: a framework's import takes seconds.
TORCHRUN = """
import runpy, uuid
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank():
    runpy.run_path("train.py", run_name="__main__")  # and returns nothing: the agent would send it

elastic_launch(LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=uuid.uuid4().hex,
    rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
), rank)()
"""


def both_trained(folder, epochs):
    """What the ranks said, who have the same weights, and each half of every epoch."""
    said = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert said[0]["weights"] == pytest.approx(said[1]["weights"])
    assert len(said[0]["seen"]) == len(said[1]["seen"]) == 512 * epochs
    for epoch in range(epochs):
        halves = [each["seen"][512 * epoch : 512 * (epoch + 1)] for each in said]
        assert sorted(halves[0] + halves[1]) == list(range(1024))
    return said


def test_a_launcher_runs_a_script_each_rank_trains_on_its_half_and_rank_0_reports(tmp_path):
    (tmp_path / "train.py").write_text(PLAIN)
    temporary = tempfile.mkdtemp(
        dir="/tmp"
    )  # a longer path leaves no room for the names of torch's sockets
    launch = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"
    launch += " --dynamo_backend no --main_process_port 0 -m autotune_loader"
    command = f"{launch} run --allow-workers --json report.json -o loader.json train.py {EPOCHS}"
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], env={**os.environ, **ENVIRON, "TMPDIR": temporary},
        cwd=tmp_path, capture_output=True, text=True, timeout=HARD_DEADLINE_S,
    )  # fmt: skip
    shutil.rmtree(temporary)
    assert done.returncode == 0, done.stderr
    both_trained(tmp_path, EPOCHS)
    # THEN there is one report, of rank 0's half, and one file
    assert done.stderr.count("autotune-loader run: 1 loader in") == 1
    report = json.loads((tmp_path / "report.json").read_text())
    found = [(each["name"], each["batches"]) for each in report["loaders"]]
    assert found == [(f"train.py:{line_of(PLAIN, 'HERE')}", 64 * EPOCHS)]
    assert report["notes"][0] == "These are the loaders of rank 0 of 2."
    assert TuningResult.load(tmp_path / "loader.json").found_by == "autoloader"


def test_accelerate_tunes_where_loading_is_done(tmp_path, preloaded_frameworks):
    (tmp_path / "train.py").write_text(PREPARED)
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    job = preloaded_frameworks.start("torchrun.py", folder=tmp_path, environ=ENVIRON)
    assert job.wait(timeout=HARD_DEADLINE_S) == 0, job.output
    said = both_trained(tmp_path, 1)
    # THEN where all ranks load they have tuned in lock-step, each with its share of the cores
    assert said[0]["best"] == said[1]["best"]
    assert {each["workers"] for each in said} == {said[0]["best"]["num_workers"]}
    assert {each["cores"] for each in said} == {
        usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable
    }
    assert [each["probed"] for each in said] == [True, True]
    # AND where rank 0 loads for both, that is refused with what would work
    assert all(
        "dispatch_batches=False) with a sharded dataset would work" in each["refused"]
        for each in said
    )
