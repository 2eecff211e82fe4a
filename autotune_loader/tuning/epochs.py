"""Epochs so short that the finals run them whole: start-up and the gaps between epochs are then much of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autotune_loader.probe.protocol import Probe
from autotune_loader.tuning.finals import FINAL_BURST, TYPICAL_NOISE
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

SHORT_EPOCH_S = 1.0
# Longer ones, too, where fetching the first batch takes more than this share of them, which the steady rate does not hold ...
FIRST_BATCH_SHARE = 0.05
# ... and so many bursts of them fit into the time that is left: two rounds of three.
FEWEST_BURSTS = 6
# The search leaves time for three rounds of three, if that is no more than this share of the budget.
WANTED_BURSTS = 9
MOST_OF_BUDGET = 0.6
# A burst of long epochs runs one that is not timed, and one that is.
EPOCHS_PER_BURST = 2
# Relative standard deviation of one epoch's rate: 6 to 11 % in 36 bursts of `tutorial`, whose step and workers share cores.
EPOCH_NOISE = 0.08
# Workers that fetch an epoch in so many rounds are raced: they are done early, and leave the cores to the step.
ROUNDS = (1, 2)


def are_short(epoch_s: float, first_batch_s: float, seconds_left: float) -> bool:
    """Whether to run epochs whole.

    Args:
        epoch_s: seconds of one at the steady rate.
        first_batch_s: seconds in which workers that are there fetch its first batch.
        seconds_left: until the budget is spent.
    """
    is_affordable = FEWEST_BURSTS * _burst_s(epoch_s) <= seconds_left
    return epoch_s <= SHORT_EPOCH_S or (is_affordable and first_batch_s > FIRST_BATCH_SHARE * epoch_s)


def kept_for_epochs_s(epoch_s: float, first_batch_s: float, budget_s: float) -> float:
    """Seconds that the search leaves for running epochs whole; 0 where they are not short."""
    most_s = MOST_OF_BUDGET * budget_s
    return min(WANTED_BURSTS * _burst_s(epoch_s), most_s) if are_short(epoch_s, first_batch_s, most_s) else 0.0


def round_of_epochs_s(epoch_s: float, startups_s: Sequence[float]) -> float:
    """Seconds that one round of whole epochs will take, from the start-up of each entrant."""
    return sum(startups_s) + _burst_s(epoch_s) * len(startups_s)


def noise_of_epochs(epoch_s: float) -> float:
    """Relative standard deviation of what a burst of epochs that take so long tells; never less than of any burst."""
    timed = max(1.0, FINAL_BURST.max_s / epoch_s - 1)
    return max(EPOCH_NOISE / math.sqrt(timed), TYPICAL_NOISE)


def _burst_s(epoch_s: float) -> float:
    return max(EPOCHS_PER_BURST * epoch_s, FINAL_BURST.max_s)


class WholeEpochs:
    """A probe whose bursts are of whole epochs. Without workers these are nothing but their batches, so any burst will do."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        return self._probe.burst(config, replace(plan, whole_epochs=config.num_workers > 0))

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        return self._probe.step_ceiling(consumer_threads, plan)


def with_fewer_rounds(config: LoaderConfig, epoch_batches: int, max_workers: int) -> list[LoaderConfig]:
    """As many workers as fetch an epoch in one round, and in two, where these are more; the step has its own threads again."""
    more = [math.ceil(epoch_batches / rounds) for rounds in ROUNDS]
    return [
        replace(config, num_workers=workers, consumer_threads=None)
        for workers in more
        if 0 < config.num_workers < workers <= max_workers
    ]
