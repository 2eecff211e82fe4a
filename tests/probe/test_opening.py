"""Where a workload runs, what its way there costs, and what must be given time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import PreloadedPython
from torch.utils.data import Dataset

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.bench import WarmupReport
from autotune_loader.probe.opening import OpenProbe, compiles
from autotune_loader.tuning.tune import start_of_budget
from tests.support.bursts import opened, workload

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
def test_300_megabytes_in_memory_cost_the_caller_next_to_nothing(tmp_path: Path, preloaded: PreloadedPython) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run = preloaded.start("train.py", folder=tmp_path)

    assert run.wait(timeout=110) == 0, run.output
    sent, forked = (line.split() for line in run.output.splitlines())
    assert (sent[0], forked[0]) == ("False", "True")
    assert max(int(sent[1]), int(forked[1])) < 100e6


class Managed(Dataset[Any]):
    """Reads from a list in another process, which lets in nobody but children of this one."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_what_cannot_be_unpickled_in_another_process_is_tuned_in_a_fork_of_this_one() -> None:
    with multiprocessing.Manager() as manager:
        dataset = Managed(manager.list(torch.zeros(8, 3).tolist()))

        with opened(workload(dataset), "auto") as probe:
            (note,) = [note for note in probe.notes if "unpickled in another process" in note]
            assert "in forks of this process" in note


def test_compiling_is_seen_in_model_step_and_what_the_step_calls() -> None:
    model = torch.nn.Linear(2, 1)
    compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
    function = torch.compile(torch.sin, backend="eager")
    in_place = torch.nn.Sequential(torch.nn.Linear(2, 1))
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


def test_a_long_compilation_comes_on_top_of_the_budget_and_a_slow_step_does_not() -> None:
    def start(warm_up_s: float, side: TrainingSide) -> tuple[float, list[str]]:
        names = ("samples", "batch_bytes", "batch_tensors", "first_fetch_s", "first_fetch_cpu_s", "default_threads")
        numbers: Any = dict.fromkeys(names, 1)
        warmup = WarmupReport(step="a step", on_accelerator=False, warm_up_s=warm_up_s, **numbers)
        probe: Any = None
        return start_of_budget(100.0, OpenProbe(probe=probe, workload=workload([1], 1, side), warmup=warmup), 60.0)

    compiled = TrainingSide(compiled=("",))
    begun, (note,) = start(90.0, compiled)
    assert begun == 190.0
    assert "took 90 s" in note
    assert start(1.0, compiled) == start(90.0, TrainingSide()) == (100.0, [])
