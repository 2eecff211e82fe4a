"""An earlier result of the same workload on the same machine: found, checked, used if it holds, kept for the next call.

    round 1   best  baseline        each a short burst over the same indices; of whole epochs, where these are short
    round 2   baseline  best        ... two more where these disagree on a no, because a search costs far more than they do

Where another round would not fit into `CHECK_S` one is enough for a yes; what takes longer says why. The result holds while the
best is not slower than the baseline, and while its rate is what it was, or its lead over the baseline is on a machine that is
not much slower or faster as a whole. A job that reads other data, or a machine with another load, then tunes anew.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autotune_loader.bursts.protocol import Probe
from autotune_loader.decision.rounds import as_round
from autotune_loader.decision.space import Space
from autotune_loader.report.standings import rate_of
from autotune_loader.results import cache
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.finals import paired
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.state import RunContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import Interval, Round, paired_ratio

log = logging.getLogger(__name__)

CHECK_BURST = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=30.0)
"""Short: two rounds of two bursts are the price of every repeated call."""
ROUNDS, MOST_ROUNDS, CHECK_S = 2, 4, 5.0
"""Enough for a yes, and before a no; and seconds of rounds for a yes."""
NOISE, PAIRED_NOISE = 0.12, 0.05
"""What short bursts and the minutes between two runs do to a rate that has not changed; two sides share most of that."""
EPOCH_NOISE, PAIRED_EPOCH_NOISE = 0.2, 0.15
"""Single epochs scatter by 6 to 11 %, and there may be time for no more than one of each side."""
MOST_DRIFT = 0.3
"""A machine that is this much slower or faster as a whole is another machine, or the workload is another one."""


@dataclass(slots=True, kw_only=True)
class Check:
    """What the paired check of an earlier result saw."""

    earlier: TuningResult
    partner: LoaderConfig | None
    """What the best was paired with; None where there is nothing else to compare it with."""
    rounds: list[Round] = field(default_factory=list)
    bursts: int = 0
    seconds: float = 0.0
    """That the rounds took."""
    objection: str = ""
    """Why the earlier result does not hold; empty while it does."""

    @property
    def why_long(self) -> str:
        """Why the check took longer than `CHECK_S`; empty where it did not."""
        if self.seconds <= CHECK_S:
            return ""
        what = "epochs are short and were run whole" if self.earlier.finals.whole_epochs else "batches are slow"
        a_round_s = self.seconds / len(self.rounds)
        return f"the check took {self.seconds:.0f} s, because {what}: {a_round_s:.0f} s a round"

    def rate(self, config: LoaderConfig | None) -> float | None:
        """Median of a side's rates in samples/s: of three rounds, one may have been disturbed."""
        rates = [each.rates[config] for each in self.rounds if config in each.rates]
        return statistics.median(rates) if rates else None

    @property
    def speedup(self) -> Interval | None:
        """Best over partner."""
        return None if self.rate(self.partner) is None else paired_ratio(self.rounds, self.earlier.best, self.partner)


def check(
    probe: Probe,
    earlier: TuningResult,
    baseline: LoaderConfig,
    space: Space,
    tolerance: float,
    clock: Callable[[], float] = time.monotonic,
) -> Check:
    """Run the paired check of an earlier result.

    Args:
        probe: runs the bursts.
        earlier: the result.
        baseline: what the caller has now: the partner, unless it is the best itself; then torch's default is.
        space: what is legal here and now.
        tolerance: relative difference that counts as equally fast.
        clock: seconds.
    """
    best = earlier.best
    others = [config for config in (baseline, LoaderConfig()) if config.key() != best.key()]
    seen = Check(earlier=earlier, partner=others[0] if others else None)
    if (veto := space.veto(best)) is not None:
        seen.objection = veto.message
        return seen
    failed = list[Failure]()

    def sides(number: int) -> Sequence[LoaderConfig]:
        is_enough = number >= ROUNDS or (number > 0 and seen.seconds * (number + 1) / number > CHECK_S)
        is_over = bool(failed) or number >= MOST_ROUNDS or (is_enough and not seen.objection)
        # Where every round objects by itself, more of them would hardly say otherwise.
        alone = [_objection(replace(seen, rounds=[each]), tolerance) for each in seen.rounds] if not is_over else []
        return () if is_over or (number >= ROUNDS and all(alone)) else [best, *others[:1]]

    def observe(config: LoaderConfig, number: int) -> Measurement | Failure:
        if failed:  # nothing more is to be learnt
            return failed[0]
        seen.bursts += 1
        # Without workers an epoch is nothing but its batches, so any burst will do.
        outcome = probe.burst(config, replace(CHECK_BURST, seed=number))
        failed.extend([outcome] if config == best and isinstance(outcome, Failure) else [])
        return outcome

    for outcomes, seconds in paired(sides, observe, clock=clock):
        seen.rounds.append(as_round(outcomes))
        seen.seconds += seconds
        failure = f"it failed now ({failed[0].kind}): {failed[0].message}" if failed else ""
        seen.objection = failure or _objection(seen, tolerance)
    return seen


