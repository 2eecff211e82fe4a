"""Does a burst of the finals read what training reads, though a deep queue is still filling when it ends?

    python -m studies.fidelity.filling imbalance '{"num_workers": 4, "prefetch_factor": 8}' ...

Each configuration, as `loader.json` names it, is burst in turns as the finals do it, the same with queues that were filled
first, and for three seconds, of which the second half is what training reads: mean samples/s of the rounds and standard error.
The machine must do nothing else.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import replace
from statistics import fmean, stdev

from autotune_loader.finals import FINAL_BURST
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.trial import BurstPlan, Failure, Measurement
from studies.fidelity.measure import workload_of
from studies.regret.bench import regret_workload
from studies.regret.oracle import config_of
from studies.workloads import DOCUMENTS, WORKLOADS

PAUSE_S = 1.0
"""Longer than the queues of these workloads take to fill."""
LONG_S = 3.0
ROUNDS = 6
PLANS = {
    "as they fill": FINAL_BURST,
    "filled first": replace(FINAL_BURST, pause_s=PAUSE_S),
    "training": BurstPlan(max_s=LONG_S, min_s=LONG_S, relative_error=0.0),
}


def settled_rate(measured: Measurement) -> float:
    """Samples/s of the second half of a long burst."""
    ends = [trace.step_end for trace in measured.traces]
    middle = len(ends) // 2
    return (len(ends) - 1 - middle) * measured.batch_size / (ends[-1] - ends[middle])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity.filling", description=__doc__)
    parser.add_argument("workload", choices=sorted(WORKLOADS | DOCUMENTS))
    parser.add_argument(
        "configs", nargs="+", type=config_of, help='such as \'{"num_workers": 4, "prefetch_factor": 8}\''
    )
    chosen = parser.parse_args()
    cells = [(config, name) for config in chosen.configs for name in PLANS]
    rates: dict[tuple[object, str], list[float]] = {cell: [] for cell in cells}
    with open_probe(workload_of(regret_workload(chosen.workload)), inspect_machine(), "process", None) as opened:
        for number in range(ROUNDS):
            for config, name in random.Random(number).sample(cells, len(cells)):
                measured = opened.probe.burst(config, replace(PLANS[name], seed=number))
                if isinstance(measured, Failure):
                    raise SystemExit(f"{config}: {measured.message}")
                rate = settled_rate(measured) if name == "training" else measured.samples_per_s.value
                rates[config, name].append(rate)
    print("| configuration | " + " | ".join(PLANS) + " |")
    print("|---" * (len(PLANS) + 1) + "|")
    for config in chosen.configs:
        shown = [
            f"{fmean(each):,.0f} ± {stdev(each) / math.sqrt(ROUNDS):,.0f}" for each in (rates[config, p] for p in PLANS)
        ]
        print(f"| {config} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
