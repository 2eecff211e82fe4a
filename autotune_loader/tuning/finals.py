"""Fresh, interleaved, paired rounds between the few configurations that are left: what the verdict rests on.

    round 1   B A C      every candidate once, in random order, over the same indices
    round 2   C A B      ... until every question is answered, or the time is up
    round 3   A C B

The bursts of the search chose the candidates, so no rate that is reported comes from them: the best of many noisy bursts
looks better than it is, and only rounds run after the choice tell how good it really is. For the choice itself what the
search believed counts as one more witness, weighted by how sure it was: few rounds cannot tell 3 % apart, the twin often can.
Where rounds prove that somebody is faster, no belief stands against them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import numpy as np

from autotune_loader.decision.posterior import Posterior
from autotune_loader.probe.protocol import Probe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import (
    MAX_ROUNDS,
    Interval,
    Round,
    log_ratios,
    mean_interval,
    sequential_interval,
    usable_rounds,
)

# One burst of the finals: long enough to average over stalls, short enough that a round sees one state of the machine. It
# hardly ever ends early: a window that closes when it looks quiet has not seen the slow tail yet.
FINAL_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.003)
# Without beliefs from the search anything may be twice as fast as anything else.
UNKNOWN_SD = 0.7
# Relative standard deviation of a burst's rate, where nothing else is known of it.
TYPICAL_NOISE = 0.03
# New candidates are let in after the first rounds, so that each runs in more than one; later only while the choice is in doubt.
ADMITTING_ROUNDS = 2
# So many bursts' worth a typical noise counts beside that of the rounds.
NOISE_WEIGHT = 4.0
LEAST_NOISE = 0.003
# A candidate that is slower, or as fast, with this probability needs no further rounds.
CERTAIN = 0.95
# Besides whoever would be chosen now, so many run in a round; more only where several were faster in their few rounds.
RIVALS = 1
# Patience lasts so many times longer while the rounds do not bear out what would be chosen.
LONGER_PATIENCE = 2.0
# And so many times while what would be chosen is in doubt: it is expected to lose more than this share of the tolerance. Of 58
# wrong choices on 1,500 simulated machines 47 were among the fifth that was most in doubt (studies.regret.belief).
DOUBTFUL_PATIENCE, DOUBTFUL_SHARE = 3.5, 0.25
# A choice is borne out only by a speed-up that is known this well, relatively.
SPEEDUP_PRECISION = 0.25
# Fewer rounds say nothing about noise.
MIN_ROUNDS = 3
# Open questions get so many, however long a round takes: on large machines three outlast all patience and settle nothing.
PATIENT_ROUNDS = 5
# Whoever wins ran in two rounds, or in as many as anybody: one burst gives no interval.
LEAST_OF_WINNER = 2
# The baseline is only compared with the winner; once that ratio is known this well it sits out.
BASELINE_PRECISION = 0.03
# A candidate that failed this often in the finals is out.
MAX_FAILURES = 2
Burst = tuple[LoaderConfig, Measurement]


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
    believe: Callable[[Sequence[Burst]], Posterior | None]
    cost: Callable[[LoaderConfig], tuple[float, ...]]
    pause_of: Callable[[LoaderConfig, Measurement], float]
    typical_noise: float
    rounds: list[Round]
    failures: list[int]
    pauses: dict[int, float] = field(default_factory=dict)
    """Seconds before the first batch, of those that need it."""
    latest: dict[int, Measurement] = field(default_factory=dict)
    bursts: list[tuple[Round, int, Measurement]] = field(default_factory=list)
    learnt: tuple[int, Posterior | None] | None = None
    """After so many rounds, what was known of everything, entrant or not."""
    believed: tuple[tuple[int, int], Posterior] | None = None
    """After so many rounds of so many entrants, what was known of these."""
    messages: dict[int, str] = field(default_factory=dict)
    """Of the latest failure of each."""

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
    unspent_s: float = 0.0,
    plan_of: Callable[[LoaderConfig, BurstPlan], BurstPlan] = lambda config, plan: plan,
    pause_of: Callable[[LoaderConfig, Measurement], float] = lambda config, measured: 0.0,
    believe: Callable[[Sequence[Burst]], Posterior | None] = lambda bursts: None,
    nominate: Callable[[Posterior], Sequence[LoaderConfig]] = lambda known: (),
    ceiling: float | None = None,
    typical_noise: float = TYPICAL_NOISE,
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
        patience_s: seconds after which open questions are left open, once there were `PATIENT_ROUNDS`; `LONGER_PATIENCE`
            times that where the rounds contradict the choice or do not show it to be faster than the baseline, and
            `DOUBTFUL_PATIENCE` times while the choice is expected to lose more than `DOUBTFUL_SHARE` of the tolerance.
        seed: of the order within the rounds.
        unspent_s: seconds of `time_left` that patience leaves; only the first `PATIENT_ROUNDS` may use them.
        plan_of: adapts the plan of a burst to a configuration.
        pause_of: seconds that a burst like this one should have begun with, so that queues are as in the midst of training;
            then it is run again, and all later ones begin so.
        believe: what is known after these bursts of the finals, of all entrants at least; used for the choice, never for
            a rate. Without it the rounds alone decide.
        nominate: who else should run, given what is known; asked after the first rounds, and while the choice is in doubt.
        ceiling: samples/s that nobody can exceed, where that is known: whoever comes within tolerance of it is fast enough.
        typical_noise: relative standard deviation of one burst, before the rounds show theirs; for a choice by rounds alone.
        on_round: told each round's rates.

    Returns:
        The outcome; None when no round could be completed.
    """
    configs = list(dict.fromkeys([*candidates, baseline]))
    standing = _Standing(configs, believe, cost, pause_of, typical_noise, [], [0] * len(configs))
    base = configs.index(baseline)
    order, spent_s, in_doubt = random.Random(seed), 0.0, False
    while len(standing.rounds) < MAX_ROUNDS and standing.active():
        before_s, entrants = time_left(), _entrants(standing, base, tolerance)
        round_s = len(entrants) * spent_s / max(len(standing.bursts), 1)
        if before_s < round_s or _is_settled(standing, entrants):
            break
        patience_left_s = _patience(standing, base, tolerance, in_doubt) * patience_s - spent_s
        is_patient = round_s <= min(patience_left_s, before_s - unspent_s)
        if not is_patient and len(standing.rounds) >= PATIENT_ROUNDS:
            break
        _run_round(standing, probe, entrants, order, plan_of)
        spent_s += max(before_s - time_left(), 1e-9)
        rates = standing.rounds[-1].rates
        in_doubt = _is_in_doubt(standing, tolerance)
        if len(standing.rounds) <= ADMITTING_ROUNDS or in_doubt:
            _admit(standing, nominate)
        on_round(len(standing.rounds), {configs[int(key)]: rate for key, rate in rates.items()})
    return _outcome(standing, base, tolerance, ceiling)


