"""Why the number of workers stays as it was asked for, as a closed table; each row says what the user can do about it."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """A row with its figures."""

    kind: str
    sentence: str


class Kept(Enum):
    """Called with the figures of the row."""

    NO_CONSENT = "num_workers=0 was asked for, so no worker is used; without num_workers they may be."
    FROZEN = "tune=False was asked for."
    ITERABLE = "An IterableDataset reads by itself: its workers are as asked."
    WORKER_INIT = "worker_init_fn is the script's own and may depend on the number of workers."
    NOT_WAITING = "The loop hardly waits for data ({wait:.0%} of the time)."
    TOO_SHORT = "The training was too short to try anything."
    NOT_FASTER = "No other number of workers was shown to be faster."
    SAMPLES_DIFFER = (
        "Batch {batch} of a worker was not the loop's own ({what}): its samples depend on the process that makes them."
    )
    WORKER_ERROR = "A worker raised what the loop does not: {error}"
    WORKER_SILENT = "A worker gave no answer for {silent:.0f} s."
    WORKERS_LOST = "Workers ended again and again: {error}"
    DATASET_CHANGES = "Fetching a sample changes {what}, which the loop would not see from workers."
    TRAINING_CHANGES = "The training changes {what} in the midst of an epoch, which workers would not see."
    WRITES_FILES = "Fetching a sample writes {path}, which several processes must not do at once."
    SAMPLER_DRAWS = (
        "The sampler draws from a global generator between two batches; a generator of its own would allow workers."
    )
    MEMORY = "More workers would not fit into {what}."
    CANNOT_START = "Workers cannot be started here: {why}"

    def __call__(self, **figures: Any) -> Finding:
        """What the row says of these figures."""
        return Finding(self.kind, self.value.format(**figures))

    @property
    def kind(self) -> str:
        """`Finding.kind` of what the row says."""
        return self.name.lower()
