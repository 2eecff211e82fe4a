"""How far is the twin off where the step computes on the cores, with any of its numbers of threads?

    python -m studies.fidelity.threads text

The bursts that a search begins with, and some with other workers and the same threads, in rounds. For each round the twin is
fitted to the former, once with its offset for each number of threads and once without, and predicts all. An error is the
logarithm of the prediction over the measured rate, and that rate the median of the rounds. The machine must do nothing else.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median
from unittest.mock import patch

import numpy as np

from autotune_loader.decision.acquisition import initial_design
from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.tuning.schedule import FINAL_BURST
from autotune_loader.twin import smoothing
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import CEILING_BURST
from studies.fidelity.measure import workload_of
from studies.regret.bench import regret_workload
from studies.workloads import DOCUMENTS, WORKLOADS

ROUNDS = 3
THREADS = (None, 2, 1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.threads", description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS | DOCUMENTS))
    workload = parser.parse_args().workload
    machine = inspect_machine()
    cores = machine.usable_cores
    first = initial_design(Space(max_workers=2 * cores, consumer_threads=THREADS), cores)
    others = [
        LoaderConfig(num_workers=workers, prefetch_factor=2, consumer_threads=threads)
        for threads in THREADS
        for workers in (1, cores // 2, cores - 1, cores, cores + cores // 2)
    ]
    alike = {(config.num_workers, config.consumer_threads) for config in first}
    configs = [*first, *(each for each in others if (each.num_workers, each.consumer_threads) not in alike)]
    with open_probe(workload_of(regret_workload(workload)), machine, "process", None) as opened:

        def measured(config: LoaderConfig, number: int) -> Measurement:
            burst = opened.probe.burst(config, replace(FINAL_BURST, seed=number))
            if isinstance(burst, Failure):
                raise SystemExit(f"{config}: {burst.message}")
            return burst

        ceilings = {threads: opened.probe.step_ceiling(threads, CEILING_BURST) for threads in THREADS}
        rounds = [
            {config: measured(config, number) for config in random.Random(number).sample(configs, len(configs))}
            for number in range(ROUNDS)
        ]
    steps = {threads: each.step_s for threads, each in ceilings.items() if isinstance(each, Measurement)}
    context = TwinContext(usable_cores=cores, consumer_cores=float(cores), step_s=tuple(steps.items()))
    tell(rounds, first, context)


def tell(
    rounds: Sequence[Mapping[LoaderConfig, Measurement]], first: Sequence[LoaderConfig], context: TwinContext
) -> None:
    """Print each configuration's errors, and those of all together."""
    rates = {config: median(each[config].samples_per_s.value for each in rounds) for config in rounds[0]}
    scouted = [[(config, each[config]) for config in first] for each in rounds]
    with patch.object(smoothing, "OFFSET_EVIDENCE", math.inf):
        without = errors(rates, scouted, context)
    within = errors(rates, scouted, context)
    print("| configuration | samples/s | error without offsets | error |")
    print("|---|---|---|---|")
    for config, rate in rates.items():
        print(f"| {config} | {rate:,.0f} | {fmean(without[config]):+.2f} | {fmean(within[config]):+.2f} |")
    typical = [float(np.sqrt(np.square(list(each.values())).mean())) for each in (without, within)]
    print("\nroot mean square {:.3f} without offsets, {:.3f} with them".format(*typical))


def errors(
    rates: Mapping[LoaderConfig, float],
    scouted: Sequence[Sequence[tuple[LoaderConfig, Measurement]]],
    context: TwinContext,
) -> dict[LoaderConfig, list[float]]:
    """Of each configuration, by the twin of each round's first bursts."""
    found: dict[LoaderConfig, list[float]] = {config: [] for config in rates}
    for observed in scouted:
        twin = fit_twin(observed, context)
        assert twin is not None, "there are no bursts"
        for prediction in twin.predict_all(list(rates)):
            found[prediction.config].append(math.log(prediction.samples_per_s.value / rates[prediction.config]))
    return found


if __name__ == "__main__":
    main()
