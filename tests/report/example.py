"""A finished run on a simulated machine, with everything that a report can show.

Nothing of it comes from a tuner.
"""

import functools
from dataclasses import replace

from autotune_loader.diagnosis import Caution, Ended, judged
from autotune_loader.machine.facts import Fingerprint
from autotune_loader.results.result import TuningResult
from autotune_loader.values import (
    BurstPlan,
    Failure,
    Interval,
    LoaderConfig,
    Measurement,
    MemoryUse,
    StageTime,
    Trial,
)
from autotune_loader.values.statistics import mean_interval
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

NONE, BEST, DEEP = (
    LoaderConfig(),
    LoaderConfig(num_workers=5),
    LoaderConfig(num_workers=8, prefetch_factor=8),
)
SEARCHED = (NONE, LoaderConfig(num_workers=1), LoaderConfig(num_workers=4), DEEP)
ROUNDS = (BEST, DEEP, NONE)  # the chosen one ran in the rounds alone


def _stage(stage, where, wall_share, cpu_share):
    shares = {"wall_share": wall_share, "cpu_share": cpu_share}
    return StageTime(
        stage=stage, where=where, wall_s=2e-3 * wall_share, cpu_s=1.6e-3 * cpu_share, **shares
    )


STAGES = (
    _stage("decode", "PIL.ImageFile.ImageFile.load", 0.6, 0.75),
    _stage("read", "PIL.Image.open", 0.3, 0.1),
    _stage("Flip", "torchvision.Flip", 0.1, 0.15),
)
FULL = Failure(
    kind="shared_memory",
    phase="batches",
    message="/dev/shm is full [/red]; start with --shm-size=1g",
)
KILLED = Failure(
    kind="oom_killed", phase="first_batch", message="the kernel's OOM killer ended worker 5"
)
MACHINE = Fingerprint(
    usable_cores=4, memory_bytes=16 << 30, torch="2.6.0", dataset="photos.Photos[1200]"
)


def exactly(value, count=20):
    """A rate without doubt."""
    return Interval(value=value, low=value, high=value, count=count)


def ran(config, rate, number=0, in_round=None, **changes):
    """A burst at this rate, which is a number or an interval; or its failure."""
    if isinstance(rate, Failure):
        return Trial(number=number, config=config, failure=rate)
    figures = {
        "samples_per_s": rate if isinstance(rate, Interval) else exactly(rate), "samples": 640,
        "window_s": 0.5,
        "batch_size": 32, "first_batch_s": 0.25, "wait_share": 0.125, "service_s": 0.08,
        "service_cpu_s": 0.07,
        "receive_s": 0.001, "step_s": 0.02,
        "memory": MemoryUse(rss_bytes=900 << 20, pss_bytes=640 << 20), **changes,
    }  # fmt: skip
    return Trial(number=number, config=config, round=in_round, measurement=Measurement(**figures))


@functools.cache
def synthetic_result():
    """Four bursts, three rounds of three, two failures."""
    probe = SimulatedProbe(SimulatedMachine(noise_sd=0.03), FakeClock(), epoch_batches=10_000)
    ran = [(config, None) for config in SEARCHED] + [
        (config, number) for number in range(3) for config in ROUNDS
    ]
    trials = [
        Trial(
            number=number,
            config=config,
            round=in_round,
            measurement=probe.burst(config, BurstPlan(max_s=1.0)),
        )
        for number, (config, in_round) in enumerate(ran)
    ]
    for workers, failure in ((48, FULL), (64, KILLED)):
        trials.append(
            Trial(number=len(trials), config=LoaderConfig(num_workers=workers), failure=failure)
        )
    found = TuningResult(
        best=BEST, status="complete", tuned_at="2026-11-26T12:00:00+00:00", baseline=NONE,
        batch_size=32, shuffle=True,
        ended=Ended.SAFE(tolerance=0.02, which=""), step="SmallCnn, cross_entropy, SGD",
        stages=STAGES, as_fast=(DEEP,),
        warnings=(Caution.NOTE(text="The dataset's order <was> not shuffled & read twice."),),
        seconds=24.0, step_s=0.01, machine=MACHINE, trials=tuple(trials), ceiling=exactly(3200.0),
        transfer_ceiling=exactly(3100.0),
    )  # fmt: skip
    own = found.measurement_of(BEST)
    rates = {config: list(found.rates_of(config).values()) for config in ROUNDS}
    ratios = [one / other for one, other in zip(rates[BEST], rates[NONE], strict=True)]
    found = replace(
        found, rate=mean_interval(rates[BEST]), baseline_rate=mean_interval(rates[NONE]),
        speedup=mean_interval(ratios),
        wait_share=own.wait_share, memory_bytes=own.taken_bytes,
    )  # fmt: skip
    return judged(found, epoch_batches=10_000)
