"""What does each part of AutoLoader's deciding bring, on simulated machines whose best configuration is known?

    python -m studies.live.simulated                 # 40 machines of 2 to 16 cores, about five minutes of one core

Each machine trains for a simulated minute, from 2 workers. "rule" tries what the plain rule says and no workers where these are
not ruled out; "+ twin" goes on with what the policy of `decision` proposes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

from autotune_loader.live.budgets import PREFETCH_FACTORS
from autotune_loader.live.prospects import Job, Prospects
from autotune_loader.live.tuner import Tuner

from autotune_loader.decision.space import Space
from autotune_loader.values.config import LoaderConfig
from studies.regret.machines import random_machine
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, SimulatedTraining

CORES = (2, 2, 4, 4, 8, 16)
START = LoaderConfig(num_workers=2)
TRUTH_BATCHES = 600
MISSED = 0.05


def rule_only(prospects: Prospects) -> Iterator[LoaderConfig]:
    """In place of the proposals: what the plain rule says, and no workers."""
    seen, rule = {each.key for each in prospects.beliefs.log}, prospects.beliefs.plain_rule()
    for config in PROPOSALS(prospects):
        if config.key() == rule or config.num_workers == 0:
            yield config
    if rule is not None and rule not in seen and len(seen) == 1:
        yield rule


PROPOSALS = Prospects._proposals
ARMS = {"rule": rule_only, "+ twin": PROPOSALS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run; shares are of the best fixed configuration."""

    final: float
    missed: float
    """By how much what it holds at the end is slower than the best of what it observed, by their true rates."""
    whole: float
    settled_s: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes: dict[str, list[Outcome]] = {arm: [] for arm in ARMS}
    for seed in range(options.seed, options.seed + options.machines):
        kind, machine = random_machine(seed, CORES)
        truth = Truth(machine)
        for arm, proposals in ARMS.items():
            with mock.patch.object(Prospects, "_proposals", proposals):
                outcomes[arm].append(run(machine, truth, 60.0, seed))
        shares = "  ".join(f"{arm} {each[-1].final:.3f}/{each[-1].whole:.3f}" for arm, each in outcomes.items())
        print(f"{seed:4} {kind:10} {machine.cores:3} cores  best {truth.name:26} {shares}", flush=True)
    for arm, each in outcomes.items():
        print(row(arm, each))
    return 0


class Truth:
    """The long-run rates of a machine."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._probe = SimulatedProbe(machine, FakeClock())
        most = min(64, max(4, round(8 * machine.cores)))
        wall = (machine.cpu_s + machine.wait_s) / machine.step_s
        most = max(2, min(most, round(2 * wall) + 3))
        configs = Space(max_workers=most, prefetch_factors=(2, 8)).configs()
        best = max(configs, key=self.rate)
        self.best, self.name = self.rate(best), str(best)

    def rate(self, config: LoaderConfig) -> float:
        return self._probe.truth(config.key(), batches=TRUTH_BATCHES)


def run(machine: SimulatedMachine, truth: Truth, seconds: float, seed: int) -> Outcome:
    """A training run of so many seconds that begins with two workers."""
    machine, clock = replace(machine, drift_per_hour=0.0), FakeClock()
    training = SimulatedTraining(machine, clock, START, seed=seed)
    tuner = Tuner(
        training,
        Job(start=START, usable_cores=machine.cores),
        lambda most: Space(max_workers=most, prefetch_factors=PREFETCH_FACTORS),
        clock=clock,
        cpu_clock=lambda: clock() * machine.step_cores,
    )
    wake, samples = 0.0, 0
    while clock() < seconds:
        if clock() >= wake:
            wake = tuner.look(clock())
        samples += training.train().samples
    settled = [event.seconds for event in tuner.history if event.kind == "settled"]
    observed = [truth.rate(event.config) for event in tuner.history if event.kind == "block"]
    final = truth.rate(training.config)
    return Outcome(
        final=final / truth.best,
        missed=max(0.0, 1.0 - final / max(observed, default=final)),
        whole=samples / clock() / truth.best,
        settled_s=settled[0] if settled else None,
    )


def row(arm: str, outcomes: list[Outcome]) -> str:
    finals, wholes = sorted(each.final for each in outcomes), [each.whole for each in outcomes]
    settled = sorted(each.settled_s if each.settled_s is not None else 60.0 for each in outcomes)
    return (
        f"| {arm} | {statistics.fmean(finals):.1%}, least {finals[0]:.0%}, {sum(f >= 0.98 for f in finals)} of {len(finals)} "
        f">= 98 % | {statistics.fmean(wholes):.1%} | {statistics.median(settled):.0f} s, p90 "
        f"{settled[int(0.9 * len(settled))]:.0f} s | {max(each.missed for each in outcomes):.0%} missed at most, "
        f"{sum(each.missed > MISSED for each in outcomes)} over {MISSED:.0%} |"
    )


if __name__ == "__main__":
    sys.exit(main())
