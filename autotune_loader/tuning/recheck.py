"""Whether an earlier result still holds: one paired check of about 2 s, against what the search would start from.

    round 1   best  baseline        each a short burst over the same indices; of whole epochs, where these are short
    round 2   baseline  best        ... two more where these disagree on a no, because a search costs far more than they do

Where another round would not fit into `CHECK_S` one is enough for a yes; what takes longer says why.

It holds while the best is not slower than the baseline, and while its rate is what it was: alone, or after what the
baseline shows of the machine's own drift. A job that reads other data, or a machine with another load, then tunes anew.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autotune_loader.decision.rounds import as_round
from autotune_loader.decision.space import Space
from autotune_loader.probe.protocol import Probe
from autotune_loader.results.cache import Entry
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.finals import paired
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval, Round, paired_ratio

# Short: two rounds of two bursts are the price of every repeated call.
CHECK_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=30.0)
ROUNDS = 2  # enough for a yes
MOST_ROUNDS = 4  # before a no, unless every round says so
CHECK_S = 5.0  # of rounds, for a yes
# What short bursts and the minutes between two runs do to a rate that has not changed.
NOISE = 0.12
# A paired comparison shares most of that.
PAIRED_NOISE = 0.05
# Single epochs scatter by 6 to 11 %, and there may be time for no more than one of each side.
EPOCH_NOISE, PAIRED_EPOCH_NOISE = 0.2, 0.15
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
    seconds: float = 0.0
    """That the rounds took."""
    whole_epochs: bool = False
    """Whether epochs were run whole."""
    objection: str = ""
    """Why the earlier result does not hold; empty while it does."""

    @property
    def round_s(self) -> float:
        """Seconds of one round."""
        return self.seconds / max(len(self.rounds), 1)

    @property
    def why_long(self) -> str:
        """Why the check took longer than `CHECK_S`; empty where it did not."""
        if self.seconds <= CHECK_S:
            return ""
        what = "epochs are short and were run whole" if self.whole_epochs else "batches are slow"
        return f"the check took {self.seconds:.0f} s, because {what}: {self.round_s:.0f} s a round"

    def rate(self, key: str = _BEST) -> float | None:
        """Median of a side's rates in samples/s: of three rounds, one may have been disturbed."""
        rates = [each.rates[key] for each in self.rounds if key in each.rates]
        return statistics.median(rates) if rates else None

    @property
    def paired_noise(self) -> float:
        """What the check may be off by in comparing its two sides."""
        return PAIRED_EPOCH_NOISE if self.whole_epochs else PAIRED_NOISE

    def refutes(self, then: Interval | None) -> bool:
        """Whether the best is faster than its partner by more, or less, than an earlier interval and noise allow."""
        now, noise = self.speedup, self.paired_noise
        if then is None or now is None:
            return False
        return not then.low * (1 - noise) <= now.value <= then.high * (1 + noise)

    @property
    def speedup(self) -> Interval | None:
        """Best over partner."""
        paired = [each for each in self.rounds if _PARTNER in each.rates]
        return paired_ratio(paired, _BEST, _PARTNER) if paired else None


def check(
    probe: Probe,
    entry: Entry,
    baseline: LoaderConfig,
    space: Space,
    tolerance: float,
    clock: Callable[[], float] = time.monotonic,
) -> Recheck:
    """Run the paired check of an earlier result.

    Args:
        probe: runs the bursts.
        entry: the earlier result.
        baseline: what the caller has now: the partner, unless it is the best itself; then torch's default is.
        space: what is legal here and now.
        tolerance: relative difference that counts as equally fast.
        clock: seconds.
    """
    best = entry.result.best
    others = [config for config in (baseline, LoaderConfig()) if config.key() != best.key()]
    seen = Recheck(partner=others[0] if others else None, whole_epochs=entry.result.finals.whole_epochs)
    veto = space.veto(best)
    if veto is not None:
        seen.objection = veto.message
        return seen
    _run_rounds(probe, entry.result, seen, tolerance, clock)
    return seen


def _run_rounds(
    probe: Probe, earlier: TuningResult, seen: Recheck, tolerance: float, clock: Callable[[], float]
) -> None:
    """Rounds until they say yes, or say no for sure; the first failure of the best is a no."""
    best = earlier.best
    configs = {_BEST: best} if seen.partner is None else {_BEST: best, _PARTNER: seen.partner}
    failed, is_over = list[Failure](), False

    def observe(side: str, number: int) -> Measurement | Failure:
        if failed:  # nothing more is to be learnt
            return failed[0]
        seen.bursts += 1
        # Without workers an epoch is nothing but its batches, so any burst will do.
        whole = seen.whole_epochs and configs[side].num_workers > 0
        outcome = probe.burst(configs[side], replace(CHECK_BURST, seed=number, whole_epochs=whole))
        if side == _BEST and isinstance(outcome, Failure):
            failed.append(outcome)
        return outcome

    def record(outcomes: Sequence[tuple[str, Measurement | Failure]], seconds: float) -> None:
        nonlocal is_over
        seen.rounds.append(as_round(outcomes))
        seen.seconds += seconds
        if failed:
            seen.objection, is_over = f"it failed now ({failed[0].kind}): {failed[0].message}", True
            return
        is_enough = len(seen.rounds) >= ROUNDS
        if is_enough or seen.seconds + seen.round_s > CHECK_S:
            seen.objection = _objection(seen, earlier, tolerance)
            is_over = not seen.objection or (is_enough and _is_unanimous(seen, earlier, tolerance))

    paired(lambda number: () if is_over or number >= MOST_ROUNDS else tuple(configs), observe, record, clock=clock)


def _is_unanimous(seen: Recheck, earlier: TuningResult, tolerance: float) -> bool:
    """Whether every round objects by itself, so that more of them would hardly say otherwise."""
    alone = [replace(seen, rounds=[each]) for each in seen.rounds]
    return all(_objection(each, earlier, tolerance) for each in alone)


def _objection(seen: Recheck, earlier: TuningResult, tolerance: float) -> str:
    now, partner = seen.rate(), seen.rate(_PARTNER)
    stored = earlier.measured.samples_per_s
    assert now is not None
    assert stored is not None
    noise = EPOCH_NOISE if seen.whole_epochs else NOISE
    if partner is not None and now / partner < 1 - tolerance - seen.paired_noise:
        return f"it is no longer as fast as {seen.partner}: {now:,.0f} against {partner:,.0f} samples/s"
    drifts = [1.0]
    partner_then = None if seen.partner is None else rate_then(seen.partner, earlier)
    if partner is not None and partner_then:
        drifts.append(min(max(partner / partner_then, 1 - MOST_DRIFT), 1 + MOST_DRIFT))
    low, high = _band(stored, noise)
    if any(low <= now / stored.value / drift <= high for drift in drifts):
        return ""
    beside = "" if len(drifts) == 1 else f", while {seen.partner} went from {partner_then:,.0f} to {partner:,.0f}"
    return f"its rate went from {stored.value:,.0f} to {now:,.0f} samples/s{beside}"


def _band(stored: Interval, noise: float) -> tuple[float, float]:
    """What a rate may be, relative to the stored one: its interval and the noise of a short burst."""
    low = max(stored.low / stored.value, 1 - MOST_DRIFT) if stored.value > 0 else 0.0
    high = min(stored.high / stored.value, 1 + MOST_DRIFT) if stored.value > 0 else math.inf
    return low * (1 - noise), high * (1 + noise)


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
