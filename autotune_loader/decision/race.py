"""Paired rounds between the few configurations that are left: who runs next, whether it is decided, who is chosen.

    round 1   B A C      every candidate once, in random order, over the same samples
    round 2   C A B      ... until every question is answered, or the time is up
    round 3   A C B

The bursts of the search chose the candidates, so no rate that is reported comes from them: the best of many noisy bursts looks
better than it is. For the choice itself what is believed counts as one more witness, weighted by how sure it is: few rounds
cannot tell 3 % apart, the twin often can. Rounds are evidence of that belief, which knows what ran together.

Nothing here runs anything: the caller runs the rounds and records them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from autotune_loader.decision.posterior import TYPICAL_NOISE, Posterior, Seen
from autotune_loader.decision.rounds import as_round
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement, averaged
from autotune_loader.values.statistics import (
    MAX_ROUNDS,
    STOPPED_CONFIDENCE,
    Interval,
    Round,
    log_ratios,
    mean_interval,
    mean_of_selected,
    of_selected,
    paired_ratio,
    usable_rounds,
)

UNKNOWN_SD = 0.7
"""Without beliefs anything may be twice as fast as anything else (standard deviation of the logarithm)."""
ADMITTING_ROUNDS = 2
"""New candidates may join after the first rounds, so that each runs in more than one."""
CERTAIN = 0.95
"""A candidate that is slower, or as fast, with this probability needs no further rounds."""
RIVALS = 1
"""Besides the incumbent this many run in a round."""
MIN_ROUNDS = 3
"""Fewer rounds say nothing about noise."""
PATIENT_ROUNDS = 4
"""Open questions get this many rounds, however long each takes: on large machines three use up the patience. A winner
that joined late goes on until it has run in `MIN_ROUNDS`."""
LEAST_OF_WINNER = 2
"""The winner ran in two rounds, or in as many as any other: one burst gives no interval."""
BASELINE_PRECISION = 0.03
"""The baseline is only compared with the winner; once that ratio is known this well it sits out."""
NEAR_CEILING, ABOVE_CEILING = 0.95, 1.08
"""As fast as the step alone, within noise: a loader has nothing left to gain. Beyond the second the ceiling is none: means of
rounds, and of the step alone beside them, may differ by so much although nothing is wrong."""
MAX_FAILURES = 2
"""A candidate that failed this often in the race is out ..."""
OUT_AT_ONCE = ("deadline",)
"""... and at once by these: it would hang again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceRules:
    """What the race is about."""

    tolerance: float
    """Relative difference that counts as equally fast."""
    cost: Callable[[LoaderConfig], tuple[float, ...]]
    """What a configuration costs, compared as tuples are."""
    patience_s: float
    """Seconds after which open questions are left open, once there were `PATIENT_ROUNDS`."""
    noise_sd: float = TYPICAL_NOISE
    """Relative standard deviation of one burst, before the rounds show theirs; for a choice by rounds alone."""
    ceiling: Callable[[LoaderConfig], float | None] = lambda config: None
    """Samples/s of the step alone, which no loader can exceed; None where that is unknown."""


def is_at_ceiling(rate: float, ceiling: float | None) -> bool:
    """Whether a rate is as high as any loader's can be, so that nothing that costs more is worth its cost."""
    return ceiling is not None and NEAR_CEILING * ceiling <= rate <= ABOVE_CEILING * ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOutcome:
    """The rounds and what they say."""

    configs: tuple[LoaderConfig, ...]
    rounds: tuple[Round, ...]
    """Usable rounds, whose rates are by configuration."""
    winner: LoaderConfig
    rate: Interval
    """Rate of the winner, from these rounds alone."""
    bursts: Mapping[LoaderConfig, Sequence[Measurement]]
    """The bursts of each in these rounds, in order; only the last one with its traces."""
    as_fast: tuple[LoaderConfig, ...]
    """Who counts as equally fast as the winner, by the rule that chose it; none of them is cheaper."""
    expected_loss: float
    """What the winner is expected to lose against the best of the candidates, relatively."""
    speedup: Interval | None
    """Winner over baseline; None when no round measured both."""
    at_ceiling: bool = False
    """Whether it is as fast as the step alone in two rounds or more: no loader can be faster."""
    notes: tuple[str, ...] = ()
    """What to know of the rounds: that some were disturbed, and `failures`."""
    failures: tuple[str, ...] = ()

    @property
    def measurement(self) -> Measurement:
        """What the winner's bursts say together."""
        return averaged(self.bursts[self.winner])


