"""What goes before a burst: queues that are filled first, where filling them disturbs the training loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune_loader.tuning.burst_source import LONGEST_PREFILL_S, prefill_s
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.003)
MANY = LoaderConfig(num_workers=4, prefetch_factor=8)

# The step has a core of its own in the midst of training; until the queues are full four workers want all of them.
CROWDED = SimulatedMachine(cores=4, cpu_s=0.03, step_s=0.012, step_cores=1.0, service_cv=0.05, step_cv=0.0)


def filling_after(machine: SimulatedMachine, config: LoaderConfig) -> float:
    """Seconds to fill the queues first, as a burst of this configuration tells."""
    probe = SimulatedProbe(machine, FakeClock())
    context = TwinContext(usable_cores=machine.cores, consumer_cores=1.0)
    return prefill_s(config, probe.burst(config, BURST), context)


def test_a_burst_with_queues_filled_first_reads_what_training_reads():
    probe = SimulatedProbe(CROWDED, FakeClock())
    truth = probe.truth(MANY)
    assert probe.burst(MANY, BURST).samples_per_s.value < 0.95 * truth
    filled = probe.burst(MANY, replace(BURST, prefill_s=filling_after(CROWDED, MANY)))
    assert filled.samples_per_s.value == pytest.approx(truth, rel=0.02)


@pytest.mark.parametrize(
    ("machine", "config", "seconds"),
    [
        pytest.param(CROWDED, LoaderConfig(num_workers=1, prefetch_factor=2), 0.0, id="a worker that is waited for"),
        pytest.param(replace(CROWDED, cores=16), MANY, 0.0, id="cores for everybody"),
        pytest.param(replace(CROWDED, cpu_s=0.0, wait_s=0.03), MANY, 0.0, id="workers that wait"),
        pytest.param(
            replace(CROWDED, cpu_s=0.1, step_s=0.04), replace(MANY, prefetch_factor=16), LONGEST_PREFILL_S, id="slow"
        ),
    ],
)
def test_queues_are_filled_only_where_that_disturbs_and_not_for_ever(machine, config, seconds):
    assert filling_after(machine, config) == seconds