def _objection(seen: Check, tolerance: float) -> str:
    earlier, partner, then = seen.earlier, seen.partner, seen.earlier.measured.samples_per_s
    whole, unit = earlier.finals.whole_epochs, earlier.measured.rate_unit
    noise, paired_noise = (EPOCH_NOISE, PAIRED_EPOCH_NOISE) if whole else (NOISE, PAIRED_NOISE)
    now, beside = seen.rate(earlier.best), seen.rate(partner)
    assert now is not None
    assert then is not None
    if beside is not None and now / beside < 1 - tolerance - paired_noise:
        return f"it is no longer as fast as {partner}: {now:,.0f} against {beside:,.0f} {unit}"
    # The bursts of a search were not of whole epochs.
    before = rate_of(partner, earlier.finals, () if whole else earlier.trials) if partner is not None else None
    drift = 1.0 if beside is None or before is None else beside / before.value
    drifts = (1.0, drift) if abs(drift - 1) <= MOST_DRIFT else (1.0,)
    # Few noisy rounds have intervals that would let anything pass.
    low = max(then.low, (1 - MOST_DRIFT) * then.value) * (1 - noise)
    high = min(then.high, (1 + MOST_DRIFT) * then.value) * (1 + noise)
    if any(low <= now / each <= high for each in drifts):
        return ""
    drifted = (
        "" if drift == 1.0 or before is None else f", while {partner} went from {before.value:,.0f} to {beside:,.0f}"
    )
    return f"its rate went from {then.value:,.0f} to {now:,.0f} {unit}{drifted}"


@dataclass(slots=True, kw_only=True)
class EarlierResult:
    """What the cache knows of a call, and the place for what the call finds."""

    context: RunContext
    options: TuneOptions
    key: str
    """Of this call in the cache."""
    entry: TuningResult | None
    """None where nothing was kept, or it is not to be used."""
    objections: tuple[str, ...] = ()
    """Why the earlier result was not used, in a sentence."""

    @classmethod
    def find(cls, context: RunContext, options: TuneOptions, *, ranks: int) -> EarlierResult:
        """The earlier result of this call, if there is one."""
        step = context.warmup.step
        key = cache.result_key(context.workload, context.fingerprint, options.limits(), step=step, ranks=ranks)
        # A study that is kept on purpose is to be gone on with, not passed over.
        is_wanted = options.reuse and options.storage is None
        return cls(context=context, options=options, key=key, entry=cache.find(key) if is_wanted else None)

    def check(self, probe: Probe, announce: Callable[[str], None]) -> Check | None:
        """What a paired check saw of an earlier result that holds; None where there is none, or none that holds."""
        entry, options, context = self.entry, self.options, self.context
        if entry is None:
            return None
        tuned_at, best = entry.tuned_at, entry.best
        if entry.status == "undecided" or not entry.spent.is_enough_for(options.budget_s, options.max_trials):
            log.info("the earlier result of %s was not decided, or had less time or trials; tuning anew", tuned_at)
            return None
        announce(f"checking the result of {tuned_at}: {best}")
        seen = check(probe, entry, context.baseline, context.space, options.tolerance)
        if not seen.objection:
            return seen
        long = f" ({seen.why_long})" if seen.why_long else ""
        self.objections = (f"the result of {tuned_at} ({best}) was not reused: {seen.objection}{long}",)
        log.warning("%s; tuning anew", *self.objections)
        return None

    def keep(self, result: TuningResult, *, cut_short: bool) -> None:
        """Keep the result of a search for the next call, without what that will find out itself, and for AutoLoaders."""
        found_anew = (*self.context.notes, *self.objections)
        lasting = tuple(each for each in result.warnings if each not in found_anew)
        budget_s, max_trials = self.options.budget_s, self.options.max_trials
        kept = replace(result, warnings=lasting)
        cache.keep(self.key, kept, budget_s=budget_s, max_trials=max_trials, cut_short=cut_short)
        if result.status == "complete":
            cache.remember(cache.job_key(self.context.workload.data, self.context.fingerprint), result.best)
