"""`compare()`: which of some loaders, each with its training step, is faster, and what limits each.

sides ─► a probe each ─► the step alone, one burst each ─► rounds ─► ratios with intervals, bottlenecks

Rounds go on until every side is shown to be faster or slower than the first, or as fast, or the budget ends. While samples come
from a storage no side reads what another has read, which would come from memory; otherwise those of a round read the same.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune_loader.bursts.packing import Packed
from autotune_loader.bursts.parent import OpenProbe, open_probe
from autotune_loader.diagnosis import Answer, Caution, Evidence, Finding, diagnose
from autotune_loader.diagnosis.messages import answer
from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.pipeline.reading import SIDES_APART
from autotune_loader.pipeline.workload import Workload
from autotune_loader.report.progress import make_progress
from autotune_loader.results.comparison import Comparison, Side, ratios_of
from autotune_loader.search.belief import MAX_FAILURES
from autotune_loader.search.turns import in_turns
from autotune_loader.tuning.arguments import make_workloads
from autotune_loader.tuning.bursting import Budget, Bursts
from autotune_loader.tuning.run import TuneOptions, make_context
from autotune_loader.values import Failure, LoaderConfig, Measurement, RateUnit, Round, Trial, WorkloadError, averaged
from autotune_loader.values.units import rate_text

LEAST_ROUNDS = 4
"""With fewer rounds equal sides are called faster or slower too often (`studies.fidelity.selection`)."""
MOST_ROUNDS = 100
"""What the arithmetic of rounds takes grows with their number, cubed."""
KNOWN = [row.kind for row in (Answer.FASTER, Answer.SLOWER, Answer.EQUAL)]
NO_ROOM = "the budget had no room for an A/B round with it; rerun with a larger budget"


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
        TypeError, ValueError: An argument is wrong; the message suggests a value.
    """
    options = TuneOptions(budget=budget, progress=progress)
    shared = {"train_step": train_step, "loss_fn": loss_fn, "optimizer": optimizer, "device": device}
    entrants = {name: _Entrant(workload) for name, workload in make_workloads(sides, model, **shared).items()}
    begun, machine, shown = time.monotonic(), inspect_machine(), make_progress(options.progress)
    trials, rounds = {name: each.trials for name, each in entrants.items()}, list[Round]()

    def burst(name: str, number: int) -> None:
        reads_memory = all(entrants[each].bursts.read_memory(trials[each][-1]) for each in working(trials))
        entrants[name].burst(number, place=number if reads_memory else None)

    with contextlib.ExitStack() as exits:
        beside = exits.enter_context(Packed())
        for number, (name, entrant) in enumerate(entrants.items()):
            shown.announce(f"starting {name}")
            given = entrant.workload, machine, machine.memory_budget_bytes
            opening = open_probe(*given, budget_s=options.budget_s, beside=beside, seed=number * SIDES_APART)
            with entrant.failing():
                entrant.opened = exits.enter_context(opening)
        unit = _unit_of(entrants)
        budget_left = Budget(options.budget_s, time.monotonic)
        for entrant in entrants.values():
            entrant.begin(machine, budget_left)
        for each in paired_rounds(trials, burst, budget_left):
            rounds.append(each)
            rates = ", ".join(f"{name} {rate_text(rate, unit)}" for name, rate in each.rates.items())
            shown.announce(f"round {len(rounds)}: {rates}")
    works = working(trials)
    return Comparison(
        sides=tuple(_side(name, each, machine, works=name in works) for name, each in entrants.items()),
        rounds=tuple(each for each in rounds if each.rates),
        rate_unit=unit,
        seconds=time.monotonic() - begun,
        notes=tuple(_notes(entrants, works)),
    )


def paired_rounds(
    trials: Mapping[str, Sequence[Trial]], burst: Callable[[str, int], object], budget: Budget
) -> Iterator[Round]:
    """Rounds, in each of which those sides run once that are not yet known beside the first, until all is decided.

    Args:
        trials: of every side, the last of which tells how long another one takes.
        burst: adds one to a side's in the round of this number, from 0.
        budget: a round that does not fit into it is not begun.
    """
    rounds = list[Round]()
    while names := _next(trials, rounds, budget):
        for name in names:
            burst(name, len(rounds))
        rates = {name: trials[name][-1].samples_per_s for name in names}
        rounds.append(Round(rates={name: rate for name, rate in rates.items() if rate is not None}))
        yield rounds[-1]


def working(trials: Mapping[str, Sequence[Trial]]) -> list[str]:
    """Who has not failed too often; the others are compared with the first of them."""
    # Who failed out of a round does so for good, and who hung would hang again.
    is_final = {
        name: [trial.round is None or failure.kind == "deadline" for trial in each if (failure := trial.failure)]
        for name, each in trials.items()
    }
    return [name for name, failures in is_final.items() if len(failures) < MAX_FAILURES and not any(failures)]


