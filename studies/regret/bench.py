"""A plain training loop with a stopwatch, in a process of its own: what a person would time, and what the oracle times.

Nothing of autotune_loader's measuring is used here, only what defines the job: the dataset, the step, `LoaderConfig`.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from autotune_loader.bursts.step import build_step
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values import LoaderConfig
from studies.workloads import WORKLOADS, StudyWorkload

# Beyond this a request hangs: the slowest start-up and window here take seconds.
DEADLINE_S = 90.0
# A steady window opens after so many times what the queues hold, or after so many seconds, whichever is first. While queues
# fill, what quicker workers make ahead of the others is not consumed yet: 5 workers with a prefetch of 8 on cores that are
# not equally fast read 8% low from their third round on.
FILLS = 2
LONGEST_WARM_UP_S = 2.0
# The data of workloads with a short epoch are shown so often in one.
LONG_ENOUGH, REPEATS = ("in_memory",), 16


class BenchError(RuntimeError):
    """A configuration could not be timed."""


class Bench:
    """A warm process with one workload; killed with the block. One that hangs or dies is replaced."""

    def __init__(self, workload: str) -> None:
        self._workload = workload
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Bench:
        self._started().submit(int).result(DEADLINE_S)  # warm: strategies are timed from their call on
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def time(self, config: LoaderConfig, *, seconds: float, seed: int, is_steady: bool = True) -> float:
        """Samples/s of one configuration.

        Args:
            config: of the loader.
            seconds: length of the window.
            seed: of the order and of the samples.
            is_steady: whether the window opens when the queues have settled, and goes on with the next epoch. Otherwise it
                opens before the loader's iterator is made and ends with the epoch, as when one times an epoch.

        Raises:
            BenchError: it failed, or did not answer in time.
        """
        try:
            return self._started().submit(timed, config, seconds, seed, is_steady).result(DEADLINE_S)
        except (TimeoutError, FutureTimeout, BrokenExecutor) as error:
            self._end()
            raise BenchError(f"no answer: {type(error).__name__}") from None
        except Exception as error:
            raise BenchError(f"{type(error).__name__}: {error}") from None

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, spawn, initializer=begin, initargs=(self._workload,))
        return self._pool

    def _end(self) -> None:
        if self._pool is not None:
            for pid in list(self._pool._processes or ()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)  # its own session: the workers it started are in it too
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


JOBS: list[TimedJob] = []
"""Of the process that `begin` has begun."""


def begin(name: str) -> None:
    os.setsid()
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    warnings.simplefilter("ignore")
    JOBS.append(TimedJob(name))


def end_with(parent: int) -> None:
    """A pool's process does not hear that its parent was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def timed(*given: Any) -> float:
    return JOBS[0].time(*given)


def step_of(workload: StudyWorkload, batch: Any) -> Any:
    """The training step of a workload, given its first batch."""
    return build_step(TrainingSide(model=workload.model, train_step=workload.train_step), batch)


class TimedJob:
    """One workload, its step warmed up, ready to be timed with any configuration."""

    def __init__(self, name: str) -> None:
        self._workload = regret_workload(name)
        first = next(iter(self._workload.loader()))
        self.step = step_of(self._workload, first)
        for _ in range(3):
            self.step.run(first)

    def time(self, config: LoaderConfig, seconds: float, seed: int, is_steady: bool) -> float:
        torch.manual_seed(seed)
        random.seed(seed)
        loader, workers, ends = self._workload.loader(**config.to_kwargs()), config.num_workers, list[float]()
        started = opened = time.perf_counter()
        # Before a steady window: two rounds of the workers, and so many times what their queues hold.
        skip = workers * (2 + FILLS * (config.prefetch_factor or 0)) + 2 if is_steady else 0
        for batch in itertools.chain.from_iterable(itertools.repeat(loader) if is_steady else [loader]):
            self.step.run(batch)
            now = time.perf_counter()
            if skip and not ends and now - started < LONGEST_WARM_UP_S:
                skip -= 1
                opened = now
                continue
            ends.append(now)
            # The ends are averaged over as many batches as there are workers, so there must be more than that.
            if now - opened > seconds and (not is_steady or len(ends) > 2 * workers + 2):
                break
        batches, window_s = between_smooth_ends(ends, workers) if is_steady else (len(ends), ends[-1] - started)
        return batches * (self._workload.batch_size or 1) / window_s


def between_smooth_ends(ends: Sequence[float], workers: int) -> tuple[int, float]:
    """Batches and seconds between the mean of the first and of the last round of the workers: they deliver in bursts."""
    period = min(max(1, workers), len(ends) // 2)
    if period < 1:
        raise BenchError("the window holds a single batch")
    window_s = (sum(ends[-period:]) - sum(ends[:period])) / period
    return len(ends) - period, window_s


def regret_workload(name: str) -> StudyWorkload:
    """The study's workload with an epoch that is long against a window, except where short epochs are the point."""
    study = WORKLOADS[name]()
    return study if name in LONG_ENOUGH else replace(study, dataset=ConcatDataset([study.dataset] * REPEATS))
