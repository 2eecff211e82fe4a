"""Stand-ins for tests and studies: a simulated machine, fakes.

Nothing here starts a process or sleeps.
"""

from tests.support.clock import FakeClock
from tests.support.gpus import FakeGpu, FakeGpus
from tests.support.machine import SimulatedMachine
from tests.support.searching import on_simulated_machines, simulated_result, simulated_run, simulated_search
from tests.support.simulation import SimulatedProbe
from tests.support.source import SimulatedSource
from tests.support.training import Training

__all__ = [
    "FakeClock",
    "FakeGpu",
    "FakeGpus",
    "SimulatedMachine",
    "SimulatedProbe",
    "SimulatedSource",
    "Training",
    "on_simulated_machines",
    "simulated_result",
    "simulated_run",
    "simulated_search",
]
