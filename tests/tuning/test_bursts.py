"""What a burst begins with: full queues where these disturb."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune_loader.decision.space import Space
from autotune_loader.tuning.burst_source import LONGEST_PREFILL_S, prefill_s
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


def rate(outcome: Measurement | Failure) -> float:
    assert isinstance(outcome, Measurement), outcome
    return outcome.samples_per_s.value


# The search


MACHINE = SimulatedMachine(cpu_s=0.02, step_s=0.002, start_s=0.02, worker_start_s=0.2)


def searched(batches: int, **changes: Any) -> LoaderConfig:
    """The winner on epochs of so many batches."""
    clock, machine = FakeClock(), replace(MACHINE, **changes)
    probe = SimulatedProbe(machine, clock, epoch_batches=batches)
    run = simulated_run(machine, Space(max_workers=4, persistent_workers=True), epoch_batches=batches)
    found = simulated_search(probe, run, clock)
    assert found.finals is not None
    return found.finals.winner


@pytest.mark.parametrize(("batches", "persistent"), [(500, True), (60_000, False)])
def test_whether_workers_persist_is_decided_by_the_start_up_that_was_measured(batches: int, persistent: bool) -> None:
    # GIVEN epochs too long to run whole, of which a start-up of 0.8 s is 18 % or next to nothing
    assert searched(batches).persistent_workers is persistent
    # AND with workers that start in no time, it is not worth their memory either
    assert not searched(batches, start_s=0.0, worker_start_s=0.0, first_batch_extra_s=0.0).persistent_workers


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
