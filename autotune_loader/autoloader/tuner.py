"""How many workers: as few trials as possible, and never slower than what was asked for.

    gate    after 2 s and 20 batches, or 3 that are slow: does the loop wait at all?
    rule    W = 1.15 fetch / step + 1, at most what cores and memory allow
    ramp    2 workers, 4, 8 ... while waiting falls
    pairs   W, best, best, W: kept if the lower limit of the ratio is above 1, or if the loop waits less and is not slower
    keep    a look every 5 s: waiting above 5%, ramp again; below 1%, half as many; what failed is tried ever later
    ledger  own seconds and the price of the next trial stay below 0.5 s + 1% of the time trained + half of the proven gain

An event goes in, the configuration that is wanted comes out: `decide` is the only way to tell it anything. It reads one log
of batches, starts nothing and has no clock. What an epoch's start costs is arithmetic: the start of workers that end with the
epoch is a part of each of its batches.

A step is a pause if it is long and rare (`loop_log.longest_s`), and so is a wait. Neither is measured, nor is what lay ready
when it was over.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from autotune_loader.autoloader.meter import (
    BLOCK_BATCHES,
    BLOCK_S,
    LEAST_FALL,
    TOLERANCE,
    Measure,
    Meter,
    Reached,
)
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.results.record import Finding
from autotune_loader.values import Effects, Interval, LoaderConfig, Measurement, Round

GATE_S, GATE_BATCHES = 2.0, 20
"""The first look: earlier, caches are cold and nothing is known. Half of it is enough for a loop that mostly waits."""
MOSTLY, WAITING, IDLE = 0.5, 0.05, 0.01
"""Shares of waiting: above the second one there is something to gain, below the last one something to give back."""
LOOK_S, KEEP_S, PAIR_EVERY_S, LONGEST_S = 5.0, 30.0, 300.0, 3600.0
"""How often waiting is looked at; the first pause before fewer workers; that before what was asked for; the longest one."""
SLOW_BATCH_S = 0.5
"""Where batches take longer, stages and pairs take too long for what is clear."""
LONG_EPOCH_S = 1.0
"""In an epoch that takes less nothing is tried that was not decided before it: starting would take too much of it."""
HEADROOM = 1.15
"""Fetches take longer beside each other."""
FEWER = 0.75
"""At least a quarter of the workers is given back."""
MOST_PAIRS, CLEAR, MOST_KEPT = 12, 1.5, 100
"""Pairs that decide at last; a gain that one decides; measurements of a configuration that are remembered."""
SHORTEST_EPOCH = 4
"""Batches of an epoch that workers are tried for."""
START_S = 0.02
"""What starting one takes, before one was started."""
CHEAP_FETCH_S, ONCE_FETCH_S = 0.0003, 0.001
"""A batch that takes less CPU than the first is loaded sooner than it is transferred; up to the second it is tried once."""
CREDIT_S, SHARE, RISK = 0.5, 0.01, 0.2
"""What may be spent: at once, and of the time trained. The share of a trial's time that it may cost."""
FEW_WORKERS, DEEP, USUAL = 4, 4, 2
"""Up to so many workers a deeper queue costs little memory: its depth, and that of more workers."""

logger = logging.getLogger("autotune_loader.autoloader")


class Look(NamedTuple):
    """It is time to think (`Tuner.wake`)."""

    fit: Callable[[], int]
    """How many workers fit into memory; it takes milliseconds."""


class Switched(NamedTuple):
    """A configuration runs."""

    config: LoaderConfig
    in_flight: int
    """Batches that are delivered next and were begun before."""
    start_s: float
    """What starting a worker takes; 0 where none was started so far."""


class Failed(NamedTuple):
    """Workers were lost, or could not be started, or only they fail, while more ran than were asked for."""


class EpochEnded(NamedTuple):
    """An epoch is over."""

    batches: int
    seconds: float
    """From `iter()` to its end."""
    start_s: float
    """What starting and ending a worker took, of all of them in the mean; 0 where there was none."""


class Refused(NamedTuple):
    """Nothing but what was asked for may run from now on."""

    why: Finding


class Frozen(NamedTuple):
    """What is best by now runs from now on."""


Event = Look | Switched | Failed | EpochEnded | Refused | Frozen
Plan = Generator[Measure, Reached, None]


