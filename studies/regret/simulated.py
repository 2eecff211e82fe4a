"""How far from the best is what is chosen, on hundreds of simulated machines, and what do the seconds buy?

    python -m studies regret.simulated --machines 300 --first 140000 --oracles /tmp/oracles   # --laws foreign, --laws slow
    python -m studies regret.simulated --strategies "autotune_loader,tune() with TPE"         # ours comes first

Every strategy searches on the same simulated machine through the same `Probe` interface; the truth is the machine's own
long-run rate without noise, which the folder of `--oracles` keeps from run to run. What `tune()` would write is judged,
whatever its status. Simulated seconds are counted by the fake clock: bursts, worker start-up and the start of the probe
process, after which the budget begins. A rival that searches goes on until it has had so many times the seconds that
`autotune_loader` took on that machine after the start (`PATIENCE`).
"""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import optuna

from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.assemble import assembled
from autotune_loader.values import BurstPlan, Interval, LoaderConfig, Measurement
from studies.regret import NEAR, OURS, WITH_TPE, Outcome, table, verdict_of
from studies.regret.machines import COUNTS, LAWS, oracle_of
from studies.regret.strategies import LOOK, LOOK_WORKERS, STRATEGIES
from studies.study import Row, Table
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.tuned import simulated_run, simulated_search

WARM_UP_SD = 0.15
"""Relative standard deviation of what the first batch of a probe says of all others (its logarithm)."""
BUDGET_S = 60.0
RIVAL_BURST = BurstPlan(max_s=0.6, min_s=0.3, relative_error=0.015)
SAMPLERS: dict[str, Callable[[int], optuna.samplers.BaseSampler | None]] = {
    OURS: lambda seed: None,
    WITH_TPE: lambda seed: optuna.samplers.TPESampler(seed=seed),
}
"""`tune()` with its own sampler, or with one that is given, of a seed."""
RUNS: dict[str, dict[str, Any]] = {"slow": {"own": LoaderConfig(), "epoch_batches": 10_000}}
"""What the user has, by law: elsewhere nothing, and an epoch that does not end."""
# Rivals that search may take so many times our seconds with a warm probe; others end by themselves.
PATIENCE = {"random": 10.0, "tpe": 10.0, "grid": 20.0}
BAR = "usual: 92% of ours within 2% (p90 2%, median 11 s); foreign: 85%; slow: 90% of the best, but for the hardest"
GOALS, SLOW_LOSS = {"usual": 0.92, "foreign": 0.85}, 0.1
HARDEST = ("fetch 8 s, step 0.3 s", "fetch 15 s, step 0.3 s", "fetch 20 s, step 5 s")
"""Slow machines without a bar: their budget is the time of a few batches."""


class SimulatedField:
    """A simulated machine to look on, by a probe that has to be started first."""

    def __init__(self, machine: SimulatedMachine, seed: int, limit_s: float) -> None:
        self.cores, self.counts, self.trials = machine.cores, COUNTS, None
        self.clock, self._limit_s, self._asked = FakeClock(), limit_s, 0
        self._probe = SimulatedProbe(machine, self.clock, seed=seed)

    def rate(self, config: LoaderConfig) -> float:
        self._start()
        config = replace(config, pin_memory=self._probe.machine.pin_s > 0)  # as people do with an accelerator
        outcome = self._probe.burst(config, RIVAL_BURST)
        return outcome.samples_per_s.value if isinstance(outcome, Measurement) else 0.0

    def look(self) -> Measurement | None:
        self._start()
        seen = self._probe.burst(LoaderConfig(num_workers=LOOK_WORKERS), LOOK)
        return seen if isinstance(seen, Measurement) else None

    def is_over(self) -> bool:
        return self.clock() >= self._limit_s

    def _start(self) -> None:
        if not self._asked:
            self.clock.advance(self._probe.machine.probe_s)
        self._asked += 1


