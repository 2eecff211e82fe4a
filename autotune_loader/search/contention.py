"""How a worker's service time stretches with what else is busy: the model, and its best fit to a few bursts.

With b workers busy, of whom w want a CPU, and a step that uses k of N cores for a share rho of the time:

    S       = cpu * f(min(w, N)) * share(w, rho) + wait * (1 + gamma (b - 1))
    f(r)    = 1 + alpha (r - 1) + beta r (r - 1)        caches and memory bandwidth: the Universal Scalability Law
    1/share = (1 - rho) min(1, N / w) + rho min(1, N / (w + k))

alpha and beta show in the CPU seconds of a batch, time-sharing and gamma only in its wall seconds; so each pair is
fitted to its own series, on a grid.
USL: N. Gunther, Guerrilla Capacity Planning (2007), chapter 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import Floats
from autotune_loader.search.space import Context

BURST_SD = 0.02
"""Relative standard deviation between the stage times of bursts of one configuration on a quiet machine."""
FIRST_BATCH_SD = 0.3
"""The same of the very first batch, fetched alone."""
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


def stretch(running: Floats, alpha: Any, beta: Any) -> Floats:
    """Factor on CPU seconds with this many processes running at once."""
    more = np.maximum(running, 1.0) - 1.0
    factor: Floats = 1.0 + alpha * more + beta * more * (more + 1.0)
    return factor


def share(wanting: Floats, step_busy: Floats, step_cores: Any, cores: Any) -> Floats:
    """Factor on wall seconds because `wanting` workers and, part of the time, the step's cores share `cores`."""
    alone = np.minimum(1.0, cores / np.maximum(wanting, 1e-9))
    with_step = np.minimum(1.0, cores / np.maximum(wanting + step_cores, 1e-9))
    factor: Floats = 1.0 / ((1.0 - step_busy) * alone + step_busy * with_step)
    return factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Fitted parameters of the stretch."""

    cpu_s: float
    """CPU seconds of a batch with one worker running."""
    alpha: float
    beta: float
    wait_s: float
    """Seconds a batch waits (storage, network, sleep) with one worker busy."""
    gamma: float
    step_cores: float
    """Cores the step uses, relative to its threads."""

    def cpu_wall_s(self, wanting: Floats, step_busy: Floats, step_threads: float, cores: Any) -> Floats:
        """Wall seconds in which a batch wants the CPU."""
        shared = share(wanting, step_busy, self.step_cores * step_threads, cores)
        return self.cpu_s * stretch(np.minimum(wanting, cores), self.alpha, self.beta) * shared

    def waiting_s(self, busy: Floats) -> Floats:
        """Wall seconds in which a batch wants no CPU."""
        return self.wait_s * (1.0 + self.gamma * np.maximum(busy - 1.0, 0.0))


def fit_contention(observations: Sequence[Observation], context: Context) -> Contention:
    """The stretch that the bursts show.

    Args:
        observations: bursts with workers; a single one without them where there is nothing else.
        context: cores and step, and what the first batch of all took.
    """
    step_threads, cores = context.step_cores, float(context.usable_cores)
    wall = np.maximum([o.service_s.mean() for o in observations], 1e-9)
    cpu = np.maximum([o.cpu_s.mean() for o in observations], 1e-9)
    busy = np.maximum([o.workers_at_work for o in observations], 1.0)
    # Waiting is what remains where the machine was least crowded; the rest of a crowded burst's wall time wants a CPU.
    least = int(np.argmin(busy))
    waiting = max(0.0, wall[least] - cpu[least])
    wanting = busy * np.clip((wall - waiting) / wall, np.minimum(cpu / wall, 1.0), 1.0)
    sd = sampling_sd(observations)
    running, alone = np.minimum(wanting, cores), [context.fetch_cpu_s] if context.fetch_cpu_s else []
    anchored = (
        np.append(cpu, alone),
        np.append(running, np.ones(len(alone))),
        np.append(sd, [FIRST_BATCH_SD] * len(alone)),
    )
    cpu_s, alpha, beta = _fit_cpu(*anchored)
    gamma, step_cores = (grid.ravel() for grid in np.meshgrid(GAMMAS, STEP_CORES, indexing="ij"))
    step_busy = np.array([o.step_busy for o in observations])
    step = step_cores[:, None] * min(step_threads, cores)
    computing = cpu_s * stretch(running, alpha, beta) * share(wanting, step_busy, step, cores)
    growth = 1.0 + gamma[:, None] * (busy - 1.0)
    weight, left = (sd * wall) ** -2, wall - computing
    wait = np.maximum((left * growth) @ weight / (growth**2 @ weight), 0.0)
    misfit = ((left - wait[:, None] * growth) ** 2) @ weight
    misfit += _penalty(gamma, GAMMA_PRIOR) + _penalty(step_cores, STEP_CORES_PRIOR)
    # The likeliest: where the bursts show no such stretch it is none, and a mean would not be.
    best = int(np.argmin(misfit))
    return Contention(
        cpu_s=cpu_s,
        alpha=alpha,
        beta=beta,
        wait_s=float(wait[best]),
        gamma=float(gamma[best]),
        step_cores=float(step_cores[best]),
    )


def sampling_variance(observations: Sequence[Observation]) -> Floats:
    """Relative variance of each burst's mean service time because it saw so few batches.

    The spread is that of all bursts together: one without one of the rare slow batches cannot know of them.
    """
    counts = np.array([len(o.service_s) for o in observations], dtype=np.float64)
    squares = sum(float(((o.service_s / max(o.service_s.mean(), 1e-12) - 1.0) ** 2).sum()) for o in observations)
    variance: Floats = squares / counts.sum() / counts
    return variance


def sampling_sd(observations: Sequence[Observation]) -> Floats:
    """Relative sd of each burst's mean service time: of a burst, and because it saw so few batches."""
    sd: Floats = np.sqrt(BURST_SD**2 + sampling_variance(observations))
    return sd


def _fit_cpu(cpu_s: Floats, running: Floats, sd: Floats) -> tuple[float, float, float]:
    """CPU seconds of a batch alone, alpha and beta."""
    alpha, beta = (grid.ravel() for grid in np.meshgrid(ALPHAS, BETAS, indexing="ij"))
    alone = np.log(cpu_s) - np.log(stretch(running, alpha[:, None], beta[:, None]))
    weight = sd**-2
    level = alone @ weight / weight.sum()
    misfit = ((alone - level[:, None]) ** 2) @ weight + _penalty(alpha, ALPHA_PRIOR) + _penalty(beta, BETA_PRIOR)
    # The mean: alpha and beta stand in for one another, and the likeliest pair often has one of them at 0.
    likely = np.exp(-0.5 * (misfit - misfit.min()))
    likely /= likely.sum()
    return float(np.exp(likely @ level)), float(likely @ alpha), float(likely @ beta)


def _penalty(values: Floats, prior: tuple[float, float]) -> Floats:
    penalty: Floats = ((values - prior[0]) / prior[1]) ** 2
    return penalty
