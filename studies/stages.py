"""Is the split of a sample's time into stages right, and what does watching cost?

    python -m studies.stages [accuracy | cost] [--seconds 20] [--pairs 30]

accuracy    four pipelines of four stages each, some waiting and some computing: with the interpreter lock, without it, in
            one C call, in an operator, in lambdas and partials. Each stage times itself by wall and CPU clock, so that the
            truth is known whatever else the machine does; the goal is 3 points for every stage
cost        bursts with and without a watcher take turns, in random order; the goal is 1 % of the rate
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from autotune_loader.pipeline.stages import pooled, stage_times
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.burst import run_burst
from autotune_loader.probe.step import TrainingStep, build_step
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.statistics import mean_interval
from studies.workloads import WORKLOADS

GOAL_POINTS, GOAL_COST = 3.0, 0.01
NOISE = np.random.default_rng(0).bytes(1 << 18)


class Truth:
    """Wall and CPU seconds of four stages; of the wall those in which the thread was ready and had no core are not counted."""

    def __init__(self) -> None:
        self._spent = torch.zeros(4, 2, dtype=torch.float64).share_memory_()
        self._stages = [Timer(self._spent, number) for number in range(4)]

    def stage(self, number: int) -> Timer:
        return self._stages[number]

    def shares(self) -> tuple[list[float], list[float]]:
        wall, cpu = self._spent.T.tolist()
        return [each / sum(wall) for each in wall], [each / sum(cpu) for each in cpu]


class Timer:
    """Adds what a block takes, at 2 us a block; for one worker."""

    def __init__(self, spent: torch.Tensor, number: int) -> None:
        self._spent, self._number, self._schedule = spent, number, -1

    def __enter__(self) -> None:
        if self._schedule < 0:  # in the worker
            self._array = self._spent.numpy()
            self._schedule = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._wall, self._cpu = self._clocks()

    def __exit__(self, *exc_info: object) -> None:
        wall, cpu = self._clocks()
        self._array[self._number, 0] += wall - self._wall
        self._array[self._number, 1] += cpu - self._cpu

    def _clocks(self) -> tuple[float, float]:
        crowded = int(os.pread(self._schedule, 64, 0).split()[1]) / 1e9
        return time.perf_counter() - crowded, time.thread_time()


def spin(seconds: float) -> None:
    """Computes in Python, with the lock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Compose:
    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, sample: Any) -> Any:
        for transform in self.transforms:
            sample = transform(sample)
        return sample


class Pipeline(Dataset[torch.Tensor]):
    """Four stages, each of which tells how long it took."""

    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.truth = Truth()

    def __len__(self) -> int:
        return 1 << 20


class Photos(Pipeline):
    """Waits, computes without the lock, a class and an operator in a lambda in a container."""

    names = ("load_raw", "unpack", "Flip", "lambda")

    def __init__(self) -> None:
        super().__init__()
        truth = self.truth

        class Flip:
            def __call__(self, sample: Any) -> Any:
                with truth.stage(2):
                    spin(0.002)
                return sample

        def scaled(sample: Any) -> Any:
            with truth.stage(3):
                return sample**2.5

        self.pixels, self.transform = torch.rand(100_000), Compose([Flip(), lambda sample: scaled(sample)])

    def load_raw(self, index: int) -> torch.Tensor:
        with self.truth.stage(0):
            time.sleep(0.003)
        return self.pixels

    def unpack(self, raw: torch.Tensor) -> torch.Tensor:
        with self.truth.stage(1):
            zlib.compress(NOISE[:50_000], 6)
        return raw

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.transform(self.unpack(self.load_raw(index)))[:16].clone()


class Records(Pipeline):
    """All with the lock: Python, one C call, recursion, a partial."""

    names = ("parse", "count", "walk", "pad")

    def __init__(self) -> None:
        super().__init__()
        self.padded = functools.partial(self.pad, seconds=0.002)

    def parse(self) -> None:
        with self.truth.stage(0):
            spin(0.004)

    def count(self) -> int:
        with self.truth.stage(1):
            return sum(range(150_000))  # 3 ms in which nobody else has the lock

    def walk(self, depth: int) -> None:
        if depth:
            return self.walk(depth - 1)
        with self.truth.stage(2):
            time.sleep(0.002)
        return None

    def pad(self, seconds: float) -> None:
        with self.truth.stage(3):
            spin(seconds)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.parse()
        self.count()
        self.walk(8)
        self.padded()
        return torch.zeros(16)


class Volumes(Pipeline):
    """Long ones: 60 ms a sample."""

    names = ("fetch", "inflate", "crop", "sort")

    def fetch(self) -> None:
        with self.truth.stage(0):
            time.sleep(0.015)

    def inflate(self) -> None:
        with self.truth.stage(1):
            zlib.compress(NOISE, 6)  # without the lock

    def crop(self) -> None:
        with self.truth.stage(2):
            spin(0.010)

    def sort(self) -> int:
        with self.truth.stage(3):
            return sum(range(1_000_000))  # 20 ms with the lock

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetch()
        self.inflate()
        self.crop()
        self.sort()
        return torch.zeros(16)


