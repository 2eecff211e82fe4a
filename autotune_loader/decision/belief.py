"""From the evidence to what is believed of every configuration.

    evidence ──► twin (queues and cores) ──► prior of every rate ──► posterior, corrected by every measured rate

Both are made once per version of the log. No clock, no Optuna, no process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autotune_loader.decision.evidence import Evidence, EvidenceLog, Kind
from autotune_loader.decision.plain_rule import plain_rule_of
from autotune_loader.decision.posterior import Posterior, Seen
from autotune_loader.decision.space import UNMODELLED, Space, useful_workers
from autotune_loader.twin import Observation, Twin
from autotune_loader.twin.context import TwinContext
from autotune_loader.twin.queue import Floats
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement

CORES_OF_A_SERIAL_STEP = 1.3
"""A step that keeps fewer cores busy than this gains nothing from another number of threads, and bears any workers."""
FILLED = 0.7
"""Workers that keep more than this share of the cores busy are in each other's way."""
FEEDING_SD, STEPPING_SD, OTHER_SD = 0.07, 0.06, 0.004
"""What the twin usually gets wrong, relative: of what workers deliver, of what the loop takes, and of single configurations."""
WORKERS_APART = 0.0
"""How far the loop that receives batches is from the one that fetches them itself, in doublings."""
LENGTH_SCALE = 1.2
"""How far apart, in doublings, configurations still share the twin's error."""
UNMODELLED_SD = 0.2
"""What a knob that the twin does not know may change, relative."""
EPOCH_SD = 0.3
"""What the twin may get wrong of epochs so short that they are run whole, relative."""
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
        self._observations: dict[int, Observation] = {}
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
        useful = min(useful_workers(cores, seen), 2 * max(workers for workers, _ in measured))
        useful = min(useful, self.context.epoch_batches or useful)
        return space if useful <= space.max_workers else replace(space, max_workers=useful)

    def twin(self) -> Twin | None:
        """The queueing model of all modelled evidence of steady rates; None before there is any."""
        version = (self.log.version, self.context)
        if self._twin is None or self._twin[0] != version:
            observed = [self._observed(each) for each in self._rated("steady") if self._space.is_modelled(each.config)]
            self._twin = (version, _fitted(observed, self.context))
        return self._twin[1]

    def posterior(self) -> Posterior | None:
        """The joint belief about the steady rates of every legal configuration, and of every one observed."""
        version = (self.log.version, self.context, self._space)
        if self._posterior is None or self._posterior[0] != version:
            twin = self.twin()
            prior = None if twin is None else self._prior(twin)
            known = None if prior is None else prior.after(self._seen(prior.configs, self._rated("steady")))
            self._posterior = (version, known)
        return self._posterior[1]

    def over_epochs(self, as_run: Callable[[LoaderConfig], LoaderConfig]) -> Posterior | None:
        """The same about rates of whole epochs: queues fill anew in each, and workers may start anew.

        Args:
            as_run: of a configuration, how it will be trained with: whether its workers persist.
        """
        steady, twin = self.posterior(), self.twin()
        if steady is None or twin is None:
            return None
        rated = self._rated("epoch")
        configs = tuple(dict.fromkeys([*steady.configs, *(each.key for each in rated)]))
        answers = twin.predict_all([as_run(each) for each in configs], epoch_batches=self.context.epoch_batches or 1)
        prior = Posterior(
            configs=configs,
            mean=np.log([max(each.epoch_samples_per_s, 1e-12) for each in answers]),
            covariance=EPOCH_SD**2 * np.eye(len(configs)),
            noise_sd=steady.noise_sd,
        )
        return prior.after(self._seen(configs, rated))

    def plain_rule(self) -> LoaderConfig | None:
        """What arithmetic on the burst with the fewest workers gives; None before there is one, or where it is not legal."""
        seen = [
            each for each in self._rated("steady") if each.config.num_workers and self._space.is_modelled(each.config)
        ]
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
        vetoed = self._space.veto(config)
        if vetoed is not None or not self.is_beyond_failures(config):
            return vetoed
        failed = self._fewest_that_failed()
        message = f"{config.num_workers} workers were not tried: {failed} failed, and nothing succeeded with more"
        return Failure(kind="infeasible", phase="plan", message=message)

    def below_failures(self, config: LoaderConfig) -> LoaderConfig:
        """The configuration with no more workers than lie halfway from those that succeeded to those that failed."""
        failed = self._fewest_that_failed()
        if failed is None or not config.num_workers:
            return config
        halfway = (self._most_that_succeeded() + failed) // 2
        return replace(config, num_workers=min(config.num_workers, max(halfway, 1)))

    def is_beyond_failures(self, config: LoaderConfig) -> bool:
        """Whether as few workers, or fewer, have failed, and no more have succeeded."""
        failed = self._fewest_that_failed()
        return failed is not None and config.num_workers >= failed

    def is_unproven(self, config: LoaderConfig) -> bool:
        """Whether it has more workers than ever succeeded, where more than those have failed."""
        return self._fewest_that_failed() is not None and config.num_workers > self._most_that_succeeded()

    def _fewest_that_failed(self) -> int | None:
        """The fewest workers that failed, of those than which no more have succeeded; None where there are none."""
        most = self._most_that_succeeded()
        failed = [
            each.config.num_workers for each in self.log if each.config.num_workers > most and _is_for_workers(each)
        ]
        return min(failed, default=None)

    def _most_that_succeeded(self) -> int:
        return max((each.config.num_workers for each in self.log if each.measurement is not None), default=0)

    def _rated(self, kind: Kind) -> list[Evidence]:
        return [each for each in self.log if each.kind == kind and each.log_rate > -np.inf]

    def _observed(self, evidence: Evidence) -> Observation:
        """Read once: traces are long."""
        if id(evidence) not in self._observations:
            assert evidence.measurement is not None
            read = Observation.from_measurement(evidence.config, evidence.measurement)
            self._observations[id(evidence)] = read
        return self._observations[id(evidence)]

    def _prior(self, twin: Twin) -> Posterior | None:
        """What the twin says of all that is legal or was observed, before the rates correct it."""
        tried = dict.fromkeys(each.key for each in self.log if each.log_rate > -np.inf)
        failed = {each.key for each in self.log if each.failure is not None} - set(tried)
        legal = [config.key() for config in self.space.modelled_configs()]
        configs = [config for config in dict.fromkeys([*legal, *tried]) if config not in failed]
        if not configs:
            return None
        fetching = twin.fetching_shares(configs, FEEDING_SD)
        return Posterior(
            configs=tuple(configs),
            mean=np.log(np.maximum(twin.rates(configs), 1e-12)),
            covariance=prior_covariance(configs, fetching, self.context.consumer_cores, self._space),
        )

    def _seen(self, configs: Sequence[LoaderConfig], rated: Sequence[Evidence]) -> Seen:
        where = {config: index for index, config in enumerate(configs)}
        numbers: dict[object, int] = {}
        twin = self.twin()
        counts = [(each.key, each.measurement.samples_per_s.count) for each in rated if each.measurement is not None]
        scatter = np.zeros(len(rated)) if twin is None else twin.window_scatter(counts)
        return Seen(
            where=np.array([where[each.key] for each in rated], dtype=np.int64),
            logs=np.array([each.log_rate for each in rated]),
            variances=np.array(
                [max(e.own_sd, sd) ** 2 + e.neighbours_sd**2 for e, sd in zip(rated, scatter, strict=True)]
            ),
            rounds=np.array(
                [numbers.setdefault((each.phase, each.group), len(numbers)) for each in rated], dtype=np.int64
            ),
        )


