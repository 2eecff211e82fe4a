"""What a configuration costs, and which one to choose given what is believed."""

from __future__ import annotations

from dataclasses import replace

from autotune_loader.decision.posterior import Posterior
from autotune_loader.decision.space import Space
from autotune_loader.values.config import TORCH_PREFETCH_FACTOR, LoaderConfig

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
    # Batches in flight take memory, delay the first one and are lost where an epoch ends early; fewer than torch's own save
    # next to nothing, and leave a loop without a batch after every slow one.
    is_shallow = config.num_workers > 0 and (config.prefetch_factor or 0) < TORCH_PREFETCH_FACTOR
    if is_shallow:
        config = replace(config, prefetch_factor=TORCH_PREFETCH_FACTOR)
    memory = space.memory_need(config)
    if space.limits.memory_bytes:
        memory = int(memory / space.limits.memory_bytes / MEMORY_STEP)
    return (
        other_batches,
        config.num_workers,
        memory,
        config.device_prefetch,
        oddities,
        config.prefetch_factor or 0,
        is_shallow,
        config.persistent_workers,  # workers that live on keep their memory between epochs
    )
