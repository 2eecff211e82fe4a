"""One job from end to end: its limits, the verdict's time, tuning, a grid of everything, and the last few taking turns."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from autotune_loader import LoaderConfig, TuningResult, tune
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.opening import open_probe
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.schedule import SEARCH_BURST
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import CEILING_BURST
from autotune_loader.values.statistics import Round, paired_ratio
from studies.fidelity.ceilings import is_compute_bound
from studies.gpu.jobs import JOBS, Size
from studies.gpu.training import Loop, Rate

DEFAULT, TUNED = "default", "tuned"
PINNED, AHEAD = "tuned, pinned copies in the loop", "tuned, pinned copies ahead of it"
# A burst lasts three rounds of its workers: few of them feed a job whose step binds, and are soon through.
VERDICT_WORKERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long the study of one job takes."""

    budget_s: float = 30.0
    """Of `tune()`."""
    survey_s: float = 2.0
    """Of one run of the grid and of each limit."""
    rounds: int = 5
    """Of the last few, each of `survey_s` a run."""
    workers: tuple[int, ...] = ()
    """Of the grid; from the cores where it is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What came out for one job; rates are samples (for large_batches: batches) a second of plain training."""

    job: str
    binds: str
    """By construction."""
    verdict: str
    """By `tune()`."""
    best: str
    grid_best: str
    default_per_s: float
    tuned_per_s: float
    grid_best_per_s: float
    step_limit_per_s: float
    """Steps on one batch that lies on the device."""
    loader_limit_per_s: float
    """The loader without a step, with the better of the tuned and the grid's best configuration."""
    of_limit: float
    """Tuned rate over the smaller limit; the goal is 0.95 where the loader binds."""
    regret: float
    """One minus the tuned rate over the grid's best, from paired rounds; negative where it is faster."""
    regret_low: float
    regret_high: float
    prefetcher: float | None
    """Rate with `DevicePrefetcher` over that of pinned copies in the loop, else alike, from paired rounds; None off CUDA."""
    prefetcher_low: float | None
    prefetcher_high: float | None
    burst_busy_share: float | None
    """Share of its window in which a burst of the tuned configuration kept the device at work, by its events."""
    burst_util: float | None
    """The same by NVML, where its samples cover the window; the goal is 3 points."""
    default_util: float | None
    tuned_util: float | None
    util_reason: str | None
    """Why utilisation is missing."""
    twin_median_error: float | None
    """Median over the grid of |predicted / measured - 1|."""
    twin_worst_error: float | None
    tune_s: float
    startup_s: float
    """Of the probe: process, torch, CUDA, first batch, warm-up."""
    verdict_s: float
    """From then until it is known whether the step binds; the goal is 3 s where it does."""
    said_compute_bound: bool
    copy_ms: float | None
    """Of a batch to the device in the tuned configuration, by its own clock."""
    allocated_mib: float | None
    trials: int
    failures: tuple[str, ...]
    grid: dict[str, float]


def study(name: str, size: Size, device: str, effort: Effort) -> Findings:
    """Everything about one job. The parent's model is on the device before `tune()` is called, as it often is."""
    loop = Loop(JOBS[name](size), device, effort.survey_s)
    step_limit = loop.step().samples_per_s
    record(name, "the step alone", samples_per_s=step_limit)
    startup_s, verdict_s, is_step_bound = _time_of_verdict(loop)
    record(name, "verdict", startup_s=startup_s, verdict_s=verdict_s, said_compute_bound=is_step_bound)
    result = _tuned(loop, effort)
    record(name, "tuned", best=str(result.best), verdict=result.verdict.binding, seconds=result.spent.seconds)
    grid = {config: _recorded(name, "grid", str(config), loop.train(config)) for config in _grid(device, effort)}
    grid_best = max(grid, key=lambda config: grid[config])
    turns = {DEFAULT: LoaderConfig(), TUNED: result.best, str(grid_best): grid_best}
    if loop.device.type == "cuda":
        turns |= {PINNED: replace(result.best, pin_memory=True, device_prefetch=0)}
        turns |= {AHEAD: replace(result.best, pin_memory=True, device_prefetch=2)}
    rates = _in_turns(loop, turns, effort.rounds)
    loader_limit = max(loop.load(config).samples_per_s for config in {result.best, grid_best})
    record(name, "the loader alone", samples_per_s=loader_limit)
    tuned_per_s = _median(rates[TUNED])
    rounds = [Round(rates={key: runs[i].samples_per_s for key, runs in rates.items()}) for i in range(effort.rounds)]
    ratio = paired_ratio(rounds, TUNED, str(grid_best))
    prefetcher = paired_ratio(rounds, AHEAD, PINNED) if AHEAD in turns else None
    errors = _twin_errors(result, grid)
    measured = [t.measurement for t in result.trials if t.config == result.best and t.measurement is not None]
    gpu = measured[-1].gpu if measured else None
    return Findings(
        job=name,
        binds=loop.job.binds,
        verdict=result.verdict.binding,
        best=str(result.best),
        grid_best=str(grid_best),
        default_per_s=_median(rates[DEFAULT]),
        tuned_per_s=tuned_per_s,
        grid_best_per_s=_median(rates[str(grid_best)]),
        step_limit_per_s=step_limit,
        loader_limit_per_s=loader_limit,
        of_limit=tuned_per_s / min(step_limit, loader_limit),
        regret=1 - ratio.value,
        regret_low=1 - ratio.high,
        regret_high=1 - ratio.low,
        prefetcher=None if prefetcher is None else prefetcher.value,
        prefetcher_low=None if prefetcher is None else prefetcher.low,
        prefetcher_high=None if prefetcher is None else prefetcher.high,
        burst_busy_share=None if gpu is None else gpu.busy_share,
        burst_util=None if gpu is None else gpu.util,
        default_util=_median_util(rates[DEFAULT]),
        tuned_util=_median_util(rates[TUNED]),
        util_reason=next((rate.gpu_reason for rate in rates[TUNED] if rate.gpu_util is None), None),
        twin_median_error=statistics.median(errors) if errors else None,
        twin_worst_error=max(errors, default=None),
        tune_s=result.spent.seconds,
        startup_s=startup_s,
        verdict_s=verdict_s,
        said_compute_bound=is_step_bound,
        copy_ms=None if gpu is None or gpu.copy_s is None else gpu.copy_s * 1e3,
        allocated_mib=None if gpu is None or gpu.allocated_bytes is None else gpu.allocated_bytes / 2**20,
        trials=len(result.trials),
        failures=tuple(f"{t.config}: {t.failure.kind}" for t in result.trials if t.failure is not None),
        grid={str(config): rate for config, rate in grid.items()},
    )


