"""Where a workload runs, what its way there costs, and what must be given time."""

from __future__ import annotations

import pytest
import torch

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.opening import compiles
from autotune_loader.tuning.tune import start_of_budget

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


def test_half_of_the_budget_is_left_for_bursts_however_long_the_start_took():
    begun, (note,) = start_of_budget(100.0, 190.0, 60.0)
    assert begun == 160.0
    assert "took 90 s" in note
    assert start_of_budget(100.0, 130.0, 60.0) == (100.0, [])
