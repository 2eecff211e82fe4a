"""Slow batches and long starts on 32 cores: what `tune()` writes, whose user has DataLoader's default of no workers.

python -m studies.regret.slow     # the worst of three runs; the bar is 90% of the best rate; a budget begins with a warm probe
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from autotune_loader.report.result import TuningResult
from autotune_loader.tuning.assemble import assembled
from autotune_loader.values import LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, with_workers
from tests.support.tuned import simulated_run, simulated_search

BUDGET_S, BAR, SEEDS, EPOCH_BATCHES = 60.0, 0.9, 3, 10_000
COUNTS, WARM_BATCHES = (0, 4, 8, 12, 16, 20, 24, 28, 32, 40, 64), 1200
HARDEST_FETCH_S, HARDEST_STEP_S = 5.0, 2.0
"""Slower rows have no bar: their budget is the time of a few batches."""


def machines() -> Iterator[tuple[str, SimulatedMachine, bool]]:
    """What is slow, the machine, and whether there is a bar."""

    def machine(fetch_s: float, step_s: float, probe_s: float) -> SimulatedMachine:
        times = {"cpu_s": fetch_s, "step_s": step_s, "probe_s": probe_s}
        return SimulatedMachine(cores=32, worker_start_s=0.05, noise_sd=0.03, **times)

    for fetch_s in (1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 15.0):
        yield f"fetch {fetch_s:.0f} s, step 0.3 s", machine(fetch_s, 0.3, 6 + 2 * fetch_s), fetch_s <= HARDEST_FETCH_S
    for step_s in (1.0, 2.0, 5.0):
        name = f"fetch {4 * step_s:.0f} s, step {step_s:.0f} s"
        yield name, machine(4 * step_s, step_s, 6 + 6 * step_s), step_s <= HARDEST_STEP_S
    for probe_s in (30.0, 58.0, 70.0, 180.0):
        yield f"warm after {probe_s:.0f} s", machine(0.2, 0.05, probe_s), True


def judged(machine: SimulatedMachine, seed: int) -> tuple[float, TuningResult, float]:
    """The share of the best rate that is written, the result, and the seconds."""
    clock = FakeClock(machine.probe_s)
    probe = SimulatedProbe(machine, clock, seed=seed, epoch_batches=EPOCH_BATCHES)
    run = simulated_run(machine, own=LoaderConfig(), epoch_batches=EPOCH_BATCHES)
    result = assembled(simulated_search(probe, run, clock, budget_s=BUDGET_S), clock())
    rates = [probe.truth(config, warm=WARM_BATCHES) for config in (result.best.key(), *map(with_workers, COUNTS))]
    return rates[0] / max(rates), result, clock()


def main() -> None:
    print("| slow | written | of the best | bar | seconds | status |\n|---|---|---|---|---|---|")
    for name, machine, has_bar in machines():
        share, result, seconds = min((judged(machine, seed) for seed in range(SEEDS)), key=itemgetter(0))
        bar = "" if not has_bar else "met" if share >= BAR else "MISSED"
        print(f"| {name} | {result.best} | {share:.0%} | {bar} | {seconds:.0f} | {result.status} |", flush=True)


if __name__ == "__main__":
    main()
