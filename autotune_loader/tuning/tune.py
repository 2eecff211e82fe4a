"""`tune()`: the story of one tuning run, from the caller's objects to a `TuningResult`.

options and workload ─► probe ─► space ─► an earlier result that still holds, or
a session of trials ─► result ─► loader.json and the cache
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autotune_loader.bursts.parent import open_probe
from autotune_loader.machine.affinity import confined_to
from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.pipeline.workload import Workload
from autotune_loader.report.progress import Progress, make_progress
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import answers_loader_arguments, make_workload, told_beside_errors
from autotune_loader.tuning.assemble import FileAndProgress, assemble, loader_parts, saved
from autotune_loader.tuning.options import OPTIONS, Search, TuneOptions, parse_options
from autotune_loader.tuning.ranks import (
    LockstepProbe,
    Ranks,
    common_space,
    environment,
    follow,
    joined_ranks,
    share,
    workload_of_rank,
)
from autotune_loader.tuning.session import TuningSession
from autotune_loader.tuning.state import RunContext, make_space
from autotune_loader.values.serialization import require_writable

if TYPE_CHECKING:
    import torch

BURSTS_SHARE = 0.5
"""Of the budget so much is left for bursts, however long importing torch, the first batch and compiling have taken."""


@answers_loader_arguments
def tune(  # noqa: PLR0913 - all that a user may say
    dataset_or_loader: Any,
    model: Any = None,
    *,
    batch_size: int | None = None,
    loss_fn: Callable[..., Any] | None = None,
    train_step: Callable[[Any, Any], Any] | float | None = None,
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
    max_cores: int | None = None,
    max_host_memory: str | int | None = None,
    max_shm: str | int | None = None,
    allow: Sequence[str] = (),
    tolerance: float = 0.02,
    search: Search = "auto",
    seed: int = 0,
    storage: str | os.PathLike[str] | None = None,
    study_name: str | None = None,
    stages: bool = True,
    output: str | os.PathLike[str] | None = None,
    progress: str | bool = "auto",
) -> TuningResult:
    """Find the cheapest DataLoader configuration that is as fast as anything this machine can do.

    Short bursts of real training run in a process of their own; nothing of the caller's is changed, and no copy of it is
    finalised there. Ctrl-C returns the best found so far, with `status="partial"`.

    Args:
        dataset_or_loader: a map-style or iterable dataset, or an existing DataLoader, whose configuration becomes the
            baseline. A loader is only read, never iterated.
        model: what the step trains; None tunes the loader alone.
        batch_size: samples per batch; taken from the loader where one is given.
        loss_fn: `loss_fn(model(x), y)`, or its class; inferred from output and y where it is not given.
        train_step: `train_step(model, batch)`, the general form; without it the step is inferred. It may return the loss, or
            run backward and step an optimizer itself: what it does not do is done for it. A number is the seconds of a step:
            the loader is tuned against a wait as long, without the model.
        optimizer: an optimizer over the model's parameters, or a callable (such as its class) that makes one from them.
        device: where the step runs; "auto" is where the model is, else CUDA where there is one, else the CPU.
        collate_fn: as in `DataLoader`; used as it is, like the next five.
        sampler: as in `DataLoader`.
        batch_sampler: as in `DataLoader`.
        worker_init_fn: as in `DataLoader`.
        generator: as in `DataLoader`; its state is left as it was.
        drop_last: as in `DataLoader`.
        budget: wall seconds from call to result, such as 60, "60s" or "3m". Half of it is left for bursts where starting
            takes longer, as on a busy machine or where a step is compiled.
        max_trials: most configurations to try.
        max_workers: most workers to try.
        max_cores: the cores that the training job will have, where these are fewer than here. Bursts, those of the baseline,
            too, run on so many, with their workers; the step is given no more threads.
        max_host_memory: most memory of the probe's process tree, such as "8GB".
        max_shm: most shared memory of the batches in flight.
        allow: what may be searched although it changes the semantics of training: "batch_size", "in_order",
            "persistent_workers" (where the dataset knows its epoch), "multiprocessing_context", "sharing_strategy",
            "drop_last".
        tolerance: configurations this close to the fastest count as equally fast; the cheapest of them is chosen.
        search: "auto" (the twin proposes), "tpe", "grid" or "random".
        seed: of the order of proposals and of the samples; timings are not seedable.
        storage: where the Optuna study is kept, so that a run that was killed goes on: the path of a journal file, or a URL of
            any database that Optuna takes.
        study_name: name of the study in the storage; without it each job has its own.
        stages: tell which stage of the dataset takes how much of a worker's time (`result.stages()`): it is clocked in
            workers during the search, at about 1 % of their time, and not in the paired rounds that rates are taken from.
        output: write `loader.json` here, after every trial.
        progress: True, False or "auto": one line per trial on a terminal or in a notebook.

    Returns:
        The result; its `status` is "undecided" when too little, or too disturbed, was measured to choose, so that `best` is a
        guess, and "fallback" when no configuration worked, and then `best` is torch's default.

    Raises:
        TypeError, ValueError: a wrong argument, named with a value that would work.
        WorkloadError: dataset, model or step failed on the very first batch; carries the user's own traceback.
        RankLostError: under torchrun, where every rank must call `tune()`: a rank failed, died or did not answer.
    """
    given = dict(locals())  # every argument by its name
    started = time.monotonic()
    options = parse_options({name: given[name] for name in OPTIONS})
    workload = make_workload(**given)
    with told_beside_errors(workload.notes), joined_ranks() as ranks:
        leads = ranks is None or ranks.leads
        shown = make_progress(options.progress, rank=0 if leads else 1)
        if leads and options.output is not None:
            require_writable("output", options.output)
        whole = inspect_machine(environ=environment(ranks))
        with confined_to(options.max_cores and options.max_cores * whole.world_size):
            return _tuned(workload_of_rank(ranks, workload), options, started, ranks, shown, whole)


def _tuned(
    workload: Workload,
    options: TuneOptions,
    started: float,
    ranks: Ranks | None,
    progress: Progress,
    whole: Machine,
) -> TuningResult:
    machine = whole if options.max_cores is None else inspect_machine(environ=environment(ranks))
    progress.announce(f"starting the probe on {machine.usable_cores} usable cores")
    memory_bytes = options.max_host_memory_bytes or machine.memory_budget_bytes
    with open_probe(workload, machine, memory_bytes, budget_s=options.budget_s) as opened:
        begun, waited = start_of_budget(started, time.monotonic(), options.budget_s)
        space = common_space(ranks, machine.usable_cores, make_space(workload, opened.warmup, machine, options))
        if ranks is not None and not ranks.leads:
            return follow(ranks, opened.probe, loader_parts(workload))
        probe = opened.probe if ranks is None else LockstepProbe(ranks, opened.probe)
        at_first = "" if space.workers_are_capped else " at first"
        progress.announce(f"step: {opened.warmup.step}; up to {space.max_workers} workers{at_first}")
        context = RunContext(
            workload=workload,
            space=space,
            warmup=opened.warmup,
            fingerprint=whole.fingerprint(dataset=workload.data.description),
            usable_cores=machine.usable_cores,
            notes=(*workload.notes, *opened.notes, *waited),
        )
        session = TuningSession(
            probe,
            context,
            options,
            clock=time.monotonic,
            started=begun,
            listener=FileAndProgress(options.output, progress, started),
            job=f"{space.hash}-{workload.data.description}",
        )
        state = session.run()
    result = saved(assemble(state, time.monotonic() - started, final=True), options.output)
    return share(ranks, result)


def start_of_budget(called: float, warm: float, budget_s: float) -> tuple[float, list[str]]:
    """When the budget begins, and a note where that is not when `tune()` was called: the probe was warm late."""
    latest = warm - (1 - BURSTS_SHARE) * budget_s
    if called >= latest:
        return called, []
    took, left = warm - called, BURSTS_SHARE * budget_s
    return latest, [
        f"starting (imports, the first batch, compiling) took {took:.0f} s; {left:.0f} s were left for bursts"
    ]
