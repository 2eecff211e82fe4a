"""`compare()`: which of some loaders, each with its training step, is faster, and what limits each.

sides ─► a probe each ─► the step alone, one burst each ─► rounds ─► ratios with intervals, bottlenecks

Rounds go on until every side is shown to be faster or slower than the first, or as fast, or the budget ends.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune_loader.bursts.packing import Packed
from autotune_loader.bursts.parent import OpenProbe, open_probe
from autotune_loader.diagnosis import Answer, Caution, Evidence, diagnose
from autotune_loader.diagnosis.tables import answer
from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.pipeline.workload import Workload
from autotune_loader.report.progress import make_progress
from autotune_loader.report.result import Comparison
from autotune_loader.results.comparison import Side, ratios_of
from autotune_loader.search.belief import MAX_FAILURES
from autotune_loader.search.turns import in_turns
from autotune_loader.tuning.arguments import make_workload, refuse
from autotune_loader.tuning.bursting import Budget, Bursts
from autotune_loader.tuning.run import make_context, parse_options
from autotune_loader.values import Failure, Interval, LoaderConfig, Measurement, Round, Trial, WorkloadError, averaged

LEAST_ROUNDS = 4
"""With fewer rounds equal sides are called faster or slower too often (`studies.fidelity.selection`)."""
MOST_ROUNDS = 100
"""What the arithmetic of rounds takes grows with their number, cubed."""


def compare(
    sides: Mapping[str, Any],
    model: Any = None,
    *,
    train_step: Callable[[Any, Any], Any] | float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    device: str | torch.device = "auto",
    budget: str | float = "30s",
    progress: bool | None = None,
) -> Comparison:
    """Compare two or more loaders in training: which is faster, and what limits each.

    Each side trains in its own process, in A/B rounds. A side that fails is part of the answer, with its error. Nothing
    of the caller changes.

        compare({"now": loader, "cached": other_loader}, model, loss_fn=loss_fn)
        compare({"eager": (loader, model), "compiled": (loader, torch.compile(model))}, loss_fn=loss_fn)

    Args:
        sides: By name; the others are compared with the first. A DataLoader; a pair of it and this side's
            `train_step` or model; or `(loader, model, train_step)`. Loaders are never iterated.
        model: The model of each side that has no model of its own. `None` compares the loaders alone.
        train_step: As in `tune()`, for each side that has no step of its own.
        loss_fn: As in `tune()`.
        optimizer: As in `tune()`.
        device: As in `tune()`.
        budget: Most seconds for the rounds, such as `30`, `"30s"` or `"2m"`. Starting the processes and compiling
            models come on top. Rounds end sooner if they have decided.
        progress: As in `tune()`.

    Returns:
        The comparison. Sides with different batch sizes are compared by samples/s, with a warning.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names a value that would work.
    """
    _check_sides(sides)
    shared = {"train_step": train_step, "loss_fn": loss_fn, "optimizer": optimizer, "device": device}
    options = parse_options(budget=budget, progress=progress)
    workloads = {name: _workload(name, value, model, shared) for name, value in sides.items()}
    begun, machine, shown = time.monotonic(), inspect_machine(), make_progress(options.progress)
    with contextlib.ExitStack() as exits:
        beside = exits.enter_context(Packed())
        entrants = {name: _Entrant(workload) for name, workload in workloads.items()}
        for name, entrant in entrants.items():
            shown.announce(f"starting {name}")
            memory_bytes, budget_s = machine.memory_budget_bytes, options.budget_s
            try:
                opening = open_probe(entrant.workload, machine, memory_bytes, budget_s=budget_s, beside=beside)
                entrant.opened = exits.enter_context(opening)
            except WorkloadError as error:
                entrant.failure = _failure_of(error)
        budget_left = Budget(options.budget_s, time.monotonic)
        for entrant in entrants.values():
            entrant.begin(machine, budget_left)
        works = {name: each.trials[-1].seconds for name, each in entrants.items() if each.failure is None}
        paired = PairedRounds(works, lambda name, number: entrants[name].burst(number), budget_left, of=len(sides))
        while paired.run():
            rates = (f"{name} {rate:,.0f}" for name, rate in paired.rounds[-1].rates.items())
            shown.announce(f"round {len(paired.rounds)}: {', '.join(rates)}")
    return _compared(entrants, paired, machine, time.monotonic() - begun)


@dataclass(slots=True)
class PairedRounds:
    """Rounds of some sides, in each of which those run once that are not yet known beside the first."""

    burst_s: dict[str, float]  # sides by name, with the seconds that the last burst of each took
    burst: Callable[[str, int], Measurement | Failure]  # a burst of a side in the round of this number, from 0
    budget: Budget  # a round that does not fit into it is not begun
    of: int  # number of sides that are compared, with those that failed before
    rounds: list[Round] = field(default_factory=list)
    _failed: Counter[str] = field(default_factory=Counter)

    def run(self) -> bool:
        """Run one more round, if all is not decided and it fits."""
        names, rates = self._entrants(), dict[str, float]()
        for name in names:
            begun = self.budget.clock()
            outcome = self.burst(name, len(self.rounds))
            self.burst_s[name] = self.budget.clock() - begun
            if isinstance(outcome, Measurement):
                rates[name] = outcome.samples_per_s.value
            else:
                self._failed[name] += MAX_FAILURES if outcome.kind == "deadline" else 1  # it would hang again
        if names:
            self.rounds.append(Round(rates=rates))
        return bool(names)

    def works(self) -> list[str]:
        """Who has not failed too often; the others are compared with the first of them."""
        return [name for name in self.burst_s if self._failed[name] < MAX_FAILURES]

    def _entrants(self) -> list[str]:
        """Who runs in the next round, in this order."""
        number, works = len(self.rounds), self.works()
        ratios = ratios_of(self.rounds, works, self.of)
        open_ones = [name for name in works[1:] if name not in ratios or not _is_decided(ratios[name])]
        if number >= MOST_ROUNDS or not (open_ones or number < LEAST_ROUNDS):
            return []
        order = works[:1] + open_ones
        while sum(self.burst_s[name] for name in order) > self.budget.left():
            if len(order) <= 2:
                return []
            order.remove(max(order[1:], key=self.burst_s.__getitem__))  # the others shall have an answer
        return in_turns(order, number)


def _is_decided(ratio: Interval) -> bool:
    said = answer("", ratio, "")
    return ratio.count >= LEAST_ROUNDS and not (Answer.NOT_SHOWN.said_by(said) or Answer.UNSURE.said_by(said))


def _check_sides(sides: object) -> None:
    works = 'sides={"now": loader, "then": other_loader}'
    if not isinstance(sides, Mapping):
        raise TypeError(f"sides={sides!r:.60} is not a dict of loaders by name; {works} would work")
    refuse(len(sides) < 2, f"sides={dict(sides)!r:.60} has fewer than two sides", works, ValueError)
    for name in sides:
        is_name = isinstance(name, str) and name
        refuse(not is_name, f"sides has the name {name!r}, which is not a string", works)


def _workload(name: str, value: Any, model: Any, shared: Mapping[str, Any]) -> Workload:
    """One side as a workload.

    Raises:
        TypeError, ValueError: it is none; the message begins with its name.
    """
    given, parts = {"model": model, **shared}, value if isinstance(value, tuple) else (value,)
    no_pair = isinstance(value, tuple) and len(parts) not in (2, 3)
    works = "(loader, train_step) or (loader, model, train_step)"
    refuse(no_pair, f"sides[{name!r}] is a tuple of {len(parts)}", works)
    loader, *rest = parts
    if len(rest) == 1:
        given["model" if isinstance(rest[0], torch.nn.Module) else "train_step"] = rest[0]
    elif rest:
        given["model"], given["train_step"] = rest
    try:
        return make_workload(loader, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"sides[{name!r}]: {error}") from error


@dataclass(slots=True)
class _Entrant:
    """One side while it is measured."""

    workload: Workload
    opened: OpenProbe | None = None  # None where the first batch failed
    bursts: Bursts | None = None
    step: Measurement | None = None  # the step alone, data already in memory
    failure: Failure | None = None  # the last one
    trials: list[Trial] = field(default_factory=list)  # every burst, in order

    @property
    def config(self) -> LoaderConfig:
        return self.workload.own_config or LoaderConfig()

    def begin(self, machine: Machine, budget: Budget) -> None:
        """Time the step alone and run one burst."""
        if self.opened is None:
            return
        warmup = self.opened.warmup
        context = make_context(self.workload, warmup, machine)
        self.bursts = Bursts(self.opened.probe, context, budget, lambda: self.trials, warmup.first_batch_s)
        self.step = self.bursts.step_alone() if self.workload.has_step else None
        self.burst()

    def burst(self, round_: int | None = None) -> Measurement | Failure:
        """A burst of the round of this number, or a first one."""
        assert self.bursts is not None
        number = len(self.trials)
        try:
            trial = self.bursts.run(self.config, number, round_)
        except WorkloadError as error:  # a sample or the step raises
            trial = Trial(number=number, config=self.config, failure=_failure_of(error))
        self.trials.append(trial)
        self.failure = trial.failure or self.failure
        return trial.outcome


def _failure_of(error: WorkloadError) -> Failure:
    traceback = error.user_traceback or None
    return Failure(kind="user_exception", phase="batches", message=error.message, traceback=traceback)


def _compared(entrants: Mapping[str, _Entrant], paired: PairedRounds, machine: Machine, seconds: float) -> Comparison:
    counting = {name: each.opened.warmup.counts_batches for name, each in entrants.items() if each.opened}
    if len(set(counting.values())) > 1:
        name = next(name for name, counts in counting.items() if counts)
        raise ValueError(
            f"sides[{name!r}] does not tell the number of samples per batch, and other sides do, so their rates "
            "cannot be compared; tensors whose first dimension is the batch would work"
        )
    works = paired.works()
    sides = tuple(_side(name, each, machine, works=name in works) for name, each in entrants.items())
    notes = [
        Caution.NOTE(text=f"{name}: {note}")
        for name, each in entrants.items()
        for note in (*each.workload.notes, *(each.opened.notes if each.opened else ()))
    ]
    measured = {side.name: side.measurement for side in sides if side.measurement is not None}
    # The largest: the last batch of an epoch may be smaller.
    sizes = {name: max(each.samples for each in burst.traces) for name, burst in measured.items() if burst.traces}
    if len(set(sizes.values())) > 1:
        differ = ", ".join(f"{name} {size}" for name, size in sizes.items())
        notes.insert(0, Caution.BATCH_SIZES_DIFFER(sizes=differ))
    return Comparison(
        sides=sides,
        rounds=tuple(each for each in paired.rounds if each.rates),
        rate_unit="batches/s" if any(counting.values()) else "samples/s",
        seconds=seconds,
        notes=tuple(notes),
    )


def _side(name: str, entrant: _Entrant, machine: Machine, *, works: bool) -> Side:
    """What was measured of a side, and what limits it, by the same rules as in `tune()`."""
    config, workload, failure, trials = entrant.config, entrant.workload, entrant.failure, entrant.trials
    measured = [each.measurement for each in trials if each.measurement is not None and each.round is not None]
    if not (works and measured):
        if failure is None:
            no_room = "the budget had no room for an A/B round with it; rerun with a larger budget"
            return Side(name=name, config=config, error=no_room)
        error = f"{failure.kind}: {failure.message}"
        return Side(name=name, config=config, error=error, traceback=failure.traceback)
    together = averaged(measured)
    evidence = Evidence.of(
        together,
        config=config,
        cores=machine.usable_cores,
        ceiling=None if entrant.step is None else entrant.step.samples_per_s,
        epoch_batches=workload.data.batches_per_epoch(),
        on_accelerator=not workload.on_cpu,
        has_batched_fetch=workload.data.has_batched_fetch,
        trials=tuple(trials),
    )
    return Side(name=name, config=config, measurement=together, bottleneck=diagnose(evidence)[0])
