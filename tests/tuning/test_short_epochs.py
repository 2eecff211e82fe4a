"""Epochs so short that their beginnings are much of them: judged by whole epochs, with the start-up that was measured."""

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
from autotune_loader.tuning.burst_source import SHORT_EPOCH_S, BurstSource, startup_s
from autotune_loader.tuning.state import SearchState
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial
from tests.support import (
    FakeClock,
    SimulatedMachine,
    SimulatedProbe,
    simulated_result,
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
    # GIVEN what some epochs take, start-up included where workers do not live on
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
    assert whole.samples_per_s.low <= rate(whole) <= whole.samples_per_s.high
    leaves = config.num_workers > 0 and not config.persistent_workers
    assert whole.samples % 64 == 0 or not config.num_workers
    assert (rate(part) > 2 * rate(whole)) is leaves


# The search


class ShortEpochs(SimulatedProbe):
    """Remembers what it was asked to do."""

    def __init__(self, machine: SimulatedMachine, batches: int | None, clock: FakeClock) -> None:
        super().__init__(machine, clock, epoch_batches=batches)
        self.plans: list[BurstPlan] = []

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.plans.append(plan)
        return super().burst(config, plan)


TWO = LoaderConfig(num_workers=2)
MACHINE = SimulatedMachine(cpu_s=0.02, step_s=0.002, start_s=0.02, worker_start_s=0.2)


def searched(
    batches: int | None, *, may_keep: bool, machine: SimulatedMachine = MACHINE, **options: Any
) -> tuple[SearchState, ShortEpochs]:
    clock = FakeClock()
    probe = ShortEpochs(machine, batches, clock)
    run = simulated_run(machine, Space(max_workers=4, persistent_workers=may_keep), epoch_batches=batches)
    return simulated_search(probe, run, clock, **options), probe


def source_of(found: SearchState, batches: int) -> BurstSource:
    """A source that knows the bursts of a search, of epochs of so many batches."""
    context = replace(found.context, epoch_batches=batches)
    return BurstSource(
        ShortEpochs(MACHINE, batches, FakeClock()), Space(max_workers=4), context, found.trials, lambda: 60.0
    )


def winner(found: SearchState) -> LoaderConfig:
    assert found.finals is not None
    return found.finals.winner


def test_workers_that_may_not_live_on_lose_where_starting_them_takes_longer_than_an_epoch() -> None:
    # GIVEN epochs of 8 batches, 160 ms without workers, and workers that take 0.2 s each to start
    found, _ = searched(8, may_keep=False)
    assert winner(found).num_workers == 0
    assert found.whole_epochs


def test_workers_that_may_live_on_do_and_win() -> None:
    found, _ = searched(8, may_keep=True)
    assert (winner(found).num_workers >= 3, winner(found).persistent_workers) == (True, True)


def test_epochs_of_few_slow_batches_are_run_whole_though_they_take_longer() -> None:
    # GIVEN 16 batches that take 0.4 s each to fetch: with four workers 1.6 s, a quarter of it for the first
    slow = replace(MACHINE, cpu_s=0.4)
    found, probe = searched(16, may_keep=True, machine=slow)
    assert source_of(found, 16).epoch_s > SHORT_EPOCH_S
    assert found.whole_epochs
    assert any(plan.whole_epochs for plan in probe.plans)
    # BUT not 160 of them, whose first is little of an epoch
    longer, _ = searched(160, may_keep=True, machine=slow)
    assert not longer.whole_epochs


def trial(*, epoch_s: float, first_batch_s: float = 0.0) -> Trial:
    """A burst whose rate makes 100 batches last so long, in which workers fetched the first batch so long."""
    shape = SimulatedProbe(MACHINE, FakeClock()).burst(TWO, PLAN)
    assert isinstance(shape, Measurement)
    rate = 100 * shape.batch_size / epoch_s
    interval = Interval(value=rate, low=rate, high=rate, count=9)
    return Trial(
        number=0,
        config=TWO,
        role="search",
        measurement=replace(shape, samples_per_s=interval, service_s=first_batch_s),
    )


@pytest.mark.parametrize(
    ("epoch_s", "first_batch_s", "seconds_left", "short"),
    [(0.9, 0.0, 0.0, True), (2.0, 0.2, 40.0, True), (2.0, 0.05, 40.0, False), (2.0, 0.2, 20.0, False)],
    ids=["quick", "first batch counts", "first batch hardly counts", "no time for it"],
)
def test_which_epochs_are_run_whole(epoch_s: float, first_batch_s: float, seconds_left: float, short: bool) -> None:
    context = TwinContext(usable_cores=4, consumer_cores=1.0, epoch_batches=100)
    seen = [trial(epoch_s=epoch_s, first_batch_s=first_batch_s)]
    source = BurstSource(SimulatedProbe(MACHINE, FakeClock()), Space(max_workers=4), context, seen, lambda: 60.0)
    assert source.epoch_s == pytest.approx(epoch_s)
    assert source.has_short_epochs(seconds_left) is short


def test_start_up_is_what_the_first_batch_took_beyond_its_own_fetch() -> None:
    # GIVEN workers of which each takes 0.2 s to start, and batches that take much longer beside others than the first did
    found, _ = searched(8, may_keep=True, machine=replace(MACHINE, alpha=2.0, beta=0.5))
    # THEN what they wait for later is not taken from it
    for workers in (1, 4):
        assert startup_s(LoaderConfig(num_workers=workers), found.trials) == pytest.approx(
            0.02 + 0.2 * workers, rel=0.5
        )


def test_a_search_leaves_time_for_whole_epochs() -> None:
    # GIVEN epochs of 1.6 s, of which six bursts of two take half of 42 s, and a search that goes on to the end
    _, probe = searched(16, may_keep=True, machine=replace(MACHINE, cpu_s=0.4), search="random", budget_s=42.0)
    # THEN epochs are run whole
    assert any(plan.whole_epochs for plan in probe.plans)


def test_workers_that_fetch_an_epoch_in_one_round_or_two_are_raced() -> None:
    # GIVEN 16 batches that wait, and a step for which three workers suffice
    slow = replace(MACHINE, cpu_s=0.001, wait_s=0.05, step_s=0.02, worker_start_s=0.01)
    run = simulated_run(slow, Space(max_workers=20, persistent_workers=True), epoch_batches=16)
    clock = FakeClock()
    found = simulated_search(ShortEpochs(slow, 16, clock), run, clock)
    assert found.finals is not None
    assert {8, 16} <= {config.num_workers for config in found.finals.configs}


def test_no_more_workers_than_an_epoch_has_batches() -> None:
    found, _ = searched(2, may_keep=True)
    assert winner(found).num_workers <= 2


@pytest.mark.parametrize(("batches", "persistent"), [(500, True), (60_000, False)])
def test_whether_workers_persist_is_decided_by_the_start_up_that_was_measured(batches: int, persistent: bool) -> None:
    # GIVEN epochs too long to run whole, of which a start-up of 0.8 s is 18 % or next to nothing
    found, probe = searched(batches, may_keep=True)
    assert winner(found).persistent_workers is persistent
    assert not any(plan.whole_epochs for plan in probe.plans)
    # AND with workers that start in no time, it is not worth their memory either
    quick, _ = searched(
        batches, may_keep=True, machine=replace(MACHINE, start_s=0.0, worker_start_s=0.0, first_batch_extra_s=0.0)
    )
    assert not winner(quick).persistent_workers


def test_epochs_of_unknown_length_are_not_run_whole() -> None:
    found, probe = searched(None, may_keep=False)
    assert not found.whole_epochs
    assert not any(plan.whole_epochs for plan in probe.plans)


def test_that_epochs_are_short_is_said() -> None:
    assert any("Epochs are short" in sentence for sentence in simulated_result(MACHINE, epoch_batches=8).summary)
