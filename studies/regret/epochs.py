"""Regret where epochs are short, on simulated machines: `python -m studies.regret.epochs [--machines 300]`.

The machines of `studies.regret.simulated`, on which an epoch has 4 to 256 batches; the search may keep workers from epoch to
epoch, and finals of whole epochs decide where epochs are short. The truth is the machine's rate over many whole epochs.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
from dataclasses import replace
from itertools import pairwise

from autotune_loader.decision.space import Space
from autotune_loader.values.config import LoaderConfig
from studies.regret import OURS
from studies.regret.machines import TRUTH_BATCHES, Oracle, random_machine, space_of
from studies.regret.simulated import Outcome, by_search, table
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

LEAST_BATCHES, MOST_BATCHES = 4, 256
BUDGET_S = 60.0
# Seconds of an epoch at best, by which the outcomes are grouped.
EPOCH_LENGTHS_S = (0.0, 0.25, 1.0, math.inf)


def machine_with_epochs(seed: int) -> tuple[str, SimulatedMachine, Space, int]:
    """What a workload does on which machine, what may be searched there, and how many batches an epoch has."""
    kind, machine = random_machine(seed)
    batches = round(math.exp(random.Random(~seed).uniform(math.log(LEAST_BATCHES), math.log(MOST_BATCHES))))
    space = space_of(kind, machine)
    most = min(space.max_workers, batches)
    return kind, machine, replace(space, max_workers=most, may_keep_workers=True), batches


class EpochOracle(Oracle):
    """The rate of each configuration over whole epochs, by workers that persist, without noise, drift and spikes."""

    def __init__(self, machine: SimulatedMachine, space: Space, epoch_batches: int) -> None:
        self._probe = SimulatedProbe(machine, FakeClock(), epoch_batches=epoch_batches)
        super().__init__(machine, space)
        self.epoch_s = epoch_batches * machine.batch_size / self._truths[self.fastest]

    def regret(self, config: LoaderConfig) -> float:
        """1 - rate / the best rate there is, with workers that persist or not, as the configuration has them."""
        return max(0.0, 1 - self._over_epochs(config, TRUTH_BATCHES) / self._truths[self.fastest])

    def _run(self, config: LoaderConfig, batches: int) -> float:
        return self._over_epochs(replace(config, persistent_workers=config.num_workers > 0), batches)

    def _over_epochs(self, config: LoaderConfig, batches: int) -> float:
        return self._probe.truth_of_epochs(config, epochs=math.ceil(batches / (self._probe.epoch_batches or 1)))


def study_machine(seed: int) -> tuple[Outcome, float]:
    """What our search makes of one machine, and the seconds of an epoch there at best."""
    kind, machine, space, batches = machine_with_epochs(seed)
    oracle = EpochOracle(machine, space, batches)
    chosen = by_search("auto", BUDGET_S, epoch_batches=batches)(machine, space, kind, seed, math.inf)
    outcome = Outcome(
        machine=seed,
        kind=kind,
        cores=machine.cores,
        strategy=OURS,
        regret=oracle.regret(chosen.config),
        seconds=chosen.seconds,
        workers=chosen.config.num_workers,
        fastest_workers=oracle.fastest.num_workers,
        fewest_workers=oracle.fewest_workers(),
    )
    return outcome, oracle.epoch_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.regret.epochs", description=__doc__)
    parser.add_argument("--machines", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first machine")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    chosen = parser.parse_args()
    seeds = range(chosen.first, chosen.first + chosen.machines)
    with multiprocessing.Pool(chosen.processes) as pool:
        studied = pool.map(study_machine, seeds, chunksize=2)
    for low_s, high_s in ((0.0, math.inf), *pairwise(EPOCH_LENGTHS_S)):
        outcomes = [outcome for outcome, epoch_s in studied if low_s <= epoch_s < high_s]
        if outcomes:
            print(f"\nepochs of {low_s:g} to {high_s:g} s\n{table(outcomes)}")


if __name__ == "__main__":
    main()
