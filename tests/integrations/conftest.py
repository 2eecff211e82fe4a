import signal

import pytest
from torch.utils.data import _utils


@pytest.fixture(autouse=True)
def torch_hears_of_dead_workers():
    """Lightning's `fit()` takes torch's handler away for good: later tests would hear of a dead worker after seconds."""
    before, was_set = signal.getsignal(signal.SIGCHLD), _utils.signal_handling._SIGCHLD_handler_set
    yield
    signal.signal(signal.SIGCHLD, before)
    _utils.signal_handling._SIGCHLD_handler_set = was_set
