"""Ranks in lock-step. The ranks are real processes with gloo between them; every wait has a hard deadline."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
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
    common_space,
    environment,
    is_distributed,
    own_device,
    slowest,
    tuning_alone,
    unwrapped,
    within_cores,
)
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import BadSample, Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

ROOT = Path(__file__).resolve().parents[2]
# What two ranks need for torch's import, the probes and a handful of bursts, with a lot to spare on a busy machine.
HARD_DEADLINE_S = 100


def a_measurement(rate: float) -> Measurement:
    outcome = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(LoaderConfig(), BurstPlan())
    assert isinstance(outcome, Measurement)
    return replace(outcome, samples_per_s=replace(outcome.samples_per_s, value=rate, low=rate, high=rate))


def a_free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@pytest.fixture
def launch(tmp_path: Path, preloaded: PreloadedPython) -> Any:
    """Starts a script as rank r of n, and ends at the latest with the test."""
    started: list[Run] = []
    port = a_free_port()

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
        started.append(preloaded.start("job.py", str(tmp_path), folder=tmp_path, environ=environ))
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


def test_the_slowest_rank_counts() -> None:
    # GIVEN three ranks of which the second is slowest, and the third has met a bad sample
    bad = BadSample(name="sample 7", error="ValueError: broken")
    third = replace(a_measurement(90.0), bad_samples=(bad,))
    outcomes = {0: a_measurement(100.0), 1: a_measurement(60.0), 2: third}

    # WHEN their bursts are made one trial
    outcome = slowest(outcomes)

    # THEN it is the second's, with all bad samples
    assert outcome == replace(outcomes[1], bad_samples=(bad,))


def test_a_failure_on_one_rank_fails_the_trial_and_names_the_rank() -> None:
    # GIVEN a rank whose burst failed
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")

    # WHEN the outcomes are made one trial
    outcome = slowest({0: a_measurement(100.0), 1: failure})

    # THEN the trial failed in the same way
    assert outcome == replace(failure, message="rank 1: a worker was killed")


def test_a_launched_rank_without_a_process_group_is_told_what_to_call() -> None:
    # GIVEN the environment that torchrun sets WHEN tune() asks whether there are other ranks
    with pytest.raises(RuntimeError, match=r"call torch.distributed.init_process_group\(\) before tune\(\)"):
        # THEN the missing call is named
        is_distributed({"RANK": "1", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "environ", [{}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "", "WORLD_SIZE": "4"}]
)
def test_a_process_that_no_launcher_started_trains_alone(environ: dict[str, str]) -> None:
    assert not is_distributed(environ)


def test_a_rank_that_loads_for_all_has_all_cores_of_the_node() -> None:
    # GIVEN four ranks on a node
    environ = {"LOCAL_WORLD_SIZE": "4"}

    # WHEN one of them tunes alone
    with tuning_alone():
        alone = usable_cores(environ=environment(None, environ))

    # THEN its cores are not divided among the four
    assert alone.ranks == 1
    assert usable_cores(environ=environment(None, environ)).ranks == 4


def test_the_model_travels_without_its_distributed_wrapper() -> None:
    # GIVEN a class of the wrapper's name
    class DistributedDataParallel:
        module = "the model"

    # WHEN THEN
    assert unwrapped(DistributedDataParallel()) == "the model"
    assert unwrapped("a model") == "a model"


def test_a_compiled_distributed_model_is_compiled_again_without_its_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN torch.compile around what looks like torch's wrapper
    monkeypatch.setattr(torch, "compile", lambda model: SimpleNamespace(_orig_mod=model))

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    wrapped = DistributedDataParallel()
    # WHEN it is unwrapped THEN the model is inside, and compiled
    found = unwrapped(torch.compile(wrapped))
    assert found._orig_mod is wrapped.module


def test_a_cpu_or_an_explicit_device_is_left_alone() -> None:
    assert [own_device(name, {"LOCAL_RANK": "1"}) for name in ("cpu", "cuda:3")] == ["cpu", "cuda:3"]


def test_alone_the_space_is_as_it_was_made() -> None:
    assert common_space(None, 2, Space(max_workers=3)) == Space(max_workers=3)


@pytest.mark.parametrize(("found", "kept"), [(12, 8), (5, 5), (32, 32)])
def test_ranks_share_the_cores_among_workers_that_compute_but_not_among_those_that_wait(found: int, kept: int) -> None:
    # GIVEN eight cores for a rank WHEN its space allows so many workers THEN
    assert within_cores(Space(max_workers=found), 8).max_workers == kept


@pytest.mark.system
def test_all_ranks_burst_on_their_own_samples_and_get_one_result(launch: Any) -> None:
    # GIVEN two ranks of which the second is twice as slow
    lead = "return probe.burst(LoaderConfig(num_workers=2), BurstPlan(seed=5)).samples_per_s.value"
    ranks = [launch(simulated_job(lead), rank, 2) for rank in (0, 1)]

    # WHEN rank 0 asks for one burst
    said = [said_by(rank.communicate(timeout=HARD_DEADLINE_S)[0]) for rank in ranks]

    # THEN both have its result, which is the slow rank's, and each read other samples
    slow = SimulatedProbe(SimulatedMachine(cpu_s=0.04), FakeClock())
    plan = BurstPlan(seed=5 + 100_003, min_s=BurstPlan().max_s)
    expected = slow.burst(LoaderConfig(num_workers=2), plan)
    assert isinstance(expected, Measurement)
    assert [each["said"] for each in said] == [pytest.approx(expected.samples_per_s.value)] * 2
    assert [each["seeds"] for each in said] == [[5], [5 + 100_003]]


@pytest.mark.system
def test_a_rank_that_dies_in_a_burst_ends_the_tuning_on_the_others(launch: Any) -> None:
    # GIVEN three ranks of which the last is killed in its second burst
    lead = "return [probe.burst(LoaderConfig(), BurstPlan(seed=s)).samples_per_s.value for s in range(9)]"
    on_burst = "os.kill(os.getpid(), signal.SIGKILL) if rank == 2 and len(probe.plans) == 2 else None"
    ranks = [launch(simulated_job(lead, on_burst), rank, 3) for rank in (0, 1, 2)]

    # WHEN they tune
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
        ("os.kill(os.getpid(), signal.SIGKILL)", "return None", {}, 1, "rank 0 is gone"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "return None", {"follow_s": 2.0}, 1, "rank 0 did not answer within"),
    ],
    ids=["a burst that hangs", "rank 0 dies", "rank 0 stands still, and the store with it"],
)
def test_nobody_waits_longer_than_the_deadline(
    lead: str, on_burst: str, deadlines: dict[str, float], waiting: int, told: str, launch: Any
) -> None:
    # GIVEN two ranks, one of which does not go on
    lead = f"probe.burst(LoaderConfig(), BurstPlan(deadline_s=1.0)); {lead}"
    ranks = [launch(simulated_job(lead, on_burst, **deadlines), rank, 2) for rank in (0, 1)]

    # WHEN the other waits for it THEN it ends with an error that names it
    output = ranks[waiting].communicate(timeout=HARD_DEADLINE_S)[0]
    assert f"ERROR RankLostError {told}" in output, output


INTERRUPT = "threading.Timer({after_s}, os.kill, (os.getpid(), signal.SIGINT)).start()"


@pytest.mark.system
def test_ctrl_c_while_a_rank_waits_for_rank_0_still_gives_it_the_result(launch: Any) -> None:
    # GIVEN a rank that is interrupted once while it waits for what rank 0 asks next
    lead = "probe.burst(LoaderConfig(), BurstPlan()); time.sleep(2.0); return 'partial'"
    on_burst = f"if rank == 1: {INTERRUPT.format(after_s=0.5)}"
    ranks = [launch(simulated_job(lead, on_burst), rank, 2) for rank in (0, 1)]

    # WHEN rank 0 shares what it has THEN both have it
    assert [said_by(rank.communicate(timeout=HARD_DEADLINE_S)[0])["said"] for rank in ranks] == ["partial", "partial"]


@pytest.mark.system
def test_a_second_ctrl_c_ends_a_rank_that_waits_and_the_others_hear_of_it(launch: Any) -> None:
    lead = "probe.burst(LoaderConfig(), BurstPlan()); time.sleep(2.0); probe.burst(LoaderConfig(), BurstPlan())"
    on_burst = f"if rank == 1: {'; '.join(INTERRUPT.format(after_s=after) for after in (0.5, 1.0))}"
    ranks = [launch(simulated_job(lead, on_burst), rank, 2) for rank in (0, 1)]
    output = [rank.communicate(timeout=HARD_DEADLINE_S)[0] for rank in ranks]
    assert "ERROR RankLostError rank 1 gave up: KeyboardInterrupt" in output[0], output
    assert "KeyboardInterrupt" in output[1], output


@pytest.mark.system
def test_an_interrupted_search_still_gives_all_ranks_its_partial_result(launch: Any) -> None:
    # GIVEN a rank 0 that is interrupted while the others owe it an answer
    lead = """try: probe.burst(LoaderConfig(), BurstPlan())
        except KeyboardInterrupt: return "partial"
    """
    on_burst = "if rank == 0: raise KeyboardInterrupt"
    ranks = [launch(simulated_job(lead.strip(), on_burst), rank, 2) for rank in (0, 1)]

    # WHEN it shares what it has
    said = [said_by(rank.communicate(timeout=HARD_DEADLINE_S)[0])["said"] for rank in ranks]

    # THEN both have it
    assert said == ["partial", "partial"]


TUNING_JOB = """
    import hashlib, json, os, sys, time
    import pytest, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data.distributed import DistributedSampler
    from autotune_loader import tune
    from tests.support import SimulatedMachine, SimulatedProbe, on_simulated_machines

    class Spinning(Dataset):
        def __len__(self):
            return 4096
        def __getitem__(self, index):
            for _ in range(40):
                hashlib.blake2b(bytes(1 << 16)).digest()
            return torch.full((8,), float(index)), index % 2

    class InRealTime(SimulatedProbe):
        def burst(self, config, plan):
            time.sleep(0.1)
            return super().burst(config, plan)

    if __name__ == "__main__":
        dist.init_process_group("gloo")
        {machine}
        dataset = Spinning()
        model = DistributedDataParallel(torch.nn.Linear(8, 2))
        loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
        said = []
        for _ in range({calls}):
            try:
                result = tune(loader, model, budget={budget}, max_trials={trials}, progress=False,
                              output=sys.argv[1] + "/loader.json")
            except Exception as error:
                print("ERROR", type(error).__name__, error, flush=True)
                os._exit(3)
            said += [dict(best=result.best.to_dict(), cores=result.fingerprint.usable_cores,
                          trials=[trial.config.num_workers for trial in result.trials],
                          reused=result.reused and result.reused.tuned_at)]
        for x, y in result.make_loader(dataset, sampler=DistributedSampler(dataset)):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            break
        said = dict(rank=dist.get_rank(), said=said)
        dist.destroy_process_group()
        print("SAID " + json.dumps(said) + "\\n", end="", flush=True)  # in one write: the ranks share a pipe
        time.sleep(0.5)  # torch 2.13 aborts where the exit meets gloo's threads, which drop their last all-reduce
