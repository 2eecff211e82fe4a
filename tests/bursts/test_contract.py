"""What every probe promises, whatever it is made of: a simulated machine, a fresh process, or a fork of this one."""

import threading
import time

import pytest
import torch

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.bursts import QUICK, Made, measured, opened, workload

# Python 3.12+ warns of fork in a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


PROBES = ["simulated", *(pytest.param(kind, marks=pytest.mark.process) for kind in ("fresh", "forked"))]


@pytest.fixture(scope="module", params=PROBES)
def probe(request):
    if request.param == "simulated":
        yield SimulatedProbe(SimulatedMachine(), FakeClock())
        return
    lock = threading.Lock() if request.param == "forked" else None  # it cannot be pickled

    def make(index, held=lock):
        time.sleep(0.0005)
        return torch.full((4,), float(index)), index % 2

    with opened(workload(Made(make), training=TrainingSide(model=torch.nn.Linear(4, 2)))) as found:
        assert ("in forks of this process" in " ".join(found.notes)) is (request.param == "forked")
        yield found.probe


@pytest.mark.parametrize("workers", [0, 2])
def test_bursts_and_ceilings_are_measurements_whose_fields_agree(probe, workers):
    for _ in range(2):  # memory is read at the first burst of a configuration, and told of each
        found = measured(probe, LoaderConfig(num_workers=workers))
        assert found.memory is not None
    rate = found.samples_per_s
    assert 0 <= rate.low <= rate.value <= rate.high
    assert rate.value == pytest.approx(found.samples / found.window_s, rel=0.5)
    assert 0 <= found.wait_share <= 1
    assert found.first_batch_s > 0
    assert found.batch_bytes > 0
    assert {trace.worker for trace in found.traces} == (set(range(workers)) or {-1})
    assert all(t.fetch_start <= t.fetch_end <= t.collate_end <= t.received <= t.step_end for t in found.traces)

    ceiling = probe.step_ceiling(QUICK)
    assert ceiling.samples_per_s.value > 0
    assert ceiling.wait_share < 0.5
