"""The oracle: which configuration is fastest, by bursts that no strategy has seen, and how far a choice is from it.

survey   every workers x threads at prefetch 2, then the other prefetch factors of the best few: one burst each
rounds   the top of the survey and every choice, in turns, over the same samples; whoever is clearly out drops out
confirm  fresh rounds between that best and every choice they show to be slower, though not hopelessly: the best of ten
         noisy configurations looks better than it is in the rounds that chose it, so for these choices fresh rounds alone count
         and many of them for our choices with far fewer workers, whatever the rounds said of these, so that 1 % can be told
regret   1 - the choice's rate over that of the best of the rounds, paired by round
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval, Round, log_ratios, paired_ratio
from studies.regret.bench import Bench, BenchError, Timing
from studies.regret.plateaus import are_far_fewer
from studies.regret.strategies import Lattice

SURVEY_S = 0.5
ROUND_S = 1.2
# How many of the survey's fastest enter the rounds, and whose other prefetch factors are surveyed.
ENTRANTS = 4
REFINED = 4
LEAST_ROUNDS = 3
ROUNDS = 6
# What counts as near the best: a choice goes on until its interval lies on one side of this.
NEAR = 0.02
# A configuration of the survey that nobody chose goes on only while it may be the fastest, from its first round on.
HOPELESS = 0.88
CONTENDER = 0.98
# A round in which others used more of the cores than this is kept in the records, does not count and is run again, so often.
FOREIGN_LIMIT = 0.08
MOST_DISTURBED = 4
# So many fresh rounds decide on a choice that looks slower than the best, unless it is hopeless.
CONFIRMING_ROUNDS = 6
# So many weigh a choice with far fewer workers: where bursts scatter by 3 % their mean is known to 0.7 %. The number is fixed,
# so that none is weighed until it pleases.
PLATEAU_ROUNDS = 36
# Seeds of the rounds lie apart from those of everyone else.
SURVEY_SEED, ROUND_SEED, CONFIRMING_SEED = 10_000, 20_000, 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """How far a choice is from the best of the rounds."""

    ratio: Interval
    """Rate of the choice over that of the best."""
    best: LoaderConfig

    @property
    def point(self) -> float:
        return max(0.0, 1 - self.ratio.value)

    @property
    def counted(self) -> float:
        """None below the oracle's own interval: a difference that the rounds do not show counts as none."""
        return 0.0 if self.ratio.high >= 1 else self.point


def key(config: LoaderConfig) -> str:
    """A configuration as short JSON, for records."""
    default = LoaderConfig()
    named = {field.name: getattr(config, field.name) for field in fields(config)}
    return json.dumps({name: value for name, value in named.items() if value != getattr(default, name)})


def config_of(text: str) -> LoaderConfig:
    return LoaderConfig.from_dict(json.loads(text))


def survey(
    bench: Bench, lattice: Lattice, known: dict[str, float], on_rate: Callable[[str, float], None], *, coarse: bool
) -> None:
    """Fill `known` with one burst of each configuration worth one, in a random order."""
    plain = [lattice.config(w, 2, t) for w in lattice.workers for t in lattice.threads]
    random.Random(0).shuffle(plain)
    _burst_each(bench, plain, known, on_rate)
    if coarse:
        return
    best = sorted(plain, key=lambda config: -known[key(config)])[:REFINED]
    deeper = [lattice.config(c.num_workers, p, c.consumer_threads) for c in best if c.num_workers for p in (4, 8)]
    _burst_each(bench, deeper, known, on_rate)


def _burst_each(
    bench: Bench, configs: Sequence[LoaderConfig], known: dict[str, float], on_rate: Callable[[str, float], None]
) -> None:
    for config in configs:
        if key(config) in known:
            continue
        timing = Timing(clock="steady", seconds=SURVEY_S, seed=SURVEY_SEED + len(known))
        try:
            known[key(config)] = bench.time(config, timing).samples_per_s
        except BenchError:
            known[key(config)] = 0.0
        on_rate(key(config), known[key(config)])


