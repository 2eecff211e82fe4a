"""How many workers: as few trials as possible, and never slower than what was asked for.

    gate    after 2 s and 20 batches: does the loop wait at all?
    rule    W = 1.15 fetch / step + 1, at most what cores and memory allow
    ramp    2 workers, 4, 8 ... while waiting falls
    pairs   asked, W, asked, W: kept only if the lower limit of the ratio is above 1
    keep    waiting above 5 %: ramp again; below 1 %: half as many; every 5 minutes a pair
    ledger  own seconds and the price of the next trial stay below 0.5 s + 1 % of the time trained + half of the proven gain

All of it reads one log of batches and says which configuration is wanted; it starts nothing and has no clock.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import NamedTuple

from autotune_loader.autoloader.log import PAUSE_S, PAUSE_STEPS, Log
from autotune_loader.results.record import Finding
from autotune_loader.values import MAIN_PROCESS, BatchTrace, Interval, LoaderConfig, Measurement

GATE_S, GATE_BATCHES = 2.0, 20
"""The first look: earlier, caches are cold and nothing is known. Half of it is enough for a loop that mostly waits."""
MOSTLY, WAITING, IDLE = 0.5, 0.05, 0.01
"""Shares of waiting: above the second one there is something to gain, below the last one something to give back."""
KEEP_S, PAIR_EVERY_S = 30.0, 300.0
"""How long a share of waiting has to last; how often what is kept proves itself again."""
BLOCK_S, BLOCK_BATCHES = 0.25, 6
"""The least that is measured of a configuration."""
SHORT_EPOCH_S = 1.0
"""Shorter epochs are compared whole: what their beginning and end take is a part of them."""
HEADROOM = 1.15
"""Fetches take longer beside each other."""
LEAST_FALL = 0.01
"""More workers are worth it if the loop waits for a sample less by this share of the time that one takes."""
MOST_PAIRS, LEAST_SCATTER, WIDTH = 6, 0.02, 2.0
"""Pairs at most; what is not believed of less scatter between them; half-width in standard errors."""
SHORTEST_EPOCH = 4
"""Batches of an epoch that workers are tried for. How long it takes does not matter: they stay for the next one."""
START_S = 0.02
"""What starting one takes, before one was started."""
CHEAP_FETCH_S = 0.0003
"""A batch that takes less CPU than this is fetched sooner than it is handed over."""
CREDIT_S, SHARE = 0.5, 0.01
"""What may be spent: at once, and of the time trained."""
RISK = 0.2
"""Share of the time of a trial that it may cost."""
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


class Tried(NamedTuple):
    """What a loader of the same place has tried before: the next one goes on from there."""

    config: LoaderConfig
    gains: tuple[float, ...]
    """How many times as fast it was as what was asked for, as logarithms."""


class Tuner:
    """Decides for one loader, over all its epochs.

    Args:
        log: of the loader.
        asked: what the loader was asked for.
        refused: why nothing else may be tried; None where it may.
        cores: that may be counted on.
        epoch_batches: None where that is not known.
        max_workers: at most.
        depth: `prefetch_factor` of workers, where the script says so.
        tried: by an earlier loader of the same place.
        on_tried: told what is faster, each time it was compared with what was asked for.
        on_settled: called when a choice is made, after `best` is set.
    """

    def __init__(  # noqa: PLR0913 - what a decision rests on
        self,
        log: Log,
        asked: LoaderConfig,
        *,
        refused: Finding | None = None,
        cores: int,
        epoch_batches: int | None = None,
        max_workers: int = MOST_WORKERS,
        depth: int | None = None,
        tried: Tried | None = None,
        on_tried: Callable[[Tried], None] = lambda tried: None,
        on_settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._log, self.asked, self.refused = log, asked, refused
        self.wanted = self.best = asked
        """What is to run; what is known to be best."""
        self._cores, self._epoch_batches = cores, epoch_batches
        self._most, self._tried, self._on_tried, self._on_settled = max_workers, tried, on_tried, on_settled
        self._given = depth or (asked.prefetch_factor if asked.prefetch_factor != USUAL else None)
        self.own_s = self.gained_s = 0.0
        """What tuning has cost, and what it has gained."""
        self.measured = list[tuple[LoaderConfig, Measurement]]()
        self.gain: Interval | None = None
        """Of `best` over `asked`, from pairs."""
        self.waiting: float | None = None
        """Share of waiting when it was looked at last."""
        self.start_s, self.wake = START_S, 0.0
        """What starting a worker takes; when `look` is to be called."""
        self._are_short, self._took_s = False, 0.0
        """Whether epochs are compared whole; what the latest measurement took, until queues were full included."""
        self._epoch: Measurement | None = None
        self._plan = self._decide()
        self._request = next(self._plan)
        self._since, self._applied_at = log.end, -math.inf
        if refused is not None:
            self.freeze()

    @property
    def is_settled(self) -> bool:
        """Whether the best is known and runs."""
        return self.wanted == self.best and any(config == self.best for config, _ in self.measured)

    def freeze(self) -> None:
        self._plan.close()
        self.wake = math.inf

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
        self.waiting = seen.wait_share
        self._took_s = max(seen.window_s, now - self._applied_at if math.isfinite(self._applied_at) else 0.0)
        self.measured.append((request.config, seen))
        if self.wanted == self.best and self.gain is not None:
            self.gained_s += (1 - 1 / self.gain.low) * seen.window_s
        try:
            self._request = self._plan.send(seen)
        except StopIteration:
            self.wake = math.inf
            return
        self.wanted, self.wake = self._request.config, now + 0.02
        self._since = self._log.end
        self._applied_at = -math.inf if self.wanted == request.config else math.inf

    def applied(self, now: float) -> None:
        if self._applied_at == math.inf:
            self._since, self._applied_at = self._log.end, now

    def epoch(self, config: LoaderConfig, seconds: float, samples: int, batches: int) -> None:
        """An epoch is over that one configuration has made, `iter()` and end included."""
        if self._request.whole and config == self._request.config and batches and seconds > 0:
            rows = [row for row in self._log.since(self._log.end - batches) if _is_of(row, config)]
            if (seen := measured(rows)) is not None:
                rate = replace(seen.samples_per_s, value=samples / seconds, count=batches)
                self._epoch = replace(seen, samples_per_s=rate, samples=samples, window_s=seconds)
            self.wake = 0.0

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
        pause_s, gate_s = KEEP_S, GATE_S if self._tried is None else GATE_S / 4
        asked = yield Measure(self.asked, gate_s / 2, GATE_BATCHES // 2)
        if asked.wait_share < MOSTLY:
            asked = yield Measure(self.asked, gate_s / 2, GATE_BATCHES // 2)
        while True:
            if asked.wait_share >= WAITING and (yield from self._explored(asked)):
                pause_s = KEEP_S
                yield from self._kept()
            asked = yield Measure(self.asked, pause_s, GATE_BATCHES)
            pause_s *= 2

    def _explored(self, asked: Measurement) -> Generator[Measure, Measurement, bool]:
        """Whether another configuration than the one asked for was shown to be faster, which runs then."""
        candidate, best, gains = self.asked, asked, list[float]()
        self._are_short = _batch_s(asked) * (self._epoch_batches or math.inf) < SHORT_EPOCH_S
        for config in self._candidates(asked):
            is_first = candidate == self.asked
            more = config.num_workers - self.asked.num_workers
            if not self.may(self._price(more, asked, is_risky=is_first or _rate(best) < _rate(asked))):
                break
            tried = yield from self._run(config, asked)
            falls = is_first or _falls(best, tried) or not config.num_workers
            if is_first or _rate(tried) > _rate(best):
                candidate, best = config, tried
                known = self._tried.gains if self._tried is not None and self._tried.config == config else ()
                gains = [*known[-MOST_PAIRS // 2 :], math.log(_rate(tried) / _rate(asked))]
                self._hand_on(config, gains)
            elif config.num_workers:
                break
            if not falls:
                break
        self._tried = None
        if _rate(best) <= _rate(asked):
            return False
        gain = yield from self._paired(candidate, gains)
        if gain is None or gain.low <= 1:
            return False
        self.best, self.gain = candidate, gain
        self._settled()
        return True

    def _run(self, config: LoaderConfig, other: Measurement) -> Generator[Measure, Measurement, Measurement]:
        seen = yield Measure(config)
        self._charge(seen, other, self._took_s)
        if self._are_short and _rate(seen) > _rate(other):  # a whole epoch is only slower
            seen = yield Measure(config, whole=True)
            self._charge(seen, other, self._took_s)
        return seen

    def _charge(self, seen: Measurement, other: Measurement, took_s: float) -> None:
        self.own_s += max(0.0, took_s * (1 - _rate(seen) / _rate(other)))

    def _price(self, more: int, seen: Measurement, *, is_risky: bool = True) -> float:
        trial_s = min(max(BLOCK_S, BLOCK_BATCHES * _batch_s(seen)), 1.0)
        return self.start_s * max(0, more) + (RISK * trial_s if is_risky else 0.0)

    def _hand_on(self, config: LoaderConfig, gains: list[float]) -> None:
        if gains[-1] > 0:
            self._on_tried(Tried(config, tuple(gains)))

    def _paired(self, config: LoaderConfig, gains: list[float]) -> Generator[Measure, Measurement, Interval | None]:
        """In turns with what was asked for, after comparisons that gave these gains; None where they cannot be told apart."""
        ours_s = 0.0
        while True:
            gain = _interval(gains)
            if len(gains) > 1 and (gain.low > 1 or gain.high < 1):
                return gain
            if len(gains) >= MOST_PAIRS or (gain.value < 1 and not self.may(RISK * ours_s)):
                return None
            ours = yield Measure(config, whole=self._are_short)
            took_s = self._took_s
            theirs = yield Measure(self.asked, whole=self._are_short)
            self._charge(ours, theirs, took_s)
            ours_s = ours.window_s
            gains.append(math.log(_rate(ours) / _rate(theirs)))
            self._hand_on(config, gains)

    def _kept(self) -> Generator[Measure, Measurement, None]:
        """Until what is kept is no longer faster than what was asked for."""
        paired_s, pause_s = self._log.totals.active_s, KEEP_S
        while True:
            kept = yield Measure(self.best, pause_s, GATE_BATCHES)
            if self._log.totals.active_s - paired_s > PAIR_EVERY_S:
                paired_s = self._log.totals.active_s
                asked = yield Measure(self.asked, whole=self._are_short)
                self.gain = yield from self._paired(self.best, [math.log(_rate(kept) / _rate(asked))])
                if self.gain is not None and self.gain.low > 1:
                    continue
                self.best, self.gain = self.asked, None
                self._settled()
                return
            pause_s = min(2 * pause_s, PAIR_EVERY_S)
            other, workers = self._other(kept), self.best.num_workers
            if other is not None and self.may(self._price(other.num_workers - workers, kept)):
                tried = yield from self._run(other, kept)
                if tried.wait_share < 2 * IDLE if other.num_workers < workers else _falls(kept, tried):
                    self.best, pause_s = other, KEEP_S
                    self._settled()

    def _other(self, kept: Measurement) -> LoaderConfig | None:
        """What may be better now than what is kept; None where there is nothing to be better at."""
        workers = self.best.num_workers
        if kept.wait_share < IDLE:
            return self._with(workers // 2) if workers > 1 else None
        most = self._ruled(kept)
        return self._with(min(2 * workers, most)) if workers and kept.wait_share > WAITING and most > workers else None

    def _candidates(self, asked: Measurement) -> list[LoaderConfig]:
        """What is tried, in this order, while it pays."""
        most, own, tried = self._ruled(asked), self.asked.num_workers, self._tried
        found = [0] if own and asked.service_s + asked.step_s < _batch_s(asked) * (1 + WAITING) else []
        is_cheap = asked.service_cpu_s > 0.9 * asked.service_s and asked.service_s < CHEAP_FETCH_S
        is_short = self._epoch_batches is not None and self._epoch_batches < SHORTEST_EPOCH
        if not own and (is_cheap or is_short):
            return []
        if tried is not None and own != tried.config.num_workers <= most:
            return [self._with(tried.config.num_workers)]
        workers = 2 * own or min(2, most)
        step = max(2.0, math.sqrt(most / workers))  # two or three stages: each takes time
        while workers < most:
            found.append(workers)
            workers = math.ceil(workers * step)
        return [self._with(each) for each in dict.fromkeys([*found, most]) if each != own]

    def _ruled(self, seen: Measurement) -> int:
        """The number of workers that the rule of three allows."""
        most = HEADROOM * seen.service_s / max(seen.step_s, 1e-6) + 1
        most = min(most, self._cores * seen.service_s / max(seen.service_cpu_s, 1e-6) + 1)
        if self._epoch_batches is not None:
            most = min(most, self._epoch_batches)
        return max(1, min(int(most), self._most))

    def _with(self, workers: int) -> LoaderConfig:
        depth = self._given or (DEEP if workers <= FEW_WORKERS else USUAL)
        return self.asked.with_workers(workers, depth if workers else None)

    def _settled(self) -> None:
        logger.info("settled on %s after %.0f s of training", self.best, self._log.totals.active_s)
        self._on_settled()


def _is_of(row: BatchTrace, config: LoaderConfig) -> bool:
    return (row.worker != MAIN_PROCESS) == bool(config.num_workers)


def measured(rows: list[BatchTrace]) -> Measurement | None:
    """What these batches of a configuration say, pauses apart; None of none."""
    longest_s = max(PAUSE_S, PAUSE_STEPS * sum(row.step_s for row in rows) / max(1, len(rows)))
    rows = [row for row in rows if row.step_s <= longest_s]
    if not rows:
        return None
    count, seconds = len(rows), max(sum(row.step_end - row.requested for row in rows), 1e-9)
    samples = sum(row.samples for row in rows)
    return Measurement(
        samples_per_s=Interval(value=samples / seconds, low=-math.inf, high=math.inf, count=count),
        samples=samples,
        window_s=seconds,
        batch_size=samples / count,
        first_batch_s=rows[0].wait_s,
        wait_share=min(max(0.0, sum(row.wait_s for row in rows) / seconds), 1.0),
        service_s=sum(row.service_s for row in rows) / count,
        service_cpu_s=sum(row.cpu_s for row in rows) / count,
        receive_s=sum(row.receive_s for row in rows) / count,
        step_s=sum(row.step_s for row in rows) / count,
    )


def _rate(seen: Measurement) -> float:
    return seen.samples_per_s.value


def _batch_s(seen: Measurement) -> float:
    return seen.window_s / seen.samples_per_s.count


def _falls(before: Measurement, after: Measurement) -> bool:
    return before.wait_share - after.wait_share * _rate(before) / _rate(after) > LEAST_FALL


def _interval(logs: list[float]) -> Interval:
    mean = statistics.fmean(logs)
    scatter = max(statistics.stdev(logs), LEAST_SCATTER) if len(logs) > 1 else 1.0
    half = WIDTH * scatter / math.sqrt(len(logs))
    return Interval(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), count=len(logs))
