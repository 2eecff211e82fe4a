"""What a loader may use: workers, host memory, shared memory; and whether two of its pools may live side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune_loader.decision.space import BatchCost, Limits, Space, least
from autotune_loader.machine.limits import local_world_size, memory_budget, open_files_limit, shared_memory
from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.validation import require_count

PREFETCH_FACTORS = (2, 4, 8)
"""A queue of one batch a worker is never faster beyond the noise, and each value is one more to be tried."""
SAFE_SHARE = 0.5
"""Of the memory that is free, two pools at once may take so much; the training's own use may grow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bounds that the user gave; None where there is none."""

    max_workers: int | None = None
    max_host_memory: int | None = None
    """Bytes that workers and the batches they hold may take."""
    max_shm: int | None = None
    """Bytes of shared memory that batches may take."""

    def __post_init__(self) -> None:
        for name in ("max_workers", "max_host_memory", "max_shm"):
            require_count(name, getattr(self, name), minimum=0)

    def refuse(self, config: LoaderConfig, shape: BatchShape | None) -> None:
        """Raise a ValueError for a configuration that is over a budget.

        Args:
            config: to be started.
            shape: of a batch; None before the first, when only workers can be counted.
        """
        if self.max_workers is not None and config.num_workers > self.max_workers:
            raise ValueError(
                f"num_workers={config.num_workers} is above max_workers={self.max_workers}; "
                f"num_workers={self.max_workers} would work"
            )
        if config.num_workers and (failure := self._space(shape).veto(config)) is not None:
            raise ValueError(f"{failure.message} (max_shm, max_host_memory); num_workers=0 would work")

    def may_overlap(self, old: LoaderConfig, new: LoaderConfig, shape: BatchShape | None) -> bool:
        """Whether the new pool may be started while the old one still has batches in hand: both at once have to fit.

        Not with pinning: a process that is forked beside a pinning thread can inherit a lock that nobody gives back
        (https://github.com/pytorch/pytorch/issues/130610).
        """
        if old.pin_memory or new.pin_memory or shape is None:
            return False
        workers, depth = old.num_workers + new.num_workers, max(old.prefetch_factor or 1, new.prefetch_factor or 1)
        is_allowed = self.max_workers is None or workers <= self.max_workers
        return is_allowed and self._space(shape, of_free=SAFE_SHARE).veto(new.with_workers(workers, depth)) is None

    def search_space(self, most_workers: int, like: LoaderConfig, shape: BatchShape | None) -> Space:
        """The configurations that may be tried, in what differs from `like` workers and prefetch.

        Args:
            most_workers: that could help.
            like: what stays as it is: pinning, order, start method.
            shape: of a batch.
        """
        return replace(
            self._space(shape, of_free=1.0),
            max_workers=most_workers if self.max_workers is None else min(most_workers, self.max_workers),
            workers_are_capped=self.max_workers is not None,
            prefetch_factors=PREFETCH_FACTORS,
            pin_memory=(like.pin_memory,),
            in_order=(like.in_order,),
            multiprocessing_contexts=(like.multiprocessing_context,),
        )

    def _space(self, shape: BatchShape | None, *, of_free: float | None = None) -> Space:
        """Within what the user allows, and within this share of what is free here; None leaves the latter out."""
        limits = Limits(shm_bytes=self.max_shm, memory_bytes=self.max_host_memory)
        if of_free is not None:
            shm, memory, share = shared_memory(), memory_budget().available_bytes, of_free / local_world_size()
            limits = Limits(
                shm_bytes=least(self.max_shm, int(shm.free_bytes * share) if shm else None),
                memory_bytes=least(self.max_host_memory, int(memory * share) if memory is not None else None),
                descriptors=open_files_limit(),
            )
        batch = BatchCost(bytes=shape.bytes, tensors=shape.tensors) if shape else BatchCost()
        return Space(max_workers=1, limits=limits, batch=batch)
