"""How many workers: as few trials as possible, and never slower than what was asked for.

    gate    after 2 s and 20 batches, or 3 that are slow: does the loop wait at all?
    rule    W = 1.15 fetch / step + 1, at most what cores and memory allow
    ramp    2 workers, 4, 8 ... while waiting falls
    pairs   W, best, best, W: kept if the lower limit of the ratio is above 1, or if the loop waits less and is not slower
    keep    a look every 5 s: waiting above 5 %, ramp again; below 1 %, half as many; what failed is tried ever later
    ledger  own seconds and the price of the next trial stay below 0.5 s + 1 % of the time trained + half of the proven gain

A step is a pause if it is long and rare (`loop_log.longest_s`); so is the wait for a batch. Neither is measured, nor is what lay
ready when it was over. Heavy steps that come back often are measured from one to another.
All of it reads one log of batches and says which configuration is wanted; it starts nothing and has no clock.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple

from autotune_loader.pipeline.loop_log import OFTEN, Log, heavy_s, longest_s
from autotune_loader.results.record import Finding
from autotune_loader.values import MAIN_PROCESS, BatchTrace, Effects, Interval, LoaderConfig, Measurement, Round

GATE_S, GATE_BATCHES = 2.0, 20
"""The first look: earlier, caches are cold and nothing is known. Half of it is enough for a loop that mostly waits."""
MOSTLY, WAITING, IDLE = 0.5, 0.05, 0.01
"""Shares of waiting: above the second one there is something to gain, below the last one something to give back."""
LOOK_S, KEEP_S, PAIR_EVERY_S, LONGEST_S = 5.0, 30.0, 300.0, 3600.0
"""How often waiting is looked at; the first pause after a failure; how long what is kept need not prove itself; the longest pause."""
BLOCK_S, BLOCK_BATCHES, MOST_BLOCKS = 0.25, 6, 10
"""The least that is measured of a configuration; so many times as long, pauses included, is enough of a few batches."""
SLOW_S, SLOW_BATCHES = 5.0, 3
"""So many batches are enough if they take so long."""
LATEST = 1_000
"""A measurement is of so many batches at most."""
SHORT_EPOCH_S, FEW_OTHERS = 1.0, 0.01
"""Shorter epochs are compared whole: beginning and end are a part of them. An epoch counts if at least 99 % of its batches were
made by the configuration under test."""
HEADROOM = 1.15
"""Fetches take longer beside each other."""
FEWER = 0.75
"""At least a quarter of the workers is given back."""
LEAST_FALL, TOLERANCE = 0.01, 0.015
"""More workers are worth it if a loop that steps as fast as it can is faster by the first; fewer, if it is slower by the second."""
MOST_PAIRS, CLEAR, MOST_ROUNDS = 12, 1.5, 100
"""A gain of so much is believed after one pair; so many rounds are remembered."""
SHORTEST_EPOCH = 4
"""Batches of an epoch that workers are tried for. How long it takes does not matter: they stay for the next one."""
START_S = 0.02
"""What starting one takes, before one was started."""
CHEAP_FETCH_S = 0.0003
"""A batch that takes less CPU than this is fetched sooner than it is handed over."""
CREDIT_S, SHARE, RISK = 0.5, 0.01, 0.2
"""What may be spent: at once, and of the time trained. The share of a trial's time that it may cost."""
MOST_WORKERS = 32
FEW_WORKERS, DEEP, USUAL = 4, 4, 2
"""Up to so many workers a deeper queue costs little memory: its depth, and that of more workers."""

logger = logging.getLogger("autotune_loader.autoloader")


class Measure(NamedTuple):
    """Measure a configuration for so long; or, where `whole`, for a whole epoch from `iter()` to its end."""

    config: LoaderConfig
    seconds: float = BLOCK_S
    batches: int = BLOCK_BATCHES
    whole: bool = False


Plan = Generator[Measure, Measurement, None]


