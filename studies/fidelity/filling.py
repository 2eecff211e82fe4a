"""Does a burst of the finals read what training reads, though a deep queue is still filling when it ends?

    python -m studies.fidelity.filling imbalance '{"num_workers": 4, "prefetch_factor": 8}' ...

Each configuration, as `loader.json` names it, is burst in turns as the finals do it, the same with queues that were filled
first, and for three seconds, of which the second half is what training reads: mean samples/s of the rounds and standard error.
The machine must do nothing else.
"""

from __future__ import annotations

import random
from dataclasses import replace

from autotune_loader.config import LoaderConfig
from autotune_loader.finals import FINAL_BURST
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.trial import BurstPlan, Failure
from studies.fidelity.measure import workload_of
from studies.fidelity.prefilled import rate_after
from studies.regret.bench import regret_workload
from studies.regret.configurations import asked_for, print_means

PAUSE_S = 1.0
"""Longer than the queues of these workloads take to fill."""
LONG_S = 3.0
ROUNDS = 6
PLANS = {
    "as they fill": FINAL_BURST,
    "filled first": replace(FINAL_BURST, pause_s=PAUSE_S),
    "training": BurstPlan(max_s=LONG_S, min_s=LONG_S, relative_error=0.0),
}


def main() -> None:
    workload, configs = asked_for("studies.fidelity.filling", __doc__)
    rates: dict[tuple[LoaderConfig, str], list[float]] = {(config, name): [] for config in configs for name in PLANS}
    with open_probe(workload_of(regret_workload(workload)), inspect_machine(), "process", None) as opened:
        for number in range(ROUNDS):
            for config, name in random.Random(number).sample(list(rates), len(rates)):
                measured = opened.probe.burst(config, replace(PLANS[name], seed=number))
                if isinstance(measured, Failure):
                    raise SystemExit(f"{config}: {measured.message}")
                middle = len(measured.traces) // 2
                rate = rate_after(measured, middle + 1) if name == "training" else measured.samples_per_s.value
                rates[config, name].append(rate)
    print_means(list(PLANS), {config: [rates[config, name] for name in PLANS] for config in configs}, ",.0f")


if __name__ == "__main__":
    main()
