"""What a configuration costs, and which one to choose given what is believed."""

from __future__ import annotations

from autotune_loader.decision.posterior import Posterior
from autotune_loader.decision.space import Space
from autotune_loader.values.config import LoaderConfig

MEMORY_STEP = 0.05
"""Share of the memory limit that makes one configuration dearer than another."""


def choose(posterior: Posterior, space: Space, tolerance: float) -> tuple[LoaderConfig, bool]:
    """The cheapest configuration that is expected to lose hardly more than any must, and whether it is safe."""
    index, safe = posterior.choice([cost(config, space) for config in posterior.configs], tolerance)
    return posterior.configs[index], safe


def cost(config: LoaderConfig, space: Space) -> tuple[float, ...]:
    """What a configuration costs, most important first: other batches to train on, workers, their memory, odd settings."""
    other_batches = (config.batch_size is not None) + (config.drop_last is not None)
    oddities = (config.consumer_threads is not None) + config.pin_memory + (not config.in_order)
    oddities += (config.sharing_strategy is not None) + (not space.is_modelled(config))
    memory = space.memory_need(config)
    if space.limits.memory_bytes:
        memory = int(memory / space.limits.memory_bytes / MEMORY_STEP)
    # Where memory is no matter, a deeper queue is hardly ever slower, and it evens out the slow batches that no burst has seen:
    # with the shallow first 89 instead of 95 % of 300 simulated machines are within 2 % (studies/regret/README.md).
    depth = -(config.prefetch_factor or 0)
    return (
        other_batches,
        config.num_workers,
        memory,
        config.device_prefetch,
        oddities,
        depth,
        config.persistent_workers,  # workers that live on keep their memory between epochs
    )
