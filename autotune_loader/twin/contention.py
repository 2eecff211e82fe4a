"""How a worker's service time stretches with what else is busy: the model, and its fit to a few bursts.

With b workers busy, of whom q want a CPU, and a step that uses k of N cores for a share rho of the time:

    S       = cpu * f(running) * share(q, rho) + wait * (1 + gamma (b - 1))
    f(r)    = 1 + alpha (r - 1) + beta r (r - 1)        caches and memory bandwidth: the Universal Scalability Law
    running = min(q, N)
    1/share = (1 - rho) min(1, N / q) + rho min(1, N / (q + k))

alpha and beta show in the CPU seconds of a batch, time-sharing and gamma only in its wall seconds; so each pair is
fitted to its own series, on a grid that is both the search for the best and the posterior that intervals are drawn
from.
USL: N. Gunther, Guerrilla Capacity Planning (2007), chapter 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune_loader.twin.observation import Observation
from autotune_loader.twin.queue import Floats

BURST_SD = 0.02
"""Relative standard deviation between bursts of one configuration on a quiet machine; more batches do not reduce it."""
ALPHA_PRIOR = (0.03, 0.05)
"""Mean and sd: JPEG decoding on 4 cores took 22 % more CPU with four busy than with one, array work less."""
BETA_PRIOR = (0.0, 0.004)
"""Mean and sd: coherence costs are rare for processes that share nothing."""
GAMMA_PRIOR = (0.0, 0.03)
"""Mean and sd of the stretch of waiting per further busy worker: storage that still scales is the common case."""
STEP_CORES_PRIOR = (1.0, 0.3)
"""Mean and sd of the step's true core use relative to its thread count; OpenMP threads also spin between regions."""
# Grids on which the most likely values are looked for: evenly for shares, by factors for what may be near zero.
ALPHAS = np.linspace(0.0, 0.6, 121)
BETAS = np.concatenate([[0.0], np.geomspace(0.00005, 0.03, 30)])
GAMMAS = np.concatenate([[0.0], np.geomspace(0.005, 2.0, 30)])
STEP_CORES = np.linspace(0.0, 2.0, 21)  # relative to its threads


def stretch(running: Floats, alpha: Floats, beta: Floats) -> Floats:
    """Factor on CPU seconds with this many processes running at once."""
    more = np.maximum(running, 1.0) - 1.0
    return 1.0 + alpha * more + beta * more * (more + 1.0)


def share(
    wanting: Floats, workers: Floats, variability: float, consumer_busy: Floats, step_cores: Floats, cores: Floats
) -> Floats:
    """Factor on wall seconds because `wanting` workers and, part of the time, the step's cores share `cores`.

    How many want a core varies from moment to moment, and a core that is free now does not make up for one that was
    missing. So the speed is averaged over that variation, at three points that have its mean and variance
    (Gauss-Hermite). The variance is that of `workers` that come and go on their own, times `variability`: batches that
    all take equally long follow one another in step.
    """
    sd = np.sqrt(np.maximum(variability * wanting * (1.0 - wanting / np.maximum(workers, 1.0)), 0.0))
    speed: Floats = np.zeros(1)
    for sigmas, weight in ((0.0, 2 / 3), (3**0.5, 1 / 6), (-(3**0.5), 1 / 6)):
        now = np.clip(wanting + sigmas * sd, 1e-9, np.maximum(workers, wanting))
        alone = np.minimum(1.0, cores / now)
        with_step = np.minimum(1.0, cores / (now + step_cores))
        speed = speed + weight * ((1.0 - consumer_busy) * alone + consumer_busy * with_step)
    return 1.0 / speed


def busy_beside(at_work: Floats, workers: Floats, variability: float) -> Floats:
    """Busy workers as a batch in service sees them, its own included, where `at_work` of `workers` work on average.

    The mean, plus variance over mean, as busy times serve more batches.
    """
    idle = 1.0 - at_work / np.maximum(workers, 1)
    busy: Floats = np.maximum(at_work + variability * idle, 1.0)
    return busy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contention:
    """Fitted parameters of the stretch; every array holds one value per draw, the best fit in all of the first ones."""

    cpu_s: Floats
    """CPU seconds of a batch with one worker running."""
    alpha: Floats
    beta: Floats
    wait_s: Floats
    """Seconds a batch waits (storage, network, sleep) with one worker busy."""
    gamma: Floats
    step_cores: Floats
    """Cores the step uses, relative to its threads."""
    variability: float
    """Squared coefficient of variation of the service time, at most 1."""

    def cpu_wall_s(
        self, wanting: Floats, workers: Floats, consumer_busy: Floats, step_threads: Floats, cores: Floats
    ) -> Floats:
        """Wall seconds in which a batch wants the CPU."""
        running = np.minimum(wanting, cores)
        shared = share(wanting, workers, self.variability, consumer_busy, self.step_cores * step_threads, cores)
        return self.cpu_s * stretch(running, self.alpha, self.beta) * shared

    def waiting_s(self, busy: Floats) -> Floats:
        """Wall seconds in which a batch wants no CPU."""
        return self.wait_s * (1.0 + self.gamma * np.maximum(busy - 1.0, 0.0))

    def take(self, columns: np.ndarray) -> Contention:
        """The same parameters, draw by draw as `columns` says."""
        drawn = ("cpu_s", "alpha", "beta", "wait_s", "gamma", "step_cores")
        return replace(self, **{name: getattr(self, name)[columns] for name in drawn})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Means:
    """One row per burst with workers: what the fit sees of it."""

    cpu_s: Floats
    wall_s: Floats
    workers: Floats
    busy: Floats
    wanting: Floats
    consumer_busy: Floats
    step_threads: Floats
    sd: Floats
    variability: float


