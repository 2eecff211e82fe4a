"""What a paired round says, and what several bursts of one configuration say together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median

from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Round


def averaged(bursts: Sequence[Measurement]) -> Measurement:
    """What several bursts of one configuration say together; traces, and what is not averaged, are those of the last."""
    last = bursts[-1]
    memory = [each.memory for each in bursts if each.memory is not None]
    largest = max(memory, key=lambda each: each.taken_bytes, default=None)
    return replace(
        last,
        first_batch_s=median(each.first_batch_s for each in bursts),
        wait_share=fmean(each.wait_share for each in bursts),
        service_s=fmean(each.service_s for each in bursts),
        service_cpu_s=fmean(each.service_cpu_s for each in bursts),
        receive_s=fmean(each.receive_s for each in bursts),
        step_s=fmean(each.step_s for each in bursts),
        cpu_share=_mean_of_known(each.cpu_share for each in bursts),
        foreign_cpu_share=_mean_of_known(each.foreign_cpu_share for each in bursts),
        memory=largest,
    )


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def as_round(outcomes: Sequence[tuple[Hashable, Measurement | Failure]]) -> Round:
    """The rates of one round, without those that failed, and the largest share of the cores that others took meanwhile."""
    measured = [(key, outcome) for key, outcome in outcomes if isinstance(outcome, Measurement)]
    foreign = [each.foreign_cpu_share for _, each in measured if each.foreign_cpu_share is not None]
    return Round(
        rates={key: each.samples_per_s.value for key, each in measured}, foreign_cpu_share=max(foreign, default=None)
    )
