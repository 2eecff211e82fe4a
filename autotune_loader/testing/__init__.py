"""Stand-ins for tests, shipped so that users' tests can have them too: a simulated machine, a replayed record, fakes.

Nothing here starts a process or sleeps. It may import from any room; no room imports it.
"""

from autotune_loader.testing.clock import FakeClock
from autotune_loader.testing.gpus import (
    FakeGpu,
    FakeGpus,
    NVMLError,
    NVMLErrorLibraryNotFound,
    NVMLErrorNotSupported,
)
from autotune_loader.testing.machine import SimulatedMachine
from autotune_loader.testing.replay import ReplayProbe
from autotune_loader.testing.searching import simulated_result
from autotune_loader.testing.simulation import Clock, SimulatedProbe
from autotune_loader.testing.source import SimulatedSource
from autotune_loader.testing.training import SimulatedTraining

__all__ = [
    "Clock",
    "FakeClock",
    "FakeGpu",
    "FakeGpus",
    "NVMLError",
    "NVMLErrorLibraryNotFound",
    "NVMLErrorNotSupported",
    "ReplayProbe",
    "SimulatedMachine",
    "SimulatedProbe",
    "SimulatedSource",
    "SimulatedTraining",
    "simulated_result",
]
