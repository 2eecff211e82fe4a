"""Fresh, interleaved, paired rounds between the few configurations that are left: what the verdict rests on.

    round 1   B A C      every candidate once, in random order, over the same indices
    round 2   C A B      ... until every question is answered, or the time is up
    round 3   A C B

The bursts of the search chose the candidates, so no rate that is reported comes from them: the best of many noisy bursts
looks better than it is, and only rounds run after the choice tell how good it really is. For the choice itself what the
search believed counts as one more witness, weighted by how sure it was: few rounds cannot tell 3 % apart, the twin often can.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from autotune_loader.config import LoaderConfig
from autotune_loader.stats import (
    MAX_ROUNDS,
    Candidate,
    Interval,
    Round,
    cheapest_within,
    log_ratios,
    mean_interval,
    sequential_interval,
    sequential_verdict,
    usable_rounds,
)
from autotune_loader.trial import BurstPlan, Failure, Measurement, Probe

# One burst of the finals: long enough to average over stalls, short enough that a round sees one state of the machine. It
# hardly ever ends early: a window that closes when it looks quiet has not seen the slow tail yet.
FINAL_BURST = BurstPlan(max_s=1.0, min_s=0.5, relative_error=0.003)
# Two-sided 95 % of a normal distribution.
Z_95 = 1.96
# Rounds that agree by chance are not exact; nor is a single one worthless.
LEAST_SPREAD = 0.002
SINGLE_ROUND_SD = 0.08
# The search's beliefs share the twin's errors, which their own deviations do not show.
PRIOR_SD = 0.05
# Fewer rounds say nothing about noise.
MIN_ROUNDS = 3
# The baseline is only compared with the winner; once that ratio is known this well it sits out.
BASELINE_PRECISION = 0.03
# A candidate that failed this often in the finals is out.
MAX_FAILURES = 2


Prior = Mapping[LoaderConfig, tuple[float, float]]
"""What was believed before: logarithm of samples/s and its standard deviation, by configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalsOutcome:
    """The rounds and what they say."""

    configs: tuple[LoaderConfig, ...]
    rounds: tuple[Round, ...]
    """Usable rounds; keys are positions in `configs` as text."""
    winner: LoaderConfig
    rate: Interval
    """Rate of the winner, from these rounds alone."""
    measurement: Measurement
    """The winner's latest burst in the finals."""
    speedup: Interval | None
    """Winner over baseline; None when no round measured both."""
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Standing:
    """Who is still in, and what has been measured."""

    configs: list[LoaderConfig]
    prior: Prior
    rounds: list[Round]
    failures: list[int]
    latest: dict[int, Measurement] = field(default_factory=dict)

    def active(self) -> list[int]:
        return [index for index in range(len(self.configs)) if self.failures[index] < MAX_FAILURES]


def run_finals(
    probe: Probe,
    candidates: Sequence[LoaderConfig],
    baseline: LoaderConfig,
    *,
    cost: Callable[[LoaderConfig], tuple[float, ...]],
    tolerance: float,
    time_left: Callable[[], float],
    patience_s: float,
    seed: int,
    deadline_s: float,
    prior: Prior | None = None,
    on_round: Callable[[int, dict[LoaderConfig, float]], None] = lambda number, rates: None,
) -> FinalsOutcome | None:
    """Race the candidates and the baseline; the cheapest of those within tolerance of the fastest wins.

    Args:
        probe: runs the bursts.
        candidates: configurations that may win, best guess first.
        baseline: what the winner is compared with; it may win too.
        cost: what a configuration costs, compared as tuples are.
        tolerance: relative difference that counts as equally fast.
        time_left: seconds that may still be spent; checked before each round.
        patience_s: seconds after which open questions between candidates within tolerance are left open.
        seed: of the order within the rounds.
        deadline_s: for one burst.
        prior: what the search believed of the candidates; used for the choice, never for a rate.
        on_round: told each round's rates.

    Returns:
        The outcome; None when no round could be completed.
    """
    configs = list(dict.fromkeys([*candidates, baseline]))
    standing = _Standing(configs, prior or {}, [], [0] * len(configs))
    base = configs.index(baseline)
    order, spent_s = random.Random(seed), 0.0
    while len(standing.rounds) < MAX_ROUNDS and standing.active():
        before_s = time_left()
        round_s = spent_s / len(standing.rounds) if standing.rounds else 0.0
        out_of_time = before_s < round_s or (spent_s + round_s > patience_s and len(standing.rounds) >= MIN_ROUNDS)
        if out_of_time or _is_settled(standing, base, tolerance):
            break
        _run_round(standing, probe, _entrants(standing, base, tolerance), order, deadline_s)
        spent_s += max(before_s - time_left(), 1e-9)
        rates = standing.rounds[-1].rates
        on_round(len(standing.rounds), {configs[int(key)]: rate for key, rate in rates.items()})
    return _outcome(standing, base, tolerance, cost)