"""
SIMULATED = "on_simulated_machines(pytest.MonkeyPatch(), lambda workload: {machine}, InRealTime)"


def tuning_job(
    machine: str = "SimulatedMachine()", *, is_real: bool = False, budget: float = 60.0, trials: int = 3, calls: int = 1
) -> str:
    """Calls of `tune()` on every rank, on this machine or on one that is an expression."""
    setup = "" if is_real else SIMULATED.format(machine=machine)
    return TUNING_JOB.format(machine=setup, budget=budget, trials=trials, calls=calls)


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
def test_torchrun_gives_both_ranks_one_configuration_and_one_file(tmp_path: Path) -> None:
    # GIVEN a script that trains with DDP and DistributedSampler
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(tuning_job(is_real=True, budget=8.0, trials=2)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]

    # WHEN torchrun starts it on two ranks
    run = subprocess.run(
        [*command, "--standalone", str(script), str(tmp_path)],
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
    (first,), (second,) = (each["said"] for each in said)
    assert first == second
    assert first["best"] == TuningResult.load(tmp_path / "loader.json").best.to_dict()
    assert first["cores"] == usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable
    assert [path.name for path in tmp_path.glob("*.json")] == ["loader.json"]


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
def test_an_earlier_result_is_looked_up_by_rank_0_and_used_by_all(launch: Any, cache_of_its_own: Path) -> None:
    # GIVEN two ranks that tune the same twice
    ranks = [launch(tuning_job(calls=2), rank, 2) for rank in (0, 1)]
    first, second = zip(*(said_by(rank.communicate(timeout=HARD_DEADLINE_S)[0])["said"] for rank in ranks), strict=True)
    # THEN the second time both have the first result, which was kept once
    assert [each["reused"] for each in first] == [None, None]
    assert second[0] == second[1]
    assert second[0]["reused"] is not None
    assert second[0]["best"] == first[0]["best"]
    assert len(list(cache_of_its_own.rglob("results/*.json"))) == 1


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
def test_a_rank_killed_mid_trial_ends_in_a_clear_error_on_the_other(launch: Any, tmp_path: Path) -> None:
    # GIVEN two ranks that are tuning
    ranks = [launch(tuning_job(budget=6000.0, trials=400), rank, 2) for rank in (0, 1)]
    until = time.monotonic() + HARD_DEADLINE_S
    while not (tmp_path / "loader.json").exists():
        assert time.monotonic() < until, "no trial was done"
        assert ranks[0].poll() is None, ranks[0].output
        time.sleep(0.1)

    # WHEN one is killed
    begun = time.monotonic()
    os.kill(ranks[1].pid, signal.SIGKILL)
    output = ranks[0].communicate(timeout=HARD_DEADLINE_S)[0]

    # THEN the other ends soon, naming it
    assert "ERROR RankLostError rank 1 is gone" in output, output
    assert time.monotonic() - begun < 20


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
def test_a_dataset_that_fails_on_one_rank_fails_on_all(launch: Any) -> None:
    # GIVEN a dataset that cannot be read on rank 1
    script = tuning_job("'OSError: no such bucket' if dist.get_rank() else SimulatedMachine()")

    # WHEN both tune
    output = [rank.communicate(timeout=HARD_DEADLINE_S)[0] for rank in [launch(script, rank, 2) for rank in (0, 1)]]

    # THEN rank 1 raises its own error and rank 0 says whose it is
    assert "ERROR WorkloadError" in output[1], output
    assert re.search("ERROR RankLostError rank 1 gave up: .*OSError: no such bucket", output[0]), output
