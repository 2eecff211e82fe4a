"""`compare()`: which of some loaders, each with its training step, is faster, and what binds each.

sides ─► a probe each ─► one burst each, the step alone ─► paired rounds ─► ratios, verdicts
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.rounds import as_round, averaged
from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.opening import OpenProbe, open_probe
from autotune_loader.report.advice import Evidence as AdviceEvidence
from autotune_loader.report.advice import judge
from autotune_loader.report.comparison import Comparison, Side, about_batch_sizes
from autotune_loader.report.progress import Progress, make_progress
from autotune_loader.results.loader_file import Verdict
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.burst_source import BurstSource
from autotune_loader.tuning.options import TuneOptions, parse_seconds
from autotune_loader.tuning.paired import paired
from autotune_loader.tuning.schedule import EpochLength
from autotune_loader.tuning.search_space import make_space
from autotune_loader.tuning.state import Job, RunContext
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import Isolation
from autotune_loader.values.statistics import Interval, Round, mean_interval, usable_rounds
from autotune_loader.values.trial import Trial

if TYPE_CHECKING:
    import torch

FEWEST_ROUNDS, MOST_ROUNDS = 3, 12
"""An interval of fewer rounds says nothing; that of more is hardly narrower. Time alone decides between them, so that the
interval holds: rounds that end when it suits favour whoever was lucky."""
START_DEADLINE_S = 300.0
"""A side that compiles its model may take minutes for its first step."""
FASTER_THAN_ALONE = 1.15
"""A step cannot be faster in the loop than alone: above this ratio the time of the step alone is not believed."""


def compare(  # noqa: PLR0913 - all that a user may say
    sides: Mapping[str, Any],
    model: Any = None,
    *,
    train_step: Callable[[Any, Any], Any] | float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    device: str | torch.device = "auto",
    budget: str | float = "30s",
    isolation: Isolation = "auto",
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
        isolation: "process", "inline" (in this process, for debugging) or "auto".
        seed: of the order of the sides.
        progress: True, False or "auto".

    Returns:
        The comparison. Sides of different batch sizes are compared by samples/s, and it says so.

    Raises:
        TypeError, ValueError: a wrong argument, named with a value that would work.
    """
    _check_sides(sides)
    shared = {"train_step": train_step, "loss_fn": loss_fn, "optimizer": optimizer, "device": device}
    told = {True: "on", False: "off"}.get(progress, progress) if isinstance(progress, bool) else progress
    options = TuneOptions(
        budget_s=parse_seconds("budget", budget),
        isolation=isolation,
        seed=seed,
        progress=told,  # type: ignore[arg-type]
    )
    workloads = {name: _workload(name, value, model, shared) for name, value in sides.items()}
    return compare_workloads(workloads, options)


def compare_workloads(workloads: Mapping[str, Workload], options: TuneOptions) -> Comparison:
    """The comparison of workloads, each as its own configuration runs it; those of the same parts share a process."""
    begun, machine = time.monotonic(), inspect_machine()
    with contextlib.ExitStack() as exits:
        progress = make_progress(options.progress)
        probes: dict[tuple[int, int], OpenProbe | WorkloadError] = {}
        entrants = []
        for name, workload in workloads.items():
            parts = id(workload.data), id(workload.training)
            if parts not in probes:
                progress.announce(f"starting {name}")
                probes[parts] = _opened(workload, machine, options, exits)
            entrants.append(_Entrant.of(name, workload, probes[parts], machine, options))
        deadline = time.monotonic() + options.budget_s
        race = _Race([each for each in entrants if each.failure is None], options.seed, deadline, progress)
        race.run()
    return _told(entrants, race, time.monotonic() - begun)


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
    given, loader = dict(shared), value
    if isinstance(value, tuple):
        if len(value) not in (2, 3):
            raise TypeError(
                f"sides[{name!r}] is a tuple of {len(value)}; (loader, train_step) or (loader, model, train_step) would work"
            )
        loader, *rest = value
        if len(rest) == 2:
            model, given["train_step"] = rest
        elif _is_model(rest[0]):
            model = rest[0]
        else:
            given["train_step"] = rest[0]
    try:
        workload, _ = make_workload(loader, model, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"sides[{name!r}]: {error}") from error
    return replace(workload, own_config=workload.own_config or LoaderConfig())


