"""Paired rounds: everybody once in each, in turning or random order, so that whatever slows a round cancels in ratios."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import TypeVar

from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.statistics import Round

_Key = TypeVar("_Key", bound=Hashable)
_Outcome = TypeVar("_Outcome")


def in_random_order(
    entrants: Sequence[_Key], observe: Callable[[_Key], _Outcome], rng: random.Random
) -> list[tuple[_Key, _Outcome]]:
    """One round: what was observed of each, in the order in which it was."""
    return [(entrant, observe(entrant)) for entrant in rng.sample(list(entrants), len(entrants))]


def in_turning_order(
    entrants: Sequence[_Key], observe: Callable[[_Key], _Outcome], number: int
) -> list[tuple[_Key, _Outcome]]:
    """One round of a few: A B, B A, A B ... by the number of the round, so that each is as often first."""
    return [(entrant, observe(entrant)) for entrant in (entrants if number % 2 == 0 else reversed(entrants))]


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
