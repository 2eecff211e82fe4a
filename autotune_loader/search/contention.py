"""How a worker's service time stretches with what else is busy: the model, and its best fit to a few bursts.

With b workers busy, of whom w want a CPU, and a step that uses k of N cores for a share rho of the time:

    S       = cpu * f(min(w, N)) * share(w, rho) + wait
    f(r)    = 1 + alpha (r - 1) + beta r (r - 1)        caches and memory bandwidth: the Universal Scalability Law
    1/share = (1 - rho) min(1, N / w) + rho min(1, N / (w + k))

alpha and beta show in the CPU seconds of a batch, and are fitted to them on a grid, beside what is usual. Without beta,
machines on which more workers are slower are missed by 20 to 40%; a wait that grows with the workers, as of busy storage, made
no difference, even where it does grow (studies/regret/README.md).
USL: N. Gunther, Guerrilla Capacity Planning (2007), chapter 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autotune_loader.search.observation import Observation
from autotune_loader.search.queue import Floats
from autotune_loader.search.space import Context

BURST_SD, FIRST_BATCH_SD = 0.02, 0.3
"""Relative standard deviation between the stage times of bursts of one configuration, and of the very first batch."""
ALPHA_PRIOR, BETA_PRIOR = (0.03, 0.05), (0.0, 0.004)
"""Mean and sd: JPEG decoding on 4 cores took 22% more CPU with four busy than with one, and coherence costs are rare for
processes that share nothing."""
ALPHAS, BETAS = (
    axis.ravel()
    for axis in np.meshgrid(np.linspace(0.0, 0.6, 121), np.concatenate([[0.0], np.geomspace(0.00005, 0.03, 30)]))
)


def stretch(running: Floats, alpha: Any, beta: Any) -> Floats:
    """Factor on CPU seconds with this many processes running at once."""
    factor: Floats = 1.0 + (alpha + beta * running) * (running - 1.0)
    return factor


def share(wanting: Floats, step_busy: Floats, step_cores: float, cores: float) -> Floats:
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
    """Seconds a batch waits (storage, network, sleep)."""

    def computing_s(self, wanting: Floats, step_busy: Floats, context: Context, cores: float) -> Floats:
        """Wall seconds in which a batch wants the CPU, on so many cores."""
        running = np.clip(wanting, 1.0, max(cores, 1.0))
        shared = share(wanting, step_busy, min(context.step_cores, cores), cores)
        return self.cpu_s * stretch(running, self.alpha, self.beta) * shared


def fit_contention(observations: Sequence[Observation], context: Context) -> Contention:
    """The stretch that the bursts show.

    Args:
        observations: bursts with workers; a single one without them where there is nothing else.
        context: cores and step, and what the first batch of all took.
    """
    cores = float(context.usable_cores)
    wall = np.maximum([o.service_s.mean() for o in observations], 1e-9)
    cpu = np.maximum([o.cpu_s.mean() for o in observations], 1e-9)
    busy = np.maximum([o.workers_at_work for o in observations], 1.0)
    step_busy, sd = np.array([o.step_busy for o in observations]), sampling_sd(observations)
    # Waiting is what remains where the machine was least crowded; the rest of a crowded burst's wall time wants a CPU.
    least = int(np.argmin(busy))
    waiting = max(0.0, wall[least] - cpu[least])
    wanting = busy * np.clip((wall - waiting) / wall, np.minimum(cpu / wall, 1.0), 1.0)
    first = [context.fetch_cpu_s] if context.fetch_cpu_s else []
    running = np.append(np.clip(wanting, 1.0, cores), [1.0] * len(first))
    alone = np.log(np.append(cpu, first)) - np.log(stretch(running, ALPHAS[:, None], BETAS[:, None]))
    weight = np.append(sd, [FIRST_BATCH_SD] * len(first)) ** -2
    level = alone @ weight / weight.sum()
    misfit = ((alone - level[:, None]) ** 2) @ weight + _penalty(ALPHAS, ALPHA_PRIOR) + _penalty(BETAS, BETA_PRIOR)
    # The mean: alpha and beta stand in for one another, and the likeliest pair often has one of them at 0.
    likely = np.exp(-0.5 * (misfit - misfit.min()))
    cpu_s, alpha, beta = (float(values @ likely / likely.sum()) for values in (np.exp(level), ALPHAS, BETAS))
    found = Contention(cpu_s=cpu_s, alpha=alpha, beta=beta, wait_s=0.0)
    left, weight = wall - found.computing_s(wanting, step_busy, context, cores), (sd * wall) ** -2
    return replace(found, wait_s=max(float(left @ weight / weight.sum()), 0.0))


def sampling_variance(observations: Sequence[Observation], stage: str = "service_s") -> Floats:
    """Relative variance of the mean of a stage in each burst because it saw so few batches.

    The spread is that of all bursts together: one without one of the rare slow batches cannot know of them.
    """
    samples = [getattr(each, stage) for each in observations]
    counts = np.array([len(each) for each in samples], dtype=np.float64)
    squares = sum(float(((each / max(each.mean(), 1e-12) - 1.0) ** 2).sum()) for each in samples)
    variance: Floats = squares / counts.sum() / counts
    return variance


def sampling_sd(observations: Sequence[Observation], stage: str = "service_s") -> Floats:
    """Relative sd of the mean of a stage in each burst: of a burst, and because it saw so few batches."""
    sd: Floats = np.sqrt(BURST_SD**2 + sampling_variance(observations, stage))
    return sd


def _penalty(values: Floats, prior: tuple[float, float]) -> Floats:
    penalty: Floats = ((values - prior[0]) / prior[1]) ** 2
    return penalty
