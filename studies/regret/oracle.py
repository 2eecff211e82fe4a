"""The oracle: which configuration is fastest, by bursts that no strategy has seen, and how far a choice is from it.

survey   every number of workers at prefetch 2, then the deeper queues of the best few: one burst each
rounds   the top of the survey and every choice take turns over the same samples; who is clearly out drops out
confirm  fresh rounds between the best and every choice that is not clearly out: the best of ten noisy configurations
         looks better than it is in the rounds that chose it, so that for these choices fresh rounds alone count
regret   1 - the choice's rate over that of the best, paired by round; two choices are compared in the same way
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from autotune_loader.machine.limits import usable_cores
from autotune_loader.values import Interval, LoaderConfig, Round, log_ratios
from autotune_loader.values.statistics import mean_interval
from studies.regret.bench import Bench, BenchError, regret_workload
from studies.regret.strategies import PREFETCH_FACTORS

SURVEY_S, ROUND_S = 0.5, 1.2
# How many of the survey's fastest enter the rounds, and whose deeper queues are surveyed.
ENTRANTS = 4
LEAST_ROUNDS, ROUNDS, CONFIRMING_ROUNDS = 3, 6, 6
# Who is this far behind after the first rounds is out.
HOPELESS = 0.88
# Seeds of the rounds lie apart from those of every strategy.
SURVEY_SEED, ROUND_SEED, CONFIRMING_SEED = 10_000, 20_000, 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The rounds that choices and the best of the survey have run, and who led."""

    leader: str
    raced: list[Round]
    fresh: list[Round]
    """Rounds of the leader and of those that may be as fast."""

    def ratio(self, a: str, b: str) -> Interval | None:
        """Rate of `a` over that of `b`, of the fresh rounds where they have both; None where no round has."""
        if a == b:
            return Interval(value=1.0, low=1.0, high=1.0, count=len(self.fresh)) if a in self.raced[0].rates else None
        rounds = next((each for each in (self.fresh, self.raced) if log_ratios(each, a, b)), None)
        return None if rounds is None else paired_ratio(rounds, a, b)


def counted(ratio: Interval) -> float:
    """The regret of a choice with this share of the best rate: a difference that the rounds do not show counts as none."""
    return 0.0 if ratio.high >= 1 else max(0.0, 1 - ratio.value)


def key(config: LoaderConfig) -> str:
    """A configuration as short JSON."""
    default = LoaderConfig()
    named = {field.name: getattr(config, field.name) for field in fields(config)}
    return json.dumps({name: value for name, value in named.items() if value != getattr(default, name)})


def config_of(text: str) -> LoaderConfig:
    return LoaderConfig.from_dict(json.loads(text))


def counts_of(workload: str) -> tuple[int, ...]:
    """Workers up to 16 or twice the cores, and more where nothing but loading needs them."""
    cores, job = usable_cores().usable, regret_workload(workload)
    counts = {0, 1, 2, 3, 4, 6, 8, 12, 16, cores // 2, 3 * cores // 4, cores, 3 * cores // 2, 2 * cores}
    on_cpu = job.model is not None and job.train_step is None
    return tuple(sorted(counts | (set() if on_cpu else {24, 3 * cores, 4 * cores})))


def keeping(config: LoaderConfig) -> LoaderConfig:
    """A person who tunes keeps workers between epochs."""
    return replace(config, persistent_workers=config.num_workers > 0)


def survey(bench: Bench, counts: Sequence[int]) -> dict[str, float]:
    """Samples/s of each configuration worth a burst, in a random order."""
    known: dict[str, float] = {}
    shallow, *deep = PREFETCH_FACTORS
    plain = [keeping(LoaderConfig().with_workers(workers, shallow)) for workers in counts]
    random.Random(0).shuffle(plain)
    _burst_each(bench, plain, known)
    best = sorted(plain, key=lambda config: -known[key(config)])[:ENTRANTS]
    _burst_each(bench, [c.with_workers(c.num_workers, p) for c in best if c.num_workers for p in deep], known)
    return known


def _burst_each(bench: Bench, configs: Sequence[LoaderConfig], known: dict[str, float]) -> None:
    for config in configs:
        try:
            known[key(config)] = bench.time(config, seconds=SURVEY_S, seed=SURVEY_SEED + len(known))
        except BenchError:
            known[key(config)] = 0.0


def judge(bench: Bench, choices: Sequence[str], known: dict[str, float]) -> Judgement:
    """The rounds of these choices, by their keys; `known` is the survey."""
    top = sorted(known, key=lambda each: -known[each])[:ENTRANTS]
    raced = race(bench, list(dict.fromkeys([*choices, *top])), ROUNDS, ROUND_SEED)
    leader = leader_of(raced)
    close = [each for each in dict.fromkeys(choices) if each != leader and _may_win(each, leader, raced)]
    fresh = race(bench, [leader, *close], CONFIRMING_ROUNDS, CONFIRMING_SEED) if close else []
    return Judgement(leader=leader, raced=raced, fresh=fresh)


def race(bench: Bench, arms: Sequence[str], rounds: int, first_seed: int) -> list[Round]:
    """Rounds in which the arms take turns; from `LEAST_ROUNDS` on without those that are clearly out."""
    found: list[Round] = []
    for number in range(rounds):
        leader = leader_of(found) if len(found) >= LEAST_ROUNDS else None
        running = [arm for arm in arms if leader is None or arm == leader or _may_win(arm, leader, found)]
        found.append(_round(bench, running, first_seed + number))
    return found


def paired_ratio(rounds: Sequence[Round], a: str, b: str) -> Interval:
    """Rate of `a` over rate of `b`, with a t interval on the logarithms: one look after the last round."""
    logs = mean_interval(log_ratios(rounds, a, b))
    return Interval(value=math.exp(logs.value), low=math.exp(logs.low), high=math.exp(logs.high), count=logs.count)


def _may_win(arm: str, leader: str, rounds: Sequence[Round]) -> bool:
    return bool(log_ratios(rounds, arm, leader)) and paired_ratio(rounds, arm, leader).value > HOPELESS


def _round(bench: Bench, arms: Sequence[str], seed: int) -> Round:
    """Each arm once, in a random order, over the same samples."""
    rates: dict[str, float] = {}
    for arm in random.Random(seed).sample(list(arms), len(arms)):
        try:
            rates[arm] = bench.time(config_of(arm), seconds=ROUND_S, seed=seed)
        except BenchError:
            continue
    return Round(rates=rates)


def leader_of(rounds: Sequence[Round]) -> str:
    """The fastest in the mean of ln(rate) over the rounds, of those that were in most of them."""
    logs: dict[str, list[float]] = {}
    for each in rounds:
        for arm, rate in each.rates.items():
            logs.setdefault(arm, []).append(math.log(rate))
    most = max(map(len, logs.values()))
    return max((arm for arm in logs if len(logs[arm]) == most), key=lambda arm: sum(logs[arm]))
