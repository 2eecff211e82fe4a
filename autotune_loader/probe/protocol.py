"""What the tuner asks of a probe: real ones, simulated ones and records answer alike."""

from __future__ import annotations

from typing import Protocol

from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

# Generous: torch may come from a network file system or be imported on a busy machine, the first sample from a cold bucket.
START_DEADLINE_S = 120.0


class Probe(Protocol):
    """Runs one configuration for real (or pretends to, in tests). A failing configuration is an answer, not an exception."""

    def burst(self, config: LoaderConfig, plan: BurstPlan) -> Measurement | Failure:
        """Train for a moment with `config` and tell what was measured."""
        ...

    def step_ceiling(self, consumer_threads: int | None, plan: BurstPlan) -> Measurement | Failure:
        """Step on one cached batch again and again: the rate that no loader can exceed with these intra-op threads."""
        ...