def tuned(
    machine: SimulatedMachine, seed: int, sampler: optuna.samplers.BaseSampler | None, **run: Any
) -> tuple[TuningResult, float]:
    """`tune()`, whose probe knows its first batch alone, and its seconds."""
    clock, noise = FakeClock(machine.probe_s), random.Random(seed + 7)
    off = math.exp(noise.gauss(0.0, WARM_UP_SD))
    warmup = {"first_fetch_s": (machine.cpu_s + machine.wait_s) * off, "first_fetch_cpu_s": machine.cpu_s * off}
    probe = SimulatedProbe(machine, clock, seed=seed, epoch_batches=run.get("epoch_batches"))
    search = simulated_search(probe, simulated_run(machine, **warmup, **run), clock, sampler=sampler, budget_s=BUDGET_S)
    return assembled(search, clock()), clock()


def study_machine(laws: str, seed: int, strategies: Sequence[str], kept: Path | None) -> list[Outcome]:
    """Every strategy on one machine."""
    kind, machine = LAWS[laws](seed)
    oracle, outcomes, ours_s = oracle_of(laws, seed, machine, kept), list[Outcome](), math.inf
    for name in strategies:
        status = ""
        if name in SAMPLERS:
            result, seconds = tuned(machine, seed, SAMPLERS[name](seed), **RUNS.get(laws, {}))
            config, status = result.best, result.status
            ours_s = seconds - machine.probe_s if name == OURS else ours_s
        else:
            field = SimulatedField(machine, seed, machine.probe_s + PATIENCE.get(name, 1.0) * ours_s)
            config, seconds = STRATEGIES[name](field, seed), field.clock()
        regret = oracle.regret(config)
        over = [(1 - each.regret) / (1 - regret) for each in outcomes if each.strategy == OURS]
        outcomes.append(
            Outcome(
                job=kind, strategy=name, seed=seed, cores=machine.cores, workers=config.num_workers, chosen=str(config),
                regret=regret, seconds=seconds, status=status,
                ours=[verdict_of(Interval(value=each, low=each, high=each, count=1)) for each in over],
            )
        )  # fmt: skip
    return outcomes


def rows(
    *, laws: str = "usual", machines: int = 300, first: int = 0, strategies: str = "", oracles: str = "", quick: bool = False
) -> Table:  # fmt: skip
    names = tuple(strategies.split(",")) if strategies else (OURS,) if quick else (*SAMPLERS, *STRATEGIES)
    if unknown := {*names} - {*SAMPLERS, *STRATEGIES}:
        raise SystemExit(f"{unknown} is none of {', '.join((*SAMPLERS, *STRATEGIES))}")
    kept = Path(oracles) if oracles else None
    with multiprocessing.Pool() as pool:
        jobs = [(laws, first + number, names, kept) for number in range(2 if quick else machines)]
        found = [each for outcomes in pool.starmap(study_machine, jobs, chunksize=2) for each in outcomes]
    for row in table(found):
        near = [each.regret <= NEAR for each in found if each.strategy == OURS]
        is_judged = row.cells["strategy"] == OURS and laws in GOALS and not quick
        yield row._replace(is_met=sum(near) >= GOALS[laws] * len(near) if is_judged else None)
    for name in names:
        mine = [each for each in found if each.strategy == name]
        for by in ("job", "cores") if name == OURS else ("job",):
            for row in table(sorted(mine, key=attrgetter(by)), by):
                worst = max(each.regret for each in mine if getattr(each, by) == row.cells[by])
                is_judged = laws == "slow" and name == OURS and by == "job" and row.cells[by] not in HARDEST
                yield Row({"strategy": name, **row.cells}, worst <= SLOW_LOSS if is_judged else None)
    for each in found:
        if each.strategy == OURS and each.regret > NEAR:
            told = f"{each.chosen}, {each.regret:.1%} lost after {each.seconds:.0f} s, {each.status}"
            yield f"missed {each.seed}: {each.job}, {each.cores} cores: {told}"
