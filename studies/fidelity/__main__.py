"""Do three bursts predict what any configuration sustains? `python -m studies.fidelity [--workloads a,b] [--seconds 4]`

Of each workload, in a warm probe process of its own: the step on a cached batch, one burst at each number of workers of
`DESIGN`, and runs of some seconds on a grid of workers x prefetch, all in one random order. The twin sees only the bursts. An
error is predicted / sustained - 1; covered means that the twin's interval holds the sustained rate.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune_loader.bursts.loop import KEPT_FIRST, KEPT_LAST
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.search.belief import Prediction, predict
from autotune_loader.tuning.bursting import CEILING_BURST
from autotune_loader.values import BurstPlan, Failure, LoaderConfig, Measurement, Trial
from studies.regret import at, names_of
from studies.workloads import WORKLOADS, opened

WORKLOAD_NAMES = (
    *("wait_light_tail", "wait_heavy_tail", "cpu_bound", "jpeg", "large_tensors", "in_memory", "step_bound"),
    "short_epoch",
)
DESIGN = (0, 1, 4, 12)
"""Workers of the bursts that the twin sees."""
GRID = {2: (2, 3, 6, 8), 8: (2, 6, 12)}
"""Workers by prefetch of the runs that it predicts."""
SCOUT = BurstPlan(max_s=3.0, min_s=0.3, relative_error=0.01)
"""A burst ends when its rate is known to 1%, which regular workloads reach in well under a second."""
HEAVY_TAIL_EPOCH_S = 44.0
"""Wall seconds of one worker for all samples of `wait_heavy_tail`: a run over fewer of them is a lottery."""
GOALS = "goals: median 3%, p90 10%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One prediction and what came true."""

    workload: str
    predicted: float
    """Samples/s, as the two below."""
    low: float
    high: float
    sustained: float

    @property
    def error(self) -> float:
        """Positive where the twin promised too much."""
        return self.predicted / self.sustained - 1

    @property
    def is_covered(self) -> bool:
        return self.low <= self.sustained <= self.high


def study(name: str, seconds: float, seed: int) -> list[Cell]:
    """Every cell of one workload; configurations that fail are left out."""
    tasks = [(LoaderConfig().with_workers(workers, 2), True) for workers in DESIGN]
    tasks += [(LoaderConfig().with_workers(n, prefetch), False) for prefetch, counts in GRID.items() for n in counts]
    random.Random(seed).shuffle(tasks)
    seen: dict[LoaderConfig, Measurement] = {}
    sustained: dict[LoaderConfig, float] = {}
    with opened(WORKLOADS[name]()) as warm:
        ceiling = warm.probe.step_ceiling(CEILING_BURST)
        if isinstance(ceiling, Failure):
            raise SystemExit(f"{name}: {ceiling.message}")
        for config, is_scout in tasks:
            outcome = warm.probe.burst(config, SCOUT if is_scout else _run_of(name, config, seconds))
            if isinstance(outcome, Failure):
                print(f"{name} {config}: {outcome.message}", flush=True)
            elif is_scout:
                seen[config] = outcome
            else:
                sustained[config] = rate_of(config, outcome)
        predictions = predicted(seen, ceiling, list(sustained))
    found = []
    for (config, rate), prediction in zip(sustained.items(), predictions, strict=True):
        said = prediction.samples_per_s
        found.append(Cell(workload=name, predicted=said.value, low=said.low, high=said.high, sustained=rate))
        print(f"RECORD {name} | {config} | {rate:.1f}/s | {found[-1].error:+.1%}", flush=True)
    return found


def predicted(
    seen: dict[LoaderConfig, Measurement], ceiling: Measurement, configs: Sequence[LoaderConfig]
) -> list[Prediction]:
    """The twin's predictions, of the bursts and the step on a cached batch alone."""
    cores = inspect_machine().usable_cores
    return predict(
        [Trial.of(number, config, measured) for number, (config, measured) in enumerate(seen.items())],
        configs,
        usable_cores=cores,
        step_s=ceiling.step_s,
        step_cores=min(float(cores), max(0.0, (ceiling.cpu_share or 0.0) * cores)),
    )


def rate_of(config: LoaderConfig, measured: Measurement) -> float:
    """Sustained samples/s: after the queues have filled, by nothing but counting."""
    skip = config.num_workers * (1 + (config.prefetch_factor or 0)) + 1
    if len(measured.traces) >= KEPT_FIRST + KEPT_LAST:  # a record of very many batches leaves out the middle
        skip = KEPT_FIRST + 1
    inside = measured.traces[skip - 1 :]
    if len(inside) < 8:
        return measured.samples_per_s.value
    return sum(trace.samples for trace in inside[1:]) / (inside[-1].step_end - inside[0].step_end)


def _run_of(name: str, config: LoaderConfig, seconds: float) -> BurstPlan:
    if name == "wait_heavy_tail":
        seconds = max(seconds, HEAVY_TAIL_EPOCH_S / max(1, config.num_workers))
    return BurstPlan(max_s=seconds, min_s=seconds, relative_error=0.0, deadline_s=120.0)


def table(found: Sequence[Cell]) -> str:
    """Count, absolute errors, bias and coverage of each workload, and of all."""
    lines = ["|  | n | median | p90 | largest | bias | covered |", "|---|---|---|---|---|---|---|"]
    for name in [*dict.fromkeys(cell.workload for cell in found), None]:
        mine = [cell for cell in found if name in (cell.workload, None)]
        errors = [abs(cell.error) for cell in mine]
        lines.append(
            f"| {name or '**all**'} | {len(mine)} | {statistics.median(errors):.1%} | {at(errors, 0.9):.1%} "
            f"| {max(errors):.1%} | {statistics.fmean(cell.error for cell in mine):+.1%} "
            f"| {statistics.fmean(cell.is_covered for cell in mine):.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.fidelity", description=__doc__)
    parser.add_argument("--workloads", type=names_of(WORKLOADS), default=WORKLOAD_NAMES, help="separated by commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one run")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    chosen = parser.parse_args()
    found = [cell for name in chosen.workloads for cell in study(name, chosen.seconds, chosen.seed)]
    print(f"\n{table(found)}\n\n{GOALS}")


if __name__ == "__main__":
    main()
