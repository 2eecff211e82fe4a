"""What a live loader found, as the `TuningResult` that `tune()` returns: blocks are its trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.evidence import Evidence
from autotune_loader.live.trust import Refusal
from autotune_loader.live.tuner import Event, Job, Tuner
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.stages import StageTally, stage_times
from autotune_loader.report.advice import Evidence as AdviceEvidence
from autotune_loader.report.advice import advise, judge
from autotune_loader.results.loader_file import Advice, BatchSizeChoice, Measured, Spent, Verdict
from autotune_loader.results.result import TuningResult
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.stages import StageTime
from autotune_loader.values.trial import Trial, role_of

if TYPE_CHECKING:
    import pandas as pd

HISTORY_COLUMNS = [
    "event",
    "seconds",
    "batch",
    "num_workers",
    "prefetch_factor",
    "samples_per_s",
    "low",
    "high",
    "waiting",
    "failure",
]
NOTHING = Verdict(binding="unknown", sentence="Too few batches were trained to say anything.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What a result says of a loader that need not be there any more."""

    batch_size: int | None
    dataset: str
    """Its class."""
    has_batched_fetch: bool
    stage_times: tuple[StageTime, ...] = ()
    """Where the time of a sample went lately, where that was watched."""

    @classmethod
    def of(cls, loader: Any, stages: StageTally | None = None) -> LoaderFacts:
        dataset = loader.dataset
        return cls(
            batch_size=loader.batch_size,
            dataset=type(dataset).__name__,
            has_batched_fetch=hasattr(dataset, "__getitems__"),
            stage_times=() if stages is None else stage_times(stages.samples()),
        )


def result_of(
    tuner: Tuner, job: Job, *, config: LoaderConfig, facts: LoaderFacts, refusal: Refusal | None
) -> TuningResult:
    """What is known now.

    Args:
        tuner: of the loader.
        job: the loader.
        config: the best that is known.
        facts: of the loader.
        refusal: why the number of workers stays as it was asked for.
    """
    beliefs = tuner.beliefs
    evidence: list[Evidence] = [] if beliefs is None else list(beliefs.log)
    trials = _trials(evidence, job)
    own = [each for each in evidence if each.key == config.key() and each.measurement is not None]
    verdict, advice, measured = NOTHING, tuple[Advice, ...](), Measured()
    if own and beliefs is not None and (latest := own[-1].measurement) is not None:
        about = AdviceEvidence(
            best=config,
            measurement=latest,
            rate=latest.samples_per_s,
            ceiling=None,
            usable_cores=job.usable_cores,
            on_accelerator=beliefs.context.consumer_cores < 0.5,
            epoch_batches=job.epoch_batches,
            trials=trials,
            has_batched_fetch=facts.has_batched_fetch,
            twin=fit_twin([(t.config, t.measurement) for t in trials if t.measurement], beliefs.context),
            space=beliefs.space,
            stage_times=facts.stage_times,
        )
        verdict = judge(about)
        advice = advise(about, verdict)
        gain = tuner.gain if tuner.gain is not None and tuner.gain.config.key() == config.key() else None
        measured = Measured(
            samples_per_s=latest.samples_per_s,
            speedup=None if gain is None else gain.ratio,
            wait_share=latest.wait_share,
            first_batch_s=latest.first_batch_s,
        )
    return TuningResult(
        best=config,
        status="complete" if tuner.is_settled else "partial",
        baseline=job.start,
        trials=trials,
        batch_size=BatchSizeChoice(value=facts.batch_size),
        measured=measured,
        verdict=verdict,
        advice=advice,
        stage_times=facts.stage_times,
        summary=_summary(tuner, config, verdict, refusal),
        spent=Spent(seconds=round(tuner.spending.trained_s, 3), bursts=len(evidence)),
        fingerprint=inspect_machine().fingerprint(dataset=facts.dataset),
        twin=None if beliefs is None else beliefs.context,
        origin="live",
    )


def history_frame(history: list[Event]) -> pd.DataFrame:
    """One row for each block, settlement and shift: when, with which configuration, how fast."""
    import pandas as pd

    frame: pd.DataFrame = pd.DataFrame([_row(event) for event in history], columns=HISTORY_COLUMNS)
    return frame


def _row(event: Event) -> tuple[object, ...]:
    """In the order of `HISTORY_COLUMNS`."""
    config, outcome = event.config, None if event.evidence is None else event.evidence.outcome
    rate = outcome.samples_per_s if isinstance(outcome, Measurement) else None
    figures = (None, None, None) if rate is None else (rate.value, rate.low, rate.high)
    failure = outcome.message if isinstance(outcome, Failure) else None
    where = (event.kind, event.seconds, event.batch, config.num_workers, config.prefetch_factor)
    return (*where, *figures, event.waiting, failure)


def _trials(evidence: list[Evidence], job: Job) -> tuple[Trial, ...]:
    return tuple(
        Trial(
            number=number,
            config=each.config,
            role=role_of(each.config, job.start),
            measurement=each.measurement,
            failure=each.failure,
            seconds=0.0 if each.measurement is None else each.measurement.window_s,
        )
        for number, each in enumerate(evidence)
    )


def _summary(tuner: Tuner, config: LoaderConfig, verdict: Verdict, refusal: Refusal | None) -> tuple[str, ...]:
    settled = next((event for event in reversed(tuner.history) if event.kind == "settled"), None)
    said = [f"Not settled yet: {config} runs now."]
    if settled is not None:
        blocks = sum(event.kind == "block" for event in tuner.history)
        shifts = sum(event.kind == "shift" for event in tuner.history)
        again = f"; the rate has shifted {shifts} time(s)" if shifts else ""
        said = [f"{config}, settled after {settled.seconds:.0f} s of training ({blocks} blocks observed{again})."]
    if tuner.gain is not None and tuner.gain.config.key() == config.key():
        ratio = tuner.gain.ratio
        interval = f"({ratio.low:.2f} to {ratio.high:.2f})"
        said.append(f"{ratio.value:.2f}x {interval} as fast as asked for, from {ratio.count} pairs of blocks.")
    if refusal is not None:
        said.append(f"No other number of workers is tried: {refusal.reason}. What would change that: {refusal.mend}.")
    return (*said, verdict.sentence)
