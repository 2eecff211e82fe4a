"""Ranks in lock-step: by what they say to each other, and as torchrun starts them; bursts on simulated machines."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from autotune_loader.machine.limits import usable_cores
from autotune_loader.report.result import TuningResult
from autotune_loader.tuning import torchrun
from autotune_loader.tuning.torchrun import (
    await_all,
    decided,
    joined_ranks,
    names_of_missing,
    slowest,
)
from autotune_loader.values import BurstPlan, Failure, LoaderConfig, TunerError
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

HARD_DEADLINE_S = 100
PLAN, TWO = BurstPlan(relative_error=0.01), LoaderConfig(num_workers=2)


def a_probe(cpu_s):
    return SimulatedProbe(SimulatedMachine(cpu_s=cpu_s), FakeClock())


def test_a_process_without_a_launcher_has_no_ranks(monkeypatch):
    for environ in (
        {},
        {"WORLD_SIZE": "4"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
    ):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with joined_ranks() as ranks:
            assert ranks is None


@pytest.mark.parametrize(
    ("rank", "missing", "says"),
    [
        (0, [1, 2], "rank 1, 2"),
        (1, [0, 2], "rank 0, 2"),
        (0, [1], "rank 1"),
        (2, [1], None),
        (0, [], None),
    ],
)
def test_the_first_of_those_that_wait_says_for_whom(rank, missing, says):
    assert names_of_missing(rank, 3, missing) == says


def test_ranks_come_one_after_the_other_and_one_that_never_does_is_an_error(monkeypatch):
    store, clock, missing, seen, comes = (
        torch.distributed.HashStore(),
        FakeClock(),
        [1, 2],
        [],
        ["rank2", "rank1"],
    )

    def sleep(seconds):
        seen.append(list(missing))
        clock.advance(100.0)
        if comes:
            store.set(comes.pop(0), "here")

    monkeypatch.setattr(torchrun, "time", Mock(monotonic=clock, sleep=sleep))
    await_all(store, 0, 3, missing)
    assert seen == [[1, 2], [1]]
    with pytest.raises(
        TunerError,
        match=r"rank 1 has not called tune\(\): every rank of the job has to call tune\(\)",
    ):
        await_all(torch.distributed.HashStore(), 0, 2, missing)


def test_all_ranks_run_each_burst_for_its_whole_window_and_get_what_the_slowest_measured():
    def decide(probe):
        return TuningResult(
            best=TWO, status="complete", rate=probe.burst(TWO, PLAN).samples_per_s, tuned_at="now"
        )

    # GIVEN what two ranks say to each other, of which the second is slow
    asked, told, whole = [], [], replace(PLAN, min_s=PLAN.max_s)
    slow = a_probe(0.04).burst(TWO, whole)
    first = Mock(
        rank=0,
        from_rank_0=lambda *each: asked.append(each) or each,
        from_all=lambda own: [own, slow],
    )
    result = decided(first, a_probe(0.02), decide)
    assert asked == [("burst", TWO, whole), (None, result.to_dict())]
    # WHEN the second hears what the first has asked, it runs the same, and has the same answer
    heard = iter(asked)
    second = Mock(rank=1, from_rank_0=lambda: next(heard), from_all=told.append)
    assert decided(second, a_probe(0.04), pytest.fail) == result
    assert (told, result.rate) == ([slow], slow.samples_per_s)
    # AND a failure anywhere fails for all
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")
    assert slowest([slow, failure]) == replace(failure, message="rank 1: a worker was killed")
    # AND a burst that is interrupted ends the run, as the other ranks wait for it
    with pytest.raises(TunerError, match="interrupted"):
        decided(first, Mock(burst=Mock(side_effect=KeyboardInterrupt)), decide)


# Both first calls of tune() use one group of its own. What is said is one write, as the ranks share a pipe.
JOB = """
    import json, os
    import pytest, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    from autotune_loader import tune
    from tests.support import SimulatedMachine, on_simulated_machines

    rank = int(os.environ["RANK"])
    dataset = TensorDataset(torch.zeros(4096, 8), torch.zeros(4096, dtype=torch.long))
    model = torch.nn.Linear(8, 2)
    loader = DataLoader(dataset, 16, sampler=DistributedSampler(dataset, num_replicas=2, rank=rank))
    on_simulated_machines(pytest.MonkeyPatch(), lambda workload: SimulatedMachine())
    result = [tune(loader, model, progress=False, output="loader.json") for _ in range(2)][-1]
    print("SAID " + json.dumps([result.best.to_dict(), result.machine.usable_cores]) + "\\n", end="", flush=True)
    dist.init_process_group("gloo")  # the job's own, in which a rank fails
    on_simulated_machines(pytest.MonkeyPatch(), lambda workload: "no bucket" if rank else SimulatedMachine())
    tune(loader, DistributedDataParallel(model), progress=False)
"""


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
def test_torchrun_gives_both_ranks_one_configuration_and_one_file_and_a_rank_that_fails_ends_all(
    tmp_path,
):
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    launcher = [
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        "0",
        "--standalone",
    ]
    environ = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "OMP_NUM_THREADS": "1",
    }
    command, how = (
        [sys.executable, "-m", *launcher, "job.py"],
        {"capture_output": True, "text": True, "check": False},
    )
    run = subprocess.run(command, cwd=tmp_path, env=environ, timeout=HARD_DEADLINE_S, **how)
    said = [
        json.loads(line.removeprefix("SAID "))
        for line in run.stdout.splitlines()
        if line.startswith("SAID ")
    ]
    best = TuningResult.load(tmp_path / "loader.json").best.to_dict()
    assert said == [[best, usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable]] * 2, run.stderr
    assert [path.name for path in tmp_path.glob("*.json")] == ["loader.json"]
    assert (run.returncode != 0, "WorkloadError: no bucket" in run.stderr) == (True, True), (
        run.stderr
    )