def _next(trials: Mapping[str, Sequence[Trial]], rounds: Sequence[Round], budget: Budget) -> list[str]:
    """Who runs in the next round, in this order."""
    works = working(trials)
    ratios = ratios_of(rounds, works, len(trials))
    known = {
        name for name, ratio in ratios.items() if ratio.count >= LEAST_ROUNDS and answer(name, ratio, "").kind in KNOWN
    }
    open_ones = [name for name in works[1:] if name not in known]
    if len(rounds) >= MOST_ROUNDS or not (open_ones or len(rounds) < LEAST_ROUNDS):
        return []
    entrants, burst_s = works[:1] + open_ones, {name: trials[name][-1].seconds for name in works}
    while sum(burst_s[name] for name in entrants) > budget.left():
        if len(entrants) <= 2:
            return []
        entrants.remove(max(entrants[1:], key=burst_s.__getitem__))  # the others shall have an answer
    return in_turns(entrants, len(rounds))


@dataclass(slots=True)
class _Entrant:
    """One side while it is measured."""

    workload: Workload
    trials: list[Trial] = field(default_factory=list)  # every burst, in order; or a first batch that failed
    opened: OpenProbe | None = None  # None where the first batch failed
    bursts: Bursts = field(init=False)  # once it has begun
    step: Measurement | None = None  # alone, data already in memory

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

    def burst(self, round_: int | None = None, place: int | None = None) -> None:
        """A burst of the round of this number, or a first one."""
        with self.failing():
            self.trials.append(self.bursts.run(self.config, len(self.trials), round_, place=place))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """What a sample or the step raises in the block, as it would in training, is how this side fails."""
        try:
            yield
        except WorkloadError as error:
            message, traceback = error.message, error.user_traceback or None
            failure = Failure(kind="user_exception", phase="batches", message=message, traceback=traceback)
            self.trials.append(Trial.of(len(self.trials), self.config, failure))


def _unit_of(entrants: Mapping[str, _Entrant]) -> RateUnit:
    """What all rates count.

    Raises:
        ValueError: some sides count samples, and others batches.
    """
    sides = {each.opened.warmup.counts_batches: name for name, each in entrants.items() if each.opened}
    if len(sides) > 1:
        raise ValueError(
            f"sides[{sides[True]!r}] does not tell the number of samples per batch, and other sides do, so their rates "
            "cannot be compared. Try tensors whose first dimension is the batch."
        )
    return "batches/s" if True in sides else "samples/s"


def _notes(entrants: Mapping[str, _Entrant], works: Sequence[str]) -> Iterator[Finding]:
    """What should be known of a comparison, and of its sides."""
    sizes, read = dict[str, int](), Counter[tuple[str, float]]()
    for name in works:
        entrant, data = entrants[name], entrants[name].workload.data
        dataset = data.description, data.samples_per_epoch() or math.inf
        for trial in entrant.trials:
            if (measured := trial.measurement) and not entrant.bursts.read_memory(trial):
                read[dataset] += measured.samples
            if measured and measured.traces:
                sizes[name] = max(trace.samples for trace in measured.traces)  # the last of an epoch may be smaller
    if len(set(sizes.values())) > 1:
        yield Caution.BATCH_SIZES_DIFFER(sizes=", ".join(f"{name} {size}" for name, size in sizes.items()))
    yield from (Caution.READ_TWICE(samples=epoch) for (_, epoch), samples in read.items() if samples > epoch)
    for name, each in entrants.items():
        notes = (*each.workload.notes, *(each.opened.notes if each.opened else ()))
        yield from (Caution.NOTE(text=f"{name}: {note}") for note in notes)


def _side(name: str, entrant: _Entrant, machine: Machine, *, works: bool) -> Side:
    """What was measured of a side, and what limits it, by the same rules as in `tune()`."""
    config, data, trials = entrant.config, entrant.workload.data, entrant.trials
    measured = [each.measurement for each in trials if each.measurement is not None and each.round is not None]
    if not (works and measured):
        failed = [each.failure for each in trials if each.failure is not None][-1:]
        error, traceback = next(((f"{each.kind}: {each.message}", each.traceback) for each in failed), (NO_ROOM, None))
        return Side(name=name, config=config, error=error, traceback=traceback)
    together = averaged(measured)
    evidence = Evidence.of(
        together,
        config=config,
        cores=machine.usable_cores,
        ceiling=None if entrant.step is None else entrant.step.samples_per_s,
        epoch_batches=data.batches_per_epoch(),
        on_accelerator=not entrant.workload.on_cpu,
        has_batched_fetch=data.has_batched_fetch,
        trials=tuple(trials),
    )
    return Side(name=name, config=config, measurement=together, bottleneck=diagnose(evidence)[0])
