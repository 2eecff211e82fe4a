"""One tuning run before its search begins: how to search, and what is legal for its workload on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from autotune_loader.bursts.parent import OpenProbe
from autotune_loader.bursts.protocol import WarmupReport
from autotune_loader.machine.facts import Fingerprint, Machine, cpu_model, start_method
from autotune_loader.pipeline.workload import DataSide, Workload
from autotune_loader.search.space import MOST_WORKERS, BatchCost, Context, Limits, Space
from autotune_loader.tuning.arguments import refuse
from autotune_loader.tuning.bursting import startable
from autotune_loader.values import ALLOWABLE, LoaderConfig, require_bool, require_choice, require_int

BATCH_FACTORS = (2, 4, 0.5)
"""Batch sizes around the user's own, in the order in which they are tried: larger ones gain more often."""
SHORTEST_BUDGET_S = 1.0
"""In less no two bursts fit."""
SLOW_STARTS = (
    "At most {workers} workers are tried, as each that {method} starts takes {seconds:.1f} s; a budget above {budget:.0f} s "
    "would try more."
)
_UNITS_S = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}  # as people write them


class TuneOptions:
    """How to search: the arguments of `tune()` with these names, parsed.

    Raises:
        TypeError, ValueError: one is wrong; the message names its value and one to try.
    """

    def __init__(
        self,
        *,
        budget: object = 60.0,
        max_workers: int | None = None,
        allow: object = (),
        tolerance: float = 0.02,
        output: Any = None,
        trace: Any = None,
        progress: bool | None = None,
    ) -> None:
        require_int("max_workers", max_workers, minimum=0, or_none=True)
        names: list[Any] = [allow] if isinstance(allow, str) else list(allow) if isinstance(allow, Iterable) else [None]
        are_names = all(isinstance(each, str) for each in names)
        refuse(not are_names, f"allow={allow!r} is not a collection of names", "allow=('in_order',)")
        for name in sorted(names):
            require_choice("allow", name, ALLOWABLE)
        is_share = isinstance(tolerance, (int, float)) and 0 <= tolerance < 1
        refuse(not is_share, f"tolerance={tolerance!r} must be at least 0 and below 1", "tolerance=0.02", ValueError)
        for name, path, works in (("output", output, "loader.json"), ("trace", trace, "trace.json")):
            is_path = path is None or isinstance(path, (str, os.PathLike))
            refuse(not is_path, f"{name}={path!r} is not a path", f"{name}={works!r}")
        if progress is not None:
            require_bool("progress", progress)
        self.budget_s, self.max_workers, self.allow = _seconds_of(budget), max_workers, frozenset(names)
        self.tolerance, self.progress = tolerance, progress
        self.output: str | None = None if output is None else os.fsdecode(output)
        self.trace: str | None = None if trace is None else os.fsdecode(trace)