def record(job: str, what: str, **values: Any) -> None:
    """One line for each thing that was measured, as soon as it was: a run that is cut off keeps them."""
    print("RECORD", json.dumps({"job": job, "what": what, **values}), flush=True)


def _recorded(job: str, what: str, which: str, rate: Rate) -> float:
    record(job, what, which=which, **dataclasses.asdict(rate))
    return rate.samples_per_s


def _loader(loop: Loop) -> DataLoader[Any]:
    return DataLoader(loop.job.dataset, **loop.job.parts())


def _tuned(loop: Loop, effort: Effort) -> TuningResult:
    return tune(
        _loader(loop),
        loop.model,
        train_step=loop.job.train_step,
        device=loop.device,
        budget=effort.budget_s,
        reuse=False,
        progress=False,
    )


def _time_of_verdict(loop: Loop) -> tuple[float, float, bool]:
    """Seconds until the probe is warm, seconds from then until it is known whether the step binds, and the answer."""
    workload, _ = make_workload(_loader(loop), loop.model, train_step=loop.job.train_step, device=loop.device)
    machine = inspect_machine()
    pinned = loop.device.type == "cuda"
    begun = time.monotonic()
    with open_probe(workload, machine, "process", None) as opened:
        warm = time.monotonic()
        cached = opened.probe.step_ceiling(None, CEILING_BURST)
        workers = min(VERDICT_WORKERS, machine.usable_cores)
        burst = opened.probe.burst(LoaderConfig(num_workers=workers, pin_memory=pinned), SEARCH_BURST)
        if isinstance(cached, Failure) or isinstance(burst, Failure):
            raise RuntimeError(f"{loop.job.name}: {cached if isinstance(cached, Failure) else burst}")
        return warm - begun, time.monotonic() - warm, is_compute_bound(cached, burst)


def _grid(device: str, effort: Effort) -> list[LoaderConfig]:
    """Every number of workers, by every road to the device."""
    cores = os.cpu_count() or 1
    workers = effort.workers or tuple(sorted({0, 1, 2, *(n for n in (4, 8, 12) if n < cores), cores}))
    roads = [(False, 0)] if device == "cpu" else [(False, 0), (True, 0), (True, 2)]
    return [
        LoaderConfig(num_workers=count, pin_memory=pinned, device_prefetch=ahead)
        for count in workers
        for pinned, ahead in roads
    ]


def _in_turns(loop: Loop, configs: dict[str, LoaderConfig], rounds: int) -> dict[str, list[Rate]]:
    """Plain training with each of a few configurations, interleaved in an order that is mixed."""
    rates: dict[str, list[Rate]] = {key: [] for key in configs}
    order, mixer = list(configs), random.Random(0)
    for _ in range(rounds):
        mixer.shuffle(order)
        for key in order:
            rates[key].append(loop.train(configs[key]))
            _recorded(loop.job.name, "turns", key, rates[key][-1])
    return rates


def _twin_errors(result: TuningResult, grid: dict[LoaderConfig, float]) -> list[float]:
    try:
        predictions = result.predict_all(list(grid))
    except ValueError:  # nothing was measured
        return []
    pairs: Sequence[Any] = list(zip(predictions, grid.values(), strict=True))
    return [abs(predicted.samples_per_s.value / measured - 1) for predicted, measured in pairs]


def _median(rates: list[Rate]) -> float:
    return statistics.median(rate.samples_per_s for rate in rates)


def _median_util(rates: list[Rate]) -> float | None:
    known = [rate.gpu_util for rate in rates if rate.gpu_util is not None]
    return statistics.median(known) if known else None


def as_plain(findings: Findings) -> dict[str, Any]:
    """For JSON."""
    return dataclasses.asdict(findings)
