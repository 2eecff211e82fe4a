"""How many workers, and how deep a queue: where the arithmetic says so at once, and never slower than what was asked for.

    gate    after 2 s and 20 batches, or 2 that are slow: does the loop wait at all?
    belief  `search`'s twin predicts the rate of every number of workers and depth from service, CPU, receipt and step
    go      the cheapest of those that count as equally fast runs at once, if the ledger can pay for it
    kept    if it is above 1.15 x and within 10% of what was predicted; else pairs decide: W, best, best, W
    look    every 5 s: waiting above 2%, the belief is asked again; below 1%, it may do with fewer; what failed ever later
    ledger  own seconds and the price of the next trial stay below 0.5 s + 1% of the time trained + half of the proven gain

An event goes in, the configuration that is wanted comes out: `decide` is the only way to tell it anything. It reads one log
of batches, starts nothing and has no clock. What an epoch's start costs is arithmetic: the start of workers that end with the
epoch is a part of each of its batches.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Generator
from typing import NamedTuple

from autotune_loader.autoloader.meter import BLOCK_BATCHES, BLOCK_S, LEAST_FALL, TOLERANCE, Measure, Meter, Reached
from autotune_loader.autoloader.outlook import Outlook, counts
from autotune_loader.pipeline.loop_log import Log
from autotune_loader.results.result import Finding
from autotune_loader.search.space import PREFETCH_FACTORS
from autotune_loader.values import TORCH_PREFETCH_FACTOR, Effects, Interval, LoaderConfig, Measurement, Round

GATE_S, GATE_BATCHES = 2.0, 20
"""The first look: earlier, caches are cold and nothing is known. Half of it is enough for a loop that mostly waits."""
MOSTLY, WAITING, LITTLE, IDLE = 0.5, 0.05, 0.02, 0.01
"""Shares of waiting: above the second one much is to be gained, above the third one perhaps something, below the last one there
is something to give back."""
LOOK_S, KEEP_S, PAIR_EVERY_S, LONGEST_S = 5.0, 30.0, 300.0, 3600.0
"""How often waiting is looked at; the first pause before fewer workers; that before what was asked for; the longest one."""
RECENT_S = 60.0
"""What was measured longer ago tells nothing of now."""
SLOW_BATCH_S = 0.5
"""Where batches take longer, pairs take too long for what is clear."""
LONG_EPOCH_S = 1.0
"""In an epoch that takes less nothing is tried that was not decided before it: starting would take too much of it."""
SURE, SLOW_SURE, EXPECTED = 1.15, 1.05, 1.1
"""What reaches so many times the rate of the best (the second where batches are slow), and what was predicted within such a
factor, needs no pairs; what is further from it needs as much more."""
FEWER = 0.75
"""At least a quarter of the workers is given back."""
MOST_TRIED = 3
"""Configurations that are tried at one look."""
MOST_PAIRS, CLEAR, MOST_KEPT = 12, 1.5, 100
"""Pairs that decide at last; a gain that one decides; measurements of a configuration that are remembered."""
SHORTEST_EPOCH = 4
"""Batches of an epoch that workers are tried for."""
START_S, RECEIVE_S = 0.02, 1e-4
"""What starting a worker takes, and what a batch of its takes the loop, before there was one."""
CHEAP_FETCH_S, ONCE_FETCH_S = 0.0003, 0.001
"""A batch that takes less CPU than the first is loaded sooner than it is transferred; up to the second it is tried once."""
CREDIT_S, SHARE, RISK = 0.5, 0.01, 0.2
"""What may be spent: at once, and of the time trained. The share of a trial's time that it may cost."""
DEPTHS = tuple(each for each in PREFETCH_FACTORS if each >= TORCH_PREFETCH_FACTOR)
"""Of the queue of a worker, that are proposed."""

logger = logging.getLogger("autotune_loader.autoloader")


class Room(NamedTuple):
    """What memory has room for."""

    workers: int
    batches: int
    """In all queues together, beside torch's two for each worker."""
    batch_bytes: int = 0


class Look(NamedTuple):
    """It is time to think (`Tuner.wake`)."""

    room: Callable[[], Room]
    """It takes milliseconds."""


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