def fit_contention(
    observations: Sequence[Observation],
    step_threads: Sequence[float],
    cores: float,
    *,
    best: int,
    draws: int,
    seed: int,
) -> Contention:
    """The stretch that the bursts show, `best` times the best fit and then `draws` draws from its posterior.

    Args:
        observations: bursts with workers; a single one without them where there is nothing else.
        step_threads: threads of the step in each burst.
        cores: usable cores.
        best: how often the best fit is repeated at the front.
        draws: how many draws from the posterior follow.
        seed: chooses the draws.
    """
    rng = np.random.default_rng(seed)
    means = _means(observations, step_threads, cores)
    cpu, alpha, beta = _fit_cpu(means, cores, best, draws, rng)
    wait, gamma, step_cores = _fit_wait(means, cpu, alpha, beta, cores, best, draws, rng)
    return Contention(
        cpu_s=cpu,
        alpha=alpha,
        beta=beta,
        wait_s=wait,
        gamma=gamma,
        step_cores=step_cores,
        variability=means.variability,
    )


def _means(observations: Sequence[Observation], step_threads: Sequence[float], cores: float) -> _Means:
    wall = np.maximum([o.service_s.mean() for o in observations], 1e-9)
    cpu = np.maximum([o.cpu_s.mean() for o in observations], 1e-9)
    variability = min(1.0, max(float(o.service_s.var() / max(o.service_s.mean() ** 2, 1e-18)) for o in observations))
    workers = np.array([float(o.num_workers) for o in observations])
    busy = busy_beside(np.array([o.workers_at_work for o in observations]), workers, variability)
    # Waiting is what remains where the machine was least crowded; the rest of a crowded burst's wall time wants a CPU.
    least = int(np.argmin(busy))
    waiting = max(0.0, wall[least] - cpu[least])
    wanting = busy * np.clip((wall - waiting) / wall, np.minimum(cpu / wall, 1.0), 1.0)
    return _Means(
        cpu_s=cpu,
        wall_s=wall,
        workers=workers,
        busy=busy,
        wanting=wanting,
        consumer_busy=np.array([o.consumer_share for o in observations]),
        step_threads=np.minimum(step_threads, cores),
        sd=np.array([_relative_sd(o.service_s) for o in observations]),
        variability=variability,
    )


def _relative_sd(samples: Floats) -> float:
    spread = float(samples.std() / samples.mean()) if samples.mean() > 0 else 0.0
    return float(np.hypot(BURST_SD, spread / np.sqrt(len(samples))))


def _penalty(values: Floats, prior: tuple[float, float]) -> Floats:
    penalty: Floats = ((values - prior[0]) / prior[1]) ** 2
    return penalty


def _fit_cpu(
    means: _Means, cores: float, best: int, draws: int, rng: np.random.Generator
) -> tuple[Floats, Floats, Floats]:
    alpha, beta = (grid.ravel() for grid in np.meshgrid(ALPHAS, BETAS, indexing="ij"))
    running = np.minimum(means.wanting, cores)
    alone = np.log(means.cpu_s) - np.log(stretch(running, alpha[:, None], beta[:, None]))
    weight = means.sd**-2
    level = alone @ weight / weight.sum()
    misfit = ((alone - level[:, None]) ** 2) @ weight + _penalty(alpha, ALPHA_PRIOR) + _penalty(beta, BETA_PRIOR)
    posterior = _posterior(misfit)
    drawn = rng.choice(len(posterior), size=draws, p=posterior)
    # The best fit is the mean: alpha and beta stand in for one another, and the likeliest pair often has one of them at 0.
    level, alpha, beta = (
        np.concatenate([np.full(best, posterior @ each), each[drawn]]) for each in (level, alpha, beta)
    )
    return np.exp(level), alpha, beta


def _fit_wait(
    means: _Means,
    cpu_s: Floats,
    alpha: Floats,
    beta: Floats,
    cores: float,
    best: int,
    draws: int,
    rng: np.random.Generator,
) -> tuple[Floats, Floats, Floats]:
    gamma, step_cores = (grid.ravel() for grid in np.meshgrid(GAMMAS, STEP_CORES, indexing="ij"))
    running = np.minimum(means.wanting, cores)
    cpu = cpu_s[0] * stretch(running, alpha[0], beta[0])
    step = step_cores[:, None] * means.step_threads
    shared = share(means.wanting, means.workers, means.variability, means.consumer_busy, step, np.asarray(cores))
    growth = 1.0 + gamma[:, None] * (means.busy - 1.0)
    weight = (means.sd * means.wall_s) ** -2
    left = means.wall_s - cpu * shared
    wait = np.maximum((left * growth) @ weight / (growth**2 @ weight), 0.0)
    misfit = ((left - wait[:, None] * growth) ** 2) @ weight
    misfit += _penalty(gamma, GAMMA_PRIOR) + _penalty(step_cores, STEP_CORES_PRIOR)
    posterior = _posterior(misfit)
    # The best fit is the likeliest: where the bursts show no such stretch it is none, and the mean would not be.
    likeliest = np.full(best, int(np.argmax(posterior)))
    chosen = np.concatenate([likeliest, rng.choice(len(posterior), size=draws, p=posterior)])
    return wait[chosen], gamma[chosen], step_cores[chosen]


def _posterior(misfit: Floats) -> Floats:
    """Probability of each point of a grid."""
    weight = np.exp(-0.5 * (misfit - misfit.min()))
    posterior: Floats = weight / weight.sum()
    return posterior
