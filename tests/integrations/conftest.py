from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, _utils

# Enough for a handful of bursts; what is chosen does not matter here, only that it is used.
QUICK: dict[str, Any] = {"budget": 2.5, "max_trials": 2, "max_workers": 3, "progress": False}


class Points(Dataset[Any]):
    """Points that take a millisecond to wait for; the label says on which side of a line they lie."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.001)
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, int(x.sum() > 0)


@pytest.fixture(autouse=True)
def torch_hears_of_dead_workers() -> Iterator[None]:
    """Lightning's `fit()` takes torch's handler away for good: later tests would hear of a dead worker after seconds."""
    before, was_set = signal.getsignal(signal.SIGCHLD), _utils.signal_handling._SIGCHLD_handler_set
    yield
    signal.signal(signal.SIGCHLD, before)
    _utils.signal_handling._SIGCHLD_handler_set = was_set


@pytest.fixture
def points() -> Points:
    return Points()


@pytest.fixture
def quick() -> dict[str, Any]:
    return dict(QUICK)
