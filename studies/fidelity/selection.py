"""What does `compare()` show, and how often is it wrong?

    python -m studies fidelity.selection [--runs 1000] [--only power]

Its own rounds (`tuning.compare.paired_rounds`) run on simulated bursts of 0.8 s, whose rates scatter by a normal or by a
heavy-tailed noise beside a drift of 1% that all bursts of a round share. What is told is what its sentences say.

    power     how often is a side that is faster by so much told to be so, and are equal sides told apart?
    right     of sides that are equal, or scatter by 5%: how often does an interval hold the true ratio, and how often are
              equal ones told apart, any of them? Rounds end by the rule of `compare()`, or after 2 or 3, as in `tune()`
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from autotune_loader.diagnosis.messages import Answer, answer
from autotune_loader.results.comparison import ratios_of
from autotune_loader.tuning.bursting import Budget
from autotune_loader.tuning.compare import paired_rounds
from autotune_loader.values import Interval, LoaderConfig, Measurement, Round, Trial
from studies.study import Row, Table
from tests.support import FakeClock, SimulatedMachine, simulated_trials

BURST_S, DRIFT_SD, APART_SD = 0.8, 0.01, 0.05
HEAVY_FREEDOM = 3.0
LOOKS_DECIDED = 0.05
"""Like `tune()`, the other rule ends after two rounds where the sides look so far apart."""
GOALS = {(1.10, 0.03, 30): 0.95, (1.05, 0.03, 60): 0.90}
GOAL_COVERED, GOAL_FALSE = 0.94, 0.01
BAR = "10% in 30 s told in 95%, 5% in 60 s in 90%, equal sides in at most 1%; 94% of intervals hold the truth"
SHAPE: Any = simulated_trials(SimulatedMachine(), LoaderConfig())[0].measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of comparison."""

    ratio: float | None = None
    """Of every other side to the first; None where every fourth seed has sides apart, and the others equal ones."""
    sides: int = 2
    noise_sd: float = 0.03
    is_heavy: bool = False
    budget_s: float = 30.0
    is_like_tune: bool = False


class Told(NamedTuple):
    """What a comparison told, beside the truth."""

    is_equal: bool
    rows: set[str]
    covered: list[bool]


def compared(kind: Kind, seed: int) -> Told:
    """One comparison."""
    rng, clock, names = random.Random(f"{kind} {seed}"), FakeClock(), "abcde"[: kind.sides]
    trials, rounds = {name: [_trial(SHAPE)] for name in names}, list[Round]()
    apart_sd = APART_SD if kind.ratio is None and seed % 4 == 3 else 0.0
    truth = {name: rng.gauss(math.log(kind.ratio or 1.0), apart_sd) for name in names} | {"a": 0.0}
    drifts = [rng.gauss(0.0, DRIFT_SD) for _ in range(200)]

    def burst(name: str, number: int) -> None:
        clock.advance(BURST_S)
        noise = rng.gauss(0.0, 1.0)
        if kind.is_heavy:  # Student's t of variance 1
            noise *= math.sqrt((HEAVY_FREEDOM - 2) / rng.gammavariate(HEAVY_FREEDOM / 2, 2.0))
        rate = 1000.0 * math.exp(truth[name] + drifts[number] + kind.noise_sd * noise)
        found = replace(SHAPE, samples_per_s=Interval(value=rate, low=rate, high=rate, count=20))
        trials[name].append(_trial(found, number))

    for each in paired_rounds(trials, burst, Budget(kind.budget_s + 1e-6, clock)):
        rounds.append(each)
        ratios = ratios_of(rounds, list(names), len(names))
        is_far = all(abs(math.log(ratio.value)) > LOOKS_DECIDED for ratio in ratios.values())
        if kind.is_like_tune and len(rounds) >= (2 if is_far else 3):
            break
    return Told(
        is_equal=not any(truth.values()),
        rows={answer(name, ratio, "a").kind for name, ratio in ratios.items()},
        covered=[each.low <= math.exp(truth[name]) <= each.high for name, each in ratios.items()],
    )


def _trial(measured: Measurement, number: int | None = None) -> Trial:
    return Trial.of(0, LoaderConfig(), measured, round=number, seconds=BURST_S)


def _told(told: Sequence[Told], *rows: Answer) -> float:
    """How often one of these was told of a side."""
    return statistics.fmean(bool(each.rows & {row.kind for row in rows}) for each in told)


def power(pool: Any, seeds: Sequence[int]) -> Table:
    """The first table."""
    for noise, budget_s in itertools.product((0.03, 0.06, 0.20), (30, 60)):
        cells, is_met = {"noise": f"{noise:.0%}", "budget": f"{budget_s} s"}, True
        for ratio in (1.02, 1.03, 1.05, 1.10, 1.20, 1.0):
            kind, is_equal = Kind(ratio=ratio, noise_sd=noise, budget_s=budget_s), ratio == 1.0
            told = pool.map(partial(compared, kind), seeds, chunksize=20)
            share = _told(told, Answer.FASTER, *([Answer.SLOWER] if is_equal else []))
            cells["equal sides told apart" if is_equal else f"{ratio:.2f}"] = f"{share:.1%}"
            goal = -GOAL_FALSE if is_equal else GOALS.get((ratio, noise, budget_s), 0.0)
            is_met &= not _is_missed(share, goal, len(told))
        yield Row(cells, is_met)


def right(pool: Any, seeds: Sequence[int]) -> Table:
    """The second table."""
    for noise, heavy, sides, like in itertools.product((0.03, 0.09, 0.20, 0.30), (False, True), (2, 5), (False, True)):
        kind = Kind(sides=sides, noise_sd=noise, is_heavy=heavy, budget_s=32.0 * sides, is_like_tune=like)
        told = pool.map(partial(compared, kind), seeds, chunksize=20)
        covered = statistics.fmean(one for each in told for one in each.covered)
        equal = [each for each in told if each.is_equal]
        false = _told(equal, Answer.FASTER, *([] if like else [Answer.SLOWER]))  # tune() claims gains only
        cells = {
            "noise": f"{noise:.0%}{', heavy tails' * heavy}",
            "sides": sides,
            "ended like": "tune()" if like else "compare()",
        }
        cells |= {"covered": f"{covered:.1%}", "equal sides told apart": f"{false:.2%}"}
        is_missed = _is_missed(covered, GOAL_COVERED, len(told)) or _is_missed(false, -GOAL_FALSE, len(equal))
        yield Row({**cells, "runs": len(told)}, not is_missed)


def _is_missed(figure: float, goal: float, count: int) -> bool:
    """Whether a goal, negative where it is the most, is missed by more than chance, two standard errors, explains."""
    chance = 2 * math.sqrt(abs(goal) * (1 - abs(goal)) / count)
    return figure > -goal + chance if goal < 0 else figure < goal - chance


def rows(*, only: str = "", runs: int = 1000, quick: bool = False) -> Table:
    """`runs`: comparisons of each kind."""
    seeds = range(20 if quick else runs)
    with multiprocessing.Pool(2) as pool:
        for table in (power, right):
            if only in table.__name__:
                yield from table(pool, seeds)
