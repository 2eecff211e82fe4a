"""Stand-ins for tests and studies: a simulated machine, fakes.

Nothing here starts a process or sleeps.
"""

from tests.support.simulation import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import (
    on_simulated_machines,
    simulated_result,
    simulated_trials,
    with_workers,
)

__all__ = [
    "FakeClock", "SimulatedMachine", "SimulatedProbe", "on_simulated_machines", "simulated_result",
    "simulated_trials", "with_workers",
]  # fmt: skip
