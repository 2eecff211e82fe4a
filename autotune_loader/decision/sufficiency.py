"""Workers that are enough for the training loop: with more of them, and all else equal, no rate is higher.

Two bursts differ by whatever the machine does meanwhile, and that hides a few percent of their rates. Within one burst workers
and loop have the same machine: how much more the workers could deliver than the loop takes, the headroom
workers x (receipt + step) / service, hardly depends on it. A loop that need not wait is no slower than one with more workers,
because these can only take cores from its step; a burst that says otherwise was lucky. What more workers can hide is the
travelling of a batch, so that the receipt that counts is the quickest that any burst shows, in steps of that same burst: in
seconds it would be that of the luckiest burst. Where the workers that are enough hand over more slowly than others did, more
of them may be faster, though: who fetches a batch has to wait for a thread of a worker whose interpreter is busy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.twin.observation import Observation
from autotune_loader.twin.queue import Floats
from autotune_loader.twin.contention import sampling_variance
from autotune_loader.twin.stages import loop_s
from autotune_loader.values.config import LoaderConfig

READING_SD = 0.02
"""Relative error of a headroom that no number of batches takes away."""
NEARLY_SUFFICIENT = 0.9
"""Workers that have less headroom are no help in telling how fast more of them are."""
SURE = 2.0
"""Standard deviations of bad luck with which workers must still be enough before no other need be measured."""
MOST_LOST = 0.999
"""Of the rate; a loss of all of it would have no logarithm."""
RECEIPT_SCATTER = 1.25
"""Receipts that take this many times as long as the quickest, in steps, may be no slower but by chance."""
WorkerSetup = tuple[int, bool, int | None, int]
"""What decides whether workers suffice, prefetch apart: workers, pinning, the step's threads, device prefetch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sufficiency:
    """Whether the workers of some configurations keep up with the loop: one value per configuration."""

    log_headroom: Floats
    """Logarithm of the headroom; -inf where no burst had these workers."""
    headroom_sd: Floats
    """Standard deviation of that logarithm."""
    least_loss: Floats
    """Share of the loop's time that is lost even where the headroom says that none is, for the larger of two reasons. Service
    times vary, so that the loop waits now and then, as the twin says. Or these workers hand
    batches over more slowly than any others did, luck apart."""
    larger: tuple[tuple[int, ...], ...]
    """Positions of the configurations with as many workers or more, and all else equal but the prefetch."""

    @classmethod
    def of(
        cls,
        configs: Sequence[LoaderConfig],
        observations: Sequence[Observation],
        use: Sequence[float],
    ) -> Sufficiency:
        """What the bursts show.

        Args:
            configs: the configurations.
            observations: all bursts.
            use: share of the time in which the consumer of each configuration works, as the twin says.
        """
        bursts = _by_worker_setup(observations)
        known = {setup: _headroom(each) for setup, each in bursts.items()}
        slow = {setup: _slow_receipt(each) for setup, each in bursts.items()}
        setups = [_worker_setup(config) for config in configs]
        headrooms = [known.get(setup, (-math.inf, 0.0)) for setup in setups]
        alike: dict[LoaderConfig, list[int]] = defaultdict(list)
        kinds = [_apart_from_worker_setup(config) for config in configs]
        for position, kind in enumerate(kinds):
            alike[kind].append(position)
        return cls(
            log_headroom=np.array([mean for mean, _ in headrooms]),
            headroom_sd=np.array([sd for _, sd in headrooms]),
            least_loss=np.maximum(1.0 - np.array(use), [slow.get(setup, 0.0) for setup in setups]),
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
            larger=tuple(tuple(new[other] for other in self.larger[old] if other in new) for old in where),
        )

    def extended(self, count: int) -> Sufficiency:
        """The same, and this many configurations more of which nothing was seen."""
        return Sufficiency(
            log_headroom=np.concatenate([self.log_headroom, np.full(count, -np.inf)]),
            headroom_sd=np.concatenate([self.headroom_sd, np.zeros(count)]),
            least_loss=np.concatenate([self.least_loss, np.ones(count)]),
            larger=self.larger + ((),) * count,
        )

    def sufficient(self) -> list[int]:
        """Positions of the configurations whose workers are enough, or nearly so."""
        nearly = np.flatnonzero(self.log_headroom > math.log(NEARLY_SUFFICIENT))
        return [int(each) for each in nearly if self.larger[each]]

    def floor(self, paths: Floats, sufficient: Iterable[int]) -> Floats:
        """What those with sufficient workers are at least, in each path as fast as any with more workers; -inf for all others.

        Always with the same draws of how far the headroom was misread, so that answers repeat.

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

    def _shortfall(self, position: int, luck: Floats | float) -> Floats:
        """What a configuration loses at most against those with more workers, by so much luck (standard normal)."""
        headroom = np.exp(self.log_headroom[position] + self.headroom_sd[position] * np.asarray(luck))
        short: Floats = np.clip(np.maximum(1.0 - headroom, self.least_loss[position]), 0.0, MOST_LOST)
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


def _step_s(seen: Observation) -> float:
    return max(float(seen.step_s.mean()), 1e-12)


def _receipt(seen: Observation) -> float:
    """In steps."""
    return float(seen.receive_s.mean()) / _step_s(seen)


def _consumer_s(seen: Observation, receipt: float) -> float:
    """Seconds of the loop for each batch with a receipt of this many steps, were it never to wait."""
    return _step_s(seen) * float(loop_s(receipt, 1.0, seen.device_prefetch))
