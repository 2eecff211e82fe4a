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
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.report.progress import make_progress
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import answers_unknown_arguments, make_workload
from autotune_loader.tuning.assemble import assembled, saved
from autotune_loader.tuning.bursting import Budget
from autotune_loader.tuning.run import Run, TuneOptions, common_space, make_run
from autotune_loader.tuning.study import Search, check_study
from autotune_loader.tuning.torchrun import decided, joined_ranks
from autotune_loader.values import ConfigFileError, LoaderConfig, require_writable
from autotune_loader.values.units import counted


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
    trace: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> TuningResult:
    """Find the cheapest DataLoader settings that are as fast as any on this machine.

    Short runs of the real training are the trials of an Optuna study. They run in a separate process, and nothing of
    the caller changes. The best setting, its closest rival and the current one are compared in A/B rounds, until the
    choice is within the tolerance of every other setting with a probability of 95%. Ctrl-C returns the best found so
    far, with `status="partial"`; SIGTERM ends the process, and nothing is written. Under torchrun every rank calls it:
    rank 0 decides, and all ranks run each trial at the same time. Ranks that have to wait for others log which these are.

    Args:
        data: A DataLoader, whose settings become the baseline, or a dataset. A loader is never iterated. Pass a
            DataLoader for everything that `tune()` has no argument for (a sampler, a generator, ...).
        model: The model that the step trains. `None` tunes the loader alone.
        batch_size: Samples per batch, if `data` is a dataset.
        collate_fn: As in `DataLoader`, if `data` is a dataset.
        worker_init_fn: As in `DataLoader`, if `data` is a dataset.
        train_step: `train_step(model, batch)`. If it returns a loss that requires gradients, backward and the
            optimizer's step follow. By default the step is inferred. A number is the seconds of a step: trials wait
            that long in place of the model.
        loss_fn: `loss_fn(model(x), y)`, or its class. By default it is inferred from the output and y.
        optimizer: An optimizer over the model's parameters, or a callable (such as its class) that makes one from them.
        device: Device of the step. "auto" is the device of the model, or CUDA for a model on the CPU if there is a GPU.
        budget: Most seconds of wall time for trials, such as `60`, `"60s"` or `"5m"`. Starting their process and
            compiling the model come on top.
        max_workers: Most workers to try.
        allow: Settings to search although they change training or need memory of the device: "in_order", "batch_size",
            "device_prefetch" (CUDA), "persistent_workers" (also for a dataset with `set_epoch`).
        tolerance: Settings this close to the fastest count as equally fast; the cheapest of them is chosen.
        study: An Optuna study that maximises, with any storage. It is continued, keeps its sampler, and gets every trial.
            Several processes can share it: each skips what another one runs. If its storage fails, the search goes on in
            memory.
        sampler: Any Optuna sampler; `TwinSampler` by default. Another one proposes for half of the budget, or until
            it repeats itself; then A/B rounds of its best are enqueued.
        output: Path of the `loader.json` to write. If it exists and fits job and machine, its settings are tried
            first.
        trace: Path of a JSON file for https://ui.perfetto.dev to write: when each worker of each trial loaded, and when the
            training loop waited and stepped.
        progress: Whether to print a line for each trial to stderr. `None`: on a terminal and in a notebook.

    Returns:
        The result. Its `status` is "undecided" if the measurements are too few or too disturbed to choose; `best`
        is then the caller's own setting, unless another one is faster with a probability of 95%. It is "fallback" if no
        setting worked; `best` is then PyTorch's default.

    Raises:
        TypeError, ValueError: An argument is wrong; the message suggests a value.
        WorkloadError: Dataset, model or step raised an exception; it has the user's traceback.
    """
    called = time.monotonic()
    check_study(study, sampler)
    options = TuneOptions(
        budget=budget,
        max_workers=max_workers,
        allow=allow,
        tolerance=tolerance,
        output=output,
        trace=trace,
        progress=progress,
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
        if options.trace is not None and not rank:
            require_writable("trace", options.trace, "trace.json")
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
                    budget=Budget(options.budget_s, time.monotonic),
                    progress=shown,
                    suggestions=earlier_best(options.output, run),
                )
                with np.errstate(all="ignore"):  # a script may have made an error of an underflow
                    search.decide()
                    result = assembled(search, time.monotonic() - called)
                search.tell(result.best)
                return saved(result, options.output, options.trace)

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
