"""A sample that raises is named: its exception comes in the place of its batch, from a worker too, and ends the run.

What depends on the workers (a lack of memory or descriptors, CUDA after a fork) is no fault of a sample; nor is what raises in
a worker alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autotune_loader.bursts.failures import failure_of, is_of_user
from autotune_loader.bursts.files import SAMPLE_WRITES, refused_path
from autotune_loader.pipeline.workload import DataSide
from autotune_loader.values.measurement import Failure

ENDS_TRAINING = "; training would end there too: mend that sample, or leave it out of the dataset"


class Raised(Exception):  # noqa: N818 - it stands for an error of the user's, and is none
    """What the samples of a batch raised, in the place of that batch."""

    def __init__(self, failure: Failure, keys: tuple[Any, ...], writes: bool) -> None:
        super().__init__(failure, keys, writes)
        self.failure = failure
        self.keys = keys
        """Of the samples that raise, alone or together; none in a stream."""
        self.writes = writes
        """Whether it was a file that bursts do not change."""

    @classmethod
    def of(cls, error: Exception, name: str, keys: Sequence[Any] = ()) -> Raised:
        """What takes the place of a batch; the error itself is raised where it is no fault of a sample."""
        if not is_of_user(error):
            raise error
        failure, path = failure_of(error, "batches"), refused_path(error)
        message = f"{name} raises {failure.message}" if path is None else SAMPLE_WRITES.format(sample=name, path=path)
        return cls(replace(failure, message=message), tuple(keys), path is not None)

    @property
    def ends_run(self) -> Failure:
        """The failure of a run that no configuration would help."""
        return self.failure if self.writes else replace(self.failure, message=self.failure.message + ENDS_TRAINING)

    def raises_in(self, data: DataSide) -> bool:
        """Whether the samples raise where this process reads them from `data`, too; False for a stream."""
        dataset, keys = data.dataset, list(self.keys)
        try:
            if keys and data.is_batched:
                data.collate(dataset.__getitems__(keys) if data.has_batched_fetch else [dataset[key] for key in keys])
            elif keys:
                data.collate(dataset[keys[0]])
        except Exception:
            return True
        return False


def good(batch: Any) -> Any:
    """The batch; raises what came in its place."""
    if isinstance(batch, Raised):
        raise batch
    return batch
