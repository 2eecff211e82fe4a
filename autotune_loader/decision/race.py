"""Paired rounds between the few configurations that are left: who runs next, whether it is decided, who is chosen.

    round 1   B A C      every candidate once, in random order, over the same samples
    round 2   C A B      ... until every question is answered, or the time is up
    round 3   A C B

The bursts of the search chose the candidates, so no rate that is reported comes from them: the best of many noisy bursts looks
better than it is. For the choice itself what is believed counts as one more witness, weighted by how sure it is: few rounds
cannot tell 3 % apart, the twin often can. Where rounds prove that a candidate is faster, they overrule the belief.

Nothing here runs anything: the caller runs the rounds and records them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from autotune_loader.decision.posterior import Posterior
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

UNKNOWN_SD = 0.7
"""Without beliefs anything may be twice as fast as anything else (standard deviation of the logarithm)."""
TYPICAL_NOISE = 0.03
"""Relative standard deviation of a burst's rate, where nothing else is known of it."""
ADMITTING_ROUNDS = 2
"""New candidates may join after the first rounds, so that each runs in more than one; later only while in doubt."""
NOISE_WEIGHT = 4.0
"""This many bursts' worth a typical noise counts beside that of the rounds."""
LEAST_NOISE = 0.003
"""Relative; rounds that agree better do so by chance."""
CERTAIN = 0.95
"""A candidate that is slower, or as fast, with this probability needs no further rounds."""
RIVALS = 1
"""Besides the incumbent this many run in a round."""
DOUBTFUL_SHARE = 0.25
"""A choice is in doubt while it is expected to lose more than this share of the tolerance: of 58 wrong choices on 1,500
simulated machines 47 were among the fifth that was most in doubt (studies.regret.belief)."""
MIN_ROUNDS = 3
"""Fewer rounds say nothing about noise."""
PATIENT_ROUNDS = 4
"""Open questions get this many rounds, however long each takes: on large machines three use up the patience."""
LEAST_OF_WINNER = 2
"""The winner ran in two rounds, or in as many as any other: one burst gives no interval."""
BASELINE_PRECISION = 0.03
"""The baseline is only compared with the winner; once that ratio is known this well it sits out."""
NEAR_CEILING, ABOVE_CEILING = 0.95, 1.08
"""As fast as the step alone, within noise: a loader has nothing left to gain. Beyond the second the ceiling is none: means of
rounds, and of the step alone beside them, may differ by so much although nothing is wrong."""
LEVELLINGS = 20
"""So many turns tell apart what a round and a configuration have in common; each halves what is left of it, or more."""
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
    """Whether it is as fast as the step alone in two rounds or more: that decides, however few or disturbed these are."""
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
        self._first_rates: dict[LoaderConfig, float] = {}
        self._known: tuple[object, Posterior] | None = None

    def record(self, outcomes: Sequence[tuple[LoaderConfig, Measurement | Failure]], seconds: float) -> Round:
        """One round, in the order in which it was run, and the seconds that it took."""
        done = as_round(outcomes)
        for config, outcome in outcomes:
            if isinstance(outcome, Failure):
                self._failures.setdefault(config, []).append(outcome)
            else:
                self._first_rates.setdefault(config, outcome.samples_per_s.value)
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
        usable = self.usable()
        counts = {config: len(_rates(usable, config)) for config in self.active()}
        most = max(counts.values(), default=0)
        if most == 0:
            return None
        ran = [config for config, count in counts.items() if count >= min(least_rounds, most)]
        chosen, _ = self._belief(ran).choice([self.rules.cost(config) for config in ran], self.rules.tolerance)
        first = ran[chosen]
        over_first = {config: log_ratios(usable, config, first) for config in ran}
        proved = [config for config, logs in over_first.items() if _prove_faster(logs, self.rules.tolerance)]
        return max(proved, key=lambda config: fmean(over_first[config]), default=first)

    def next_entrants(self) -> list[LoaderConfig]:
        """Who runs in the next round: the incumbent, its strongest rival, and a baseline that is not known yet."""
        active, usable, incumbent = self.active(), self.usable(), self.incumbent()
        if incumbent is None:
            return active
        new = [config for config in active if not _rates(usable, config)]
        others = [config for config in active if config not in (incumbent, self.baseline)]
        unanswered = [config for config in others if not self._is_answered(config, incumbent)]
        rivals = sorted(unanswered, key=lambda config: -sum(self._ratio(config, incumbent)))[:RIVALS]
        wanted = {incumbent, *new, *rivals}
        if self.baseline in active and not self._is_baseline_known(incumbent):
            wanted.add(self.baseline)
        return [config for config in self.configs if config in wanted]

    def is_in_doubt(self) -> bool:
        """Whether what would be chosen now is expected to lose much against everything that is known, entrant or not."""
        incumbent, known = self.incumbent(), self._believe()
        if incumbent is None or known is None or incumbent.key() not in known.configs:
            return False
        loss = known.regret_samples()[:, known.configs.index(incumbent.key())].mean()
        return bool(loss > DOUBTFUL_SHARE * self.rules.tolerance)

    def outcome(self) -> RaceOutcome | None:
        """What the rounds say; None where none could be completed."""
        usable = usable_rounds(self.rounds)
        incumbent = self.incumbent(LEAST_OF_WINNER)
        if incumbent is None:
            return None
        winner = self._cheapest_unbeaten(incumbent)
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
            at_ceiling=winner in self._at_ceiling(),
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
        """What is believed of some candidates, in their order: with what is known of everything, or by the rounds alone."""
        known = self._believe()
        version = (len(self.rounds), len(self.configs), id(known))
        if self._known is None or self._known[0] != version:
            self._known = (
                version,
                _by_rounds(self.configs, self.usable(), self.rules.noise_sd)
                if known is None
                else _completed(known, self.configs, self._first_rates),
            )
        named = configs if known is None else [config.key() for config in configs]
        return self._known[1].at(named)

    def _ratio(self, config: LoaderConfig, other: LoaderConfig) -> tuple[float, float]:
        """Mean and standard deviation of ln(rate of the one / rate of the other)."""
        return self._belief(self.configs).ratio(self.configs.index(config), self.configs.index(other))

    def _is_as_fast(self, config: LoaderConfig, other: LoaderConfig) -> bool:
        """Whether it was seen that the workers of `config` suffice, so that `other`, which has more, is not faster."""
        one, two = self.configs.index(config), self.configs.index(other)
        return self._belief(self.configs).is_as_fast(one, two, self.rules.tolerance)

    def _is_answered(self, config: LoaderConfig, incumbent: LoaderConfig) -> bool:
        tolerance = self.rules.tolerance
        looks_faster = _look_faster(log_ratios(self.usable(), config, incumbent), tolerance)
        if not looks_faster and self._is_as_fast(incumbent, config):
            return True
        mean, sd = self._ratio(config, incumbent)
        slower = _below(math.log(1 - tolerance), mean, sd)
        faster = 1 - _below(-math.log(1 - tolerance), mean, sd)
        return slower > CERTAIN or slower + faster < 1 - CERTAIN

    def _cheapest_unbeaten(self, incumbent: LoaderConfig) -> LoaderConfig:
        """The incumbent, or a cheaper candidate that nobody beat in most rounds: what costs more must show that it helps.

        Not slower than the incumbent alone is not enough: bursts of that one may be the disturbed ones. Where both are as fast
        as the step alone, two rounds are enough: nobody can be much faster.
        """
        usable, active = self.usable(), self.active()

        def is_unbeaten(config: LoaderConfig, by: LoaderConfig, floor: float) -> bool:
            logs = log_ratios(usable, config, by)
            return len(logs) < MIN_ROUNDS or median(logs) >= floor

        slower = math.log(1 - self.rules.tolerance)
        unbeaten = [
            config
            for config in active
            if len(log_ratios(usable, config, incumbent)) >= MIN_ROUNDS
            and is_unbeaten(config, incumbent, 0.0)
            and all(is_unbeaten(config, other, slower) for other in active if other != config)
        ]
        at_ceiling = self._at_ceiling() if incumbent in self._at_ceiling() else []
        as_fast = [
            config for config in at_ceiling if fmean(log_ratios(usable, config, incumbent) or [-math.inf]) >= slower
        ]
        return min([incumbent, *unbeaten, *as_fast], key=self.rules.cost)

    def _at_ceiling(self) -> list[LoaderConfig]:
        """Who is as fast as the step alone, in the mean of at least two rounds; nobody where a rate denies that ceiling."""
        known = {config: (_rates(self.usable(), config), self.rules.ceiling(config)) for config in self.active()}
        means = {config: (fmean(rates), ceiling) for config, (rates, ceiling) in known.items() if len(rates) > 1}
        if any(ceiling is not None and rate > ABOVE_CEILING * ceiling for rate, ceiling in means.values()):
            return []
        return [config for config, (rate, ceiling) in means.items() if is_at_ceiling(rate, ceiling)]

    def _is_baseline_known(self, incumbent: LoaderConfig) -> bool:
        logs = log_ratios(self.usable(), self.baseline, incumbent)
        if len(logs) < MIN_ROUNDS:
            return False
        ratio = mean_interval(logs)
        return (ratio.high - ratio.low) / 2 < BASELINE_PRECISION and ratio.high < -2 * self.rules.tolerance


