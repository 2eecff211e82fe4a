"""Evidence straight from a simulated machine: bursts as they are asked for, none run again, no pacing."""

from __future__ import annotations

from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from tests.support.machine import SimulatedMachine
from tests.support.simulation import Clock, SimulatedProbe


class SimulatedSource:
    """An `EvidenceSource` for tests of decisions.

    Args:
        machine: what is observed.
        clock: moves on by what each observation takes.
        seed: of the machine's noise.
        epoch_batches: batches of an epoch; None where it never ends.
    """

    def __init__(
        self, machine: SimulatedMachine, clock: Clock, *, seed: int = 0, epoch_batches: int | None = None
    ) -> None:
        self.probe = SimulatedProbe(machine, clock, seed=seed, epoch_batches=epoch_batches)

    def gather(self, config: LoaderConfig, ask: Ask) -> Evidence:
        whole = ask.kind == "epoch" and config.num_workers > 0
        outcome = self.probe.burst(config, BurstPlan(max_s=0.6, min_s=0.3, seed=ask.group, whole_epochs=whole))
        return Evidence(config=config, outcome=outcome, kind=ask.kind, phase=ask.phase, group=ask.group)
