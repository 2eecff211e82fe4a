"""A budget of cores: what kept more of them busy is not chosen, and a real run of what is chosen keeps to it."""

from __future__ import annotations

import itertools
import os
import resource
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.data import Dataset

from autotune_loader import tune
from autotune_loader.decision.evidence import Ask, Phase
from autotune_loader.decision.space import Limits, Space, consumer_thread_counts
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe


class Computed(Dataset[torch.Tensor]):
    """4 ms of CPU a sample."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.thread_time() + 0.004
        while time.thread_time() < end:
            pass
        return torch.zeros(1)


def cpu_s() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in both)


@pytest.mark.process
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is kept to anyway")
def test_a_real_run_of_what_was_chosen_keeps_to_the_budget() -> None:
    # GIVEN a job that would be twice as fast on two cores
    result = tune(Computed(), batch_size=8, max_cores=1, budget=10, reuse=False, progress=False)
    seen = [(trial.config.num_workers, trial.measurement) for trial in result.trials if trial.config.num_workers > 1]
    assert result.best.num_workers <= 1, [replace(each, traces=()) for _, each in seen if each is not None]
    over = [trial.failure for trial in result.trials if trial.failure is not None]
    assert all(each.kind == "core_limit" for each in over)
    # WHEN it is trained with
    begun, before = time.perf_counter(), cpu_s()
    iterator = iter(result.make_loader(Computed(), shuffle=True))
    for _ in itertools.takewhile(lambda _: time.perf_counter() < begun + 3, iterator):
        pass
    wall = time.perf_counter() - begun
    del iterator  # workers are waited for, and their CPU time is then ours
    # THEN no more cores were busy
    assert (cpu_s() - before) / wall < 1.2


def test_a_burst_that_kept_more_cores_busy_fails_with_what_would_work() -> None:
    probe = SimulatedProbe(SimulatedMachine(cores=4, cpu_s=0.1), FakeClock())
    burst = probe.burst(LoaderConfig(num_workers=4), BurstPlan())
    assert isinstance(burst, Measurement)
    space = Space(max_workers=4, limits=Limits(cores=2, usable_cores=4))

    def kept(share: float | None, foreign: float, workers: int = 4, steal: float = 0.0) -> Failure | None:
        measured = replace(burst, cpu_share=share, foreign_cpu_share=foreign, steal_share=steal, wait_share=1.0)
        return space.over_margin(LoaderConfig(num_workers=workers), measured)

    over = kept(0.9, 0.0)
    assert over is not None
    assert over.kind == "core_limit"
    assert "4 workers" in over.message
    assert "keeps 3.6 cores busy, and max_cores allows 2; fewer workers" in over.message
    assert kept(0.51, 0.0) is None
    assert kept(None, 0.0) is None
    # THEN neighbours that take half of the cores do not make four workers two, nor do those on other machines of the host
    assert kept(0.5, 0.5) is not None
    assert kept(0.5, 0.0, steal=0.5) is not None
    # THEN one worker is never more than one core
    assert kept(0.1, 0.9, workers=1) is None


def test_a_burst_of_the_finals_keeps_to_the_budget_too() -> None:
    # GIVEN two workers that compute all the time on two cores of which the job may keep one busy
    clock, machine = FakeClock(), SimulatedMachine(cores=2, cpu_s=0.1, neighbours=0.0)
    space = Space(max_workers=2, limits=Limits(cores=1, usable_cores=2))
    context = TwinContext(usable_cores=2, consumer_cores=1.0)
    source = BurstSource(SimulatedProbe(machine, clock), space, context, [], seconds_left=lambda: 60.0)
    # THEN it is asked wherever it runs
    phases: tuple[Phase, ...] = ("search", "compare")
    for phase in phases:
        seen = source.gather(LoaderConfig(num_workers=2), Ask(phase=phase))
        assert seen.failure is not None
        assert seen.failure.kind == "core_limit"


@pytest.mark.parametrize(
    ("most", "counts"),
    [(float("inf"), (None, 4, 2, 1)), (8, (None, 4, 2, 1)), (4, (4, 2, 1)), (1.5, (1,)), (0.5, (1,))],
)
def test_the_steps_threads_fit_into_the_budget(most: float, counts: tuple[int | None, ...]) -> None:
    assert consumer_thread_counts(8, 8, most) == counts