def may_go_on(race: Race, entrants: Sequence[LoaderConfig], seconds_left: float) -> bool:
    """Whether another round between these is worth its time: it fits, the choice is open, and patience is not spent."""
    if len(race.rounds) >= MAX_ROUNDS or not race.active():
        return False
    round_s = len(entrants) * race.spent_s / max(race.bursts, 1)
    is_decided = len(race.rounds) >= MIN_ROUNDS and len(entrants) <= 1
    if seconds_left < round_s or is_decided:
        return False
    return round_s <= race.rules.patience_s - race.spent_s or len(race.rounds) < PATIENT_ROUNDS


def _rates(rounds: Sequence[Round], config: LoaderConfig) -> list[float]:
    """The rates of one candidate, in the rounds that it ran in."""
    return [each.rates[config] for each in rounds if config in each.rates]


def _is_out(failures: Sequence[Failure]) -> bool:
    return len(failures) >= MAX_FAILURES or any(failure.kind in OUT_AT_ONCE for failure in failures)


def _look_faster(logs: Sequence[float], tolerance: float) -> bool:
    """Whether rounds with these logarithms of ratios speak for the one above, by their mean."""
    return bool(logs) and fmean(logs) > tolerance


def _prove_faster(logs: Sequence[float], tolerance: float) -> bool:
    """Whether such rounds alone show it, whatever is believed: by their order, as one disturbed round widens any interval."""
    return len(logs) >= MIN_ROUNDS and median(logs) > tolerance and min(logs) > 0


