"""The twin: predicts the rate of every configuration from a few traced bursts. Pure maths, no processes.

With b workers busy, of whom w want a CPU, and a step that uses k of N cores for a share rho of the time, a batch takes

    S       = cpu * f(min(w, N)) * share(w, rho) + wait
    f(r)    = 1 + alpha (r - 1) + beta r (r - 1)        caches and memory bandwidth: the Universal Scalability Law
    1/share = (1 - rho) min(1, N / w) + rho min(1, N / (w + k))

alpha and beta are fitted to the CPU seconds of a batch on a grid, beside what is usual. Without beta, machines on which more
workers are slower are missed by 20 to 40%; a wait that grows with the workers made no difference, even where it does grow
(studies/regret/README.md). The step is slowed by workers beside it, and receiving by those at work: both by a line through the
logarithms that the bursts show, held back by how far such lines usually go. A fixed point turns load into stage times and
stage times into load; `queue` turns stage times into rates.
USL: N. Gunther, Guerrilla Capacity Planning (2007), chapter 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune_loader.search.observation import Observation, sampling_sd
from autotune_loader.search.queue import Floats, Ints, simulate, steady_rate, steady_window
from autotune_loader.search.rule import enough_workers
from autotune_loader.search.space import MOST_WORKERS, Context
from autotune_loader.values import LoaderConfig

FEEDING_ROOM, FILLING_ROOM, MORE_WORKERS = 2.5, 1.5, 2
"""Room beyond the workers that keep the loop busy, for slow batches; and beyond those that fill the cores: while some wait for
their turn others compute. Without this bound 90.0 instead of 93.5% of choices are near the best (studies/regret/README.md)."""
NEAR_BEST = 0.8  # of the best rate: configurations that are slower do not tell how deep a queue has to be
FIXED_POINT_ROUNDS = 30  # each goes half of the way to the load that follows from it: 1e-9 of the way is left
FIRST_BATCH_SD = 0.3  # relative, of the stage times of the very first batch, which finds cold caches
ALPHA_PRIOR, BETA_PRIOR = (0.03, 0.05), (0.0, 0.004)
"""Mean and sd: JPEG decoding on 4 cores took 22% more CPU with four busy than with one, and coherence costs are rare for
processes that share nothing."""
ALPHAS, BETAS = (
    axis.ravel()
    for axis in np.meshgrid(np.linspace(0.0, 0.6, 121), np.concatenate([[0.0], np.geomspace(0.00005, 0.03, 30)]))
)
LINE_SD = 0.3  # how far a stage beside workers lies off the same stage alone, and per e-fold of disturbance more (log)
STEADY_BATCHES, MOST_STEADY_BATCHES = 256, 1500
"""Batches in the window of a steady rate; more where batches differ much: a longer run evens out to which worker the slow
ones fall."""
LIGHT_VARIATION = 0.4  # standard deviation over mean of service times up to which `STEADY_BATCHES` are enough


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How the service time of a worker stretches with what else is busy."""

    cpu_s: float  # CPU seconds of a batch with one worker running
    alpha: float
    beta: float
    wait_s: float = 0.0  # seconds a batch waits (storage, network, sleep)

    def computing_s(self, wanting: Floats, step_busy: Floats, context: Context, cores: float) -> Floats:
        """Wall seconds in which a batch wants the CPU, beside so many workers that want it, too."""
        alone = np.minimum(1.0, cores / np.maximum(wanting, 1e-9))
        with_step = np.minimum(1.0, cores / np.maximum(wanting + min(context.step_cores, cores), 1e-9))
        shared = 1.0 / ((1.0 - step_busy) * alone + step_busy * with_step)
        running = np.clip(wanting, 1.0, max(cores, 1.0))
        return self.cpu_s * _stretch(running, self.alpha, self.beta) * shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """The logarithm of a factor as a line over the logarithm of 1 + some disturbance."""

    level: float = 0.0
    slope: float = 0.0
    least: float = 0.0
    """Least disturbance that was seen where the line falls: below, it is not continued."""

    def at(self, disturbance: Floats) -> Floats:
        """The factor."""
        factor: Floats = np.exp(self.level + self.slope * np.log1p(np.maximum(disturbance, self.least)))
        return factor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Mean seconds of each stage under a load: one value per configuration."""

    service_s: Floats
    receive_s: Floats
    step_s: Floats
    loop_s: Floats  # between two batches that pinning, receipt and step allow
    cpu_share: Floats  # of the service time, in which a worker wants a CPU
    bound: Floats  # batches per second were every queue endless and every stage steady


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """What the twin says of some configurations, one value each."""

    samples_per_s: Floats
    loop_use: Floats  # share of the time in which the training loop receives or steps


class Twin:
    """Predicts every DataLoader configuration on the machine and workload of its bursts.

    Args:
        observations: traced bursts, at least one; best at 0 workers, at 1 or 2, and at as many as there are cores.
        context: cores and step.
    """

    def __init__(self, observations: Sequence[Observation], context: Context) -> None:
        self.observations, self.context = tuple(observations), context
        serial = [o for o in self.observations if o.num_workers == 0]
        with_workers = [o for o in self.observations if o.num_workers > 0]
        self._fitted = fitted = with_workers or serial
        least_busy = min(self.observations, key=lambda o: o.at_work)
        self._step_alone_s = alone_s = max(context.step_s or float(least_busy.step_s.mean()), 1e-12)
        self._contention = _fit_contention(fitted, context)
        self._service_s = self._contention.cpu_s + self._contention.wait_s
        receive_s = np.maximum(_means(fitted, "receive_s"), 1e-9)
        typical_s = float(np.exp(np.log(receive_s).mean()))
        at_work = np.array([o.at_work for o in fitted])
        receive = _line(at_work, np.log(receive_s / typical_s), sampling_sd(fitted, "receive_s"))
        # Seconds to take a ready batch over, over the workers at work.
        self._receive = Trend(level=math.log(typical_s) + receive.level, slope=receive.slope)
        # Factor on a step beside workers, over those at work, beyond what it loses because they share the cores.
        self._step = Trend()
        if with_workers:
            cores, threads = float(context.usable_cores), context.step_cores
            wanting = _wanting(fitted, self._contention.wait_s)
            off = np.log(np.maximum(_means(fitted, "step_s"), 1e-12) / (alone_s * _step_share(wanting, threads, cores)))
            self._step = _line(at_work, off, sampling_sd(fitted, "step_s"))
        self._pin_s = float(np.mean([each.pin_s for each in fitted]))
        # The same stages without workers.
        self._serial_step = float((_means(serial, "step_s") / alone_s).mean()) if serial else 1.0
        self._serial_service_s = float(_means(serial, "service_s").mean()) if serial else self._service_s
        self._serial_receive_s = float(_means(serial, "receive_s").mean()) if serial else 0.0

    def predict(self, configs: Sequence[LoaderConfig], cores: float | None = None) -> Solved:
        """What to expect of each configuration in the midst of training; what is not modelled (pinning, order) is ignored.

        Stage times, load and rate follow from each other by turns: idle workers slow nobody, and who idles follows from
        the rate.
        """
        cores = cores or float(self.context.usable_cores)
        workers = np.array([c.num_workers for c in configs], dtype=np.int64)
        prefetch = np.array([c.prefetch_factor or 1 for c in configs], dtype=np.int64)
        services = np.concatenate([_relative(o.service_s) for o in self._fitted])
        steps = np.concatenate([_relative(o.step_s) for o in self.observations])
        variation = float(services.std())
        wanted = STEADY_BATCHES * (variation / LIGHT_VARIATION) ** 2
        window = steady_window(workers, round(min(max(wanted, STEADY_BATCHES), MOST_STEADY_BATCHES)))
        rng, count = np.random.default_rng(0), int(window[1].max()) + 1
        service, step = _quantile_order(services, count, rng), _quantile_order(steps, count, rng)
        efficiency = np.ones(len(workers))
        for _ in range(2):
            stages = self._settled(workers, efficiency, cores)
            # Workers that keep up with the loop have long filled their queues. From empty ones those with 4% to spare take
            # 25 rounds for each batch ahead. With heavy tails they fall behind again before the queues are full.
            headroom = workers * (stages.loop_s / np.maximum(stages.service_s, 1e-12))
            full = workers * prefetch * (variation < LIGHT_VARIATION) * (headroom >= 1.0)
            made = np.arange(count)[:, None] < full
            times = np.where(made, 0.0, service * stages.service_s), stages.receive_s, step * stages.step_s
            done = simulate(*times, workers=workers, prefetch=prefetch, pin_s=self._pin_s)
            rate = steady_rate(done, *window)
            efficiency = np.minimum(rate / stages.bound, 1.0)
        return Solved(
            samples_per_s=rate * np.mean([o.batch_size for o in self.observations]),
            loop_use=np.minimum(rate * stages.loop_s, 1.0),
        )

    def needed_prefetch(self, configs: Sequence[LoaderConfig], tolerance: float) -> int:
        """The shallowest queue with which none of those near the best is slower than with a deeper one.

        It bridges the slow batches of all bursts together, as one burst cannot know of those that are rare. Only where all
        have a queue of one batch it is one: a worker that has delivered would wait for its next order.
        """
        rates = dict(zip(configs, self.predict(configs).samples_per_s.tolist(), strict=True))
        near = [
            config for config, rate in rates.items() if config.num_workers and rate >= NEAR_BEST * max(rates.values())
        ]
        depths = sorted({config.prefetch_factor or 1 for config in near}, reverse=True)
        needed = depths[0] if depths else 1
        for depth in depths[1:]:
            pairs = [(each, replace(each, prefetch_factor=needed)) for each in near if each.prefetch_factor == depth]
            if depth == 1 or any(rates[one] < (1 - tolerance) * rates.get(deeper, 0.0) for one, deeper in pairs):
                break
            needed = depth
        return needed

    @property
    def useful_workers(self) -> int:
        """Workers beyond which none could possibly help, as the undisturbed stages say."""
        cores = float(self.context.usable_cores)
        loop_s = max(float(self._receive.at(np.array([1.0]))[0]) + self._step_alone_s, self._pin_s)
        keep_up, fill_the_cores = enough_workers(self._service_s, self._contention.cpu_s, loop_s, cores)
        return round(
            min(FEEDING_ROOM * max(keep_up, cores), FILLING_ROOM * fill_the_cores, MOST_WORKERS) + MORE_WORKERS
        )

    def _settled(self, workers: Ints, efficiency: Floats, cores: float) -> Stages:
        """Stage times at the fixed point of load -> stage times -> rate -> load.

        Each round goes half of the way: full steps oscillate where the cores are just full.
        """
        at_work = np.maximum(workers.astype(np.float64), 1.0)
        wanting, step_busy = at_work * 0.5, np.full(len(workers), 0.5)
        for _ in range(FIXED_POINT_ROUNDS):
            stages = self._stages(workers, at_work, wanting, step_busy, cores)
            rate = efficiency * stages.bound
            busy = np.minimum(rate * stages.service_s, workers)
            at_work = 0.5 * (at_work + busy)
            wanting = 0.5 * (wanting + np.maximum(busy, 1.0) * stages.cpu_share)
            step_busy = 0.5 * (step_busy + np.minimum(rate * stages.loop_s, 1.0))
        return self._stages(workers, at_work, wanting, step_busy, cores)

    def _stages(self, workers: Ints, at_work: Floats, wanting: Floats, step_busy: Floats, cores: float) -> Stages:
        """Stage times under a load."""
        serial, fitted, threads = workers == 0, self._contention, self.context.step_cores
        cpu_wall = fitted.computing_s(wanting, step_busy, self.context, cores)
        beside = np.where(serial, 0.0, wanting)
        slowed = _step_share(beside, threads, cores) * self._step.at(at_work)
        service_s = np.where(serial, self._serial_service_s, cpu_wall + fitted.wait_s)
        receive_s = np.where(serial, self._serial_receive_s, self._receive.at(at_work))
        step_s = self._step_alone_s * np.where(serial, self._serial_step, slowed)
        loop_s = np.maximum(receive_s + step_s, np.where(serial, 0.0, self._pin_s))
        slowest = np.where(
            serial, service_s + receive_s + step_s, np.maximum(loop_s, service_s / np.maximum(workers, 1))
        )
        return Stages(
            service_s=service_s,
            receive_s=receive_s,
            step_s=step_s,
            loop_s=loop_s,
            cpu_share=cpu_wall / np.maximum(cpu_wall + fitted.wait_s, 1e-12),
            bound=1.0 / np.maximum(slowest, 1e-12),
        )


def _fit_contention(observations: Sequence[Observation], context: Context) -> Contention:
    """The stretch that the bursts show: those with workers, or, where there are none, those without."""
    cores, sd = float(context.usable_cores), sampling_sd(observations)
    wall = np.maximum(_means(observations, "service_s"), 1e-9)
    cpu = np.maximum(_means(observations, "cpu_s"), 1e-9)
    loop_s = _means(observations, "receive_s") + _means(observations, "step_s")
    step_busy = np.minimum(1.0, np.array([o.batches_per_s for o in observations]) * loop_s)
    # Waiting is what remains where the machine was least crowded; the rest of a crowded burst's wall time wants a CPU.
    least = int(np.argmin(np.maximum([o.at_work for o in observations], 1.0)))
    wanting = _wanting(observations, max(0.0, wall[least] - cpu[least]))
    first = [context.fetch_cpu_s] if context.fetch_cpu_s else []
    running = np.append(np.clip(wanting, 1.0, cores), [1.0] * len(first))
    alone = np.log(np.append(cpu, first)) - np.log(_stretch(running, ALPHAS[:, None], BETAS[:, None]))
    weight = np.append(sd, [FIRST_BATCH_SD] * len(first)) ** -2
    level = alone @ weight / weight.sum()
    misfit = ((alone - level[:, None]) ** 2) @ weight
    for values, (mean, spread) in ((ALPHAS, ALPHA_PRIOR), (BETAS, BETA_PRIOR)):
        misfit += ((values - mean) / spread) ** 2
    # The mean: alpha and beta stand in for one another, and the likeliest pair often has one of them at 0.
    likely = np.exp(-0.5 * (misfit - misfit.min()))
    cpu_s, alpha, beta = (float(values @ likely / likely.sum()) for values in (np.exp(level), ALPHAS, BETAS))
    found = Contention(cpu_s=cpu_s, alpha=alpha, beta=beta)
    left, weight = wall - found.computing_s(wanting, step_busy, context, cores), (sd * wall) ** -2
    return replace(found, wait_s=max(float(left @ weight / weight.sum()), 0.0))


def _stretch(running: Floats, alpha: Any, beta: Any) -> Floats:
    """Factor on CPU seconds with this many processes running at once."""
    factor: Floats = 1.0 + (alpha + beta * running) * (running - 1.0)
    return factor


def _wanting(observations: Sequence[Observation], wait_s: float) -> Floats:
    """Workers that ran or wanted to run during each burst."""
    wall = np.maximum(_means(observations, "service_s"), 1e-9)
    cpu = np.maximum(_means(observations, "cpu_s"), 1e-9)
    share = np.clip((wall - wait_s) / wall, np.minimum(cpu / wall, 1.0), 1.0)
    wanting: Floats = np.maximum([o.at_work for o in observations], 1.0) * share
    return wanting


def _line(disturbance: Floats, values: Floats, noise_sd: Floats) -> Trend:
    """Level and slope: linear regression with normal priors around none of either."""
    features = np.stack([np.ones(len(values)), np.log1p(disturbance)], axis=1)
    weighted = features.T / noise_sd**2
    level, slope = np.linalg.solve(weighted @ features + LINE_SD**-2 * np.eye(2), weighted @ values)
    return Trend(level=float(level), slope=float(slope), least=float(min(disturbance)) if slope < 0 else 0.0)


def _step_share(wanting: Floats, step_cores: float, cores: float) -> Floats:
    """Factor on the step's time because the workers want the same cores."""
    factor: Floats = np.maximum((wanting + step_cores) / cores, 1.0) / max(step_cores / cores, 1.0)
    return factor


def _means(observations: Sequence[Observation], stage: str) -> Floats:
    return np.array([getattr(each, stage).mean() for each in observations])


def _relative(samples: Floats) -> Floats:
    """The samples as multiples of their mean."""
    mean = samples.mean()
    return samples / mean if mean > 0 else np.ones_like(samples)


def _quantile_order(pool: Floats, batches: int, rng: np.random.Generator) -> Floats:
    """The pool's quantiles as a column, shuffled: its mean and its tail are in every run of so many batches."""
    values = np.quantile(pool, (np.arange(batches) + 0.5) / batches)
    order: Floats = rng.permutation(values * (pool.mean() / max(values.mean(), 1e-12)))
    return order[:, None]
