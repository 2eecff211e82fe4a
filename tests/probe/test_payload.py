"""A workload as bytes: large arrays travel, what is too large is given up early, and what cannot travel is named."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.payload import NotSentError, Payload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

MIB = 1 << 20


class Holding(Dataset[Any]):
    """Keeps something in an attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index


def payload_of(held: Any, max_bytes: int = 64 * MIB) -> Payload:
    data = DataSide.from_dataset(Holding(held), batch_size=2)
    return Payload.of(Workload(data=data, training=TrainingSide()), max_bytes)


@pytest.mark.parametrize("held", [np.arange(MIB), b"x" * MIB, ["word"] * MIB], ids=type)
def test_what_is_too_large_is_given_up(held: Any) -> None:
    with pytest.raises(NotSentError, match="larger than"):
        payload_of(held, max_bytes=MIB // 2)


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(NotSentError, match=r"dataset\.held") as caught:
        payload_of(threading.Lock())

    assert caught.value.part == "dataset.held"
