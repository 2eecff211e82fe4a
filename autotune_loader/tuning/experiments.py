"""Whether a changed step, or samples made otherwise, would be faster: measured where that binds and the user allows it.

torch.compile and autocast change what is trained, so they are never applied; a result tells what they would bring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol

from autotune_loader.decision.stopping import StopReason
from autotune_loader.probe.protocol import Probe
from autotune_loader.results.loader_file import Binding, Verdict
from autotune_loader.tuning.assemble import assemble
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.schedule import FINAL_BURST
from autotune_loader.tuning.state import RunContext, SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import ChangeFacts, Failure
from autotune_loader.values.plan import BurstPlan, DataChangeKind
from autotune_loader.values.statistics import Round, paired_ratio
from autotune_loader.values.trial import Acceleration, AccelerationKind, DataChange

# The cheap one first: a compilation that does not end costs the probe process.
KINDS: tuple[AccelerationKind, ...] = ("amp", "compile")
NAMES: dict[AccelerationKind, str] = {"amp": "autocast", "compile": "torch.compile"}
# Seconds of the rounds alone.
ROUNDS_S = 4.0
# Until when everything must have answered: compiling a large model takes minutes.
DEADLINE_S: dict[AccelerationKind, float] = {"amp": 60.0, "compile": 180.0}
# With less than this left of the budget it is not begun: two models to warm up, and for torch.compile a compiler to load.
LEAST_S: dict[AccelerationKind, float] = {"amp": 4.0, "compile": 15.0}
# Seconds of the budget that the search leaves for each.
KEPT_S: dict[AccelerationKind, float] = {"amp": 8.0, "compile": 25.0}
KEPT_SHARE = 0.4  # of the budget, for both at the most
CHANGE_SEEDS = 2_000
"""Other samples than those of the finals."""
CHANGE_FEWEST = 3
"""Rounds at least, whatever they take: two have an interval that says nothing."""
CHANGE_ROUNDS, CHANGE_KEPT_S, CHANGE_LEAST_S = 4, 10.0, 4.0
"""Paired rounds with and without a change of the samples; what they take of the budget, with trying it; and with less they
are not begun."""
FETCHING: dict[DataChangeKind, tuple[Binding, ...]] = {
    "cache": ("cpu", "wait"),
    "draft": ("cpu", "wait"),
    "uint8": ("cpu", "transport", "pinning", "memory"),
}
"""Where it may gain anything."""


def budget_of_search(budget_s: float, allow: Collection[str]) -> float:
    """Seconds of the budget that the search may use, where what is allowed wants a part of it."""
    wanted = sum(KEPT_S[kind] for kind in KINDS if kind in allow) + CHANGE_KEPT_S * len(FETCHING.keys() & set(allow))
    return budget_s - min(wanted, KEPT_SHARE * budget_s)


class StepProbe(Protocol):
    """A probe that can change the step."""

    def acceleration(
        self, kind: AccelerationKind, consumer_threads: int | None, plan: BurstPlan
    ) -> Acceleration | Failure:
        """Time the step with one change to it against the step as it is."""
        ...


def try_changed_steps(
    state: SearchState, context: RunContext, options: TuneOptions, probe: StepProbe | None, started: float
) -> None:
    """What allowed changes of the step would bring, noted in the state; Ctrl-C ends that, and keeps what the search found.

    Args:
        state: of a search that has ended.
        context: of the run.
        options: how to search.
        probe: None where several ranks tune together.
        started: when the budget began, on the monotonic clock.
    """
    if state.interrupted or not options.allow & set(KINDS):
        return
    so_far = assemble(state, context, 0.0, final=True)

    def seconds_left() -> float:
        return options.budget_s - (time.monotonic() - started)

    try:
        state.accelerations = measure_allowed(
            options.allow, so_far.verdict, probe, so_far.best.consumer_threads, seconds_left
        )
    except KeyboardInterrupt:
        state.stop_reason = StopReason.INTERRUPTED


def try_data_changes(
    state: SearchState, context: RunContext, options: TuneOptions, probe: Probe | None, started: float
) -> None:
    """What allowed changes of the samples would bring, noted in the state; arguments as in `try_changed_steps`."""
    kinds = [kind for kind in FETCHING if kind in options.allow]
    if state.interrupted or not kinds:
        return
    so_far = assemble(state, context, 0.0, final=True)
    samples = context.workload.data.samples_per_epoch()
    for number, kind in enumerate(kinds):
        seconds_left = options.budget_s - (time.monotonic() - started)
        reason = _reason_not_to_change(kind, so_far.verdict, probe, seconds_left)
        try:
            if reason or probe is None:
                found = DataChange(kind=kind, note=f"not measured: {reason}")
            else:
                found = measured_change(kind, probe, so_far.best, samples, seconds_left / (len(kinds) - number))
        except KeyboardInterrupt:
            state.stop_reason = StopReason.INTERRUPTED
            return
        state.data_changes = (*state.data_changes, found)


def measured_change(
    kind: DataChangeKind, probe: Probe, best: LoaderConfig, samples: float | None, seconds_left: float
) -> DataChange:
    """The rate with a change over that of the same samples as they are made, in rounds that take turns.

    Args:
        kind: of change.
        probe: runs the bursts.
        best: the chosen configuration.
        samples: of an epoch; None where that is unknown.
        seconds_left: of the budget.
    """
    ends, rounds, facts = time.monotonic() + seconds_left, list[Round](), ChangeFacts(code="")
    after = best
    try:
        if kind == "cache":
            after = max(_with_fewer_workers(best), key=lambda config: _changed(probe, config, _plan_of(kind, 0))[0])
        for number in range(CHANGE_ROUNDS):
            plan, rates = _plan_of(kind, 1 + number), {}
            for is_before in (number % 2 == 1, number % 2 == 0):
                rates[is_before], known = _changed(
                    probe, best if is_before else after, replace(plan, is_before=is_before)
                )
                facts = known or facts
            rounds.append(Round(rates=rates))
            if len(rounds) >= CHANGE_FEWEST and time.monotonic() > ends:
                break
    except _ChangeFailedError as error:
        return DataChange(kind=kind, note=f"not measured: {error}")
    size = facts.sample_bytes
    return DataChange(
        kind=kind,
        config=after,
        speedup=paired_ratio(rounds, False, True),
        code=facts.code,
        difference=facts.difference,
        sample_bytes=size,
        dataset_bytes=size * samples if size and samples else None,
    )


class _ChangeFailedError(Exception):
    """A burst with or without a change failed; the message is the burst's."""


