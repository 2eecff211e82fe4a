"""Stand-ins for tests and studies: a simulated machine, fakes.

Nothing here starts a process or sleeps.
"""

from tests.support.clock import FakeClock
from tests.support.gpus import FakeGpu, FakeGpus
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe

__all__ = [
    "FakeClock",
    "FakeGpu",
    "FakeGpus",
    "SimulatedMachine",
    "SimulatedProbe",
]
