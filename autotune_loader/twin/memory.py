"""Memory of configurations that were not run: what each worker was measured to take, and the batches in flight."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement

# What a worker takes before it has loaded anything, where bursts with one number of workers alone cannot tell.
UNSEEN_WORKER_BYTES = 60 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """Peak of the summed proportional set sizes (PSS) of a training process and its workers, in bytes.

    base + workers * worker + in flight * batch, where a queue may fill up to workers * prefetch_factor + 1 batches.
    """

    base_bytes: float
    worker_bytes: float | None
    """Of one more worker; None where too few numbers of workers were run to know."""
    batch_bytes: Mapping[int | None, int]
    """Of one batch, by `LoaderConfig.batch_size`; None is the workload's own size."""

    @classmethod
    def fit(cls, bursts: Iterable[tuple[LoaderConfig, Measurement]]) -> MemoryModel | None:
        """The model of these bursts; None where none tells its memory.

        The slope is the median of those between bursts (Sen 1968), so that one burst beside a growing neighbour does
        not turn it.
        """
        seen = [
            (config, float(burst.memory.taken_bytes), burst.batch_bytes)
            for config, burst in bursts
            if burst.memory is not None
        ]
        if not seen:
            return None
        # Bursts without workers share nothing with anybody and tell little of those with.
        chosen = [each for each in seen if each[0].num_workers] or seen
        rest = [(config.num_workers, taken - config.batches_in_flight * size) for config, taken, size in chosen]
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(rest, 2) if a[0] != b[0]]
        slope = statistics.median(slopes) if slopes else None
        worker = slope if slope is not None and slope > 0 else None
        each = UNSEEN_WORKER_BYTES if worker is None else worker
        base = statistics.median(taken - workers * each for workers, taken in rest)
        sizes: dict[int | None, list[int]] = {}
        for config, _, size in seen:
            sizes.setdefault(config.batch_size, []).append(size)
        typical = {size: round(statistics.median(each)) for size, each in sizes.items()}
        return cls(base_bytes=max(0.0, base), worker_bytes=worker, batch_bytes=typical)

    def peak_bytes(self, config: LoaderConfig) -> int:
        """Peak PSS that is expected of a configuration, with its queue as full as it may get."""
        each = UNSEEN_WORKER_BYTES if self.worker_bytes is None else self.worker_bytes
        in_flight = config.batches_in_flight * self.batch_bytes_of(config)
        return round(self.base_bytes + config.num_workers * each + in_flight)

    def batch_bytes_of(self, config: LoaderConfig) -> int:
        """Of one batch of this configuration's size; of the largest that is known where its own is not."""
        known = self.batch_bytes
        return known.get(config.batch_size, known.get(None, max(known.values())))
