"""What a training loop has shown of a loader, tuned or only watched, as the `TuningResult` that `tune()` returns."""

from __future__ import annotations

from collections.abc import Sequence

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Evidence
from autotune_loader.decision.selection import cost
from autotune_loader.diagnosis import judged
from autotune_loader.live.prospects import TOLERANCE
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.site import Site
from autotune_loader.results.record import Finding, Job
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial, role_of


def result_of(  # noqa: PLR0913 - what is known, and what it is known of
    beliefs: Beliefs | None,
    *,
    site: Site,
    asked: LoaderConfig,
    best: LoaderConfig,
    seconds: float,
    said: Sequence[Finding],
    speedup: Interval | None = None,
    is_settled: bool = False,
    has_batched_fetch: bool = True,
    stage_times: Sequence[StageTime] = (),
) -> TuningResult:
    """What is known now; blocks of training are its trials.

    Args:
        beliefs: that rest on the blocks; None before the first.
        site: of the loader.
        asked: what the loader was asked for.
        best: the best configuration that is known.
        seconds: trained.
        said: what else is to be known.
        speedup: of `best` over `asked`, from paired blocks.
        is_settled: whether it is done with trying.
        has_batched_fetch: whether the dataset can fetch batches, or that cannot be told.
        stage_times: where the time of a sample goes, where that was watched.
    """
    blocks = [] if beliefs is None else list(beliefs.log)
    own = [each.measurement for each in blocks if each.key == best.key() and each.measurement is not None]
    context = None if beliefs is None else beliefs.context
    job = None
    if context is not None:
        job = Job(
            usable_cores=context.usable_cores,
            step_cores=context.consumer_cores,
            on_accelerator=context.consumer_cores < 0.5,
            epoch_batches=context.epoch_batches,
        )
    return judged(
        TuningResult(
            best=best,
            status="complete" if is_settled else "partial",
            found_by="autoloader",
            baseline=asked,
            trials=tuple(_trial(number, block, asked) for number, block in enumerate(blocks)),
            batch_size=site.batch_size,
            rate=own[-1].samples_per_s if own else None,
            speedup=speedup,
            wait_share=own[-1].wait_share if own else None,
            as_fast=() if beliefs is None else _as_fast(beliefs, best),
            stages=tuple(stage_times),
            warnings=tuple(said),
            seconds=round(seconds, 3),
            machine=inspect_machine().fingerprint(dataset=site.dataset),
            job=job,
        ),
        has_batched_fetch=has_batched_fetch,
    )


def _as_fast(beliefs: Beliefs, best: LoaderConfig) -> tuple[LoaderConfig, ...]:
    """Which others of those that were tried count as equally fast as the best, by the rule that chose it: none is cheaper."""
    tried, as_run = beliefs.of_tried(), {each.key: each.config for each in beliefs.log}
    keys = [] if tried is None else [tried.configs[index] for index in tried.as_fast(TOLERANCE)]
    if best.key() not in keys:
        return ()
    least = cost(best.key(), beliefs.space)
    return tuple(as_run[key] for key in keys if key != best.key() and cost(key, beliefs.space) >= least)


def _trial(number: int, block: Evidence, asked: LoaderConfig) -> Trial:
    return Trial(
        number=number,
        config=block.config,
        role=role_of(block.config, asked),
        measurement=block.measurement,
        failure=block.failure,
        seconds=0.0 if block.measurement is None else block.measurement.window_s,
    )
