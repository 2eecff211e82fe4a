"""Comparisons of a few things that take turns: `python -m studies.fidelity.compare NAME ...`, `--help` for the names.

In each round every arm runs once, in a mixed order, over the same samples. The table has the median of each arm, its median
ratio to the reference with a 95 % interval of that median (of fewer than six rounds: all that was seen), and how far ratios
are from 1 as a rule (root mean square of their logarithms). The machine must do nothing else, but for `few_rounds`.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.tuning.burst_source import FINAL_BURST
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import correlated_mean_interval
from studies.regret.bench import TimedJob, Timing, batches_until_settled, between_smooth_ends, regret_workload
from studies.regret.machines import random_machine
from studies.regret.oracle import ROUND_S, config_of
from studies.workloads import DOCUMENTS, WORKLOADS, workload_of
from tests.support import FakeClock, SimulatedProbe

Readings = Mapping[tuple[str, str], float]
"""What one round read, by case and arm: rates, seconds, or whatever the arms of one case have in common."""
Arm = Callable[[int], Readings]
"""Of the number of a round, which also chooses its samples."""


def in_turns(arms: Sequence[Arm], rounds: int) -> Iterator[Readings]:
    """Round after round, each arm once in each, in a mixed order."""
    for number in range(rounds):
        found: dict[tuple[str, str], float] = {}
        for arm in random.Random(number).sample(arms, len(arms)):
            found |= arm(number)
        yield found


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median by ranks; of fewer than six values from the least to the greatest."""
    ordered, count = sorted(values), len(values)
    below = accumulate(math.comb(count, rank) / 2**count for rank in range(count))
    left_out = max(0, sum(2 * tail <= 0.05 for tail in below) - 1)
    return ordered[left_out], ordered[count - 1 - left_out]


