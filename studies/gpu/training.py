"""Plain training, outside the probe: what a configuration is worth to a loop that knows nothing of autotune_loader's bursts."""

from __future__ import annotations

import random
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from autotune_loader import AutoLoader, LoaderConfig, TuningResult
from autotune_loader.pipeline.batches import accelerator, move
from autotune_loader.tuning.bursting import Budget
from autotune_loader.values import Interval, Round
from studies.gpu.jobs import SIMULATED_BYTES_PER_S, Job
from studies.regret import NEAR
from studies.regret.oracle import paired_ratio
from studies.study import Row, Table, record

# Batches before the clock starts: workers are up, and queues filled at the start no longer flatter.
FILLED_ROUNDS = 2
SAMPLE_S = 0.1
TUNED = "tuned"


def configured(device: str) -> str:
    """A device that is there; one that is simulated copies as slowly as small jobs need it."""
    try:
        module = accelerator(device)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from None
    if hasattr(module, "configure"):
        module.configure(bytes_per_s=SIMULATED_BYTES_PER_S)
    return device


def attempted(name: str, run: Callable[[], Iterator[Row] | None]) -> Table:
    """Its rows, or the row of its failure; what follows is worth its time on a machine that is lent for minutes."""
    try:
        yield from run() or ()
    except Exception as error:
        traceback.print_exc()
        print(f"FAILED: {name}", flush=True)
        yield Row({"what": name, "figure": f"failed: {error}"}, False)


def record_result(job: str, result: TuningResult) -> None:
    """Print what `tune()` found, with each burst: configuration, number of the round, seconds, samples/s."""
    bursts = [(str(each.config), each.round, round(each.seconds, 2), each.samples_per_s) for each in result.trials]
    record(job, TUNED, best=str(result.best), seconds=result.seconds, says=list(result.summary), bursts=bursts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One run of the loop."""

    samples_per_s: float
    gpu_util: float | None
    """NVML's utilisation, mean over the run; None where the device has none, or NVML does not answer."""


def recorded(job: str, what: str, rate: Rate) -> Rate:
    record(job, what, **asdict(rate))
    return rate


def in_turns(
    job: str, sides: Mapping[str, Callable[[], Rate]], rounds: int, budget: Budget | None = None
) -> dict[str, list[Rate]]:
    """The rates of each side, which run once in each round, in a mixed order; fewer rounds where the budget ends before."""
    rates: dict[str, list[Rate]] = {side: [] for side in sides}
    took_s = 0.0
    for number in range(rounds):
        if number and budget is not None and budget.left() < took_s:
            break
        begun = time.perf_counter()
        for side in random.Random(number).sample(list(sides), len(sides)):
            rates[side].append(recorded(job, f"turn: {side}", sides[side]()))
        took_s = time.perf_counter() - begun
    return rates


def verdict_of(ratio: Interval, near: float = NEAR) -> str:
    """What an interval tells of one side's rate over the other's."""
    if 1 - near <= ratio.low and ratio.high <= 1 / (1 - near):
        return f"within {near:.0%}"
    return "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "not told"


def record_pairs(job: str, rates: Mapping[str, list[Rate]], side: str, near: float = NEAR) -> dict[str, str]:
    """Print one side's rate over each other's, paired by round, and what that tells; in words, by the other side."""
    turns = zip(*rates.values(), strict=True)
    rounds = [Round(rates={key: rate.samples_per_s for key, rate in zip(rates, each, strict=True)}) for each in turns]
    told = dict[str, str]()
    for other in rates:
        if other != side:
            ratio = paired_ratio(rounds, side, other)
            says = verdict_of(ratio, near)
            record(job, f"{side} over {other}", **asdict(ratio), says=says)
            told[other] = f"{ratio.value:.2f}x ({ratio.low:.2f} to {ratio.high:.2f}), {says}"
    return told


def medians(rates: Mapping[str, list[Rate]]) -> dict[str, float]:
    """Samples/s of each side."""
    return {side: statistics.median(each.samples_per_s for each in runs) for side, runs in rates.items()}


def synchronize(device: torch.device) -> None:
    if (module := accelerator(device)) is not None:
        module.synchronize(device)


class Loop:
    """A job's training loop on a device, with plain SGD; one for all its runs, so that it is warm.

    Args:
        job: what is trained.
        device: such as "cuda"; one that `accelerator` knows, or the CPU.
        seconds: of one timed run.
    """

    def __init__(self, job: Job, device: str, seconds: float) -> None:
        self.job, self.device, self.seconds = job, torch.device(device), seconds
        self.model: Any = job.model.to(self.device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def train(self, config: LoaderConfig, *, with_step: bool = True) -> Rate:
        """Train with the loader that `config` makes; without a step, only load and copy: what the loader allows."""
        loader = self.job.loader(**config.to_kwargs())
        return self.timed(loader, config, with_step=with_step)

    def live(self, config: LoaderConfig) -> Rate:
        """Train with AutoLoader and as many workers, which stay as many."""
        return self.timed(AutoLoader(self.job.dataset, config=config, tune=False, **self.job.parts()), config)

    def step(self) -> Rate:
        """Only step, on one batch that lies on the device: what the step allows."""
        batch = move(next(iter(self.job.loader())), self.device)
        return self.timed([batch], LoaderConfig(num_workers=2))

    def timed(self, batches: Iterable[Any], config: LoaderConfig, *, with_step: bool = True) -> Rate:
        """Train on batches, again and again; the clock starts when the queues of such a configuration have been emptied."""
        endless, depth = _again(batches), max(1, config.num_workers) * (config.prefetch_factor or 1)
        for _ in range(FILLED_ROUNDS * depth + 1):
            self._take(next(endless), with_step)
        synchronize(self.device)
        with Utilisation(self.device) as used:
            samples, begun = 0, time.perf_counter()
            while time.perf_counter() - begun < self.seconds:
                samples += self._take(next(endless), with_step)
            synchronize(self.device)
            rate = samples / (time.perf_counter() - begun)
        return Rate(samples_per_s=rate, gpu_util=used.mean())

    def _take(self, batch: Any, with_step: bool) -> int:
        batch = move(batch, self.device)
        if with_step:
            self.optimizer.zero_grad(set_to_none=True)
            self.job.train_step(self.model, batch).backward()
            self.optimizer.step()
        return self.job.batch_size or 1


class Utilisation:
    """NVML's utilisation of a device while a block lasts, sampled by a thread."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, accelerator(device)
        self._seen, self._ended = list[float](), threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Utilisation:
        if hasattr(self._module, "utilization"):
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def mean(self) -> float | None:
        return statistics.fmean(self._seen) if self._seen else None

    def _sample(self) -> None:
        try:
            while not self._ended.wait(SAMPLE_S):
                self._seen.append(self._module.utilization(self._device) / 100)
        except Exception as error:  # no NVML, or none that may be asked, as under MIG
            print(f"no utilisation: {error}", flush=True)


def _again(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from batches
