"""torchdata's StatefulDataLoader: the same arguments, and what its snapshots cost.

    loader = StatefulDataLoader(dataset, batch_size=64, **load_config().to_kwargs(), snapshot_every_n_steps=100)

A checkpoint from the middle of an epoch holds the state of every worker, so it can only be resumed with the same
`num_workers`, whatever has been tuned since: `for_resume()` sees to it. Between epochs any configuration will do.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune_loader.integrations import require
from autotune_loader.pipeline.build import build_loader
from autotune_loader.values.config import LoaderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotCost:
    """What it costs to be able to checkpoint after every n-th batch."""

    every_n_steps: int
    batch_s: float
    """Median seconds per batch of the loader alone, over the rounds."""
    relative: float
    """Against the rarest snapshots that were measured: 0.1 is a tenth slower."""


def measure_snapshot_cost(
    dataset: Any,
    config: LoaderConfig,
    *,
    batch_size: int = 32,
    every_n_steps: Sequence[int] = (1, 10, 100),
    batches: int = 100,
    rounds: int = 3,
    **parts: Any,
) -> list[SnapshotCost]:
    """Seconds per batch for several `snapshot_every_n_steps`, taking turns, over the first batches of an epoch.

    Args:
        dataset: what the loader reads.
        config: the tuned configuration.
        batch_size: samples per batch.
        every_n_steps: the intervals to compare.
        batches: to read in each run, start-up not counted.
        rounds: how often each interval has its turn.
        **parts: further arguments of the loader, such as `collate_fn`.

    Raises:
        MissingExtraError: torchdata is not installed.
    """
    module = require("torchdata.stateful_dataloader", feature="StatefulDataLoader", extra="torchdata")
    seconds: dict[int, list[float]] = {every: [] for every in every_n_steps}
    for _ in range(rounds):
        for every in every_n_steps:
            loader = build_loader(
                dataset,
                replace(config, persistent_workers=False),
                loader_class=module.StatefulDataLoader,
                batch_size=batch_size,
                snapshot_every_n_steps=every,
                **parts,
            )
            seconds[every].append(_batch_seconds(iter(loader), batches))
    medians = {every: statistics.median(values) for every, values in seconds.items()}
    base = medians[max(medians)]
    return [SnapshotCost(every_n_steps=n, batch_s=s, relative=s / base - 1.0) for n, s in sorted(medians.items())]


def _batch_seconds(iterator: Any, batches: int) -> float:
    next(iterator)
    begun, read = time.perf_counter(), 0
    for read, _ in enumerate(iterator, start=1):
        if read == batches:
            break
    return (time.perf_counter() - begun) / max(read, 1)


def for_resume(config: LoaderConfig, state: Mapping[str, Any]) -> LoaderConfig:
    """The configuration to resume a checkpoint with: as tuned, but with the workers that the checkpoint was made with.

    Args:
        config: as tuned, perhaps since.
        state: `loader.state_dict()`, as it was saved.
    """
    workers = workers_in(state)
    if workers is None or workers == config.num_workers:
        return config
    warnings.warn(
        f"the checkpoint was made with num_workers={workers}, not {config.num_workers}, and can only be resumed so; "
        "the tuned number holds from the next epoch on",
        stacklevel=2,
    )
    return config.with_workers(workers)


def workers_in(state: Mapping[str, Any]) -> int | None:
    """Workers of the loader whose `state_dict()` this is; None for an epoch that had not begun."""
    snapshot = state.get("_snapshot")
    if isinstance(snapshot, Mapping):
        main = snapshot.get("_main_snapshot", {})
        return int(main["_num_workers"]) if "_num_workers" in main else None
    return 0 if "_num_yielded" in state else None