class Rows(Pipeline):
    """Short ones: 3 ms a sample, two of which wait."""

    names = ("ask", "parse", "lookup", "encode")

    def ask(self) -> None:
        with self.truth.stage(0):
            time.sleep(0.0007)

    def parse(self) -> None:
        with self.truth.stage(1):
            spin(0.0008)

    def lookup(self) -> None:
        with self.truth.stage(2):
            time.sleep(0.0003)

    def encode(self) -> None:
        with self.truth.stage(3):
            zlib.compress(NOISE[:24000], 6)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.ask()
        self.parse()
        self.lookup()
        self.encode()
        return torch.zeros(16)


PIPELINES: tuple[type[Pipeline], ...] = (Photos, Records, Volumes, Rows)


def data_of(dataset: Dataset[Any], batch_size: int) -> DataSide:
    return DataSide.from_loader(DataLoader(dataset, batch_size=batch_size, shuffle=True))


def step_of(batch: Any) -> TrainingStep:
    return build_step(TrainingSide(model=None, train_step=lambda model, batch: None), batch)


def bursts(data: DataSide, seconds: float, workers: int) -> list[Measurement]:
    """Bursts as a search runs them, until the time is up."""
    step, found, end = step_of(torch.zeros(4, 16)), list[Measurement](), time.monotonic() + seconds
    while time.monotonic() < end:
        plan = BurstPlan(max_s=0.6, min_s=0.5, relative_error=0.0, seed=len(found), stages=True)
        outcome = run_burst(data, step, LoaderConfig(num_workers=workers), plan)
        if isinstance(outcome, Failure):
            raise RuntimeError(outcome.message)
        found.append(outcome)
    return found


def accuracy(seconds: float, workers: int = 1) -> float:
    """Prints a table; returns the largest difference in points."""
    worst = 0.0
    print(f"{'pipeline':10}{'stage':10}{'wall':>7}{'true':>7}{'off':>7}   {'CPU':>7}{'true':>7}{'off':>7}  where")
    for kind in PIPELINES:
        pipeline = kind()
        found = bursts(data_of(Subset(pipeline, range(1 << 16)), 4), seconds, workers)
        times = {each.stage: each for each in stage_times(pooled(each.stages for each in found))}
        wall, cpu = pipeline.truth.shares()
        told = [[times[part] for part in name.split("+") if part in times] for name in pipeline.names]
        whole_wall, whole_cpu = (
            math.fsum(getattr(part, name) for each in told for part in each) for name in ("wall_share", "cpu_share")
        )
        for each, name, true_wall, true_cpu in zip(told, pipeline.names, wall, cpu, strict=True):
            walls = math.fsum(part.wall_share for part in each) / whole_wall
            cpus = math.fsum(part.cpu_share for part in each) / whole_cpu
            off = [100 * (walls - true_wall), 100 * (cpus - true_cpu)]
            worst = max(worst, *map(abs, off))
            figures = f"{walls:7.1%}{true_wall:7.1%}{off[0]:+7.1f}   {cpus:7.1%}{true_cpu:7.1%}{off[1]:+7.1f}"
            print(f"{kind.__name__:10}{name:10}{figures}  {each[0].where if each else 'not seen'}")
        others = ", ".join(f"{each.stage} {each.wall_share:.1%}" for each in times.values() if [each] not in told)
        print(f"{'':10}beside them: {others}")
    print(f"largest difference {worst:.1f} points; the goal is {GOAL_POINTS:.0f}")
    return worst


def cost(pairs: int) -> None:
    """Prints the relative rate of watched bursts, paired with others."""
    turns = random.Random(0)
    for name in ("cpu_bound", "wait_light_tail", "in_memory"):
        study = WORKLOADS[name]()
        data = data_of(study.dataset, study.batch_size)
        step, logs = step_of(None), list[float]()
        for pair in range(pairs):
            rates = {}
            for stages in turns.sample([False, True], 2):
                plan = BurstPlan(max_s=0.8, min_s=0.8, relative_error=0.0, seed=pair, stages=stages)
                outcome = run_burst(data, step, LoaderConfig(num_workers=1), plan)
                assert isinstance(outcome, Measurement), outcome
                rates[stages] = outcome.samples_per_s.value
            logs.append(math.log(rates[True] / rates[False]))
        mean = mean_interval(logs)
        print(
            f"{name:16} {mean.value:+.2%} ({mean.low:+.2%} to {mean.high:+.2%}, {pairs} pairs); goal -{GOAL_COST:.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["accuracy", "cost"], help="both where neither is named")
    parser.add_argument("--seconds", type=float, default=20.0, help="bursts for each pipeline")
    parser.add_argument("--pairs", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.what != "cost":
        accuracy(arguments.seconds)
    if arguments.what != "accuracy":
        cost(arguments.pairs)


if __name__ == "__main__":
    main()
