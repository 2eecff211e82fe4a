"""Regret on hundreds of simulated machines: `python -m studies.regret.simulated [--machines 300]`.

Every strategy searches on the same simulated machine through the same `Probe` interface; the truth is the machine's own
long-run rate without noise. Simulated seconds are counted by the fake clock: bursts, worker start-up and the start of the
probe process (`START_S`) included. A rival that searches goes on until it has had so many times the seconds that
`autotune_loader` took on that machine (`PATIENCE`).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autotune_loader.search.space import Space
from autotune_loader.tuning.bursting import SEARCH_BURST
from autotune_loader.values import LoaderConfig, Measurement
from studies.regret import OURS, Outcome, table
from studies.regret.machines import oracle_of, random_machine
from studies.regret.strategies import LOOK, LOOK_WORKERS, STRATEGIES
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import START_S, simulated_run, simulated_search

WARM_UP_SD = 0.15
"""Relative standard deviation of what the first batch of a probe says of all others (its logarithm)."""
BUDGET_S = 60.0
# Rivals that search may take so many times our seconds; others end by themselves.
PATIENCE = {"random": 10.0, "tpe": 10.0, "grid": 20.0}


class SimulatedField:
    """A simulated machine to look on, by a probe that has to be started first."""

    def __init__(self, machine: SimulatedMachine, seed: int, limit_s: float) -> None:
        self.cores, self.counts, self.trials = machine.cores, Space().worker_counts(), None
        self.clock, self._limit_s, self._asked = FakeClock(), limit_s, 0
        self._probe = SimulatedProbe(machine, self.clock, seed=seed)

    def rate(self, config: LoaderConfig) -> float:
        self._start()
        outcome = self._probe.burst(config, replace(SEARCH_BURST, seed=self._asked))
        return outcome.samples_per_s.value if isinstance(outcome, Measurement) else 0.0

    def look(self) -> Measurement | None:
        self._start()
        seen = self._probe.burst(LoaderConfig(num_workers=LOOK_WORKERS), LOOK)
        return seen if isinstance(seen, Measurement) else None

    def is_over(self) -> bool:
        return self.clock() >= self._limit_s

    def _start(self) -> None:
        if not self._asked:
            self.clock.advance(START_S)
        self._asked += 1


def ours(machine: SimulatedMachine, seed: int) -> tuple[LoaderConfig, float]:
    """`tune()`, whose probe knows its first batch alone; the choice and its seconds."""
    clock, noise = FakeClock(), random.Random(seed + 7)
    clock.advance(START_S)
    off = math.exp(noise.gauss(0.0, WARM_UP_SD))
    warmup = {"first_fetch_s": (machine.cpu_s + machine.wait_s) * off, "first_fetch_cpu_s": machine.cpu_s * off}
    probe = SimulatedProbe(machine, clock, seed=seed)
    found = simulated_search(probe, simulated_run(machine, **warmup), clock, budget_s=BUDGET_S, started=0.0)
    outcome, fastest = found.outcome, found.fastest()
    assert fastest is not None
    return fastest.config if outcome is None else outcome.winner, clock()


def study_machine(seed: int, strategies: Sequence[str], kept: Path | None) -> list[Outcome]:
    """Every strategy on one machine."""
    kind, machine = random_machine(seed)
    oracle, outcomes, limit_s = oracle_of(seed, machine, kept), list[Outcome](), math.inf
    for name in strategies:
        if name == OURS:
            config, seconds = ours(machine, seed)
            limit_s = seconds
        else:
            field = SimulatedField(machine, seed, PATIENCE.get(name, 1.0) * limit_s)
            config, seconds = STRATEGIES[name](field, seed), field.clock()
        outcomes.append(
            Outcome(
                job=kind, strategy=name, seed=seed, cores=machine.cores, workers=config.num_workers,
                regret=oracle.regret(config), seconds=seconds,
            )
        )  # fmt: skip
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first machine")
    parser.add_argument("--strategies", default=",".join((OURS, *STRATEGIES)), help="by commas; ours comes first")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--oracles", type=Path, help="folder in which the true rates are kept from run to run")
    options = parser.parse_args()
    begun, names, seeds = time.monotonic(), options.strategies.split(","), range(options.machines)
    with multiprocessing.Pool(options.processes) as pool:
        jobs = [(options.first + number, names, options.oracles) for number in seeds]
        found = [each for outcomes in pool.starmap(study_machine, jobs, chunksize=2) for each in outcomes]
    print(table(found))
    for kind in sorted({each.job for each in found}):
        print(f"\n{kind}\n" + table([each for each in found if each.job == kind]))
    for cores in sorted({each.cores for each in found}):
        print(f"\n{cores} cores\n" + table([each for each in found if each.cores == cores]))
    print(f"\n{options.machines} machines in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
