"""What several bursts of one workload tell about one another: heavy batches, and what a worker does between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune_loader.twin.observation import Observation

MIN_COMMON = 8
"""Two bursts need so many batches in common before the one may correct the other."""


def whole_cycles(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """The same bursts, their service with what a worker does between two batches, as far as any burst shows it.

    Handing a batch over occupies a worker as fetching does, but only a worker with an order at hand shows how long.
    """
    known = [o.between_s for o in observations if o.between_s is not None]
    typical_s = float(np.mean(known)) if known else 0.0
    return tuple(o if o.num_workers == 0 else _cycle(o, typical_s) for o in observations)


def _cycle(seen: Observation, typical_s: float) -> Observation:
    between_s = typical_s if seen.between_s is None else seen.between_s
    longer = 1.0 + between_s / max(float(seen.service_s.mean()), 1e-12)
    return replace(
        seen,
        service_s=seen.service_s + between_s,
        cpu_s=seen.cpu_s + between_s,
        at_work=min(seen.workers_at_work * longer, float(seen.num_workers)),
        between_s=None,
    )


def level(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """The same bursts, as if each had seen all the batches that the longest one saw.

    Bursts read the same samples in the same order, but a slow one fewer of them; by chance those may be light or heavy.
    How heavy, the longest burst knows: it saw them too. So its mean over all batches against its mean over the common
    ones corrects the slow one (a control variate), as far as the two agree on which batches are heavy. As far as they do
    not, its own mean stands, which has seen batches that the longest burst left out while its queues filled.
    """
    longest = max(observations, key=lambda o: len(o.positions))
    return tuple(o if o is longest else _levelled(o, longest) for o in observations)


def _levelled(seen: Observation, longest: Observation) -> Observation:
    where = {position: i for i, position in enumerate(longest.positions)}
    pairs = [(i, where[p]) for i, p in enumerate(seen.positions) if p in where]
    if len(pairs) < MIN_COMMON:
        return seen
    mine, theirs = (np.array(indices) for indices in zip(*pairs, strict=True))
    own, reference = seen.service_s[mine], longest.service_s[theirs]
    if min(own.std(), reference.std(), own.mean(), reference.mean()) <= 0:
        return seen
    agreement = max(0.0, float(np.corrcoef(own, reference)[0, 1]))
    mean_s = own.mean() / reference.mean() * longest.service_s.mean()
    factor = (mean_s / seen.service_s.mean()) ** agreement
    return replace(seen, service_s=seen.service_s * factor, cpu_s=seen.cpu_s * factor)