def _run_round(
    standing: _Standing,
    probe: Probe,
    entrants: list[int],
    order: random.Random,
    plan_of: Callable[[LoaderConfig, BurstPlan], BurstPlan],
) -> None:
    number = len(standing.rounds)
    # Apart from the search's seeds: fresh samples as well as fresh bursts.
    plan = replace(FINAL_BURST, seed=1_000 + number)
    rates: dict[str, float] = {}
    foreign: list[float] = []
    for index in order.sample(entrants, len(entrants)):
        outcome = _burst(standing, probe, index, plan_of(standing.configs[index], plan))
        if isinstance(outcome, Failure):
            standing.failures[index] += 1
            standing.messages[index] = outcome.message
            continue
        rates[str(index)] = outcome.samples_per_s.value
        standing.latest[index] = outcome
        if outcome.foreign_cpu_share is not None:
            foreign.append(outcome.foreign_cpu_share)
    done = Round(rates=rates, foreign_cpu_share=max(foreign, default=None))
    standing.rounds.append(done)
    standing.bursts += [(done, int(key), standing.latest[int(key)]) for key in rates]


def _burst(standing: _Standing, probe: Probe, index: int, plan: BurstPlan) -> Measurement | Failure:
    """One burst; a second where the first shows that it, and all later ones, must begin with a pause."""
    config, paused_s = standing.configs[index], standing.pauses.get(index, 0.0)
    outcome = probe.burst(config, replace(plan, pause_s=paused_s))
    if paused_s or isinstance(outcome, Failure):
        return outcome
    pause_s = standing.pause_of(config, outcome)
    if not pause_s:
        return outcome
    standing.pauses[index] = pause_s
    return probe.burst(config, replace(plan, pause_s=pause_s))


