"""The twin: from a few traced bursts to the rate of every configuration, and the stage that binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autotune_loader.twin.calibration import Calibration, calibrate
from autotune_loader.twin.contention import BURST_SD, stretch
from autotune_loader.twin.observation import Observation, whole_cycles
from autotune_loader.twin.prediction import Prediction, Stage
from autotune_loader.twin.queue import Floats, Times, batches_needed, quantile_order, simulate, steady_rate
from autotune_loader.twin.stages import Columns, Load, Stages, loop_s
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Z_95, Interval

STEADY_BATCHES, MOST_STEADY_BATCHES = 256, 1500
"""Batches in the window of a steady rate; more where batches differ much: which worker the slow ones fall to is luck that a
longer run evens out."""
LIGHT_VARIATION, HEAVY_ORDERS = 0.4, 3
"""Standard deviation over mean of service times up to which `STEADY_BATCHES` are enough; beyond it, orders of the batches."""
UNTESTED_SD = 0.06
"""How far rates lie off a twin that was fitted to them alone (relative; its goal is a median error of 3 %)."""
STRETCHED = 1.1
"""From this factor on, shared cores (or waiting that grows) are named as what limits the workers."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Twin:
    """Predicts every DataLoader configuration on the machine and workload of its bursts. Built by `Twin.fit`."""

    observations: tuple[Observation, ...]
    cores: float
    """Usable cores."""
    consumer_cores: float
    """Cores that the step keeps busy while it runs, where `consumer_threads` does not lower them."""
    step_base_s: Mapping[int | None, float]
    """Seconds of the undisturbed step by `consumer_threads`."""
    calibration: Calibration

    @classmethod
    def fit(
        cls,
        observations: Sequence[Observation],
        *,
        cores: float,
        consumer_cores: float = 1.0,
        step_s_by_threads: Mapping[int | None, float] | None = None,
    ) -> Twin:
        """The twin of the machine that the bursts ran on.

        Args:
            observations: traced bursts; best at 0 workers, at 1, and at as many as there are cores.
            cores: usable cores.
            consumer_cores: cores that the step keeps busy while it runs: 1 for a step on an accelerator, torch's
                intra-op threads for a step on the CPU.
            step_s_by_threads: seconds per step on a cached batch, by `consumer_threads`, where they were measured.

        Raises:
            ValueError: there are no observations, or no cores.
        """
        if not observations:
            raise ValueError("the twin needs at least one observation, such as a burst with one worker")
        if cores <= 0:
            raise ValueError(f"cores={cores} is not positive; cores=1 would work")
        observations = whole_cycles(observations)
        bases = dict(step_s_by_threads or {})
        for seen in sorted(observations, key=lambda o: o.workers_at_work):
            bases.setdefault(seen.consumer_threads, float(seen.step_s.mean()))
        bases.setdefault(None, max(bases.values()))
        calibration = calibrate(
            observations,
            cores=float(cores),
            threads_of=lambda threads: threads_at_work(threads, consumer_cores),
            step_base_s=bases,
        )
        return cls(
            observations=observations,
            cores=float(cores),
            consumer_cores=float(consumer_cores),
            step_base_s=bases,
            calibration=calibration,
        )

    def rates(self, configs: Sequence[LoaderConfig], cores: float | None = None) -> Floats:
        """Samples per second of each configuration in the midst of training."""
        return self._solved(self._columns(configs, cores or self.cores)).rate * self.batch_size

    def predict_all(
        self,
        configs: Sequence[LoaderConfig],
        *,
        epoch_batches: int | None = None,
        startup_s: float | None = None,
        cores: float | None = None,
    ) -> list[Prediction]:
        """What to expect of each configuration, all simulated together over the same batches.

        Args:
            configs: any legal configurations; what the twin does not model (start method, order) is ignored.
            epoch_batches: batches per epoch, for the epoch's rate.
            startup_s: seconds from creating the iterator until workers begin; estimated from the bursts when None.
            cores: usable cores, to ask about another machine.
        """
        if not configs:
            return []
        columns = self._columns(configs, cores or self.cores)
        solved = self._solved(columns)
        stages, load, rates = solved.stages, solved.load, solved.rate
        started = np.array([self.startup_s(c.num_workers) if startup_s is None else startup_s for c in configs])
        epochs = rates
        if epoch_batches:
            paid_s = np.where([config.persistent_workers for config in configs], 0.0, started)
            epochs = self._epoch_rates(columns, stages, rates, epoch_batches, paid_s)
        consumer_s, headroom = stages.consumer_s(columns), stages.headroom(columns)
        fetching = stretch(np.minimum(load.wanting, columns.cores), *self._shape)
        used = rates * (
            np.where(columns.workers > 0, fetching, 1.0) * self.calibration.contention.cpu_s
            + columns.step_s * columns.step_threads
        )
        return [
            Prediction(
                config=config,
                samples_per_s=self._interval(float(rates[i]) * self.batch_size),
                epoch_samples_per_s=float(epochs[i]) * self.batch_size,
                binding=self._binding(i, columns, solved),
                busy_workers=float(min(rates[i] * stages.service_s[i], columns.workers[i])),
                headroom=float(headroom[i]),
                consumer_use=float(min(rates[i] * consumer_s[i], 1.0)),
                service_s=float(stages.service_s[i]),
                startup_s=float(started[i]),
                cores=float(used[i]),
            )
            for i, config in enumerate(configs)
        ]

    def ceiling(
        self, *, consumer_threads: int | None = None, device_prefetch: int = 0, cores: float | None = None
    ) -> float:
        """The roofline: samples/s that the consumer alone and the cores alone allow. No prediction exceeds it."""
        calibration, seen = self.calibration, self.observations
        at_work = np.array([0.0, *(o.workers_at_work for o in seen)])
        # Pinned or not, whichever is quicker: the roof is over both.
        receive_s = min(float(calibration.receive.at(at_work).min()), calibration.hand_over_s)
        base_s = self.step_base_s.get(consumer_threads, self.step_base_s[None])
        step_s = min([base_s, *(float(o.step_s.mean()) for o in seen if o.consumer_threads == consumer_threads)])
        per_batch = float(loop_s(receive_s, step_s, device_prefetch))
        serial = calibration.serial_service_s + calibration.serial_receive_s + step_s
        cpu_s = min(calibration.contention.cpu_s, *(float(o.cpu_s.mean()) for o in seen), np.inf)
        by_consumer = self.batch_size / max(min(per_batch, serial), 1e-9)
        return min(by_consumer, self.batch_size * (cores or self.cores) / max(cpu_s, 1e-9))

    @property
    def batch_size(self) -> float:
        """Mean samples per batch of the bursts."""
        return float(np.mean([o.batch_size for o in self.observations]))

    @cached_property
    def services(self) -> Floats:
        """Service times of all bursts with workers, relative to the mean of each."""
        with_workers = [o for o in self.observations if o.num_workers > 0] or list(self.observations)
        return np.concatenate([_relative(o.service_s) for o in with_workers])

    def startup_s(self, num_workers: int) -> float:
        """Seconds until the first of this many workers begins, on a line through the bursts."""
        seen = [(o.num_workers, o.startup_s) for o in self.observations if o.num_workers > 0]
        if num_workers == 0 or not seen:
            return 0.0
        workers, seconds = (np.array(column, dtype=float) for column in zip(*seen, strict=True))
        if len(set(workers)) == 1:
            return float(seconds.mean())
        slope, start = np.polyfit(workers, seconds, 1)
        return float(max(start + max(slope, 0.0) * num_workers, 0.0))

    @property
    def _shape(self) -> tuple[float, float]:
        return self.calibration.contention.alpha, self.calibration.contention.beta

    @cached_property
    def _spread(self) -> float:
        """Standard deviation of a prediction's logarithm: how far the bursts' own rates lie off."""
        seen = [o for o in self.observations if o.samples_per_s > 0]
        configs = [
            LoaderConfig(
                num_workers=o.num_workers,
                prefetch_factor=o.prefetch_factor if o.num_workers else None,
                pin_memory=o.pin_memory,
                consumer_threads=o.consumer_threads,
                device_prefetch=o.device_prefetch,
            )
            for o in seen
        ]
        off = np.log(self.rates(configs) / [o.samples_per_s for o in seen]) if seen else np.zeros(0)
        # As if one further burst had been off by what is usual: a single one says little.
        return float(np.sqrt((off @ off + UNTESTED_SD**2) / (len(off) + 1)))

    def _interval(self, value: float) -> Interval:
        spread = float(np.hypot(self._spread, BURST_SD))
        low, high = value * np.exp(-Z_95 * spread), value * np.exp(Z_95 * spread)
        return Interval(value=value, low=float(low), high=float(high), count=len(self.observations))

    def _columns(self, configs: Sequence[LoaderConfig], cores: float) -> Columns:
        threads = [threads_at_work(c.consumer_threads, self.consumer_cores) for c in configs]
        known = self.step_base_s
        return Columns(
            workers=np.array([c.num_workers for c in configs], dtype=np.int64),
            prefetch=np.array([c.prefetch_factor or 1 for c in configs], dtype=np.int64),
            ahead=np.array([c.device_prefetch for c in configs], dtype=np.int64),
            pinned=np.array([c.pin_memory for c in configs], dtype=np.bool_),
            threads=tuple(c.consumer_threads for c in configs),
            step_threads=np.array(threads),
            step_s=np.array([known.get(c.consumer_threads, known[None]) for c in configs]),
            step_off=np.array([self.calibration.step_off.get(each, 0.0) for each in threads]),
            cores=float(cores),
        )

    def _solved(self, columns: Columns) -> _Solved:
        """Stage times, load and rate: by turns, since idle workers slow nobody, and who idles follows from the rate."""
        variation = float(self.services.std())
        batches = round(
            min(max(STEADY_BATCHES * (variation / LIGHT_VARIATION) ** 2, STEADY_BATCHES), MOST_STEADY_BATCHES)
        )
        rng, count = np.random.default_rng(0), batches_needed(columns.workers, batches)
        steps = np.concatenate([_relative(o.step_s) for o in self.observations])
        orders = [
            (quantile_order(self.services, count, rng)[:, None], quantile_order(steps, count, rng))
            for _ in range(1 if variation < LIGHT_VARIATION else HEAVY_ORDERS)
        ]
        efficiency = np.ones(len(columns.workers))
        for _ in range(2):
            stages, load = self.calibration.settle(columns, efficiency)
            # Workers that keep up with the loop have long filled their queues. From empty ones those with 4 % to spare take 25
            # rounds for each batch ahead. With heavy tails they fall behind again before the queues are full.
            full = (
                columns.workers * columns.prefetch * (variation < LIGHT_VARIATION) * (stages.headroom(columns) >= 1.0)
            )
            made = np.arange(count)[:, None] < full
            runs = [_run(columns, stages, np.where(made, 0.0, service), step) for service, step in orders]
            rate = np.mean([steady_rate(done, columns.workers, batches) for done in runs], axis=0)
            efficiency = np.minimum(rate / stages.bound(columns), 1.0)
        return _Solved(stages=stages, load=load, rate=np.minimum(rate, self._roofs(columns)))

    def _roofs(self, columns: Columns) -> Floats:
        kinds = list(zip(columns.threads, columns.ahead.tolist(), strict=True))
        roofs = {
            kind: self.ceiling(consumer_threads=kind[0], device_prefetch=kind[1], cores=columns.cores)
            for kind in set(kinds)
        }
        return np.array([roofs[kind] for kind in kinds]) / self.batch_size

    def _epoch_rates(
        self, columns: Columns, stages: Stages, rates: Floats, epoch_batches: int, paid_s: Floats
    ) -> Floats:
        """Batches per second of a whole epoch: its first batches as simulated from empty queues, and the rest at the rate."""
        count = min(epoch_batches, batches_needed(columns.workers, STEADY_BATCHES))
        rng = np.random.default_rng(0)
        service = quantile_order(self.services, count, rng)[:, None]
        done = _run(columns, stages, service, np.ones(count))[-1]
        epochs: Floats = epoch_batches / np.maximum(paid_s + done + (epoch_batches - count) / rates, 1e-12)
        return np.minimum(epochs, rates)

    def _binding(self, i: int, columns: Columns, solved: _Solved) -> Stage:
        """The stage that is busy for the largest share of its time."""
        stages, rate, workers = solved.stages, float(solved.rate[i]), int(columns.workers[i])
        receive_s, step_s, service_s = (float(s[i]) for s in (stages.receive_s, stages.step_s, stages.service_s))
        consumer: Stage = "transport" if receive_s > step_s else "consumer"
        if workers == 0:
            return "workers" if service_s > receive_s + step_s else consumer
        use: dict[Stage, float] = {
            "workers": rate * service_s / workers,
            consumer: rate * float(loop_s(receive_s, step_s, int(columns.ahead[i]))),
            "pinning": rate * float(stages.pin_s[i]),
        }
        busiest = max(use, key=lambda stage: use[stage])
        if busiest != "workers":
            return busiest
        contention, load = self.calibration.contention, solved.load
        wanted = float(load.wanting[i] + contention.step_cores * columns.step_threads[i] * load.consumer[i])
        if stages.cpu_share[i] >= 0.5:
            return "cpu" if wanted >= columns.cores / STRETCHED else "workers"
        grown = 1.0 + contention.gamma * max(float(load.at_work[i]) - 1.0, 0.0)
        return "storage" if grown > STRETCHED else "workers"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Solved:
    stages: Stages
    load: Load
    rate: Floats
    """Batches per second."""


def threads_at_work(consumer_threads: int | None, consumer_cores: float) -> float:
    """Cores that the step keeps busy while it runs: `consumer_cores`, or as many as its threads where these are fewer."""
    return consumer_cores if consumer_threads is None else min(float(consumer_threads), consumer_cores)


def _relative(samples: Floats) -> Floats:
    mean = samples.mean()
    return samples / mean if mean > 0 else np.ones_like(samples)


def _run(columns: Columns, stages: Stages, service: Floats, step: Floats) -> Floats:
    """When each step was done, given how long each batch takes to be made and each step, relative to their means."""
    times = Times(
        service * stages.service_s, stages.receive_s, step[:, None] * stages.step_s, stages.pin_s, stages.transit_s
    )
    return simulate(times, workers=columns.workers, prefetch=columns.prefetch, device_prefetch=columns.ahead)
