"""Regret on hundreds of simulated machines: `python -m studies.regret.simulated [--machines 300]`.

Every strategy searches the same space on the same simulated machine through the same `Probe` interface; the truth is the
machine's own long-run rate without noise. Simulated seconds are counted by the fake clock: bursts, worker start-up and
the start of the probe process (`START_S`) included. A rival that searches goes on until it has had so many times the seconds
that `autotune_loader` took on that machine (`PATIENCE`).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import optuna

from autotune_loader.search.rule import plain_rule
from autotune_loader.search.sampler import quiet_optuna
from autotune_loader.search.space import Space
from autotune_loader.tuning.bursting import SEARCH_BURST
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from studies.regret import LOOK_S, LOOK_WORKERS, NEAR, OURS, PLAIN_RULE, at
from studies.regret.machines import few_cores_machine, oracle_of, random_machine
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import START_S, simulated_run, simulated_search

RESULTS = Path(__file__).parent / "results" / "simulated.jsonl"
WARM_UP_SD = 0.15
"""Relative standard deviation of what the first batch of a probe says of all others (its logarithm)."""
BUDGET_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One strategy on one machine."""

    machine: int
    kind: str
    cores: int
    strategy: str
    regret: float
    """1 - truth of the chosen configuration / truth of the best one."""
    seconds: float
    workers: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """A strategy's choice, and its seconds."""

    config: LoaderConfig
    seconds: float = 0.0


Strategy = Callable[[SimulatedMachine, int, float], Chosen]
"""Of a machine, a seed, and the seconds that the strategy may take."""


def ours(machine: SimulatedMachine, seed: int, limit_s: float) -> Chosen:
    """`tune()`, whose probe knows its first batch alone."""
    clock, noise = FakeClock(), random.Random(seed + 7)
    clock.advance(START_S)
    off = math.exp(noise.gauss(0.0, WARM_UP_SD))
    warmup = {"first_fetch_s": (machine.cpu_s + machine.wait_s) * off, "first_fetch_cpu_s": machine.cpu_s * off}
    probe = SimulatedProbe(machine, clock, seed=seed)
    found = simulated_search(probe, simulated_run(machine, **warmup), clock, budget_s=BUDGET_S, started=0.0)
    outcome, fastest = found.outcome, found.fastest()
    assert fastest is not None
    return Chosen(fastest.config if outcome is None else outcome.winner, clock())


def by_sampler(make: Callable[[Space, int], optuna.samplers.BaseSampler]) -> Strategy:
    """A sampler of Optuna's over the same space, its fastest trial chosen: no rounds, as `study.optimize()` has none."""

    def run(machine: SimulatedMachine, seed: int, limit_s: float) -> Chosen:
        clock, space = FakeClock(), Space()
        probe = SimulatedProbe(machine, clock, seed=seed)
        clock.advance(START_S)
        with quiet_optuna():
            study = optuna.create_study(direction="maximize", sampler=make(space, seed))

            def objective(trial: optuna.Trial) -> float:
                outcome = probe.burst(space.suggest(trial), replace(SEARCH_BURST, seed=trial.number))
                if clock() >= limit_s:
                    study.stop()
                return outcome.samples_per_s.value if isinstance(outcome, Measurement) else 0.0

            study.optimize(objective)
        return Chosen(space.config(study.best_params), clock())

    return run


def _grid(space: Space, seed: int) -> optuna.samplers.BaseSampler:
    axes = {"num_workers": list(space.worker_counts()), "prefetch_factor": list(space.prefetch_factors)}
    return optuna.samplers.GridSampler(axes, seed=seed)


def by_rule(rule: Callable[[SimulatedMachine], LoaderConfig]) -> Strategy:
    """A strategy that measures nothing."""
    return lambda machine, seed, limit_s: Chosen(rule(machine))


def climb(machine: SimulatedMachine, seed: int, limit_s: float) -> Chosen:
    """One worker more while that gains 3 % or more (Cachew's rule)."""
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed)
    clock.advance(START_S)
    best, best_rate = LoaderConfig(), 0.0
    for workers in range(65):
        config = LoaderConfig(num_workers=workers)
        outcome = probe.burst(config, replace(SEARCH_BURST, seed=workers))
        if not isinstance(outcome, Measurement) or outcome.samples_per_s.value < 1.03 * best_rate:
            break
        best, best_rate = config, outcome.samples_per_s.value
    return Chosen(best, clock())


