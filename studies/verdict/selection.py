"""How often are the intervals of a chosen configuration right?

    python -m studies.verdict.selection [--runs 20000]        # simulated bursts, no machine needed
    python -m studies.verdict.selection --real 200            # real bursts of one configuration that runs under five names

The winner is chosen by the rounds that report it, so that its rate, and its ratio to the baseline, were lucky in them. Races of
the package itself (`decision.race`) run between a baseline and some rivals, with beliefs and without:

    equal    all are as fast as the baseline: whoever is called faster than it is not
    apart    their rates scatter by 3 %, so that the choice is one

Asked is how often the 95 % interval of the winner's rate holds its true rate, how far its middle is off on average, how often a
rival wins, and how often a winner that is no faster is claimed to be. Simulated bursts scatter by a normal or by a heavy-tailed
noise, beside a drift that all bursts of a round share. Of real ones the true rate is not known, only that all are equal.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.posterior import MODEL_SD, TYPICAL_NOISE, Posterior, Seen
from autotune_loader.decision.race import Race, RaceOutcome, RaceRules
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.probe.protocol import Probe
from autotune_loader.report.units import is_claimed
from autotune_loader.tuning.burst_source import FINAL_BURST
from autotune_loader.tuning.finals import FINALS_PATIENCE_S, run_rounds
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval
from studies.workloads import WORKLOADS, workload_of
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

TOLERANCE = 0.02
BURST_S, BUDGET_S = 0.7, 30.0
DRIFT_SD = 0.01
"""Relative standard deviation of what all bursts of a round share."""
APART_SD = 0.03
HEAVY_FREEDOM = 3.0
HEADER = (
    "rivals",
    "rates",
    "noise of a burst",
    "beliefs",
    "rate covered",
    "half width",
    "off by",
    "ratio covered",
    "rival won",
    "false claims",
    "rounds",
)
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
    believes: bool

    def __str__(self) -> str:
        tail = ", heavy tails" if self.is_heavy else ""
        return f"{self.rivals} | {self.truth} | {self.noise_sd:.0%}{tail} | {'yes' if self.believes else 'no'}"


KINDS = tuple(
    Kind(rivals=rivals, truth=truth, noise_sd=noise, is_heavy=heavy, believes=believes)
    for rivals, truth, (noise, heavy), believes in itertools.product(
        (1, 4), ("equal", "apart"), ((0.03, False), (0.06, False), (0.03, True)), (False, True)
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one race said, beside the truth."""

    is_covered: bool
    """Whether the interval of the winner's rate holds its true rate."""
    error: float
    """Reported over true rate, minus one."""
    width: float
    """Half of that interval, relatively."""
    ratio_covered: bool
    """The same of its ratio to the baseline; also where the winner is the baseline."""
    rival_won: bool
    is_false: bool
    """Whether a winner that is no faster than the baseline is claimed to be."""
    rounds: int


@cache
def _shape() -> Measurement:
    burst = SimulatedProbe(SimulatedMachine(), FakeClock()).burst(LoaderConfig(), BurstPlan(max_s=0.3, min_s=0.1))
    assert isinstance(burst, Measurement)
    return replace(burst, traces=())


class _Bursts:
    """Simulated bursts of configurations whose true rates are known."""

    def __init__(self, kind: Kind, seed: int) -> None:
        self.kind, self.rng = kind, random.Random(seed)
        self.configs = [LoaderConfig(num_workers=count) for count in range(kind.rivals + 1)]
        spread = APART_SD if kind.truth == "apart" else 0.0
        self.truth = {config: 1000.0 * math.exp(self.rng.gauss(0.0, spread)) for config in self.configs}
        self.seen: list[tuple[int, float, float]] = []
        """Configuration, logarithm of the rate, and the drift that its round shares."""

    def rate(self, config: LoaderConfig, drift: float) -> float:
        noise = self.rng.gauss(0.0, 1.0)
        if self.kind.is_heavy:
            # Student's t of variance 1.
            squares = self.rng.gammavariate(HEAVY_FREEDOM / 2, 2.0)
            noise /= math.sqrt(squares / HEAVY_FREEDOM) * math.sqrt(HEAVY_FREEDOM / (HEAVY_FREEDOM - 2))
        rate = self.truth[config] * math.exp(drift + self.kind.noise_sd * noise)
        self.seen.append((self.configs.index(config), math.log(rate), drift))
        return rate

    def measured(self, config: LoaderConfig, drift: float) -> Measurement:
        rate = self.rate(config, drift)
        return replace(_shape(), samples_per_s=Interval(value=rate, low=0.97 * rate, high=1.03 * rate, count=20))

    def beliefs(self) -> Callable[[], Posterior | None]:
        """A twin that is off by what it may be off, one burst of each, and every round so far."""
        if not self.kind.believes:
            return lambda: None
        size = len(self.configs)
        prior = Posterior(
            configs=tuple(self.configs),
            mean=np.array([math.log(self.truth[config]) + self.rng.gauss(0.0, MODEL_SD) for config in self.configs]),
            covariance=MODEL_SD**2 * np.eye(size),
            noise_sd=self.kind.noise_sd,
        )
        for config in self.configs:
            self.rate(config, self.rng.gauss(0.0, DRIFT_SD))
        known: dict[int, Posterior] = {}

        def believe() -> Posterior:
            count = len(self.seen)
            if count not in known:
                where, logs, drifts = (np.array(each) for each in zip(*self.seen, strict=True))
                rounds = np.unique(drifts, return_inverse=True)[1]
                known.clear()
                known[count] = prior.after(Seen(where=where, logs=logs, variances=np.zeros(count), rounds=rounds))
            return known[count]

        return believe


