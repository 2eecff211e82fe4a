"""Workers that are enough, for the training loop or for the cores: with more of them, and all else equal, no rate is higher.

Two bursts differ by whatever the machine does meanwhile, and that hides a few percent of their rates. Within one burst workers
and loop have the same machine: how much more the workers could deliver than the loop takes, the headroom
workers x (receipt + step) / service, hardly depends on it. A loop that need not wait is no slower than one with more workers,
because these can only take cores from its step; a burst that says otherwise was lucky. What more workers can hide is the
travelling of a batch, so that the receipt that counts is the quickest that any burst shows, in steps of that same burst: in
seconds it would be that of the luckiest burst. Where the workers that are enough hand over more slowly than others did, more
of them may be faster, though: who fetches a batch has to wait for a thread of a worker whose interpreter is busy.

Workers that compute on all cores are enough, too, even where the loop waits for them: more of them would wait for a core. How
many that takes is known from the waiting of a single one (`free_share`), unless the step wants the same cores.

A worker computes, on cores that it shares fairly with the others, then it waits (storage, network, sleep), and begins the
next batch. That is the machine repairman's queue: workers are the machines, cores the repairmen. What is taken depends on the
mean waiting over the mean computing alone, and not on how either varies (F. Baskett, K. Chandy, R. Muntz and F. Palacios,
1975: processor sharing). What does depend on it is how long workers wait for their turn where batches go in order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.twin.observation import Observation
from autotune_loader.twin.queue import Floats
from autotune_loader.twin.smoothing import relative_variance, sampling_variance
from autotune_loader.twin.stages import loop_s
from autotune_loader.values.config import LoaderConfig

READING_SD = 0.02
"""Relative error of a headroom that no number of batches takes away."""
NEARLY_SUFFICIENT = 0.9
"""Workers that have less headroom, and take less of the cores' time, are no help in telling how fast more of them are."""
SURE = 2.0
"""Standard deviations of bad luck with which workers must still be enough before no other need be measured."""
MOST_LOST = 0.999
RECEIPT_SCATTER = 1.25
"""Receipts that take this many times as long as the quickest, in steps, may be no slower but by chance."""
SEEN_ENOUGH = 0.03
"""Relative error of the mean service time from which on bursts may lack the rare slow batches that the loop waits for."""
WorkerSetup = tuple[int, bool, int | None, int]
"""What decides whether workers suffice, prefetch apart: workers, pinning, the step's threads, device prefetch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sufficiency:
    """How well the workers of some configurations feed the loop, and fill the cores: one value per configuration."""

    log_headroom: Floats
    """Logarithm of the headroom; -inf where no burst had these workers."""
    headroom_sd: Floats
    """Standard deviation of that logarithm."""
    least_loss: Floats
    """Share of the loop's time that is lost even where the headroom says that none is, for the larger of two reasons. Service
    times vary, so that the loop waits now and then: as the twin says, or less where bursts showed less. Or these workers hand
    batches over more slowly than any others did, luck apart."""
    free: Floats
    """Share of the cores' time that the workers leave free, so that more of them may take it; 1 where that is unknown."""
    free_sd: Floats
    """Standard deviation of that share."""
    larger: tuple[tuple[int, ...], ...]
    """Positions of the configurations with as many workers or more, and all else equal but the prefetch."""

    @classmethod
    def of(
        cls,
        configs: Sequence[LoaderConfig],
        observations: Sequence[Observation],
        use: Sequence[float],
        cores: float | None = None,
    ) -> Sufficiency:
        """What the bursts show.

        Args:
            configs: the configurations.
            observations: all bursts.
            use: share of the time in which the consumer of each configuration works, as the twin says.
            cores: that the workers have for themselves; None where the step computes on them, too.
        """
        bursts = _by_worker_setup(observations)
        known = {setup: _headroom(each) for setup, each in bursts.items()}
        slow = {setup: _slow_receipt(each) for setup, each in bursts.items()}
        setups = [_worker_setup(config) for config in configs]
        headrooms = [known.get(setup, (-math.inf, 0.0)) for setup in setups]
        waiting = [_waiting(bursts.get(setup, ()), config) for setup, config in zip(setups, configs, strict=True)]
        free, free_sd = free_share(configs, observations, cores)
        alike: dict[LoaderConfig, list[int]] = defaultdict(list)
        kinds = [_apart_from_worker_setup(config) for config in configs]
        for position, kind in enumerate(kinds):
            alike[kind].append(position)
        return cls(
            log_headroom=np.array([mean for mean, _ in headrooms]),
            headroom_sd=np.array([sd for _, sd in headrooms]),
            least_loss=np.maximum(np.minimum(1.0 - np.array(use), waiting), [slow.get(setup, 0.0) for setup in setups]),
            free=free,
            free_sd=free_sd,
            larger=tuple(
                tuple(
                    other
                    for other in alike[kind]
                    if other != position and configs[other].num_workers >= configs[position].num_workers
                )
                for position, kind in enumerate(kinds)
            ),
        )

    def at(self, positions: Sequence[int]) -> Sufficiency:
        """The same of some of the configurations only."""
        where = list(positions)
        new = {old: position for position, old in enumerate(where)}
        return Sufficiency(
            log_headroom=self.log_headroom[where],
            headroom_sd=self.headroom_sd[where],
            least_loss=self.least_loss[where],
            free=self.free[where],
            free_sd=self.free_sd[where],
            larger=tuple(tuple(new[other] for other in self.larger[old] if other in new) for old in where),
        )

    def extended(self, count: int) -> Sufficiency:
        """The same, and this many configurations more of which nothing was seen."""
        return Sufficiency(
            log_headroom=np.concatenate([self.log_headroom, np.full(count, -np.inf)]),
            headroom_sd=np.concatenate([self.headroom_sd, np.zeros(count)]),
            least_loss=np.concatenate([self.least_loss, np.ones(count)]),
            free=np.concatenate([self.free, np.ones(count)]),
            free_sd=np.concatenate([self.free_sd, np.zeros(count)]),
            larger=self.larger + ((),) * count,
        )

    def sufficient(self) -> list[int]:
        """Positions of the configurations whose workers are enough, or nearly so."""
        nearly = (self.log_headroom > math.log(NEARLY_SUFFICIENT)) | (self.free < 1.0 - NEARLY_SUFFICIENT)
        return [int(each) for each in np.flatnonzero(nearly) if self.larger[each]]

    def floor(self, paths: Floats, sufficient: Iterable[int]) -> Floats:
        """What those with sufficient workers are at least, in each path as fast as any with more workers; -inf for all others.

        Always with the same draws of how far headroom and free cores were misread, so that answers repeat.

        Args:
            paths: logarithms of rates as they may be, shape (paths, configurations).
            sufficient: positions, some of `sufficient()`.
        """
        floor: Floats = np.full_like(paths, -np.inf)
        luck = np.random.default_rng(1).standard_normal(len(paths))
        for each in sufficient:
            floor[:, each] = paths[:, list(self.larger[each])].max(axis=1) + np.log1p(-self._shortfall(each, luck))
        return floor

    def is_as_fast(self, position: int, other: int, tolerance: float) -> bool:
        """Whether the workers at `position` are surely enough, so that `other`, which has more, is not faster."""
        return other in self.larger[position] and float(self._shortfall(position, -SURE)) <= tolerance

    def is_starving(self, position: int, other: int, tolerance: float) -> bool:
        """Whether the workers at `position` are too few, so that `other`, which has more, may well be faster."""
        return other in self.larger[position] and float(self._shortfall(position, 0.0)) > tolerance

    def _shortfall(self, position: int, luck: Floats | float) -> Floats:
        """What a configuration loses at most against those with more workers, by so much luck (standard normal)."""
        headroom = np.exp(self.log_headroom[position] + self.headroom_sd[position] * np.asarray(luck))
        of_loop = np.maximum(1.0 - headroom, self.least_loss[position])
        of_cores = self.free[position] - self.free_sd[position] * np.asarray(luck)
        short: Floats = np.clip(np.minimum(of_loop, of_cores), 0.0, MOST_LOST)
        return short


