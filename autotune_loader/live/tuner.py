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

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Evidence
from autotune_loader.decision.space import Space
from autotune_loader.live.blocks import ROUNDS, Block, Training, latest, measured, waiting_share
from autotune_loader.live.prospects import Job, Prospects, first_beliefs
from autotune_loader.live.ranks import Alone, Steps
from autotune_loader.live.shift import ShiftTest
from autotune_loader.live.spending import Spending
from autotune_loader.live.traces import step_cores
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.statistics import Interval

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
PROOF_S = 0.05
"""So often one asks whether workers are proven."""


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
            prospects = yield from self._begun()
            has_shifted = False
            while not has_shifted:
                if not self._job.is_fixed:
                    yield from self._explore(prospects)
                    yield from self._compare(prospects)
                self._settle(prospects)
                has_shifted = yield from self._keep(prospects)
            self._note("shift")
            self._chosen = self.beliefs = self.gain = self.spending.base = None
            self.is_confirmed = False
            self.spending.gained_s = min(self.spending.gained_s, 0.0)

    def _begun(self) -> Generator[float, None, Prospects]:
        """What a first block of what runs tells."""
        while True:
            before, first = (self._clock(), self._cpu_clock()), self._training.traces.end
            seen = yield from self._observe(self._training.config)
            if seen.measurement is not None:
                break
        log, now = self._training.traces, (self._clock(), self._cpu_clock())
        self.spending.base = seen.measurement.samples_per_s.value
        self.beliefs = first_beliefs(seen, step_cores(log.block(first), [before, now]), self._job, self._space, log)
        return Prospects(self._training, self._job, self.spending, self.beliefs, saves_workers=self._told is None)

    def _explore(self, prospects: Prospects) -> Steps:
        """Blocks of what is worth trying and can be paid for; then whatever is believed to be the best runs."""
        while not self._ranks.is_ready():
            yield PROOF_S
            self.spending.account()
        while (config := prospects.next()) is not None:
            yield from self._observe(config)
        yield from self._change_to(prospects.best())

    def _compare(self, prospects: Prospects) -> Steps:
        """What was chosen and what was asked for, in turn, where that may be paid for; the faster one is kept."""
        choice, start = self._training.config, self._job.start
        is_known = self.gain is not None and self.gain.config.key() == choice.key()
        if is_known or choice.key() == start.key() or start.key() in self._training.failures:
            return
        price_s = PAIRS * (prospects.price_s(start) + prospects.price_s(choice))
        if not prospects.expects_gain(choice) or not prospects.may_spend(
            price_s, PAIRS_SHARE * self.spending.trained_s
        ):
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

    def _keep(self, prospects: Prospects) -> Generator[float, None, bool]:
        """Stays silent until the rate has shifted (True), or there may be something new to try."""
        log, config, test = self._training.traces, self._training.config, ShiftTest()
        first, begun_s = log.end, self.spending.trained_s
        while (self.is_confirmed and not prospects.is_put_off) or self.spending.trained_s < begun_s + AGAIN_S:
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
            served = [change.serves_from for change in log.changes if change.reason != "epoch"]
            traces = latest(log, max(served[-1:], default=0))
            if len(traces) >= max(3, ROUNDS * config.num_workers):
                self._add(Evidence(config=config, outcome=measured(traces, config.num_workers, self._training.shape)))
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
        self._add(seen)
        return seen

    def _add(self, seen: Evidence) -> None:
        if self.beliefs is not None:
            self.beliefs.log.add(seen)
        self._note("block", seen)

    def _change_to(self, config: LoaderConfig) -> Steps:
        if config.key() != self._training.config.key():
            yield from self._ranks.change_to(self._as_asked(config))

    def _as_asked(self, config: LoaderConfig) -> LoaderConfig:
        """Workers live as long as was asked for."""
        return replace(config, persistent_workers=self._job.start.persistent_workers and config.num_workers > 0)

    def _settle(self, prospects: Prospects) -> None:
        config = self._chosen = self._training.config
        prospects.saves_workers = False
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
