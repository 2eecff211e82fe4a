"""A few samples, as they are made and from a cache that holds them: what a cache would bring, without filling all of it."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

from autotune_loader.pipeline.cached_prefix import CachedPrefix
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.prepared_change import PreparedChange
from autotune_loader.values.measurement import ChangeFacts

FILL_S = 2.0
"""So long samples are made for the cache."""
MOST, FEWEST = 4096, 16
"""More say no more; fewer would be one batch again and again."""


@dataclass(frozen=True, kw_only=True)
class FewSamples(PreparedChange):
    """The same samples twice."""

    indices: list[Any]
    cache: CachedPrefix

    @classmethod
    def of(cls, data: DataSide) -> FewSamples:
        """The first samples of an order, as many as can be made in a moment.

        Raises:
            ValueError: samples that cannot be cached; an order of batches that is the user's own.
        """
        if data.is_iterable or data.sampler is None or not data.is_batched:
            raise ValueError("only samples of a map-style dataset that are batched by the loader can be cached")
        cache, begun, indices = CachedPrefix(data.dataset), time.monotonic(), list[Any]()
        for index in itertools.islice(data.sampler, MOST):
            cache[index]
            indices.append(index)
            if len(indices) >= FEWEST and time.monotonic() - begun > FILL_S:
                break
        size = cache.cached_bytes / max(1, len(set(indices)))
        facts = ChangeFacts(code="DataLoader(CachedPrefix(dataset), ...)", sample_bytes=size)
        return cls(indices=indices, cache=cache, facts=facts)

    def before(self, data: DataSide) -> DataSide:
        return _only(data, self.indices)

    def after(self, data: DataSide) -> DataSide:
        return _only(replace(data, dataset=self.cache), self.indices)


def _only(data: DataSide, indices: list[Any]) -> DataSide:
    from torch.utils.data import SubsetRandomSampler

    return replace(data, sampler=SubsetRandomSampler(indices))
