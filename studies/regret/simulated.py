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
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autotune_loader.decision.plain_rule import LOOK_S, LOOK_WORKERS, plain_rule_of
from autotune_loader.decision.space import Space
from autotune_loader.tuning.burst_source import SEARCH_BURST
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.session import TuningSession
from autotune_loader.tuning.state import SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trial import Trial
from studies.regret import NEAR, OURS, PLAIN_RULE, at
from studies.regret.machines import WIDE, few_cores_machine, oracle_of, random_machine, space_of
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe, simulated_run

RESULTS = Path(__file__).parent / "results" / "simulated.jsonl"
# What the probe process takes to start on a warm machine: importing torch, unpickling, warming up.
START_S = 3.5


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


class _Watcher:
    """Ends a search, as Ctrl-C would, when its time is up or, if so told, at the finals."""

    def __init__(self, clock: FakeClock, limit_s: float, finals: bool) -> None:
        self._clock, self._limit_s, self._finals = clock, limit_s, finals
        self.searched_s = 0.0

    def trial(self, state: SearchState, trial: Trial, seconds_left: float) -> None:
        self.searched_s = self._clock()
        if self.searched_s >= self._limit_s:
            raise KeyboardInterrupt

    def finals_round(self, *_: object) -> None:
        if not self._finals:
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Chosen:
    """A strategy's choice, and its seconds."""

    config: LoaderConfig
    seconds: float = 0.0


Strategy = Callable[[SimulatedMachine, Space, str, int, float], Chosen]
"""Of a machine, its space, its kind, a seed, and the seconds that the strategy may take."""


def by_search(search: str, budget_s: float) -> Strategy:
    """A strategy that is one of our own searches; the others end without finals, as `study.optimize()` would."""

    def run(machine: SimulatedMachine, space: Space, kind: str, seed: int, limit_s: float) -> Chosen:
        clock = FakeClock()
        probe = SimulatedProbe(machine, clock, seed=seed)
        watcher = _Watcher(clock, limit_s, finals=search == "auto")
        clock.advance(START_S)
        found = TuningSession(
            probe,
            simulated_run(machine, space),
            TuneOptions(budget_s=budget_s, search=search, seed=seed),
            clock=clock,
            started=0.0,
            listener=watcher,
        ).run()
        fastest = found.fastest()
        assert fastest is not None
        if search != "auto":
            return Chosen(fastest.config, watcher.searched_s)
        chosen = found.finals.winner if found.finals is not None else fastest.config
        return Chosen(chosen, clock())

    return run


def by_rule(rule: Callable[[SimulatedMachine], LoaderConfig]) -> Strategy:
    """A strategy that measures nothing."""
    return lambda machine, space, kind, seed, limit_s: Chosen(rule(machine))


def climb(machine: SimulatedMachine, space: Space, kind: str, seed: int, limit_s: float) -> Chosen:
    """One worker more while that gains 3 % or more (Cachew's rule)."""
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed)
    clock.advance(START_S)
    best, best_rate = LoaderConfig(), 0.0
    for workers in range(space.max_workers + 1):
        config = LoaderConfig(num_workers=workers)
        outcome = probe.burst(config, replace(SEARCH_BURST, seed=workers))
        if not isinstance(outcome, Measurement) or outcome.samples_per_s.value < 1.03 * best_rate:
            break
        best, best_rate = config, outcome.samples_per_s.value
    return Chosen(best, clock())


def plain(machine: SimulatedMachine, space: Space, kind: str, seed: int, limit_s: float) -> Chosen:
    """The plain rule, from the stage times of a single burst."""
    clock = FakeClock()
    probe = SimulatedProbe(machine, clock, seed=seed)
    clock.advance(START_S)
    seen = probe.burst(
        LoaderConfig(num_workers=LOOK_WORKERS), BurstPlan(max_s=LOOK_S, min_s=LOOK_S, relative_error=0.0, seed=seed)
    )
    if not isinstance(seen, Measurement):
        return Chosen(LoaderConfig(), clock())
    return Chosen(plain_rule_of(seen, machine.cores, space.max_workers), clock())


STRATEGIES: dict[str, Strategy] = {
    OURS: by_search("auto", 60.0),
    "torch default": by_rule(lambda machine: LoaderConfig()),
    "workers = cores": by_rule(lambda machine: LoaderConfig(num_workers=machine.cores)),
    PLAIN_RULE: plain,
    "climb 3 %": climb,
    "random": by_search("random", math.inf),
    "tpe": by_search("tpe", math.inf),
    "grid": by_search("grid", math.inf),
}
# Rivals that search may take so many times our seconds; others end by themselves.
PATIENCE = {"random": 10.0, "tpe": 10.0, "grid": 20.0}


def study_machine(
    seed: int, strategies: Sequence[str], kept: Path | None = None, few_cores: bool = False
) -> list[Outcome]:
    """Every strategy on one machine."""
    kind, machine = few_cores_machine(seed) if few_cores else random_machine(seed)
    space = space_of(kind, machine)
    oracle = oracle_of(seed, machine, replace(space, max_workers=WIDE) if few_cores else space, kept)
    outcomes = []
    limits: dict[str, float] = {}
    for name in strategies:
        chosen = STRATEGIES[name](machine, space, kind, seed, limits.get(name, math.inf))
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
