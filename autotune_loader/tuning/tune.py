"""`tune()`: the table of contents of one tuning run.

arguments ─► bursts.open_probe ─► study.optimize(objective) ─► choice ─► diagnosis ─► result ─► loader.json
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch

from autotune_loader.bursts.parent import open_probe
from autotune_loader.bursts.protocol import Probe
from autotune_loader.diagnosis.units import counted
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.report.progress import make_progress
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import answers_unknown_arguments, make_workload
from autotune_loader.tuning.assemble import assembled, saved
from autotune_loader.tuning.bursting import Budget
from autotune_loader.tuning.options import check_study, parse_options
from autotune_loader.tuning.run import Run, common_space, make_run
from autotune_loader.tuning.study import Search
from autotune_loader.tuning.torchrun import decided, joined_ranks
from autotune_loader.values import ConfigFileError, LoaderConfig, require_writable


@answers_unknown_arguments
def tune(  # noqa: PLR0913 - all that a user may say
    data: Any,
    model: Any = None,
    *,
    batch_size: int | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    worker_init_fn: Callable[[int], Any] | None = None,
    train_step: Callable[[Any, Any], Any] | float | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: Any = None,
    device: str | torch.device = "auto",
    budget: str | float = "60s",
    max_workers: int | None = None,
    allow: Sequence[str] = (),
    tolerance: float = 0.02,
    study: optuna.Study | None = None,
    sampler: optuna.samplers.BaseSampler | None = None,
    output: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> TuningResult:
    """Find the cheapest DataLoader configuration that is as fast as anything this machine can do.

    Short bursts of the real training run in a process of their own, which change nothing of the caller's. Each is a trial of an
    Optuna study: what would be chosen, its rival and what the caller has now are timed in turns, until the choice loses no more
    than the tolerance with a probability of 95 %. Ctrl-C returns the best found so far, with `status="partial"`; SIGTERM ends
    the process as ever, and nothing is written. Under torchrun every rank calls it: rank 0 decides, all ranks run each burst at
    the same time, and Ctrl-C ends the job.

    Args:
        data: a DataLoader, whose configuration becomes the baseline, or a dataset. A loader is only read, never iterated. What
            `tune()` has no argument for (a sampler, a generator, ...) a DataLoader says.
        model: what the step trains; None tunes the loader alone.
        batch_size: samples per batch, where a dataset is given.
        collate_fn: as in `DataLoader`, where a dataset is given.
        worker_init_fn: likewise.
        train_step: `train_step(model, batch)`, run as it is; where it returns a loss that requires gradients, backward and the
            optimizer's step follow. Without it the step is inferred. A number is the seconds of a step: the loader is tuned
            against a wait as long, without the model.
        loss_fn: `loss_fn(model(x), y)`, or its class; inferred from output and y where it is not given.
        optimizer: an optimizer over the model's parameters, or a callable (such as its class) that makes one from them.
        device: where the step runs; "auto" is where the model is, else CUDA where there is one, else the CPU.
        budget: most wall seconds for bursts, such as 60, "60s" or "5m", beside those in which the process of the bursts starts
            and the model is compiled.
        max_workers: most workers to try.
        allow: what may be searched although it changes training or takes memory of the device: "in_order", "batch_size",
            "device_prefetch" (CUDA), "persistent_workers" (where the dataset knows its epoch).
        tolerance: configurations this close to the fastest count as equally fast; the cheapest of them is chosen.
        study: an Optuna study of yours, with whatever storage, that maximises. It is continued, and gets every burst as a trial
            and the choice as an attribute; it keeps its sampler. Several processes that tune one job with it pass over what
            another one runs.
        sampler: any sampler of Optuna's, which `study` has from then on; `TwinSampler` where none is given. Another one
            proposes for half of the budget, or until it repeats itself; then rounds of the best that it found are enqueued.
        output: write `loader.json` here. One that is there and fits job and machine has its best tried first.
        progress: show a line for each trial on stderr; None: on a terminal and in a notebook.

    Returns:
        The result. Its `status` is "undecided" when too little, or too disturbed, was measured to choose; then `best` is the
        caller's own configuration, unless another one is faster with a probability of 95 %. It is "fallback" when no
        configuration worked, and `best` is torch's default.

    Raises:
        TypeError, ValueError: a wrong argument, named with a value that would work.
        WorkloadError: dataset, model or step raised, in whichever burst; carries the user's own traceback.
    """
    called = time.monotonic()
    check_study(study, sampler)
    options = parse_options(
        budget=budget, max_workers=max_workers, allow=allow, tolerance=tolerance, output=output, progress=progress
    )
    workload = make_workload(
        data,
        model,
        batch_size=batch_size,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        train_step=train_step,
        loss_fn=loss_fn,
        optimizer=optimizer,
        device=device,
    )
    with joined_ranks() as ranks:
        rank = 0 if ranks is None else ranks.rank
        shown = make_progress(options.progress, rank=rank)
        if options.output is not None and not rank:
            require_writable("output", options.output)
        machine = inspect_machine(environ=os.environ if ranks is None else ranks.environ)
        shown.announce(f"starting on {machine.usable_cores} usable cores")
        opening = open_probe(workload, machine, machine.memory_budget_bytes, budget_s=options.budget_s)
        with opening as opened:
            run = make_run(workload, opened, machine, options)
            if ranks is not None:
                run = replace(run, space=common_space(ranks.from_all(run.space)))
            shown.announce(f"step: {run.warmup.step}; up to {counted(run.space.max_workers, 'worker')}")

            def decide(probe: Probe) -> TuningResult:
                search = Search(
                    run,
                    probe,
                    study,
                    sampler,
                    budget=Budget(seconds=options.budget_s, started=time.monotonic(), clock=time.monotonic),
                    progress=shown,
                    suggestions=earlier_best(options.output, run),
                )
                with np.errstate(all="ignore"):  # a script may have made an error of an underflow
                    search.decide()
                    result = assembled(search, time.monotonic() - called)
                search.tell(result.best)
                return saved(result, options.output)

            return replace(decided(ranks, opened.probe, decide), parts=workload.data.parts)


def earlier_best(output: str | None, run: Run) -> list[LoaderConfig]:
    """The choice of a `loader.json` that is there already and is of this job on this machine."""
    if output is None or not Path(output).exists():
        return []
    with contextlib.suppress(ConfigFileError):
        earlier = TuningResult.load(output)
        if earlier.machine == run.fingerprint and earlier.batch_size == run.workload.data.batch_size:
            return [earlier.best]
    return []
