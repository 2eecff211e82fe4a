"""What one traced burst tells the twin: the times of each stage, and how many workers were busy meanwhile.

worker   fetch ── collate ──┬ fetch ...
loop                        └──► receive ── step
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune_loader.pipeline.throughput import once_locked
from autotune_loader.search.queue import Floats
from autotune_loader.values import BatchTrace, LoaderConfig, Measurement, after_first_of_each

FEWEST_SAMPLES = 4
"""With fewer, warm-up batches are kept: a biased estimate beats none."""
BURST_SD = 0.02  # relative, between the stage times of bursts of one configuration, however many batches they have


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """What one traced burst tells the twin. The sample arrays may differ in length: each is cleaned on its own."""

    num_workers: int
    service_s: Floats  # wall seconds of fetch and collate, one per warm batch
    cpu_s: Floats  # CPU seconds of the same
    receive_s: Floats  # seconds in which the training loop took a batch over that was whole
    step_s: Floats  # seconds of the step, with the loop's own overhead
    batch_size: float  # mean samples per batch
    batches_per_s: float  # rate that the burst itself measured
    at_work: float  # mean number of workers at work in the steady part of the burst
    pin_s: float = 0.0  # mean seconds in which a thread pinned a batch; 0 without one

    @classmethod
    def of(cls, config: LoaderConfig, measurement: Measurement) -> Observation:
        """What the traces of a burst tell; its means, where there are no traces.

        The first batch of every worker and the first step are left out by position (lazy imports, cold caches), never
        by value, so that a genuine heavy tail stays.
        """
        m, workers = measurement, config.num_workers
        traces: Sequence[BatchTrace] = once_locked(m.traces) if m.traces else ()
        service_s, cpu_s, receive_s, step_s = np.array([[m.service_s], [m.service_cpu_s], [m.receive_s], [m.step_s]])
        if traces:
            warm = after_first_of_each(traces)
            kept = warm if len(warm) >= FEWEST_SAMPLES else traces
            # Without workers the sampler runs between the request and the fetch; with workers it is part of the receipt.
            service_s = np.array([t.collate_end - (t.fetch_start if workers else t.requested) for t in kept])
            cpu_s = np.array([t.cpu_s for t in kept])
            receive_s = np.maximum([t.receive_s for t in kept], 0.0)
            step_s = _steps(traces)
        batches_per_s = m.samples_per_s.value / m.batch_size
        at_work = _visibly_at_work(traces, workers)
        if at_work is None:
            at_work = batches_per_s * float(service_s.mean())  # Little's law
        return cls(
            num_workers=workers,
            service_s=service_s,
            cpu_s=cpu_s,
            receive_s=receive_s,
            step_s=step_s,
            batch_size=m.batch_size,
            batches_per_s=batches_per_s,
            pin_s=m.pin_s or 0.0,
            at_work=min(float(workers), at_work),
        )


def sampling_variance(observations: Sequence[Observation], stage: str = "service_s") -> Floats:
    """Relative variance of the mean of a stage in each burst because it saw so few batches.

    The spread is that of all bursts together: one without one of the rare slow batches cannot know of them.
    """
    samples = [getattr(each, stage) for each in observations]
    counts = np.array([len(each) for each in samples], dtype=np.float64)
    squares = sum(float(((each / max(each.mean(), 1e-12) - 1.0) ** 2).sum()) for each in samples)
    variance: Floats = squares / counts.sum() / counts
    return variance


def sampling_sd(observations: Sequence[Observation], stage: str = "service_s") -> Floats:
    """Relative standard deviation of the same mean, with what differs between bursts."""
    sd: Floats = np.sqrt(BURST_SD**2 + sampling_variance(observations, stage))
    return sd


def _steps(traces: Sequence[BatchTrace]) -> Floats:
    between = [after.requested - before.step_end for before, after in itertools.pairwise(traces)]
    # The median: a burst may pause once to look at the clock or at memory.
    loop_s = max(0.0, float(np.median(between))) if between else 0.0
    steps = np.array([t.step_s for t in traces])
    return (steps[1:] if len(steps) > FEWEST_SAMPLES else steps) + loop_s


def _visibly_at_work(traces: Sequence[BatchTrace], workers: int) -> float | None:
    """Mean number of workers at work while all of them could be seen; None where they never could.

    What a worker does after its last delivered batch leaves no trace. Queues that are still filling take what the loop does
    not, so that the rate of the loop does not tell.
    """
    begun, ended = dict[int, float](), dict[int, float]()
    for trace in traces:
        begun.setdefault(trace.worker, trace.fetch_start)
        ended[trace.worker] = trace.collate_end
    since, until = max(begun.values(), default=0.0), min(ended.values(), default=0.0)
    if until <= since or len(begun) < workers:
        return None
    worked = sum(max(0.0, min(t.collate_end, until) - max(t.fetch_start, since)) for t in traces)
    return worked / (until - since)
