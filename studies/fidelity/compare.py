"""Comparisons of a few things that take turns: `python -m studies.fidelity.compare NAME ...`, `--help` for the names.

In each round every arm runs once, in a mixed order, over the same samples. The table has the median of each arm, its median
ratio to the reference with a 95 % interval of that median (of fewer than six rounds: all that was seen), and how far ratios
are from 1 as a rule (root mean square of their logarithms). The machine must do nothing else, but for `few_rounds` and `depth`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import random
import resource
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.tuning.schedule import FINAL_BURST
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import correlated_mean_interval
from studies.fidelity import tracing
from studies.fidelity.measure import workload_of
from studies.quiet import QuietTurns
from studies.regret.bench import Bench, TimedJob, Timing, batches_until_settled, between_smooth_ends, regret_workload
from studies.regret.load import neighbours
from studies.regret.machines import random_machine
from studies.regret.oracle import ROUND_S, config_of
from studies.regret.records import Log
from studies.workloads import DOCUMENTS, WORKLOADS
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


NEIGHBOURS_SEED = 2000


def beside(chosen: argparse.Namespace) -> Iterator[Readings]:
    if len(chosen.configs) != 2:
        raise SystemExit("beside compares two configurations")
    for where in ("beside neighbours", "alone"):
        loaded = neighbours(seed=NEIGHBOURS_SEED) if where != "alone" else contextlib.nullcontext()
        with loaded, Bench(chosen.workload) as bench:

            def arm(name: str, config: LoaderConfig, bench: Bench = bench, where: str = where) -> Arm:
                def timed(number: int) -> Readings:
                    timing = Timing(clock="steady", seconds=ROUND_S, seed=number)
                    return {(where, name): bench.time(config, timing).samples_per_s}

                return timed

            named = zip(("first", "second"), chosen.configs, strict=True)
            yield from in_turns([arm(*each) for each in named], chosen.rounds)


SHALLOW, DEEP = 2, 8


def depth(chosen: argparse.Namespace) -> Iterator[Readings]:
    """Of rates that are on record: nothing is measured."""
    for path in chosen.records:
        for workload, known in Log(path).read().items():
            rounds = [latest.rates for latest in [*known.rounds, *known.confirming]]
            for source, rates in [("survey", known.surveyed), *(("rounds", each) for each in rounds)]:
                for ratio in depth_ratios(rates):
                    case = f"{workload}, {source}"
                    yield {(case, f"prefetch {DEEP}"): math.exp(ratio), (case, f"prefetch {SHALLOW}"): 1.0}


def depth_ratios(rates: Mapping[str, float]) -> list[float]:
    """ln(rate with the deep queue / with the shallow one) of every pair that differs in nothing else that a window sees."""
    of_config: dict[LoaderConfig, float] = {}
    for text, rate in rates.items():
        if rate > 0:
            of_config.setdefault(config_of(text).key(), rate)
    shallow = {
        replace(config, prefetch_factor=DEEP): rate
        for config, rate in of_config.items()
        if config.prefetch_factor == SHALLOW
    }
    return [math.log(of_config[config] / rate) for config, rate in shallow.items() if config in of_config]


HELD_WINDOW_S = 0.7
HELD_TURNS = 4


def held(chosen: argparse.Namespace) -> Iterator[Readings]:
    """Each round is a fresh process, since processes differ by what else lies on their heap."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        yield from pool.imap(_held_in_this_process, [chosen.workload] * chosen.rounds)


def _held_in_this_process(workload: str) -> Readings:
    """Medians of a few turns, while the batch before is alive and after it is gone."""
    arriving = _batches(workload)
    turns = list(in_turns([lambda _: _held_turn(arriving, "held"), lambda _: _held_turn(arriving, "gone")], HELD_TURNS))
    return {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}


def _batches(workload: str) -> Iterator[Any]:
    """Without workers, epoch after epoch."""
    from torch.utils.data import DataLoader

    study = (WORKLOADS | DOCUMENTS)[workload]()
    while True:
        yield from DataLoader(study.dataset, batch_size=study.batch_size, shuffle=True, drop_last=True)


