"""Ranks in lock-step: real processes with gloo between them, bursts on simulated machines; every wait has a hard deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from preloaded import PreloadedPython, Run

from autotune_loader.decision.space import Space
from autotune_loader.machine.limits import usable_cores
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.ranks import (
    is_distributed,
    slowest,
    unwrapped,
    within_cores,
)
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Failure, Measurement
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
        environ = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        started.append(preloaded.start("job.py", folder=tmp_path, environ=environ))
        return started[-1]

    yield start
    for run in started:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
        run.wait(timeout=10)


# A lock-step study over simulated probes: real ranks and messages, no bursts.
SIMULATED_JOB = """
    import json, os, signal, sys, threading, time
    from dataclasses import replace
    import torch.distributed as dist
    from autotune_loader.values.config import LoaderConfig
    from autotune_loader.tuning import ranks
    from autotune_loader.tuning.ranks import LockstepProbe, joined_ranks, serve
    from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
    from autotune_loader.values.measurement import Failure
    from autotune_loader.values.plan import BurstPlan

    class Probe(SimulatedProbe):
        def burst(self, config, plan):
            self.plans = [*getattr(self, "plans", []), plan]
            return on_burst(self, config, plan) or super().burst(config, plan)

    def on_burst(probe, config, plan):
        {on_burst}

    def lead(probe):
        {lead}

    ranks.FAREWELL_DEADLINE_S = 2.0
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    probe = Probe(SimulatedMachine(cpu_s=0.02 * (1 + rank)), FakeClock())
    try:
        with joined_ranks(grace_s={grace_s}) as ranks:
            if ranks.leads:
                said = lead(LockstepProbe(ranks, probe))
                ranks.ask(None, said)
            else:
                said = serve(ranks, probe, deadline_s={follow_s})
            seeds = [plan.seed for plan in probe.plans]
        print("SAID", json.dumps(dict(rank=rank, said=said, seeds=seeds)), flush=True)
    except Exception as error:
        print("ERROR", type(error).__name__, error, flush=True)
        os._exit(3)
