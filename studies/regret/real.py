"""Regret on real workloads of this machine: `python -m studies.regret.real [--quick] [--load] [--cores 1] [--report]`.

For each workload: every strategy chooses, the oracle surveys, then the best of the survey and all choices take turns, and
who looks slower than the best meets it again. Each measurement is one line of `results/real.jsonl`, and only what is
missing there is measured: stop and go on at will. Use a machine that does nothing else. The tables are in
`results/real.md`, the curve in `results/real.png`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune_loader.machine.limits import usable_cores
from autotune_loader.values.statistics import Round
from studies.jobs import REAL_JOBS
from studies.quiet import QuietTurns
from studies.regret import OURS, PLAIN_RULE, oracle
from studies.regret.bench import Bench, BenchError, ForeignCpu, regret_workload
from studies.regret.load import neighbours
from studies.regret.oracle import key
from studies.regret.outcomes import report
from studies.regret.records import Known, Log
from studies.regret.strategies import BEFORE, STRATEGIES, Lattice, applies, lattice_of, seeds_of
from studies.workloads import DOCUMENTS, WORKLOADS

RESULTS = Path(__file__).parent / "results"
# In this order, so that a run that is cut short has some of every kind.
ORDER = (
    "jpeg",
    "wait_light_tail",
    "cpu_bound",
    "guide",
    "in_memory",
    "tutorial",
    "text",
    "imbalance",
    "large_tensors",
    "short_epoch",
    "article",
    "wait_heavy_tail",
    "lesson",
    "step_bound",
)
QUICK_WORKLOADS = ("jpeg", "wait_light_tail", "in_memory")
QUICK_STRATEGIES = (OURS, BEFORE, "torch default", "workers = cores", PLAIN_RULE, "climb 3 %")
LOADED_WORKLOADS = ("jpeg", "wait_light_tail", "cpu_bound", "tutorial", "text")
# Where the number of workers follows from the job, not from the cores.
FEW_CORES_WORKLOADS = ("wait_behind_step", "tutorial", "wait_heavy_tail", "python_loops")
LOADED = f"{OURS}, loaded"
# Neighbours that no choice was made beside; they make rounds scatter more, so that there are more of them.
ORACLES_NEIGHBOURS = 1000
LOADED_ROUNDS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured."""

    workloads: tuple[str, ...]
    strategies: tuple[str, ...]
    seeds: int = 3
    seconds: float = oracle.ROUND_S
    rounds: int = oracle.ROUNDS
    coarse: bool = False
    """Whether the survey leaves the prefetch factors out."""
    plateaus: bool = True
    """Whether choices with far fewer workers are weighed until their loss is known to 1 %."""
    foreign_limit: float = oracle.FOREIGN_LIMIT
    """Share of the cores that others may use in a round that counts."""


def lattice_for(workload: str) -> Lattice:
    study = regret_workload(workload)
    return lattice_of(usable_cores().usable, on_cpu=study.model is not None and study.train_step is None)


def study(workload: str, plan: Plan, known: Known, log: Log, quiet: QuietTurns) -> None:
    """Everything that is missing of one workload."""
    lattice = lattice_for(workload)
    with Bench(workload) as bench:
        for strategy in plan.strategies:
            for seed in seeds_of(strategy, plan.seeds):
                if applies(strategy, workload) and (strategy, seed) not in known.choices:
                    choose(strategy, workload, seed, bench, lattice, known, log)
                    quiet.next()
        judge(workload, plan, bench, lattice, known, log, quiet)


def choose(
    strategy: str, workload: str, seed: int, bench: Bench, lattice: Lattice, known: Known, log: Log, name: str = ""
) -> None:
    """Let one strategy choose, and keep what it chose."""
    record: dict[str, Any] = {"kind": "choice", "workload": workload, "strategy": name or strategy, "seed": seed}
    begun, foreign = time.perf_counter(), ForeignCpu()
    try:
        choice = STRATEGIES[strategy](workload, bench, lattice, seed)
        history = [[round(at, 2), key(config)] for at, config in choice.history]
        record |= {"config": key(choice.config), "seconds": round(choice.seconds, 2), "history": history}
        record |= {"detail": choice.detail}
        if strategy == OURS:  # its processes have ended, so that their CPU is known to be ours
            record["foreign_share"] = foreign.share()
        said = str(choice.config)
    except BenchError as error:
        record |= {"failure": str(error), "seconds": round(time.perf_counter() - begun, 2)}
        said = f"failed: {error}"
    known.choices[(name or strategy, seed)] = record
    log.append(record)
    print(f"{workload:16} {name or strategy:18} #{seed} {record['seconds']:6.1f} s   {said}", flush=True)