def _is_model(value: object) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def _opened(
    workload: Workload, machine: Machine, options: TuneOptions, exits: contextlib.ExitStack
) -> OpenProbe | WorkloadError:
    """A warm probe that is closed in the end, or why there is none."""
    deadline_s = max(START_DEADLINE_S, options.budget_s)
    try:
        return exits.enter_context(
            open_probe(workload, machine, options.isolation, machine.memory_budget_bytes, start_deadline_s=deadline_s)
        )
    except WorkloadError as error:
        return error


@dataclass(slots=True, kw_only=True)
class _Entrant:
    """One side while it is measured."""

    name: str
    workload: Workload
    config: LoaderConfig
    source: BurstSource | None = None
    notes: list[str] = field(default_factory=list)
    counts_batches: bool = False
    trials: list[Trial] = field(default_factory=list)
    step: Measurement | None = None
    """The step alone, on a batch that lies ready."""
    bursts: list[Measurement] = field(default_factory=list)
    """Those of the rounds."""
    failure: str | None = None
    traceback: str | None = None

    @classmethod
    def of(
        cls, name: str, workload: Workload, opened: OpenProbe | WorkloadError, machine: Machine, options: TuneOptions
    ) -> _Entrant:
        """A side with its step timed alone and one burst run, or failed in one of these."""
        config = workload.own_config or LoaderConfig()
        if isinstance(opened, WorkloadError):
            message = str(opened).splitlines()[0]
            return cls(name=name, workload=workload, config=config, failure=message, traceback=opened.user_traceback)
        entrant = cls(name=name, workload=opened.workload, config=config, notes=list(opened.notes))
        entrant.counts_batches = opened.warmup.counts_batches
        entrant._begin(opened, machine, options)
        return entrant

    def _begin(self, opened: OpenProbe, machine: Machine, options: TuneOptions) -> None:
        space = make_space(self.workload, opened.warmup, machine, options)
        fingerprint = machine.fingerprint(dataset=self.workload.data.description)
        run = RunContext(
            workload=self.workload,
            space=space,
            warmup=opened.warmup,
            fingerprint=fingerprint,
            usable_cores=machine.usable_cores,
            notes=(),
        )
        context = Job.of(run, (), "").context()
        self.source = BurstSource(
            opened.probe, space, context, self.trials, lambda: math.inf, opened.warmup.first_batch_s
        )
        if self.workload.has_step:
            outcome = self.source.step_ceiling(self.config.consumer_threads, self.config.batch_size)
            if isinstance(outcome, Measurement):
                self.step = outcome
                self.source.context = context.with_step(self.config.consumer_threads, outcome.step_s)
        self._first_burst(self.source)

    def _first_burst(self, source: BurstSource) -> None:
        begun = time.monotonic()
        outcome = source.gather(self.config, Ask(phase="search")).outcome
        if isinstance(outcome, Failure):
            self.fail(outcome)
            return
        seconds = time.monotonic() - begun
        self.trials.append(Trial(number=0, config=self.config, role="baseline", measurement=outcome, seconds=seconds))

    def fail(self, failure: Failure) -> None:
        self.failure, self.traceback = f"{failure.kind}: {failure.message}", failure.traceback

    @property
    def context(self) -> TwinContext:
        assert self.source is not None
        return self.source.context

    def has_short_epochs(self, seconds_left: float) -> bool:
        epoch = EpochLength.of(self.trials, self.context.epoch_batches)
        return epoch is not None and epoch.is_short(seconds_left / 2)


