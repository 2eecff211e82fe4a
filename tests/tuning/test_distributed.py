"""Ranks in lock-step: in threads, and as real processes with gloo between them; bursts on simulated machines."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preloaded import PreloadedPython, Run
from torch.distributed import HashStore

from autotune_loader.decision.space import Space
from autotune_loader.machine.limits import usable_cores
from autotune_loader.machine.ranks import Link, RankLostError
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.ranks import LockstepProbe, Ranks, is_distributed, serve, slowest, unwrapped, within_cores
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

ROOT = Path(__file__).resolve().parents[2]
HARD_DEADLINE_S = 100


def a_measurement(rate: float) -> Measurement:
    outcome = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(LoaderConfig(), BurstPlan())
    assert isinstance(outcome, Measurement)
    return replace(outcome, samples_per_s=replace(outcome.samples_per_s, value=rate, low=rate, high=rate))


@pytest.fixture
def launch(tmp_path: Path, preloaded: PreloadedPython) -> Any:
    """Starts a script as rank r of n, and ends at the latest with the test."""
    started: list[Run] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]

    def start(script: str, rank: int, world_size: int) -> Run:
        (tmp_path / "job.py").write_text(textwrap.dedent(script))
        environ = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        started.append(preloaded.start("job.py", folder=tmp_path, environ=environ))
        return started[-1]

    yield start
    for run in started:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(timeout=10)


def test_the_slowest_rank_counts_and_a_failure_fails_for_all() -> None:
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")
    fast, slow, third = (a_measurement(rate) for rate in (100.0, 60.0, 90.0))
    assert slowest({0: fast, 1: slow, 2: third}) == slow
    assert slowest({0: fast, 1: failure}) == replace(failure, message="rank 1: a worker was killed")


def test_a_launched_rank_without_a_process_group_is_told_what_to_call_and_others_train_alone() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) before tune\(\)"):
        is_distributed({"RANK": "1", "WORLD_SIZE": "4"})
    for environ in ({}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert not is_distributed(environ)


def test_the_model_travels_without_its_distributed_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    class DistributedDataParallel(torch.nn.Module):
        module: Any = "the model"

    assert unwrapped(DistributedDataParallel()) == "the model"
    # AND one that was compiled is compiled again without it
    monkeypatch.setattr(torch, "compile", lambda model: SimpleNamespace(_orig_mod=model))
    assert unwrapped(torch.compile(DistributedDataParallel()))._orig_mod == "the model"


@pytest.mark.parametrize(("found", "kept"), [(12, 8), (5, 5), (32, 32)])
def test_ranks_share_the_cores_among_workers_that_compute_but_not_among_those_that_wait(found: int, kept: int) -> None:
    assert within_cores(Space(max_workers=found), 8).max_workers == kept


# Two ranks in two threads


def two_ranks(kind: type[Ranks] = Ranks) -> tuple[Ranks, Ranks]:
    store = HashStore()
    return Ranks(Link(store, 0, 2), grace_s=0.1), kind(Link(store, 1, 2), grace_s=0.1)


PLAN = BurstPlan(seed=5)


def a_probe(cpu_s: float) -> SimulatedProbe:
    return SimulatedProbe(SimulatedMachine(cpu_s=cpu_s), FakeClock())


class Interrupted(Ranks):
    """Ctrl-C reaches it so many times while it waits."""

    times = 1

    def next_ask(self, deadline_s: float) -> Any:
        if self.asked and self.times:
            self.times -= 1
            raise KeyboardInterrupt
        return super().next_ask(deadline_s)


@pytest.mark.parametrize("kind", [Ranks, Interrupted])
def test_all_ranks_burst_on_their_own_samples_and_get_one_result_also_after_ctrl_c(kind: type[Ranks]) -> None:
    leader, follower = two_ranks(kind)
    leader.grace_s = 30.0
    with ThreadPoolExecutor(1) as other:
        result = other.submit(serve, follower, a_probe(0.04), deadline_s=30.0)
        measured = LockstepProbe(leader, a_probe(0.02)).burst(LoaderConfig(num_workers=2), PLAN)
        leader.ask(None, "the result")
        assert result.result() == "the result"
    # THEN it is that of the slow rank, which read other samples, and all the time that it had
    assert measured == a_probe(0.04).burst(
        LoaderConfig(num_workers=2), replace(PLAN, seed=5 + 100_003, min_s=PLAN.max_s)
    )


def test_a_second_ctrl_c_ends_a_rank_that_waits_and_nobody_waits_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Interrupted, "times", 2)
    leader, follower = two_ranks(Interrupted)
    follower.asked = 1
    with pytest.raises(KeyboardInterrupt):
        serve(follower, a_probe(0.04), deadline_s=0.1)
    with pytest.raises(RankLostError, match="rank 1 did not answer within"):
        LockstepProbe(leader, a_probe(0.02)).burst(LoaderConfig(), replace(PLAN, deadline_s=0.1))
    with pytest.raises(RankLostError, match="rank 0 did not answer within"):
        serve(follower, a_probe(0.04), deadline_s=0.1)


# Two calls of `tune()` on every rank, on a machine that is an expression.
TUNING_JOB = """
    import json, os, sys, time
    import pytest, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    from autotune_loader import tune
    from tests.support import SimulatedMachine, on_simulated_machines

    dist.init_process_group("gloo")
    on_simulated_machines(pytest.MonkeyPatch(), lambda workload: {machine})
    dataset = TensorDataset(torch.zeros(4096, 8), torch.zeros(4096, dtype=torch.long))
    model = DistributedDataParallel(torch.nn.Linear(8, 2))
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    said = []
    for _ in range(2):
        try:
            result = tune(loader, model, max_trials=3, progress=False, output="loader.json")
        except Exception as error:
            print("ERROR", type(error).__name__, error, flush=True)
            os._exit(3)
        said += [dict(best=result.best.to_dict(), cores=result.fingerprint.usable_cores,
                      reused=result.reused and result.reused.tuned_at)]
    for x, y in result.make_loader(dataset, num_workers=1, sampler=DistributedSampler(dataset)):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        break
    dist.destroy_process_group()
    # In one write: the ranks share a pipe.
    print("SAID " + json.dumps(dict(rank=int(os.environ["RANK"]), said=said)) + "\\n", end="", flush=True)
    time.sleep(0.5)  # torch 2.13 aborts where the exit meets gloo's threads, which drop their last all-reduce
