"""When a loader changes, and to what: the policy of `decision`, asked between the batches of a training loop.

    explore ── compare: A B A B ── keep, silently ── the rate has shifted ── explore ...

* explore: blocks of what the policy proposes, as long as trying may be paid for: 1 % of the time trained, what was gained so
  far, and a little to begin with. Where the loop hardly waits, nothing faster is tried, only cheaper. No workers at all are
  tried where arithmetic does not rule them out, never inferred.
* compare: what is believed to be the best, in turn with what was asked for. Only such pairs of blocks tell a gain, as the
  machine was the same for both.
* keep: nothing changes, until the rate shifts for good, or something can be paid for that could not be before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

from autotune_loader.decision.belief import CORES_OF_A_SERIAL_STEP, Beliefs
from autotune_loader.decision.evidence import Evidence
from autotune_loader.decision.policy import Explore, Goal, explore
from autotune_loader.decision.selection import choose
from autotune_loader.decision.space import Space, least, useful_workers
from autotune_loader.live.blocks import ROUNDS, Block, Training, latest, measured, waiting_share
from autotune_loader.live.ranks import Alone, Steps
from autotune_loader.live.shift import ShiftTest
from autotune_loader.live.spending import Spending
from autotune_loader.live.traces import start_s, step_cores
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval

LEAST_GAIN = 0.01
"""A loop that could gain less than this is left alone."""
TOLERANCE = 0.02
"""Relative difference that counts as equally fast."""
EXPLORE_TOLERANCE = 0.025
"""The same for exploring, which ends where no block is expected to gain 0.4 times as much: `LEAST_GAIN`."""
LOOK_S, WATCH_S = 0.05, 1.5
"""So often a loader is looked at while a block is under way, and while nothing is tried."""
LEAST_SHARE = 100.0
"""After a look that took long, the loop is left alone for so many times as long."""
AGAIN_S = 9.0
"""After so long what is kept counts as another block of it: queues may hide for longer than one that too little is made. And so
often one asks whether what could not be paid for can be now."""
MOST_EVENTS = 2_000
"""Lines of history that are remembered."""
PAIRS = 3
"""Pairs of blocks, as asked for and as settled on, that tell a gain."""
PAIRS_SHARE = 0.02
"""Of the time trained, what these may cost."""
BLOCK_SD = 0.05
"""Two blocks of one configuration differ by so much (relative) beyond what their own batches show."""
SHARED_CORE = 0.6
"""What a core does beside a busy worker, of what it does alone; an optimist's guess."""
PROOF_S = 0.05
"""So often one asks whether workers are proven."""
LATEST_STARTS = 16
"""Starts that tell what the next one costs."""
WORKER_START_S = 0.02
"""What starting a worker holds up the loop, until this loader's own starts tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the tuner knows of a loader besides its batches."""

    start: LoaderConfig
    """As asked for."""
    first: LoaderConfig | None = None
    """What is tried first: of an earlier job."""
    usable_cores: int
    max_workers: int | None = None
    epoch_batches: int | None = None
    step_threads: tuple[int | None, ...] = (None,)
    """Threads of the step that may be tried; None leaves those of the process."""
    is_fixed: bool = False
    """Watch only."""
    site: str = ""
    """By which the ranks of a job know the loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a loader's history."""

    kind: str
    """`block`: observed; `settled`; `shift`: the rate has changed for good."""
    seconds: float
    """Seconds trained until then, pauses apart."""
    batch: int
    """Batches delivered until then."""
    config: LoaderConfig
    evidence: Evidence | None = None
    waiting: float | None = None
    """Share of the time in which the loop waited for batches that were not made yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a configuration brings over another one, from blocks of both in turn."""

    config: LoaderConfig
    ratio: Interval
    """Of the rates; `count` pairs of blocks."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[Evidence, Evidence]]) -> Gain:
        """By the mean of the logarithms; pairs scatter at least as blocks are known to.

        Args:
            pairs: (the other, this one), two at least.
        """
        logs = [after.log_rate - before.log_rate for before, after in pairs]
        known_sd = max(math.hypot(a.own_sd, b.own_sd, 2**0.5 * BLOCK_SD) for a, b in pairs)
        value, half = mean(logs), 2.0 * max(known_sd, stdev(logs)) / len(logs) ** 0.5
        low, high = math.exp(value - half), math.exp(value + half)
        return cls(
            config=pairs[-1][1].config, ratio=Interval(value=math.exp(value), low=low, high=high, count=len(logs))
        )


class Tuner:
    """Decides between batches; `look` is called by the loop whenever the time that it returned has come.

    Args:
        training: what is observed and changed.
        job: the loader.
        space: the legal configurations, given the most workers that could help.
        ranks: by which it is changed.
        clock: seconds, as the traces have them.
        cpu_clock: CPU seconds of this process.
        on_change: told of each change that is meant to last, and why.
    """

    def __init__(
        self,
        training: Training,
        job: Job,
        space: Callable[[int], Space],
        *,
        ranks: Alone | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        on_change: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._training, self._job, self._space = training, job, space
        self._clock, self._cpu_clock, self._on_change = clock, cpu_clock, on_change
        self._ranks = ranks or Alone(training)
        self._steps = self._plan()
        self._told: LoaderConfig | None = None
        self._is_put_off = False
        """Whether there is something that could not be paid for."""
        self._saves_workers = True
        """Fewer workers are tried before it settles first: later it may be a neighbour that makes them look enough."""
        self.is_confirmed = False
        """Whether what it settled on was looked at once more."""
        self.spending = Spending(training.traces)
        self.history: list[Event] = []
        self.beliefs: Beliefs | None = None
        self.gain: Gain | None = None
        """Of what it keeps over what was asked for, where they were compared."""
        self._chosen: LoaderConfig | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it has chosen, and not begun anew since."""
        return self._chosen is not None

    @property
    def best(self) -> LoaderConfig:
        """The fastest observed in a block, until it has settled; then what it settled on."""
        if self._chosen is not None or self.beliefs is None:
            return self._chosen or self._training.config
        return max(self.beliefs.log, key=lambda each: each.log_rate).config

    def look(self, now: float) -> float:
        """Think, if there is something to think about; returns when to be called again."""
        return now + next(self._steps)

    def _plan(self) -> Steps:
        while True:
            beliefs = self.beliefs = yield from self._begun()
            has_shifted = False
            while not has_shifted:
                if not self._job.is_fixed:
                    yield from self._explore(beliefs)
                    yield from self._compare(beliefs)
                self._settle()
                has_shifted = yield from self._keep(beliefs)
            self._note("shift")
            self._chosen = self.beliefs = self.gain = self.spending.base = None
            self.is_confirmed = False
            self.spending.gained_s = min(self.spending.gained_s, 0.0)

    def _begun(self) -> Generator[float, None, Beliefs]:
        """What a first block of what runs tells."""
        while True:
            before, first = (self._clock(), self._cpu_clock()), self._training.traces.end
            seen = yield from self._observe(self._training.config)
            if seen.measurement is not None:
                break
        job, measured, traces = self._job, seen.measurement, self._training.traces.block(first)
        cores = step_cores(traces, [before, (self._clock(), self._cpu_clock())])
        if len(job.step_threads) > 1:  # beside workers it shows only its share of the cores
            cores *= (_at_work(seen) + job.usable_cores) / job.usable_cores
        cores = min(float(job.usable_cores), cores)
        useful, worth = useful_workers(job.usable_cores, [measured]), self._worth_starting(measured)
        space = self._space(least(useful, worth, job.max_workers) or 0)
        if worth is not None and worth < useful:
            space = replace(space, workers_are_capped=True)
        if cores >= CORES_OF_A_SERIAL_STEP or self._training.config.consumer_threads is not None:
            space = replace(space, consumer_threads=job.step_threads)
        context = TwinContext(usable_cores=job.usable_cores, consumer_cores=cores, epoch_batches=job.epoch_batches)
        beliefs = Beliefs(space, context)
        beliefs.log.add(seen)
        self.spending.base = measured.samples_per_s.value
        return beliefs

    def _explore(self, beliefs: Beliefs) -> Steps:
        """Blocks of what is worth trying and can be paid for; then whatever is believed to be the best runs."""
        while not self._ranks.is_ready():
            yield PROOF_S
            self.spending.account()
        self._is_put_off = False
        while (config := self._next(beliefs)) is not None:
            yield from self._observe(config)
        yield from self._change_to(self._believed_best(beliefs))

    def _next(self, beliefs: Beliefs) -> LoaderConfig | None:
        """What to try next; None where nothing is worth it, or can be paid for."""
        tried, most = {each.key for each in beliefs.log}, max(each.config.num_workers for each in beliefs.log)
        failed = self._training.failures
        # A dataset that raises in one worker, and not here, raises in all.
        needs_loop = any(each.num_workers for each in failed) and not self._job.start.num_workers

        def may_run(config: LoaderConfig) -> bool:
            is_ruled_out = config.key() in failed or (needs_loop and config.num_workers > 0)
            return not is_ruled_out and self._training.may_run(config) and beliefs.feasible(config) is None

        for config in self._proposals(beliefs):
            if config.key() in tried or not may_run(config):
                continue
            while self._price_s(config, beliefs) > self.spending.affordable_s:
                self._is_put_off = True
                if config.num_workers // 2 <= most:
                    break
                config = config.with_workers(config.num_workers // 2)  # what fewer workers gain pays for more
            else:
                return config
        return None

    def _proposals(self, beliefs: Beliefs) -> Generator[LoaderConfig, None, None]:
        latest_of = {each.key: each for each in beliefs.log}
        best = max(latest_of.values(), key=lambda each: each.log_rate)
        assert best.measurement is not None
        if self._job.first is not None:
            yield self._job.first
        waiting = waiting_share(best.measurement)
        # Waiting bounds what a loader can gain, not what a step gains that is in its workers' way.
        may_gain = waiting / max(1.0 - waiting, 1e-9) >= LEAST_GAIN or len(beliefs.space.consumer_threads) > 1
        if may_gain:
            todo = explore(beliefs, Goal(tolerance=EXPLORE_TOLERANCE))
            if isinstance(todo, Explore) and todo.config is not None:
                yield todo.config
        alone_s = _alone_s(best, self._job.usable_cores, beliefs.context.consumer_cores)
        if (may_gain or self._saves_workers) and alone_s <= _period_s(best):
            yield self._job.start.with_workers(0).key()
        posterior = beliefs.posterior()
        if posterior is None:
            return
        choice, _ = choose(posterior, beliefs.space, TOLERANCE)
        if may_gain or (self._saves_workers and choice.num_workers < best.config.num_workers):
            yield choice

    def _believed_best(self, beliefs: Beliefs) -> LoaderConfig:
        """Of what was observed."""
        posterior = beliefs.posterior()
        known = () if posterior is None else posterior.configs
        tried = [key for key in dict.fromkeys(each.key for each in beliefs.log) if key in known]
        if posterior is None or not tried:
            return self._job.start
        return choose(posterior.at(tried), beliefs.space, TOLERANCE)[0]

    def _compare(self, beliefs: Beliefs) -> Steps:
        """What was chosen and what was asked for, in turn, where that may be paid for; the faster one is kept."""
        choice, start = self._training.config, self._job.start
        is_known = self.gain is not None and self.gain.config.key() == choice.key()
        if is_known or choice.key() == start.key() or start.key() in self._training.failures:
            return
        if not self._expects_gain(beliefs, choice):
            return
        price_s = PAIRS * (self._price_s(start, beliefs) + self._price_s(choice, beliefs))
        if price_s > min(self.spending.affordable_s, PAIRS_SHARE * self.spending.trained_s):
            self._is_put_off = True
            return
        pairs = list[tuple[Evidence, Evidence]]()
        for _ in range(PAIRS):
            before = yield from self._observe(start)
            after = yield from self._observe(choice)
            if before.measurement is None or after.measurement is None:
                return
            pairs.append((before, after))
        self.gain = Gain.of(pairs)
        if self.gain.ratio.high < 1.0:
            self.gain = None
            yield from self._change_to(start)

    def _expects_gain(self, beliefs: Beliefs, choice: LoaderConfig) -> bool:
        """Whether the choice is believed to be faster than what was asked for, and not only cheaper."""
        posterior, keys = beliefs.posterior(), [choice.key(), self._job.start.key()]
        if posterior is None or not {*keys} <= {*posterior.configs}:
            return True
        gain, _ = posterior.ratio(*map(posterior.configs.index, keys))
        return gain >= LEAST_GAIN

    def _keep(self, beliefs: Beliefs) -> Generator[float, None, bool]:
        """Stays silent until the rate has shifted (True), or there may be something new to try."""
        log, config, test = self._training.traces, self._training.config, ShiftTest()
        first, begun_s = log.end, self.spending.trained_s
        while (self.is_confirmed and not self._is_put_off) or self.spending.trained_s < begun_s + AGAIN_S:
            yield WATCH_S
            self.spending.account(is_trying=False)
            if self._training.config.key() != config.key():  # lost workers
                return True
            traces = latest(log, first)
            if len(traces) < max(3, ROUNDS * config.num_workers):
                continue
            first = log.end
            ends = [trace.step_end for trace in traces]
            round_ = min(max(1, config.num_workers), len(ends) // 2)  # workers deliver in waves
            seconds = (sum(ends[-round_:]) - sum(ends[:round_])) / round_
            samples = sum(trace.samples for trace in traces) / len(traces) * (len(traces) - round_)
            if test.add(math.log(samples / max(seconds, 1e-9))):
                return True
        if not self.is_confirmed:
            self.is_confirmed = True
            served = [change.serves_from for change in log.changes if change.reason in ("start", "change")]
            traces = latest(log, max(served[-1:], default=0))
            if len(traces) >= max(3, ROUNDS * config.num_workers):
                self._add(beliefs, Evidence(config=config, outcome=measured(traces, config.num_workers)))
        return False

    def _observe(self, config: LoaderConfig) -> Generator[float, None, Evidence]:
        """A block of this configuration; added to what is known."""
        is_new = config.key() != self._training.config.key()
        yield from self._ranks.change_to(self._as_asked(config))
        block, pause_s = Block(self._training, config, is_new=is_new), LOOK_S
        while True:
            yield pause_s
            begun = self._clock()
            if (outcome := block.outcome()) is not None:
                break
            pause_s = max(LOOK_S, LEAST_SHARE * (self._clock() - begun))
        if isinstance(outcome, Measurement):
            outcome = yield from self._ranks.counting(outcome)
        seen = Evidence(config=self._as_asked(config), outcome=outcome)
        self.spending.account()
        self._add(self.beliefs, seen)
        return seen

    def _add(self, beliefs: Beliefs | None, seen: Evidence) -> None:
        if beliefs is not None:
            beliefs.log.add(seen)
        self._note("block", seen)

    def _change_to(self, config: LoaderConfig) -> Steps:
        if config.key() != self._training.config.key():
            yield from self._ranks.change_to(self._as_asked(config))

    def _as_asked(self, config: LoaderConfig) -> LoaderConfig:
        """Workers live as long as was asked for."""
        return replace(config, persistent_workers=self._job.start.persistent_workers and config.num_workers > 0)

    def _price_s(self, config: LoaderConfig, beliefs: Beliefs) -> float:
        """What a trial is expected to cost: the start, and a slower block."""
        best = max(math.exp(each.log_rate) for each in beliefs.log)
        predicted = beliefs.predicted(config)
        slower = 0.5 if predicted is None else max(0.0, 1.0 - predicted / best)
        windows = [each.measurement.window_s for each in beliefs.log if each.measurement is not None]
        return config.num_workers * self._worker_start_s() + slower * max(1.0, *windows)

    def _worth_starting(self, measured: Measurement) -> int | None:
        """Most workers that an epoch is worth, where each epoch starts its own; None where that is no bound.

        With W workers fetching an epoch takes E / W seconds and starting them W * s, whose sum is least at W = sqrt(E / s).
        """
        batches = self._job.epoch_batches
        if batches is None or self._job.start.persistent_workers:
            return None
        return max(1, math.ceil(math.sqrt(batches * measured.service_s / self._worker_start_s())))

    def _worker_start_s(self) -> float:
        """Seconds for which starting a worker holds up the loop."""
        log = self._training.traces
        took = [(start_s(log, change), change.config.num_workers) for change in log.changes[-LATEST_STARTS:]]
        starts = [seconds / workers for seconds, workers in took if seconds is not None and workers]
        return max(sum(starts) / len(starts), 1e-6) if starts else WORKER_START_S

    def _settle(self) -> None:
        config = self._chosen = self._training.config
        self._saves_workers = False
        if self._told is None or config.key() != self._told.key():
            self._told = config
            self._on_change(self._note("settled"))

    def _note(self, kind: str, seen: Evidence | None = None) -> Event:
        measured = None if seen is None else seen.measurement
        event = Event(
            kind=kind,
            seconds=self.spending.trained_s,
            batch=self._training.traces.end,
            config=self._training.config if seen is None else seen.config,
            evidence=seen if measured is None or seen is None else replace(seen, outcome=replace(measured, traces=())),
            waiting=None if measured is None else waiting_share(measured),
        )
        self.history.append(event)
        del self.history[:-MOST_EVENTS]
        return event


def _alone_s(seen: Evidence, cores: int, step_cores: float) -> float:
    """Seconds of a batch without workers at best: without what handing it over costs, and what crowding does to fetch and step.

    Args:
        seen: with workers.
        cores: of this process.
        step_cores: that the step keeps busy; one that waits for a device is not crowded.
    """
    assert seen.measurement is not None
    at_work = _at_work(seen)
    busy = at_work + max(1.0, step_cores)
    shared = min(1.0, at_work) if busy > cores / 2 else 0.0
    crowding = min(1.0, cores / busy) * (1.0 - (1.0 - SHARED_CORE) * shared)
    return crowding * _fetch_s(seen) + seen.measurement.step_s * (1.0 - (1.0 - crowding) * min(1.0, step_cores))


def _at_work(seen: Evidence) -> float:
    """Workers that fetch at any time, by Little's law."""
    return min(float(seen.config.num_workers), _fetch_s(seen) / _period_s(seen))


def _fetch_s(seen: Evidence) -> float:
    assert seen.measurement is not None
    traces = seen.measurement.traces
    return sum(trace.fetch_end - trace.fetch_start for trace in traces) / len(traces)


def _period_s(seen: Evidence) -> float:
    measured = seen.measurement
    assert measured is not None
    return measured.batch_size / measured.samples_per_s.value
