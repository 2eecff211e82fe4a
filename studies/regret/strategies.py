"""The strategies that look for a configuration, each timed from call to result in a process that is warm already.

| strategy | how a person would do it |
|---|---|
| autotune_loader | `tune(dataset, model, ...)`, budget "60s"; its own probe process starts within the time |
| running loop | one loop that AutoLoader tunes as it runs, until it has settled; no bursts, no paired rounds |
| torch default, workers = cores | nothing is measured, 0 seconds |
| grid | every num_workers x prefetch_factor, an epoch of each but at most 1 s, worker start-up included (as DPT does) |
| random 16, tpe 16 | Optuna, 16 trials over workers, prefetch and step threads, 1 s each, worker start-up included |
| plain rule | one look of 1.5 s at 2 workers, then arithmetic (`plain_rule`) |
| climb 3 % | one worker more while 1 s (from the first batch on) is 3 % faster: Cachew's rule |
| loadtune | `loadtune.tune(workload)` with its defaults, in its own environment |
| by hand | the list that the document tries, an epoch of each but at most 2 s |

Python, torch and the dataset are loaded before any clock starts, so nobody but `autotune_loader` pays for a process start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune_loader.decision.plain_rule import LOOK_S, LOOK_WORKERS, plain_rule
from autotune_loader.values.config import LoaderConfig
from studies.regret import OURS, PLAIN_RULE, RUNNING_LOOP
from studies.regret.bench import ROOT, Bench, BenchError, Timing
from studies.workloads import study_cache

BUDGET = "60s"
NAIVE_S = 1.0
BY_HAND_S = 2.0
TRIALS = 16
CLIMB_GAIN = 1.03
CHILD_DEADLINE_S = 150.0
LOADTUNE = "loadtune==0.3.0"
PREFETCH_FACTORS = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """The configurations that strategies and oracle choose from."""

    workers: tuple[int, ...]
    threads: tuple[int | None, ...]

    def config(self, workers: int, prefetch: int, threads: int | None = None) -> LoaderConfig:
        """A person who tunes keeps workers between epochs; nobody but torch's default does without."""
        return LoaderConfig(
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            consumer_threads=threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a strategy chose, after how long, and what it had chosen before."""

    config: LoaderConfig
    seconds: float
    history: tuple[tuple[float, LoaderConfig], ...] = ()
    """Best so far and when it became that; empty where only the end is known."""
    detail: Any = None


def lattice_of(cores: int, on_cpu: bool) -> Lattice:
    """Workers up to twice the cores, and four times where nothing but loading needs them; threads for a step on the CPU.

    Up to 16 always: where samples are waited for, their number does not depend on the cores.
    """
    workers = {0, 1, 2, 3, 4, 6, 8, 12, 16, cores // 2, 3 * cores // 4, cores, 3 * cores // 2, 2 * cores}
    threads: tuple[int | None, ...] = (None,)
    if on_cpu:
        threads = (None, *sorted({max(1, cores // 2), 1}, reverse=True))
    else:
        workers |= {24, 3 * cores, 4 * cores}
    return Lattice(workers=tuple(sorted(workers)), threads=threads)


class Run:
    """One strategy at work: the clock, and the best so far by its own naive rates."""

    def __init__(self, bench: Bench, clock: str, seconds: float, epochs: bool) -> None:
        self._bench, self._clock, self._seconds, self._epochs = bench, clock, seconds, epochs
        self._begun = time.perf_counter()
        self._best = 0.0
        self.seen: list[tuple[str, float]] = []
        self.history: list[tuple[float, LoaderConfig]] = []

    def rate(self, config: LoaderConfig) -> float:
        timing = Timing(clock=self._clock, seconds=self._seconds, seed=len(self.seen), epochs=self._epochs)  # type: ignore[arg-type]
        try:
            rate = self._bench.time(config, timing).samples_per_s
        except BenchError as error:
            self.seen.append((f"{config}: {error}", 0.0))
            return 0.0
        self.seen.append((str(config), rate))
        if rate > self._best:
            self._best = rate
            self.history.append((time.perf_counter() - self._begun, config))
        return rate

    def choice(self, config: LoaderConfig | None = None) -> Choice:
        """The fastest by its own rates, unless the strategy decided otherwise."""
        chosen = config or (self.history[-1][1] if self.history else LoaderConfig())
        seconds = time.perf_counter() - self._begun
        return Choice(config=chosen, seconds=seconds, history=tuple(self.history), detail=self.seen)


Strategy = Callable[[str, Bench, Lattice, int], Choice]
BEFORE, BEFORE_VARIABLE = "version before", "AUTOTUNE_LOADER_BEFORE"
"""Ours of another checkout, and the variable that names its folder."""


def by_rule(config: Callable[[int], LoaderConfig]) -> Strategy:
    return lambda workload, bench, lattice, seed: Choice(config=config(os.cpu_count() or 1), seconds=0.0)


def grid(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    run = Run(bench, "start", NAIVE_S, epochs=False)
    for workers in lattice.workers:
        for prefetch in PREFETCH_FACTORS if workers else (2,):
            run.rate(lattice.config(workers, prefetch))
    return run.choice()


def by_optuna(make_sampler: Callable[[Any, int], Any]) -> Strategy:
    def strategy(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        run = Run(bench, "start", NAIVE_S, epochs=False)

        def objective(trial: optuna.Trial) -> float:
            workers = lattice.workers[trial.suggest_int("workers", 0, len(lattice.workers) - 1)]
            prefetch = trial.suggest_categorical("prefetch", PREFETCH_FACTORS)
            threads = trial.suggest_categorical("threads", lattice.threads)
            return run.rate(lattice.config(workers, prefetch, threads))

        study = optuna.create_study(direction="maximize", sampler=make_sampler(optuna, seed))
        study.optimize(objective, n_trials=TRIALS)
        return run.choice()

    return strategy


def plain(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    begun = time.perf_counter()
    seen = bench.look(LoaderConfig(num_workers=LOOK_WORKERS), LOOK_S)
    rule = plain_rule(**asdict(seen), cores=os.cpu_count() or 1)
    config = lattice.config(rule.num_workers, rule.prefetch_factor or 2)
    return Choice(config=config, seconds=time.perf_counter() - begun, detail=asdict(seen))


def climb(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    run = Run(bench, "first_batch", NAIVE_S, epochs=True)
    best, best_rate = LoaderConfig(), run.rate(LoaderConfig())
    for workers in range(1, lattice.workers[-1] + 1):
        config = lattice.config(workers, 2)
        rate = run.rate(config)
        if rate < CLIMB_GAIN * best_rate:
            break
        best, best_rate = config, rate
    return run.choice(best)


def _workers(*counts: int, prefetch: int = 2) -> tuple[LoaderConfig, ...]:
    return tuple(
        LoaderConfig(num_workers=n, prefetch_factor=prefetch if n else None, persistent_workers=n > 0) for n in counts
    )


# What each document tries (SEEDS.md): a list of workers, the deeper prefetch that (c) adds, the fixed values of (d).
BY_HAND: dict[str, tuple[LoaderConfig, ...]] = {
    "guide": _workers(0, 2, 4, 8),
    "lesson": _workers(0, 2, 4, 8),
    "article": (*_workers(2, 4, 8), *_workers(4, prefetch=4)),
    "tutorial": _workers(4),
    "imbalance": _workers(2, 4, 8),
}


def by_hand(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    candidates = BY_HAND[workload]
    if len(candidates) == 1:
        return Choice(config=candidates[0], seconds=0.0)
    run = Run(bench, "start", BY_HAND_S, epochs=False)
    for config in candidates:
        run.rate(config)
    return run.choice()


def autotune_loader(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    return _from_child([sys.executable, "-W", "ignore", "-m", "studies.regret.tuned", workload, str(seed), BUDGET])


def running_loop(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    return _from_child([sys.executable, "-W", "ignore", "-m", "studies.regret.running_loop", workload])


def version_before(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    """The same of another checkout, whose folder `AUTOTUNE_LOADER_BEFORE` names: `git worktree add /tmp/before REVISION`."""
    folder = os.environ.get(BEFORE_VARIABLE)
    if not folder:
        raise BenchError(f"{BEFORE_VARIABLE} names no checkout")
    command = [sys.executable, "-W", "ignore", "-m", "studies.regret.tuned", workload, str(seed), BUDGET]
    return _from_child(command, root=Path(folder))


def loadtune(workload: str, bench: Bench, lattice: Lattice, seed: int) -> Choice:
    return _from_child([str(loadtune_python()), "-W", "ignore", "-m", "studies.regret.loadtune_child", workload])


def _from_child(command: list[str], root: Path = ROOT) -> Choice:
    """The choice that a process prints as its only line.

    Raises:
        BenchError: it failed or took too long, with the end of what it said.
    """
    environment = {**os.environ, "PYTHONPATH": str(root)}
    child = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=CHILD_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"no result after {CHILD_DEADLINE_S:.0f} s") from None
    finally:
        _end_session(child)
    if child.returncode != 0 or not output:
        raise BenchError(errors[-1500:])
    record = json.loads(output.splitlines()[-1])
    config = LoaderConfig.from_dict(record["config"])
    return Choice(config=config, seconds=record["seconds"], detail=record["detail"])


def _end_session(child: subprocess.Popen[str]) -> None:
    import contextlib
    import signal

    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def loadtune_python() -> Path:
    """The interpreter of loadtune's environment, made on the first call; it sees the torch of this one, and installs none.

    Raises:
        BenchError: it cannot be installed.
    """
    folder = study_cache() / "loadtune-venv"
    python = folder / "bin" / "python"
    if _has_loadtune(python):
        return python
    import sysconfig

    here = sysconfig.get_paths()["purelib"]
    steps = [
        [sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder)],
        [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", LOADTUNE],
    ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BenchError(f"loadtune cannot be installed: {done.stderr[-500:]}")
    for site in folder.glob("lib/python*/site-packages"):
        (site / "torch-of-the-study.pth").write_text(here + "\n")
    return python


def _has_loadtune(python: Path) -> bool:
    if not python.exists():
        return False
    return subprocess.run([python, "-c", "import loadtune, torch"], capture_output=True, check=False).returncode == 0


STRATEGIES: dict[str, Strategy] = {
    OURS: autotune_loader,
    BEFORE: version_before,
    RUNNING_LOOP: running_loop,
    "torch default": by_rule(lambda cores: LoaderConfig()),
    "workers = cores": by_rule(lambda cores: LoaderConfig(num_workers=cores)),
    PLAIN_RULE: plain,
    "climb 3 %": climb,
    "tpe 16": by_optuna(lambda optuna, seed: optuna.samplers.TPESampler(seed=seed)),
    "random 16": by_optuna(lambda optuna, seed: optuna.samplers.RandomSampler(seed=seed)),
    "grid": grid,
    "loadtune": loadtune,
    "by hand": by_hand,
}


def applies(strategy: str, workload: str) -> bool:
    if strategy == BEFORE:
        return BEFORE_VARIABLE in os.environ
    return strategy != "by hand" or workload in BY_HAND


def seeds_of(strategy: str, seeds: int) -> Iterator[int]:
    """Only ours is run with every seed: the others cost more, and rules have none."""
    yield from range(seeds if strategy in (OURS, BEFORE, RUNNING_LOOP) else 1)