def _with_fewer_workers(best: LoaderConfig) -> list[LoaderConfig]:
    """The configuration, and those for samples that take next to nothing: one worker, and none."""
    return list(dict.fromkeys([best, *(best.with_workers(count) for count in (1, 0) if count < best.num_workers)]))


def _plan_of(kind: DataChangeKind, number: int) -> BurstPlan:
    return replace(FINAL_BURST, seed=CHANGE_SEEDS + number, change=kind, deadline_s=DEADLINE_S["amp"])


def _changed(probe: Probe, config: LoaderConfig, plan: BurstPlan) -> tuple[float, ChangeFacts | None]:
    outcome = probe.burst(config, plan)
    if isinstance(outcome, Failure):
        raise _ChangeFailedError(outcome.message.removeprefix("ValueError: "))
    return outcome.samples_per_s.value, outcome.change


def _reason_not_to_change(kind: DataChangeKind, verdict: Verdict, probe: Probe | None, seconds_left: float) -> str:
    if verdict.binding not in FETCHING[kind]:
        return f"the verdict is {verdict.binding!r}, and it may gain only where that is {' or '.join(FETCHING[kind])}"
    return _reason_of_run(probe, seconds_left, CHANGE_LEAST_S)


def _reason_of_run(probe: object, seconds_left: float, least_s: float) -> str:
    """Why nothing can be measured, whatever it is; empty where it can."""
    if probe is None:
        return "several ranks tune together; tune() in one process measures it"
    if seconds_left < least_s:
        return f"{max(0.0, seconds_left):.0f} s were left of the budget, and it takes at least {least_s:.0f} s"
    return ""


def measure_allowed(
    allow: Collection[str],
    verdict: Verdict,
    probe: StepProbe | None,
    consumer_threads: int | None,
    seconds_left: Callable[[], float],
) -> tuple[Acceleration, ...]:
    """What each allowed change of the step brings, or why that was not measured; a failure of one is a note.

    Args:
        allow: what the user allows; "compile" and "amp" are what matters here.
        verdict: on the best configuration; only where the step binds is anything measured.
        probe: None where several ranks tune together.
        consumer_threads: of the best configuration.
        seconds_left: of the budget.
    """
    found = []
    for kind in (kind for kind in KINDS if kind in allow):
        reason = _reason_not_to(kind, verdict, probe, seconds_left())
        if reason or probe is None:
            found.append(Acceleration(kind=kind, name=NAMES[kind], note=f"not measured: {reason}"))
        else:
            plan = BurstPlan(max_s=min(ROUNDS_S, seconds_left() / 4), deadline_s=min(DEADLINE_S[kind], seconds_left()))
            found.append(_answer(kind, probe.acceleration(kind, consumer_threads, plan), plan))
    return tuple(found)


def _reason_not_to(kind: AccelerationKind, verdict: Verdict, probe: StepProbe | None, seconds_left: float) -> str:
    if verdict.binding != "step":
        return (
            f"the training step does not bind (the verdict is {verdict.binding!r}), so a faster one would gain nothing"
        )
    return _reason_of_run(probe, seconds_left, LEAST_S[kind])


def _answer(kind: AccelerationKind, outcome: Acceleration | Failure, plan: BurstPlan) -> Acceleration:
    if isinstance(outcome, Acceleration):
        return outcome
    if outcome.kind == "deadline" and plan.deadline_s < DEADLINE_S[kind]:
        note = f"not measured: it takes longer than the {plan.deadline_s:.0f} s that were left; budget='5m' would leave it more"
        return Acceleration(kind=kind, name=NAMES[kind], note=note)
    text = outcome.message.strip().splitlines()
    return Acceleration(kind=kind, name=NAMES[kind], note=f"it failed: {text[0] if text else outcome.kind}")
