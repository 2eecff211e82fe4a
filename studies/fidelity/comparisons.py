"""How often do comparisons lie? A/A and known-difference trials: false wins, power and coverage.

    python -m studies.fidelity.comparisons                        # simulated, and real bursts
    python -m studies.fidelity.comparisons --real 0               # simulated alone: no machine needed

A comparison runs interleaved rounds and is looked at after each of them, as the finals do: it ends with a verdict or
after `MAX_ROUNDS`. Simulated noise is log-normal with 3 % per burst. Real bursts are of loaders that wait 4 ms per
sample, and of others that wait a known 2 % or 10 % longer; sleeps are exact to about 0.1 ms per batch.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.probe.protocol import Probe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import MAX_ROUNDS, Interval, mean_interval
from studies.fidelity.measure import workload_of
from studies.fidelity.records import RESULTS, append, read
from studies.fidelity.sequential import sequential_interval, sequential_verdict
from studies.quiet import QuietTurns
from studies.workloads import AccelStep, SleepDataset, StudyWorkload
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

NOISE_SD = 0.03
"""Log-sd of one simulated burst; a paired log-ratio has the square root of two of it."""
MARGIN = 0.02
DIFFERENCES = (0.0, 0.02, 0.10)
MOST_REAL_ROUNDS = 14
WAIT_S = 0.004
CONFIG = LoaderConfig(num_workers=2, prefetch_factor=2)
RAW = RESULTS / "comparisons.jsonl"

NextRound = Callable[[int], float]
"""ln(candidate / reference) of the round with this number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one comparison ended."""

    difference: float
    """By how much the candidate is truly faster."""
    verdict: str
    rounds: int
    interval: Interval
    """95 %, valid under repeated looks, when it ended."""

    @property
    def is_covered(self) -> bool:
        return self.interval.low <= 1 + self.difference <= self.interval.high


def compare(next_round: NextRound, difference: float, most_rounds: int = MAX_ROUNDS) -> Outcome:
    """Run rounds until there is a verdict."""
    logs: list[float] = []
    verdict = "undecided"
    while verdict == "undecided" and len(logs) < most_rounds:
        logs.append(next_round(len(logs)))
        verdict = sequential_verdict(logs, MARGIN, final=len(logs) == most_rounds)
    interval = sequential_interval(logs, final=len(logs) == most_rounds)
    return Outcome(difference=difference, verdict=verdict, rounds=len(logs), interval=interval)


def simulated(count: int, difference: float, seed: int) -> list[Outcome]:
    """Comparisons of log-normal bursts."""
    rng = random.Random(seed)

    def next_round(number: int) -> float:
        return math.log1p(difference) + rng.gauss(0.0, NOISE_SD) - rng.gauss(0.0, NOISE_SD)

    return [compare(next_round, difference) for _ in range(count)]


def burst_coverage(count: int) -> tuple[int, float]:
    """Share of simulated bursts whose interval holds the true rate, over machines with other bottlenecks and tails."""
    rng, covered = random.Random(0), 0
    probes = [
        SimulatedProbe(machine, FakeClock())
        for machine in (
            SimulatedMachine(cpu_s=0.04, step_s=0.005),
            SimulatedMachine(cpu_s=0.002, wait_s=0.03, service_cv=0.3, step_s=0.004),
            SimulatedMachine(cpu_s=0.004, wait_s=0.01, service_cv=0.5, step_s=0.002),
            SimulatedMachine(cpu_s=0.01, step_s=0.03, step_cv=0.1),
        )
    ]
    for number in range(count):
        config = LoaderConfig(num_workers=rng.choice((1, 2, 4, 6)), prefetch_factor=rng.choice((2, 4)))
        probe = probes[number % len(probes)]
        measured = probe.burst(config, BurstPlan(max_s=1.0, min_s=0.4, relative_error=0.01, seed=number))
        assert not isinstance(measured, Failure)
        from autotune_loader.pipeline.throughput import summarise

        rate = summarise(measured.traces, workers=config.num_workers, started=0.0).samples_per_s
        covered += rate.low <= probe.truth(config) <= rate.high
    return count, covered / max(1, count)


def real(counts: Sequence[int], quiet: QuietTurns) -> list[Outcome]:
    """Comparisons of real bursts: the reference waits `difference` longer than the candidate."""
    outcomes = []
    order = random.Random(0)
    with contextlib.ExitStack() as stack:
        fast = stack.enter_context(open_probe(_workload(WAIT_S), inspect_machine(), "process", None)).probe
        slow = {
            difference: stack.enter_context(
                open_probe(_workload(WAIT_S * (1 + difference)), inspect_machine(), "process", None)
            ).probe
            for difference in DIFFERENCES
        }
        wanted = [d for d, count in zip(DIFFERENCES, counts, strict=True) for _ in range(count)]
        order.shuffle(wanted)
        stack.enter_context(quiet.turns())
        for difference in wanted:
            outcome = compare(_real_round(fast, slow[difference], order), difference, MOST_REAL_ROUNDS)
            outcomes.append(outcome)
            interval = {"value": outcome.interval.value, "low": outcome.interval.low, "high": outcome.interval.high}
            record = {"difference": difference, "verdict": outcome.verdict, "rounds": outcome.rounds}
            append(RAW, {**record, "interval": interval, "at": time.time()})
            quiet.next()
    return outcomes


def _workload(wait_s: float) -> object:
    return workload_of(
        StudyWorkload(
            name="known",
            dataset=SleepDataset(4096, median_s=wait_s, sigma=0.2),
            model=nn.Identity(),
            train_step=AccelStep(0.002),
            batch_size=8,
            description="waits, and nothing else",
            kind="wait",
        )
    )


def _real_round(fast: Probe, slow: Probe, order: random.Random) -> NextRound:
    start = order.randrange(1 << 20)

    def next_round(number: int) -> float:
        plan = BurstPlan(max_s=1.0, min_s=0.4, relative_error=0.01, seed=start + number)
        rates = {}
        for name, probe in order.sample([("fast", fast), ("slow", slow)], 2):
            measured = probe.burst(CONFIG, plan)
            assert not isinstance(measured, Failure), measured
            rates[name] = measured.samples_per_s.value
        return math.log(rates["fast"] / rates["slow"])

    return next_round


def show(title: str, outcomes: Sequence[Outcome]) -> None:
    """One line per true difference."""
    for difference in sorted({outcome.difference for outcome in outcomes}):
        of = [outcome for outcome in outcomes if outcome.difference == difference]
        shares = {verdict: sum(o.verdict == verdict for o in of) / len(of) for verdict in ("faster", "slower", "tie")}
        rounds = mean_interval([float(o.rounds) for o in of]).value
        covered = sum(o.is_covered for o in of) / len(of)
        print(
            f"{title:10} true {difference:4.0%}  n={len(of):5}  faster {shares['faster']:6.1%}  "
            f"slower {shares['slower']:6.1%}  tie {shares['tie']:6.1%}  covered {covered:6.1%}  rounds {rounds:5.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.comparisons")
    parser.add_argument("--simulated", type=int, default=2000, help="comparisons per true difference")
    parser.add_argument("--bursts", type=int, default=400, help="simulated bursts for the coverage of a single rate")
    parser.add_argument("--real", type=int, default=48, help="comparisons of real bursts, over all differences")
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    chosen = parser.parse_args()
    for seed, difference in enumerate(DIFFERENCES):
        show("simulated", simulated(chosen.simulated, difference, seed))
    count, share = burst_coverage(chosen.bursts)
    print(f"rate of one simulated burst: n={count}, covered {share:.1%}")
    if chosen.real:
        third = chosen.real // 3
        show("real", real((chosen.real - 2 * third, third, third), QuietTurns(chosen.lock)))
        print(f"{sum(1 for _ in read(RAW))} real comparisons are kept in {RAW.name}")


if __name__ == "__main__":
    main()
