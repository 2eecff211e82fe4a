"""Accelerate with two processes, as torchrun's agent starts them: gloo, CPU, hard deadlines, nothing left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from preloaded import PreloadedPython, Run

from autotune_loader.machine.limits import usable_cores

ROOT = Path(__file__).resolve().parents[2]
# What two ranks need for a framework's import, the probes and a handful of bursts, with a lot to spare on a busy machine.
HARD_DEADLINE_S = 110
pytestmark = [pytest.mark.system, pytest.mark.timeout(HARD_DEADLINE_S + 20)]

# Two ways to share out the loading, of which one is tuned.
SCRIPT = """
import json, os, resource, sys, time
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, Dataset
from autotune_loader.integrations.accelerate import tune_before_prepare

class Points(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((4,), index / 256), index % 2, index

def probed_s():
    # CPU seconds of probe processes: a rank that tuned has waited for its own to end.
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime

def own_step(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

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
            accelerator, loader, model, train_step=own_step, budget=4, max_workers=2, progress=False
        )
    except ValueError as error:
        return accelerator, str(error)
    workers, seen = loader.num_workers, []
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y, index in loader:
        loss = own_step(model, (x, y))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        seen += index.tolist()
    return accelerator, dict(
        best=result.best.to_dict(), workers=workers, cores=result.machine.usable_cores, probed=probed_s() - before > 0.5,
        seen=seen, weights=accelerator.unwrap_model(model).weight.flatten().tolist(),
    )

if __name__ == "__main__":
    said = {}
    for name, dispatch in (("on rank 0", True), ("on all ranks", False)):
        accelerator, said[name] = trained(dispatch)
    with open(f"rank-{os.environ['RANK']}.json", "w") as file:
        json.dump(said, file)
    time.sleep(0.5)  # gloo's threads drop their last all-reduce under the GIL, and torch 2.13 aborts where that meets the exit
    accelerator.end_training()
"""

# What `torchrun --standalone --nproc-per-node N` does, but that its ranks are forked: a framework's import takes seconds.
TORCHRUN = """
import runpy, uuid
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def rank():
    runpy.run_path("job.py", run_name="__main__")  # and returns nothing: the agent would send it

elastic_launch(LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=uuid.uuid4().hex,
    rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork",
), rank)()
"""


def started_by(job: Run, cache: str) -> list[psutil.Process]:
    """The processes of a run: of its session, or with its cache in whatever session; what is ending does not count."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = os.getsid(process.pid) == job.pid or process.environ().get("AUTOTUNE_LOADER_CACHE") == cache
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            continue
    return found


def assert_trained_as_one(said: list[dict[str, Any]]) -> None:
    assert said[0]["best"] == said[1]["best"]
    assert said[0]["weights"] == pytest.approx(said[1]["weights"])
    assert sorted(said[0]["seen"] + said[1]["seen"]) == list(range(256))


def test_accelerate_tunes_where_loading_is_done(tmp_path: Path, preloaded_frameworks: PreloadedPython) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "torchrun.py").write_text(TORCHRUN)
    cache = str(tmp_path / "cache")
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "AUTOTUNE_LOADER_CACHE": cache}
    job = preloaded_frameworks.start("torchrun.py", folder=tmp_path, environ=environ)
    try:
        assert job.wait(timeout=HARD_DEADLINE_S) == 0, job.output
        assert [process.cmdline() for process in started_by(job, cache)] == []
    finally:
        for process in started_by(job, cache):
            process.kill()
    both = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)]

    # THEN where all ranks load they have tuned in lock-step, each with its share of the cores
    said = [rank["on all ranks"] for rank in both]
    assert_trained_as_one(said)
    assert {each["workers"] for each in said} == {said[0]["best"]["num_workers"]}
    assert {each["cores"] for each in said} == {usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable}
    assert [each["probed"] for each in said] == [True, True]
    # AND where rank 0 loads for both, that is refused with what would work
    assert all("dispatch_batches=False) with a sharded dataset would work" in rank["on rank 0"] for rank in both)