class Race:
    """The state of paired rounds between candidates and a baseline.

    Args:
        candidates: configurations that may win, best guess first.
        baseline: what the winner is compared with; it may win too.
        rules: what is asked.
        believe: what is known of everything, the usable rounds included; used for the choice, never for a rate. It may return
            None, and then the rounds alone decide.
        baseline_runs: False for a baseline that cannot be run.
    """

    def __init__(
        self,
        candidates: Sequence[LoaderConfig],
        baseline: LoaderConfig,
        rules: RaceRules,
        believe: Callable[[], Posterior | None] = lambda: None,
        *,
        baseline_runs: bool = True,
    ) -> None:
        self.rules = rules
        self.baseline = baseline
        self.configs = list(dict.fromkeys([*candidates, *([baseline] if baseline_runs else [])]))
        self.rounds: list[Round] = []
        self._bursts: dict[LoaderConfig, dict[int, Measurement]] = {}
        self.spent_s = 0.0
        self.bursts = 0
        self._believe = believe
        self._failures: dict[LoaderConfig, list[Failure]] = {}
        self._asked_of: tuple[Posterior | None, int] | None = None
        self._beliefs: dict[tuple[LoaderConfig, ...], Posterior] = {}
        """What is believed of some candidates, until anything more is known."""

    def record(self, outcomes: Sequence[tuple[LoaderConfig, Measurement | Failure]], seconds: float) -> Round:
        """One round, in the order in which it was run, and the seconds that it took."""
        done = as_round(outcomes)
        for config, outcome in outcomes:
            if isinstance(outcome, Failure):
                self._failures.setdefault(config, []).append(outcome)
            else:
                earlier = {number: replace(each, traces=()) for number, each in self._bursts.get(config, {}).items()}
                self._bursts[config] = {**earlier, len(self.rounds): outcome}
        self.rounds.append(done)
        self.bursts += len(done.rates)
        self.spent_s += max(seconds, 1e-9)
        return done

    def admit(self, configs: Sequence[LoaderConfig]) -> None:
        """Add candidates that the rounds so far suggest."""
        self.configs += [config for config in configs if config not in self.configs]

    def is_admitting(self) -> bool:
        """Whether others may still become candidates."""
        return len(self.rounds) <= ADMITTING_ROUNDS

    def usable(self) -> tuple[Round, ...]:
        """The rounds in which the machine was not disturbed."""
        return usable_rounds(self.rounds).rounds

    def disturbed(self) -> list[int]:
        """Numbers of the other rounds."""
        usable = self.usable()
        return [number for number, each in enumerate(self.rounds) if not any(each is kept for kept in usable)]

    def active(self) -> list[LoaderConfig]:
        """Who has not failed too often."""
        return [config for config in self.configs if not _is_out(self._failures.get(config, ()))]

    def incumbent(self, least_rounds: int = 1) -> LoaderConfig | None:
        """Who would be chosen now, of those that ran so often, if any did, and did not fail."""
        usable = self.usable()
        counts = {config: len(_rates(usable, config)) for config in self.active()}
        most = max(counts.values(), default=0)
        if most == 0:
            return None
        ran = [config for config, count in counts.items() if count >= min(least_rounds, most)]
        return ran[self._belief(ran).choice([self.rules.cost(config) for config in ran], self.rules.tolerance)[0]]

    def next_round(self, seconds_left: float) -> list[LoaderConfig]:
        """Who runs in the next round; nobody where it does not fit, all is decided, or what is open is not worth its time."""
        entrants = self._entrants()
        if len(self.rounds) >= MAX_ROUNDS or not self.active():
            return []
        round_s = len(entrants) * self.spent_s / max(self.bursts, 1)
        is_decided = len(self.rounds) >= MIN_ROUNDS and len(entrants) <= 1
        if seconds_left < round_s or is_decided:
            return []
        is_due = len(self.rounds) < PATIENT_ROUNDS or not self.is_winner_known()
        return entrants if is_due or round_s <= self.rules.patience_s - self.spent_s else []

    def _entrants(self) -> list[LoaderConfig]:
        """Who would run in the next round: the incumbent, its strongest rival, and a baseline that is not known yet."""
        active, usable, incumbent = self.active(), self.usable(), self.incumbent()
        if incumbent is None:
            return active
        new = [config for config in active if not _rates(usable, config)]
        others = [config for config in active if config not in (incumbent, self.baseline, *new)]
        unanswered = [config for config in others if not self._is_answered(config, incumbent)]
        rivals = sorted(unanswered, key=lambda config: -sum(self._belief([config, incumbent]).ratio(0, 1)))[:RIVALS]
        wanted = {incumbent, *new, *rivals}
        if self.baseline in active and not self._is_baseline_known(incumbent):
            wanted.add(self.baseline)
        return [config for config in self.configs if config in wanted]

    def is_winner_known(self) -> bool:
        """Whether who would win has run in as many rounds as an interval needs."""
        winner = self.incumbent(LEAST_OF_WINNER)
        return winner is None or len(_rates(self.usable(), winner)) >= MIN_ROUNDS

    def outcome(self) -> RaceOutcome | None:
        """What the rounds say; None where none could be completed."""
        usable = usable_rounds(self.rounds)
        winner = self.incumbent(LEAST_OF_WINNER)
        if winner is None:
            return None
        rates, bursts = _rates(usable.rounds, winner), self._usable_bursts()
        ran = [config for config in self.configs if _rates(usable.rounds, config)]
        belief, cost = self._belief(ran), self.rules.cost
        # Rounds may have shown cheaper ones to be slower.
        equal = [ran[index] for index in belief.as_fast(self.rules.tolerance)]
        logs = log_ratios(usable.rounds, winner, self.baseline)
        exactly_one = Interval(value=1.0, low=1.0, high=1.0, count=len(usable.rounds))
        confidence = of_selected(STOPPED_CONFIDENCE, usable.rounds, winner)
        speedup = paired_ratio(usable.rounds, winner, self.baseline, confidence) if len(logs) > 1 else None
        failed = tuple(
            f"{config} failed {len(failures)} time(s) in the finals: {failures[-1].message}"
            for config, failures in self._failures.items()
        )
        return RaceOutcome(
            configs=tuple(self.configs),
            rounds=usable.rounds,
            winner=winner,
            rate=mean_of_selected(usable.rounds, winner) if len(rates) > 1 else bursts[winner][-1].samples_per_s,
            bursts=bursts,
            as_fast=tuple(config for config in equal if config != winner and cost(config) >= cost(winner)),
            expected_loss=float(belief.regret_samples()[:, ran.index(winner)].mean()),
            at_ceiling=self._is_at_ceiling(winner),
            speedup=exactly_one if winner == self.baseline else speedup,
            notes=((usable.note,) if usable.note else ()) + failed,
            failures=failed,
        )

    def _usable_bursts(self) -> dict[LoaderConfig, list[Measurement]]:
        left_out = self.disturbed()
        kept = {
            config: [burst for number, burst in bursts.items() if number not in left_out]
            for config, bursts in self._bursts.items()
        }
        return {config: bursts for config, bursts in kept.items() if bursts}

    def _belief(self, configs: Sequence[LoaderConfig]) -> Posterior:
        """What is believed of some candidates that ran, in their order: of all that is known, or by the rounds alone."""
        known = self._believe()
        if self._asked_of != (known, len(self.rounds)):
            self._asked_of, self._beliefs = (known, len(self.rounds)), {}
        some = tuple(configs)
        if some not in self._beliefs:
            self._beliefs[some] = (
                _by_rounds(configs, self.usable(), self.rules.noise_sd)
                if known is None
                else known.at([config.key() for config in configs])
            )
        return self._beliefs[some]

    def _is_answered(self, config: LoaderConfig, incumbent: LoaderConfig) -> bool:
        """Whether it is certain that one is slower, or that none is faster than the other by more than the tolerance."""
        mean, sd = self._belief([config, incumbent]).ratio(0, 1)
        margin = -math.log(1 - self.rules.tolerance)
        slower, faster = _below(-margin, mean, sd), _below(-margin, -mean, sd)
        return slower > CERTAIN or slower + faster < 1 - CERTAIN

    def _is_at_ceiling(self, config: LoaderConfig) -> bool:
        """Whether it is as fast as the step alone, in the mean of at least two rounds; a faster one denies that ceiling."""
        known = {each: (_rates(self.usable(), each), self.rules.ceiling(each)) for each in self.active()}
        means = {each: (fmean(rates), ceiling) for each, (rates, ceiling) in known.items() if len(rates) > 1}
        if any(ceiling is not None and rate > ABOVE_CEILING * ceiling for rate, ceiling in means.values()):
            return False
        return config in means and is_at_ceiling(*means[config])

    def _is_baseline_known(self, incumbent: LoaderConfig) -> bool:
        logs = log_ratios(self.usable(), self.baseline, incumbent)
        if len(logs) < MIN_ROUNDS:
            return False
        ratio = mean_interval(logs)
        return (ratio.high - ratio.low) / 2 < BASELINE_PRECISION and ratio.high < -2 * self.rules.tolerance


