"""What is worth trying, and what that would cost: the policy of `decision`, for a training run that goes on meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autotune_loader.decision.belief import CORES_OF_A_SERIAL_STEP, Beliefs
from autotune_loader.decision.evidence import Evidence
from autotune_loader.decision.policy import Explore, Goal, explore
from autotune_loader.decision.selection import choose
from autotune_loader.decision.space import Space, least, useful_workers
from autotune_loader.live.blocks import Training, waiting_share
from autotune_loader.live.spending import Spending
from autotune_loader.live.traces import LiveTraces, start_s
from autotune_loader.machine.facts import start_method
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement

LEAST_GAIN = 0.01
"""A loop that could gain less than this is left alone."""
TOLERANCE = 0.02
"""Relative difference that counts as equally fast."""
EXPLORE_TOLERANCE = 0.025
"""The same for exploring, which ends where no block is expected to gain 0.4 times as much: `LEAST_GAIN`."""
SHARED_CORE = 0.6
"""What a core does beside a busy worker, of what it does alone; an optimist's guess."""
LATEST_STARTS = 16
"""Starts that tell what the next one costs."""
WORKER_START_S = 0.02
"""What forking a worker holds up the loop, until this loader's own starts tell ..."""
WORKER_IMPORT_S = 3.0
"""... and one that imports torch first."""


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


class Prospects:
    """Of one loader, from its first block on.

    Args:
        training: what is observed.
        job: the loader.
        spending: its account.
        beliefs: what the blocks so far say.
        saves_workers: whether fewer workers are tried where the loop hardly waits; not once it has settled, as later it may be
            a neighbour that makes them look enough.
    """

    def __init__(
        self, training: Training, job: Job, spending: Spending, beliefs: Beliefs, *, saves_workers: bool = True
    ) -> None:
        self._training, self._job, self._spending = training, job, spending
        self.beliefs, self.saves_workers = beliefs, saves_workers
        self.is_put_off = False
        """Whether there is something that could not be paid for."""

    def next(self) -> LoaderConfig | None:
        """What to try next; None where nothing is worth it, or can be paid for."""
        beliefs, failed = self.beliefs, self._training.failures
        tried, most = {each.key for each in beliefs.log}, max(each.config.num_workers for each in beliefs.log)
        # A dataset that raises in one worker, and not here, raises in all.
        needs_loop = any(each.num_workers for each in failed) and not self._job.start.num_workers
        self.is_put_off = False
        for config in self._proposals():
            is_ruled_out = config.key() in failed or (needs_loop and config.num_workers > 0)
            if config.key() in tried or is_ruled_out or not self._training.may_run(config) or beliefs.feasible(config):
                continue
            while not self.may_spend(self.price_s(config)):
                if config.num_workers // 2 <= most:
                    break
                config = config.with_workers(config.num_workers // 2)  # what fewer workers gain pays for more
            else:
                return config
        return None

    def _proposals(self) -> Iterator[LoaderConfig]:
        beliefs, latest = self.beliefs, {each.key: each for each in self.beliefs.log}
        best = max(latest.values(), key=lambda each: each.log_rate)
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
        if (may_gain or self.saves_workers) and alone_s <= _period_s(best):
            yield self._job.start.with_workers(0).key()
        posterior = beliefs.posterior()
        if posterior is None:
            return
        choice, _ = choose(posterior, beliefs.space, TOLERANCE)
        if may_gain or (self.saves_workers and choice.num_workers < best.config.num_workers):
            yield choice

    def best(self) -> LoaderConfig:
        """What is believed to be the best of what was observed."""
        tried = self.beliefs.of_tried()
        return self._job.start if tried is None else choose(tried, self.beliefs.space, TOLERANCE)[0]

    def expects_gain(self, choice: LoaderConfig) -> bool:
        """Whether the choice is believed to be faster than what was asked for, and not only cheaper."""
        posterior, keys = self.beliefs.posterior(), [choice.key(), self._job.start.key()]
        if posterior is None or not {*keys} <= {*posterior.configs}:
            return True
        gain, _ = posterior.ratio(*map(posterior.configs.index, keys))
        return gain >= LEAST_GAIN

    def price_s(self, config: LoaderConfig) -> float:
        """What a trial is expected to cost: the start, and a slower block."""
        blocks = [each for each in self.beliefs.log if each.measurement is not None]
        predicted, best = self.beliefs.predicted(config), max(math.exp(each.log_rate) for each in blocks)
        slower = 0.5 if predicted is None else max(0.0, 1.0 - predicted / best)
        longest_s = max(each.measurement.window_s for each in blocks if each.measurement is not None)
        return config.num_workers * worker_start_s(self._training.traces, self._job) + slower * max(1.0, longest_s)

    def may_spend(self, price_s: float, most_s: float = math.inf) -> bool:
        """Whether so much may be spent now; else it is put off."""
        is_paid_for = price_s <= min(self._spending.affordable_s, most_s)
        self.is_put_off |= not is_paid_for
        return is_paid_for


def first_beliefs(seen: Evidence, cores: float, job: Job, space: Callable[[int], Space], log: LiveTraces) -> Beliefs:
    """What a first block tells.

    Args:
        seen: the block.
        cores: that the step kept busy meanwhile.
        job: the loader.
        space: the legal configurations, given the most workers that could help.
        log: of its batches.
    """
    measured = seen.measurement
    assert measured is not None
    if len(job.step_threads) > 1:  # beside workers it shows only its share of the cores
        cores *= (_at_work(seen) + job.usable_cores) / job.usable_cores
    cores = min(float(job.usable_cores), cores)
    useful, worth = useful_workers(job.usable_cores, [measured]), _worth_starting(measured, job, log)
    legal = space(least(useful, worth, job.max_workers) or 0)
    if worth is not None and worth < useful:
        legal = replace(legal, workers_are_capped=True)
    if cores >= CORES_OF_A_SERIAL_STEP or seen.config.consumer_threads is not None:
        legal = replace(legal, consumer_threads=job.step_threads)
    context = TwinContext(usable_cores=job.usable_cores, consumer_cores=cores, epoch_batches=job.epoch_batches)
    beliefs = Beliefs(legal, context)
    beliefs.log.add(seen)
    return beliefs


def _worth_starting(measured: Measurement, job: Job, log: LiveTraces) -> int | None:
    """Most workers that an epoch is worth, where each epoch starts its own; None where that is no bound.

    With W workers fetching an epoch takes E / W seconds and starting them W * s, whose sum is least at W = sqrt(E / s). Where
    starting one takes longer than all fetches, none is worth it.
    """
    if job.epoch_batches is None or job.start.persistent_workers:
        return None
    starts = job.epoch_batches * measured.service_s / worker_start_s(log, job)
    return math.ceil(math.sqrt(starts)) if starts > 1 else 0


def worker_start_s(log: LiveTraces, job: Job) -> float:
    """Seconds for which starting a worker holds up the loop."""
    took = [(start_s(log, change), change.config.num_workers) for change in log.changes[-LATEST_STARTS:]]
    starts = [seconds / workers for seconds, workers in took if seconds is not None and workers]
    if starts:
        return max(sum(starts) / len(starts), 1e-6)
    method = job.start.multiprocessing_context or start_method()
    return WORKER_START_S if method == "fork" else WORKER_IMPORT_S


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