def _learnt(standing: _Standing, rounds: Sequence[Round]) -> Posterior | None:
    """What is known of everything after the rounds; None where these alone decide."""
    if standing.learnt is None or standing.learnt[0] != len(rounds):
        standing.learnt = (len(rounds), standing.believe(_bursts(standing, rounds)))
    return standing.learnt[1]


def _believed(standing: _Standing, rounds: Sequence[Round]) -> Posterior:
    """What is known after the rounds, of the entrants in their order."""
    key = (len(rounds), len(standing.configs))
    if standing.believed is None or standing.believed[0] != key:
        known = _learnt(standing, rounds)
        if known is None:
            known = _by_rounds(standing, rounds)
        else:
            known = _completed(known, standing.configs, _bursts(standing, rounds))
        standing.believed = (key, known)
    return standing.believed[1]


def _bursts(standing: _Standing, rounds: Sequence[Round]) -> list[Burst]:
    return [(standing.configs[index], burst) for done, index, burst in standing.bursts if done in rounds]


def _completed(known: Posterior, configs: Sequence[LoaderConfig], bursts: Sequence[Burst]) -> Posterior:
    """What is known of the entrants; of those that the search could not measure, what their first burst said."""
    first = {config: burst.samples_per_s.value for config, burst in reversed(bursts)}
    typical = math.exp(float(known.mean.max()))
    missing = {config: first.get(config, typical) for config in configs if config not in known.configs}
    return known.including(missing).at(configs)


def _by_rounds(standing: _Standing, rounds: Sequence[Round]) -> Posterior:
    """What the rounds alone tell, each relative to its own level."""
    size = len(standing.configs)
    before = Posterior(
        configs=tuple(standing.configs),
        mean=np.zeros(size),
        covariance=UNKNOWN_SD**2 * np.eye(size),
        noise_sd=standing.typical_noise,
    )
    seen = [(int(key), math.log(rate)) for each in rounds for key, rate in each.rates.items()]
    noise = _noise_sd(standing, rounds)
    level = fmean(log for _, log in seen) if seen else 0.0
    return before.updated([index for index, _ in seen], [log - level for _, log in seen], [noise**2] * len(seen))


def _rates(rounds: Sequence[Round], index: int) -> list[float]:
    """The rates of one entrant, in the rounds that it ran in."""
    return [each.rates[str(index)] for each in rounds if str(index) in each.rates]


def _noise_sd(standing: _Standing, rounds: Sequence[Round]) -> float:
    """Noise of one burst: a typical one, and the scatter of each entrant over the rounds, by their weight."""
    squares, freedom = NOISE_WEIGHT * standing.typical_noise**2, NOISE_WEIGHT
    for index in range(len(standing.configs)):
        logs = [math.log(rate) for rate in _rates(rounds, index)]
        if len(logs) > 1:
            # The median deviation: a single disturbed burst is no noise.
            typical = median(abs(log - median(logs)) for log in logs) * 1.48
            squares, freedom = squares + (len(logs) - 1) * typical**2, freedom + len(logs) - 1
    return max(math.sqrt(squares / freedom), LEAST_NOISE)


def _admit(standing: _Standing, nominate: Callable[[Posterior], Sequence[LoaderConfig]]) -> None:
    """Let in whom the rounds so far have made a candidate."""
    known = _learnt(standing, usable_rounds(standing.rounds).rounds)
    new = [config for config in (nominate(known) if known is not None else ()) if config not in standing.configs]
    standing.configs += new
    standing.failures += [0] * len(new)


