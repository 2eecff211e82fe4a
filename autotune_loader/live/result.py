"""What a training loop has shown of a loader, tuned or only watched, as the `TuningResult` that `tune()` returns."""

from __future__ import annotations

from collections.abc import Sequence

from autotune_loader.decision.belief import Beliefs
from autotune_loader.decision.evidence import Evidence
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.site import Site
from autotune_loader.report.advice import Evidence as AdviceEvidence
from autotune_loader.report.advice import advise, judge
from autotune_loader.results.loader_file import Advice, BatchSizeChoice, Measured, Spent, Verdict
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.stages import StageTime
from autotune_loader.values.statistics import Interval
from autotune_loader.values.trial import Trial, role_of

NOTHING = Verdict(binding="unknown", sentence="Too few batches were trained to say anything.")


def result_of(  # noqa: PLR0913 - what is known, and what it is known of
    beliefs: Beliefs | None,
    *,
    site: Site,
    asked: LoaderConfig,
    best: LoaderConfig,
    seconds: float,
    said: Sequence[str],
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
        said: sentences of its summary, before the verdict's.
        speedup: of `best` over `asked`, from paired blocks.
        is_settled: whether it is done with trying.
        has_batched_fetch: whether the dataset can fetch batches, or that cannot be told.
        stage_times: where the time of a sample goes, where that was watched.
    """
    blocks = [] if beliefs is None else list(beliefs.log)
    trials = tuple(_trial(number, block, asked) for number, block in enumerate(blocks))
    own = [each.measurement for each in blocks if each.key == best.key() and each.measurement is not None]
    verdict, advice, measured = NOTHING, tuple[Advice, ...](), Measured()
    if own and beliefs is not None:
        context = beliefs.context
        about = AdviceEvidence(
            best=best,
            measurement=own[-1],
            rate=own[-1].samples_per_s,
            ceiling=None,
            usable_cores=context.usable_cores,
            on_accelerator=context.consumer_cores < 0.5,
            epoch_batches=context.epoch_batches,
            trials=trials,
            has_batched_fetch=has_batched_fetch,
            twin=beliefs.twin(),
            space=beliefs.space,
            stage_times=stage_times,
        )
        verdict = judge(about)
        advice = advise(about, verdict)
        measured = Measured(samples_per_s=about.rate, speedup=speedup, wait_share=own[-1].wait_share)
    return TuningResult(
        best=best,
        status="complete" if is_settled else "partial",
        baseline=asked,
        trials=trials,
        batch_size=BatchSizeChoice(value=site.batch_size),
        measured=measured,
        verdict=verdict,
        advice=advice,
        stage_times=tuple(stage_times),
        summary=(*said, verdict.sentence),
        spent=Spent(seconds=round(seconds, 3), bursts=len(blocks)),
        fingerprint=inspect_machine().fingerprint(dataset=site.dataset),
        twin=None if beliefs is None else beliefs.context,
        origin="live",
    )


def _trial(number: int, block: Evidence, asked: LoaderConfig) -> Trial:
    return Trial(
        number=number,
        config=block.config,
        role=role_of(block.config, asked),
        measurement=block.measurement,
        failure=block.failure,
        seconds=0.0 if block.measurement is None else block.measurement.window_s,
    )
