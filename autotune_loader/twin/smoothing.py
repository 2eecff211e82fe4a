"""What of the bursts' deviations from the contention model is the model's error, and what is noise of the bursts.

A burst differs from the next one of the same configuration by a few percent, and by more where a heavy tail of batches
happened to be there or not. Curves through every burst would take such luck for a property of the configuration. So the
deviations are smoothed over the load (Gaussian process regression: Rasmussen and Williams 2006, algorithm 2.1), as far as
the noise goes that they themselves show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune_loader.twin.observation import Observation
from autotune_loader.twin.queue import Floats

MODEL_SD, MODEL_LENGTH = 0.12, 1.0
"""What the contention model gets wrong, as the standard deviation of a logarithm, and over which distance in e-folds of
the load one error differs from another."""
LEVEL_SD = 0.3
"""The same of all bursts together: a reference that was itself measured in one burst."""
OFFSET_SD = 0.12
"""So far may all bursts of one kind lie above or below the curve through all, as the standard deviation of a logarithm."""
OFFSET_EVIDENCE = 8.0
"""Only where that makes the bursts likelier by more than this, in natural logarithms: steps of real models on the CPU (`text`,
`tutorial` and `jpeg` of the studies) did it by 8 to 300."""
NOISE_SDS = np.array([0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08])
"""Noise of a burst that may come out. Quiet machines show 2 %, busy ones 8 %."""
TYPICAL_NOISE, NOISE_SPREAD = 0.03, 0.5
"""Median and log-sd of that noise before anything was measured."""


def relative_variance(observations: Sequence[Observation]) -> float:
    """Variance of the service times over their squared mean, of all bursts together.

    A burst without one of the rare slow batches cannot know of them.
    """
    spread = [float(((o.service_s / max(o.service_s.mean(), 1e-12) - 1.0) ** 2).sum()) for o in observations]
    return sum(spread) / sum(len(o.service_s) for o in observations)


def sampling_variance(observations: Sequence[Observation]) -> Floats:
    """Relative variance of each burst's mean service time because it saw so few batches."""
    counts = np.array([len(o.service_s) for o in observations], dtype=np.float64)
    variance: Floats = relative_variance(observations) / counts
    return variance


def noise_sd(load: Floats, deviations: Floats, sampling: Floats) -> float:
    """Noise between bursts, the most probable one of `NOISE_SDS`, given deviations from the model at these loads."""
    prior = -0.5 * ((np.log(NOISE_SDS) - np.log(TYPICAL_NOISE)) / NOISE_SPREAD) ** 2
    scores = [_evidence(_prior(load) + np.diag(sampling + sd**2), deviations) for sd in NOISE_SDS]
    return float(NOISE_SDS[int(np.argmax(prior + scores))])


def smooth_by_kind(load: Floats, kinds: Floats, values: Floats, noise: Floats) -> tuple[Floats, Floats]:
    """The curve through bursts of several kinds, and how far those of each kind lie off it, if they show that they do.

    Args:
        load: of each burst.
        kinds: of each burst; nan is of no kind.
        values: shape (loads, draws).
        noise: variance of each burst.

    Returns:
        The curve and the offsets at each burst, both of shape (loads, draws).
    """
    prior = _prior(load)
    plain = prior + np.diag(noise)
    # Nothing equals nan, itself included.
    alike = OFFSET_SD**2 * np.equal.outer(kinds, kinds)
    if _evidence(plain + alike, values[:, 0]) < _evidence(plain, values[:, 0]) + OFFSET_EVIDENCE:
        alike = np.zeros_like(alike)
    weights = np.linalg.solve(plain + alike, values)
    return prior @ weights, alike @ weights


def _prior(load: Floats) -> Floats:
    distance = (load[:, None] - load[None, :]) / MODEL_LENGTH
    prior: Floats = MODEL_SD**2 * np.exp(-0.5 * distance**2) + LEVEL_SD**2
    return prior


def _evidence(covariance: Floats, deviations: Floats) -> float:
    _, determinant = np.linalg.slogdet(covariance)
    return float(-0.5 * (deviations @ np.linalg.solve(covariance, deviations) + determinant))
