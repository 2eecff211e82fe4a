"""Other ways to make the same samples, tried in bursts: what a change of the user's dataset would bring before it is written.

cache   the part that is the same each epoch comes from a cache                 few_samples
uint8   pixels travel as bytes and become floats in the step                    as_bytes
draft   JPEGs are decoded to the size that is needed                            drafts
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune_loader.pipeline.workload import DataSide
from autotune_loader.probe.as_bytes import AsBytes
from autotune_loader.probe.drafts import Drafts
from autotune_loader.probe.few_samples import FewSamples
from autotune_loader.probe.prepared_change import PreparedChange
from autotune_loader.values.plan import DataChangeKind


def prepare(kind: DataChangeKind, data: DataSide, batch: Any) -> PreparedChange:
    """Try a change on a few samples of a data side that this process may fetch from; `batch` is one of its batches.

    Raises:
        ValueError: it cannot be made here, or samples would not be the same.
    """
    makers: dict[DataChangeKind, Callable[[], PreparedChange]] = {
        "cache": lambda: FewSamples.of(data),
        "uint8": lambda: AsBytes.of(data, batch),
        "draft": lambda: Drafts.of(data),
    }
    return makers[kind]()