"""


def simulated_job(lead: str, on_burst: str = "return None", grace_s: float = 20.0, follow_s: float = 30.0) -> str:
    return SIMULATED_JOB.format(lead=lead, on_burst=on_burst, grace_s=grace_s, follow_s=follow_s)


def said_by(output: str) -> dict[str, Any]:
    line = next((line for line in output.splitlines() if line.startswith("SAID ")), None)
    assert line is not None, output
    said: dict[str, Any] = json.loads(line.removeprefix("SAID "))
    return said


def test_the_slowest_rank_counts_with_the_bad_samples_of_all_and_a_failure_fails_for_all() -> None:
    bad = BadSample(name="sample 7", error="ValueError: broken")
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")
    fast, slow, third = (a_measurement(rate) for rate in (100.0, 60.0, 90.0))
    assert slowest({0: fast, 1: slow, 2: replace(third, bad_samples=(bad,))}) == replace(slow, bad_samples=(bad,))
    assert slowest({0: fast, 1: failure}) == replace(failure, message="rank 1: a worker was killed")


def test_a_launched_rank_without_a_process_group_is_told_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) before tune\(\)"):
        is_distributed({"RANK": "1", "WORLD_SIZE": "4"})


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_process_that_no_launcher_started_trains_alone(environ: dict[str, str]) -> None:
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


@pytest.mark.system
def test_all_ranks_burst_on_their_own_samples_and_get_one_result(launch: Any) -> None:
    lead = "return probe.burst(LoaderConfig(num_workers=2), BurstPlan(seed=5)).samples_per_s.value"
    ranks = [launch(simulated_job(lead), rank, 2) for rank in (0, 1)]
    said = [said_by(rank.communicate(timeout=HARD_DEADLINE_S)[0]) for rank in ranks]
    # THEN both have the result of the slow rank, and each read other samples
    slow = SimulatedProbe(SimulatedMachine(cpu_s=0.04), FakeClock())
    plan = BurstPlan(seed=5 + 100_003, min_s=BurstPlan().max_s)
    expected = slow.burst(LoaderConfig(num_workers=2), plan)
    assert isinstance(expected, Measurement)
    assert [each["said"] for each in said] == [pytest.approx(expected.samples_per_s.value)] * 2
    assert [each["seeds"] for each in said] == [[5], [5 + 100_003]]


@pytest.mark.system
def test_a_rank_that_dies_in_a_burst_ends_the_tuning_on_the_others(launch: Any) -> None:
    lead = "return [probe.burst(LoaderConfig(), BurstPlan(seed=s)).samples_per_s.value for s in range(9)]"
    on_burst = "os.kill(os.getpid(), signal.SIGKILL) if rank == 2 and len(probe.plans) == 2 else None"
    ranks = [launch(simulated_job(lead, on_burst), rank, 3) for rank in (0, 1, 2)]
    output = [rank.communicate(timeout=HARD_DEADLINE_S)[0] for rank in ranks]
    # THEN rank 0 names the lost one, and rank 1 hears of it from rank 0
    assert "ERROR RankLostError rank 2 is gone" in output[0], output
    assert "ERROR RankLostError rank 0 gave up: rank 2 is gone" in output[1], output


LASTING_BURST = "time.sleep(600) if rank == 1 else None"


@pytest.mark.system
@pytest.mark.parametrize(
    ("lead", "on_burst", "deadlines", "waiting", "told"),
    [
        ("", LASTING_BURST, {"grace_s": 2.0}, 0, "rank 1 did not answer within"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "return None", {"follow_s": 2.0}, 1, "rank 0 did not answer within"),
    ],
    ids=["a burst that hangs", "rank 0 stands still, and the store with it"],
)
def test_nobody_waits_longer_than_the_deadline(
    lead: str, on_burst: str, deadlines: dict[str, float], waiting: int, told: str, launch: Any
) -> None:
    lead = f"probe.burst(LoaderConfig(), BurstPlan(deadline_s=1.0)); {lead}"
    ranks = [launch(simulated_job(lead, on_burst, **deadlines), rank, 2) for rank in (0, 1)]
    output = ranks[waiting].communicate(timeout=HARD_DEADLINE_S)[0]
    assert f"ERROR RankLostError {told}" in output, output


INTERRUPT = "threading.Timer({after_s}, os.kill, (os.getpid(), signal.SIGINT)).start()"


@pytest.mark.system
def test_ctrl_c_while_a_rank_waits_for_rank_0_still_gives_it_the_result(launch: Any) -> None:
    lead = "probe.burst(LoaderConfig(), BurstPlan()); time.sleep(2.0); return 'partial'"
    on_burst = f"if rank == 1: {INTERRUPT.format(after_s=0.5)}"
    ranks = [launch(simulated_job(lead, on_burst), rank, 2) for rank in (0, 1)]
    assert [said_by(rank.communicate(timeout=HARD_DEADLINE_S)[0])["said"] for rank in ranks] == ["partial", "partial"]


@pytest.mark.system
def test_a_second_ctrl_c_ends_a_rank_that_waits_and_the_others_hear_of_it(launch: Any) -> None:
    lead = "probe.burst(LoaderConfig(), BurstPlan()); time.sleep(2.0); probe.burst(LoaderConfig(), BurstPlan())"
    on_burst = f"if rank == 1: {'; '.join(INTERRUPT.format(after_s=after) for after in (0.5, 1.0))}"
    ranks = [launch(simulated_job(lead, on_burst), rank, 2) for rank in (0, 1)]
    output = [rank.communicate(timeout=HARD_DEADLINE_S)[0] for rank in ranks]
    assert "ERROR RankLostError rank 1 gave up: KeyboardInterrupt" in output[0], output
    assert "KeyboardInterrupt" in output[1], output


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
def test_a_dataset_that_fails_on_one_rank_fails_on_all(launch: Any) -> None:
    script = TUNING_JOB.format(machine="'OSError: no such bucket' if dist.get_rank() else SimulatedMachine()")
    output = [rank.communicate(timeout=HARD_DEADLINE_S)[0] for rank in [launch(script, rank, 2) for rank in (0, 1)]]
    # THEN rank 1 raises its own error and rank 0 says whose it is
    assert "ERROR WorkloadError" in output[1], output
    assert re.search("ERROR RankLostError rank 1 gave up: .*OSError: no such bucket", output[0]), output
