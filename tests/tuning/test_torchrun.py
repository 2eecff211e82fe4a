"""Ranks in lock-step: in threads, and as torchrun starts them, with gloo between them; bursts on simulated machines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune_loader.machine.limits import usable_cores
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.torchrun import Ranks, decided, joined_ranks, opened_everywhere, slowest
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import TunerError, WorkloadError
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

ROOT = Path(__file__).resolve().parents[2]
HARD_DEADLINE_S = 100
PLAN = BurstPlan(seed=5)
TWO = LoaderConfig(num_workers=2)


def a_probe(cpu_s: float) -> SimulatedProbe:
    return SimulatedProbe(SimulatedMachine(cpu_s=cpu_s), FakeClock())


def test_the_slowest_rank_counts_and_a_failure_anywhere_fails_for_all() -> None:
    slow, fast = (a_probe(cpu_s).burst(LoaderConfig(), PLAN) for cpu_s in (0.04, 0.02))
    failure = Failure(kind="oom_killed", phase="batches", message="a worker was killed")
    assert slowest([fast, slow, fast]) == slow
    assert slowest([fast, failure]) == replace(failure, message="rank 1: a worker was killed")


def test_a_process_without_a_launcher_has_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for environ in ({}, {"WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with joined_ranks() as ranks:
            assert ranks is None


# Two ranks in two threads


class Threads:
    """What `Ranks` asks of torch.distributed, between two threads."""

    def __init__(self) -> None:
        self.barrier, self.said, self.own = threading.Barrier(2, timeout=30), list[Any]([None, None]), threading.local()

    def get_rank(self) -> int:
        return int(self.own.rank)

    def get_world_size(self) -> int:
        return 2

    def all_gather_object(self, said: list[Any], value: Any, group: Any) -> None:
        self.said[self.own.rank] = value
        self.barrier.wait()
        said[:] = self.said
        self.barrier.wait()

    def broadcast_object_list(self, said: list[Any], src: int, group: Any) -> None:
        gathered: list[Any] = [None, None]
        self.all_gather_object(gathered, said[0], group)
        said[0] = gathered[src]


def on_two_ranks(run: Callable[[Ranks], Any]) -> list[Any]:
    """What `run` returns, or raises, on each of two ranks."""
    dist = Threads()

    def on(rank: int) -> Any:
        dist.own.rank = rank
        try:
            return run(Ranks(dist, None))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return [future.result() for future in [pool.submit(on, rank) for rank in (0, 1)]]


def result_of(measured: Any) -> TuningResult:
    return TuningResult(best=TWO, status="complete", rate=measured.samples_per_s, tuned_at="now")


class Raising(SimulatedProbe):
    error: BaseException

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        raise self.error


def bursts_on(probes: list[SimulatedProbe]) -> list[Any]:
    """What two ranks say of one burst that rank 0 decides by."""

    def run(ranks: Ranks) -> TuningResult:
        assert ranks.environ["LOCAL_WORLD_SIZE"] == "2"
        return decided(ranks, probes[ranks.rank], lambda probe: result_of(probe.burst(TWO, PLAN)))

    return on_two_ranks(run)


def test_all_ranks_run_each_burst_at_once_for_the_whole_window_and_get_one_result() -> None:
    first, second = bursts_on([a_probe(0.02), a_probe(0.04)])
    # THEN it is what the slow rank measured, in all the time that it had
    assert first == second == result_of(a_probe(0.04).burst(TWO, replace(PLAN, min_s=PLAN.max_s)))


@pytest.mark.parametrize(
    ("on_rank", "error", "kinds", "says"),
    [
        (0, WorkloadError("sample 7 raises"), [WorkloadError, TunerError], "rank 0: .*sample 7 raises"),
        (1, WorkloadError("sample 7 raises"), [WorkloadError, TunerError], "rank 0: .*rank 1: sample 7 raises"),
        (0, KeyboardInterrupt(), [KeyboardInterrupt, TunerError], "rank 0: "),
    ],
)
def test_what_ends_the_run_of_one_rank_ends_it_on_all_and_says_whose_it_was(
    on_rank: int, error: BaseException, kinds: list[type], says: str
) -> None:
    probes = [a_probe(0.02), a_probe(0.02)]
    probes[on_rank] = raising = Raising(SimulatedMachine(), FakeClock())
    raising.error = error
    ended = bursts_on(probes)
    assert [type(each) for each in ended] == kinds
    assert re.search(says, str(ended[1]))


@contextmanager
def opening(rank: int) -> Iterator[str]:
    if rank:
        raise WorkloadError("no such bucket")
    yield "opened"


def test_where_one_rank_cannot_begin_none_does() -> None:
    def run(ranks: Ranks) -> Any:
        with opened_everywhere(ranks, opening(ranks.rank)) as opened:
            return opened

    assert [repr(each) for each in on_two_ranks(run)] == [
        "TunerError('rank 1: no such bucket')",
        "WorkloadError('no such bucket')",
    ]


# As torchrun starts them

JOB = """
    import json, os, time
    import pytest, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler
    from autotune_loader import tune
    from tests.support import SimulatedMachine, on_simulated_machines

    rank, has_group = int(os.environ["RANK"]), {has_group}
    dataset = TensorDataset(torch.zeros(4096, 8), torch.zeros(4096, dtype=torch.long))
    if has_group:
        dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(8, 2)) if has_group else torch.nn.Linear(8, 2)
    loader = DataLoader(dataset, 16, sampler=DistributedSampler(dataset, num_replicas=2, rank=rank))
    on_simulated_machines(pytest.MonkeyPatch(), lambda workload: {machine})
    result = [tune(loader, model, progress=False, output="loader.json") for _ in range(2)][-1]
    if not has_group:
        dist.init_process_group("gloo")  # the job's own, after tune() has used a group of its own
    dist.barrier()
    dist.destroy_process_group()
    # In one write: the ranks share a pipe.
    said = dict(rank=rank, best=result.best.to_dict(), cores=result.machine.usable_cores)
    print("SAID " + json.dumps(said) + "\\n", end="", flush=True)
    time.sleep(0.5)  # torch 2.13 aborts where the exit meets gloo's threads, which drop their last all-reduce
"""


@pytest.mark.system
@pytest.mark.timeout(HARD_DEADLINE_S + 20)
@pytest.mark.parametrize(
    ("has_group", "machine"),
    [
        (True, "SimulatedMachine()"),
        (False, "SimulatedMachine()"),
        (True, "'no bucket' if rank else SimulatedMachine()"),
    ],
    ids=["in the job's group", "before there is one", "a rank fails"],
)
def test_torchrun_gives_both_ranks_one_configuration_and_one_file(
    tmp_path: Path, has_group: bool, machine: str
) -> None:
    (tmp_path / "job.py").write_text(textwrap.dedent(JOB.format(has_group=has_group, machine=machine)))
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
    if "bucket" in machine:
        assert run.returncode != 0
        assert "TunerError: rank 1: no bucket" in run.stderr
        assert "WorkloadError: no bucket" in run.stderr
        return
    assert run.returncode == 0, run.stdout + run.stderr
    said = [json.loads(line.removeprefix("SAID ")) for line in run.stdout.splitlines() if line.startswith("SAID ")]
    assert sorted(each["rank"] for each in said) == [0, 1], run.stdout + run.stderr
    assert said[0]["best"] == said[1]["best"] == TuningResult.load(tmp_path / "loader.json").best.to_dict()
    assert said[0]["cores"] == usable_cores(environ={"LOCAL_WORLD_SIZE": "2"}).usable
    assert [path.name for path in tmp_path.glob("*.json")] == ["loader.json"]