def _held_turn(arriving: Iterator[Any], arm: str) -> Readings:
    begun, faults, count, batch = time.perf_counter(), _page_faults(), 0, None
    while time.perf_counter() - begun < HELD_WINDOW_S:
        if arm == "gone":
            batch = None
        batch = next(arriving)
        count += 1
    del batch
    ms = 1000 * (time.perf_counter() - begun) / count
    return {("ms a batch", arm): ms, ("page faults a batch", arm): (_page_faults() - faults) / count}


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


FEW_ROUNDS_MACHINES = range(2000, 2120)
FEW_ROUNDS_KINDS = ("cpu", "mixed")
FEW_ROUNDS = (2.0, 4.5)
FEW_ROUNDS_SEEDS = range(4)
MOST_WORKERS = 64
# The loop waits for at least this share of the time, or the workers do not hold it up.
LEAST_WAIT_SHARE = 0.1
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
    for workers, depth in ((workers, depth) for workers in sorted(counts) for depth in (SHALLOW, DEEP)):
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


def switched(chosen: argparse.Namespace) -> Iterator[Readings]:
    for case in tracing.CASES:
        for traced_s, plain_s in tracing.pairs_of_blocks(replace(case, pairs=min(case.pairs, chosen.rounds))):
            yield {(str(case), "traced"): 1e6 * traced_s, (str(case), "plain"): 1e6 * plain_s}


def parts(chosen: argparse.Namespace) -> Iterator[Readings]:
    """Microseconds a batch, in one process on one thread."""
    for case, kinds in tracing.parts():
        yield from in_turns([_block(case, name, deliver) for name, deliver in kinds.items()], chosen.rounds)


def _block(case: str, name: str, deliver: Callable[[], object]) -> Arm:
    def timed(_: int) -> Readings:
        begun = time.perf_counter()
        for _ in range(tracing.BLOCK):
            deliver()
        return {(case, name): (time.perf_counter() - begun) / tracing.BLOCK * 1e6}

    return timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A question, who answers it, and what the answers are held against."""

    question: str
    run: Callable[[argparse.Namespace], Iterator[Readings]]
    reference: str
    asks_for: tuple[str, ...] = ()
    """Of the command line: "workload", "configs", "records", "processes"."""
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
    "beside": Comparison(
        question="do neighbours that burn 0 to 50 % of two cores change which of two configurations is faster?",
        run=beside, reference="second", asks_for=("workload", "configs"),
    ),
    "depth": Comparison(
        question="what does a deeper queue bring, by the records of studies.regret.real?",
        run=depth, reference=f"prefetch {SHALLOW}", asks_for=("records",),
    ),
    "held": Comparison(
        question="what does a fetch without workers cost once the batch before is gone?",
        run=held, reference="held", asks_for=("workload",), rounds=8,
    ),
    "few_rounds": Comparison(
        question="does a window of a few rounds of the workers read the long run? (simulated)",
        run=few_rounds, reference="long run", asks_for=("processes",),
    ),
    "tracing": Comparison(
        question="what does tracing take, switched on and off within one loader? The goal is 1 %",
        run=switched, reference="plain", rounds=600,
    ),
    "tracing_parts": Comparison(
        question="the same part by part: the loader's wrappers, the loop, the record's travel from a worker",
        run=parts, reference="plain", rounds=300,
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
        if "records" in comparison.asks_for:
            one.add_argument("records", nargs="+", type=Path)
        if "processes" in comparison.asks_for:
            one.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
        one.add_argument("--rounds", type=int, default=comparison.rounds)
        one.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    chosen = parser.parse_args()
    asked, rounds = COMPARISONS[chosen.name], list[Readings]()
    with QuietTurns(chosen.lock).turns() as quiet:
        for readings in asked.run(chosen):
            rounds.append(readings)
            quiet.next()
    print(table(rounds, asked.reference))


if __name__ == "__main__":
    main()
