"""How many workers: as few trials as possible, and never slower than what was asked for.

    gate    after 2 s and 20 batches: does the loop wait at all?
    rule    W = 1.15 fetch / step + 1, at most what cores and memory allow
    ramp    2 workers, 4, 8 ... while waiting falls
    pairs   asked, W, asked, W: kept only if the lower limit of the ratio is above 1
    keep    at first after 30 s, then ever later: waiting above 5 %, ramp again; below 1 %, half as many; after 5 minutes pairs
    ledger  own seconds and the price of the next trial stay below 0.5 s + 1 % of the time trained + half of the proven gain

All of it reads one log of batches and says which configuration is wanted; it starts nothing and has no clock.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import NamedTuple

from autotune_loader.pipeline.loop_log import PAUSE_S, PAUSE_STEPS, Log
from autotune_loader.results.record import Finding
from autotune_loader.values import MAIN_PROCESS, BatchTrace, Effects, Interval, LoaderConfig, Measurement, Round

GATE_S, GATE_BATCHES = 2.0, 20
"""The first look: earlier, caches are cold and nothing is known. Half of it is enough for a loop that mostly waits."""
MOSTLY, WAITING, IDLE = 0.5, 0.05, 0.01
"""Shares of waiting: above the second one there is something to gain, below the last one something to give back."""
KEEP_S, PAIR_EVERY_S = 30.0, 300.0
"""How long a share of waiting has to last; how long what is kept need not prove itself again."""
BLOCK_S, BLOCK_BATCHES = 0.25, 6
"""The least that is measured of a configuration."""
SHORT_EPOCH_S, FEW_OTHERS = 1.0, 0.01
"""Shorter epochs are compared whole: beginning and end are a part of them. At most this share is not the configuration's."""
HEADROOM = 1.15
"""Fetches take longer beside each other."""
LEAST_FALL = 0.01
"""More workers are worth it if the loop waits for a sample less by this share of the time that one takes."""
MOST_PAIRS = 6
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