def _seconds_of(budget: object) -> float:
    """Seconds from a number, "90", "90s", "3m" or "1h"."""
    given, works = f"budget={budget!r}", "budget='60s'"
    is_either = isinstance(budget, (int, float, str)) and not isinstance(budget, bool)
    refuse(not is_either, f"{given} is neither a number of seconds nor a string such as '60s'", works)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(budget))
    if match is None or match[2].lower() not in _UNITS_S:
        units = ", ".join(filter(None, _UNITS_S))
        raise ValueError(f"{given} cannot be read (units: {units}). Try {works}.")
    seconds = float(match[1]) * _UNITS_S[match[2].lower()]
    is_long = SHORTEST_BUDGET_S <= seconds < float("inf")
    refuse(not is_long, f"{given} is not at least {SHORTEST_BUDGET_S:.0f} s", works, ValueError)
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is fixed before the search begins."""

    workload: Workload
    space: Space
    context: Context
    warmup: WarmupReport
    machine: Machine
    tolerance: float = 0.02
    may_keep_workers: bool = False  # between epochs, where that saves much of them
    notes: tuple[str, ...] = ()  # what the user should know of how the arguments were read and the bursts run

    @property
    def baseline(self) -> LoaderConfig:
        """What the choice is compared with: the user's own configuration, or else torch's default."""
        return self.workload.own_config or LoaderConfig()

    @property
    def fingerprint(self) -> Fingerprint:
        """What the result depends on."""
        return self.machine.fingerprint(dataset=self.workload.data.description, gpu=self.warmup.device_name)

    @property
    def identity(self) -> str:
        """What the trials of one study have in common; those of another job, or of an unlike machine, would mislead."""
        data, gpu = self.workload.data, self.warmup.device_name
        devices = ", ".join(filter(None, [f"{self.context.usable_cores} cores", cpu_model(), gpu]))
        return f"{data.description}, batches of {data.batch_size}, {self.warmup.step}, {devices}"


def make_run(workload: Workload, opened: OpenProbe, machine: Machine, options: TuneOptions) -> Run:
    """The run of a workload whose probe is warm."""
    data, warmup = workload.data, opened.warmup
    max_workers, why = _max_workers(data, warmup, machine, options)
    space = _make_space(workload, warmup, machine, options, max_workers)
    notes = [*workload.notes, *opened.notes, *why]
    if "batch_size" in options.allow and len(space.batch_size) == 1:
        samples, size = data.samples_per_epoch(), data.batch_size
        why_not = f"an epoch of {samples} samples has room for no other batch size than {size}"
        if size is None:
            why_not = "the DataLoader has no batch_size. Try one with a batch_size."
        notes.append(f"batch_size is not tuned: {why_not}")
    return Run(
        workload=workload,
        space=space,
        context=make_context(workload, warmup, machine),
        warmup=warmup,
        machine=machine,
        tolerance=options.tolerance,
        may_keep_workers=data.batches_per_epoch() is not None and not data.has_epochs and not space.persistent_workers,
        notes=tuple(notes),
    )


def make_context(workload: Workload, warmup: WarmupReport, machine: Machine) -> Context:
    """What the search needs to know of machine and step, before the step was measured alone."""
    is_forked = start_method(workload.data.multiprocessing_context) == "fork"
    return Context(
        usable_cores=machine.usable_cores,
        step_cores=float(min(warmup.default_threads, machine.usable_cores)) if workload.on_cpu else 1.0,
        epoch_batches=None if workload.data.is_iterable else workload.data.batches_per_epoch(),
        fetch_s=warmup.first_fetch_s,
        fetch_cpu_s=warmup.first_fetch_cpu_s,
        start_s=0.0 if is_forked else warmup.start_s,
    )


def _make_space(
    workload: Workload, warmup: WarmupReport, machine: Machine, options: TuneOptions, max_workers: int
) -> Space:
    data, device = workload.data, torch.device(workload.training.device)
    device_bytes = warmup.device_bytes
    if device_bytes is not None:  # and what this process has of it, whose model will be trained
        device_bytes += torch.get_device_module(device).memory_reserved(device)
    accelerated = device.type != "cpu" and not warmup.on_accelerator
    own, allow = workload.own_config, options.allow
    # Workers that outlive an epoch keep the dataset as it was: one that is told its epoch would never hear of the next.
    keeps = "persistent_workers" in allow or (own is not None and own.persistent_workers and not data.has_epochs)
    keeps = keeps and data.batches_per_epoch() is not None
    return Space(
        max_workers=max_workers,
        min_workers=min(warmup.least_workers, max_workers),
        pin_memory=(True, False) if accelerated else (False,),
        device_prefetch=(0, 1, 2) if accelerated and "device_prefetch" in allow else (0,),
        persistent_workers=keeps,
        in_order=(True, False) if "in_order" in allow else (True,),
        multiprocessing_context=data.multiprocessing_context,
        batch_size=_batch_sizes(data, allow),
        limits=Limits(
            shm_bytes=machine.shm_budget_bytes,
            memory_bytes=machine.memory_budget_bytes,
            descriptors=machine.open_files,
            device_bytes=device_bytes,
        ),
        batch=BatchCost(bytes=warmup.batch_bytes, tensors=warmup.batch_tensors, samples=warmup.samples),
        also=() if own is None else (own,),
    )


def _batch_sizes(data: DataSide, allow: Collection[str]) -> tuple[int | None, ...]:
    """The user's own batch size (None), and what to try beside it; no batch is larger than an epoch."""
    own = data.batch_size
    if "batch_size" not in allow or own is None:
        return (None,)
    most = data.samples_per_epoch()
    sizes = [int(own * factor) for factor in BATCH_FACTORS]
    return (None, *(size for size in sizes if size >= 1 and size != own and (most is None or size <= most)))


def _max_workers(data: DataSide, warmup: WarmupReport, machine: Machine, options: TuneOptions) -> tuple[int, list[str]]:
    """The most workers to try, and a note where that is for the time that they take to start."""
    if machine.why_no_workers is not None:
        return 0, [machine.why_no_workers]
    caps = (MOST_WORKERS, options.max_workers, data.shards, data.batches_per_epoch(), warmup.most_workers)
    most, method = min(each for each in caps if each is not None), start_method(data.multiprocessing_context)
    started = startable(method, warmup.start_s, machine.usable_cores, options.budget_s)
    if started >= most:
        return most, []
    return int(started), [
        SLOW_STARTS.format(workers=int(started), method=method, seconds=warmup.start_s, budget=options.budget_s)
    ]


def common_space(spaces: Sequence[Space]) -> Space:
    """What is legal on every rank: the first one's space, with the tightest limits of all."""
    known = [{name: value for name, value in asdict(each.limits).items() if value is not None} for each in spaces]
    tightest = {name: min(each[name] for each in known if name in each) for name in set().union(*known)}
    return replace(spaces[0], max_workers=min(each.max_workers for each in spaces), limits=Limits(**tightest))
