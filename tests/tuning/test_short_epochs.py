"""Epochs so short that their beginnings are much of them: judged by whole epochs, with the start-up that was measured."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from autotune_loader import TuningResult, tune
from autotune_loader.decision.acquisition import initial_design
from autotune_loader.decision.posterior import TYPICAL_NOISE
from autotune_loader.decision.space import Space
from autotune_loader.decision.stopping import StopReason
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.schedule import SHORT_EPOCH_S, EpochLength, startup_s, with_fewer_rounds
from autotune_loader.tuning.session import TuningSession
from autotune_loader.tuning.state import Job, SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

PLAN = BurstPlan(max_s=0.5, min_s=0.1)


class Rows(Dataset[Any]):
    """64 samples of 2 ms each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.full((3,), float(index))


class Stamped(Rows):
    """Is told the epoch, so that its workers must not live on."""

    def set_epoch(self, epoch: int) -> None: ...


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
@pytest.mark.parametrize("persistent", [True, False])
def test_a_burst_of_whole_epochs_is_as_fast_as_training_is(probe: Any, persistent: bool) -> None:
    # GIVEN what some epochs take
    config = LoaderConfig(num_workers=2, persistent_workers=persistent)
    loader = DataLoader(Rows(), batch_size=8, shuffle=True, worker_init_fn=start_slowly, **config.to_kwargs())
    seconds = []
    for _ in range(5):
        begun = time.monotonic()
        list(loader)
        seconds.append(time.monotonic() - begun)
    in_training = 64 / sorted(seconds[1:])[2]
    # WHEN a burst runs whole epochs THEN it measures that
    measured = probe.burst(config, replace(PLAN, whole_epochs=True))
    assert in_training / 2 < rate(measured) < in_training * 2
    assert measured.samples % 64 == 0
    assert measured.samples_per_s.low <= rate(measured) <= measured.samples_per_s.high


@pytest.mark.process
def test_start_up_shows_in_whole_epochs_only(probe: Any) -> None:
    leaving, staying = LoaderConfig(num_workers=2), LoaderConfig(num_workers=2, persistent_workers=True)
    whole = replace(PLAN, whole_epochs=True)
    assert rate(probe.burst(staying, whole)) > 2 * rate(probe.burst(leaving, whole))
    assert rate(probe.burst(leaving, PLAN)) > 2 * rate(probe.burst(leaving, whole))


@pytest.mark.process
def test_without_workers_whole_epochs_cost_nothing(probe: Any) -> None:
    begun = time.monotonic()
    list(DataLoader(Rows(), batch_size=8, shuffle=True))
    plain = 64 / (time.monotonic() - begun)
    assert plain / 2 < rate(probe.burst(LoaderConfig(), replace(PLAN, whole_epochs=True))) < plain * 2


# The search


class ShortEpochs(SimulatedProbe):
    """Remembers what it was asked to do."""

    def __init__(self, machine: SimulatedMachine, batches: int | None, clock: FakeClock) -> None:
        super().__init__(machine, clock, epoch_batches=batches)
        self.plans: list[BurstPlan] = []

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.plans.append(plan)
        return super().burst(config, plan)


class Silent:
    def trial(self, *arguments: Any) -> None: ...
    def finals_round(self, *arguments: Any) -> None: ...


MACHINE = SimulatedMachine(cpu_s=0.02, step_s=0.002, start_s=0.02, worker_start_s=0.2)


def searched(
    batches: int | None, *, may_keep: bool, machine: SimulatedMachine = MACHINE, settings: TuneOptions | None = None
) -> tuple[SearchState, ShortEpochs]:
    clock = FakeClock()
    probe = ShortEpochs(machine, batches, clock)
    run = TuningSession(
        probe,
        Space(max_workers=4, may_keep_workers=may_keep),
        settings or TuneOptions(),
        Job(usable_cores=4, default_threads=4, step_uses_cores=False, epoch_batches=batches),
        clock=clock,
        started=0.0,
        listener=Silent(),
    )
    return run.run(), probe


def epoch_of(found: SearchState, batches: int) -> float:
    """Seconds of an epoch of so many batches, by what was found."""
    epoch = EpochLength.of(found.trials, batches)
    return 0.0 if epoch is None else epoch.seconds


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
    assert epoch_of(found, 16) > SHORT_EPOCH_S
    assert found.whole_epochs
    assert any(plan.whole_epochs for plan in probe.plans)
    # BUT not 160 of them, whose first is little of an epoch
    longer, _ = searched(160, may_keep=True, machine=slow)
    assert not longer.whole_epochs


@pytest.mark.parametrize(
    ("epoch_s", "first_batch_s", "seconds_left", "short"),
    [(0.9, 0.0, 0.0, True), (2.0, 0.2, 40.0, True), (2.0, 0.05, 40.0, False), (2.0, 0.2, 20.0, False)],
    ids=["quick", "first batch counts", "first batch hardly counts", "no time for it"],
)
def test_which_epochs_are_run_whole(epoch_s: float, first_batch_s: float, seconds_left: float, short: bool) -> None:
    assert EpochLength(seconds=epoch_s, first_fetch_s=first_batch_s).is_short(seconds_left) is short