def plain(machine: SimulatedMachine, seed: int, limit_s: float) -> Chosen:
    """The plain rule, from the stage times of a single burst."""
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed)
    clock.advance(START_S)
    look = BurstPlan(max_s=LOOK_S, min_s=LOOK_S, relative_error=0.0, seed=seed)
    seen = probe.burst(LoaderConfig(num_workers=LOOK_WORKERS), look)
    if not isinstance(seen, Measurement):
        return Chosen(LoaderConfig(), clock())
    stages = {"fetch_s": seen.service_s, "fetch_cpu_s": seen.service_cpu_s, "step_s": seen.step_s}
    return Chosen(plain_rule(cores=machine.cores, **stages), clock())


STRATEGIES: dict[str, Strategy] = {
    OURS: ours,
    "torch default": by_rule(lambda machine: LoaderConfig()),
    "workers = cores": by_rule(lambda machine: LoaderConfig(num_workers=machine.cores)),
    PLAIN_RULE: plain,
    "climb 3 %": climb,
    "random": by_sampler(lambda space, seed: optuna.samplers.RandomSampler(seed=seed)),
    "tpe": by_sampler(lambda space, seed: optuna.samplers.TPESampler(seed=seed)),
    "grid": by_sampler(_grid),
}
# Rivals that search may take so many times our seconds; others end by themselves.
PATIENCE = {"random": 10.0, "tpe": 10.0, "grid": 20.0}


def study_machine(
    seed: int, strategies: Sequence[str], kept: Path | None = None, few_cores: bool = False
) -> list[Outcome]:
    """Every strategy on one machine."""
    kind, machine = few_cores_machine(seed) if few_cores else random_machine(seed)
    oracle = oracle_of(seed, machine, kept)
    outcomes = []
    limits: dict[str, float] = {}
    for name in strategies:
        chosen = STRATEGIES[name](machine, seed, limits.get(name, math.inf))
        if name == OURS:
            limits = {rival: times * chosen.seconds for rival, times in PATIENCE.items()}
        outcomes.append(
            Outcome(
                machine=seed,
                kind=kind,
                cores=machine.cores,
                strategy=name,
                regret=oracle.regret(chosen.config),
                seconds=chosen.seconds,
                workers=chosen.config.num_workers,
            )
        )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Regret and seconds by strategy, as a Markdown table."""
    lines = [
        "| strategy | machines | regret p50 | p90 | p95 | within 2 % | seconds p50 | p90 | mean workers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(outcome.strategy for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.strategy == name]
        regrets, seconds = [o.regret for o in mine], [o.seconds for o in mine]
        lines.append(
            f"| {name} | {len(mine)} | {at(regrets, 0.5):.1%} | {at(regrets, 0.9):.1%} | {at(regrets, 0.95):.1%} "
            f"| {sum(r <= NEAR for r in regrets) / len(mine):.0%} | {at(seconds, 0.5):.0f} | {at(seconds, 0.9):.0f} "
            f"| {statistics.fmean(o.workers for o in mine):.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first machine")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--oracles", type=Path, help="folder in which the true rates are kept from run to run")
    parser.add_argument("--few-cores", action="store_true", help="machines of 1, 2 and 4 cores, with much waiting")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    names = arguments.strategies.split(",")
    begun = time.monotonic()
    with multiprocessing.Pool(arguments.processes) as pool:
        jobs = [
            (seed, names, arguments.oracles, arguments.few_cores)
            for seed in range(arguments.first, arguments.first + arguments.machines)
        ]
        outcomes = [outcome for each in pool.starmap(study_machine, jobs, chunksize=2) for outcome in each]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
    print(table(outcomes))
    groups = [(kind, [o for o in outcomes if o.kind == kind]) for kind in sorted({o.kind for o in outcomes})]
    groups += [
        (f"{cores} cores", [o for o in outcomes if o.cores == cores]) for cores in sorted({o.cores for o in outcomes})
    ]
    for name, group in groups:
        print(f"\n{name}\n" + table(group))
    print(f"\n{arguments.machines} machines in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
