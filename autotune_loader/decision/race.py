"""Paired rounds between the few configurations that are left: who runs next, whether it is decided, who is chosen.

    round 1   B A C      every candidate once, in random order, over the same samples
    round 2   C A B      ... until every question is answered, or the time is up
    round 3   A C B

Who is chosen follows from what is believed, to which every round adds. What is reported comes from the rounds alone: the bursts
of the search chose the candidates, and the best of many noisy bursts looks better than it is.

Nothing here runs anything: the caller runs the rounds, adds them to its beliefs and records them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from autotune_loader.decision.posterior import SAFE, Posterior
from autotune_loader.decision.rounds import as_round, averaged
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
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

ADMITTING_ROUNDS = 2
"""New candidates may join after the first rounds, so that each runs in more than one; later only while in doubt."""
RIVALS = 1
"""Besides the incumbent this many run in a round."""
DOUBTFUL_SHARE = 0.25
"""A choice is in doubt while it is expected to lose more than this share of the tolerance: of 58 wrong choices on 1,500
simulated machines 47 were among the fifth that was most in doubt (studies.regret.belief)."""
MIN_ROUNDS = 3
"""Fewer rounds say nothing about noise."""
PATIENT_ROUNDS = 4
"""Open questions get this many rounds, however long each takes: on large machines three use up the patience."""
UNDECIDED_PATIENCE = 2
"""So many times the patience for a choice that would be called undecided, or a speed-up known from two rounds only."""
LEAST_OF_WINNER = 2
"""The winner ran in two rounds, or in as many as any other: one burst gives no interval."""
BASELINE_PRECISION = 0.03
"""The baseline is compared with the winner alone; it sits out once that ratio is known this well, or surely no equal."""
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
        believe: what is known of everything, the usable rounds included; by `LoaderConfig.key()`.
        baseline_runs: False for a baseline that cannot be run.
    """

    def __init__(
        self,
        candidates: Sequence[LoaderConfig],
        baseline: LoaderConfig,
        rules: RaceRules,
        believe: Callable[[], Posterior | None],
        *,
        baseline_runs: bool = True,
    ) -> None:
        self.rules = rules
        self.baseline = baseline
        self.configs = list(dict.fromkeys([*candidates, *([baseline] if baseline_runs else [])]))
        self.rounds: list[Round] = []
        self.spent_s = 0.0
        self.bursts = 0
        self._believe = believe
        self._bursts: dict[LoaderConfig, dict[int, Measurement]] = {}
        self._failures: dict[LoaderConfig, list[Failure]] = {}

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
        return len(self.rounds) <= ADMITTING_ROUNDS or self.is_in_doubt()

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
        counts = {config: len(_rates(self.usable(), config)) for config in self.active()}
        most = max(counts.values(), default=0)
        ran = [config for config, count in counts.items() if count >= max(1, min(least_rounds, most))]
        if not ran:
            return None
        return ran[self._belief(ran).choice([self.rules.cost(config) for config in ran], self.rules.tolerance)[0]]

    def next_entrants(self) -> list[LoaderConfig]:
        """Who runs in the next round: the incumbent, its strongest rival, newcomers, and a baseline that is not known yet."""
        active, incumbent = self.active(), self.incumbent()
        if incumbent is None:
            return active
        new = [config for config in active if not _rates(self.usable(), config)]
        rivals = [
            each for each in active if each not in (incumbent, self.baseline, *new) and self._is_open(each, incumbent)
        ]
        rivals.sort(key=lambda config: -sum(self._belief([config, incumbent]).ratio(0, 1)))
        wanted = {incumbent, *new, *rivals[:RIVALS]}
        if self.baseline in active and not self._is_baseline_known(incumbent):
            wanted.add(self.baseline)
        return [config for config in self.configs if config in wanted]

    def is_in_doubt(self) -> bool:
        """Whether what would be chosen now is expected to lose much against everything that is known, entrant or not."""
        incumbent, known = self.incumbent(), self._believe()
        if incumbent is None or known is None or incumbent.key() not in known.configs:
            return False
        loss = known.losses[:, known.configs.index(incumbent.key())].mean()
        return bool(loss > DOUBTFUL_SHARE * self.rules.tolerance)

    def patience_s(self) -> float:
        """Seconds of rounds after which what is open is left open."""
        incumbent = self.incumbent(LEAST_OF_WINNER)
        if incumbent is None:
            return self.rules.patience_s
        beside = len(log_ratios(self.usable(), incumbent, self.baseline))
        is_vague = self.baseline in self.active() and beside < MIN_ROUNDS
        is_undecided = self._expected_loss(incumbent) > self.rules.tolerance
        return self.rules.patience_s * (UNDECIDED_PATIENCE if is_vague or is_undecided else 1)

    def _expected_loss(self, config: LoaderConfig) -> float:
        """Against the best of those that ran."""
        ran = [each for each in self.configs if _rates(self.usable(), each)]
        return float(self._belief(ran).losses[:, ran.index(config)].mean())

    def outcome(self) -> RaceOutcome | None:
        """What the rounds say; None where none could be completed."""
        usable = usable_rounds(self.rounds)
        winner = self.incumbent(LEAST_OF_WINNER)
        if winner is None:
            return None
        rates, bursts, cost = _rates(usable.rounds, winner), self._usable_bursts(), self.rules.cost
        ran = [config for config in self.configs if _rates(usable.rounds, config)]
        belief = self._belief(ran)
        equal = [ran[index] for index in belief.as_fast(self.rules.tolerance)]
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
            expected_loss=self._expected_loss(winner),
            speedup=self._speedup(usable.rounds, winner),
            at_ceiling=self._is_at_ceiling(winner),
            notes=((usable.note,) if usable.note else ()) + failed,
            failures=failed,
        )

    def _speedup(self, rounds: Sequence[Round], winner: LoaderConfig) -> Interval | None:
        """Winner over baseline, from the rounds that timed both, allowing for its having been chosen by them."""
        if winner == self.baseline:
            return Interval(value=1.0, low=1.0, high=1.0, count=len(rounds))
        if len(log_ratios(rounds, winner, self.baseline)) < 2:
            return None
        return paired_ratio(rounds, winner, self.baseline, of_selected(STOPPED_CONFIDENCE, rounds, winner))

    def _usable_bursts(self) -> dict[LoaderConfig, list[Measurement]]:
        left_out = self.disturbed()
        kept = {
            config: [burst for number, burst in bursts.items() if number not in left_out]
            for config, bursts in self._bursts.items()
        }
        return {config: bursts for config, bursts in kept.items() if bursts}

    def _belief(self, configs: Sequence[LoaderConfig]) -> Posterior:
        """What is believed of some candidates that ran, in their order."""
        known = self._believe()
        assert known is not None  # the rounds in which they ran are evidence
        return known.at([config.key() for config in configs])

    def _is_open(self, rival: LoaderConfig, incumbent: LoaderConfig) -> bool:
        """Whether the rival may well be the better choice: faster by the tolerance, or cheaper and no slower than that."""
        mean, sd = self._belief([rival, incumbent]).ratio(0, 1)
        costs_more = self.rules.cost(rival) > self.rules.cost(incumbent)
        needed = math.log1p(self.rules.tolerance) * (1 if costs_more else -1)
        return 0.5 * math.erfc((needed - mean) / sd / math.sqrt(2)) > 1 - SAFE

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
        is_precise = (ratio.high - ratio.low) / 2 < BASELINE_PRECISION
        return ratio.high < -2 * self.rules.tolerance or (is_precise and ratio.high < -self.rules.tolerance)


def may_go_on(race: Race, entrants: Sequence[LoaderConfig], seconds_left: float) -> bool:
    """Whether another round between these is worth its time: it fits, the choice is open, and patience is not spent."""
    if len(race.rounds) >= MAX_ROUNDS or not race.active():
        return False
    round_s = len(entrants) * race.spent_s / max(race.bursts, 1)
    is_decided = len(race.rounds) >= MIN_ROUNDS and len(entrants) <= 1
    if seconds_left < round_s or is_decided:
        return False
    return round_s <= race.patience_s() - race.spent_s or len(race.rounds) < PATIENT_ROUNDS


def _rates(rounds: Sequence[Round], config: LoaderConfig) -> list[float]:
    """The rates of one candidate, in the rounds that it ran in."""
    return [each.rates[config] for each in rounds if config in each.rates]


def _is_out(failures: Sequence[Failure]) -> bool:
    return len(failures) >= MAX_FAILURES or any(failure.kind in OUT_AT_ONCE for failure in failures)
