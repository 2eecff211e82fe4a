"""How long a burst may take, what goes before it, and how long a round of finals will: from what bursts so far took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune_loader.decision.belief import TwinInputs
from autotune_loader.decision.selection import modelled
from autotune_loader.pipeline.throughput import queued_share
from autotune_loader.twin.model import threads_at_work
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from autotune_loader.values.trial import Trial

# A window of fewer rounds of the workers is mostly edges (`studies.fidelity.compare few_rounds`).
ROUNDS_PER_BURST = 4.5
LONGEST_BURST_S = 3.0
# While workers put more than this share of what they make into their queues, they compute more than in the midst of training.
FILLING_SHARE = 0.1
# With more than this share of the logical cores at work some share a physical one, and slow each other down.
CROWDED_SHARE = 0.5
# Enough for queues of eight batches a worker (`studies.fidelity.compare filling`); slower workers fill a part of theirs.
LONGEST_FILLING_S = 0.75
# A burst that takes longer than this many times the slowest successful one is taken for a hang.
DEADLINE_FACTOR = 10.0
SHORTEST_DEADLINE_S = 30.0
LONGEST_DEADLINE_S = 120.0
# However little of the budget is left, a burst may take this long, and twice the slowest so far.
LEAST_DEADLINE_S = 20.0


def paced(
    plan: BurstPlan, config: LoaderConfig, trials: Sequence[Trial], *, usable_cores: int, seconds_left: float
) -> BurstPlan:
    """The plan for one configuration: long enough for some rounds of its workers, and with a deadline."""
    least_s = min(ROUNDS_PER_BURST * worker_round_s(config, trials, usable_cores), LONGEST_BURST_S)
    return replace(
        plan,
        min_s=max(plan.min_s, least_s),
        max_s=max(plan.max_s, least_s),
        deadline_s=deadline_s(trials, seconds_left),
    )


def filling_s(config: LoaderConfig, measured: Measurement, inputs: TwinInputs) -> float:
    """Seconds that the workers need to fill their queues while the loop pauses; 0 where the burst was as training is.

    Workers that are enough rest in the midst of training. Until their queues are full they compute, and on few cores the loop
    gets its batches later and steps more slowly: bursts of half a second read 3 to 8 workers with a prefetch of 8 low by 5 to
    25 % (`studies.fidelity.compare filling`). Whether the loop was slowed cannot be told by comparing it with that of too few
    workers: receiving takes as long after a wait.
    """
    computing = config.num_workers * measured.service_cpu_s / max(measured.service_s, 1e-9)
    stepping = threads_at_work(config.consumer_threads, inputs.consumer_cores)
    if computing + stepping <= CROWDED_SHARE * inputs.usable_cores:
        return 0.0
    if queued_share(measured.traces, workers=config.num_workers) <= FILLING_SHARE:
        return 0.0
    others_s = ((config.prefetch_factor or 1) - 1) * measured.service_s
    return min(measured.first_batch_s + others_s, LONGEST_FILLING_S)


def worker_round_s(config: LoaderConfig, trials: Sequence[Trial], usable_cores: int) -> float:
    """Seconds in which every worker makes one batch, as in the trial with the most similar number of them."""
    measured = [trial for trial in trials if trial.measurement is not None and trial.config.num_workers]
    nearest = min(measured, key=lambda t: abs(t.config.num_workers - config.num_workers), default=None)
    if nearest is None or nearest.measurement is None or not config.num_workers:
        return 0.0
    crowding = max(1.0, config.num_workers / max(nearest.config.num_workers, usable_cores))
    return nearest.measurement.service_s * crowding


def deadline_s(trials: Sequence[Trial], seconds_left: float) -> float:
    """Seconds after which a burst is taken for a hang."""
    longest = max((trial.seconds for trial in trials if trial.measurement), default=0.0)
    patient = min(LONGEST_DEADLINE_S, max(SHORTEST_DEADLINE_S, DEADLINE_FACTOR * longest))
    return max(min(patient, seconds_left), LEAST_DEADLINE_S, 2 * longest)


def finals_round_s(entrants: Sequence[LoaderConfig], trials: Sequence[Trial]) -> float:
    """Seconds that one round of finals between these will take."""
    seconds = {modelled(trial.config): trial.seconds for trial in trials}
    longest = max(seconds.values(), default=0.0)
    return sum(seconds.get(config, longest) for config in {modelled(config) for config in entrants})
