import signal

import pytest
from torch.utils.data import _utils

from tests.support import SimulatedMachine, on_simulated_machines


@pytest.fixture(autouse=True)
def torch_hears_of_dead_workers():
    """Lightning's `fit()` takes torch's handler away for good: tests after it hear late."""
    before, was_set = signal.getsignal(signal.SIGCHLD), _utils.signal_handling._SIGCHLD_handler_set
    yield
    signal.signal(signal.SIGCHLD, before)
    _utils.signal_handling._SIGCHLD_handler_set = was_set


@pytest.fixture
def simulated_bursts(monkeypatch):
    """`tune()` measures a simulated machine, on which loading binds."""
    machine = SimulatedMachine(cores=4, cpu_s=0.04, step_s=0.01)
    on_simulated_machines(monkeypatch, lambda workload: machine)