def _rates(rounds: Sequence[Round], config: LoaderConfig) -> list[float]:
    """The rates of one candidate, in the rounds that it ran in."""
    return [each.rates[config] for each in rounds if config in each.rates]


def _is_out(failures: Sequence[Failure]) -> bool:
    return len(failures) >= MAX_FAILURES or any(failure.kind in OUT_AT_ONCE for failure in failures)


def _by_rounds(configs: Sequence[LoaderConfig], rounds: Sequence[Round], typical_sd: float) -> Posterior:
    """What the rounds alone tell, each relative to its own level."""
    seen = [
        (configs.index(config), math.log(rate), number)
        for number, each in enumerate(rounds)
        for config, rate in each.rates.items()
        if config in configs
    ]
    where, logs, numbers = (np.array(each) for each in zip(*seen, strict=True))
    before = Posterior(
        configs=tuple(configs),
        mean=np.full(len(configs), logs.mean()),
        covariance=UNKNOWN_SD**2 * np.eye(len(configs)),
        noise_sd=typical_sd,
    )
    return before.after(Seen(where=where, logs=logs, variances=np.zeros(len(logs)), rounds=numbers))


def _below(value: float, mean: float, sd: float) -> float:
    """Probability that a normal value lies below `value`."""
    return 0.5 * math.erfc((mean - value) / sd / math.sqrt(2))
