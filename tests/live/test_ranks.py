"""Ranks of one job whose loaders change as one: two simulated trainings, batch by batch, and a store between them."""

from __future__ import annotations

import math
from dataclasses import replace

from torch.distributed import DistNetworkError

from autotune_loader.decision.space import Space
from autotune_loader.live.prospects import Job
from autotune_loader.live.ranks import Follower, Leader
from autotune_loader.live.tuner import Tuner
from autotune_loader.machine.ranks import Link
from autotune_loader.values.config import LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedTraining

START = LoaderConfig(num_workers=1)
MACHINE = SimulatedMachine(cores=4, cpu_s=0.003, wait_s=0.05, step_s=0.012, noise_sd=0.02)
SLOWER = replace(MACHINE, wait_s=0.1)


class MemoryStore(dict[str, bytes]):
    """What the ranks say, until rank 0 takes it along."""

    is_gone = False

    def set(self, key: str, value: bytes) -> None:
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        if self.is_gone:
            raise DistNetworkError("Broken pipe")
        return all(key in self for key in keys)


class TwoRanks:
    """Two ranks, whose step lasts as long as the slower one's, as with gradients that are exchanged."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), FakeClock()
        self.trainings = [SimulatedTraining(machine, self.clock, START) for machine in (MACHINE, SLOWER)]
        leader, follower = self.trainings
        self.tuner = Tuner(
            leader,
            Job(start=START, usable_cores=4),
            lambda most: Space(max_workers=most, prefetch_factors=(2, 4, 8)),
            ranks=Leader(leader, Link(self.store, 0, 2), self.clock),
            clock=self.clock,
            cpu_clock=self.clock,
        )
        self.looks = [self.tuner.look, Follower(follower, Link(self.store, 1, 2)).look]
        self.wakes = [0.0, 0.0]

    def train(self, ranks: tuple[int, ...], seconds: float) -> None:
        until = self.clock() + seconds
        while self.clock() < until:
            begun, ends = self.clock(), []
            for rank in ranks:
                self.clock.now = begun
                if begun >= self.wakes[rank]:
                    self.wakes[rank] = self.looks[rank](begun)
                self.trainings[rank].train()
                ends.append(self.clock())
            self.clock.now = max(ends)

    def changes(self, rank: int) -> list[tuple[int, LoaderConfig]]:
        return [(each.batch, each.config) for each in self.trainings[rank].traces.changes if each.reason == "change"]


def test_all_ranks_change_at_the_same_batches_to_what_the_slowest_needs() -> None:
    job = TwoRanks()
    job.train((0, 1), 30)

    assert job.changes(0)
    assert job.changes(1) == job.changes(0)
    assert job.tuner.is_settled
    assert job.trainings[0].config.num_workers > 0.1 / 0.012


def test_a_rank_goes_on_as_it_is_when_rank_0_has_ended() -> None:
    job = TwoRanks()
    job.train((0, 1), 10)
    now = job.trainings[1].config
    job.store.is_gone = True
    job.train((1,), 5)

    assert job.wakes[1] == math.inf
    assert job.trainings[1].config == now
