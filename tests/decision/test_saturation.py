"""How much of the cores' time workers take, against the event simulation, which uses none of these formulas."""

from __future__ import annotations

import numpy as np
import pytest

from autotune_loader.decision.sufficiency import at_their_turn, free_share, taken_share
from autotune_loader.testing import FakeClock, SimulatedMachine, SimulatedProbe
from autotune_loader.twin import Observation
from autotune_loader.values.config import LoaderConfig

CPU_S = 0.05


def simulated_share(workers, cores, waiting, *, variation=0.0, prefetch=8):
    """Share of the cores' time that workers take in the long run, when the loop does next to nothing."""
    machine = SimulatedMachine(
        cores=cores, cpu_s=CPU_S, wait_s=CPU_S * waiting, service_cv=variation, step_s=1e-5, receive_s=1e-5, alpha=0.0
    )
    config = LoaderConfig(num_workers=workers, prefetch_factor=prefetch)
    rate = SimulatedProbe(machine, FakeClock()).truth(config, batches=max(300 * workers, 5000), warm=50 * workers)
    return rate / machine.batch_size * CPU_S / cores


@pytest.mark.parametrize(
    ("workers", "cores", "waiting"), [(3, 4, 0.0), (4, 4, 0.0), (7, 4, 0.0), (6, 4, 0.5), (8, 8, 1.0), (20, 8, 1.5)]
)
def test_workers_take_what_the_event_simulation_says(workers, cores, waiting):
    variation = 0.2
    at_work = at_their_turn(np.array([float(workers)]), np.array([8.0]), variation)
    expected = simulated_share(workers, cores, waiting, variation=variation)
    assert taken_share(at_work, cores, waiting) == pytest.approx([expected], abs=0.03)


@pytest.mark.parametrize("workers", [4, 16, pytest.param(48, marks=pytest.mark.acceptance)])
@pytest.mark.parametrize("prefetch", [2, 8])
def test_varying_batches_in_order_cost_what_the_event_simulation_says(workers, prefetch):
    variation = 0.5
    lost = workers - at_their_turn(np.array([float(workers)]), np.array([float(prefetch)]), variation)[0]
    spare = simulated_share(2 * workers, workers, 0.0, variation=variation)
    seen = 1.0 - simulated_share(workers, workers, 0.0, variation=variation, prefetch=prefetch) / spare
    assert lost / workers == pytest.approx(seen, rel=1 / 3)


def test_workers_that_only_compute_fill_as_many_cores():
    assert taken_share(np.array([0.0, 1.0, 3.5, 4.0, 9.0]), 4, 0.0) == pytest.approx([0.0, 0.25, 0.875, 1.0, 1.0])


def test_workers_that_wait_fill_the_cores_only_by_and_by():
    shares = taken_share(np.array([1.0, 4.0, 8.0, 16.0, 64.0]), 4, 1.0)
    assert shares[0] == pytest.approx(1 / 8)
    assert np.all(np.diff(shares) > 0)
    assert shares[-1] == pytest.approx(1.0, abs=1e-6)


def test_steady_batches_and_no_workers_lose_nothing():
    assert at_their_turn(np.array([8.0]), np.array([1.0]), 0.0) == pytest.approx([8.0])
    assert taken_share(np.array([]), 4, 0.5).shape == (0,)


def burst(workers, *, service_s, cpu_s, batches=50):
    return Observation(
        num_workers=workers,
        prefetch_factor=2,
        service_s=np.full(batches, service_s),
        cpu_s=np.full(batches, cpu_s),
        receive_s=np.full(batches, 0.001),
        step_s=np.full(batches, 0.001),
        batch_size=8.0,
        samples_per_s=8.0 * workers / service_s,
        busy_workers=float(workers),
    )


def test_a_burst_that_read_cold_files_does_not_make_workers_wait():
    # GIVEN workers that compute, and a first burst in which the files came from the disk
    cold, warm = burst(1, service_s=0.5, cpu_s=0.1), burst(4, service_s=0.104, cpu_s=0.1)
    four = LoaderConfig(num_workers=4, prefetch_factor=2)
    assert free_share([four], [cold], cores=4)[0] > 0.3
    # THEN the burst that waited least tells what waiting they cannot do without: four of them fill four cores
    assert free_share([four], [cold, warm], cores=4)[0] < 0.05