class Tuner:
    """Decides for one loader, over all its epochs.

    Args:
        refused: Why nothing but `asked` may be tried; None where it may.
        depth: `prefetch_factor` of workers, where the script says so.
        is_kept: Whether workers live on after an epoch.

    Attributes:
        wanted, best: What is to run, and what is known to be best.
        gain: Of `best` over `asked`: from pairs of both, or the product of those on the way; None where it was not measured.
        most: The largest number of workers.
        own_s, gained_s: What tuning has cost, and what it has gained.
        none_would_be_faster: Whether receiving a batch from the workers that were asked for costs more than fetching it.
        wake: When the next look is due.
    """

    def __init__(
        self,
        log: Log,
        asked: LoaderConfig,
        *,
        refused: Finding | None = None,
        cores: int,
        epoch_batches: int | None = None,
        max_workers: int,
        depth: int | None = None,
        is_kept: bool = False,
    ) -> None:
        self._log, self.asked, self.refused = log, asked, refused
        self._cores, self._epoch_batches, self._is_kept = cores, epoch_batches, is_kept
        self.most = self._most_allowed = max(max_workers, asked.num_workers)
        self._most_sound = self.most
        self._depth = depth or (asked.prefetch_factor if asked.prefetch_factor != USUAL else None)
        self.wanted = self.best = asked
        self.gain: Interval | None = None
        self.measured = dict[LoaderConfig, list[Measurement]]()
        self.own_s = self.gained_s = self.wake = 0.0
        self._begun_s = log.totals.active_s
        self._start_s, self._meter = START_S, Meter(log, asked, self._starts_s)
        self._configs = dict[int, LoaderConfig]()
        self._has_timed_epoch = False
        epochs = log.totals.epochs
        self._epoch_s = log.totals.active_s / epochs if epochs else None
        """What the epoch before took; in the mean, those of loaders that the same line made before."""
        self.none_would_be_faster = self.is_trying = self._is_frozen = False
        self._is_hopeless, self._fit = False, _all_fit
        """Whether nothing is to be gained, as far as is known."""
        self._up_at = self._park_at = self._proof_at = self._known_wait = 0.0
        self._up_s, self._park_s, self._failed_s = LOOK_S, KEEP_S, KEEP_S
        """When more, fewer, and what was asked for are tried next, and the pauses until then."""
        self._seen_at = 0.0
        self._begin(self._decided())
        if refused is not None:
            self._stop()

    def decide(self, event: Event, now: float) -> LoaderConfig:
        """What is wanted after an event."""
        match event:
            case Look():
                self._look(now, event.fit)
            case Switched():
                if event.start_s and not self._has_timed_epoch:
                    self._start_s = event.start_s
                self._meter.switched(event.config, now, event.in_flight)
            case Failed():
                self._failed(now)
            case EpochEnded():
                self._epoch_batches, self._epoch_s = event.batches or self._epoch_batches, event.seconds
                if event.start_s:
                    self._start_s = (self._start_s + event.start_s) / 2 if self._has_timed_epoch else event.start_s
                    self._has_timed_epoch = True
            case Refused():
                if self.refused is None:
                    self.refused = event.why
                    logger.debug("the number of workers stays: %s", event.why.sentence)
                self._stop()
                self.wanted, self.best, self.gain = self.asked, self.asked, None
            case Frozen():
                self._stop()
                self.wanted = self.best
        return self.wanted

    @property
    def may_change(self) -> bool:
        """Whether something else may run later."""
        return not self._is_frozen

    def may_start(self) -> bool:
        """Whether further workers may be tried in the epoch that begins."""
        is_short = self._epoch_s is not None and self._epoch_s < LONG_EPOCH_S
        is_short |= self._epoch_batches is not None and self._epoch_batches < GATE_BATCHES // 2
        # What has failed is tried again only after an epoch like the one before.
        is_later = self._epoch_s is not None and self._log.totals.active_s + self._epoch_s < self._up_at
        return not (self._is_frozen or self._is_hopeless or is_short or (is_later and not self.is_trying))

    def _stop(self) -> None:
        self._plan.close()
        self._is_frozen, self.is_trying, self.wake = True, False, math.inf

    def _failed(self, now: float) -> None:
        """Fewer are tried again, after a pause; the longer all goes well, the more."""
        fewer = max(self.wanted.num_workers, self.best.num_workers) // 2
        self._most_sound = max(self.asked.num_workers + 1, fewer)
        self.wanted, self.best, self.gain = self.asked, self.asked, None
        if not self._is_frozen:
            self._begin(self._decided(self._failed_s))
            self.wake, self._failed_s = now, min(2 * self._failed_s, LONGEST_S)

    def _may(self, price_s: float) -> bool:
        """Whether something of this price may be tried."""
        # A loader that is made anew goes on in the log of its line.
        trained_s = self._log.totals.active_s - self._begun_s
        return self.own_s + price_s <= CREDIT_S + SHARE * trained_s + 0.5 * self.gained_s

    def _look(self, now: float, fit: Callable[[], int]) -> None:
        """Think, if there is something new."""
        if self._is_frozen:
            return
        if max(self.wanted.num_workers, self.best.num_workers) > max(self.most, self.asked.num_workers, 1):
            if self.best.num_workers > self.most:
                self.best, self.gain = self._with(max(self.most, self.asked.num_workers)), None
            self._begin(self._decided(LOOK_S))
        seen = self._meter.seen(now)
        if seen is None:
            self.wake = now + min(max(0.02, self._meter.request.seconds / 4), LOOK_S / 4)
            return
        self._learn(seen)
        self._fit = fit
        try:
            self._meter.begin(self._plan.send(seen), now)
        finally:
            self._fit = _all_fit  # whoever asks may go
        self.wanted, self.wake = self._meter.request.config, now + 0.02

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        self._meter.begin(next(plan))
        self.wanted = self._meter.request.config

    def _learn(self, seen: Reached) -> None:
        config, of, active_s = seen.config, seen.of, self._log.totals.active_s
        if config == self.best and self.gain is not None and self.gain.low > 1:
            self.gained_s += (1 - 1 / self.gain.low) * (active_s - self._seen_at)
        self._seen_at = active_s
        self.measured[config] = [*self.measured.get(config, [])[-MOST_KEPT:], of]
        if config.num_workers and self.asked.num_workers and config == self.best:
            self.none_would_be_faster = of.service_s + of.step_s < (1 - WAITING) * seen.batch_s

    def _decided(self, pause_s: float = 0.0) -> Plan:
        if pause_s:
            seen = yield Measure(self.best, pause_s, GATE_BATCHES)
        else:
            seen = yield Measure(self.asked, GATE_S / 2, GATE_BATCHES // 2)
            if seen.of.wait_share < MOSTLY:
                seen = yield Measure(self.asked, GATE_S / 2, GATE_BATCHES // 2)
        while True:
            before, active_s, waits = self.best, self._log.totals.active_s, seen.of.wait_share
            self.is_trying, self._is_hopeless = True, False
            if before != self.asked and waits < IDLE and active_s >= self._park_at:
                yield from self._park(seen)
            elif before != self.asked and active_s >= self._proof_at:
                yield from self._prove(seen)
            elif waits > WAITING and (active_s >= self._up_at or waits > self._known_wait + WAITING):
                yield from self._ramp(seen)
            if not self.best.num_workers:
                self._is_hopeless = waits < WAITING or self._up_at == math.inf or not self._candidates(seen)
            active_s = self._log.totals.active_s
            if self.best != before:
                logger.debug("settled on %s after %.0f s of training", self.best, active_s)
                self._up_s, self._up_at, self._known_wait = LOOK_S, active_s, 0.0
                self._proof_at = active_s + PAIR_EVERY_S
            self.is_trying = self.best not in (before, self.asked)  # the next look tells whether still more may help
            seen = yield Measure(self.best, LOOK_S, GATE_BATCHES)

    def _ramp(self, seen: Reached) -> Plan:
        """Try what may be better than the best that is known, of which this was seen."""
        best, is_paid = seen, True
        self.most = min(self._most_allowed, max(self._fit(), self.asked.num_workers))
        candidates = self._candidates(seen)
        for config in candidates:
            is_first = best is seen
            price_s = self._price(config, seen, is_risky=is_first or best.rate < seen.rate)
            is_paid = self._may(price_s) and price_s < seen.of.wait_share * PAIR_EVERY_S
            if not is_paid:
                break
            tried = yield from self._run(config, seen)
            is_better = tried.is_better(best)
            best = tried if is_better or is_first else best
            # Where loading computes and these are slower, cores or transfers limit: more of them would be slower, too.
            is_computing = seen.of.service_cpu_s > MOSTLY * seen.of.service_s
            is_slower = config.num_workers and is_computing and tried.rate < (1 - 2 * TOLERANCE) * seen.rate
            if is_slower or (config.num_workers and (best.of.wait_share < WAITING or not (is_better or is_first))):
                break
        if best.is_better(seen):
            is_clear = seen.batch_s > SLOW_BATCH_S and best.rate > CLEAR * seen.rate
            yield from self._paired(
                best.config, [Round(rates={each.config: each.rate for each in (best, seen)})] * is_clear
            )
        self._known_wait = seen.of.wait_share if is_paid else 1.0
        self._up_at = self._log.totals.active_s + self._up_s
        self._up_s = min(2 * self._up_s, LONGEST_S) if is_paid else LOOK_S
        if candidates and is_paid and not self.best.num_workers and self._is_computed(seen.of, ONCE_FETCH_S):
            self._up_at = math.inf

    def _park(self, seen: Reached) -> Plan:
        """Try as many workers as the rule says, where these are fewer."""
        fewer = max(math.ceil(HEADROOM * seen.of.service_s / seen.batch_s), self.asked.num_workers)
        if fewer <= FEWER * self.best.num_workers and self._may(RISK * BLOCK_S):
            yield from self._paired(self._with(fewer), is_parking=True)
        self._park_at, self._park_s = self._log.totals.active_s + self._park_s, min(2 * self._park_s, LONGEST_S)

    def _prove(self, seen: Reached) -> Plan:
        """What was asked for is tried again: the rarer, the more it costs."""
        known = self.measured[self.asked][-1]
        slower_s = max(0.0, known.window_s / known.samples_per_s.count - seen.batch_s)
        price_s = slower_s * (BLOCK_BATCHES + self.asked.num_workers)
        self._proof_at = self._log.totals.active_s + max(PAIR_EVERY_S, price_s / SHARE)
        if self._may(price_s):
            yield from self._paired(self.asked)

    def _run(self, config: LoaderConfig, other: Reached) -> Generator[Measure, Reached, Reached]:
        """Measure it; what it costs over the other one is charged."""
        seen = yield Measure(config)
        self._charge(seen, other)
        return seen

    def _charge(self, seen: Reached, other: Reached) -> None:
        self.own_s += max(0.0, seen.seconds - seen.batches * other.batch_s)

    def _price(self, config: LoaderConfig, seen: Reached, *, is_risky: bool) -> float:
        trial_s = min(max(BLOCK_S, BLOCK_BATCHES * seen.batch_s), 1.0)
        more = max(0, config.num_workers - self.best.num_workers)
        opening_s = self._meter.open_s if config.num_workers > self._meter.has_run else 0.0
        return self._start_s * more + opening_s + (RISK * trial_s if is_risky else 0.0)

    def _paired(self, config: LoaderConfig, rounds: Sequence[Round] = (), *, is_parking: bool = False) -> Plan:
        """In turns with the best: W, best, best, W. The better one is the best afterwards."""
        best, rounds = self.best, list(rounds)
        speeds = list(rounds)
        gain = Effects(rounds).ratio(config, best) if rounds else None
        verdict = True if rounds else None
        while gain is None or verdict is None:
            found = dict[LoaderConfig, Reached]()
            for each in (config, best) if len(rounds) % 2 == 0 else (best, config):
                found[each] = yield Measure(each)
            self._charge(found[config], found[best])
            rounds.append(Round(rates={each: found[each].rate for each in found}))
            speeds.append(Round(rates={each: found[each].speed for each in found}))
            gain, speed = (Effects(each).ratio(config, best) for each in (rounds, speeds))
            verdict = _verdict(gain, speed, is_parking=is_parking)
            is_long = found[best].batch_s > SLOW_BATCH_S and gain.count > 1 and gain.value < 1 + 2 * TOLERANCE
            if verdict is None and (is_long or (gain.value < 1 and not self._may(RISK * BLOCK_S))):
                verdict = False
        if config == self.asked and gain.count > 1:
            self.gain = Effects(rounds).ratio(best, config)
        over_asked = gain if best == self.asked else self.gain and _product(self.gain, gain)
        if verdict and (config == self.asked or over_asked is None or over_asked.value > 1 - TOLERANCE):
            self.best, self.gain = config, None if config == self.asked else over_asked

    def _candidates(self, seen: Reached) -> list[LoaderConfig]:
        """What is tried in place of the best that is known, in this order, while it pays."""
        most, own, of = self._ruled(seen.of), self.best.num_workers, seen.of
        is_short = self._epoch_batches is not None and self._epoch_batches < SHORTEST_EPOCH
        if not own and (self._is_computed(of, CHEAP_FETCH_S) or is_short):
            return []
        is_handing_over = own and of.service_s + of.step_s < seen.batch_s * (1 + WAITING)
        found, workers = [0] if is_handing_over and not self.asked.num_workers else [], 2 * own or min(2, most)
        step = max(2.0, math.sqrt(most / workers))  # two or three stages: each takes time
        if of.wait_share > MOSTLY and seen.batch_s > SLOW_BATCH_S:  # nor is there time for stages
            workers = max(workers, own + int(CREDIT_S / 2 / self._start_s))
        while workers < most:
            found.append(workers)
            workers = math.ceil(workers * step)
        all_of_them = (self._with(each) for each in dict.fromkeys([*found, most]) if each != own)
        return [each for each in all_of_them if self._is_worth_starting(each, seen)]

    @staticmethod
    def _is_computed(of: Measurement, most_s: float) -> bool:
        """Whether a batch is made by a core in less than this."""
        return of.service_cpu_s > 0.9 * of.service_s and of.service_s < most_s

    def _is_worth_starting(self, config: LoaderConfig, seen: Reached) -> bool:
        """Whether an epoch, at best, gains more than the start of its workers takes."""
        fastest_s = max(self._meter.step_s, seen.of.service_s / max(1, config.num_workers))
        return fastest_s + self._starts_s(config) < seen.batch_s

    def _starts_s(self, config: LoaderConfig) -> float:
        """What the start of an epoch's workers takes, for each of its batches."""
        if self._is_kept or self._epoch_batches is None:
            return 0.0
        return self._start_s * config.num_workers / self._epoch_batches

    def _ruled(self, of: Measurement) -> int:
        """The number of workers that the rule allows."""
        most = HEADROOM * of.service_s / max(self._meter.step_s, 1e-6) + 1
        most = min(most, self._cores * of.service_s / max(of.service_cpu_s, 1e-6) + 1)
        if not self._is_kept and self._epoch_batches:  # where start x W + batches x service / W is least
            most = min(most, round(math.sqrt(self._epoch_batches * of.service_s / self._start_s)))
        return max(1, min(int(most), self.most, self._most_sound, self._epoch_batches or self.most))

    def _with(self, workers: int) -> LoaderConfig:
        if workers == self.asked.num_workers:
            return self.asked
        depth = self._depth or (DEEP if workers <= FEW_WORKERS else USUAL)
        return self._configs.setdefault(workers, self.asked.with_workers(workers, depth if workers else None))


def _all_fit() -> int:
    return sys.maxsize


def _verdict(gain: Interval, speed: Interval, *, is_parking: bool) -> bool | None:
    """Whether the candidate is kept; None as long as pairs do not say."""
    count, is_over = gain.count, gain.count >= (MOST_PAIRS if gain.value > 1 + LEAST_FALL else MOST_PAIRS // 2)
    if gain.high < 1:
        return False
    if is_parking:
        if count < 2 or (count < MOST_PAIRS // 2 and gain.value > 1 - 3 * TOLERANCE):
            return None
        return min(gain.value, speed.value) > 1 - TOLERANCE
    if gain.low > 1 and (count > 1 or gain.value > CLEAR):
        return True
    if count > (1 if speed.value > CLEAR else 3) and speed.low > 1 + LEAST_FALL and gain.value > 1 - LEAST_FALL:
        return True
    return False if is_over else None


def _product(one: Interval, other: Interval) -> Interval:
    limits = {"low": one.low * other.low, "high": one.high * other.high}
    return Interval(value=one.value * other.value, count=min(one.count, other.count), **limits)