class Tuner:
    """Decides for one loader, over all its epochs.

    Args:
        log: of the loader.
        asked: what the loader was asked for.
        refused: why nothing else may be tried; None where it may.
        cores, epoch_batches, max_workers: limit the number of workers.
        depth: `prefetch_factor` of workers, where the script says so.

    Attributes:
        wanted, best: what is to run, and what is known to be best.
        gain: of `best` over `asked`: from pairs of both, or the product of those on the way; None where it was not measured.
        most: the largest number of workers, which may be changed at any time.
        measured: what was measured, by configuration.
        rounds: pairs, each of a candidate and what was best then.
        own_s, gained_s: what tuning has cost, and what it has gained.
        start_s: what starting a worker takes.
        none_would_be_faster: whether receiving a batch from the workers that were asked for costs more than fetching it.
        wake: when `look` is to be called.
    """

    def __init__(
        self,
        log: Log,
        asked: LoaderConfig,
        *,
        refused: Finding | None = None,
        cores: int,
        epoch_batches: int | None = None,
        max_workers: int = MOST_WORKERS,
        depth: int | None = None,
    ) -> None:
        self._log, self.asked, self.refused = log, asked, refused
        self._cores, self._epoch_batches = cores, epoch_batches
        self.most = self._most_sound = max(max_workers, asked.num_workers)
        self._depth = depth or (asked.prefetch_factor if asked.prefetch_factor != USUAL else None)
        self.wanted = self.best = asked
        self.gain: Interval | None = None
        self.measured = dict[LoaderConfig, list[Measurement]]()
        self.rounds = list[Round]()
        self.own_s = self.gained_s = self.wake = 0.0
        self.start_s, self._open_s = START_S, 0.0
        self.none_would_be_faster = self._are_short = self._is_frozen = False
        self._epoch: Measurement | None = None
        self._steps = deque[float](maxlen=16)
        """What steps took in the latest measurements: the shortest one is what they take if they wait for nobody."""
        self._cost: tuple[float, int] = 0.0, 0
        """Seconds and batches since the latest measurement's configuration was applied."""
        self._up_at = self._park_at = self._proof_at = 0.0
        self._up_s, self._park_s, self._failed_s, self._known_wait = LOOK_S, KEEP_S, KEEP_S, 0.0
        """Pauses before the next attempt, and the share of waiting that no more workers have cured."""
        self._has_run, self._seen_at, self._is_applied, self._since_at = 0, 0.0, True, math.inf
        self._begin(self._decide())
        if refused is not None:
            self.freeze()

    def freeze(self) -> None:
        self._plan.close()
        self._is_frozen, self.wake = True, math.inf

    def refuse(self, why: Finding) -> None:
        """Only what was asked for may run from now on, for good; the first reason counts."""
        if self.refused is None:
            self.refused = why
            logger.info("the number of workers stays: %s", why.sentence)
        self.freeze()
        self._go_back()

    def failed(self, now: float) -> None:
        """Workers were lost, or a batch failed, while more ran than were asked for: fewer are tried again, after a pause."""
        self._most_sound = max(1, self.asked.num_workers, max(self.wanted.num_workers, self.best.num_workers) // 2)
        self._go_back()
        if not self._is_frozen:
            self._begin(self._decide(self._failed_s))
            self.wake, self._failed_s = now, min(2 * self._failed_s, LONGEST_S)

    def may(self, price_s: float) -> bool:
        """Whether something of this price may be tried."""
        return self.own_s + price_s <= CREDIT_S + SHARE * self._log.totals.active_s + 0.5 * self.gained_s

    def look(self, now: float) -> None:
        """Think, if there is something new; afterwards `wanted` says what is to run."""
        if self._is_frozen:
            self.wake = math.inf
            return
        most = max(self.most, min(1, self.asked.num_workers))
        if max(self.wanted.num_workers, self.best.num_workers) > most:
            if self.best.num_workers > most:
                self.best, self.gain = self._with(most), None
            self._begin(self._decide(LOOK_S))
        request, (epoch, self._epoch) = self._request, (self._epoch, None)
        seen = epoch if request.whole else self._seen(request, now)
        if seen is None:
            self.wake = now + min(max(0.02, request.seconds / 4), 0.25 * LOOK_S)
            return
        self._learn(request.config, seen)
        self._next(self._plan.send(seen))
        self._since_at = now
        self.wake = now + 0.02

    def applied(self, now: float, in_flight: int = 0) -> None:
        """What is wanted runs; so many batches, and one of each worker, were begun before or are its beginning."""
        if not self._is_applied:
            self._is_applied, self._first = True, self._log.end
            self._since = self._first + in_flight + max(1, self.wanted.num_workers)
            self._since_s, self._since_at = self._log.totals.active_s, now

    def epoch(self, seconds: float, batches: int) -> None:
        """An epoch is over, `iter()` and end included: it counts if the configuration in question has made it."""
        if not self._request.whole:
            return
        self.wake = 0.0
        first, config = self._log.end - batches, self._request.config
        rows = [row for row in self._log.since(first) if _is_of(row, config)]
        is_own = self.wanted == config and self._is_applied and first >= self._first
        if is_own and batches - len(rows) <= FEW_OTHERS * batches and (seen := measured(rows)) is not None:
            longest = longest_s(self._log.steps)
            seconds -= sum(row.step_s for row in rows if row.step_s > longest)
            rate = replace(seen.samples_per_s, value=sum(row.samples for row in rows) / seconds, count=batches)
            self._epoch, self._cost = replace(seen, samples_per_s=rate, window_s=seconds), (seconds, batches)

    def _begin(self, plan: Plan) -> None:
        self._plan, self._epoch, self._first = plan, None, self._log.end
        self._next(next(plan))

    def _next(self, request: Measure) -> None:
        if request.config != self.wanted:
            self._is_applied = False
        self._request, self.wanted = request, request.config
        self._since, self._since_s = self._log.end, self._log.totals.active_s
        if self._is_applied:
            self._first = self._since

    def _go_back(self) -> None:
        self._is_applied = self._is_applied and self.wanted == self.asked
        self.wanted = self.best = self.asked
        self.gain = None

    def _seen(self, request: Measure, now: float) -> Measurement | None:
        log, workers = self._log, request.config.num_workers
        count, seconds = log.end - self._since, log.totals.active_s - self._since_s
        if not self._is_applied or count < SLOW_BATCHES or seconds < request.seconds:
            return None
        if count < max(workers, SLOW_BATCHES if seconds > SLOW_S else request.batches):
            return None
        rows = log.since(max(self._since, log.end - LATEST))
        heavy = heavy_s(log.steps)
        at = [number for number, row in enumerate(rows) if heavy is not None and row.step_s > heavy]
        if len(at) > 1:  # from the end of one to the end of another
            rows = rows[at[0] + 1 : at[-1] + 1]
        elif heavy is not None and count < 2 * OFTEN:
            return None
        seen = _measured(rows, longest_s(log.steps), request.config)
        if seen is None or seen.samples_per_s.count < max(min(workers, count // 2), SLOW_BATCHES):
            return None
        is_long = now - self._since_at > MOST_BLOCKS * request.seconds or count >= LATEST
        if seen.window_s < min(request.seconds, BLOCK_S) and not is_long:
            return None
        self._cost = self._spent(log.since(self._first), seen)
        return seen

    def _spent(self, rows: list[BatchTrace], seen: Measurement) -> tuple[float, int]:
        """Seconds and batches since the configuration was applied, where they are its own; learns what opening takes."""
        workers, limit_s = self.wanted.num_workers, 20 * max(_batch_s(seen), seen.service_s, BLOCK_S / 10)
        firsts = dict[int, BatchTrace]()
        for row in rows[: 4 * (workers + 1) + self._since - self._first]:
            if row.worker >= self._has_run or row.worker == MAIN_PROCESS and not self.measured:
                firsts.setdefault(row.worker, row)
        if firsts and (self._has_run < workers or not self.measured):
            self._open_s = max(0.0, median_low([row.service_s for row in firsts.values()]) - 2 * seen.service_s)
            self._has_run = max(self._has_run, workers)
        opening = set(firsts.values())
        own = [row for row in rows[-LATEST:] if row in opening or row.wait_s <= limit_s]
        return sum(row.wait_s + min(row.step_s, seen.step_s) for row in own), len(own)

    def _learn(self, config: LoaderConfig, seen: Measurement) -> None:
        active_s, gain = self._log.totals.active_s, self.gain
        if config == self.best and gain is not None and gain.low > 1:
            self.gained_s += (1 - 1 / gain.low) * max(0.0, active_s - max(self._seen_at, self._since_s))
        self._seen_at = active_s
        self.measured.setdefault(config, []).append(seen)
        del self.measured[config][: -MOST_PAIRS * 4]
        self._steps.append(seen.step_s)
        if config.num_workers and self.asked.num_workers and config == self.best:
            self.none_would_be_faster = seen.service_s + seen.step_s < (1 - WAITING) * _batch_s(seen)

    def _decide(self, pause_s: float = 0.0) -> Plan:
        if pause_s:
            seen = yield Measure(self.best, pause_s, GATE_BATCHES)
        else:
            seen = yield Measure(self.asked, GATE_S / 2, GATE_BATCHES // 2)
            if seen.wait_share < MOSTLY:
                seen = yield Measure(self.asked, GATE_S / 2, GATE_BATCHES // 2)
        while True:
            yield from self._ramp(seen)
            while not self._is_due(seen := (yield Measure(self.best, LOOK_S, GATE_BATCHES))):
                pass

    def _is_due(self, seen: Measurement) -> bool:
        active_s, waits = self._log.totals.active_s, seen.wait_share
        if self.best != self.asked and active_s >= min(self._proof_at, self._park_at if waits < IDLE else math.inf):
            return True
        return waits > WAITING and (active_s >= self._up_at or waits > self._known_wait + WAITING)

    def _ramp(self, seen: Measurement) -> Plan:
        """Try what may be better than the best that is known, of which this was seen."""
        active_s, before, is_paid = self._log.totals.active_s, self.best, True
        self._are_short = _batch_s(seen) * (self._epoch_batches or math.inf) < SHORT_EPOCH_S
        if before != self.asked and seen.wait_share < IDLE and active_s >= self._park_at:
            fewer = max(math.ceil(HEADROOM * seen.service_s / _batch_s(seen)), self.asked.num_workers)
            if fewer and fewer <= FEWER * before.num_workers and self.may(RISK * BLOCK_S):
                yield from self._paired(self._with(fewer), is_parking=True)
            self._park_at, self._park_s = self._log.totals.active_s + self._park_s, min(2 * self._park_s, LONGEST_S)
        elif before != self.asked and seen.wait_share <= WAITING and active_s >= self._proof_at:
            yield from self._prove(seen)
        elif seen.wait_share > WAITING:
            candidate, best = before, seen
            for config in self._candidates(seen):
                is_first = candidate == before
                price_s = self._price(config, seen, is_risky=is_first or _rate(best) < _rate(seen))
                is_paid = self.may(price_s) and price_s < seen.wait_share * PAIR_EVERY_S
                if not is_paid:
                    break
                tried = yield from self._run(config, seen)
                is_better = self._is_better((config, tried), (candidate, best))
                if is_first or is_better:
                    candidate, best = config, tried
                if config.num_workers and not (is_better or is_first):
                    break
            if candidate != before and self._is_better((candidate, best), (before, seen)):
                is_clear = _batch_s(seen) > SLOW_S / SLOW_BATCHES and _rate(best) > CLEAR * _rate(seen)
                yield from self._paired(candidate, [Round(rates={candidate: _rate(best), before: _rate(seen)})] if is_clear else [])
        active_s = self._log.totals.active_s
        if self.best != before:
            logger.info("settled on %s after %.0f s of training", self.best, active_s)
            self._up_s, self._up_at, self._known_wait = LOOK_S, active_s, 0.0
            self._proof_at = active_s + PAIR_EVERY_S
        elif seen.wait_share > WAITING:
            self._up_at, self._known_wait = active_s + self._up_s, seen.wait_share if is_paid else 1.0
            self._up_s = min(2 * self._up_s, LONGEST_S) if is_paid else LOOK_S

    def _prove(self, seen: Measurement) -> Plan:
        """From time to time, with what was asked for: at once where that costs little."""
        price_s = self._wait_of(self.asked, seen)
        self._proof_at = self._log.totals.active_s + max(PAIR_EVERY_S, price_s / SHARE)
        if self.may(price_s):
            yield from self._paired(self.asked, is_proof=True)

    def _wait_of(self, config: LoaderConfig, seen: Measurement) -> float:
        """What measuring it costs, as far as it was measured."""
        known = self.measured.get(config)
        slower_s = max(0.0, _batch_s(known[-1]) - _batch_s(seen)) if known else _batch_s(seen)
        return slower_s * (BLOCK_BATCHES + 2)

    def _run(self, config: LoaderConfig, other: Measurement) -> Generator[Measure, Measurement, Measurement]:
        seen = yield Measure(config)
        self._charge(other)
        if self._are_short and _rate(seen) > _rate(other):  # a whole epoch is only slower
            seen = yield Measure(config, whole=True)
            self._charge(other)
        return seen

    def _charge(self, other: Measurement) -> None:
        seconds, batches = self._cost
        self.own_s += max(0.0, seconds - batches * _batch_s(other))

    def _price(self, config: LoaderConfig, seen: Measurement, *, is_risky: bool = True) -> float:
        trial_s = min(max(BLOCK_S, BLOCK_BATCHES * _batch_s(seen)), 1.0)
        more = max(0, config.num_workers - self.best.num_workers)
        opening_s = self._open_s if config.num_workers > self._has_run else 0.0
        return self.start_s * more + opening_s + (RISK * trial_s if is_risky else 0.0)

    def _speed(self, config: LoaderConfig, seen: Measurement) -> float:
        """Samples/s if steps wait for nobody: other ranks, or a device, wait for this loop's data as it does for theirs."""
        step_s = min(self._steps, default=seen.step_s) + seen.receive_s
        workers = config.num_workers
        return seen.batch_size / max(seen.service_s / workers if workers else seen.service_s + step_s, step_s, 1e-9)

    def _is_better(self, new: tuple[LoaderConfig, Measurement], old: tuple[LoaderConfig, Measurement]) -> bool:
        ratio = _rate(new[1]) / _rate(old[1])
        return ratio > 1 + LEAST_FALL or (
            ratio > 1 - 2 * TOLERANCE and self._speed(*new) > (1 + LEAST_FALL) * self._speed(*old)
        )

    def _paired(
        self, config: LoaderConfig, rounds: Sequence[Round] = (), *, is_parking: bool = False, is_proof: bool = False
    ) -> Plan:
        """In turns with the best: W, best, best, W. The better of both is the best afterwards."""
        best, rounds, speeds = self.best, list(rounds), list(rounds)
        verdict = True if rounds else None
        gain = Effects(rounds).ratio(config, best) if rounds else None
        while verdict is None:
            order = (config, best) if len(rounds) % 2 == 0 else (best, config)
            found = dict[LoaderConfig, Measurement]()
            costs = 0.0, 0
            for each in order:
                found[each] = yield Measure(each, whole=self._are_short)
                if each == config:
                    costs = self._cost
            self._cost = costs
            self._charge(found[best])
            rounds.append(Round(rates={each: _rate(found[each]) for each in (config, best)}))
            speeds.append(Round(rates={each: self._speed(each, found[each]) for each in (config, best)}))
            self.rounds = [*self.rounds[-MOST_ROUNDS:], rounds[-1]]
            gain, speed = (Effects(each).ratio(config, best) for each in (rounds, speeds))
            verdict = _verdict(gain, speed, is_parking=is_parking)
            if verdict is None and gain.value < 1 and not self.may(RISK * BLOCK_S):
                verdict = False
        assert gain is not None
        if is_proof:
            self.gain = Interval(value=1 / gain.value, low=1 / gain.high, high=1 / gain.low, count=gain.count)
        chained = gain if best == self.asked else None if self.gain is None else _product(self.gain, gain)
        is_safe = chained is None or config == self.asked or chained.value > 1 - TOLERANCE
        if verdict and is_safe:
            self.best, self.gain = config, None if config == self.asked else chained

    def _candidates(self, seen: Measurement) -> list[LoaderConfig]:
        """What is tried in place of the best that is known, in this order, while it pays."""
        most, own = self._ruled(seen), self.best.num_workers
        is_cheap = seen.service_cpu_s > 0.9 * seen.service_s and seen.service_s < CHEAP_FETCH_S
        is_short = self._epoch_batches is not None and self._epoch_batches < SHORTEST_EPOCH
        if not own and (is_cheap or is_short):
            return []
        is_handing_over = own and seen.service_s + seen.step_s < _batch_s(seen) * (1 + WAITING)
        found, workers = [0] if is_handing_over and not self.asked.num_workers else [], 2 * own or min(2, most)
        step = max(2.0, math.sqrt(most / workers))  # two or three stages: each takes time
        while workers < most and not (seen.wait_share > MOSTLY and _batch_s(seen) > BLOCK_S * 4):
            found.append(workers)
            workers = math.ceil(workers * step)
        return [self._with(each) for each in dict.fromkeys([*found, most]) if each != own]

    def _ruled(self, seen: Measurement) -> int:
        """The number of workers that the rule allows."""
        most = HEADROOM * seen.service_s / max(min(self._steps, default=seen.step_s), 1e-6) + 1
        most = min(most, self._cores * seen.service_s / max(seen.service_cpu_s, 1e-6) + 1)
        return max(1, min(int(most), self.most, self._most_sound, self._epoch_batches or self.most))

    def _with(self, workers: int) -> LoaderConfig:
        if workers == self.asked.num_workers:
            return self.asked
        depth = self._depth or (DEEP if workers <= FEW_WORKERS else USUAL)
        return self.asked.with_workers(workers, depth if workers else None)


def _is_of(row: BatchTrace, config: LoaderConfig) -> bool:
    return (row.worker != MAIN_PROCESS) == bool(config.num_workers)


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


def measured(rows: Sequence[BatchTrace]) -> Measurement | None:
    """What these batches of a configuration say, pauses and what lay ready after them apart; None of none."""
    return _measured(rows, longest_s([row.step_s for row in rows])) if rows else None


def _measured(
    rows: Sequence[BatchTrace], longest: float, config: LoaderConfig | None = None
) -> Measurement | None:
    if not rows:
        return None
    longest_wait = longest_s([row.wait_s + min(row.step_s, longest) for row in rows])
    kept, others, ready = list[BatchTrace](), list[BatchTrace](), -math.inf
    for row in rows:
        is_own = config is None or _is_of(row, config)
        if not is_own or row.step_s > longest or row.wait_s > longest_wait:
            ready = row.step_end
        elif row.collate_end > ready:
            kept.append(row)
        else:
            others.append(row)
    kept = kept or others
    if not kept:
        return None
    window_s = max(sum(row.step_end - row.requested for row in kept), 1e-9)
    waited_s = sum(row.wait_s for row in kept)
    if config is not None and config.num_workers:  # a queue that drains is no speed
        slower_s = max(0.0, sum(row.service_s for row in kept) / config.num_workers - window_s)
        window_s, waited_s = window_s + slower_s, waited_s + slower_s
    rate = sum(row.samples for row in kept) / window_s
    return Measurement.of(
        kept,
        Interval(value=rate, low=-math.inf, high=math.inf, count=len(kept)),
        window_s=window_s,
        first_batch_s=kept[0].wait_s,
        wait_share=waited_s / window_s,
    )


def _product(one: Interval, other: Interval) -> Interval:
    return Interval(
        value=one.value * other.value,
        low=one.low * other.low,
        high=one.high * other.high,
        count=min(one.count, other.count),
    )


def _rate(seen: Measurement) -> float:
    return seen.samples_per_s.value


def _batch_s(seen: Measurement) -> float:
    return seen.window_s / seen.samples_per_s.count
