"""A finished run that looks like a real one: simulated bursts on four cores with their traces, failures and finals."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import replace

from autotune_loader.results.loader_file import Advice, BatchSizeChoice, Finals, Measured, Spent, Verdict
from autotune_loader.results.result import TuningResult
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement, MemoryUse
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval, Round, mean_interval, mean_of_selected
from autotune_loader.values.trial import Trial
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

BASELINE = LoaderConfig()
BEST = LoaderConfig(num_workers=4, prefetch_factor=4, consumer_threads=1)
RIVALS = ((4, 8), (3, 8))
FULL_SHM = Failure(
    kind="shared_memory",
    phase="batches",
    message="/dev/shm is full (64 MiB); start the container with --shm-size=1g or allow=('sharing_strategy',)",
)
STAGES = (
    StageTime(
        stage="decode",
        where="photos.py:41, PIL.Image.convert",
        wall_share=0.6,
        cpu_share=0.75,
        wall_s=12e-4,
        cpu_s=12e-4,
    ),
    StageTime(stage="read", where="photos.py:40, open", wall_share=0.3, cpu_share=0.1, wall_s=6e-4, cpu_s=1.6e-4),
    StageTime(stage="Flip", where="torchvision.Flip", wall_share=0.1, cpu_share=0.15, wall_s=2e-4, cpu_s=2.4e-4),
)
KILLED = Failure(
    kind="oom_killed", phase="first_batch", message="the kernel's OOM killer ended worker 5", retryable=True
)


def _grid() -> list[LoaderConfig]:
    searched = [(1, 2), (2, 2), (3, 2), (4, 2), (3, 4), (2, 4), (4, 4), (6, 2), (4, 8), (3, 1), (2, 1), (3, 8)]
    return [LoaderConfig(num_workers=workers, prefetch_factor=ahead, consumer_threads=1) for workers, ahead in searched]


def _with_memory(measurement: Measurement, config: LoaderConfig) -> Measurement:
    rss = (measurement.memory or MemoryUse(rss_bytes=0)).rss_bytes
    memory = MemoryUse(
        rss_bytes=rss, pss_bytes=int(rss * 0.7), shm_bytes=measurement.batch_bytes * (config.prefetch_factor or 0)
    )
    return replace(measurement, memory=memory, cpu_share=0.3 + 0.1 * config.num_workers, foreign_cpu_share=0.02)


def _trial(number: int, config: LoaderConfig, probe: SimulatedProbe) -> Trial:
    answer = probe.burst(config, BurstPlan(max_s=2.0, seed=number))
    assert isinstance(answer, Measurement)
    predicted = probe.truth(config, batches=300) * random.Random(number).uniform(0.96, 1.05) if number > 2 else None
    return Trial(
        number=number,
        config=config,
        role="baseline" if config == BASELINE else "search",
        measurement=_with_memory(answer, config),
        predicted_samples_per_s=predicted,
        seconds=2.4,
    )


def _failures(first: int) -> tuple[Trial, ...]:
    crowded = LoaderConfig(num_workers=8, prefetch_factor=16, consumer_threads=1)
    greedy = LoaderConfig(num_workers=16, prefetch_factor=2, consumer_threads=1)
    return (
        Trial(number=first, config=crowded, role="search", failure=FULL_SHM, seconds=1.2),
        Trial(number=first + 1, config=greedy, role="search", failure=KILLED, seconds=3.4),
    )


@functools.cache
def synthetic_result() -> TuningResult:
    """A complete run with every part a report can show."""
    machine = SimulatedMachine(
        cores=4, batch_size=32, cpu_s=0.06, service_cv=0.25, tail_share=0.04, tail_factor=4.0, step_s=0.022,
        step_cores=1.0, alpha=0.06, noise_sd=0.01, batch_bytes=9 << 20,
    )  # fmt: skip
    probe = SimulatedProbe(machine, FakeClock(100.0), seed=1)
    trials = [_trial(number, config, probe) for number, config in enumerate([BASELINE, *_grid()])]
    trials += _failures(len(trials))
    noise = random.Random(3)
    rivals = [LoaderConfig(num_workers=workers, prefetch_factor=ahead, consumer_threads=1) for workers, ahead in RIVALS]
    last = (BEST, *rivals, BASELINE)
    # What is cheaper than the best is slower.
    truths = [probe.truth(config) * (0.97 if config.num_workers == 3 else 1.0) for config in last]
    rounds = tuple(tuple(truth * noise.gauss(1, 0.015) for truth in truths) for _ in range(9))
    best = trials[7].measurement
    assert best is not None
    assert best.memory is not None
    ratios = [each[0] / each[-1] for each in rounds]
    logs = mean_interval([math.log(ratio) for ratio in ratios])
    return TuningResult(
        best=BEST,
        status="complete",
        baseline=BASELINE,
        trials=tuple(trials),
        batch_size=BatchSizeChoice(value=32),
        measured=Measured(
            samples_per_s=mean_of_selected([Round(rates=dict(zip(last, each, strict=True))) for each in rounds], BEST),
            baseline_samples_per_s=mean_interval([each[-1] for each in rounds]),
            speedup=Interval(value=math.exp(logs.value), low=math.exp(logs.low), high=math.exp(logs.high), count=9),
            ceiling_samples_per_s=Interval(value=1450.0, low=1437.0, high=1463.0, count=40),
            wait_share=best.wait_share,
            first_batch_s=best.first_batch_s,
            cpu_share=0.6,
            rss_bytes=best.memory.rss_bytes,
            pss_bytes=best.memory.pss_bytes,
            shm_bytes=best.memory.shm_bytes,
        ),
        verdict=Verdict(
            binding="cpu",
            sentence="Decoding binds: the workers use 3.0 of 4 cores, and the step could take 11 % more.",
            headroom=1450.0 / (sum(each[0] for each in rounds) / 9) - 1,
        ),
        advice=(
            Advice(
                action="Implement __getitems__ to decode a batch at once.",
                reason="10 % of a worker's time passes between samples.",
                expected_gain=0.1,
            ),
        ),
        summary=(
            "Use 4 workers, prefetch 4, 1 step thread: 1,307 samples/s (1,294 to 1,320).",
            "It is 3.36x (3.31x to 3.41x) as fast as 0 workers (before tuning) in 9 paired rounds.",
        ),
        stage_times=STAGES,
        warnings=("The dataset's order <was> not shuffled & read twice.",),
        finals=Finals(configs=last, rounds=rounds),
        spent=Spent(seconds=58.3, bursts=42),
        twin=TwinContext(usable_cores=4, consumer_cores=1.0, step_s=((None, 0.022), (1, 0.022))),
    )