def _entrants(standing: _Standing, base: int, tolerance: float) -> list[int]:
    """Who runs in the next round: whoever would be chosen now, its strongest rival, and a baseline that is not known yet."""
    active = standing.active()
    usable = usable_rounds(standing.rounds).rounds
    leader = _leader(standing, usable, tolerance)
    if leader is None:
        return active
    known = _believed(standing, usable)
    new = [index for index in active if not _rates(usable, index)]
    others = [index for index in active if index not in (leader, base)]
    # Whom the rounds say to be faster is heard out: where belief favours somebody else, few rounds must not be the last.
    rivals = [index for index in others if _is_unheard(usable, index, leader, tolerance)]
    if not rivals:
        open_ = [index for index in others if not _is_answered(known, usable, index, leader, tolerance)]
        rivals = sorted(open_, key=lambda index: -sum(known.ratio(index, leader)))[:RIVALS]
    wanted = {leader, *new, *rivals}
    if base in active and not _is_compared(usable, base, leader, tolerance):
        wanted.add(base)
    return sorted(wanted)


def _is_answered(known: Posterior, rounds: Sequence[Round], index: int, leader: int, tolerance: float) -> bool:
    looks_faster = _look_faster(log_ratios(rounds, str(index), str(leader)), tolerance)
    if not looks_faster and known.is_as_fast(leader, index, tolerance):
        return True
    mean, sd = known.ratio(index, leader)
    slower = _below(math.log(1 - tolerance), mean, sd)
    faster = 1 - _below(-math.log(1 - tolerance), mean, sd)
    return slower > CERTAIN or slower + faster < 1 - CERTAIN


def _is_unheard(rounds: Sequence[Round], index: int, leader: int, tolerance: float) -> bool:
    """Whether an entrant was faster in its rounds, and these are too few to prove it."""
    logs = log_ratios(rounds, str(index), str(leader))
    return len(logs) < MIN_ROUNDS and _look_faster(logs, tolerance)


def _look_faster(logs: Sequence[float], tolerance: float) -> bool:
    """Whether rounds with these logarithms of ratios speak for the one above, by their mean."""
    return bool(logs) and fmean(logs) > tolerance


def _is_compared(rounds: Sequence[Round], base: int, leader: int, tolerance: float) -> bool:
    logs = log_ratios(rounds, str(base), str(leader))
    if len(logs) < MIN_ROUNDS:
        return False
    plain = mean_interval(logs)
    return (plain.high - plain.low) / 2 < BASELINE_PRECISION and plain.high < -2 * tolerance


def _below(value: float, mean: float, sd: float) -> float:
    return 0.5 * math.erfc((mean - value) / sd / math.sqrt(2))


def _is_settled(standing: _Standing, entrants: Sequence[int]) -> bool:
    """Whether no further round could change the choice: every candidate but the leader is answered."""
    return len(standing.rounds) >= MIN_ROUNDS and len(entrants) <= 1


def _is_borne_out(standing: _Standing, base: int, tolerance: float) -> bool:
    """Whether the rounds alone agree with the choice: nothing was faster, the baseline slower by a known amount."""
    rounds = usable_rounds(standing.rounds).rounds
    leader = _leader(standing, rounds, tolerance)
    if leader is None:
        return False
    for index in standing.active():
        logs = log_ratios(rounds, str(index), str(leader))
        looks_faster = index != leader and len(logs) > 1 and _look_faster(logs, tolerance)
        if looks_faster and not _believed(standing, rounds).is_as_fast(leader, index, tolerance):
            return False
    over_base = log_ratios(rounds, str(leader), str(base))
    if leader == base:
        return True
    speedup = mean_interval(over_base) if len(over_base) > 1 else None
    return speedup is not None and speedup.low > 0 and speedup.high - speedup.value < SPEEDUP_PRECISION


def _patience(standing: _Standing, base: int, tolerance: float, in_doubt: bool) -> float:
    """How many times as long as a choice that is sure the rounds may go on."""
    if in_doubt:
        return DOUBTFUL_PATIENCE
    return 1.0 if _is_borne_out(standing, base, tolerance) else LONGER_PATIENCE


