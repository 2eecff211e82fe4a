"""torchdata's StatefulDataLoader takes the same arguments; a checkpoint from mid-epoch needs the same workers.

    loader = StatefulDataLoader(dataset, batch_size=64, **for_resume(load_config(), state).to_kwargs())

Such a checkpoint holds the state of every worker. Between epochs any configuration will do.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from autotune_loader.values.config import LoaderConfig


def for_resume(config: LoaderConfig, state: Mapping[str, Any]) -> LoaderConfig:
    """The configuration to resume a checkpoint with: as tuned, but with the checkpoint's number of workers.

    Args:
        config: as tuned, perhaps since.
        state: `loader.state_dict()`, as it was saved.
    """
    workers = workers_in(state)
    if workers is None or workers == config.num_workers:
        return config
    warnings.warn(
        f"the checkpoint was made with num_workers={workers}, not {config.num_workers}, and can only be resumed with these; "
        "use the tuned number from the next epoch on",
        stacklevel=2,
    )
    return config.with_workers(workers)


def workers_in(state: Mapping[str, Any]) -> int | None:
    """Workers of the loader whose `state_dict()` this is; None for an epoch that had not begun."""
    main = state["_snapshot"].get("_main_snapshot", {}) if isinstance(state.get("_snapshot"), Mapping) else None
    if main is not None:
        return int(main["_num_workers"]) if "_num_workers" in main else None
    return 0 if "_num_yielded" in state else None
