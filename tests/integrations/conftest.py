from __future__ import annotations

import signal

import pytest
from torch.utils.data import _utils

from tests.integrations.job import Waiting


@pytest.fixture(autouse=True)
def torch_hears_of_dead_workers():
    """Lightning's `fit()` takes torch's handler away for good: later tests would hear of a dead worker after seconds."""
    before, was_set = signal.getsignal(signal.SIGCHLD), _utils.signal_handling._SIGCHLD_handler_set
    yield
    signal.signal(signal.SIGCHLD, before)
    _utils.signal_handling._SIGCHLD_handler_set = was_set


@pytest.fixture
def few():
    return Waiting(256, 0.001)


@pytest.fixture
def quick():
    """Enough for a handful of bursts; what is chosen does not matter here, only that it is used."""
    return {"budget": 2.5, "max_workers": 3, "progress": False}
