"""When a loader changes, and to what: the policy of `decision`, asked between the batches of a training loop.

    look ── proof ── explore ── settled ── compared with what was asked for ── silent ── the rate has shifted ── look ...

`look` observes what runs. Where the loop hardly waits, nothing faster is tried, only cheaper; else whatever the policy
proposes, the plain rule first, as long as trying may be paid for: 1 % of the time trained, what was gained so far, and a
little to begin with. No workers at all are tried where the arithmetic does not rule them out, never inferred.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

from autotune_loader.decision.belief import CORES_OF_A_SERIAL_STEP, Beliefs
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.policy import Explore, Goal, explore
from autotune_loader.decision.selection import choose
from autotune_loader.decision.space import Space, useful_workers
from autotune_loader.live.block_source import MOST_LOOKED_AT, BlockSource, Training, waiting_share
from autotune_loader.live.rival import BLOCK_SD, denied_by
from autotune_loader.live.shift import ShiftTest
from autotune_loader.live.spending import Spending
from autotune_loader.live.traces import continuous, start_s
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace

LEAST_GAIN = 0.01
"""A loop that could gain less than this is left alone."""
TOLERANCE = 0.02
"""Relative difference that counts as equally fast."""
EXPLORE_TOLERANCE = 0.025
"""The same for exploring, which ends where no block is expected to gain 0.4 times as much: `LEAST_GAIN`."""
WATCH_S = 1.5
"""Length of a block while the loader is settled."""
LEAST_SHARE = 100.0
"""After a look at a block that is not whole yet, the loop is left alone for so many times as long."""
MOST_EVENTS = 2_000
"""Lines of history that are remembered."""
CONFIRMING_BLOCKS = 6
"""Blocks after which the rate of what was settled on is known better than by its trial."""
ROUNDS = 3
"""Pairs of blocks, as asked for and as settled on, that tell a gain."""
ROUNDS_SHARE = 0.02
"""Of the time trained, what these may cost, as they find nothing but a figure."""
PROOF_S = 0.05
"""So often one asks whether workers are proven."""
LATEST_STARTS = 16
"""Starts that tell what the next one costs."""
SHARED_CORE = 0.6
"""What a logical core does beside a busy one of the same physical core, of what it does alone; an optimist's guess."""
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
    """What a configuration brings over the one asked for, from blocks in turn alone."""

    config: LoaderConfig
    ratio: Interval
    """Of the rates; `count` pairs of blocks."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[Evidence, Evidence]]) -> Gain:
        """By the mean of the logarithms; pairs scatter at least as blocks are known to.

        Args:
            pairs: (as asked for, as settled on), two at least.
        """
        logs = [after.log_rate - before.log_rate for before, after in pairs]
        known_sd = max(math.hypot(a.own_sd, b.own_sd, 2**0.5 * BLOCK_SD) for a, b in pairs)
        value, half = mean(logs), 2.0 * max(known_sd, stdev(logs)) / len(logs) ** 0.5
        low, high = math.exp(value - half), math.exp(value + half)
        return cls(
            config=pairs[-1][1].config, ratio=Interval(value=math.exp(value), low=low, high=high, count=len(logs))
        )


Steps = Generator[float, None, None]
"""Yields for how many seconds the loop is to be left alone."""


class Tuner:
    """Decides between batches; `look` is called by the loop whenever the time that it returned has come.

    Args:
        training: what is observed and changed.
        job: the loader.
        space: the legal configurations, given the most workers that could help.
        source: of evidence; by default the training's own blocks.
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
        source: BlockSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
        on_change: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self._training, self._job, self._space = training, job, space
        self._clock, self._cpu_clock, self._on_change = clock, cpu_clock, on_change
        self._source = source or BlockSource(training)
        self._steps = self._plan()
        self._base: float | None = None
        self._unaffordable_s = self._compare_from_s = math.inf
        """Until when a trial, and the comparison, are put off: seconds that may be spent, and that were trained."""
        self._saves_workers = True
        """Fewer workers are tried before it settles first: later it may be a neighbour that makes them look enough."""
        self.is_confirmed = False
        self._told: LoaderConfig | None = None
        self._chosen: LoaderConfig | None = None
        self.gain: Gain | None = None
        """Of what it has settled on, where it was compared."""
        self.spending = Spending(training.traces)
        self.history: list[Event] = []
        self.beliefs: Beliefs | None = None
        self.is_settled = False

    @property
    def best(self) -> LoaderConfig:
        """The fastest observed in a block, until it has settled; then what it settled on."""
        if self.is_settled and self._chosen is not None:
            return self._chosen
        if self.is_settled or self.beliefs is None:
            return self._training.config
        return max(self.beliefs.log, key=lambda each: each.log_rate).config

    def look(self, now: float) -> float:
        """Think, if there is something to think about; returns when to be called again."""
        return now + next(self._steps)

    def _plan(self) -> Steps:
        while True:
            yield from self._settle()
            if (yield from self._has_shifted()):
                self._note("shift")
                self._base, self.beliefs, self.spending.gained_s = None, None, min(self.spending.gained_s, 0.0)
                self.gain = None
                self._saves_workers = self.is_confirmed = False

    def _settle(self) -> Generator[float, None, None]:
        self.is_settled, self._chosen = False, None
        while self.beliefs is None:
            cpu_s, begun, first = self._cpu_clock(), self._clock(), self._training.traces.end
            seen = yield from self._observe(self._training.config, Ask())
            if seen.measurement is not None:
                traces = self._training.traces.block(first)
                cores = _step_cores(traces, self._cpu_clock() - cpu_s, self._clock() - begun)
                self._begin(seen, min(float(self._job.usable_cores), cores))
        if not self._job.is_fixed:
            while self._training.awaits_proof:
                yield PROOF_S
                self._account()
            while (config := self._next(self.beliefs)) is not None:
                yield from self._observe(config, Ask(group=len(self.beliefs.log)))
            yield from self._decide(self.beliefs)
        self._settled()
        if not self._job.is_fixed:
            yield from self._compare(self.beliefs)

    def _settled(self) -> None:
        self.is_settled, self._chosen = True, self._training.config
        self._note("settled")

    def _compare(self, beliefs: Beliefs) -> Steps:
        """Blocks of what was asked for and of what it settled on, in turn, where that may be paid for: they tell the gain."""
        start, chosen = _as_trained(self._job.start, self._training), self._training.config
        is_known = self.gain is not None and self.gain.config.key() == chosen.key()
        if is_known or not self.is_confirmed or chosen.key() == start.key() or start.key() in self._training.failures:
            return
        price_s = ROUNDS * (self._price_s(start, beliefs) + self._price_s(chosen, beliefs))
        if price_s > min(ROUNDS_SHARE * self.spending.trained_s, self.spending.affordable_s):
            self._compare_from_s = price_s / ROUNDS_SHARE
            return
        self._compare_from_s = math.inf
        pairs = list[tuple[Evidence, Evidence]]()
        for _ in range(ROUNDS):
            before = yield from self._observe(start, Ask(phase="compare", group=len(beliefs.log)))
            after = yield from self._observe(chosen, Ask(phase="compare", group=len(beliefs.log)))
            if before.measurement is None or after.measurement is None:
                return
            pairs.append((before, after))
        self.gain = Gain.of(pairs)
        if self.gain.ratio.high < 1.0:
            self.gain = None
            yield from self._change_to(start)
            self._settled()

    def _begin(self, seen: Evidence, step_cores: float) -> None:
        measured = seen.measurement
        assert measured is not None
        job = self._job
        if len(job.step_threads) > 1:
            step_cores = _step_cores_alone(seen, job.usable_cores, step_cores)
        context = TwinContext(usable_cores=job.usable_cores, consumer_cores=step_cores, epoch_batches=job.epoch_batches)
        useful = useful_workers(job.usable_cores, [measured])
        space = self._space(useful if job.max_workers is None else min(useful, job.max_workers))
        if step_cores >= CORES_OF_A_SERIAL_STEP or self._training.config.consumer_threads is not None:
            space = replace(space, consumer_threads=job.step_threads)
        self.beliefs = Beliefs(space, context)
        self.beliefs.log.add(seen)
        self._base = measured.samples_per_s.value

    def _next(self, beliefs: Beliefs) -> LoaderConfig | None:
        """What to try next; None where nothing is worth it, or can be paid for."""
        self._unaffordable_s = math.inf
        failed = self._training.failures
        # A dataset that raises in one worker, and not here, raises in all.
        needs_loop = any(each.num_workers for each in failed) and not self._job.start.num_workers

        def may_run(config: LoaderConfig) -> bool:
            is_ruled_out = config.key() in failed or (needs_loop and config.num_workers > 0)
            return not is_ruled_out and self._training.may_run(config) and beliefs.feasible(config) is None

        for config in filter(may_run, self._proposals(beliefs)):
            price_s = self._price_s(config, beliefs)
            if price_s <= self.spending.affordable_s:
                return config
            self._unaffordable_s = min(self._unaffordable_s, price_s)
            if (less := self._halfway(config, beliefs, may_run)) is not None:
                return less
        return None

    def _halfway(
        self, config: LoaderConfig, beliefs: Beliefs, may_run: Callable[[LoaderConfig], bool]
    ) -> LoaderConfig | None:
        """As many workers on the way to this configuration as can be paid for: what they gain pays for more."""
        tried, most = {each.key for each in beliefs.log}, max(each.config.num_workers for each in beliefs.log)
        while (config := config.with_workers(config.num_workers // 2)).num_workers > most:
            is_new = config.key() not in tried and may_run(config)
            if is_new and self._price_s(config, beliefs) <= self.spending.affordable_s:
                return config
        return None

    def _proposals(self, beliefs: Beliefs) -> Generator[LoaderConfig, None, None]:
        seen = {each.key: each for each in beliefs.log}
        best = max(seen.values(), key=lambda each: each.log_rate)
        assert best.measurement is not None
        if self._job.first is not None and self._job.first.key() not in seen:
            yield self._job.first
        alone = self._job.start.with_workers(0).key()
        waiting = waiting_share(best.measurement)
        # Waiting bounds what a loader can gain, not what a step gains that is in its workers' way.
        may_gain = waiting / max(1.0 - waiting, 1e-9) >= LEAST_GAIN or len(beliefs.space.consumer_threads) > 1
        if may_gain:
            todo = explore(beliefs, Goal(tolerance=EXPLORE_TOLERANCE))
            if isinstance(todo, Explore) and todo.config is not None:
                yield todo.config
        if (
            alone not in seen
            and (may_gain or self._saves_workers)
            and _alone_s(best, self._job.usable_cores, beliefs.context.consumer_cores) <= _period_s(best)
        ):
            yield alone
        posterior = beliefs.posterior()
        if posterior is None:
            return
        choice, _ = choose(posterior, beliefs.space, TOLERANCE)
        saves = self._saves_workers and choice.num_workers < best.config.num_workers
        if choice.key() not in seen and (may_gain or saves):
            yield choice

    def _price_s(self, config: LoaderConfig, beliefs: Beliefs) -> float:
        """What a trial is expected to cost: the start, and a slower block."""
        log = self._training.traces
        took = [(start_s(log, change), change.config.num_workers) for change in log.changes[-LATEST_STARTS:]]
        starts = [seconds / workers for seconds, workers in took if seconds is not None and workers]
        worker_s = sum(starts) / len(starts) if starts else WORKER_START_S
        best = max(math.exp(each.log_rate) for each in beliefs.log)
        predicted = beliefs.predicted(config)
        slower = 0.5 if predicted is None else max(0.0, 1.0 - predicted / best)
        return config.num_workers * worker_s + slower * max(1.0, self._source.cost_s(config, Ask()))

    def _decide(self, beliefs: Beliefs) -> Steps:
        """Run what is believed to be the best of what was observed, once nothing that read better denies it."""
        choice = self._believed_best(beliefs)
        while (rival := denied_by(beliefs.log, choice)) is not None:
            if rival.again is None:
                choice = rival.config
                continue
            price_s = self._price_s(rival.again, beliefs)
            if price_s > self.spending.affordable_s:
                self._unaffordable_s = min(self._unaffordable_s, price_s)
                choice = rival.config if rival.is_faster else choice
                break
            yield from self._observe(rival.again, Ask(group=len(beliefs.log)))
            choice = self._believed_best(beliefs)
        yield from self._change_to(choice)

    def _believed_best(self, beliefs: Beliefs) -> LoaderConfig:
        posterior = beliefs.posterior()
        known = () if posterior is None else posterior.configs
        tried = [key for key in dict.fromkeys(each.key for each in beliefs.log) if key in known]
        if posterior is None or not tried:
            return self._job.start
        return choose(posterior.at(tried), beliefs.space, TOLERANCE)[0]

    def _observe(self, config: LoaderConfig, ask: Ask) -> Generator[float, None, Evidence]:
        """A block of this configuration; added to what is known."""
        self._source.begin(_as_trained(config, self._training), ask)
        pause_s = self._source.pause_s
        while True:
            yield pause_s
            begun = self._clock()
            seen = self._source.evidence()
            if seen is not None:
                break
            pause_s = (
                0.0 if not self._source.is_due() else max(self._source.pause_s, LEAST_SHARE * (self._clock() - begun))
            )
        self._account()
        if self.beliefs is not None:
            self.beliefs.log.add(seen)
        self._note("block", seen)
        return seen

    def _has_shifted(self) -> Generator[float, None, bool]:
        """Stays silent until the rate has shifted, or a trial that was put off can be paid for (False)."""
        test, first = ShiftTest(), self._training.traces.end
        config = self._training.config
        while True:
            yield WATCH_S
            self._account()
            if self._training.config.key() != config.key():  # lost workers
                return True
            end = self._training.traces.end
            traces = continuous(
                self._training.traces.block(max(first, end - MOST_LOOKED_AT)), self._training.traces.changes
            )
            if len(traces) < max(3, 3 * config.num_workers):
                continue
            first = end
            ends = [trace.step_end for trace in traces]
            round_ = min(max(1, config.num_workers), len(ends) // 2)  # workers deliver in waves
            seconds = (sum(ends[-round_:]) - sum(ends[:round_])) / round_
            samples = sum(trace.samples for trace in traces) / len(traces) * (len(traces) - round_)
            if test.add(math.log(samples / max(seconds, 1e-9))):
                return True
            is_new = not self.is_confirmed and test.blocks >= CONFIRMING_BLOCKS
            if is_new:
                self._confirm(config)
            may_compare = self._compare_from_s <= self.spending.trained_s
            if is_new or may_compare or self._unaffordable_s <= self.spending.affordable_s:
                return False

    def _confirm(self, config: LoaderConfig) -> None:
        """Queues may hide for longer than a block that too little is made: what runs on is looked at once more."""
        self.is_confirmed, self._saves_workers = True, False
        if self._job.is_fixed or self.beliefs is None:
            return
        end = self._training.traces.end
        seen = self._source.latest(config, end - MOST_LOOKED_AT)
        if seen is not None:
            self.beliefs.log.add(seen)
            self._note("block", seen)

    def _account(self) -> None:
        known = None if self.beliefs is None else max(math.exp(each.log_rate) for each in self.beliefs.log)
        self.spending.account(None if known is None else self._base, known if self.is_settled else None)

    def _change_to(self, config: LoaderConfig) -> Steps:
        if config.key() != self._training.config.key():
            self._source.settle(_as_trained(config, self._training))
            while not self._source.is_due():
                yield 0.0

    def _note(self, kind: str, seen: Evidence | None = None) -> None:
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
        if kind == "settled" and event.config.key() != self._told:
            self._told = event.config.key()
            self._on_change(event)


def _as_trained(config: LoaderConfig, training: Training) -> LoaderConfig:
    return replace(config, persistent_workers=training.config.persistent_workers and config.num_workers > 0)


def _step_cores(traces: Sequence[BatchTrace], cpu_s: float, wall_s: float) -> float:
    """Cores that the step keeps busy: what this process used meanwhile, without what fetching in it took."""
    fetching_s = sum(trace.cpu_s for trace in traces if trace.worker == MAIN_PROCESS)
    # Receiving keeps this process busy, too: where there is hardly a step it is all that does.
    stepping_s = sum(trace.step_s + trace.receive_s for trace in traces) or wall_s
    return max(0.05, (cpu_s - fetching_s) / max(stepping_s, 1e-9))


def _step_cores_alone(seen: Evidence, cores: int, step_cores: float) -> float:
    """Cores that the step would keep busy if workers left it all; crowded, it shows only its share of them.

    Args:
        seen: with workers, whose time is all held to be computing.
        cores: of this process.
        step_cores: as seen.
    """
    return min(float(cores), step_cores * (_at_work(seen) + cores) / cores)


def _alone_s(seen: Evidence, cores: int, step_cores: float) -> float:
    """Seconds of a batch without workers at best: without what handing it over costs, and what crowding does to fetch and step.

    Args:
        seen: with workers.
        cores: of this process.
        step_cores: that the step keeps busy; one that waits for a device is not crowded.
    """
    measured = seen.measurement
    assert measured is not None
    at_work = _at_work(seen)
    busy = at_work + max(1.0, step_cores)
    shared = min(1.0, at_work) if busy > cores / 2 else 0.0
    crowding = min(1.0, cores / busy) * (1.0 - (1.0 - SHARED_CORE) * shared)
    return crowding * _fetch_s(seen) + measured.step_s * (1.0 - (1.0 - crowding) * min(1.0, step_cores))


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