def table(rounds: Sequence[Readings], reference: str) -> str:
    """Every arm of every case beside the case's reference."""
    lines = [
        f"| case | arm | rounds | median | over {reference} | 95 % interval | typical error |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, arm in dict.fromkeys(key for readings in rounds for key in readings):
        values = [readings[case, arm] for readings in rounds if (case, arm) in readings]
        both = [each for each in rounds if {(case, arm), (case, reference)} <= each.keys()]
        pairs = [(each[case, arm], each[case, reference]) for each in both if arm != reference]
        ratios = [value / base for value, base in pairs if value > 0 and base > 0]
        line = f"| {case} | {arm} | {len(values)} | {statistics.median(values):,.5g} |"
        if ratios:
            low, high = median_interval(ratios)
            error = math.sqrt(statistics.fmean(math.log(ratio) ** 2 for ratio in ratios))
            line += f" {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} | {error:.1%} |"
        lines.append(line if ratios else line + " | | |")
    return "\n".join(lines)


FILLING_PLANS = {
    "as they fill": FINAL_BURST,
    # Longer than the queues of these workloads take to fill.
    "filled first": replace(FINAL_BURST, prefill_s=1.0),
    "training": BurstPlan(max_s=3.0, min_s=3.0, relative_error=0.0),
}


def filling(chosen: argparse.Namespace) -> Iterator[Readings]:
    """Training is the second half of 3 s; "counted" is the filled burst as a stopwatch from its first batch on reads it."""
    with open_probe(workload_of(regret_workload(chosen.workload)), inspect_machine(), "process", None) as opened:

        def arm(config: LoaderConfig, name: str) -> Arm:
            def burst(number: int) -> Readings:
                measured = opened.probe.burst(config, replace(FILLING_PLANS[name], seed=number))
                if isinstance(measured, Failure):
                    raise SystemExit(f"{config}: {measured.message}")
                if name == "training":
                    return {(str(config), name): rate_after(measured, len(measured.traces) // 2 + 1)}
                read = {(str(config), name): measured.samples_per_s.value}
                return read | ({(str(config), "counted"): rate_after(measured, 1)} if name == "filled first" else {})

            return burst

        yield from in_turns([arm(config, name) for config in chosen.configs for name in FILLING_PLANS], chosen.rounds)


def rate_after(measured: Measurement, skip: int) -> float:
    """Samples/s counted from batch `skip` to the end; nothing where that leaves less than two batches."""
    inside = measured.traces[skip - 1 :]
    if len(inside) < 2:
        return 0.0
    return sum(trace.samples for trace in inside[1:]) / (inside[-1].step_end - inside[0].step_end)


TRIED_FILLS = (0, 1, 2, 3)
SETTLING_RUN_S = 8.0


def settling(chosen: argparse.Namespace) -> Iterator[Readings]:
    job = TimedJob(chosen.workload)

    def arm(config: LoaderConfig) -> Arm:
        def run(number: int) -> Readings:
            _, ends = job.run(config, Timing(clock="start", seconds=SETTLING_RUN_S, seed=number))
            shares = zip(TRIED_FILLS, window_shares(ends, config), strict=True)
            read = {(str(config), f"after {fills} fills"): share for fills, share in shares}
            return read | {(str(config), "the rest"): 1.0}

        return run

    yield from in_turns([arm(config) for config in chosen.configs], chosen.rounds)


def window_shares(ends: Sequence[float], config: LoaderConfig) -> list[float]:
    """Rate of a window after each of `TRIED_FILLS`, over that of all that follows the last of them.

    Args:
        ends: seconds at which each batch of a run was trained on.
        config: that it ran with.
    """
    opened = [batches_until_settled(config, fills) for fills in TRIED_FILLS]
    windows = [ends[first : bisect_left(ends, ends[first] + ROUND_S)] for first in opened]
    settled = _rate(ends[opened[-1] :], config)
    return [_rate(window, config) / settled for window in windows]


def _rate(ends: Sequence[float], config: LoaderConfig) -> float:
    batches, seconds = between_smooth_ends(ends, config.num_workers)
    return batches / seconds


FEW_ROUNDS_MACHINES = range(2000, 2120)
FEW_ROUNDS_KINDS = ("cpu", "mixed")
FEW_ROUNDS = (2.0, 4.5)
FEW_ROUNDS_SEEDS = range(4)
MOST_WORKERS = 64
# The loop waits for at least this share of the time, or the workers do not hold it up.
LEAST_WAIT_SHARE = 0.1
DEPTHS = (2, 8)
BINS = ((1.0, 2.5), (2.5, 5.0), (5.0, 12.0), (12.0, math.inf))


def few_rounds(chosen: argparse.Namespace) -> Iterator[Readings]:
    """Simulated machines without noise, so that all error is the window's own; "consumed" is a stopwatch around the loop."""
    with multiprocessing.Pool(chosen.processes) as pool:
        read = [each for some in pool.imap(_few_rounds_on, FEW_ROUNDS_MACHINES, chunksize=1) for each in some]
    for low, high in BINS:
        mine = [readings for rounds, readings in read if low <= rounds < high]
        yield from ({(f"{low:g} to {high:g} rounds", arm): value for arm, value in each.items()} for each in mine)


def _few_rounds_on(seed: int) -> list[tuple[float, dict[str, float]]]:
    """Rounds of the workers in each burst's window, and its readings over the truth."""
    kind, machine = random_machine(seed)
    if kind not in FEW_ROUNDS_KINDS:
        return []
    machine = replace(machine, noise_sd=1e-9, spike_share=0.0, drift_per_hour=0.0)
    counts = {min(max(2, count), MOST_WORKERS) for count in (machine.cores // 2, machine.cores)}
    found = []
    for workers, depth in ((workers, depth) for workers in sorted(counts) for depth in DEPTHS):
        config = LoaderConfig(num_workers=workers, prefetch_factor=depth)
        truth = SimulatedProbe(machine, FakeClock()).truth(
            config, batches=3000 + 20 * workers, warm=3 * workers * depth
        )
        for rounds, number in ((rounds, number) for rounds in FEW_ROUNDS for number in FEW_ROUNDS_SEEDS):
            seconds = max(0.3, rounds * workers * machine.batch_size / truth)
            plan = BurstPlan(max_s=seconds, min_s=seconds, seed=number, deadline_s=1e9)
            burst = SimulatedProbe(machine, FakeClock(), seed=number).burst(config, plan)
            if isinstance(burst, Measurement) and burst.wait_share >= LEAST_WAIT_SHARE:
                found.append((len(burst.traces) / workers - 1, _few_rounds_readings(burst, workers, truth)))
    return found


def _few_rounds_readings(burst: Measurement, workers: int, truth: float) -> dict[str, float]:
    ends = [trace.step_end for trace in burst.traces[workers - 1 :]]
    per_batch = correlated_mean_interval([after - before for before, after in pairwise(ends)], workers)
    rate = burst.samples_per_s
    read = {"consumed": burst.batch_size / per_batch.value / truth, "as measured": rate.value / truth, "long run": 1.0}
    return read | ({"as measured, interval holds it": rate.value / truth} if rate.low <= truth <= rate.high else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A question, who answers it, and what the answers are held against."""

    question: str
    run: Callable[[argparse.Namespace], Iterator[Readings]]
    reference: str
    asks_for: tuple[str, ...] = ()
    """Of the command line: "workload", "configs", "processes"."""
    rounds: int = 6


COMPARISONS = {
    "filling": Comparison(
        question="does a burst read what training reads, though its queues still fill, or were filled before?",
        run=filling, reference="training", asks_for=("workload", "configs"),
    ),
    "settling": Comparison(
        question="after how many fills of the queues does a window read what the rest of the run reads?",
        run=settling, reference="the rest", asks_for=("workload", "configs"),
    ),
    "few_rounds": Comparison(
        question="does a window of a few rounds of the workers read the long run? (simulated)",
        run=few_rounds, reference="long run", asks_for=("processes",),
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.fidelity.compare", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, comparison in COMPARISONS.items():
        one = names.add_parser(name, help=comparison.question.replace("%", "%%"))
        if "workload" in comparison.asks_for:
            one.add_argument("workload", choices=sorted(WORKLOADS | DOCUMENTS))
        if "configs" in comparison.asks_for:
            example = 'such as \'{"num_workers": 4, "prefetch_factor": 8}\''
            one.add_argument("configs", nargs="+", type=config_of, help=example)
        if "processes" in comparison.asks_for:
            one.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
        one.add_argument("--rounds", type=int, default=comparison.rounds)
    chosen = parser.parse_args()
    asked = COMPARISONS[chosen.name]
    print(table(list(asked.run(chosen)), asked.reference))


if __name__ == "__main__":
    main()