"""


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
def test_torchrun_gives_both_ranks_one_configuration_and_one_file_and_rank_0_looks_for_an_earlier_one(
    tmp_path: Path, cache_of_its_own: Path
) -> None:
    # GIVEN a script that trains with DDP and DistributedSampler, and tunes twice WHEN torchrun starts it on two ranks
    (tmp_path / "job.py").write_text(textwrap.dedent(TUNING_JOB.format(machine="SimulatedMachine()")))
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
    run = subprocess.run(
        [sys.executable, "-m", *launcher, "job.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HARD_DEADLINE_S,
        check=False,
    )

    # THEN both have the same configuration, for their share of the cores, and one file was written
    assert run.returncode == 0, run.stdout + run.stderr
    said = [json.loads(line.removeprefix("SAID ")) for line in run.stdout.splitlines() if line.startswith("SAID ")]
    assert sorted(each["rank"] for each in said) == [0, 1], run.stdout + run.stderr
    assert said[0]["said"] == said[1]["said"]
    first, second = said[0]["said"]
    assert first["best"] == second["best"] == TuningResult.load(tmp_path / "loader.json").best.to_dict()
    assert first["cores"] == usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable
    assert [path.name for path in tmp_path.glob("*.json")] == ["loader.json"]
    # AND the second time both have the first result, which was kept once
    assert (first["reused"] is None, second["reused"] is None) == (True, False)
    assert len(list(cache_of_its_own.rglob("results/*.json"))) == 1


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
@pytest.mark.parametrize(
    ("on_rank_1", "told", "own"),
    [
        ("'OSError: no such bucket'", "rank 1 gave up: .*OSError: no such bucket", "ERROR WorkloadError"),
        ("os.kill(os.getpid(), 9)", "rank 1 is gone", ""),
    ],
    ids=["its dataset fails", "it is killed"],
)
def test_what_ends_one_rank_ends_all_and_rank_0_says_whose_it_was(
    on_rank_1: str, told: str, own: str, launch: Any
) -> None:
    script = TUNING_JOB.format(machine=f"{on_rank_1} if dist.get_rank() else SimulatedMachine()")
    output = [rank.communicate(timeout=HARD_DEADLINE_S)[0] for rank in [launch(script, rank, 2) for rank in (0, 1)]]
    assert own in output[1], output
    assert re.search(f"ERROR RankLostError {told}", output[0]), output