RULES = RaceRules(
    tolerance=TOLERANCE, cost=lambda config: (config.num_workers,), patience_s=FINALS_PATIENCE_S, noise_sd=TYPICAL_NOISE
)


def race(kind: Kind, seed: int) -> Run:
    """One race, from the first round until nobody runs any more."""
    bursts = _Bursts(kind, seed)
    baseline, rivals = bursts.configs[0], bursts.configs[1:]
    running, left_s = Race(list(reversed(rivals)), baseline, RULES, bursts.beliefs()), BUDGET_S
    while configs := running.next_round(left_s):
        drift = bursts.rng.gauss(0.0, DRIFT_SD)
        running.record([(config, bursts.measured(config, drift)) for config in configs], BURST_S * len(configs))
        left_s -= BURST_S * len(configs)
    found = running.outcome()
    assert found is not None
    true, ratio = bursts.truth[found.winner], bursts.truth[found.winner] / bursts.truth[baseline]
    return Run(
        is_covered=found.rate.low <= true <= found.rate.high,
        error=found.rate.value / true - 1,
        width=(found.rate.high - found.rate.low) / 2 / found.rate.value,
        ratio_covered=found.speedup is None or found.speedup.low <= ratio <= found.speedup.high,
        rival_won=found.winner != baseline,
        is_false=_claims(found, baseline) and ratio <= 1,
        rounds=len(found.rounds),
    )


def _claims(found: RaceOutcome, baseline: LoaderConfig) -> bool:
    return found.winner != baseline and found.speedup is not None and is_claimed(found.speedup)


class _OneConfig:
    """An `EvidenceSource` that runs the same configuration, whatever it is asked for."""

    def __init__(self, probe: Probe, config: LoaderConfig, first_seed: int) -> None:
        self.probe, self.config, self.first_seed = probe, config, first_seed

    def gather(self, config: LoaderConfig, ask: Ask) -> Evidence:
        plan = replace(FINAL_BURST, seed=self.first_seed + ask.group)
        return Evidence(config=config, outcome=self.probe.burst(self.config, plan), phase="compare", group=ask.group)


def real(count: int, workload: str, rivals: int = 4) -> None:
    """Races of real bursts in which all are the same configuration: whoever is called faster is not."""
    names = [LoaderConfig(num_workers=number) for number in range(rivals + 1)]
    won = claimed = 0
    with open_probe(workload_of(WORKLOADS[workload]()), inspect_machine(), "process", None) as opened:
        for number in range(count):
            running, begun = Race(list(reversed(names[1:])), names[0], RULES), time.monotonic()
            source = _OneConfig(opened.probe, LoaderConfig(num_workers=1), first_seed=1000 * number)
            found = run_rounds(running, source, seconds_left=lambda: BUDGET_S - (time.monotonic() - begun), seed=number)  # noqa: B023
            assert found is not None
            won, claimed = won + (found.winner != names[0]), claimed + _claims(found, names[0])
            print(
                f"{number + 1}: {len(found.rounds)} rounds, {time.monotonic() - begun:.0f} s, speed-up {found.speedup}; "
                f"so far a rival won {won} times and was called faster {claimed} times",
                flush=True,
            )


def row(kind: Kind, runs: list[Run]) -> str:
    def share(of: Callable[[Run], bool]) -> float:
        return sum(map(of, runs)) / len(runs)

    errors = sum(each.error for each in runs) / len(runs)
    width = float(np.median([each.width for each in runs]))
    rounds = float(np.median([each.rounds for each in runs]))
    return (
        f"| {kind} | {share(lambda each: each.is_covered):.1%} | {width:.1%} | {errors:+.1%} "
        f"| {share(lambda each: each.ratio_covered):.1%} | {share(lambda each: each.rival_won):.1%} "
        f"| {share(lambda each: each.is_false):.2%} | {rounds:.0f} |"
    )


def _chunk(job: tuple[Kind, int, int]) -> list[Run]:
    kind, first, count = job
    return [race(kind, seed) for seed in range(first, first + count)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.verdict.selection", description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000, help="races in all, over every kind")
    parser.add_argument("--first", type=int, default=0, help="seed of the first race of each kind")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--real", type=int, default=0, help="races of real bursts instead, about 10 s each")
    parser.add_argument("--workload", default="cpu_bound", choices=tuple(WORKLOADS), help="of the real bursts")
    chosen = parser.parse_args()
    if chosen.real:
        real(chosen.real, chosen.workload)
        return
    count = chosen.runs // len(KINDS)
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    found: list[Run] = []
    with multiprocessing.Pool(chosen.processes) as pool:
        everything = pool.imap(_chunk, [(kind, chosen.first, count) for kind in KINDS])
        for kind, runs in zip(KINDS, everything, strict=True):
            print(row(kind, runs), flush=True)
            found += runs
    covered = sum(run.is_covered for run in found) / len(found)
    false = sum(run.is_false for run in found) / len(found)
    print(
        f"\nrate covered in {covered:.1%} of {len(found)} (goal {GOAL_COVERED:.0%}), "
        f"false claims {false:.2%} (goal {GOAL_FALSE:.0%})"
    )


if __name__ == "__main__":
    main()
