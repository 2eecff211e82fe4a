"""The twin: from a few traced bursts to the rate of every configuration, with an interval and the stage that binds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune_loader.twin.calibration import Calibration, calibrate
from autotune_loader.twin.contention import BURST_SD, stretch
from autotune_loader.twin.epoch import epoch_ends
from autotune_loader.twin.observation import Observation, whole_cycles
from autotune_loader.twin.prediction import Prediction, binding_stage
from autotune_loader.twin.queue import (
    BEST,
    DRAWS,
    LIGHT_VARIATION,
    MOST_STEADY_BATCHES,
    Floats,
    Ints,
    Times,
    batches_needed,
    burst_rate,
    relative,
    sequences,
    simulate,
    steady_batches,
    steady_rate,
)
from autotune_loader.twin.stages import Columns, Load, Stages, at_columns, loop_s
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.statistics import Z_95, Interval

UNSEEN_THREADS_SD = 0.05
"""Further uncertainty of the step with a number of threads that no burst and no step ceiling has seen."""
PER_CONFIG = BEST + DRAWS
SCATTER_RUNS = 24
"""Simulated bursts whose rates tell how far those of real ones scatter: to 15 %."""
SHORT_EPOCH_BATCHES = 512
"""Up to this many batches an epoch is followed batch by batch; of a longer one the ends are too little."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
    seed: int

    @classmethod
    def fit(
        cls,
        observations: Sequence[Observation],
        *,
        cores: float,
        consumer_cores: float = 1.0,
        step_s_by_threads: Mapping[int | None, float] | None = None,
        seed: int = 0,
    ) -> Twin:
        """The twin of the machine that the bursts ran on.

        Args:
            observations: traced bursts; best at 0 workers, at 1, and at as many as there are cores.
            cores: usable cores.
            consumer_cores: cores that the step keeps busy while it runs: 1 for a step on an accelerator, torch's
                intra-op threads for a step on the CPU.
            step_s_by_threads: seconds per step on a cached batch, by `consumer_threads`, where they were measured.
            seed: chooses the draws that make the intervals.

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
            seed=seed,
        )
        return cls(
            observations=observations,
            cores=float(cores),
            consumer_cores=float(consumer_cores),
            step_base_s=bases,
            calibration=calibration,
            seed=seed,
        )

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
            configs: any legal configurations; what the twin does not model (start method, sharing strategy) is ignored.
            epoch_batches: batches per epoch, for the epoch's rate.
            startup_s: seconds from creating the iterator until workers begin; estimated from the bursts when None.
            cores: usable cores, to ask about another machine.
        """
        if not configs:
            return []
        columns = self._columns(configs, cores or self.cores, np.arange(PER_CONFIG))
        variation = self.variation
        pools = self._pools(batches_needed(columns.workers, steady_batches(variation)))
        stages, load = self.calibration.settle(columns, np.ones(len(columns.draw)))
        first = self._steady_rates(columns, stages, pools, variation)
        stages, load = self.calibration.settle(columns, np.minimum(first / stages.bound(columns), 1.0))
        rates = self._steady_rates(columns, stages, pools, variation)
        ends = self._epoch_ends(configs, columns, load, epoch_batches) if epoch_batches else {}
        others = [i for i in range(len(configs)) if i not in ends] if epoch_batches else []
        begun = self._begun(others, columns, stages, pools)
        consumer_s, headroom = stages.consumer_s(columns), stages.headroom(columns)
        roofs = {
            (threads, ahead): self.ceiling(consumer_threads=threads, device_prefetch=ahead, cores=cores)
            for threads, ahead in {(config.consumer_threads, config.device_prefetch) for config in configs}
        }
        predictions = []
        for i, config in enumerate(configs):
            at = slice(i * PER_CONFIG, (i + 1) * PER_CONFIG)
            roof = roofs[config.consumer_threads, config.device_prefetch]
            rate, spread = _centre_and_spread(rates[at])
            rate = min(rate, roof / self.batch_size)
            started_s = self.startup_s(config.num_workers) if startup_s is None else startup_s
            epoch, paid_s = rate, 0.0 if config.persistent_workers else started_s
            if epoch_batches and i in ends:
                # A step on the workers' cores is faster once these are done early; whatever else seems to be, is luck.
                most = roof / self.batch_size if self.calibration.step_is_parallel else rate
                epoch = min(epoch_batches / max(paid_s + ends[i], 1e-12), most)
            elif epoch_batches:
                epoch = _epoch_rate(begun[i], rate, epoch_batches, paid_s)
            predictions.append(
                Prediction(
                    config=config,
                    samples_per_s=self._interval(rate, spread),
                    epoch_samples_per_s=epoch * self.batch_size,
                    binding=binding_stage(at.start, rate, columns, stages, load, self.calibration),
                    busy_workers=min(rate * float(stages.service_s[at.start]), float(config.num_workers)),
                    headroom=float(headroom[at.start]),
                    consumer_use=min(rate * float(consumer_s[at.start]), 1.0),
                    service_s=float(stages.service_s[at.start]),
                    startup_s=started_s,
                    cores=rate * self._batch_cpu_s(at.start, columns, load),
                )
            )
        return predictions

    def _batch_cpu_s(self, i: int, columns: Columns, load: Load) -> float:
        """CPU seconds of fetching a batch and, on the CPU, of its step."""
        fitted = self.calibration.contention
        running = np.minimum(load.wanting[i], columns.cores[i]) if columns.workers[i] else np.ones(1)
        fetch_s = float(np.ravel(fitted.cpu_s[0] * stretch(running, fitted.alpha[0], fitted.beta[0]))[0])
        return fetch_s + float(columns.step_s[i] * columns.step_threads[i])

    def _epoch_ends(
        self, configs: Sequence[LoaderConfig], columns: Columns, load: Load, epoch_batches: int
    ) -> dict[int, float]:
        """Seconds of a short epoch that workers deliver in order, by position in `configs`; start-up comes besides."""
        chosen = [i for i, config in enumerate(configs) if config.num_workers and config.in_order]
        if not chosen or epoch_batches > SHORT_EPOCH_BATCHES:
            return {}
        at = _best_columns(chosen)
        rng = np.random.default_rng(self.seed)
        service, step = (sequences(pool, epoch_batches, rng) for pool in (self._services(), self._steps()))
        columns, load = at_columns(columns, at), at_columns(load, at)
        ends = epoch_ends(columns, load, service[:, columns.draw], step[:, columns.draw], self.calibration)
        return dict(zip(chosen, map(float, ends.reshape(-1, BEST).mean(axis=1)), strict=True))

    def _begun(
        self, chosen: Sequence[int], columns: Columns, stages: Stages, pools: tuple[Floats, Floats]
    ) -> dict[int, Floats]:
        """Seconds until each of an epoch's first steps is done, by position in `configs`."""
        if not chosen:
            return {}
        at = _best_columns(chosen)
        done = self._run(at_columns(columns, at), at_columns(stages, at), pools)
        return dict(zip(chosen, done.reshape(len(done), -1, BEST).mean(axis=2).T, strict=True))

    def burst_scatter(self, bursts: Sequence[tuple[LoaderConfig, int]]) -> Floats:
        """How far the rates of such bursts lie apart by which batches they happen to read, as sd of the logarithm.

        In order a slow batch holds up all workers: where one in 33 takes five times as long and workers about keep up with
        the loop, rates scatter by 30 % between bursts of 2.5 rounds (tests/twin/test_twin.py), whatever one of them says of
        itself. It is the scatter of what is consumed. Where workers hold the loop up a burst is read by what they make, too,
        and scatters less; but that overlooks how they wait for orders behind a slow batch, so the larger figure stands.

        Args:
            bursts: configurations, each with the batches in the window of its burst.

        Returns:
            One value per burst; 0 where a burst's own interval tells: without workers, where service times vary little, and in
            windows of more than `MOST_STEADY_BATCHES`.
        """
        scatter = np.zeros(len(bursts))
        untold = [i for i, (config, count) in enumerate(bursts) if config.num_workers and count <= MOST_STEADY_BATCHES]
        if not untold or self.variation < LIGHT_VARIATION:
            return scatter
        configs, counts = zip(*[bursts[i] for i in untold], strict=True)
        columns = self._columns(configs, self.cores, np.zeros(SCATTER_RUNS, dtype=np.int64))
        stages, _ = self.calibration.settle(columns, np.ones(len(columns.draw)))
        windows = np.repeat(np.maximum(counts, 2), SCATTER_RUNS)
        rng = np.random.default_rng(self.seed)
        shape = (int((columns.workers + windows).max()) + 1, SCATTER_RUNS)
        service, step = (
            np.tile(rng.choice(pool, size=shape), len(untold)) for pool in (self._services(), self._steps())
        )
        rates = burst_rate(self._simulated(columns, stages, service, step), columns.workers, windows)
        scatter[untold] = np.log(rates).reshape(len(untold), SCATTER_RUNS).std(axis=1)
        return scatter

    def ceiling(
        self, *, consumer_threads: int | None = None, device_prefetch: int = 0, cores: float | None = None
    ) -> float:
        """The roofline: samples/s that the consumer alone and the cores alone allow. No prediction exceeds it."""
        # Pinned or not, whichever is quicker: the roof is over both.
        receive_s = min(float(self.calibration.receive.values[:, 0].min()), self.calibration.hand_over_s)
        step_s = self._least_step_s(consumer_threads)
        per_batch = float(loop_s(receive_s, step_s, device_prefetch))
        calibration = self.calibration
        serial = float((calibration.serial_service_s + calibration.serial_receive_s)[0]) + step_s
        cpu_s = min(float(calibration.contention.cpu_s[0]), *(float(o.cpu_s.mean()) for o in self.observations), np.inf)
        by_consumer = self.batch_size / max(min(per_batch, serial), 1e-9)
        return min(by_consumer, self.batch_size * (cores or self.cores) / max(cpu_s, 1e-9))

    @property
    def batch_size(self) -> float:
        """Mean samples per batch of the bursts."""
        return float(np.mean([o.batch_size for o in self.observations]))

    @property
    def variation(self) -> float:
        """Standard deviation of the workers' service times over their mean."""
        return float(self._services().std())

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

    def _least_step_s(self, threads: int | None) -> float:
        base_s = self.step_base_s.get(threads, self.step_base_s[None])
        return min([base_s, *(float(o.step_s.mean()) for o in self.observations if o.consumer_threads == threads)])

    def _interval(self, rate: float, spread: float) -> Interval:
        # No prediction is surer than the bursts that it rests on.
        spread = float(np.hypot(spread, BURST_SD / np.sqrt(len(self.observations))))
        value = rate * self.batch_size
        low, high = value * np.exp(-Z_95 * spread), value * np.exp(Z_95 * spread)
        return Interval(value=value, low=float(low), high=float(high), count=len(self.observations))

    def _columns(self, configs: Sequence[LoaderConfig], cores: float, draws: Ints) -> Columns:
        """A column for each configuration and each of the draws, the draws of one configuration side by side."""

        def spread(values: list[Any], dtype: type) -> Any:
            return np.repeat(np.array(values, dtype=dtype), len(draws))

        known = self.step_base_s
        return Columns(
            workers=spread([c.num_workers for c in configs], np.int64),
            prefetch=spread([c.prefetch_factor or 1 for c in configs], np.int64),
            ahead=spread([c.device_prefetch for c in configs], np.int64),
            in_order=spread([c.in_order for c in configs], np.bool_),
            pinned=spread([c.pin_memory for c in configs], np.bool_),
            step_threads=spread(
                [threads_at_work(c.consumer_threads, self.consumer_cores) for c in configs], np.float64
            ),
            step_s=spread([known.get(c.consumer_threads, known[None]) for c in configs], np.float64),
            step_sd=spread([UNSEEN_THREADS_SD * (c.consumer_threads not in known) for c in configs], np.float64),
            cores=np.full(len(configs) * len(draws), float(cores)),
            draw=np.tile(draws, len(configs)),
        )

    def _services(self) -> Floats:
        with_workers = [o for o in self.observations if o.num_workers > 0] or list(self.observations)
        return np.concatenate([relative(o.service_s) for o in with_workers])

    def _steps(self) -> Floats:
        return np.concatenate([relative(o.step_s) for o in self.observations])

    def _pools(self, batches: int) -> tuple[Floats, Floats]:
        """Service and step times relative to their mean, shape (batches, draws)."""
        rng = np.random.default_rng(self.seed)
        return sequences(self._services(), batches, rng), sequences(self._steps(), batches, rng)

    def _run(
        self, columns: Columns, stages: Stages, pools: tuple[Floats, Floats], made_before: Ints | int = 0
    ) -> Floats:
        """When each step was done, from the moment the workers begin; `made_before` batches of each column lay ready."""
        service, step = pools
        made = np.arange(len(service))[:, None] < made_before
        return self._simulated(columns, stages, np.where(made, 0.0, service[:, columns.draw]), step[:, columns.draw])

    def _simulated(self, columns: Columns, stages: Stages, service: Floats, step: Floats) -> Floats:
        """The same, given how long each batch takes to be made and each step, relative to their means."""
        return simulate(
            Times(service * stages.service_s, stages.receive_s, step * stages.step_s, stages.pin_s, stages.transit_s),
            workers=columns.workers,
            prefetch=columns.prefetch,
            device_prefetch=columns.ahead,
            in_order=columns.in_order,
        )

    def _steady_rates(self, columns: Columns, stages: Stages, pools: tuple[Floats, Floats], variation: float) -> Floats:
        """Batches per second in the midst of training, when workers that keep up with the loop have long filled their queues.

        From empty queues, workers that have 4 % to spare take 25 rounds for each batch ahead, much longer than the window,
        and until then the loop waits for whichever is late (5 % instead of none, in the long run, for 18 workers with a
        prefetch of 8 and a variation of 0.25). With heavy tails they fall behind again before the queues are full.
        """
        full = columns.workers * columns.prefetch if variation < LIGHT_VARIATION else 0
        done = self._run(columns, stages, pools, made_before=np.where(stages.headroom(columns) >= 1.0, full, 0))
        return steady_rate(done, columns.workers, steady_batches(variation))


def threads_at_work(consumer_threads: int | None, consumer_cores: float) -> float:
    """Cores that the step keeps busy while it runs: `consumer_cores`, or as many as its threads where these are fewer."""
    return consumer_cores if consumer_threads is None else min(float(consumer_threads), consumer_cores)


def _centre_and_spread(rates: Floats) -> tuple[float, float]:
    log_rates = np.log(rates)
    centre = log_rates[:BEST].mean()
    return float(np.exp(centre)), float(np.sqrt(np.mean((log_rates[BEST:] - centre) ** 2)))


def _best_columns(positions: Sequence[int]) -> Ints:
    """Columns of the best fits of the configurations at these positions."""
    return np.array([i * PER_CONFIG + best for i in positions for best in range(BEST)])


def _epoch_rate(done: Floats, rate: float, epoch_batches: int, startup_s: float) -> float:
    """Batches per second of a whole epoch: the run as simulated, and what it lacks at the steady rate."""
    simulated = min(epoch_batches, len(done))
    epoch_s = startup_s + float(done[simulated - 1]) + (epoch_batches - simulated) / rate
    return min(rate, epoch_batches / max(epoch_s, 1e-12))
