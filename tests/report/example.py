"""A finished run on a simulated machine, with everything that a report can show; it chose what only its paired rounds ran."""

from __future__ import annotations

import functools
from dataclasses import replace

from autotune_loader.results.loader_file import Advice

from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.stages import StageTime
from autotune_loader.values.trial import Trial
from tests.support import SimulatedMachine, simulated_result


def _stage(stage: str, where: str, wall_share: float, cpu_share: float) -> StageTime:
    shares = {"wall_share": wall_share, "cpu_share": cpu_share}
    return StageTime(stage=stage, where=where, wall_s=2e-3 * wall_share, cpu_s=1.6e-3 * cpu_share, **shares)


STAGES = (
    _stage("decode", "photos.py:41, PIL.Image.convert", 0.6, 0.75),
    _stage("read", "photos.py:40, open", 0.3, 0.1),
    _stage("Flip", "torchvision.Flip", 0.1, 0.15),
)
FULL = Failure(kind="shared_memory", phase="batches", message="/dev/shm is full [/red]; start with --shm-size=1g")
KILLED = Failure(kind="oom_killed", phase="first_batch", message="the kernel's OOM killer ended worker 5")
ADVICE = Advice(
    action="Implement __getitems__ to decode a batch at once.",
    reason="10 % of a worker's time passes between samples.",
    expected_gain=0.1,
)


@functools.cache
def synthetic_result() -> TuningResult:
    run = simulated_result(SimulatedMachine(noise_sd=0.03))
    failed = [
        Trial(number=len(run.trials) + place, config=LoaderConfig(num_workers=workers), role="search", failure=failure)
        for place, (workers, failure) in enumerate(((48, FULL), (64, KILLED)))
    ]
    warnings = ("The dataset's order <was> not shuffled & read twice.",)
    return replace(run, trials=(*run.trials, *failed), stage_times=STAGES, advice=(ADVICE,), warnings=warnings)