class _Race:
    """The paired rounds of the sides that work."""

    def __init__(self, entrants: Sequence[_Entrant], seed: int, deadline: float, progress: Progress) -> None:
        self._entrants = {each.name: each for each in entrants}
        self._seed = seed
        self._deadline = deadline
        self._progress = progress
        self._round_s = 0.0
        self.rounds: list[Round] = []
        left = deadline - time.monotonic()
        # All sides alike, or start-up would count for some of them only.
        self.whole_epochs = any(each.has_short_epochs(left) for each in entrants)

    def run(self) -> None:
        if len(self._entrants) > 1:
            paired(self._next, self._observe, self._record, seed=self._seed)
            return
        for entrant in self._entrants.values():  # nothing to pair it with
            self._record([(entrant.name, self._observe(entrant.name, 0))], 0.0)

    def _next(self, number: int) -> Sequence[str]:
        working = [name for name, each in self._entrants.items() if each.failure is None]
        has_time = number < FEWEST_ROUNDS or time.monotonic() + self._round_s < self._deadline
        return working if len(working) > 1 and number < MOST_ROUNDS and has_time else ()

    def _observe(self, name: str, number: int) -> Evidence:
        entrant = self._entrants[name]
        assert entrant.source is not None
        kind = "epoch" if self.whole_epochs else "steady"
        return entrant.source.gather(entrant.config, Ask(phase="compare", kind=kind, group=number))  # type: ignore[arg-type]

    def _record(self, gathered: Sequence[tuple[str, Evidence]], seconds: float) -> None:
        self._round_s = max(self._round_s, seconds)
        for name, evidence in gathered:
            if evidence.failure is not None:
                self._entrants[name].fail(evidence.failure)
            elif evidence.measurement is not None:
                self._entrants[name].bursts.append(evidence.measurement)
        self.rounds.append(as_round([(name, each.outcome) for name, each in gathered]))
        rates = ", ".join(f"{name} {rate:,.0f}" for name, rate in self.rounds[-1].rates.items())
        self._progress.announce(f"round {len(self.rounds)}: {rates}")


def _told(entrants: Sequence[_Entrant], race: _Race, seconds: float) -> Comparison:
    counting = [each.name for each in entrants if each.counts_batches and each.failure is None]
    working = [each for each in entrants if each.failure is None]
    if 0 < len(counting) < len(working):
        raise ValueError(
            f"sides[{counting[0]!r}] does not tell how many samples a batch holds, and other sides do, so that they have no "
            "rate in common; tensors whose first dimension are the samples would work"
        )
    usable = usable_rounds(race.rounds)
    machine_notes = [usable.note] if usable.note else []
    sides = tuple(_side(each, usable.rounds) for each in entrants)
    notes = [f"{each.name}: {note}" for each in entrants for note in each.notes]
    return Comparison(
        sides=sides,
        rounds=usable.rounds,
        rate_unit="batches/s" if counting else "samples/s",
        whole_epochs=race.whole_epochs,
        seconds=seconds,
        notes=(*about_batch_sizes(sides), *machine_notes, *notes),
    )


def _side(entrant: _Entrant, rounds: Sequence[Round]) -> Side:
    rates = [each.rates[entrant.name] for each in rounds if entrant.name in each.rates]
    if entrant.failure is not None or not rates:
        error = entrant.failure or "no round was completed"
        return Side(name=entrant.name, config=entrant.config, error=error, traceback=entrant.traceback)
    measurement = averaged(entrant.bursts)
    verdict = _verdict(entrant, measurement, mean_interval(rates))
    return Side(name=entrant.name, config=entrant.config, measurement=measurement, verdict=verdict)


def _verdict(entrant: _Entrant, measurement: Measurement, rate: Interval) -> Verdict:
    """What binds the side, by the same rules as in `tune()`."""
    data, step, context = entrant.workload.data, entrant.step, entrant.context
    ceiling = None if step is None else step.samples_per_s
    doubt = None
    if ceiling is not None and rate.value > FASTER_THAN_ALONE * ceiling.value:
        ceiling, doubt = None, "the loop was faster than the step alone"
    measured = [(trial.config, trial.measurement) for trial in entrant.trials if trial.measurement is not None]
    return judge(
        AdviceEvidence(
            best=entrant.config,
            measurement=measurement,
            rate=rate,
            ceiling=ceiling,
            ceiling_doubt=doubt,
            usable_cores=context.usable_cores,
            on_accelerator=not entrant.workload.on_cpu,
            epoch_batches=data.batches_per_epoch(entrant.config.batch_size),
            trials=entrant.trials,
            has_batched_fetch=bool(getattr(data.dataset, "__getitems__", None)),
            twin=fit_twin(measured, context),
        )
    )


def sides_of(configs: Mapping[str, LoaderConfig], workload: Workload) -> dict[str, Workload]:
    """One job with each of some configurations."""
    return {name: replace(workload, own_config=config) for name, config in configs.items()}