def run_rounds(
    bench: Bench,
    choices: Sequence[str],
    known: dict[str, float],
    rounds: list[Round],
    on_round: Callable[[Round], None],
    *,
    seconds: float = ROUND_S,
    most: int = ROUNDS,
    foreign_limit: float = FOREIGN_LIMIT,
) -> None:
    """Add rounds until every choice and every contender has been in enough of them."""
    top = sorted(known, key=lambda each: -known[each])[:ENTRANTS]
    disturbed = 0
    attempts: Counter[str] = Counter()
    while True:
        entrants = _entrants(list(dict.fromkeys([*choices, *top])), set(choices), rounds, most, attempts)
        if not entrants:
            return
        attempts.update(entrants)
        latest = _race(bench, entrants, seconds, ROUND_SEED, len(rounds) + disturbed)
        on_round(latest)
        if is_disturbed(latest, foreign_limit) and disturbed < MOST_DISTURBED:
            disturbed += 1
        else:
            rounds.append(latest)


def confirm(
    bench: Bench,
    choices: Sequence[str],
    rounds: Sequence[Round],
    confirming: list[Round],
    on_round: Callable[[Round], None],
    *,
    right_sized: Sequence[str] = (),
    seconds: float = ROUND_S,
    foreign_limit: float = FOREIGN_LIMIT,
) -> None:
    """Add fresh rounds between the best of the rounds, the choices that these show to be slower, and the right-sized ones.

    Args:
        bench: the warm process.
        choices: of all strategies.
        rounds: that found the best.
        confirming: the fresh rounds so far.
        on_round: told of each new one.
        right_sized: choices whose loss must be known to 1 % where they have far fewer workers than the best.
        seconds: of each window.
        foreign_limit: share of the cores that others may use in a round that counts.
    """
    leader = leader_of(rounds)
    if leader is None:
        return
    wanted = {choice: CONFIRMING_ROUNDS for choice in choices if _is_in_doubt(regret_of(choice, rounds))}
    most_workers = config_of(leader).num_workers
    wanted |= {each: PLATEAU_ROUNDS for each in right_sized if are_far_fewer(config_of(each).num_workers, most_workers)}
    first = len(confirming)
    for number in range(first, first + max(wanted.values(), default=0) + MOST_DISTURBED):
        missing = [each for each, count in wanted.items() if len(log_ratios(confirming, each, leader)) < count]
        if not missing:
            return
        latest = _race(bench, [leader, *missing], seconds, CONFIRMING_SEED, number)
        on_round(latest)
        if not is_disturbed(latest, foreign_limit):
            confirming.append(latest)


def _is_in_doubt(regret: Regret | None) -> bool:
    return regret is not None and regret.counted > NEAR and regret.ratio.high > HOPELESS


def _race(bench: Bench, entrants: Sequence[str], seconds: float, first_seed: int, number: int) -> Round:
    """Each of them once, in a random order, over the same samples."""
    rates: dict[str, float] = {}
    foreign = 0.0
    for each in random.Random(first_seed + number).sample(entrants, len(entrants)):
        try:
            timed = bench.time(config_of(each), Timing(clock="steady", seconds=seconds, seed=first_seed + number))
        except BenchError:
            continue
        rates[each] = timed.samples_per_s
        foreign = max(foreign, timed.foreign_share or 0.0)
    return Round(rates=rates, foreign_cpu_share=foreign)


def is_disturbed(latest: Round, foreign_limit: float = FOREIGN_LIMIT) -> bool:
    return (latest.foreign_cpu_share or 0.0) > foreign_limit


def counted_rounds(rounds: Sequence[Round], foreign_limit: float = FOREIGN_LIMIT) -> list[Round]:
    """The undisturbed ones; all, where those are too few to tell anything."""
    clean = [each for each in rounds if not is_disturbed(each, foreign_limit)]
    return clean if len(clean) >= LEAST_ROUNDS else list(rounds)


