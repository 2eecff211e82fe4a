"""What `AutoLoader.state_dict` holds, and whether it fits the loader that it is given to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# 1: first.
SCHEMA_VERSION = 1


def check_saved(state: Mapping[str, Any], *, samples: int | None, batch_size: int | None, workers: int | None) -> None:
    """Raise a ValueError where a state is not of this loader.

    Args:
        state: as `AutoLoader.state_dict` made it.
        samples: of this loader's dataset; None where it does not tell.
        batch_size: of this loader.
        workers: of this loader, where the saved epoch cannot be taken up with another number.
    """
    if not isinstance(state, Mapping) or state.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"this is no state of an AutoLoader of schema_version={SCHEMA_VERSION}; what AutoLoader.state_dict() returned "
            "would work"
        )
    if state["samples"] != samples:
        raise ValueError(
            f"the state is of a dataset of {state['samples']} samples, this one has {samples}; the same dataset would work"
        )
    if state["batch_size"] != batch_size:
        raise ValueError(
            f"the state was saved with batch_size={state['batch_size']}, this loader has batch_size={batch_size}; "
            f"batch_size={state['batch_size']} would work"
        )
    epoch = state["epoch"]
    if workers is not None and epoch is not None and epoch["workers"] != workers:
        raise ValueError(
            f"an IterableDataset's epoch that began with num_workers={epoch['workers']} cannot go on with {workers}, which "
            f"would read other samples; num_workers={epoch['workers']} would work"
        )
