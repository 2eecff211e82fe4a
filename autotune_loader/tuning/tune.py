"""`tune()`: the story of one tuning run, from the caller's objects to a `TuningResult`."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autotune_loader.decision.space import Space
from autotune_loader.machine.facts import Fingerprint, Machine, inspect_machine
from autotune_loader.pipeline.workload import Workload
from autotune_loader.probe.opening import Isolation, OpenProbe, open_probe
from autotune_loader.probe.protocol import Probe
from autotune_loader.report.progress import Progress, make_progress
from autotune_loader.report.semantics import unmet
from autotune_loader.results import cache
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import answers_loader_arguments, make_workload
from autotune_loader.tuning.assemble import RunContext, assemble, assemble_reused, loader_parts
from autotune_loader.tuning.experiments import KINDS, StepProbe, budget_of_search, measure_allowed
from autotune_loader.tuning.lockstep import (
    common_space,
    environment,
    follow,
    lead,
    opened_together,
    share,
    workload_of_rank,
)
from autotune_loader.tuning.options import Search, TuneOptions, parse_options
from autotune_loader.tuning.ranks import Ranks, joined_ranks
from autotune_loader.tuning.recheck import check, study_of
from autotune_loader.tuning.search_space import make_space
from autotune_loader.tuning.session import TuningSession
from autotune_loader.tuning.state import SearchState
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.serialization import require_writable
from autotune_loader.values.trial import Acceleration, Trial

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
# However small the budget, importing torch and the first batch get so long; a larger budget may be spent on them.
SHORTEST_START_DEADLINE_S = 30.0
# What a warning says of a file that was asked for.
NOT_WRITTEN = "could not be written"


@answers_loader_arguments
def tune(
    dataset_or_loader: Any,
    model: Any = None,
    *,
    batch_size: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    train_step: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
    device: str | torch.device = "auto",
    collate_fn: Callable[[Any], Any] | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
    generator: torch.Generator | None = None,
    drop_last: bool | None = None,
    budget: str | float = "60s",
    max_trials: int | None = None,
    max_workers: int | None = None,
    max_host_memory: str | int | None = None,
    max_shm: str | int | None = None,
    allow: Sequence[str] = (),
    tolerance: float = 0.02,
    search: Search = "auto",
    seed: int = 0,
    isolation: Isolation = "auto",
    storage: str | os.PathLike[str] | None = None,
    study_name: str | None = None,
    reuse: bool = True,
    output: str | os.PathLike[str] | None = None,
    progress: str | bool = "auto",
) -> TuningResult:
    """Find the cheapest DataLoader configuration that is as fast as anything this machine can do.

    Short bursts of real training run in a process of their own; nothing of the caller's is changed. Ctrl-C returns the best
    found so far, with `status="partial"`.

    Args:
        dataset_or_loader: a map-style or iterable dataset, or an existing DataLoader, whose configuration becomes the
            baseline. A loader is only read, never iterated.
        model: what the step trains; None tunes the loader alone.
        batch_size: samples per batch; taken from the loader where one is given.
        loss_fn: `loss_fn(model(x), y)`, or its class; inferred from output and y where it is not given.
        train_step: `train_step(model, batch)`, the general form; without it the step is inferred. It may return the loss, or
            run backward and step an optimizer itself: what it does not do is done for it.
        optimizer: an optimizer over the model's parameters, or a callable (such as its class) that makes one from them.
        device: where the step runs; "auto" is where the model is, else CUDA where there is one, else the CPU.
        collate_fn: as in `DataLoader`; used as it is, like the next five.
        sampler: as in `DataLoader`.
        batch_sampler: as in `DataLoader`.
        worker_init_fn: as in `DataLoader`.
        generator: as in `DataLoader`; its state is left as it was.
        drop_last: as in `DataLoader`.
        budget: wall seconds from call to result, such as 60, "60s" or "3m".
        max_trials: most configurations to try.
        max_workers: most workers to try.
        max_host_memory: most memory of the probe's process tree, such as "8GB".
        max_shm: most shared memory of the batches in flight.
        allow: what may be searched although it changes the semantics of training: "batch_size", "in_order",
            "persistent_workers" (where the dataset knows its epoch), "multiprocessing_context", "sharing_strategy",
            "drop_last". "compile" and "amp" change nothing: where the step binds, they have torch.compile and autocast
            timed against it, with a check that the losses stay the same.
        tolerance: configurations this close to the fastest count as equally fast; the cheapest of them is chosen.
        search: "auto" (the twin proposes), "tpe", "grid" or "random".
        seed: of the order of proposals and of the samples; timings are not seedable.
        isolation: "process", "inline" (in this process, for debugging) or "auto".
        storage: where the Optuna study is kept: the path of a journal file, or a URL of any database Optuna takes.
        study_name: name of the study in the storage.
        reuse: use an earlier result for the same machine and workload, after a paired check of about 2 s has shown that
            it still holds; otherwise its best is tried early. False tunes anew; either way the result is kept for later.
        output: write `loader.json` here, after every trial.
        progress: True, False or "auto": one line per trial on a terminal or in a notebook.

    Returns:
        The result; its `status` is "fallback" when no configuration worked, and then `best` is torch's default.

    Raises:
        TypeError, ValueError: a wrong argument, named with a value that would work.
        WorkloadError: dataset, model or step failed on the very first batch; carries the user's own traceback.
        RankLostError: under torchrun, where every rank must call `tune()`: a rank failed, died or did not answer.
    """
    started = time.monotonic()
    settings = parse_options(
        {
            "budget": budget,
            "max_trials": max_trials,
            "max_workers": max_workers,
            "max_host_memory": max_host_memory,
            "max_shm": max_shm,
            "allow": allow,
            "tolerance": tolerance,
            "search": search,
            "seed": seed,
            "isolation": isolation,
            "storage": storage,
            "study_name": study_name,
            "reuse": reuse,
            "output": output,
            "progress": progress,
        }
    )
    workload, notes = make_workload(
        dataset_or_loader,
        model,
        batch_size=batch_size,
        loss_fn=loss_fn,
        train_step=train_step,
        optimizer=optimizer,
        device=device,
        collate_fn=collate_fn,
        sampler=sampler,
        batch_sampler=batch_sampler,
        worker_init_fn=worker_init_fn,
        generator=generator,
        drop_last=drop_last,
    )
    return _tune(workload, settings, notes, started)


def _tune(workload: Workload, settings: TuneOptions, notes: list[str], started: float) -> TuningResult:
    with joined_ranks() as ranks:
        return _tune_with(ranks, workload_of_rank(ranks, workload), settings, notes, started)


def _tune_with(
    ranks: Ranks | None, workload: Workload, settings: TuneOptions, notes: list[str], started: float
) -> TuningResult:
    machine = inspect_machine(environ=environment(ranks))
    fingerprint = machine.fingerprint(dataset=_describe(workload.data.dataset))
    leads = ranks is None or ranks.leads
    if leads and settings.output is not None:
        require_writable("output", settings.output)
    progress = make_progress(settings.progress if leads else "off")
    progress.announce(f"starting the probe on {machine.usable_cores} usable cores{_gpu_notice(machine)}")
    memory_bytes = settings.max_host_memory_bytes or machine.memory_budget_bytes

    def open_own() -> AbstractContextManager[OpenProbe]:
        deadline_s = max(SHORTEST_START_DEADLINE_S, settings.budget_s)
        return open_probe(workload, machine, settings.isolation, memory_bytes, start_deadline_s=deadline_s)

    try:
        with opened_together(ranks, open_own) as opened:
            own_space = functools.partial(make_space, workload, opened.warmup, machine, settings)
            space = common_space(ranks, machine.usable_cores, own_space)
            if ranks is not None and not leads:
                return follow(ranks, opened.probe, loader_parts(workload))
            probe = lead(ranks, opened.probe)
            progress.announce(f"step: {opened.warmup.step}; up to {space.max_workers} workers")
            setting = RunContext(
                workload=workload,
                space=space,
                warmup=opened.warmup,
                fingerprint=fingerprint,
                usable_cores=machine.usable_cores,
                notes=(*notes, *opened.notes, *unmet(workload.data, settings.allow, space)),
                tolerance=settings.tolerance,
            )
            memory = _CachedResult(setting, settings, progress, 1 if ranks is None else ranks.world_size)
            earlier = memory.recall(probe, started)
            if earlier is not None:
                return share(probe, _saved(earlier, settings.output))
            setting = memory.setting
            reporter = _Reporter(setting, settings, progress, started)
            search = TuningSession(
                probe,
                space,
                replace(settings, budget_s=budget_of_search(settings.budget_s, settings.allow)),
                own_config=workload.own_config,
                usable_cores=machine.usable_cores,
                default_threads=opened.warmup.default_threads,
                step_uses_cores=workload.training.device.startswith("cpu"),
                clock=time.monotonic,
                started=started,
                listener=reporter,
                name=settings.study_name or _study_name(space, fingerprint),
                has_step=workload.training.model is not None or workload.training.train_step is not None,
                suggestions=memory.suggestions,
                epoch_batches=None if workload.data.is_iterable else workload.data.batches_per_epoch(),
            )
            reporter.found = search.found
            search.run()
            search.found.accelerations = _accelerations(
                search.found, setting, settings, opened.probe if ranks is None else None, started
            )
        result = assemble(search.found, setting, time.monotonic() - started, final=True)
        result = _saved(result, settings.output)
        search.finish()
        memory.keep(result, cut_short=search.found.was_cut_short)
        return share(probe, result)
    finally:
        progress.close()


class _CachedResult:
    """What was found earlier for the same workload on the same machine: recalled if it still holds, and kept for later."""

    def __init__(self, setting: RunContext, settings: TuneOptions, progress: Progress, ranks: int) -> None:
        step = setting.warmup.step
        self._identity = cache.Identity.of(
            setting.workload, setting.fingerprint, settings.limits(), step=step, ranks=ranks
        )
        self._folder = cache.cache_folder()
        self._settings = settings
        self._progress = progress
        self._without_objection = setting.notes
        self.setting = setting
        """With a note on why the earlier result was not used, if there was one."""
        self.suggestions: tuple[LoaderConfig, ...] = ()
        """Configurations to try early."""

    def recall(self, probe: Probe, started: float) -> TuningResult | None:
        """The earlier result, checked; None where there is none, or none that holds."""
        # A study that is kept on purpose is to be gone on with, not passed over.
        if not self._settings.reuse or self._settings.storage is not None:
            return None
        entry = cache.find(self._identity, self._folder)
        if entry is None:
            return None
        self.suggestions = (entry.result.best,)
        if not entry.is_enough_for(self._settings.budget_s, self._settings.max_trials):
            log.info("the earlier result of %s had less time or fewer trials; tuning anew", entry.note.tuned_at)
            return None
        baseline = self.setting.workload.own_config or LoaderConfig()
        self._progress.announce(f"checking the result of {entry.note.tuned_at}: {entry.result.best}")
        seen = check(probe, entry, baseline, self.setting.space, self._settings.tolerance)
        if seen.objection:
            self._object(entry, seen.objection)
            return None
        study = study_of(entry.result, self.setting.space, self._settings, self.setting.warmup.default_threads)
        return assemble_reused(entry, seen, self.setting, baseline, time.monotonic() - started, study)

    def keep(self, result: TuningResult, *, cut_short: bool) -> None:
        """Keep the result of a search for the next call."""
        objections = set(self.setting.notes) - set(self._without_objection)
        lasting = tuple(warning for warning in result.warnings if warning not in objections)
        result = replace(result, warnings=lasting)
        cache.keep(
            self._identity,
            result,
            self._folder,
            budget_s=self._settings.budget_s,
            max_trials=self._settings.max_trials,
            cut_short=cut_short,
        )

    def _object(self, entry: cache.Entry, objection: str) -> None:
        text = f"the result of {entry.note.tuned_at} ({entry.result.best}) was not reused: {objection}"
        log.warning("%s; tuning anew", text)
        self.setting = replace(self.setting, notes=(*self.setting.notes, text))


def _accelerations(
    found: SearchState, setting: RunContext, settings: TuneOptions, probe: StepProbe | None, started: float
) -> tuple[Acceleration, ...]:
    """What allowed changes of the step would bring; Ctrl-C ends that, and keeps what the search found."""
    if found.interrupted or not settings.allow & set(KINDS):
        return ()
    so_far = assemble(found, setting, 0.0, final=True)

    def seconds_left() -> float:
        return settings.budget_s - (time.monotonic() - started)

    try:
        return measure_allowed(settings.allow, so_far.verdict, probe, so_far.best.consumer_threads, seconds_left)
    except KeyboardInterrupt:
        found.interrupted = True
        return ()


def _saved(result: TuningResult, output: str | None) -> TuningResult:
    """The result, written where that was asked for. A disk that is full by now costs a warning, not the result."""
    if output is None:
        return result
    try:
        result.save(output)
    except OSError as error:
        text = f"{output} {NOT_WRITTEN} ({error.strerror}); result.save() elsewhere keeps the result"
        log.warning(text)
        return replace(result, warnings=(*result.warnings, text))
    return result


class _Reporter:
    """The search's listener: rewrites `loader.json` after every trial and draws a line for it."""

    found: SearchState

    def __init__(self, setting: RunContext, settings: TuneOptions, progress: Progress, started: float) -> None:
        self._setting = setting
        self._settings = settings
        self._progress = progress
        self._started = started

    def trial(self, trial: Trial, best: Trial | None, seconds_left: float) -> None:
        self._progress.trial(trial, best, seconds_left)
        if self._settings.output is not None and best is not None:
            seconds = time.monotonic() - self._started
            _saved(assemble(self.found, self._setting, seconds, final=False), self._settings.output)

    def finals_round(self, number: int, rates: dict[LoaderConfig, float], seconds_left: float) -> None:
        self._progress.finals_round(number, rates, seconds_left)


def _gpu_notice(machine: Machine) -> str:
    """Why there will be no figures of a GPU, said once; nothing where there will be."""
    return "" if machine.gpu_reason is None else f"; no GPU is watched ({machine.gpu_reason})"


def _describe(dataset: Any) -> str:
    """What identifies the data for the fingerprint: its class and length."""
    try:
        size = f"[{len(dataset)}]"
    except (TypeError, NotImplementedError):
        size = ""
    return f"{type(dataset).__module__}.{type(dataset).__qualname__}{size}"


def _study_name(space: Space, fingerprint: Fingerprint) -> str:
    """One study holds trials of one space on one kind of machine with one dataset only."""
    text = repr(replace(fingerprint, driver=None))
    return f"autotune-{space.hash}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