def _is_in_doubt(standing: _Standing, tolerance: float) -> bool:
    """Whether what would be chosen now is expected to lose much against everything that is known, entrant or not."""
    rounds = usable_rounds(standing.rounds).rounds
    leader, known = _leader(standing, rounds, tolerance), _learnt(standing, rounds)
    if leader is None or known is None or standing.configs[leader] not in known.configs:
        return False
    loss = known.regret_samples()[:, known.configs.index(standing.configs[leader])].mean()
    return bool(loss > DOUBTFUL_SHARE * tolerance)


def _leader(standing: _Standing, rounds: Sequence[Round], tolerance: float, least_rounds: int = 1) -> int | None:
    """Who would be chosen now, of those that ran so often, if any did, and did not fail."""
    counts = {index: len(_rates(rounds, index)) for index in standing.active()}
    most = max(counts.values(), default=0)
    if most == 0:
        return None
    ran = [index for index, count in counts.items() if count >= min(least_rounds, most)]
    known = _believed(standing, rounds).at([standing.configs[index] for index in ran])
    chosen, _ = known.choice([standing.cost(config) for config in known.configs], tolerance)
    leader = ran[chosen]
    over_leader = {index: log_ratios(rounds, str(index), str(leader)) for index in ran}
    proved = [index for index, logs in over_leader.items() if _prove_faster(logs, tolerance)]
    return max(proved, key=lambda index: fmean(over_leader[index]), default=leader)


def _prove_faster(logs: Sequence[float], tolerance: float) -> bool:
    """Whether such rounds alone show it, whatever is believed."""
    return len(logs) >= MIN_ROUNDS and _look_faster(logs, tolerance) and mean_interval(logs).low > 0


def _cheapest_unbeaten(
    standing: _Standing, rounds: Sequence[Round], leader: int, tolerance: float, ceiling: float | None
) -> int:
    """The choice, or a cheaper entrant that was not slower in most of the rounds: what costs more must show that it helps.

    Where its workers were seen to be too few the rounds must prove it: slow batches may have been few in most of them.
    An entrant as near the ceiling as the tolerance allows need not be as fast as the choice: there is nothing to gain.
    """
    known = _believed(standing, rounds)

    def is_proved(logs: Sequence[float]) -> bool:
        return len(logs) >= MIN_ROUNDS and mean_interval(logs).low >= math.log(1 - tolerance)

    def is_unbeaten(index: int) -> bool:
        logs = log_ratios(rounds, str(index), str(leader))
        if known.is_starving(index, leader, tolerance) and not is_proved(logs):
            return False
        if len(logs) >= MIN_ROUNDS and median(logs) >= 0:
            return True
        if ceiling is None or len(logs) < LEAST_OF_WINNER:
            return False
        return min(math.log(fmean(_rates(rounds, index)) / ceiling), fmean(logs)) >= math.log(1 - tolerance)

    unbeaten = [index for index in standing.active() if index != leader and is_unbeaten(index)]
    return min([leader, *unbeaten], key=lambda index: standing.cost(standing.configs[index]))


def _outcome(standing: _Standing, base: int, tolerance: float, ceiling: float | None) -> FinalsOutcome | None:
    usable = usable_rounds(standing.rounds)
    leader = _leader(standing, usable.rounds, tolerance, LEAST_OF_WINNER)
    if leader is None:
        return None
    winner = _cheapest_unbeaten(standing, usable.rounds, leader, tolerance, ceiling)
    rates = _rates(usable.rounds, winner)
    logs = log_ratios(usable.rounds, str(winner), str(base))
    exactly_one = Interval(value=1.0, low=1.0, high=1.0, count=len(usable.rounds))
    return FinalsOutcome(
        configs=tuple(standing.configs),
        rounds=usable.rounds,
        winner=standing.configs[winner],
        rate=mean_interval(rates) if len(rates) > 1 else standing.latest[winner].samples_per_s,
        measurement=standing.latest[winner],
        speedup=exactly_one if winner == base else (sequential_interval(logs, final=True) if len(logs) > 1 else None),
        notes=((usable.note,) if usable.note else ()) + _failed(standing),
    )


def _failed(standing: _Standing) -> tuple[str, ...]:
    """A sentence for each entrant that failed in the finals: in the search it had worked."""
    return tuple(
        f"{standing.configs[index]} failed {standing.failures[index]} time(s) in the finals: {message}"
        for index, message in standing.messages.items()
    )
