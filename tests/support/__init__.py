"""Stand-ins for tests and studies: a simulated machine, fakes.

Nothing here starts a process or sleeps.
"""

from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe
from tests.support.training import Training
from tests.support.tuned import on_simulated_machines, simulated_result, simulated_run, simulated_search

__all__ = [
    "FakeClock",
    "SimulatedMachine",
    "SimulatedProbe",
    "Training",
    "on_simulated_machines",
    "simulated_result",
    "simulated_run",
    "simulated_search",
]
