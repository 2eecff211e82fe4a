"""Ranks in lock-step: what they say to each other, and as torchrun starts them."""

import json
import os
import platform
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from autotune_loader.machine.limits import usable_cores
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning import torchrun
from autotune_loader.tuning.torchrun import (
    Ranks,
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
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}


def a_probe(cpu_s):
    return SimulatedProbe(SimulatedMachine(cpu_s=cpu_s), FakeClock())


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "4"}, ALONE])
def test_a_process_without_a_launcher_has_no_ranks(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with joined_ranks() as ranks:
        assert ranks is None


def test_ranks_of_this_node_share_its_cores(monkeypatch):
    # GIVEN a launcher that says something wrong, and four ranks, two of them here
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    nodes = ["elsewhere", platform.node(), platform.node(), "elsewhere"]
    dist = SimpleNamespace(
        get_rank=lambda: 1,
        get_world_size=lambda: 4,
        all_gather_object=lambda said, value, group: said.__setitem__(slice(None), nodes),
    )
    assert Ranks(dist, None).environ["LOCAL_WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    ("rank", "missing", "says"),
    [(0, [1, 2], "rank 1, 2"), (1, [0, 2], "rank 0, 2"), (2, [1], None), (0, [], None)],
)
def test_the_first_that_waits_says_for_whom(rank, missing, says):
    assert names_of_missing(rank, 3, missing) == says


def test_a_rank_that_never_comes_is_an_error(monkeypatch):
    store, clock, missing = torch.distributed.HashStore(), FakeClock(), [1, 2]
    seen, comes = [], ["rank2", "rank1"]

    def sleep(seconds):
        seen.append([*missing])
        clock.advance(100.0)
        if comes:
            store.set(comes.pop(0), "here")

    monkeypatch.setattr(torchrun, "time", Mock(monotonic=clock, sleep=sleep))
    await_all(store, 0, 3, missing)
    assert seen == [[1, 2], [1]]
    says = r"rank 1 has not called tune\(\): every rank of the job has to call tune\(\)"
    with pytest.raises(TunerError, match=says):
        await_all(torch.distributed.HashStore(), 0, 2, missing)
    assert clock() == 200.0 + 400.0  # 300 s, which the store waits, are not yet too long


def test_all_ranks_burst_and_get_the_slowest():
    def decide(probe):
        rate = probe.burst(TWO, PLAN).samples_per_s
        return TuningResult(best=TWO, status="complete", rate=rate, tuned_at="now")

    # GIVEN what two ranks say to each other, of which the second is slow
    asked, told, whole = [], [], replace(PLAN, min_s=PLAN.max_s)
    slow = a_probe(0.04).burst(TWO, whole)
    first = Mock(
        rank=0,
        from_rank_0=lambda *each: asked.append(each) or each,
        from_all=lambda own: [own, slow],
    )
    result = decided(first, a_probe(0.02), decide)
    # THEN each burst lasts its whole window
    assert asked == [("burst", TWO, whole), (None, result.to_dict())]
    # WHEN the second hears what the first has asked, it runs the same, and has the same answer
    heard = iter(asked)
    second = Mock(rank=1, from_rank_0=lambda: next(heard), from_all=told.append)
    assert decided(second, a_probe(0.04), pytest.fail) == result
    assert told == [slow]
    assert result.rate == slow.samples_per_s
    # AND a burst that is interrupted ends the run, as the other ranks wait for it
    with pytest.raises(TunerError, match="interrupted"):
        decided(first, Mock(burst=Mock(side_effect=KeyboardInterrupt)), decide)


def test_a_failure_on_any_rank_fails_for_all():
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")
    found = slowest([a_probe(0.04).burst(TWO, PLAN), failure])
    assert found == replace(failure, message="rank 1: a worker was killed")


# Both first calls of tune() use one group of its own. Ranks share a pipe: each says one write.
JOB = """
    import json, os
    import pytest, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    from autotune_loader import tune
    from tests.support import SimulatedMachine, on_simulated_machines

    rank, patch = int(os.environ["RANK"]), pytest.MonkeyPatch()
    dataset = TensorDataset(torch.zeros(4096, 8), torch.zeros(4096, dtype=torch.long))
    model = torch.nn.Linear(8, 2)
    sampler = DistributedSampler(dataset, num_replicas=2, rank=rank)
    loader = DataLoader(dataset, 16, sampler=sampler)
    on_simulated_machines(patch, lambda workload: SimulatedMachine())
    for _ in range(2):
        result = tune(loader, model, progress=False, output="loader.json")
    said = json.dumps([result.best.to_dict(), result.machine.usable_cores])
    print(f"SAID {said}\\n", end="", flush=True)
    dist.init_process_group("gloo")  # the job's own, in which a rank fails
    on_simulated_machines(patch, lambda workload: "no bucket" if rank else SimulatedMachine())
    tune(loader, DistributedDataParallel(model), progress=False)
"""


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
def test_torchrun_gives_all_ranks_one_result(tmp_path):
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB))
    launcher = "-m torch.distributed.run --nproc-per-node 2 --master-port 0 --standalone job.py"
    root = str(Path(__file__).resolve().parents[2])
    run = subprocess.run(
        [sys.executable, *launcher.split()],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        timeout=HARD_DEADLINE_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("SAID ")]
    said = [json.loads(line.removeprefix("SAID ")) for line in lines]
    best = TuningResult.load(tmp_path / "loader.json").best.to_dict()
    cores = usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable
    assert said == [[best, cores]] * 2, run.stderr
    assert [path.name for path in tmp_path.glob("*.json")] == ["loader.json"]
    # AND a rank that fails ends all
    assert run.returncode != 0
    assert "WorkloadError: no bucket" in run.stderr