def prior_covariance(configs: Sequence[LoaderConfig], fetching: Floats, default_threads: float, space: Space) -> Floats:
    """Covariance of the twin's errors in the logarithm of the rate.

    What limits a rate is what its error is of: where the loop hardly waits that is the step, whatever the workers; else what
    the workers deliver. A knob that the twin does not know changes all configurations that have it alike.

    Args:
        configs: the configurations.
        fetching: by how much each rate follows the seconds of a fetch, from 0 to 1, as the twin says.
        default_threads: threads of the step where `consumer_threads` does not set them.
        space: knows what such a knob is unless something else is tried.
    """
    workers, stepping = _features(configs, default_threads)
    near, same_step = _alike(np.hstack([workers, stepping])), _alike(stepping)
    stepped = 1.0 - fetching
    covariance: Floats = FEEDING_SD**2 * np.outer(fetching, fetching) * near
    covariance += STEPPING_SD**2 * np.outer(stepped, stepped) * same_step + OTHER_SD**2 * near
    for knob in UNMODELLED:
        values = [getattr(config, knob) for config in configs]
        odd = [value != space.first_value(knob, config) for value, config in zip(values, configs, strict=True)]
        if any(odd):
            same = np.array([[one == other for other in values] for one in values])
            covariance += UNMODELLED_SD**2 * np.outer(odd, odd) * same
    return covariance


def _alike(points: Floats) -> Floats:
    distance = ((points[:, None, :] - points[None, :, :]) / LENGTH_SCALE) ** 2
    alike: Floats = np.exp(-0.5 * distance.sum(axis=2))
    return alike


def _features(configs: Sequence[LoaderConfig], default_threads: float) -> tuple[Floats, Floats]:
    """Coordinates in doublings, of workers and of what the loop does: what doubles a knob moves a configuration by one."""
    workers = [
        (math.log2(config.num_workers + 0.5), 0.5 * math.log2(config.prefetch_factor or 1)) for config in configs
    ]
    stepping = [
        (
            math.log2(config.consumer_threads or max(default_threads, 1.0)),
            2.0 * config.pin_memory + config.device_prefetch,
            WORKERS_APART * (config.num_workers > 0),
        )
        for config in configs
    ]
    return np.array(workers), np.array(stepping)


def fit_twin(observed: Sequence[tuple[LoaderConfig, Measurement]], context: TwinContext) -> Twin | None:
    """The twin of these bursts; None where there are none."""
    return _fitted(
        [Observation.from_measurement(config, burst) for config, burst in observed if config.batch_size is None],
        context,
    )


def _fitted(observations: Sequence[Observation], context: TwinContext) -> Twin | None:
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
