"""From the evidence to what is believed of every configuration.

    evidence ──► twin (queues and cores) ──► prior of every rate ──► posterior, corrected by every measured rate

The twin knows queues and cores; the posterior takes up what it gets wrong, so that a wrong twin cannot trap a search. Both are
made once per version of the log. No clock, no Optuna, no process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autotune_loader.decision.evidence import Evidence, EvidenceLog
from autotune_loader.decision.plain_rule import plain_rule_of
from autotune_loader.decision.posterior import Posterior, Seen, prior_covariance
from autotune_loader.decision.space import Space, useful_workers
from autotune_loader.decision.sufficiency import fed
from autotune_loader.twin import Observation, Twin
from autotune_loader.twin.context import TwinContext
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement

CORES_OF_A_SERIAL_STEP = 1.3
"""A step that keeps fewer cores busy than this gains nothing from another number of threads, and bears any workers."""
FILLED = 0.7
"""Workers that keep more than this share of the cores busy are in each other's way."""
GROWS_WITH_WORKERS = (
    "oom_killed",
    "out_of_memory",
    "memory_guard",
    "shared_memory",
    "descriptors",
    "deadline",
    "crashed",
)
"""What more workers make worse, whatever else is set."""


class Beliefs:
    """What the evidence so far says of every configuration of a space."""

    def __init__(self, space: Space, context: TwinContext) -> None:
        self._space = space
        self.context = context
        self.log = EvidenceLog()
        self._twin: tuple[object, Twin | None] | None = None
        self._posterior: tuple[object, Posterior | None] | None = None

    @property
    def space(self) -> Space:
        """The legal configurations, with fewer workers than failed where no more than those have succeeded."""
        failed = self._fewest_that_failed()
        return self._widened() if failed is None else self._below(failed)

    @space.setter
    def space(self, space: Space) -> None:
        self._space = space

    def _below(self, failed: int) -> Space:
        """With fewer workers than failed, and no more than were allowed: the user's own may be far beyond those."""
        return replace(self._space, max_workers=min(failed - 1, self._space.max_workers))

    def _widened(self) -> Space:
        """With as many workers as the fetches seen so far could use: the few before the search may all have been quick ones.

        Twice as many as were observed at most. Where workers fill the cores they take longer for a batch without being of
        any more use, so that such bursts do not count.
        """
        space, cores = self._space, self.context.usable_cores
        measured = [(each.config.num_workers, m) for each in self.log if (m := each.measurement) is not None]
        seen = [m for workers, m in measured if workers * m.service_cpu_s <= FILLED * cores * m.service_s]
        if space.workers_are_capped or not seen:
            return space
        observed = max(workers for workers, _ in measured)
        useful = useful_workers(cores, seen)
        useful = min(useful, 2 * observed, self.context.epoch_batches or useful)
        return space if useful <= space.max_workers else replace(space, max_workers=useful)

    def below_failures(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with no more workers than lie halfway from those that succeeded to those that failed."""
        failed = self._fewest_that_failed()
        if failed is None or not config.num_workers:
            return config
        halfway = (self._most_that_succeeded() + failed) // 2
        return replace(config, num_workers=min(config.num_workers, max(halfway, 1)))

    def twin(self) -> Twin | None:
        """The queueing model of all modelled evidence of steady rates; None before there is any."""
        version = (self.log.version, self.context)
        if self._twin is None or self._twin[0] != version:
            observed = [(each.config, each.measurement) for each in self._modelled() if each.measurement is not None]
            self._twin = (version, fit_twin(observed, self.context))
        return self._twin[1]

    def posterior(self) -> Posterior | None:
        """The joint belief about the steady rates of every legal configuration, and of every one observed."""
        version = (self.log.version, self.context, self._space)
        if self._posterior is None or self._posterior[0] != version:
            twin = self.twin()
            self._posterior = (version, None if twin is None else self._corrected(twin))
        return self._posterior[1]

    def of_tried(self) -> Posterior | None:
        """The same about what was observed alone; None before there is any of it."""
        posterior = self.posterior()
        known = () if posterior is None else posterior.configs
        tried = [key for key in dict.fromkeys(each.key for each in self.log) if key in known]
        return None if posterior is None or not tried else posterior.at(tried)

    def over_epochs(self, as_run: Callable[[LoaderConfig], LoaderConfig]) -> Posterior | None:
        """The same about rates of whole epochs: queues fill anew in each, and workers may start anew.

        Args:
            as_run: of a configuration, how it will be trained with: whether its workers persist.
        """
        steady, twin = self.posterior(), self.twin()
        if steady is None or twin is None:
            return None
        predictions = twin.predict_all(
            [as_run(config) for config in steady.configs], epoch_batches=self.context.epoch_batches or 1
        )
        shares = [each.epoch_samples_per_s / each.samples_per_s.value for each in predictions]
        # Few workers that feed the loop in the long run take longer to begin each epoch.
        return replace(steady, mean=steady.mean + np.log(np.maximum(shares, 1e-12)), enough=())

    def plain_rule(self) -> LoaderConfig | None:
        """What arithmetic on the burst with the fewest workers gives; None before there is one, or where it is not legal."""
        seen = [each for each in self._modelled() if each.config.num_workers]
        if not seen:
            return None
        look = min(seen, key=lambda each: each.config.num_workers).measurement
        assert look is not None
        space = self.space
        config = plain_rule_of(look, self.context.usable_cores, space.max_workers)
        return config if space.veto(config) is None else None

    def predicted(self, config: LoaderConfig) -> float | None:
        """Samples/s that the twin expects; None before it knows anything, and of batches of another size."""
        twin = self.twin() if config.batch_size is None else None
        return None if twin is None else float(twin.rates([config])[0])

    def feasible(self, config: LoaderConfig) -> Failure | None:
        """Why a configuration must not be tried, by arithmetic or by what failures taught; None where it may."""
        return self._space.veto(config) or self._too_many_workers(config)

    def is_beyond_failures(self, config: LoaderConfig) -> bool:
        """Whether as few workers, or fewer, have failed, and no more have succeeded."""
        return self._too_many_workers(config) is not None

    def is_unproven(self, config: LoaderConfig) -> bool:
        """Whether it has more workers than ever succeeded, where more than those have failed."""
        return self._fewest_that_failed() is not None and config.num_workers > self._most_that_succeeded()

    def _too_many_workers(self, config: LoaderConfig) -> Failure | None:
        failed = self._fewest_that_failed()
        if failed is None or config.num_workers < failed:
            return None
        message = f"{config.num_workers} workers were not tried: {failed} failed, and nothing succeeded with more"
        return Failure(kind="infeasible", phase="plan", message=message)

    def _fewest_that_failed(self) -> int | None:
        """The fewest workers that failed, of those than which no more have succeeded; None where there are none."""
        most = self._most_that_succeeded()
        failed = [
            each.config.num_workers for each in self.log if each.config.num_workers > most and _is_for_workers(each)
        ]
        return min(failed, default=None)

    def _most_that_succeeded(self) -> int:
        return max((each.config.num_workers for each in self.log if each.measurement is not None), default=0)

    def _modelled(self) -> list[Evidence]:
        """Evidence that the twin understands: what varies in other knobs is compared by its rates alone."""
        return [each for each in self._steady() if self._space.is_modelled(each.config)]

    def _steady(self) -> list[Evidence]:
        return [each for each in self.log if each.kind == "steady" and each.log_rate > -np.inf]

    def _corrected(self, twin: Twin) -> Posterior:
        seen = self._steady()
        tried = dict.fromkeys(each.key for each in seen)
        failed = {each.key for each in self.log if each.failure is not None} - set(tried)
        legal = [config.key() for config in self.space.modelled_configs()]
        configs = [config for config in dict.fromkeys([*legal, *tried]) if config not in failed]
        where, numbers = {config: index for index, config in enumerate(configs)}, dict[object, int]()
        return self._prior(configs, twin).after(
            Seen(
                where=np.array([where[each.key] for each in seen]),
                logs=np.array([each.log_rate for each in seen]),
                variances=np.array([each.own_sd**2 + each.neighbours_sd**2 for each in seen]),
                rounds=np.array([numbers.setdefault((each.phase, each.group), len(numbers)) for each in seen]),
            )
        )

    def _prior(self, configs: Sequence[LoaderConfig], twin: Twin) -> Posterior:
        """What the twin says of these configurations, before their own rates correct it."""
        predictions = twin.predict_all(configs)
        rates = [prediction.samples_per_s.value for prediction in predictions]
        use = [prediction.consumer_use for prediction in predictions]
        return Posterior(
            configs=tuple(configs),
            mean=np.log(np.maximum(rates, 1e-12)),
            covariance=prior_covariance(configs, self.context.consumer_cores, self._space),
            enough=fed(configs, twin.observations, use),
        )


def fit_twin(observed: Sequence[tuple[LoaderConfig, Measurement]], context: TwinContext) -> Twin | None:
    """The twin of these bursts; None where there are none."""
    observations = [
        Observation.from_measurement(config, measurement)
        for config, measurement in observed
        if config.batch_size is None
    ]
    if not observations:
        return None
    return Twin.fit(
        observations,
        cores=context.usable_cores,
        consumer_cores=context.consumer_cores,
        step_s_by_threads=context.step_s_by_threads,
    )


def _is_for_workers(evidence: Evidence) -> bool:
    """Whether it failed in a way that says the same of more workers: not by another batch size, say, or by pinning."""
    config, failure = evidence.config, evidence.failure
    if failure is None or failure.kind == "infeasible" or config.batch_size is not None:
        return False
    plain = not config.pin_memory and not config.device_prefetch and config.in_order
    return failure.kind in GROWS_WITH_WORKERS or plain
