"""From the figures of a run to what is said of it, written once for `tune()`, `compare()`, AutoLoader and `watch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune_loader.decision.belief import fit_twin
from autotune_loader.decision.space import Space
from autotune_loader.report.advice import Evidence, advise, judge
from autotune_loader.report.ceiling import ceiling_doubt
from autotune_loader.report.standings import measurement_of
from autotune_loader.report.summary import NOTHING_MEASURED, told
from autotune_loader.results.loader_file import Verdict
from autotune_loader.results.result import TuningResult


def judged(
    found: TuningResult,
    *,
    on_accelerator: bool,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
    nothing: str = NOTHING_MEASURED,
    has_batched_fetch: bool = True,
    space: Space | None = None,
) -> TuningResult:
    """The result with its verdict, its advice and its sentences; without a ceiling where something speaks against it.

    Args:
        found: figures, trials and rounds; `twin` tells the cores and the batches of an epoch.
        on_accelerator: whether the step leaves the cores to the loader.
        before: sentences of the summary, before the verdict's.
        after: and after it.
        nothing: what the verdict says where nothing was measured.
        has_batched_fetch: whether the dataset can fetch batches, or that cannot be told.
        space: what could have been tried.
    """
    doubt = ceiling_doubt(found)
    if doubt is not None:
        found = replace(found, measured=replace(found.measured, ceiling_samples_per_s=None, ceiling_doubt=doubt))
    rate, context = found.measured.samples_per_s, found.twin
    measurement = measurement_of(found.best, found.finals, found.trials)
    if measurement is None or rate is None or context is None:
        verdict = Verdict(binding="unknown", sentence=nothing)
        return replace(found, verdict=verdict, summary=told(*before, nothing, *after))
    about = Evidence(
        best=found.best,
        measurement=measurement,
        rate=rate,
        ceiling=found.ceiling,
        ceiling_doubt=found.measured.ceiling_doubt,
        usable_cores=context.usable_cores,
        on_accelerator=on_accelerator,
        epoch_batches=context.epoch_batches,
        trials=found.trials,
        has_batched_fetch=has_batched_fetch,
        twin=fit_twin([(t.config, t.measurement) for t in found.trials if t.measurement is not None], context),
        space=space,
        stage_times=found.stage_times,
    )
    verdict = judge(about)
    return replace(
        found,
        verdict=verdict,
        advice=advise(about, verdict),
        summary=told(*before, verdict.sentence, *after),
    )