def _worker_setup(of: LoaderConfig | Observation) -> WorkerSetup:
    return (of.num_workers, of.pin_memory, of.consumer_threads, of.device_prefetch)


def _apart_from_worker_setup(config: LoaderConfig) -> LoaderConfig:
    """What must be equal where only workers and their queues differ."""
    if not config.num_workers:
        return config
    return replace(config, num_workers=1, prefetch_factor=1, persistent_workers=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Burst:
    """A burst with workers, and what the others tell of it."""

    seen: Observation
    service_variance: float
    """Relative, of the mean service time."""
    quickest_receipt: float
    """Of all bursts that hand over alike, in steps."""
    consumer_s: float
    """Seconds of the loop for each batch, were it never to wait: with that receipt."""


def _by_worker_setup(observations: Sequence[Observation]) -> dict[WorkerSetup, list[_Burst]]:
    # By all of the setup but the number of workers: the quickest receipt, in steps.
    receipts: dict[tuple[object, ...], float] = defaultdict(lambda: math.inf)
    for seen in observations:
        if seen.num_workers:
            handing = _worker_setup(seen)[1:]
            receipts[handing] = min(receipts[handing], _receipt(seen))
    bursts: dict[WorkerSetup, list[_Burst]] = defaultdict(list)
    for seen, variance in zip(observations, sampling_variance(observations), strict=True):
        if seen.num_workers:
            setup = _worker_setup(seen)
            quickest = receipts[setup[1:]]
            bursts[setup].append(_Burst(seen, float(variance), quickest, _consumer_s(seen, quickest)))
    return bursts


def _headroom(bursts: Sequence[_Burst]) -> tuple[float, float]:
    """Logarithm of the headroom in bursts of the same workers, one or more, and its standard deviation."""
    logs, variances = zip(*map(_headroom_of, bursts), strict=True)
    weights = 1 / np.array(variances)
    return float(weights @ np.array(logs) / weights.sum()), math.hypot(1 / math.sqrt(weights.sum()), READING_SD)


def _headroom_of(burst: _Burst) -> tuple[float, float]:
    seen = burst.seen
    service_s = max(float(seen.service_s.mean()), 1e-12)
    variance = burst.service_variance + float((seen.step_s / burst.consumer_s).var()) / len(seen.step_s)
    return math.log(seen.num_workers * burst.consumer_s / service_s), variance + READING_SD**2


def _slow_receipt(bursts: Sequence[_Burst]) -> float:
    """Share of the loop's time that quicker receipts would save in bursts of the same workers, one or more."""
    best = min(bursts, key=lambda burst: _receipt(burst.seen))
    saved_s = _consumer_s(best.seen, RECEIPT_SCATTER * best.quickest_receipt)
    return max(0.0, 1.0 - saved_s / _consumer_s(best.seen, _receipt(best.seen)))


def _waiting(bursts: Sequence[_Burst], config: LoaderConfig) -> float:
    """Share of the time in which the loop waited in bursts with queues no deeper than these; 1 where they saw too little."""
    depth = config.prefetch_factor or 1
    # A mean without its batches does not tell how these varied.
    told = [each for each in bursts if each.seen.prefetch_factor <= depth and len(each.seen.service_s) > 1]
    if sum(1 / max(each.service_variance, 1e-12) for each in told) < 1 / SEEN_ENOUGH**2:
        return 1.0
    return float(np.mean([max(0.0, 1.0 - each.seen.batches_per_s * each.consumer_s) for each in told]))


def _step_s(seen: Observation) -> float:
    return max(float(seen.step_s.mean()), 1e-12)


def _receipt(seen: Observation) -> float:
    """In steps."""
    return float(seen.receive_s.mean()) / _step_s(seen)


def _consumer_s(seen: Observation, receipt: float) -> float:
    """Seconds of the loop for each batch with a receipt of this many steps, were it never to wait."""
    return _step_s(seen) * float(loop_s(receipt, 1.0, seen.device_prefetch))


TURN_LOSS = 0.63
"""While they wait for their turn workers lose TURN_LOSS ln(workers) variation^2 / prefetch of their time: to a third what event
simulations of 4 to 48 workers on as many cores lose (variation 0.5, prefetch 2 and 8; tests/decision/test_saturation.py)."""
MOST_TURN_LOSS = 0.9
"""Where batches vary beyond what the formula is for."""
WAITING_SD = 0.02
"""Error of what a worker waits, in its computing, that no number of batches takes away."""


def free_share(
    configs: Sequence[LoaderConfig], observations: Sequence[Observation], cores: float | None
) -> tuple[Floats, Floats]:
    """Share of the cores' time that the workers of each configuration leave free, and its standard deviation.

    Args:
        configs: the configurations.
        observations: the bursts, which tell what workers compute and wait.
        cores: that the workers have for themselves; None where that is unknown, and then all counts as free.
    """
    bursts = [seen for seen in observations if seen.num_workers]
    if cores is None or not bursts:
        return np.ones(len(configs)), np.zeros(len(configs))
    # What computing takes shows where the fewest are at work: no other is in the caches.
    alone = min(bursts, key=lambda seen: seen.workers_at_work)
    variance = relative_variance(bursts)
    # All else is waiting, but among many workers for a core, too, and at first for cold files: the least is what must be.
    waited_s = min(float(seen.service_s.mean() - seen.cpu_s.mean()) for seen in bursts)
    waiting = max(0.0, waited_s) / max(float(alone.cpu_s.mean()), 1e-12)
    waiting_sd = math.hypot(WAITING_SD, waiting * math.sqrt(variance / len(alone.service_s)))
    workers = np.array([config.num_workers for config in configs], dtype=np.float64)
    prefetch = np.array([config.prefetch_factor or 1 for config in configs], dtype=np.float64)
    in_order = np.array([config.in_order for config in configs])
    at_work = np.where(in_order, at_their_turn(workers, prefetch, math.sqrt(variance)), workers)
    taken = taken_share(at_work, cores, waiting)
    return 1.0 - taken, taken - taken_share(at_work, cores, waiting + waiting_sd)


def taken_share(workers: Floats, cores: float, waiting: float) -> Floats:
    """Share of the cores' time that this many workers take, from 0 to 1.

    Args:
        workers: how many there are, shape (n,); parts of a worker count in proportion.
        cores: usable cores.
        waiting: seconds in which a worker waits, over those for which it needs a core.
    """
    whole = np.arange(math.ceil(workers.max(initial=0.0)) + 1)
    share: Floats = np.interp(workers, whole, [_taken_by(int(count), cores, waiting) for count in whole])
    return share


def at_their_turn(workers: Floats, prefetch: Floats, variation: float) -> Floats:
    """How many workers do the work of these, who wait for their turn now and then because batches are handed over in order.

    Args:
        workers: how many there are, shape (n,).
        prefetch: batches that each is handed ahead, shape (n,).
        variation: of the service times, standard deviation over mean.
    """
    lost = np.minimum(TURN_LOSS * np.log(np.maximum(workers, 1.0)) * variation**2 / prefetch, MOST_TURN_LOSS)
    left: Floats = workers * (1.0 - lost)
    return left


def _taken_by(workers: int, cores: float, waiting: float) -> float:
    if waiting <= 0:
        return min(1.0, workers / cores)
    at_core = np.arange(workers + 1)
    # Ways to choose who is there, each weighted by how long its computing takes against waiting, on as many cores as there are.
    steps = np.log(workers - at_core[:-1]) - np.log(waiting) - np.log(np.minimum(at_core[1:], cores))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    probability = np.exp(logs - logs.max())
    return float(np.minimum(at_core, cores) @ probability / probability.sum() / cores)