class Proposal(NamedTuple):
    """What is to be tried."""

    config: LoaderConfig
    expected: float
    """Its rate, in samples/s, with the starts of epochs."""
    is_paid: bool
    """Whether the ledger has enough for it."""


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
        gain: Of `best` over `asked`: from pairs of both, from one block of each, without limits, where that is clear, or the
            product of those on the way; None where it was not measured.
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
        self._log, self.refused = log, refused
        self.asked: LoaderConfig = asked
        self._cores, self._epoch_batches, self._is_kept = cores, epoch_batches, is_kept
        self.most: int = max(max_workers, asked.num_workers)
        self._most_allowed = self._most_sound = self.most
        self._depth = depth or (asked.prefetch_factor if asked.prefetch_factor != TORCH_PREFETCH_FACTOR else None)
        self.wanted: LoaderConfig = asked
        self.best: LoaderConfig = asked
        self.gain: Interval | None = None
        self.measured: dict[LoaderConfig, list[Measurement]] = {}
        self.own_s: float = 0.0
        self.gained_s: float = 0.0
        self.wake: float = 0.0
        self._begun_s = log.totals.active_s
        self._start_s, self._meter = START_S, Meter(log, asked, self._starts_s)
        self._configs = {(asked.num_workers, asked.prefetch_factor): asked}
        self._latest = dict[LoaderConfig, Reached]()
        self._sure = 1.0
        """The gain of the best that is proven, or as good as that."""
        self._has_timed_epoch = False
        epochs = log.totals.epochs
        self._epoch_s = log.totals.active_s / epochs if epochs else None
        """What the epoch before took; in the mean, those of loaders that the same line made before."""
        self.none_would_be_faster: bool = False
        self.is_trying: bool = False
        self._is_frozen = False
        self._is_hopeless, self._room = False, _all_room
        """Whether nothing is to be gained, as far as is known; and what memory has room for."""
        self._up_at = self._fewer_at = self._proof_at = self._known_wait = 0.0
        self._up_s, self._fewer_s, self._failed_s = LOOK_S, KEEP_S, KEEP_S
        """When more, fewer, and what was asked for are tried next, and the pauses until then."""
        self._seen_at = 0.0
        self._begin(self._decided())
        if refused is not None:
            self._stop()

    def decide(self, event: Event, now: float) -> LoaderConfig:
        """What is wanted after an event."""
        match event:
            case Look():
                self._look(now, event.room)
            case Switched():
                if event.start_s and not self._has_timed_epoch:
                    self._start_s = event.start_s
                self._meter.switched(event.config, now, event.in_flight)
            case Failed():
                self._failed(now)
            case EpochEnded():
                self._epoch_batches = event.batches or self._epoch_batches
                if self.wanted == self.asked:
                    self._epoch_s = event.seconds
                if event.start_s:
                    self._start_s = (self._start_s + event.start_s) / 2 if self._has_timed_epoch else event.start_s
                    self._has_timed_epoch = True
            case Refused():
                if self.refused is None:
                    self.refused = event.why
                    logger.debug("the number of workers stays: %s", event.why.sentence)
                self._stop()
                self._keep(self.asked, None)
                self.wanted = self.asked
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
        self._keep(self.asked, None)
        self.wanted = self.asked
        if not self._is_frozen:
            self._begin(self._decided(self._failed_s))
            self.wake, self._failed_s = now, min(2 * self._failed_s, LONGEST_S)

    def _may(self, price_s: float) -> bool:
        """Whether something of this price may be tried."""
        # A loader that is made anew goes on in the log of its line.
        trained_s = self._log.totals.active_s - self._begun_s
        return self.own_s + price_s <= CREDIT_S + SHARE * trained_s + 0.5 * self.gained_s

    def _look(self, now: float, room: Callable[[], Room]) -> None:
        """Think, if there is something new."""
        if self._is_frozen:
            return
        if max(self.wanted.num_workers, self.best.num_workers) > max(self.most, self.asked.num_workers, 1):
            if self.best.num_workers > self.most:
                self._keep(self._with(max(self.most, self.asked.num_workers), self.best.prefetch_factor), None)
            self._begin(self._decided(LOOK_S))
        seen = self._meter.seen(now)
        if seen is None:
            self.wake = now + min(max(0.02, self._meter.request.seconds / 4), LOOK_S / 4)
            return
        self._learn(seen)
        self._room = room
        try:
            self._meter.begin(self._plan.send(seen), now)
        finally:
            self._room = _all_room  # whoever asks may go
        self.wanted, self.wake = self._meter.request.config, now + 0.02

    def _begin(self, plan: Plan) -> None:
        self._plan = plan
        self._meter.begin(next(plan))
        self.wanted = self._meter.request.config

    def _learn(self, seen: Reached) -> None:
        config, of, active_s = seen.config, seen.of, self._log.totals.active_s
        if config == self.best:
            self.gained_s += (1 - 1 / self._sure) * (active_s - self._seen_at)
        self._seen_at, self._latest[config] = active_s, seen
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
            is_idle = before != self.asked and waits < IDLE and active_s >= self._fewer_at
            if before != self.asked and active_s >= self._proof_at:
                yield from self._prove(seen)
            elif is_idle or (waits > LITTLE and (active_s >= self._up_at or waits > self._known_wait + WAITING)):
                yield from self._improve(seen, is_idle=is_idle)
            if not self.best.num_workers:
                self._is_hopeless |= waits < LITTLE or self._up_at == math.inf
            active_s = self._log.totals.active_s
            if self.best != before:
                logger.debug("settled on %s after %.0f s of training", self.best, active_s)
                self._up_s, self._up_at, self._known_wait = LOOK_S, active_s, 0.0
                self._proof_at = active_s + self._proof_s(self._latest[self.best])[1]
            self.is_trying = self.best not in (before, self.asked)  # the next look tells whether still more may help
            seen = yield Measure(self.best, LOOK_S, GATE_BATCHES)

    def _improve(self, seen: Reached, *, is_idle: bool) -> Plan:
        """Have run what is believed to be best; where it does as well as it should, or pairs say so, it is."""
        room = self._room()
        self.most = min(self._most_allowed, max(room.workers, self.asked.num_workers))
        tried, is_paid, first = {self.best}, True, seen
        while len(tried) <= MOST_TRIED:
            proposal = self._proposed(seen, room, is_idle=is_idle)
            if proposal is None or proposal.config in tried:
                self._is_hopeless = len(tried) == 1 and proposal is None
                break
            config, expected, is_paid = proposal
            if not is_paid:
                break
            tried.add(config)
            reached = yield Measure(config)
            self._charge(reached, seen)
            ratio, surprise = reached.rate / seen.rate, max(reached.rate / expected, expected / reached.rate)
            sure = SURE if seen.batch_s < SLOW_BATCH_S else 1 - TOLERANCE if is_idle else SLOW_SURE
            if ratio > sure * max(1.0, surprise / EXPECTED):
                gain = Effects([Round(rates={each.config: each.rate for each in (reached, seen)})]).ratio(
                    config, self.best
                )
                self._keep(config, gain, ratio / max(EXPECTED, surprise))
            elif reached.is_near(seen):
                yield from self._paired(config, is_fewer=config.num_workers < self.best.num_workers)
            seen = self._latest.get(self.best, seen)
            if is_idle or seen.of.wait_share < LITTLE:
                break
        active_s = self._log.totals.active_s
        if is_idle:
            self._fewer_at, self._fewer_s = active_s + self._fewer_s, min(2 * self._fewer_s, LONGEST_S)
            return
        self._known_wait = first.of.wait_share if is_paid else 1.0
        self._up_at, self._up_s = active_s + self._up_s, min(2 * self._up_s, LONGEST_S) if is_paid else LOOK_S
        if len(tried) > 1 and is_paid and not self.best.num_workers and self._is_computed(first.of, ONCE_FETCH_S):
            self._up_at = math.inf

    def _proposed(self, seen: Reached, room: Room, *, is_idle: bool) -> Proposal | None:
        """What is expected to be faster than the best, of which this was seen; with `is_idle`, as fast with fewer workers."""
        best, of = self.best, seen.of
        is_short = self._epoch_batches is not None and self._epoch_batches < SHORTEST_EPOCH
        if not best.num_workers and (is_short or self._is_computed(of, CHEAP_FETCH_S)):
            return None
        outlook = Outlook(
            self._configs_for(room),
            self._of_late(seen),
            cores=self._cores,
            step_s=self._meter.step_s,
            extra_s=self._extra_s,
            batch_bytes=room.batch_bytes,
        )
        configs, rates = outlook.configs, outlook.rates
        prices_s = [self._price(config, seen, rate / rates[0]) for config, rate in zip(configs, rates, strict=True)]
        may = [self._may(each) and each < max(of.wait_share, IDLE) * PAIR_EVERY_S for each in prices_s]
        for paid in ([n for n in range(len(configs)) if may[n] or not n], range(len(configs))):
            index = outlook.cheapest(paid)
            config, gain = configs[index], rates[index] / rates[0]
            is_shallower = (config.prefetch_factor or 0) <= (best.prefetch_factor or 0)
            if is_shallower and config.num_workers == best.num_workers:
                continue
            if config.num_workers <= FEWER * best.num_workers if is_idle else gain > 1 + LEAST_FALL:
                return Proposal(config, float(rates[index]), may[index])
        return None

    def _of_late(self, seen: Reached) -> list[Reached]:
        """What was measured of late, this last."""
        now = self._log.totals.active_s
        others = (each for each in self._latest.values() if each.config != seen.config)
        return [*(each for each in others if now - each.at_s < RECENT_S), seen]

    def _configs_for(self, room: Room) -> list[LoaderConfig]:
        """The best, and what memory has room for."""
        least, most = min(self.asked.num_workers, 1), min(self.most, self._most_sound, self._epoch_batches or self.most)
        found = [self.best]
        for workers in counts(least, max(least, most)):
            fit = [each for each in DEPTHS if workers * (each - TORCH_PREFETCH_FACTOR) <= room.batches]
            found += [self._with(workers, depth) for depth in ([self._depth] if self._depth else fit)]
        return list(dict.fromkeys(found))

    def _prove(self, seen: Reached) -> Plan:
        """What was asked for is tried again."""
        price_s, pause_s = self._proof_s(seen)
        self._proof_at = self._log.totals.active_s + pause_s
        if self._may(price_s):
            yield from self._paired(self.asked)

    def _proof_s(self, seen: Reached) -> tuple[float, float]:
        """What it costs to try again what was asked for, and the pause before that: the longer, the more it costs."""
        slower_s = max(0.0, self._latest[self.asked].batch_s - seen.batch_s)
        price_s = slower_s * (BLOCK_BATCHES + self.asked.num_workers)
        return price_s, max(PAIR_EVERY_S, price_s / SHARE)

    def _charge(self, seen: Reached, other: Reached) -> None:
        self.own_s += max(0.0, seen.seconds - seen.batches * other.batch_s)

    def _price(self, config: LoaderConfig, seen: Reached, gain: float) -> float:
        """What it costs to try it, if so much is expected of it."""
        trial_s = min(max(BLOCK_S, BLOCK_BATCHES * seen.batch_s), 1.0)
        more = max(0, config.num_workers - self.best.num_workers)
        opening_s = self._meter.open_s if config.num_workers > self._meter.has_run else 0.0
        return self._start_s * more + opening_s + (RISK * trial_s if gain < SURE else 0.0)

    def _paired(self, config: LoaderConfig, *, is_fewer: bool = False) -> Plan:
        """In turns with the best: W, best, best, W. The better one is the best afterwards."""
        best, rounds, speeds = self.best, list[Round](), list[Round]()
        gain = verdict = None
        while gain is None or verdict is None:
            found = dict[LoaderConfig, Reached]()
            for each in (config, best) if len(rounds) % 2 == 0 else (best, config):
                found[each] = yield Measure(each)
            self._charge(found[config], found[best])
            rounds.append(Round(rates={each: found[each].rate for each in found}))
            speeds.append(Round(rates={each: found[each].speed for each in found}))
            gain, speed = (Effects(each).ratio(config, best) for each in (rounds, speeds))
            verdict = _verdict(gain, speed, is_fewer=is_fewer)
            is_long = found[best].batch_s > SLOW_BATCH_S and gain.count > 1 and gain.value < 1 + 2 * TOLERANCE
            if verdict is None and (is_long or (gain.value < 1 and not self._may(RISK * BLOCK_S))):
                verdict = False
        if config == self.asked and gain.count > 1:
            self._keep(best, Effects(rounds).ratio(best, config))
        over_asked = gain if best == self.asked else self.gain and _product(self.gain, gain)
        if verdict and (config == self.asked or over_asked is None or over_asked.value > 1 - TOLERANCE):
            self._keep(config, None if config == self.asked else over_asked)

    def _keep(self, config: LoaderConfig, gain: Interval | None, sure: float = 1.0) -> None:
        """It is the best from now on, so many times as fast as what was asked for."""
        low = gain.low if gain is not None else 1.0
        self.best, self.gain, self._sure = config, gain, max(1.0, low, sure)

    @staticmethod
    def _is_computed(of: Measurement, most_s: float) -> bool:
        """Whether a batch is made by a core in less than this."""
        return of.service_cpu_s > 0.9 * of.service_s and of.service_s < most_s

    def _extra_s(self, config: LoaderConfig) -> float:
        """What its workers take for each batch beside what the belief knows of."""
        is_new = config.num_workers and not any(each.num_workers for each in self._latest)
        return self._starts_s(config) + (RECEIVE_S if is_new else 0.0)

    def _starts_s(self, config: LoaderConfig) -> float:
        """What the start of an epoch's workers takes, for each of its batches."""
        if self._is_kept or self._epoch_batches is None:
            return 0.0
        return self._start_s * config.num_workers / self._epoch_batches

    def _with(self, workers: int, depth: int | None) -> LoaderConfig:
        depth = depth or TORCH_PREFETCH_FACTOR if workers else None
        return self._configs.setdefault((workers, depth), self.asked.with_workers(workers, depth))


def _all_room() -> Room:
    return Room(sys.maxsize, sys.maxsize)


def _verdict(gain: Interval, speed: Interval, *, is_fewer: bool) -> bool | None:
    """Whether the candidate is kept; None as long as pairs do not say."""
    count, is_over = gain.count, gain.count >= (MOST_PAIRS if gain.value > 1 + LEAST_FALL else MOST_PAIRS // 2)
    if gain.high < 1:
        return False
    if is_fewer:
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