def _entrants(
    arms: list[str], choices: set[str], rounds: Sequence[Round], most: int, attempts: Counter[str]
) -> list[str]:
    """Who runs next; empty when all is known. The leader is in every round, so that all can be paired with it."""
    leader = leader_of(rounds)
    if leader is None:
        return arms
    missing = [
        arm for arm in arms if arm != leader and _needs_more(arm, leader, arm in choices, rounds, most, attempts[arm])
    ]
    return [leader, *missing] if missing else []


def _needs_more(arm: str, leader: str, is_choice: bool, rounds: Sequence[Round], most: int, attempts: int) -> bool:
    tried = sum(arm in each.rates for each in rounds)
    if not log_ratios(rounds, arm, leader):
        # Whoever took the lead late has yet to be met; who always fails does not go on for ever.
        return tried < most + LEAST_ROUNDS and attempts < most + LEAST_ROUNDS
    ratio = paired_ratio(rounds, arm, leader)
    if not is_choice and ratio.value < (HOPELESS if ratio.count < LEAST_ROUNDS else CONTENDER):
        return False
    is_open = ratio.low <= 1 - NEAR <= ratio.high or not is_choice
    return ratio.count < LEAST_ROUNDS or (ratio.count < most and is_open)


def leader_of(rounds: Sequence[Round]) -> str | None:
    """The fastest by a fit of ln(rate) = round + configuration, among those with most rounds' worth of evidence."""
    effects = effects_of(rounds)
    counts = {arm: sum(arm in each.rates for each in rounds) for arm in effects}
    enough = min(LEAST_ROUNDS, max(counts.values(), default=0))
    return max((arm for arm in effects if counts[arm] >= enough), key=lambda arm: effects[arm], default=None)


def effects_of(rounds: Sequence[Round]) -> dict[str, float]:
    """ln(rate) of each configuration with the rounds' own level taken out, by alternating least squares."""
    arms = {arm for each in rounds for arm in each.rates}
    effects = dict.fromkeys(arms, 0.0)
    for _ in range(100):
        levels = [_mean([math.log(rate) - effects[arm] for arm, rate in each.rates.items()]) for each in rounds]
        pairs = list(zip(rounds, levels, strict=True))
        effects = {arm: _mean([math.log(r.rates[arm]) - level for r, level in pairs if arm in r.rates]) for arm in arms}
    return effects


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def regret_of(choice: str, rounds: Sequence[Round], confirming: Sequence[Round] = ()) -> Regret | None:
    """The regret of a choice, by fresh rounds where it had enough of them; None when no round paired it with the best."""
    leader = leader_of(rounds)
    if leader is None:
        return None
    if choice == leader:
        return Regret(ratio=Interval(value=1.0, low=1.0, high=1.0, count=len(rounds)), best=config_of(leader))
    evidence = confirming if len(log_ratios(confirming, choice, leader)) >= LEAST_ROUNDS else rounds
    if not log_ratios(evidence, choice, leader):
        return None
    return Regret(ratio=paired_ratio(evidence, choice, leader), best=config_of(leader))


def surveyed_regret(
    config: LoaderConfig, known: dict[str, float], rounds: Sequence[Round], confirming: Sequence[Round] = ()
) -> float | None:
    """About the regret of a configuration that a strategy held for a while: by the rounds, else by the survey's one burst."""
    exact = regret_of(key(config), rounds, confirming)
    if exact is not None:
        return exact.counted
    shallow = LoaderConfig.from_dict({**config.to_dict(), "prefetch_factor": 2 if config.num_workers else None})
    rate = known.get(key(config)) or known.get(key(shallow))
    leader = leader_of(rounds)
    best = known.get(leader or "") or max(known.values(), default=0.0)
    return max(0.0, 1 - rate / best) if rate and best else None
