"""Regret on real workloads of this machine: `python -m studies.regret.real [--cores 2] [--workloads a,b] [--strategies a,b]`.

For each workload: every strategy chooses, the oracle surveys, then the best of the survey and all choices take turns, and who
looks slower than the best meets it again (`oracle.py`). What was found of a workload is printed, and kept in
`results/real.jsonl`, as soon as it is known; a workload that is there already is not run again (`--report`: none is). Use a
machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune_loader.machine.limits import usable_cores
from studies.regret import NEAR, OURS, at, oracle
from studies.regret.bench import Bench, BenchError, regret_workload
from studies.regret.strategies import STRATEGIES, Lattice, lattice_of
from studies.workloads import DOCUMENTS, WORKLOADS

RESULTS = Path(__file__).parent / "results"
# In this order, so that a run that is cut short has some of every kind.
ORDER = (
    *("jpeg", "wait_light_tail", "cpu_bound", "guide", "in_memory", "tutorial", "text", "imbalance", "large_tensors"),
    *("short_epoch", "article", "wait_heavy_tail", "lesson", "step_bound"),
)
# On few cores: where the number of workers follows from the job, and one of each other kind.
FEW_CORES = (
    *("wait_behind_step", "wait_heavy_tail", "python_loops", "jpeg", "wait_light_tail", "in_memory", "cpu_bound"),
)
FEW = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One strategy on one workload with one seed."""

    workload: str
    strategy: str
    seed: int
    seconds: float
    workers: int | None = None
    chosen: str = ""
    ratio: tuple[float, float, float] | None = None
    """Its rate over that of the best: value, and the ends of the 95 % interval. None where it failed."""
    counted: float = 1.0
    """Regret that the rounds show; a strategy that failed leaves the user with nothing."""
    failure: str = ""

    @property
    def point(self) -> float:
        """The same without regard to the interval."""
        return 1.0 if self.ratio is None else max(0.0, 1 - self.ratio[0])


def study(workload: str, strategies: Sequence[str], seeds: int, rounds: int) -> list[Run]:
    """Choices and their regret; only ours is run with every seed: the others cost more, and rules have none."""
    lattice = _lattice(workload)
    found: list[Run] = []
    keys: dict[int, str] = {}
    with Bench(workload) as bench:
        for strategy, seed in ((each, seed) for each in strategies for seed in range(seeds if each == OURS else 1)):
            begun = time.perf_counter()
            try:
                choice = STRATEGIES[strategy](workload, bench, lattice, seed)
            except BenchError as error:
                failed = (str(error).strip() or "unknown").splitlines()[-1][:100]
                seconds = time.perf_counter() - begun
                found.append(Run(workload=workload, strategy=strategy, seed=seed, seconds=seconds, failure=failed))
                continue
            keys[len(found)] = oracle.key(choice.config)
            workers, chosen = choice.config.num_workers, str(choice.config)
            run = Run(
                workload=workload, strategy=strategy, seed=seed, seconds=choice.seconds, workers=workers, chosen=chosen
            )
            found.append(run)
            print(f"{workload:16} {strategy:16} #{seed} {choice.seconds:6.1f} s   {chosen}", flush=True)
        regrets = oracle.judge(bench, list(keys.values()), oracle.survey(bench, lattice), rounds)
    return [_judged(run, regrets.get(keys.get(number, ""))) for number, run in enumerate(found)]


def _lattice(workload: str) -> Lattice:
    job = regret_workload(workload)
    return lattice_of(usable_cores().usable, on_cpu=job.model is not None and job.train_step is None)


def _judged(run: Run, regret: oracle.Regret | None) -> Run:
    if regret is None:
        return run
    ratio = (regret.ratio.value, regret.ratio.low, regret.ratio.high)
    return Run(**{**asdict(run), "ratio": ratio, "counted": regret.counted})


def table(runs: Sequence[Run]) -> str:
    """Regret and seconds by strategy."""
    lines = [
        "| strategy | within 2 % | regret p50 | p90 | by point p50 | p90 | seconds p50 | p90 | mean workers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(run.strategy for run in runs):
        mine = [run for run in runs if run.strategy == strategy]
        regrets, points, seconds = ([getattr(r, name) for r in mine] for name in ("counted", "point", "seconds"))
        workers = [run.workers for run in mine if run.workers is not None]
        lines.append(
            f"| {strategy} | {sum(regret <= NEAR for regret in regrets)} of {len(mine)} | {at(regrets, 0.5):.1%} "
            f"| {at(regrets, 0.9):.1%} | {at(points, 0.5):.1%} | {at(points, 0.9):.1%} | {at(seconds, 0.5):.1f} "
            f"| {at(seconds, 0.9):.1f} | {statistics.fmean(workers) if workers else float('nan'):.1f} |"
        )
    return "\n".join(lines)


def details(runs: Sequence[Run]) -> str:
    """Every single run."""
    lines = ["| workload | strategy | seed | chosen | ratio to the fastest | seconds |", "|---|---|---|---|---|---|"]
    for run in runs:
        said = f"failed: {run.failure}" if run.ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*run.ratio)
        lines.append(f"| {run.workload} | {run.strategy} | {run.seed} | {run.chosen} | {said} | {run.seconds:.1f} |")
    return "\n".join(lines)


def read(path: Path) -> list[Run]:
    return [Run(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def listed(text: str, legal: Sequence[str], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in legal]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(legal)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.regret.real", description=__doc__)
    parser.add_argument(
        "--cores", type=int, help="pinned to so many; with one or two, the jobs that few cores decide on"
    )
    parser.add_argument("--workloads", help="separated by commas")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="separated by commas")
    parser.add_argument("--seeds", type=int, default=2, help="of autotune_loader")
    parser.add_argument("--rounds", type=int, default=oracle.ROUNDS, help="of the oracle")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no further workload after so long")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    chosen = parser.parse_args()
    if chosen.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: chosen.cores])
    few = usable_cores().usable <= FEW
    workloads = listed(chosen.workloads or ",".join(FEW_CORES if few else ORDER), tuple(WORKLOADS | DOCUMENTS), parser)
    strategies = listed(chosen.strategies, tuple(STRATEGIES), parser)
    records = chosen.results / (f"real_{chosen.cores}.jsonl" if chosen.cores else "real.jsonl")
    runs, begun = read(records), time.monotonic()
    for workload in () if chosen.report else workloads:
        if any(run.workload == workload for run in runs):
            continue
        if time.monotonic() - begun > chosen.minutes * 60:
            print(f"{chosen.minutes:g} minutes are over: {workload} and what follows are left for the next run")
            break
        latest = study(workload, strategies, chosen.seeds, chosen.rounds)
        records.parent.mkdir(parents=True, exist_ok=True)
        with records.open("a") as file:
            file.write("".join(json.dumps(asdict(run)) + "\n" for run in latest))
        runs += latest
        print(details(latest), flush=True)
    print(f"{table(runs)}\n\n{details(runs)}" if runs else "nothing has been measured yet")


if __name__ == "__main__":
    main()
