"""How well does a burst of a few rounds of the workers read the rate in the long run?

    python -m studies.fidelity.few_rounds

Simulated machines without noise, so that all error is the burst's own: workers that hold the loop up, windows of two rounds
and more. "consumed" is what a stopwatch around the loop reads, its ends averaged over a round; "as measured" is what a burst
reports, pooled with what the workers made. The truth is a run of thousands of batches. Takes half a minute, anywhere.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autotune_loader.config import LoaderConfig
from autotune_loader.stats import correlated_mean_interval
from autotune_loader.testing import FakeClock, SimulatedMachine, SimulatedProbe
from autotune_loader.trial import BurstPlan, Measurement
from studies.regret.machines import random_machine

MACHINES = range(2000, 2120)
KINDS = ("cpu", "mixed")
PREFETCH = (2, 8)
ROUNDS = (2.0, 4.5)
SEEDS = range(4)
MOST_WORKERS = 64
# The loop waits for at least this share of the time, or the workers do not hold it up.
LEAST_WAIT_SHARE = 0.1
BINS = ((1.0, 2.5), (2.5, 5.0), (5.0, 12.0), (12.0, math.inf))


@dataclass(frozen=True, slots=True)
class Reading:
    """One burst: rounds in its window, and both rates over the truth."""

    rounds: float
    consumed: float
    measured: float
    is_covered: bool


def readings(seed: int) -> list[Reading]:
    """Bursts of half as many workers as cores, and of as many, on one machine."""
    kind, machine = random_machine(seed)
    if kind not in KINDS:
        return []
    machine = replace(machine, noise_sd=1e-9, spike_share=0.0, drift_per_hour=0.0)
    counts = {min(max(2, count), MOST_WORKERS) for count in (machine.cores // 2, machine.cores)}
    configs = [LoaderConfig(num_workers=count, prefetch_factor=depth) for count in sorted(counts) for depth in PREFETCH]
    return [reading for config in configs for reading in _of_config(machine, config)]


def _of_config(machine: SimulatedMachine, config: LoaderConfig) -> list[Reading]:
    workers = config.num_workers
    warm = 3 * workers * (config.prefetch_factor or 1)
    truth = SimulatedProbe(machine, FakeClock()).truth(config, batches=3000 + 20 * workers, warm=warm)
    found = []
    for rounds in ROUNDS:
        seconds = max(0.3, rounds * workers * machine.batch_size / truth)
        for seed in SEEDS:
            plan = BurstPlan(max_s=seconds, min_s=seconds, seed=seed, deadline_s=1e9)
            burst = SimulatedProbe(machine, FakeClock(), seed=seed).burst(config, plan)
            if isinstance(burst, Measurement) and burst.wait_share >= LEAST_WAIT_SHARE:
                found.append(_reading(burst, workers, truth))
    return found


def _reading(burst: Measurement, workers: int, truth: float) -> Reading:
    ends = [trace.step_end for trace in burst.traces[workers - 1 :]]
    per_batch = correlated_mean_interval([b - a for a, b in pairwise(ends)], workers)
    rate = burst.samples_per_s
    return Reading(
        rounds=len(burst.traces) / workers - 1,
        consumed=burst.batch_size / per_batch.value / truth,
        measured=rate.value / truth,
        is_covered=rate.low <= truth <= rate.high,
    )


def _rms(ratios: Sequence[float]) -> float:
    return math.sqrt(math.fsum(math.log(ratio) ** 2 for ratio in ratios) / len(ratios))


def main() -> None:
    with multiprocessing.Pool() as pool:
        found = [reading for some in pool.map(readings, MACHINES, chunksize=1) for reading in some]
    print("| rounds in the window | bursts | error, consumed | as measured | intervals that hold the truth |")
    print("|---|---|---|---|---|")
    for low, high in BINS:
        mine = [reading for reading in found if low <= reading.rounds < high]
        consumed, measured = _rms([r.consumed for r in mine]), _rms([r.measured for r in mine])
        covered = sum(r.is_covered for r in mine) / len(mine)
        print(f"| {low:g} to {high:g} | {len(mine)} | {consumed:.1%} | {measured:.1%} | {covered:.0%} |")


if __name__ == "__main__":
    main()
