"""The strategies that look for a configuration, each timed from call to result in a process that is warm already.

| strategy | how a person would do it |
|---|---|
| autotune_loader | `tune(dataset, model, budget="60s")`; its own probe process starts within the time |
| torch default, workers = cores | nothing is measured, 0 seconds |
| plain rule | one look of 1.5 s at 2 workers, then arithmetic (`search/rule.py`) |
| tpe 16, random 16 | Optuna, 16 trials over workers and prefetch, 1 s each, worker start-up included |
| grid | every num_workers x prefetch_factor, an epoch of each but at most 1 s, worker start-up included (as DPT does) |
| loadtune | `loadtune.tune(workload)` with its defaults; `pip install --no-deps loadtune==0.3.0` |

Python, torch and the dataset are loaded before any clock starts, so nobody but `autotune_loader` pays for a process start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autotune_loader.bursts.parent import open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.limits import usable_cores
from autotune_loader.search.rule import plain_rule
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from studies.regret import LOOK_S, LOOK_WORKERS, OURS, PLAIN_RULE
from studies.regret.bench import ROOT, Bench, BenchError, Timing, regret_workload
from studies.workloads import workload_of

NAIVE_S = 1.0
TRIALS = 16
CHILD_DEADLINE_S = 150.0
PREFETCH_FACTORS = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """The configurations that strategies and oracle choose from."""

    workers: tuple[int, ...]

    def config(self, workers: int, prefetch: int) -> LoaderConfig:
        """A person who tunes keeps workers between epochs; nobody but torch's default does without."""
        return LoaderConfig(
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a strategy chose, and after how many seconds."""

    config: LoaderConfig
    seconds: float


def lattice_of(cores: int, on_cpu: bool) -> Lattice:
    """Workers up to 16 or twice the cores, and more where nothing but loading needs them."""
    workers = {0, 1, 2, 3, 4, 6, 8, 12, 16, cores // 2, 3 * cores // 4, cores, 3 * cores // 2, 2 * cores}
    if not on_cpu:
        workers |= {24, 3 * cores, 4 * cores}
    return Lattice(workers=tuple(sorted(workers)))


class _Run:
    """One strategy at work: the clock, and the best so far by its own naive rates."""

    def __init__(self, bench: Bench) -> None:
        self._bench, self._begun = bench, time.perf_counter()
        self._best, self._best_rate, self._count = LoaderConfig(), 0.0, 0

    def rate(self, config: LoaderConfig) -> float:
        self._count += 1
        try:
            timing = Timing(clock="start", seconds=NAIVE_S, seed=self._count, epochs=False)
            rate = self._bench.time(config, timing).samples_per_s
        except BenchError:
            return 0.0
        if rate > self._best_rate:
            self._best, self._best_rate = config, rate
        return rate

    def choice(self) -> Choice:
        return Choice(config=self._best, seconds=time.perf_counter() - self._begun)


Strategy = Callable[[str, Bench, Lattice, int], Choice]


def by_rule(config: Callable[[int], LoaderConfig]) -> Strategy:
    return lambda workload, bench, lattice, seed: Choice(config=config(usable_cores().usable), seconds=0.0)


def grid(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    run = _Run(bench)
    for workers in lattice.workers:
        for prefetch in PREFETCH_FACTORS if workers else (2,):
            run.rate(lattice.config(workers, prefetch))
    return run.choice()


def by_optuna(make_sampler: Callable[[Any, int], Any]) -> Strategy:
    def strategy(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        run = _Run(bench)

        def objective(trial: optuna.Trial) -> float:
            workers = lattice.workers[trial.suggest_int("workers", 0, len(lattice.workers) - 1)]
            prefetch = trial.suggest_categorical("prefetch", PREFETCH_FACTORS)
            return run.rate(lattice.config(workers, prefetch))

        optuna.create_study(direction="maximize", sampler=make_sampler(optuna, seed)).optimize(
            objective, n_trials=TRIALS
        )
        return run.choice()

    return strategy


def plain(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    machine = inspect_machine()
    with open_probe(workload_of(regret_workload(workload)), machine, None) as opened:
        begun = time.perf_counter()
        look = BurstPlan(max_s=LOOK_S, min_s=LOOK_S, relative_error=0.0, seed=seed)
        seen = opened.probe.burst(LoaderConfig(num_workers=LOOK_WORKERS), look)
        seconds = time.perf_counter() - begun
    if isinstance(seen, Failure):
        raise BenchError(seen.message)
    stages = {"fetch_s": seen.service_s, "fetch_cpu_s": seen.service_cpu_s, "step_s": seen.step_s}
    rule = plain_rule(cores=machine.usable_cores, max_workers=lattice.workers[-1], **stages)
    return Choice(config=lattice.config(rule.num_workers, rule.prefetch_factor or 2), seconds=seconds)


def in_child(who: str) -> Strategy:
    """The choice that a process of its own prints (`studies.regret.child`)."""

    def strategy(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
        if who == "loadtune" and importlib.util.find_spec("loadtune") is None:
            raise BenchError("it is not installed; pip install --no-deps loadtune==0.3.0 would work")
        command = [sys.executable, "-W", "ignore", "-m", "studies.regret.child", who, workload, str(seed)]
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            output, errors = child.communicate(timeout=CHILD_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise BenchError(f"no result after {CHILD_DEADLINE_S:.0f} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # its own session: what it started is in it too
            child.wait()
        if child.returncode != 0 or not output:
            raise BenchError(errors[-1500:])
        record = json.loads(output.splitlines()[-1])
        return Choice(config=LoaderConfig.from_dict(record["config"]), seconds=record["seconds"])

    return strategy


STRATEGIES: dict[str, Strategy] = {
    OURS: in_child("ours"),
    "torch default": by_rule(lambda cores: LoaderConfig()),
    "workers = cores": by_rule(lambda cores: LoaderConfig(num_workers=cores)),
    PLAIN_RULE: plain,
    "tpe 16": by_optuna(lambda optuna, seed: optuna.samplers.TPESampler(seed=seed)),
    "random 16": by_optuna(lambda optuna, seed: optuna.samplers.RandomSampler(seed=seed)),
    "grid": grid,
    "loadtune": in_child("loadtune"),
}