def _completed(
    known: Posterior, configs: Sequence[LoaderConfig], first_rates: Mapping[LoaderConfig, float]
) -> Posterior:
    """What is known of the candidates; of those that the search could not observe, what their first burst said."""
    keys = list(dict.fromkeys(config.key() for config in configs))
    first = {config.key(): rate for config, rate in first_rates.items()}
    typical = math.exp(float(known.mean.max()))
    missing = {key: first.get(key, typical) for key in keys if key not in known.configs}
    return (known.including(missing) if missing else known).at(keys)


def _by_rounds(configs: Sequence[LoaderConfig], rounds: Sequence[Round], typical_sd: float) -> Posterior:
    """What the rounds alone tell, each relative to its own level: whatever slowed a round slowed all who ran in it."""
    paired = _levelled([each for each in rounds if len(each.rates) > 1] or rounds)
    before = Posterior(
        configs=tuple(configs),
        mean=np.zeros(len(configs)),
        covariance=UNKNOWN_SD**2 * np.eye(len(configs)),
        noise_sd=typical_sd,
    )
    seen = [(configs.index(config), math.log(rate)) for each in paired for config, rate in each.rates.items()]
    level = fmean(log for _, log in seen) if seen else 0.0
    noise = _noise_sd(configs, rounds, typical_sd)
    return before.updated([index for index, _ in seen], [log - level for _, log in seen], [noise**2] * len(seen))


def _levelled(rounds: Sequence[Round]) -> list[Round]:
    """The rounds without what each has in common, by means of rounds and of configurations in turns."""
    common = [0.0] * len(rounds)
    for _ in range(LEVELLINGS):
        logs: dict[LoaderConfig, list[float]] = {}
        for each, shift in zip(rounds, common, strict=True):
            for config, rate in each.rates.items():
                logs.setdefault(config, []).append(math.log(rate) - shift)
        means = {config: fmean(values) for config, values in logs.items()}
        common = [
            fmean(math.log(rate) - means[config] for config, rate in each.rates.items()) if each.rates else 0.0
            for each in rounds
        ]
    return [
        replace(each, rates={config: rate * math.exp(-shift) for config, rate in each.rates.items()})
        for each, shift in zip(rounds, common, strict=True)
    ]


def _noise_sd(configs: Sequence[LoaderConfig], rounds: Sequence[Round], typical_sd: float) -> float:
    """Noise of one burst: a typical one, and the scatter of each candidate over the rounds, by their weight."""
    squares, freedom = NOISE_WEIGHT * typical_sd**2, NOISE_WEIGHT
    for config in configs:
        logs = [math.log(rate) for rate in _rates(rounds, config)]
        if len(logs) > 1:
            # The median deviation: a single disturbed burst is no noise.
            typical = median(abs(log - median(logs)) for log in logs) * 1.48
            squares, freedom = squares + (len(logs) - 1) * typical**2, freedom + len(logs) - 1
    return max(math.sqrt(squares / freedom), LEAST_NOISE)


def _below(value: float, mean: float, sd: float) -> float:
    """Probability that a normal value lies below `value`."""
    return 0.5 * math.erfc((mean - value) / sd / math.sqrt(2))
