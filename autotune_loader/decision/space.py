"""Every configuration that is legal for this workload on this machine, and why the others are not.

The space is conditional (no prefetch_factor without workers) and machine-aware (no pinning without an accelerator, as many
workers as could possibly help). What does not fit into shared memory, descriptors or memory is vetoed by arithmetic before
it is tried: `(workers * prefetch + 1) * batch_bytes` of shared memory was found to be exact.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune_loader.values.config import WITHOUT_WORKERS, LoaderConfig
from autotune_loader.values.measurement import Failure, FailureKind, Measurement

PREFETCH_FACTORS = (1, 2, 4, 8)  # the deeper a queue, the less one more batch in it changes
# Room beyond the workers that fill the cores: while some wait for their turn, others compute, and on few cores more processes
# get more of the time that the step would take.
FILLING_ROOM, MORE_WORKERS = 1.5, 2
# Room beyond the workers that keep the step busy, for slow batches.
FEEDING_ROOM = 2.5
# More than this many worker processes on one rank has never been shown to help, and starting them takes seconds.
MAX_WORKERS = 64
# Workers are kept between epochs where starting them anew would take more than this share of an epoch.
STARTUP_WORTH_AVOIDING = 0.005
# Share of /dev/shm, descriptors and memory that a configuration may plan to use.
SAFE_SHARE = 0.9
# Interpreter, torch and a forked dataset that is not touched: what one more worker costs before it has loaded anything.
WORKER_BASE_BYTES = 60 << 20
# Knobs that the twin knows nothing of, with their axes: tried as variants of the best instead.
UNMODELLED = {
    "batch_size": "batch_sizes",
    "drop_last": "drop_lasts",
    "in_order": "in_order",
    "sharing_strategy": "sharing_strategies",
    "multiprocessing_context": "multiprocessing_contexts",
}
# Descriptors that the process needs apart from the batches in flight.
RESERVED_DESCRIPTORS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a configuration may use of this machine; None means unlimited or unknown."""

    shm_bytes: int | None = None
    memory_bytes: int | None = None
    descriptors: int | None = None
    device_bytes: int | None = None
    """Memory of the accelerator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What one batch takes while it travels."""

    bytes: int = 0
    tensors: int = 0
    samples: int | None = None
    """Samples in it, so that a batch of another size can be scaled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The legal values of every knob; a knob with one value is not searched."""

    max_workers: int
    workers_are_capped: bool = False
    """Whether more than `max_workers` would be wrong, not just useless: shards, repeated samples, data on a GPU."""
    prefetch_factors: tuple[int, ...] = PREFETCH_FACTORS
    pin_memory: tuple[bool, ...] = (False,)
    persistent_workers: bool = False
    """Whether workers may be kept between epochs: the dataset is not told its epoch, and an epoch has an end."""
    in_order: tuple[bool, ...] = (True,)
    multiprocessing_contexts: tuple[str | None, ...] = (None,)
    sharing_strategies: tuple[str | None, ...] = (None,)
    consumer_threads: tuple[int | None, ...] = (None,)
    device_prefetch: tuple[int, ...] = (0,)
    batch_sizes: tuple[int | None, ...] = (None,)
    drop_lasts: tuple[bool | None, ...] = (None,)
    limits: Limits = Limits()
    batch: BatchCost = BatchCost()

    def worker_counts(self) -> tuple[int, ...]:
        """All of 0..8, then steps of about an eighth: finer than any measurable difference."""
        counts = [0]
        while counts[-1] < self.max_workers:
            counts.append(min(counts[-1] + max(1, counts[-1] // 8), self.max_workers))
        return tuple(counts)

    def configs(self) -> tuple[LoaderConfig, ...]:
        """Every legal configuration that is not vetoed, fewest workers first."""
        return tuple(config for config in self._all() if self.veto(config) is None)

    def modelled_configs(self) -> tuple[LoaderConfig, ...]:
        """Those of `configs()` that the twin can predict: every axis of `UNMODELLED` at its first value."""
        first = replace(self, **{axis: getattr(self, axis)[:1] for axis in UNMODELLED.values()})
        return first.configs()

    def is_modelled(self, config: LoaderConfig) -> bool:
        """Whether the twin can predict it."""
        return config == self.plain(config)

    def plain(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration without what the twin knows nothing of."""
        return replace(config, **{name: self.first_value(name, config) for name in UNMODELLED})

    def first_value(self, name: str, config: LoaderConfig) -> Any:
        """What a knob of `UNMODELLED` has unless something else is shown to be better."""
        if not config.num_workers and name in WITHOUT_WORKERS:
            return WITHOUT_WORKERS[name]
        return getattr(self, UNMODELLED[name])[0]

    def variants(self, config: LoaderConfig, name: str) -> tuple[LoaderConfig, ...]:
        """The configuration with every other value of one knob of `UNMODELLED`."""
        if not config.num_workers and name in WITHOUT_WORKERS:
            return ()
        values = getattr(self, UNMODELLED[name])
        return tuple(replace(config, **{name: value}) for value in values if value != getattr(config, name))

    def _all(self) -> Iterator[LoaderConfig]:
        process = list(
            itertools.product(self.consumer_threads, self.batch_sizes, self.drop_lasts, self.sharing_strategies)
        )
        for workers in self.worker_counts():
            per_worker = itertools.product(
                self.prefetch_factors if workers else (None,),
                self.pin_memory,
                self.device_prefetch,
                self.in_order if workers else (True,),
                self.multiprocessing_contexts if workers else (None,),
            )
            for (prefetch, pinned, ahead, in_order, context), (threads, size, drop, sharing) in itertools.product(
                per_worker, process
            ):
                yield LoaderConfig(
                    num_workers=workers,
                    prefetch_factor=prefetch,
                    pin_memory=pinned,
                    persistent_workers=self.persistent_workers and workers > 0,
                    in_order=in_order,
                    multiprocessing_context=context,
                    drop_last=drop,
                    batch_size=size,
                    device_prefetch=ahead,
                    consumer_threads=threads,
                    sharing_strategy=sharing,
                )

    def veto(self, config: LoaderConfig) -> Failure | None:
        """Why a configuration must not be tried on this machine; None when it may."""
        if self.workers_are_capped and config.num_workers > self.max_workers:
            return Failure(
                kind="infeasible",
                phase="plan",
                message=f"more than {self.max_workers} workers are ruled out (max_workers, too few shards, repeated samples "
                f"or data on an accelerator); num_workers={self.max_workers} would work",
            )
        needs = (
            ("shared_memory", config.batches_in_flight * self._batch_bytes(config), self.limits.shm_bytes, "/dev/shm"),  # noqa: S108
            (
                "descriptors",
                config.batches_in_flight * self.batch.tensors + RESERVED_DESCRIPTORS,
                self.limits.descriptors,
                "descriptors",
            ),
            ("memory_guard", self.memory_need(config), self.limits.memory_bytes, "host memory"),
        )
        for kind, need, limit, name in needs:
            applies = config.num_workers or (config.batch_size or 0) > (self.batch.samples or math.inf)
            if applies and limit is not None and need > limit * SAFE_SHARE:
                return Failure(
                    kind="infeasible",
                    phase="plan",
                    message=f"{config} would need {_amount(kind, need)} of {name}, and there is {_amount(kind, limit)}",
                )
        return None

    def memory_need(self, config: LoaderConfig) -> int:
        """Least bytes the workers will take: their interpreters and the batches in flight; what data they copy is extra."""
        return config.num_workers * WORKER_BASE_BYTES + config.batches_in_flight * self._batch_bytes(config)

    def _batch_bytes(self, config: LoaderConfig) -> int:
        if config.batch_size is None or not self.batch.samples:
            return self.batch.bytes
        return round(self.batch.bytes * config.batch_size / self.batch.samples)

    def over_margin(self, config: LoaderConfig, measured: Measurement) -> Failure | None:
        """Why a configuration takes too much, from what its burst took; None where it does not.

        That is asked of tuned batch sizes only: batches of a whole training run differ more than those of a burst,
        so a margin must be left on host and device.
        """
        if config.batch_size is None:
            return None
        host = None if measured.memory is None else measured.memory.taken_bytes
        kinds: tuple[tuple[FailureKind, str, int | None, int | None], ...] = (
            ("memory_guard", "host", host, self.limits.memory_bytes),
            ("device_memory", "device", measured.gpu.memory_bytes, self.limits.device_bytes),
        )
        for kind, name, took, limit in kinds:
            if took is not None and limit is not None and took > limit * SAFE_SHARE:
                return Failure(
                    kind=kind,
                    phase="plan",
                    message=f"batch_size={config.batch_size} took {took / 2**20:.0f} of {limit / 2**20:.0f} MiB of {name} "
                    f"memory, more than {SAFE_SHARE:.0%}; a smaller one would work",
                )
        return None

    @property
    def hash(self) -> str:
        """Changes when a trial of one space would mean something else in another; what is free, and fetches took, does not."""
        of_now = ("limits", "batch", "max_workers")
        axes = {name: repr(getattr(self, name)) for name in self.__slots__ if name not in of_now}
        return hashlib.sha256(json.dumps(axes, sort_keys=True).encode()).hexdigest()[:16]


def least(*limits: int | None) -> int | None:
    """The least of the limits that are known; None where none is."""
    return min((limit for limit in limits if limit is not None), default=None)


def useful_workers(usable_cores: int, seen: Sequence[Measurement]) -> int:
    """`max_useful_workers` by the batches of these bursts, whose fetches have shown the slow ones.

    Args:
        usable_cores: of this process.
        seen: one or more. The loop steps, and receives: a worker that is done sooner than both is of no use.
    """
    counts = [max(each.samples_per_s.count, 1) for each in seen]
    stages = [(each.service_s, each.service_cpu_s, each.step_s + each.receive_s) for each in seen]
    fetch_s, fetch_cpu_s, loop_s = map(float, np.average(stages, axis=0, weights=counts))
    return max_useful_workers(usable_cores, fetch_s, fetch_cpu_s, loop_s, room=FILLING_ROOM)


def max_useful_workers(
    usable_cores: int, wall_s: float, cpu_s: float, step_s: float = 0.0, *, room: float = FEEDING_ROOM
) -> int:
    """How many workers could possibly help: those that fill the cores or keep the step busy, whichever are fewer, and more.

    Args:
        usable_cores: of this process.
        wall_s: of fetching one batch.
        cpu_s: of the same; the rest of its time a worker waits and leaves its core to others.
        step_s: of one training step; 0 for none.
        room: how many times the workers that keep the step busy, for slow batches; less where `wall_s` has seen these.
    """
    filling = usable_cores * max(wall_s / cpu_s if cpu_s > 0 else math.inf, 1.0) if wall_s > 0 else usable_cores
    feeding = max(wall_s / step_s if step_s > 0 else math.inf, usable_cores)
    return round(min(MAX_WORKERS, FILLING_ROOM * filling + MORE_WORKERS, room * feeding + MORE_WORKERS))


def consumer_thread_counts(usable_cores: int, default_threads: int, most: float = math.inf) -> tuple[int | None, ...]:
    """Intra-op thread counts worth trying for a step on the CPU: the default, one, and halves between.

    Args:
        usable_cores: of this process.
        default_threads: of the untouched training process.
        most: threads that may be used; None, the default, is left out where it is more.
    """
    counts: set[int] = set()
    threads = min(default_threads, usable_cores)
    while threads >= 1:
        counts.add(threads)
        threads //= 2
    if default_threads > most:
        return tuple(sorted((count for count in counts if count <= max(most, 1)), reverse=True))
    counts.discard(default_threads)
    return (None, *sorted(counts, reverse=True))


def _amount(kind: str, value: float) -> str:
    return f"{value:.0f}" if kind == "descriptors" else f"{value / 2**20:.0f} MiB"