@pytest.mark.parametrize(
    ("epoch_s", "first_batch_s", "kept_s"),
    [(2.0, 0.2, 36.0), (1.5, 0.2, 27.0), (0.1, 0.0, 4.5), (3.1, 0.5, 0.0), (2.0, 0.05, 0.0)],
    ids=["most of 60 s", "three rounds of three", "bursts of many epochs", "too long", "first batch hardly counts"],
)
def test_the_search_leaves_time_for_whole_epochs(epoch_s: float, first_batch_s: float, kept_s: float) -> None:
    assert EpochLength(seconds=epoch_s, first_fetch_s=first_batch_s).kept_s(60.0) == pytest.approx(kept_s)


def test_one_epoch_tells_less_than_many() -> None:
    noise = [EpochLength(seconds=seconds).noise_sd for seconds in (3.0, 0.4, 0.1, 0.001)]
    assert noise[0] == noise[1] > noise[2] > noise[3] == TYPICAL_NOISE


def test_start_up_is_what_the_first_batch_took_beyond_its_own_fetch() -> None:
    # GIVEN workers of which each takes 0.2 s to start, and batches that take much longer beside others than the first did
    found, _ = searched(8, may_keep=True, machine=replace(MACHINE, alpha=2.0, beta=0.5))
    # THEN what they wait for later is not taken from it
    for workers in (1, 4):
        assert startup_s(LoaderConfig(num_workers=workers), found.trials) == pytest.approx(
            0.02 + 0.2 * workers, rel=0.5
        )


def test_a_search_leaves_time_for_whole_epochs() -> None:
    # GIVEN epochs of 1.6 s, of which six bursts of two take half of 40 s, and a search that would go on
    slow, settings = replace(MACHINE, cpu_s=0.4), TuneOptions(search="random", budget_s=40.0)
    found, probe = searched(16, may_keep=True, machine=slow, settings=settings)
    # THEN it ends for want of time, and epochs are run whole
    assert found.stop_reason is StopReason.OUT_OF_BUDGET
    assert any(plan.whole_epochs for plan in probe.plans)


def test_where_whole_epochs_take_most_of_the_budget_the_scouts_are_the_search() -> None:
    # GIVEN epochs of 1.6 s: three rounds of three bursts take 29 of 60 s
    found, _ = searched(16, may_keep=True, machine=replace(MACHINE, cpu_s=0.4), settings=TuneOptions(budget_s=60.0))
    design = initial_design(Space(max_workers=4), usable_cores=4)
    assert [trial.config.num_workers for trial in found.trials] == [scout.num_workers for scout in design]
    assert found.stop_reason is StopReason.OUT_OF_BUDGET
    # BUT not where there is time for both
    longer, _ = searched(16, may_keep=True, machine=replace(MACHINE, cpu_s=0.4), settings=TuneOptions(budget_s=120.0))
    assert longer.stop_reason is not StopReason.OUT_OF_BUDGET


def test_workers_that_fetch_an_epoch_in_one_round_or_two_are_raced() -> None:
    few = LoaderConfig(num_workers=5, prefetch_factor=4, consumer_threads=2)
    more = with_fewer_rounds(few, epoch_batches=16, max_workers=16)
    assert [(each.num_workers, each.prefetch_factor, each.consumer_threads) for each in more] == [
        (16, 4, None),
        (8, 4, None),
    ]
    # AND not more than are allowed, nor where none are wanted
    assert [each.num_workers for each in with_fewer_rounds(few, epoch_batches=16, max_workers=12)] == [8]
    assert with_fewer_rounds(LoaderConfig(), epoch_batches=16, max_workers=16) == []


def test_no_more_workers_than_an_epoch_has_batches() -> None:
    found, _ = searched(2, may_keep=True)
    assert winner(found).num_workers <= 2


@pytest.mark.parametrize(("batches", "persistent"), [(500, True), (200_000, False)])
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
    assert SHORT_EPOCH_S > 0


# tune(), in this process


def quick(dataset: Any, **options: Any) -> TuningResult:
    return tune(dataset, None, batch_size=8, isolation="inline", reuse=False, max_workers=2, **options)


@pytest.mark.process
def test_tiny_epochs_of_a_dataset_that_is_told_its_epoch_get_no_forkserver_workers() -> None:
    # GIVEN epochs of 0.13 s, and a start method that takes longer than that
    loader = DataLoader(Stamped(), batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="forkserver")
    result = tune(loader, None, isolation="inline", reuse=False, max_workers=2, budget=30)
    assert result.best.num_workers == 0
    assert any("Epochs are short" in sentence for sentence in result.summary)
    assert result.speedup is None or result.speedup.value > 2


@pytest.mark.process
def test_tiny_epochs_of_other_datasets_get_workers_that_persist() -> None:
    result = quick(Rows(), budget=15)
    assert (result.best.num_workers, result.best.persistent_workers) == (2, True)