def _run_round(standing: _Standing, probe: Probe, entrants: list[int], order: random.Random, deadline_s: float) -> None:
    number = len(standing.rounds)
    plan = BurstPlan(
        max_s=FINAL_BURST.max_s,
        min_s=FINAL_BURST.min_s,
        relative_error=FINAL_BURST.relative_error,
        seed=1_000 + number,  # apart from the search's seeds: fresh samples as well as fresh bursts
        deadline_s=deadline_s,
    )
    rates: dict[str, float] = {}
    foreign: list[float] = []
    for index in order.sample(entrants, len(entrants)):
        outcome = probe.burst(standing.configs[index], plan)
        if isinstance(outcome, Failure):
            standing.failures[index] += 1
            continue
        rates[str(index)] = outcome.samples_per_s.value
        standing.latest[index] = outcome
        if outcome.foreign_cpu_share is not None:
            foreign.append(outcome.foreign_cpu_share)
    standing.rounds.append(Round(rates=rates, foreign_cpu_share=max(foreign, default=None)))


def _entrants(standing: _Standing, base: int, tolerance: float) -> list[int]:
    """Who runs in the next round: all still in, but candidates shown to be slower and a baseline that is known."""
    active = standing.active()
    usable = usable_rounds(standing.rounds).rounds
    leader = _leader(standing, usable)
    if leader is None or len(usable) < MIN_ROUNDS:
        return active
    return [index for index in active if index == leader or not _is_answered(usable, index, leader, base, tolerance)]


def _is_answered(rounds: Sequence[Round], index: int, leader: int, base: int, tolerance: float) -> bool:
    logs = log_ratios(rounds, str(index), str(leader))
    if len(logs) < MIN_ROUNDS:
        return False
    ratio = sequential_interval(logs)
    if index == base:
        plain = mean_interval(logs)
        return (plain.high - plain.low) / 2 < BASELINE_PRECISION and plain.high < -2 * tolerance
    return ratio.high < 1 - tolerance or sequential_verdict(logs, tolerance) in ("tie", "slower")


def _is_settled(standing: _Standing, base: int, tolerance: float) -> bool:
    """Whether no further round could change the choice: every candidate but the leader is answered."""
    return len(standing.rounds) >= MIN_ROUNDS and len(_entrants(standing, base, tolerance)) <= 1


def _leader(standing: _Standing, rounds: Sequence[Round]) -> int | None:
    """The fastest by paired comparison with the candidate that ran in most rounds."""
    counts = {index: sum(str(index) in each.rates for each in rounds) for index in standing.active()}
    counts = {index: count for index, count in counts.items() if count}
    if not counts:
        return None
    anchor = max(counts, key=lambda index: counts[index])
    return max(counts, key=lambda index: _ratio(standing, rounds, index, anchor).value)


def _ratio(standing: _Standing, rounds: Sequence[Round], index: int, other: int) -> Interval:
    """Rate of one candidate over another's: the rounds and the prior, weighted by their precision (95 %)."""
    if index == other:
        return Interval(value=1.0, low=1.0, high=1.0, count=len(rounds))
    mean, precision = 0.0, 0.0
    logs = log_ratios(rounds, str(index), str(other))
    if len(logs) > 1:
        seen = mean_interval(logs)  # half-widths by Student's t: few rounds weigh less than their spread says
        precision = (2 * Z_95 / max(seen.high - seen.low, LEAST_SPREAD)) ** 2
        mean = seen.value
    elif logs:
        mean, precision = logs[0], 1 / SINGLE_ROUND_SD**2
    before = [standing.prior.get(standing.configs[each]) for each in (index, other)]
    if before[0] is not None and before[1] is not None:
        expected = before[0][0] - before[1][0]
        trust = 1 / (before[0][1] ** 2 + before[1][1] ** 2 + PRIOR_SD**2)
        mean, precision = (mean * precision + expected * trust) / (precision + trust), precision + trust
    half = Z_95 / math.sqrt(precision) if precision else math.inf
    low, high = math.exp(mean - half), math.exp(min(mean + half, 700.0))
    return Interval(value=math.exp(mean), low=low, high=high, count=len(logs))


def _outcome(
    standing: _Standing, base: int, tolerance: float, cost: Callable[[LoaderConfig], tuple[float, ...]]
) -> FinalsOutcome | None:
    usable = usable_rounds(standing.rounds)
    leader = _leader(standing, usable.rounds)
    if leader is None:
        return None
    entries = [
        Candidate(
            key=str(index),
            ratio_to_best=_ratio(standing, usable.rounds, index, leader),
            cost=cost(standing.configs[index]),
        )
        for index in standing.active()
        if index == leader or log_ratios(usable.rounds, str(index), str(leader))
    ]
    winner = int(cheapest_within(entries, tolerance).key)
    rates = [each.rates[str(winner)] for each in usable.rounds if str(winner) in each.rates]
    logs = log_ratios(usable.rounds, str(winner), str(base))
    exactly_one = Interval(value=1.0, low=1.0, high=1.0, count=len(usable.rounds))
    return FinalsOutcome(
        configs=tuple(standing.configs),
        rounds=usable.rounds,
        winner=standing.configs[winner],
        rate=mean_interval(rates) if len(rates) > 1 else standing.latest[winner].samples_per_s,
        measurement=standing.latest[winner],
        speedup=exactly_one if winner == base else (sequential_interval(logs, final=True) if len(logs) > 1 else None),
        notes=(usable.note,) if usable.note else (),
    )
