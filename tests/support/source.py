"""Evidence straight from a simulated machine: bursts as they are asked for, none run again, no pacing."""

from __future__ import annotations

from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from tests.support.clock import FakeClock
from tests.support.machine import SimulatedMachine
from tests.support.simulation import SimulatedProbe


class SimulatedSource:
    """An `EvidenceSource` for tests of decisions."""

    def __init__(self, machine: SimulatedMachine, clock: FakeClock) -> None:
        self.probe = SimulatedProbe(machine, clock)

    def gather(self, config: LoaderConfig, ask: Ask) -> Evidence:
        outcome = self.probe.burst(config, BurstPlan(max_s=0.6, min_s=0.3, seed=ask.group))
        return Evidence(config=config, outcome=outcome, kind=ask.kind, phase=ask.phase, group=ask.group)
