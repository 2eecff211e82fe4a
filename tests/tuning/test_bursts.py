"""What a burst runs: whole epochs where these are so short that their beginnings are much of them, and full queues."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.tuning.burst_source import LONGEST_PREFILL_S, prefill_s
from autotune_loader.tuning.state import SearchState
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    simulated_run,
    simulated_search,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

PLAN = BurstPlan(max_s=0.5, min_s=0.1)


class Rows(Dataset[Any]):
    """64 samples of 2 ms each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.full((3,), float(index))


# A burst of whole epochs


def start_slowly(worker: int) -> None:
    time.sleep(0.3)  # much longer than the samples take, on a loaded machine too


@pytest.fixture
def probe() -> Any:
    data = DataSide.from_dataset(Rows(), batch_size=8, worker_init_fn=start_slowly)
    found = InlineProbe(Workload(data=data, training=TrainingSide()), inspect_machine())
    found.start()
    yield found
    found.close()


def rate(outcome: Measurement | Failure) -> float:
    assert isinstance(outcome, Measurement), outcome
    return outcome.samples_per_s.value


@pytest.mark.process
@pytest.mark.parametrize(
    "config",
    [LoaderConfig(), LoaderConfig(num_workers=2), LoaderConfig(num_workers=2, persistent_workers=True)],
    ids=str,
)
def test_a_burst_of_whole_epochs_is_as_fast_as_training_is(probe: Any, config: LoaderConfig) -> None:
    # GIVEN what epochs take, start-up included where workers do not live on
    loader = DataLoader(Rows(), batch_size=8, shuffle=True, worker_init_fn=start_slowly, **config.to_kwargs())
    seconds = []
    for _ in range(3):
        begun = time.monotonic()
        list(loader)
        seconds.append(time.monotonic() - begun)
    in_training = 64 / min(seconds[1:])
    # WHEN a burst runs whole epochs THEN it measures that, which other bursts do not
    whole, part = probe.burst(config, replace(PLAN, whole_epochs=True)), probe.burst(config, PLAN)
    assert in_training / 2 < rate(whole) < in_training * 2
    leaves = config.num_workers > 0 and not config.persistent_workers
    assert whole.samples % 64 == 0 or not config.num_workers
    assert (rate(part) > 2 * rate(whole)) is leaves


# The search


class ShortEpochs(SimulatedProbe):
    """Remembers whether it was asked for whole epochs."""

    runs_whole = False

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.runs_whole |= plan.whole_epochs
        return super().burst(config, plan)


MACHINE = SimulatedMachine(cpu_s=0.02, step_s=0.002, start_s=0.02, worker_start_s=0.2)


def searched(
    batches: int | None, *, may_keep: bool, machine: SimulatedMachine = MACHINE, **options: Any
) -> tuple[SearchState, ShortEpochs]:
    clock = FakeClock()
    probe = ShortEpochs(machine, clock, epoch_batches=batches)
    run = simulated_run(machine, Space(max_workers=4, persistent_workers=may_keep), epoch_batches=batches)
    return simulated_search(probe, run, clock, **options), probe


def winner(found: SearchState) -> LoaderConfig:
    assert found.finals is not None
    return found.finals.winner


def test_workers_that_may_not_live_on_lose_where_starting_them_takes_longer_than_an_epoch() -> None:
    # GIVEN epochs of 8 batches, 160 ms without workers, and workers that take 0.2 s each to start
    found, _ = searched(8, may_keep=False)
    assert winner(found).num_workers == 0
    assert found.whole_epochs
    # BUT those that may do, and win
    found, _ = searched(8, may_keep=True)
    assert (winner(found).num_workers >= 3, winner(found).persistent_workers) == (True, True)


def test_epochs_of_few_slow_batches_are_run_whole_though_they_take_longer() -> None:
    # GIVEN 16 batches that take 0.4 s each to fetch: with four workers 1.6 s, a quarter of it for the first
    slow = replace(MACHINE, cpu_s=0.4)
    found, probe = searched(16, may_keep=True, machine=slow)
    assert found.whole_epochs
    assert probe.runs_whole
    # BUT not 160 of them, whose first is little of an epoch
    longer, _ = searched(160, may_keep=True, machine=slow)
    assert not longer.whole_epochs
    # AND none of unknown length
    endless, probe = searched(None, may_keep=False)
    assert (endless.whole_epochs, probe.runs_whole) == (False, False)


@pytest.mark.parametrize(("batches", "persistent"), [(500, True), (60_000, False)])
def test_whether_workers_persist_is_decided_by_the_start_up_that_was_measured(batches: int, persistent: bool) -> None:
    # GIVEN epochs too long to run whole, of which a start-up of 0.8 s is 18 % or next to nothing
    found, probe = searched(batches, may_keep=True)
    assert winner(found).persistent_workers is persistent
    assert not probe.runs_whole
    # AND with workers that start in no time, it is not worth their memory either
    quick, _ = searched(
        batches, may_keep=True, machine=replace(MACHINE, start_s=0.0, worker_start_s=0.0, first_batch_extra_s=0.0)
    )
    assert not winner(quick).persistent_workers


# Queues that are filled before a burst


def test_a_burst_with_queues_filled_first_reads_what_training_reads_and_they_are_filled_only_where_that_disturbs() -> (
    None
):
    # GIVEN a step that has a core of its own in training, and workers that want all cores until the queues are full
    machine = SimulatedMachine(cores=4, cpu_s=0.03, step_s=0.012, step_cores=1.0, service_cv=0.05, step_cv=0.0)
    many, plan = LoaderConfig(num_workers=4, prefetch_factor=8), BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.003)

    def filling_s(machine: SimulatedMachine, config: LoaderConfig = many) -> float:
        context = TwinContext(usable_cores=machine.cores, consumer_cores=1.0)
        return prefill_s(config, SimulatedProbe(machine, FakeClock()).burst(config, plan), context)

    probe = SimulatedProbe(machine, FakeClock())
    truth = probe.truth(many)
    assert rate(probe.burst(many, plan)) < 0.95 * truth
    assert rate(probe.burst(many, replace(plan, prefill_s=filling_s(machine)))) == pytest.approx(truth, rel=0.02)
    assert filling_s(replace(machine, cores=16)) == filling_s(replace(machine, cpu_s=0.0, wait_s=0.03)) == 0.0
    slow = replace(machine, cpu_s=0.1, step_s=0.04)
    assert filling_s(slow, replace(many, prefetch_factor=16)) == LONGEST_PREFILL_S  # not for ever