class Tuner:
    """Decides for one loader, over all its epochs.

    Args:
        log: of the loader.
        asked: what the loader was asked for.
        refused: why nothing else may be tried; None where it may.
        cores, epoch_batches, max_workers: limit the number of workers.
        depth: `prefetch_factor` of workers, where the script says so.
        earlier: `rounds` of an earlier loader of the same place: what was faster there is tried first, and soon proven.

    Attributes:
        wanted, best: what is to run, and what is known to be best.
        gain: of `best` over `asked`, from pairs.
        measured: what was measured, by configuration.
        rounds: in which another configuration and `asked` were measured.
        own_s, gained_s: what tuning has cost, and what it has gained.
        start_s: what starting a worker takes.
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
        earlier: Sequence[Round] = (),
    ) -> None:
        self._log, self.asked, self.refused = log, asked, refused
        self._cores, self._epoch_batches, self._most = cores, epoch_batches, max_workers
        self._depth = depth or (asked.prefetch_factor if asked.prefetch_factor != USUAL else None)
        self.wanted = self.best = asked
        self.gain: Interval | None = None
        self.measured = dict[LoaderConfig, list[Measurement]]()
        self.rounds = [each for each in earlier[-MOST_PAIRS // 2 :] if asked in each.rates]
        self.own_s = self.gained_s = self.wake = 0.0
        self.start_s = START_S
        self._are_short, self._took_s = False, 0.0
        """Whether epochs are compared whole; what the latest measurement took, until queues were full included."""
        self._epoch: Measurement | None = None
        self._begin = 0
        """The first of the rounds that count for the present choice."""
        rates = (each.rates for each in reversed(self.rounds))
        self._faster_before = next((c for each in rates for c in each if each[c] > each[asked]), None)
        self._plan = self._decide()
        self._request = next(self._plan)
        self._since, self._applied_at = log.end, -math.inf
        if refused is not None:
            self.freeze()

    def freeze(self) -> None:
        self._plan.close()
        self._request, self.wake = Measure(self.asked), math.inf

    def refuse(self, why: Finding) -> None:
        """Only what was asked for may run from now on, for good; the first reason counts."""
        if self.refused is None:
            self.refused = why
            logger.info("the number of workers stays: %s", why.sentence)
        self.freeze()
        self.wanted = self.best = self.asked
        self.gain = None

    def may(self, price_s: float) -> bool:
        """Whether something of this price may be tried."""
        return self.own_s + price_s <= CREDIT_S + SHARE * self._log.totals.active_s + 0.5 * self.gained_s

    def look(self, now: float) -> None:
        """Think, if there is something new; afterwards `wanted` says what is to run."""
        request, (epoch, self._epoch) = self._request, (self._epoch, None)
        seen = epoch if request.whole else self._seen(request)
        if seen is None:
            self.wake = now + max(0.02, request.seconds / 4)
            return
        self._took_s = max(seen.window_s, now - self._applied_at if math.isfinite(self._applied_at) else 0.0)
        self.measured.setdefault(request.config, []).append(seen)
        if self.wanted == self.best and self.gain is not None:
            self.gained_s += (1 - 1 / self.gain.low) * seen.window_s
        self._request = self._plan.send(seen)
        self.wanted, self.wake, self._since = self._request.config, now + 0.02, self._log.end
        self._applied_at = -math.inf if self.wanted == request.config else math.inf

    def failed(self, now: float) -> None:
        self.wanted = self.best = self.asked

    most = 32

    def applied(self, now: float, in_flight: int = 0) -> None:
        if self._applied_at == math.inf:
            self._since, self._applied_at = self._log.end, now

    def epoch(self, seconds: float, batches: int) -> None:
        """An epoch is over, `iter()` and end included: it counts if the configuration in question has made it."""
        if not self._request.whole:
            return
        self.wake = 0.0
        first, config = self._log.end - batches, self._request.config
        rows = [row for row in self._log.since(first) if _is_of(row, config)]
        is_own = self.wanted == config and first >= self._since and batches - len(rows) <= FEW_OTHERS * batches
        if is_own and (seen := measured(rows)) is not None:
            rate = replace(seen.samples_per_s, value=seen.samples / seconds)
            self._epoch = replace(seen, samples_per_s=rate, window_s=seconds)

    def _seen(self, request: Measure) -> Measurement | None:
        latest = self._log.since(self._since)
        rows = [row for row in latest if _is_of(row, request.config)]
        begin = self._applied_at
        if request.config.num_workers:  # while the loop itself fetches one, to compare it, their queues fill up
            begin = max([begin, *(row.received for row in latest if row.worker == MAIN_PROCESS)])
        if begin > -math.inf:  # what was begun before belongs to another one, and queues fill first
            rows = [row for row in rows if row.fetch_start > begin][max(1, request.config.num_workers) :]
        if len(rows) < max(request.batches, request.config.num_workers):
            return None
        seen = measured(rows)
        return None if seen is None or seen.window_s < request.seconds else seen

    def _decide(self) -> Generator[Measure, Measurement, None]:
        gate_s, pause_s = GATE_S if self._faster_before is None else GATE_S / 4, KEEP_S
        seen = yield Measure(self.asked, gate_s / 2, GATE_BATCHES // 2)
        if seen.wait_share < MOSTLY:
            seen = yield Measure(self.asked, gate_s / 2, GATE_BATCHES // 2)
        while True:
            before = self.best
            candidate = yield from self._ramp(seen)
            if candidate != before or (before != self.asked and pause_s == PAIR_EVERY_S):
                gain = yield from self._paired(candidate)
                if gain is not None:
                    self.best, self.gain = candidate, gain
                elif candidate == before:  # it is no longer faster
                    self.best, self.gain = self.asked, None
                logger.info("settled on %s after %.0f s of training", self.best, self._log.totals.active_s)
            self._begin = len(self.rounds)
            pause_s = KEEP_S if self.best != before else min(2 * pause_s, PAIR_EVERY_S)
            seen = yield Measure(self.best, pause_s, GATE_BATCHES)

    def _ramp(self, seen: Measurement) -> Generator[Measure, Measurement, LoaderConfig]:
        """What may be better than the best that is known, of which this was seen; that one if nothing is."""
        candidate, best = self.best, seen
        self._are_short = _batch_s(seen) * (self._epoch_batches or math.inf) < SHORT_EPOCH_S
        for config in self._candidates(seen):
            is_first = candidate == self.best
            if not self.may(self._price(config, seen, is_risky=is_first or _rate(best) < _rate(seen))):
                break
            tried = yield from self._run(config, seen)
            if self.best != self.asked and config.num_workers < self.best.num_workers:
                return config if tried.wait_share < 2 * IDLE else self.best
            if self.best == self.asked:
                self._note(config, tried, seen)
            is_faster = is_first or _rate(tried) > _rate(best)
            goes_on = not config.num_workers or (is_faster and (is_first or _falls(best, tried)))
            if is_faster:
                candidate, best = config, tried
            if not goes_on:
                break
        return candidate if _rate(best) > (1 + LEAST_FALL) * _rate(seen) else self.best

    def _run(self, config: LoaderConfig, other: Measurement) -> Generator[Measure, Measurement, Measurement]:
        seen = yield Measure(config)
        self._charge(seen, other, self._took_s)
        if self._are_short and _rate(seen) > _rate(other):  # a whole epoch is only slower
            seen = yield Measure(config, whole=True)
            self._charge(seen, other, self._took_s)
        return seen

    def _charge(self, seen: Measurement, other: Measurement, took_s: float) -> None:
        self.own_s += max(0.0, took_s * (1 - _rate(seen) / _rate(other)))

    def _price(self, config: LoaderConfig, seen: Measurement, *, is_risky: bool = True) -> float:
        trial_s = min(max(BLOCK_S, BLOCK_BATCHES * _batch_s(seen)), 1.0)
        more = max(0, config.num_workers - self.best.num_workers)
        return self.start_s * more + (RISK * trial_s if is_risky else 0.0)

    def _note(self, config: LoaderConfig, ours: Measurement, theirs: Measurement) -> None:
        self.rounds.append(Round(rates={config: _rate(ours), self.asked: _rate(theirs)}))

    def _paired(self, config: LoaderConfig) -> Generator[Measure, Measurement, Interval | None]:
        """In turns with what was asked for: how many times as fast it is; None where it is not shown to be faster."""
        while True:
            pairs = [each for each in self.rounds[self._begin :] if config in each.rates]
            gain = Effects(pairs).ratio(config, self.asked) if pairs else None
            if gain is not None and (gain.low > 1 or gain.high < 1 or gain.count >= MOST_PAIRS):
                return gain if gain.low > 1 else None
            if gain is not None and gain.value < 1 and not self.may(RISK * self._took_s):
                return None
            ours = yield Measure(config, whole=self._are_short)
            took_s = self._took_s
            theirs = yield Measure(self.asked, whole=self._are_short)
            self._charge(ours, theirs, took_s)
            self._note(config, ours, theirs)

    def _candidates(self, seen: Measurement) -> list[LoaderConfig]:
        """What is tried in place of the best that is known, in this order, while it pays."""
        most, own = self._ruled(seen), self.best.num_workers
        if self.best != self.asked and (seen.wait_share < IDLE or not own):
            return [self._with(own // 2)] if own > 1 else []
        is_cheap = seen.service_cpu_s > 0.9 * seen.service_s and seen.service_s < CHEAP_FETCH_S
        is_short = self._epoch_batches is not None and self._epoch_batches < SHORTEST_EPOCH
        if seen.wait_share < WAITING or (not own and (is_cheap or is_short)):
            return []
        earlier, self._faster_before = self._faster_before, None
        if earlier is not None and own != earlier.num_workers <= most:
            return [self._with(earlier.num_workers)]
        is_handing_over = own and seen.service_s + seen.step_s < _batch_s(seen) * (1 + WAITING)
        found, workers = [0] if is_handing_over and self.best == self.asked else [], 2 * own or min(2, most)
        step = max(2.0, math.sqrt(most / workers))  # two or three stages: each takes time
        while workers < most:
            found.append(workers)
            workers = math.ceil(workers * step)
        return [self._with(each) for each in dict.fromkeys([*found, most]) if each != own]

    def _ruled(self, seen: Measurement) -> int:
        """The number of workers that the rule allows."""
        most = HEADROOM * seen.service_s / max(seen.step_s, 1e-6) + 1
        most = min(most, self._cores * seen.service_s / max(seen.service_cpu_s, 1e-6) + 1)
        return max(1, min(int(most), self._most, self._epoch_batches or self._most))

    def _with(self, workers: int) -> LoaderConfig:
        depth = self._depth or (DEEP if workers <= FEW_WORKERS else USUAL)
        return self.asked.with_workers(workers, depth if workers else None)


def _is_of(row: BatchTrace, config: LoaderConfig) -> bool:
    return (row.worker != MAIN_PROCESS) == bool(config.num_workers)


def measured(rows: list[BatchTrace]) -> Measurement | None:
    """What these batches of a configuration say, pauses apart; None of none."""
    longest_s = max(PAUSE_S, PAUSE_STEPS * sum(row.step_s for row in rows) / max(1, len(rows)))
    rows = [row for row in rows if row.step_s <= longest_s]
    if not rows:
        return None
    window_s = max(sum(row.step_end - row.requested for row in rows), 1e-9)
    rate = sum(row.samples for row in rows) / window_s
    return Measurement.of(
        rows,
        Interval(value=rate, low=-math.inf, high=math.inf, count=len(rows)),
        window_s=window_s,
        first_batch_s=rows[0].wait_s,
        wait_share=sum(row.wait_s for row in rows) / window_s,
    )


def _rate(seen: Measurement) -> float:
    return seen.samples_per_s.value


def _batch_s(seen: Measurement) -> float:
    return seen.window_s / seen.samples_per_s.count


def _falls(before: Measurement, after: Measurement) -> bool:
    return before.wait_share - after.wait_share * _rate(before) / _rate(after) > LEAST_FALL
