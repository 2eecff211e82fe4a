"""`compare()`: which of some loaders, each with its training step, is faster, and what binds each.

sides ─► a probe each ─► one burst each, the step alone ─► paired rounds ─► ratios, verdicts
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autotune_loader.bursts.parent import OpenProbe, open_probe
from autotune_loader.decision.evidence import Ask
from autotune_loader.decision.rounds import as_round
from autotune_loader.decision.space import Space
from autotune_loader.diagnosis import Caution, Evidence, diagnose
from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.pipeline.workload import Workload
from autotune_loader.report.progress import make_progress
from autotune_loader.results.comparison import Comparison, Side
from autotune_loader.results.record import Finding
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.finals import paired
from autotune_loader.tuning.options import TuneOptions, parse_options
from autotune_loader.tuning.state import twin_context
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, Measurement, averaged
from autotune_loader.values.statistics import Round, mean_interval, usable_rounds
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import torch

FEWEST_ROUNDS, MOST_ROUNDS = 3, 12
"""An interval of fewer rounds says nothing; that of more is hardly narrower. Time alone decides between them, so that the
interval holds: rounds that end when it suits favour whoever was lucky."""


def compare(  # noqa: PLR0913 - all that a user may say
    sides: Mapping[str, Any],
    model: Any = None,
    *,
    train_step: Callable[[Any, Any], Any] | float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    device: str | torch.device = "auto",
    budget: str | float = "30s",
    seed: int = 0,
    progress: str | bool = "auto",
) -> Comparison:
    """Measure which of some loaders is faster in training, and what binds each; nothing of the caller's is changed.

    Each side trains in a process of its own, in short bursts that take turns. A side that fails is an answer, with its error.

        compare({"now": loader, "cached": other_loader}, model, loss_fn=loss_fn)
        compare({"eager": (loader, model), "compiled": (loader, torch.compile(model))}, loss_fn=loss_fn)

    Args:
        sides: by name, the first of which the others are compared with: a DataLoader; a pair of it and the `train_step` or the
            model of this side; or `(loader, model, train_step)`. Loaders are only read, never iterated.
        model: what the step of each side trains that has no model of its own; None compares the loaders alone.
        train_step: as in `tune()`, like the next three: of each side that has no step of its own.
        loss_fn: as in `tune()`.
        optimizer: as in `tune()`.
        device: as in `tune()`.
        budget: seconds for bursts and rounds, such as 30, "30s" or "2m", beside those in which processes start and models are
            compiled. Three rounds are run however long they take, twelve at most.
        seed: of the order of the sides.
        progress: True, False or "auto".

    Returns:
        The comparison. Sides of different batch sizes are compared by samples/s, and it says so.

    Raises:
        TypeError, ValueError: a wrong argument, named with a value that would work.
    """
    _check_sides(sides)
    shared = {"train_step": train_step, "loss_fn": loss_fn, "optimizer": optimizer, "device": device}
    options = parse_options({"budget": budget, "seed": seed, "progress": progress})
    workloads = {name: _workload(name, value, model, shared) for name, value in sides.items()}
    return compare_workloads(workloads, options)


def compare_workloads(workloads: Mapping[str, Workload], options: TuneOptions) -> Comparison:
    """The comparison of workloads, each as its own configuration runs it; those of the same parts share a process."""
    begun, machine, progress = time.monotonic(), inspect_machine(), make_progress(options.progress)
    entrants = {name: _Entrant(name=name, workload=workload) for name, workload in workloads.items()}
    rounds, longest_s = list[Round](), 0.0

    def working(number: int) -> list[str]:
        names = [name for name, each in entrants.items() if each.failure is None]
        has_time = number < FEWEST_ROUNDS or time.monotonic() + longest_s < deadline
        most = MOST_ROUNDS if len(names) > 1 else 1  # alone it has nothing to be paired with
        return names if number < most and has_time else []

    def observe(name: str, number: int) -> Measurement | Failure:
        return entrants[name].gather(Ask(phase="compare", group=number))

    with contextlib.ExitStack() as exits:
        probes: dict[tuple[int, int], OpenProbe | WorkloadError] = {}
        for each in entrants.values():
            parts = id(each.workload.data), id(each.workload.training)
            if parts not in probes:
                progress.announce(f"starting {each.name}")
                probes[parts] = _opened(each.workload, machine, options, exits)
            each.begin(probes[parts], machine)
        deadline = time.monotonic() + options.budget_s
        for outcomes, seconds in paired(working, observe, seed=options.seed):
            longest_s = max(longest_s, seconds)
            rounds.append(as_round(outcomes))
            rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in rounds[-1].rates.items())
            progress.announce(f"round {len(rounds)}: {rates}")
    return _told(list(entrants.values()), rounds, time.monotonic() - begun)


def _check_sides(sides: object) -> None:
    example = 'sides={"now": loader, "then": other_loader} would work'
    if not isinstance(sides, Mapping):
        raise TypeError(f"sides={sides!r:.60} is not a dict of loaders by name; {example}")
    if len(sides) < 2:
        raise ValueError(f"sides={dict(sides)!r:.60} holds {len(sides)} of the two sides that it takes; {example}")
    for name in sides:
        if not isinstance(name, str) or not name:
            raise TypeError(f"sides has the name {name!r}, which is not a text; {example}")


def _workload(name: str, value: Any, model: Any, shared: Mapping[str, Any]) -> Workload:
    """One side as a workload.

    Raises:
        TypeError, ValueError: it is none; the message begins with its name.
    """
    import torch

    given, (loader, *rest) = {"model": model, **shared}, value if isinstance(value, tuple) and value else (value,)
    if isinstance(value, tuple) and len(value) not in (2, 3):
        raise TypeError(
            f"sides[{name!r}] is a tuple of {len(value)}; (loader, train_step) or (loader, model, train_step) would work"
        )
    if len(rest) == 1:
        given["model" if isinstance(rest[0], torch.nn.Module) else "train_step"] = rest[0]
    elif rest:
        given["model"], given["train_step"] = rest
    try:
        workload = make_workload(loader, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"sides[{name!r}]: {error}") from error
    return replace(workload, own_config=workload.own_config or LoaderConfig())


def _opened(
    workload: Workload, machine: Machine, options: TuneOptions, exits: contextlib.ExitStack
) -> OpenProbe | WorkloadError:
    """A warm probe that is closed in the end, or why there is none."""
    memory_bytes = machine.memory_budget_bytes
    try:
        return exits.enter_context(open_probe(workload, machine, memory_bytes, budget_s=options.budget_s))
    except WorkloadError as error:
        return error


@dataclass(slots=True, kw_only=True)
class _Entrant:
    """One side while it is measured."""

    name: str
    workload: Workload
    source: BurstSource = field(init=False)
    notes: tuple[str, ...] = ()
    counts_batches: bool = False
    trials: list[Trial] = field(default_factory=list)
    step: Measurement | None = None
    """The step alone, on a batch that lies ready."""
    bursts: list[Measurement] = field(default_factory=list)
    """Those of the rounds."""
    failure: str | None = None
    traceback: str | None = None

    @property
    def config(self) -> LoaderConfig:
        return self.workload.own_config or LoaderConfig()

    def begin(self, opened: OpenProbe | WorkloadError, machine: Machine) -> None:
        """Time the step alone and run one burst."""
        if isinstance(opened, WorkloadError):
            self._fail(_failure_of(opened))
            return
        config, warmup = self.config, opened.warmup
        self.notes = tuple(opened.notes)
        self.counts_batches = warmup.counts_batches
        context, space = (
            twin_context(self.workload, warmup, machine.usable_cores),
            Space(max_workers=config.num_workers),
        )
        self.source = BurstSource(opened.probe, space, context, self.trials, lambda: math.inf, warmup.first_batch_s)
        begun, threads = time.monotonic(), config.consumer_threads
        step = self.source.step_ceiling(config.batch_size) if self.workload.has_step else None
        if isinstance(step, Measurement):
            self.step, self.source.context = step, context.with_step(threads, step.step_s)
        if isinstance(burst := self.gather(Ask()), Measurement):
            self.bursts.clear()  # rates are taken from rounds alone
            seconds = time.monotonic() - begun
            self.trials.append(Trial(number=0, config=config, role="baseline", measurement=burst, seconds=seconds))

    def gather(self, ask: Ask) -> Measurement | Failure:
        """What a burst says, which is remembered."""
        try:
            outcome = self.source.gather(self.config, ask).outcome
        except WorkloadError as error:  # a sample raises
            outcome = _failure_of(error)
        if isinstance(outcome, Failure):
            self._fail(outcome)
        else:
            self.bursts.append(outcome)
        return outcome

    def told(self) -> Iterator[str]:
        """What is to be known of this side."""
        yield from self.workload.notes
        yield from self.notes

    def _fail(self, failure: Failure) -> None:
        self.failure, self.traceback = f"{failure.kind}: {failure.message}", failure.traceback


def _failure_of(error: WorkloadError) -> Failure:
    return Failure(kind="user_exception", phase="batches", message=error.message, traceback=error.user_traceback)


def _told(entrants: Sequence[_Entrant], rounds: Sequence[Round], seconds: float) -> Comparison:
    working = [each for each in entrants if each.failure is None]
    counting = [each.name for each in working if each.counts_batches]
    if 0 < len(counting) < len(working):
        raise ValueError(
            f"sides[{counting[0]!r}] does not tell how many samples a batch holds, and other sides do, so that they have no "
            "rate in common; tensors whose first dimension are the samples would work"
        )
    usable = usable_rounds(rounds)
    sides = tuple(_side(each, usable.rounds) for each in entrants)
    notes = [Caution.NOTE(text=f"{each.name}: {note}") for each in entrants for note in each.told()]
    return Comparison(
        sides=sides,
        rounds=usable.rounds,
        rate_unit="batches/s" if counting else "samples/s",
        seconds=seconds,
        notes=(*_about_batch_sizes(sides), *([Caution.NOTE(text=usable.note)] if usable.note else []), *notes),
    )


def _side(entrant: _Entrant, rounds: Sequence[Round]) -> Side:
    """What was measured of a side, and what binds it, by the same rules as in `tune()`."""
    name, config, data = entrant.name, entrant.config, entrant.workload.data
    rates = [each.rates[name] for each in rounds if name in each.rates]
    if entrant.failure is not None or not rates:
        error = entrant.failure or "no round was completed"
        return Side(name=name, config=config, error=error, traceback=entrant.traceback)
    measurement, step = averaged(entrant.bursts), entrant.step
    found = diagnose(
        Evidence.of(
            measurement,
            config=config,
            cores=entrant.source.context.usable_cores,
            samples_per_s=mean_interval(rates).value,
            ceiling=None if step is None else step.samples_per_s,
            epoch_batches=data.batches_per_epoch(config.batch_size),
            on_accelerator=not entrant.workload.on_cpu,
            has_batched_fetch=data.has_batched_fetch,
            trials=tuple(entrant.trials),
        )
    )
    return Side(name=name, config=config, measurement=measurement, bottleneck=found.bottleneck)


def _about_batch_sizes(sides: Sequence[Side]) -> Iterator[Finding]:
    """That sides of different batch sizes are compared by samples/s; nothing where they are of one size."""
    sizes = {side.name: side.measurement.batch_size for side in sides if side.measurement is not None}
    if sizes and max(sizes.values()) > 1.01 * min(sizes.values()):
        yield Caution.BATCH_SIZES_DIFFER(sizes=", ".join(f"{name} {size:.3g}" for name, size in sizes.items()))


def sides_of(configs: Mapping[str, LoaderConfig], workload: Workload) -> dict[str, Workload]:
    """One job with each of some configurations."""
    return {name: replace(workload, own_config=config) for name, config in configs.items()}
