"""Evidence from short bursts of real training: how long each is, which are run again, and what they say.

search     one burst; a second where the first failed and may well work the next time
compare    one burst over the samples of the round; from full queues where workers would compute more than in training
epoch      whole epochs, with start-up and the gaps between
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune_loader.decision.evidence import Ask, Evidence
from autotune_loader.decision.space import Space
from autotune_loader.probe.protocol import Probe
from autotune_loader.tuning.schedule import (
    FINAL_BURST,
    SEARCH_BURST,
    EpochLength,
    deadline_s,
    least_window_s,
    prefill_s,
    startup_s,
)
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import CEILING_BURST, BurstPlan
from autotune_loader.values.trial import Trial

ROUND_SEEDS = 1_000
"""Rounds read other samples than the bursts of the search: fresh samples as well as fresh bursts."""


class BurstSource:
    """Evidence from a probe.

    Args:
        probe: runs the bursts.
        space: the legal configurations, which knows what leaves too little memory.
        context: cores, and the step alone; kept up to date by the caller.
        trials: what was observed so far: how long bursts take is learnt from it. The caller goes on appending to it.
        seconds_left: of the budget.
        first_batch_s: what the very first batch took; no burst is taken for a hang before some of these have passed.
        stages: whether workers are watched in the bursts of the search; those that rates are taken from go without.
    """

    def __init__(
        self,
        probe: Probe,
        space: Space,
        context: TwinContext,
        trials: Sequence[Trial],
        seconds_left: Callable[[], float],
        first_batch_s: float = 0.0,
        stages: bool = False,
    ) -> None:
        self._probe = probe
        self.bursts = 0
        """How many were run so far."""
        self._space = space
        self._trials = trials
        self._seconds_left = seconds_left
        self._first_batch_s = first_batch_s
        self._stages = stages
        self._prefills: dict[LoaderConfig, float] = {}
        self.context = context

    def gather(self, config: LoaderConfig, ask: Ask) -> Evidence:
        if ask.phase == "search":
            outcome = self._searched(config, ask)
        elif ask.kind == "epoch":
            outcome = self._whole_epochs(config, ask)
        else:
            outcome = self._from_full_queues(config, ask)
        if not isinstance(outcome, Failure):
            outcome = self._space.over_margin(config, outcome) or outcome
        return Evidence(config=config, outcome=outcome, kind=ask.kind, phase=ask.phase, group=ask.group)

    def cost_s(self, config: LoaderConfig, ask: Ask) -> float:
        if ask.kind == "epoch":
            epoch = EpochLength.of(self._trials, self.context.epoch_batches)
            started_s = (startup_s(config, self._trials) or 0.0) if config.num_workers else 0.0
            return started_s + (FINAL_BURST.max_s if epoch is None else epoch.burst_s)
        seconds = {trial.config.key(): trial.seconds for trial in self._trials if trial.measurement is not None}
        return seconds.get(config.key(), max(seconds.values(), default=0.0))

    def step_ceiling(self, consumer_threads: int | None, batch_size: int | None = None) -> Measurement | Failure:
        """The step on one cached batch again and again: the rate that no loader can exceed."""
        self.bursts += 1
        return self._probe.step_ceiling(consumer_threads, replace(CEILING_BURST, batch_size=batch_size))

    def _searched(self, config: LoaderConfig, ask: Ask) -> Measurement | Failure:
        plan = self._paced(config, replace(SEARCH_BURST, seed=ask.group, stages=self._stages))
        outcome = self._burst(config, plan)
        if isinstance(outcome, Failure) and outcome.retryable and config.batch_size is None:
            outcome = self._burst(config, plan)
        return outcome

    def _from_full_queues(self, config: LoaderConfig, ask: Ask) -> Measurement | Failure:
        """One burst; a second where the first shows that it, and all later ones, must begin with full queues."""
        plan = self._paced(config, replace(FINAL_BURST, seed=ROUND_SEEDS + ask.group))
        filled_s = self._prefills.get(config, 0.0)
        outcome = self._burst(config, replace(plan, prefill_s=filled_s))
        if filled_s or isinstance(outcome, Failure):
            return outcome
        filled_s = prefill_s(config, outcome, self.context)
        if not filled_s:
            return outcome
        self._prefills[config] = filled_s
        return self._burst(config, replace(plan, prefill_s=filled_s))

    def _whole_epochs(self, config: LoaderConfig, ask: Ask) -> Measurement | Failure:
        """Epochs to their end; without workers these are nothing but their batches, so any burst will do."""
        deadline = self._deadline_s(config)
        whole = config.num_workers > 0
        plan = replace(FINAL_BURST, seed=ROUND_SEEDS + ask.group, deadline_s=deadline, whole_epochs=whole)
        return self._burst(config, plan)

    def _burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        self.bursts += 1
        return self._probe.burst(config, plan)

    def _paced(self, config: LoaderConfig, plan: BurstPlan) -> BurstPlan:
        """The plan for one configuration: long enough for some rounds of its workers, and with a deadline."""
        least_s = least_window_s(config, self._trials, self.context.usable_cores)
        return replace(
            plan,
            min_s=max(plan.min_s, least_s),
            max_s=max(plan.max_s, least_s),
            deadline_s=self._deadline_s(config),
        )

    def _deadline_s(self, config: LoaderConfig) -> float:
        return deadline_s(self._trials, self._seconds_left(), self._first_batch_s, config)
