"""How far from the best is what is chosen for real jobs of this machine, and what do others reach?

    python -m studies regret.real --cores 2                                                  # pinned to so many
    python -m studies regret.real --only slow_batches --strategies autotune_loader           # two to three minutes

For each workload: every strategy chooses, the oracle surveys, then the best of the survey and all choices take turns, and all
that may be as fast as the best meet it again (`oracle.py`). Beside each rival ours is faster, equal (the interval of their
paired ratio holds 1, or lies within 2% of it) or slower, in so many runs of ours. What was found of a workload is printed,
and kept in `results/real.jsonl`, as soon as it is known; a workload that is there already is not run again. Use a machine
that does nothing else. `slow_batches` has no rounds, as its truth is known. `--seeds` are of autotune_loader.

Every strategy is timed from call to result. Python, torch and the dataset are loaded before any clock starts, so nobody but
`autotune_loader`, whose own process starts within its time, pays for a process. tpe and random have 16 trials of 1 s, the
grid an epoch of each but at most 1 s, worker start-up included; loadtune has its defaults
(`pip install --no-deps loadtune==0.3.0`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from autotune_loader.machine.limits import usable_cores
from autotune_loader.values import Failure, LoaderConfig, Measurement
from studies.regret import OURS, WITH_TPE, Outcome, oracle, table, verdict_of
from studies.regret.bench import Bench, BenchError, regret_workload
from studies.regret.child import choice_in_child
from studies.regret.strategies import LOOK, LOOK_WORKERS, STRATEGIES
from studies.study import Row, Table
from studies.workloads import opened

RESULTS = Path(__file__).parent / "results"
NAIVE_S, TRIALS = 1.0, 16
IN_CHILD = (OURS, WITH_TPE, "loadtune")
DEFAULT = (OURS, WITH_TPE, "torch default", "workers = cores", "plain rule", "tpe", "random", "grid", "loadtune")
# Where the number of workers follows from the job, and one of each other kind.
JOBS = ("wait_behind_step", "wait_heavy_tail", "python_loops", "jpeg", "wait_light_tail", "in_memory", "cpu_bound")
BAR = "every choice within 2% of the best"
KEEP_UP = {"slow_batches": 16 * 0.5 / 0.3}
"""Jobs too slow for rounds, whose truth is known: rates grow with the workers up to these, who keep up with the step."""


class RealField:
    """A workload to look on, in a warm process."""

    def __init__(self, workload: str, bench: Bench, counts: Sequence[int]) -> None:
        self.cores, self.counts, self.trials = usable_cores().usable, counts, TRIALS
        self.asked = 0
        self._workload, self._bench, self.begun = workload, bench, time.perf_counter()

    def rate(self, config: LoaderConfig) -> float:
        self.asked += 1
        try:
            return self._bench.time(oracle.keeping(config), seconds=NAIVE_S, seed=self.asked, is_steady=False)
        except BenchError:
            return 0.0

    def look(self) -> Measurement | None:
        self.asked += 1
        with opened(regret_workload(self._workload)) as warm:
            self.begun = time.perf_counter()
            seen = warm.probe.burst(LoaderConfig(num_workers=LOOK_WORKERS), LOOK)
            if isinstance(seen, Failure):
                raise BenchError(seen.message)
        return seen

    def is_over(self) -> bool:
        return False


def chosen_by(strategy: str, workload: str, bench: Bench, seed: int) -> tuple[LoaderConfig, float]:
    """A configuration, and after how many seconds."""
    if strategy in IN_CHILD:
        return choice_in_child(strategy, workload, seed)
    field = RealField(workload, bench, oracle.counts_of(workload))
    config = STRATEGIES[strategy](field, seed)
    return (oracle.keeping(config), time.perf_counter() - field.begun) if field.asked else (config, 0.0)


def study(workload: str, strategies: Sequence[str], seeds: int) -> list[Outcome]:
    """Choices and their regret; only ours is run with every seed: the others cost more, and rules have none."""
    found: list[Outcome] = []
    keys: list[str] = []
    with Bench(workload) as bench:
        for strategy, seed in ((each, seed) for each in strategies for seed in range(seeds if each == OURS else 1)):
            begun = time.perf_counter()
            try:
                config, seconds = chosen_by(strategy, workload, bench, seed)
                keys.append(oracle.key(config))
                made = {"workers": config.num_workers, "chosen": str(config)}
            except BenchError as error:
                seconds = time.perf_counter() - begun
                keys.append("")
                made = {"failure": (str(error).strip() or "unknown").splitlines()[-1][:100]}
            found.append(Outcome(job=workload, strategy=strategy, seed=seed, seconds=seconds, **made))
            print(f"{workload:16} {strategy:16} #{seed} {seconds:6.1f} s   {found[-1].chosen}", flush=True)
        if workload in KEEP_UP:
            return [replace(each, regret=known_regret(each.workers, KEEP_UP[workload])) for each in found]
        known = oracle.survey(bench, oracle.counts_of(workload))
        judgement = oracle.judge(bench, list(filter(None, keys)), known)
    ratios = {each: judgement.ratio(each, judgement.leader) for each in filter(None, keys)}
    keys = [each if ratios.get(each) else "" for each in keys]
    mine = [each for each, outcome in zip(keys, found, strict=True) if outcome.strategy == OURS]
    return [_judged(each, mine, key, judgement) for each, key in zip(found, keys, strict=True)]


def known_regret(workers: int | None, keep_up: float) -> float:
    """The regret of so many workers, None of whom is a failure, where so many keep up with the step."""
    if workers is None:
        return 1.0
    return 1 - (min(1.0, workers / keep_up) if workers else 1 / (keep_up + 1))


def _judged(outcome: Outcome, mine: Sequence[str], key: str, judgement: oracle.Judgement) -> Outcome:
    """An outcome with its regret and, of a rival, what each of ours is beside it; a key is empty where that failed."""
    if outcome.strategy != OURS:
        outcome = replace(outcome, ours=[_beside(own, key, judgement) for own in mine])
    ratio = judgement.ratio(key, judgement.leader)
    if ratio is None:
        return outcome
    return replace(outcome, ratio=(ratio.value, ratio.low, ratio.high), regret=oracle.counted(ratio))


def _beside(own: str, other: str, judgement: oracle.Judgement) -> str:
    if own and other and (ratio := judgement.ratio(own, other)) is not None:
        return verdict_of(ratio)
    return "faster" if own else "slower" if other else "equal"


def details(outcomes: Sequence[Outcome]) -> Table:
    """Every single run."""
    for each in outcomes:
        known = f"{1 - each.regret:.3f} by arithmetic" if each.chosen else f"failed: {each.failure}"
        said = known if each.ratio is None else "{:.3f} ({:.3f} to {:.3f})".format(*each.ratio)
        cells = {"workload": each.job, "strategy": each.strategy, "seed": each.seed, "chosen": each.chosen}
        yield Row({**cells, "ratio to the fastest": said, "seconds": each.seconds})


def rows(*, cores: int = 0, only: str = "", strategies: str = "", seeds: int = 2) -> Table:
    names, jobs = tuple(strategies.split(",")) if strategies else DEFAULT, only.split(",") if only else JOBS
    if unknown := ({*names} - {*IN_CHILD, *STRATEGIES}) | ({*jobs} - {*JOBS, *KEEP_UP}):
        raise SystemExit(f"{unknown} is none of {', '.join((*JOBS, *KEEP_UP, *IN_CHILD, *STRATEGIES))}")
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    records = RESULTS / (f"real_{cores}.jsonl" if cores else "real.jsonl")
    lines = records.read_text().splitlines() if records.exists() else []
    found = [Outcome(**json.loads(line)) for line in lines]
    yield from details(found)
    for workload in jobs:
        if any(each.job == workload for each in found):
            continue
        latest = study(workload, names, seeds)
        records.parent.mkdir(parents=True, exist_ok=True)
        with records.open("a") as file:
            file.write("".join(json.dumps(asdict(each)) + "\n" for each in latest))
        found += latest
        yield from details(latest)
    yield from table(found)
