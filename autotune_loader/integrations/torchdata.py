"""torchdata's StatefulDataLoader: the same arguments, and what resuming a checkpoint needs.

    loader = StatefulDataLoader(dataset, batch_size=64, **load_config().to_kwargs(), snapshot_every_n_steps=100)

A checkpoint from the middle of an epoch holds the state of every worker, so it can only be resumed with the same
`num_workers`, whatever has been tuned since: `for_resume()` sees to it. Between epochs any configuration will do.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from autotune_loader.values.config import LoaderConfig


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
