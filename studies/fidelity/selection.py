"""How often are the intervals of a chosen configuration right? `python -m studies.fidelity.selection [--runs 20000]`

The winner is chosen by the rounds that report it, so that its rate, and its ratio to the baseline, were lucky in them. Rounds
of the package itself (`search.rounds`) run between a baseline and some rivals, on simulated bursts that scatter by a normal or
by a heavy-tailed noise, beside a drift that all bursts of a round share:

    equal    all are as fast as the baseline: whoever is called faster than it is not
    apart    their rates scatter by 3 %, so that the choice is one

Asked is how often the 95 % interval of the winner's rate holds its true rate, how far its middle is off on average, how often a
rival wins, and how often a winner that is no faster is claimed to be.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autotune_loader.diagnosis.units import is_claimed
from autotune_loader.search.rounds import Rounds
from autotune_loader.values import Interval, LoaderConfig, Measurement
from tests.support import SimulatedMachine, simulated_trials

TOLERANCE = 0.02
BURST_S, BUDGET_S = 0.7, 30.0
DRIFT_SD = 0.01
"""Relative standard deviation of what all bursts of a round share."""
APART_SD = 0.03
HEAVY_FREEDOM = 3.0
COLUMNS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "rate covered": ("{:.1%}", statistics.fmean),
    "half width": ("{:.1%}", statistics.median),
    "off by": ("{:+.1%}", statistics.fmean),
    "ratio covered": ("{:.1%}", statistics.fmean),
    "rival won": ("{:.1%}", statistics.fmean),
    "false claims": ("{:.2%}", statistics.fmean),
    "rounds": ("{:.0f}", statistics.median),
}
GOAL_COVERED, GOAL_FALSE = 0.94, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of race."""

    rivals: int
    truth: str
    """`equal` or `apart`."""
    noise_sd: float
    """Relative standard deviation of a burst."""
    is_heavy: bool

    def __str__(self) -> str:
        tail = ", heavy tails" if self.is_heavy else ""
        return f"{self.rivals} | {self.truth} | {self.noise_sd:.0%}{tail}"


KINDS = tuple(
    Kind(rivals=rivals, truth=truth, noise_sd=noise, is_heavy=heavy)
    for rivals, truth, (noise, heavy) in itertools.product(
        (1, 4), ("equal", "apart"), ((0.03, False), (0.06, False), (0.03, True))
    )
)


SHAPE: Any = simulated_trials(SimulatedMachine(), LoaderConfig())[0].measurement


class _Bursts:
    """Simulated bursts of configurations whose true rates are known."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.rng = kind, random.Random(seed)
        self.configs = [LoaderConfig(num_workers=count) for count in range(kind.rivals + 1)]
        spread = APART_SD if kind.truth == "apart" else 0.0
        self.truth = {config: 1000.0 * math.exp(self.rng.gauss(0.0, spread)) for config in self.configs}

    def measured(self, config: LoaderConfig, drift: float) -> Measurement:
        noise = self.rng.gauss(0.0, 1.0)
        if self.kind.is_heavy:
            # Student's t of variance 1.
            squares = self.rng.gammavariate(HEAVY_FREEDOM / 2, 2.0)
            noise /= math.sqrt(squares / HEAVY_FREEDOM) * math.sqrt(HEAVY_FREEDOM / (HEAVY_FREEDOM - 2))
        rate = self.truth[config] * math.exp(drift + self.kind.noise_sd * noise)
        interval = Interval(value=rate, low=0.97 * rate, high=1.03 * rate, count=20)
        return replace(SHAPE, samples_per_s=interval, traces=())


Run = Mapping[str, float]
"""By the names of `COLUMNS`."""


def race(kind: Kind, seed: int) -> Run:
    """One race, from the first round until nobody runs any more: what it said, beside the truth."""
    bursts = _Bursts(kind, seed)
    baseline, rivals = bursts.configs[0], bursts.configs[1:]
    running = Rounds(list(reversed(rivals)), baseline, tolerance=TOLERANCE, cost=lambda config: (config.num_workers,))
    left_s = BUDGET_S
    while configs := running.entrants(left_s):
        drift = bursts.rng.gauss(0.0, DRIFT_SD)
        running.record([(config, bursts.measured(config, drift)) for config in configs], BURST_S * len(configs))
        left_s -= BURST_S * len(configs)
    found = running.outcome()
    assert found is not None
    true, ratio = bursts.truth[found.winner], bursts.truth[found.winner] / bursts.truth[baseline]
    is_claimed_faster = found.winner != baseline and found.speedup is not None and is_claimed(found.speedup)
    return {
        "rate covered": found.rate.low <= true <= found.rate.high,
        "half width": (found.rate.high - found.rate.low) / 2 / found.rate.value,
        "off by": found.rate.value / true - 1,
        "ratio covered": found.speedup is None or found.speedup.low <= ratio <= found.speedup.high,
        "rival won": found.winner != baseline,
        "false claims": is_claimed_faster and ratio <= 1,
        "rounds": len(found.rounds),
    }


def row(kind: Kind, runs: Sequence[Run]) -> str:
    cells = [form.format(of([run[name] for run in runs])) for name, (form, of) in COLUMNS.items()]
    return f"| {' | '.join([str(kind), *cells])} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.selection", description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000, help="races in all, over every kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first race of each kind")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    names = ("rivals", "rates", "noise of a burst", *COLUMNS)
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    found: list[Run] = []
    seeds = range(chosen.first, chosen.first + chosen.runs // len(KINDS))
    with multiprocessing.Pool(chosen.processes) as pool:
        for kind in KINDS:
            runs = pool.map(partial(race, kind), seeds, chunksize=100)
            print(row(kind, runs), flush=True)
            found += runs
    covered, false = (statistics.fmean(run[name] for run in found) for name in ("rate covered", "false claims"))
    print(
        f"\nrate covered in {covered:.1%} of {len(found)} (goal {GOAL_COVERED:.0%}), "
        f"false claims {false:.2%} (goal {GOAL_FALSE:.0%})"
    )


if __name__ == "__main__":
    main()