def judge(workload: str, plan: Plan, bench: Bench, lattice: Lattice, known: Known, log: Log, quiet: QuietTurns) -> None:
    """Survey, rounds and fresh rounds, as far as they are missing."""

    def surveyed(config: str, rate: float) -> None:
        log.append({"kind": "survey", "workload": workload, "config": config, "samples_per_s": round(rate, 3)})

    def raced(latest: Round, kind: str = "round") -> None:
        rates = {config: round(rate, 3) for config, rate in latest.rates.items()}
        foreign = round(latest.foreign_cpu_share or 0.0, 4)
        log.append({"kind": kind, "workload": workload, "rates": rates, "foreign_share": foreign})
        quiet.next()

    begun = time.perf_counter()
    oracle.survey(bench, lattice, known.surveyed, surveyed, coarse=plan.coarse)
    quiet.next()
    middle = time.perf_counter()
    chosen = known.chosen()
    oracle.run_rounds(
        bench,
        chosen,
        known.surveyed,
        known.rounds,
        raced,
        seconds=plan.seconds,
        most=plan.rounds,
        foreign_limit=plan.foreign_limit,
    )
    oracle.confirm(
        bench,
        chosen,
        known.rounds,
        known.confirming,
        lambda latest: raced(latest, "confirming"),
        right_sized=known.chosen(OURS) if plan.plateaus else [],
        seconds=plan.seconds,
        foreign_limit=plan.foreign_limit,
    )
    ended = time.perf_counter()
    counts = f"{len(known.rounds)} rounds and {len(known.confirming)} fresh ones"
    print(f"{workload:16} survey {middle - begun:.0f} s, {counts} {ended - middle:.0f} s", flush=True)
    for (strategy, seed), record in known.choices.items():
        regret = known.regret_of(record["config"]) if record.get("config") else None
        if regret is not None:
            ratio = regret.ratio
            print(f"    {strategy:22} #{seed} {ratio.value:6.3f} ({ratio.low:.3f} to {ratio.high:.3f})", flush=True)


def study_loaded(workload: str, plan: Plan, known: Known, log: Log, quiet: QuietTurns) -> None:
    """Ours chooses beside neighbours that burn, and the oracle judges beside them, as the training would run."""
    lattice = lattice_for(workload)
    with Bench(workload) as bench:
        for seed in range(plan.seeds):
            if (LOADED, seed) not in known.choices:
                with neighbours(seed=seed):
                    choose(OURS, workload, seed, bench, lattice, known, log, LOADED)
                quiet.next()
        with neighbours(seed=ORACLES_NEIGHBOURS):
            judge(workload, plan, bench, lattice, known, log, quiet)


def run(plan: Plan, log: Log, quiet: QuietTurns, *, minutes: float, loaded: bool) -> None:
    """Workload after workload, until the time is up; one that was begun is finished."""
    begun = time.monotonic()
    known = log.read()
    with quiet.turns():
        for workload in plan.workloads:
            if time.monotonic() - begun > minutes * 60:
                print(f"{minutes:g} minutes are over: {workload} and what follows are left for the next run")
                return
            part = study_loaded if loaded else study
            part(workload, plan, known.setdefault(workload, Known()), log, quiet)


def listed(text: str, legal: Sequence[str], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in legal]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(legal)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.regret.real", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three workloads, four strategies, one seed: five minutes")
    parser.add_argument("--load", action="store_true", help="beside neighbours that burn 0 to 50 %% of two cores")
    parser.add_argument("--cores", type=int, help="pinned to so many; the four kinds of job that few cores decide on")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--workloads", help="separated by commas")
    parser.add_argument("--strategies", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="of autotune_loader")
    parser.add_argument("--seconds", type=float, default=oracle.ROUND_S, help="of one burst in the oracle's rounds")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further workload after so long")
    parser.add_argument("--lock", type=Path, help="file to hold an exclusive lock on while measuring")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records and tables")
    chosen = parser.parse_args()
    if chosen.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: chosen.cores])
    names = (
        FEW_CORES_WORKLOADS
        if chosen.cores
        else LOADED_WORKLOADS
        if chosen.load
        else QUICK_WORKLOADS
        if chosen.quick
        else ORDER
    )
    plan = Plan(
        workloads=listed(chosen.workloads or ",".join(names), tuple(WORKLOADS | DOCUMENTS | REAL_JOBS), parser),
        strategies=listed(
            chosen.strategies or ",".join(QUICK_STRATEGIES if chosen.quick else STRATEGIES), tuple(STRATEGIES), parser
        ),
        seeds=1 if chosen.quick else chosen.seeds,
        seconds=chosen.seconds,
        rounds=LOADED_ROUNDS if chosen.load else 5 if chosen.quick else oracle.ROUNDS,
        coarse=chosen.quick,
        plateaus=not (chosen.quick or chosen.cores),
        foreign_limit=1.0 if chosen.load else oracle.FOREIGN_LIMIT,
    )
    name = f"cores_{chosen.cores}" if chosen.cores else "loaded" if chosen.load else "quick" if chosen.quick else "real"
    log = Log(chosen.results / f"{name}.jsonl", plan.foreign_limit)
    if not chosen.report:
        # Like Ctrl-C: the processes of the bench and of whoever chooses, which have sessions of their own, are ended.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        quiet = QuietTurns(chosen.lock)
        run(plan, log, quiet, minutes=chosen.minutes, loaded=chosen.load)
        print(f"the machine was ours for {quiet.held_s / 60:.1f} minutes")
    report(log.read(), chosen.results / f"{name}.md")


if __name__ == "__main__":
    main()
