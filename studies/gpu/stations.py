"""Which station binds a loop whose batches are pinned? Two minutes; how its records are read is told in README.md.

locked      deep queues just after pages were locked, and twice more: do bursts read alike?
stations    seconds of a batch at each station by number of workers, and which law gives the rate that was measured
handed      handing over copies, pinned and not, beside the best of these: is it the most that any workers feed?
switching   does the step take in the loop what it takes alone, once threads take turns at the interpreter more often?
depth       plain loops of other queues in turns: is a deep one slower?
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from autotune_loader import LoaderConfig
from autotune_loader.bursts.parent import OpenProbe
from autotune_loader.pipeline.throughput import FIRST_LOCKING, once_locked
from autotune_loader.tuning.bursting import CEILING_BURST, HAND_OVER_BURST, HAND_OVER_WORKERS, Budget
from autotune_loader.values import BatchTrace, BurstPlan, Failure, Measurement
from studies.gpu.jobs import FULL, JOBS, QUICK, Job, picture_step
from studies.gpu.training import Loop, Rate, attempted, configured, in_turns, record_pairs
from studies.study import Table, record
from studies.workloads import opened

JOB = "images"
BAR = "none: RECORD lines say what binds; a part that fails is a row"
MADE, PINNED, TAKEN = "workers", "thread", "loop"
"""What may bind."""
BESIDE, WITHIN = "thread beside the loop", "thread within it"
"""Laws of the seconds between two batches: max(t, u + g, S / W), and max(u' + g, S / W)."""
NEAR_LAW, NEAR_CEILING, NEAR_ALONE = 0.05, 0.03, 0.1
"""So near is a law to the rate, and a burst to another; the best to the ceiling of handing over; a step in the loop to one
alone."""
SWITCH_S = 2e-4
"""Of the interpreter, whose own interval is 5 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stations:
    """Mean seconds of a batch on its way, once the queues are as in training."""

    service_s: float  # in a worker (S)
    to_thread_s: float  # whole until the thread begins to pin it (l)
    pin_s: float  # in the thread (t)
    receive_s: float  # from the thread, or the worker where none pins, to the loop (u)
    wait_s: float  # from the worker to the loop, all that lies between booked as receiving (u')
    step_s: float  # g
    batch_s: float  # measured, from the end of one step to the next
    workers: int

    @classmethod
    def of(cls, config: LoaderConfig, traces: Sequence[BatchTrace]) -> Stations:
        """Of the last whole rounds of the workers, without those that filled their queues."""
        traces, workers = once_locked(traces), config.num_workers
        count = workers * max(1, (len(traces) - 1 - workers - config.batches_in_flight) // workers)
        inside = traces[-count:]
        return cls(
            service_s=fmean(each.service_s for each in inside),
            to_thread_s=fmean((each.pin_start or each.collate_end) - each.collate_end for each in inside),
            pin_s=fmean(each.pin_s for each in inside),
            receive_s=fmean(each.receive_s for each in inside),
            wait_s=fmean(each.received - max(each.requested, each.collate_end) for each in inside),
            step_s=fmean(each.step_s for each in inside),
            batch_s=(inside[-1].step_end - traces[-count - 1].step_end) / count,
            workers=workers,
        )

    def needs_s(self, workers: int) -> dict[str, float]:
        """Seconds between two batches, by what would bind alone with so many workers."""
        return {MADE: self.service_s / workers, PINNED: self.pin_s, TAKEN: self.receive_s + self.step_s}

    def record(self, what: str, *seen: Stations) -> None:
        """Print them, what binds, and which law gives the rate: from the same figures, and from those `seen` elsewhere.

        From the same the thread within the loop can hardly be wrong, as waiting and step fill the loop's time whatever binds.
        """
        needs_s = self.needs_s(self.workers)
        record(JOB, f"stations: {what}", **asdict(self), binds=max(needs_s, key=needs_s.__getitem__))
        for each in (self, *seen):
            needs_s = each.needs_s(self.workers)
            within_s = max(each.wait_s + each.step_s, needs_s[MADE])
            laws = {BESIDE: self.batch_s / max(needs_s.values()), WITHIN: self.batch_s / within_s}
            holds = [law for law, ratio in laws.items() if abs(ratio - 1) <= NEAR_LAW]
            record(JOB, f"stations: {what}, by those of {each.workers}", over_measured=laws, holds=holds)


def measured(outcome: Measurement | Failure) -> Measurement:
    if isinstance(outcome, Failure):
        raise RuntimeError(outcome.message)
    return outcome


def burst(probe: OpenProbe, config: LoaderConfig, seconds: float) -> Measurement:
    """One burst of so long, however soon its rate is known."""
    return measured(probe.probe.burst(config, BurstPlan(max_s=seconds, min_s=seconds, relative_error=0.0)))


def locked(probe: OpenProbe, configs: Sequence[LoaderConfig], seconds: float) -> None:
    """The first bursts after the probe's start, and the same twice more."""
    rates: dict[LoaderConfig, list[float]] = {config: [] for config in configs}
    for config in 3 * list(configs):
        found = burst(probe, config, seconds)
        pins, rate = [each.pin_s for each in found.traces], found.samples_per_s.value
        locking = sum(pin_s > FIRST_LOCKING * median(pins) for pin_s in pins)
        record(JOB, f"locked: {config}", samples_per_s=rate, batches=len(pins), locking=locking)
        rates[config].append(rate)
    for config, (first, *again) in rates.items():
        over, apart = fmean(again) / first, max(again) / min(again) - 1
        says = "alike" if abs(over - 1) <= NEAR_LAW else "slower at first" if over > 1 + apart else "not told"
        record(JOB, f"locked: {config}, again over first", value=over, apart=apart, says=says)


def stations(
    probe: OpenProbe, configs: Sequence[LoaderConfig], seconds: float, bursts: dict[LoaderConfig, Measurement]
) -> None:
    """A burst of each into `bursts`, its stations by its own figures and by those of the first."""
    found = list[Stations]()
    for config in configs:
        bursts[config] = burst(probe, config, seconds)
        found.append(Stations.of(config, bursts[config].traces))
        found[-1].record(str(config), *found[:-1][:1])


def handed(probe: OpenProbe, best: LoaderConfig, rounds: int) -> None:
    """Copies of one batch handed over, and the best that trains, in turns."""
    few = LoaderConfig(num_workers=min(HAND_OVER_WORKERS, os.cpu_count() or 1))

    def rate(run: Callable[[], Measurement | Failure]) -> Rate:
        return Rate(samples_per_s=measured(run()).samples_per_s.value, gpu_util=None)

    sides: dict[str, Callable[[], Rate]] = {str(best): partial(rate, partial(burst, probe, best, 1.0))}
    for config in dict.fromkeys((few, replace(few, pin_memory=best.pin_memory))):
        sides[f"handing over, {config}"] = partial(rate, partial(probe.probe.hand_over, config, HAND_OVER_BURST))
    record_pairs(JOB, in_turns(JOB, sides, rounds), str(best), NEAR_CEILING)


def in_short_turns(model: Any, batch: Any) -> torch.Tensor:
    """The step, in a process whose threads take turns at the interpreter more often."""
    sys.setswitchinterval(SWITCH_S)
    return picture_step(model, batch)


def switching(what: str, probe: OpenProbe, config: LoaderConfig, seconds: float) -> None:
    """The step in the loop, which copies its batch, beside that copy and the step alone, one after the other."""
    alone_s, in_loop = measured(probe.probe.step_ceiling(CEILING_BURST)).step_s, burst(probe, config, seconds)
    copy_s = in_loop.copy_s or 0.0
    over = in_loop.step_s / (alone_s + copy_s)
    says = "as alone" if over <= 1 + NEAR_ALONE else "longer than alone"
    record(JOB, f"switching: {what}", step_s=in_loop.step_s, alone_s=alone_s, copy_s=copy_s, over=over, says=says)


def depth(job: Job, device: str, config: LoaderConfig, seconds: float, rounds: int, budget: Budget) -> None:
    """Plain training, which begins when the queues have been emptied twice."""
    loop = Loop(job, device, seconds)
    sides = {f"prefetch {n}": partial(loop.train, replace(config, prefetch_factor=n)) for n in (8, 4, 2, 1)}
    record_pairs(JOB, in_turns(JOB, sides, rounds, budget), "prefetch 8")


def rows(*, device: str = "cuda", seconds: float = math.inf, quick: bool = False) -> Table:
    """`seconds`: of all, the last turns end before."""
    budget = Budget(seconds, time.monotonic)
    job, cores = JOBS[JOB](QUICK if quick else FULL), os.cpu_count() or 1
    counts = (1, 2) if quick else sorted({*(n for n in (4, 6, 8, 12) if n < cores), cores})
    scale, rounds, many = (0.2, 2, 2) if quick else (1.0, 4, 8 if 8 in counts else counts[-1])
    plain = LoaderConfig(num_workers=many, prefetch_factor=2, pin_memory=configured(device) != "cpu")
    deep = [plain.with_workers(n, 8) for n in (counts if quick else (6, 14))]
    bursts = dict[LoaderConfig, Measurement]()
    with opened(job, device) as probe:
        yield from attempted("locked", partial(locked, probe, deep, 2 * scale))
        yield from attempted(
            "stations", partial(stations, probe, [plain.with_workers(n) for n in counts], 3 * scale, bursts)
        )
        best = max(bursts, key=lambda each: bursts[each].samples_per_s.value, default=plain)
        yield from attempted("handed", partial(handed, probe, best, rounds))
        yield from attempted("switching", partial(switching, "as it is", probe, plain, 3 * scale))
    with opened(replace(job, train_step=in_short_turns), device) as probe:
        yield from attempted("switching", partial(switching, f"every {SWITCH_S} s", probe, plain, 3 * scale))
    yield from attempted("depth", partial(depth, job, device, plain, 2 * scale, rounds, budget))
