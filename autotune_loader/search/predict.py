"""What to expect of a configuration that did not run: its rate and its memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from autotune_loader.search.belief import Belief
from autotune_loader.search.space import WORKER_BASE_BYTES, Context, Space, memory_bytes
from autotune_loader.values import Interval, LoaderConfig, Measurement, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is expected of one configuration."""

    config: LoaderConfig
    samples_per_s: Interval
    """Sustained rate, with its 95% interval; `count` is the number of bursts."""
    memory_bytes: int | None
    """Peak memory of the process and its workers, shared pages counted once; None where no burst told."""

    def __str__(self) -> str:
        memory = "" if self.memory_bytes is None else f", {self.memory_bytes / 2**20:,.0f} MiB"
        return f"{self.config}: {self.samples_per_s} samples/s expected{memory}"


@np.errstate(all="ignore")  # a script may have made an error of an underflow
def predict(
    trials: Sequence[Trial],
    configs: Sequence[LoaderConfig],
    *,
    usable_cores: int,
    step_s: float | None = None,
    step_cores: float = 1.0,
    cores: float | None = None,
) -> list[Prediction]:
    """What to expect of each configuration, by what these trials say.

    Args:
        trials: what was measured.
        configs: any legal ones; what the twin does not model (pinning, order) is ignored.
        usable_cores: of the machine that the trials ran on.
        step_s: seconds of the step on a cached batch, where it was timed.
        step_cores: cores that the step keeps busy while it runs.
        cores: of the machine that is asked about; those of the trials where it is not given.

    Raises:
        ValueError: nothing was measured, or `cores` is not positive.
    """
    if cores is not None and not cores > 0:
        raise ValueError(f"cores={cores!r} must be greater than 0, such as cores=2")
    known = [t for t in trials if t.measurement is not None and t.config.batch_size is None]
    if not known:
        raise ValueError("predict() needs at least one successful trial; a result of tune() with one would work")
    asked, context = (
        [_plain(c) for c in configs],
        Context(usable_cores=usable_cores, step_cores=step_cores, step_s=step_s),
    )
    space = Space(max_workers=0, also=tuple(asked))
    belief = Belief(space, context, [replace(each, config=_plain(each.config)) for each in known])
    logs, more = belief.sustained.of(asked).paths, np.zeros(len(asked))
    if cores is not None and belief.twin is not None:
        there, here = belief.twin.predict(asked, cores), belief.twin.predict(asked)
        more = np.log(there.samples_per_s / here.samples_per_s)
    low, high = np.exp(np.quantile(logs, [0.025, 0.975], axis=0) + more)
    rates = np.exp(logs.mean(axis=0) + more)
    return [
        Prediction(
            config=config,
            samples_per_s=Interval(value=rate, low=lowest, high=highest, count=len(known)),
            memory_bytes=_peak_bytes(config, [(t.config, m) for t in known if (m := t.measurement)]),
        )
        for config, rate, lowest, highest in zip(configs, *(each.tolist() for each in (rates, low, high)), strict=True)
    ]


def _plain(config: LoaderConfig) -> LoaderConfig:
    """Workers and prefetch alone, which is what the twin models."""
    return LoaderConfig().with_workers(config.num_workers, config.prefetch_factor)


def _peak_bytes(config: LoaderConfig, seen: Sequence[tuple[LoaderConfig, Measurement]]) -> int | None:
    """Peak memory that is expected: what a worker more took in these bursts, and its queue as full as it may get.

    The slope is the median of those between bursts (Sen 1968), so that one burst beside a growing neighbour does not turn it.
    """
    told = [(each, taken, burst.batch_bytes) for each, burst in seen if (taken := burst.taken_bytes) is not None]
    # Bursts without workers share nothing with anybody and tell little of those with.
    told = [each for each in told if each[0].num_workers] or told
    if not told:
        return None
    queues = [
        (each.num_workers, taken - memory_bytes(each, worker_bytes=0, batch_bytes=size)) for each, taken, size in told
    ]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(queues, 2) if a[0] != b[0]]
    slope = statistics.median(slopes) if slopes else 0.0
    worker = slope if slope > 0 else WORKER_BASE_BYTES
    base = statistics.median(taken - workers * worker for workers, taken in queues)
    batch = statistics.median(size for *_, size in told)
    return round(max(base, 0.0) + memory_bytes(config, worker_bytes=worker, batch_bytes=batch))
