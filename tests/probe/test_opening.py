"""Where a workload runs, what its way there costs, and what must be given time."""

from __future__ import annotations

import pytest
import torch

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.opening import OpenProbe, compiles
from autotune_loader.tuning.tune import start_of_budget
from tests.support.bursts import workload

# What a caller holds beyond its data at the worst, where these travel, and where they are too large to do so.
# `clear_refs` resets the peak.
SCRIPT = """
import torch
from pathlib import Path
from torch.utils.data import TensorDataset
from autotune_loader.probe import opening
from tests.support.bursts import ONE_WORKER, measured, opened, workload

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

data = TensorDataset(torch.ones(75_000, 1000))  # 300 MB
for limit in (1 << 30, 100 << 20):
    opening.LARGEST_PAYLOAD_BYTES = limit
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_kib()
    with opened(workload(data, 32), "auto") as probe:
        measured(probe.probe, ONE_WORKER)
        is_fork = any("in forks of this process" in note for note in probe.notes)
    print(is_fork, (peak_kib() - before) * 1024)
"""


@pytest.mark.process
def test_300_megabytes_in_memory_cost_the_caller_next_to_nothing(tmp_path, preloaded):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = preloaded.start("train.py", folder=tmp_path)

    assert run.wait(timeout=110) == 0, run.output
    sent, forked = (line.split() for line in run.output.splitlines())
    assert (sent[0], forked[0]) == ("False", "True")
    assert max(int(sent[1]), int(forked[1])) < 100e6


def test_compiling_is_seen_in_model_step_and_what_the_step_calls():
    model, in_place = torch.nn.Linear(2, 1), torch.nn.Sequential(torch.nn.Linear(2, 1))
    compiled, function = (torch.compile(each, backend="eager") for each in (torch.nn.Linear(2, 1), torch.sin))
    in_place[0].compile(backend="eager")
    sides = [
        TrainingSide(model=compiled),
        TrainingSide(model=in_place),
        TrainingSide(model=model, compiled=("",)),
        TrainingSide(model=model, train_step=lambda model, batch: function(model(batch))),
        TrainingSide(model=model, train_step=lambda model, batch: compiled(batch)),
    ]

    assert [compiles(side) for side in sides] == [True] * 5
    assert not compiles(TrainingSide(model=model, train_step=lambda model, batch: model(batch).sum()))


def test_a_long_compilation_comes_on_top_of_the_budget_and_a_slow_step_does_not():
    def start(warm_up_s, side):
        names = ("samples", "batch_bytes", "batch_tensors", "first_fetch_s", "first_fetch_cpu_s", "default_threads")
        warmup = WarmupReport(step="", on_accelerator=False, warm_up_s=warm_up_s, **dict.fromkeys(names, 1))
        return start_of_budget(100.0, OpenProbe(probe=None, workload=workload([1], 1, side), warmup=warmup), 60.0)

    compiled = TrainingSide(compiled=("",))
    begun, (note,) = start(90.0, compiled)
    assert begun == 190.0
    assert "took 90 s" in note
    assert start(1.0, compiled) == start(90.0, TrainingSide()) == (100.0, [])
