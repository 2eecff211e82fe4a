"""Whether an earlier result still holds: one paired check of about 2 s, against what the search would start from.

    round 1   best  baseline        each a short burst over the same indices
    round 2   baseline  best        ... two more where these disagree on a no, because a search costs far more than they do

It holds while the best is not slower than the baseline, and while its rate is what it was: alone, or after what the
baseline shows of the machine's own drift. A job that reads other data, or a machine with another load, then tunes anew.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autotune_loader.decision.rounds import as_round, in_turning_order
from autotune_loader.decision.space import Space
from autotune_loader.probe.protocol import Probe
from autotune_loader.results.cache import Entry
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval, Round, paired_ratio

# Short: two rounds of two bursts are the price of every repeated call.
CHECK_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=30.0)
ROUNDS = 2  # enough for a yes
MOST_ROUNDS = 4  # before a no, unless every round says so
# What short bursts and the minutes between two runs do to a rate that has not changed.
NOISE = 0.12
# A paired comparison shares most of that.
PAIRED_NOISE = 0.05
# A machine that is this much slower or faster as a whole is another machine, or the workload is another one.
MOST_DRIFT = 0.3
_BEST, _PARTNER = "best", "partner"  # the sides of a round


@dataclass(slots=True, kw_only=True)
class Recheck:
    """What the paired check saw."""

    partner: LoaderConfig | None
    """What the best was paired with; None where there is nothing else to compare it with."""
    rounds: list[Round] = field(default_factory=list)
    bursts: int = 0
    objection: str = ""
    """Why the earlier result does not hold; empty while it does."""

    def rate(self, key: str = _BEST) -> float | None:
        """Median of a side's rates in samples/s: of three rounds, one may have been disturbed."""
        rates = [each.rates[key] for each in self.rounds if key in each.rates]
        return statistics.median(rates) if rates else None

    @property
    def speedup(self) -> Interval | None:
        """Best over partner."""
        paired = [each for each in self.rounds if _PARTNER in each.rates]
        return paired_ratio(paired, _BEST, _PARTNER) if paired else None


def check(probe: Probe, entry: Entry, baseline: LoaderConfig, space: Space, tolerance: float) -> Recheck:
    """Run the paired check of an earlier result.

    Args:
        probe: runs the bursts.
        entry: the earlier result.
        baseline: what the caller has now: the partner, unless it is the best itself; then torch's default is.
        space: what is legal here and now.
        tolerance: relative difference that counts as equally fast.
    """
    best = entry.result.best
    others = [config for config in (baseline, LoaderConfig()) if config.key() != best.key()]
    seen = Recheck(partner=others[0] if others else None)
    veto = space.veto(best)
    if veto is not None:
        seen.objection = veto.message
        return seen
    plan = replace(CHECK_BURST, whole_epochs=entry.result.finals.whole_epochs)
    while len(seen.rounds) < MOST_ROUNDS:
        failure = _run_round(probe, best, plan, seen)
        if failure is not None:
            seen.objection = f"it failed now ({failure.kind}): {failure.message}"
            return seen
        if len(seen.rounds) >= ROUNDS:
            seen.objection = _objection(seen, entry.result, tolerance)
            if not seen.objection or _is_unanimous(seen, entry.result, tolerance):
                break
    return seen


def _run_round(probe: Probe, best: LoaderConfig, plan: BurstPlan, seen: Recheck) -> Failure | None:
    """One burst of each side; the failure of the best, if it failed."""
    sides = {_BEST: best} if seen.partner is None else {_BEST: best, _PARTNER: seen.partner}
    number, failed = len(seen.rounds), list[Failure]()

    def observe(side: str) -> Measurement | Failure:
        if failed:  # nothing more is to be learnt
            return failed[0]
        seen.bursts += 1
        outcome = probe.burst(sides[side], replace(plan, seed=number))
        if side == _BEST and isinstance(outcome, Failure):
            failed.append(outcome)
        return outcome

    outcomes = in_turning_order(list(sides), observe, number)
    seen.rounds.append(as_round(outcomes))
    return failed[0] if failed else None


def _is_unanimous(seen: Recheck, earlier: TuningResult, tolerance: float) -> bool:
    """Whether every round objects by itself, so that more of them would hardly say otherwise."""
    alone = [Recheck(partner=seen.partner, rounds=[each]) for each in seen.rounds]
    return all(_objection(each, earlier, tolerance) for each in alone)


def _objection(seen: Recheck, earlier: TuningResult, tolerance: float) -> str:
    now, partner = seen.rate(), seen.rate(_PARTNER)
    stored = earlier.measured.samples_per_s
    assert now is not None
    assert stored is not None
    if partner is not None and now / partner < 1 - tolerance - PAIRED_NOISE:
        return f"it is no longer as fast as {seen.partner}: {now:,.0f} against {partner:,.0f} samples/s"
    drifts = [1.0]
    partner_then = None if seen.partner is None else rate_then(seen.partner, earlier)
    if partner is not None and partner_then:
        drifts.append(min(max(partner / partner_then, 1 - MOST_DRIFT), 1 + MOST_DRIFT))
    low, high = _band(stored)
    if any(low <= now / stored.value / drift <= high for drift in drifts):
        return ""
    beside = "" if len(drifts) == 1 else f", while {seen.partner} went from {partner_then:,.0f} to {partner:,.0f}"
    return f"its rate went from {stored.value:,.0f} to {now:,.0f} samples/s{beside}"


def _band(stored: Interval) -> tuple[float, float]:
    """What a rate may be, relative to the stored one: its interval and the noise of a short burst."""
    low = max(stored.low / stored.value, 1 - MOST_DRIFT) if stored.value > 0 else 0.0
    high = min(stored.high / stored.value, 1 + MOST_DRIFT) if stored.value > 0 else math.inf
    return low * (1 - NOISE), high * (1 + NOISE)


def rate_then(config: LoaderConfig, earlier: TuningResult) -> float | None:
    """Samples/s of a configuration in an earlier result: in its finals, or else in its search."""
    finals = earlier.finals
    keys = [each.key() for each in finals.configs]
    if config.key() in keys:
        column = keys.index(config.key())
        rates: Sequence[float] = [rate for rates in finals.rounds if (rate := rates[column])]
        if rates:
            return math.exp(math.fsum(map(math.log, rates)) / len(rates))
    if finals.whole_epochs:  # the search's bursts were not
        return None
    measured = [each.samples_per_s for each in earlier.trials if each.config.key() == config.key()]
    return next((rate for rate in reversed(measured) if rate), None)
