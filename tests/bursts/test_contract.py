"""What every probe promises, whatever it is made of: a simulated machine, a fresh process, or a fork of this one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.bursts import ONE_WORKER, QUICK, failed, measured, opened, workload

# Python 3.12+ warns of fork in a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Sleepy(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is i, after a nap; with a lock it cannot be pickled."""

    def __init__(self, lock: Any = None) -> None:
        self.lock = lock

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.0005)
        return torch.full((4,), float(index)), index % 2


class Failing(Sleepy):
    """Works in the main process, where the probe warms up, and raises in a worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if get_worker_info() is not None:
            raise LookupError(f"no sample {index} on this shelf")
        return super().__getitem__(index)


def fails(config: LoaderConfig) -> Failure | None:
    broken = Failure(kind="user_exception", phase="first_batch", message="no sample on this shelf")
    return broken if config.num_workers else None


PROBES = ["simulated", *(pytest.param(kind, marks=pytest.mark.process) for kind in ("fresh", "forked"))]


@pytest.fixture(scope="module", params=PROBES)
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[type[Sleepy]], Any]]:
    """Makes probes of one kind."""
    with contextlib.ExitStack() as exits:

        def make_it(dataset: type[Sleepy]) -> Any:
            if request.param == "simulated":
                return SimulatedProbe(SimulatedMachine(fails=fails if dataset is Failing else None), FakeClock())
            lock = threading.Lock() if request.param == "forked" else None
            training = TrainingSide(model=torch.nn.Linear(4, 2))
            found = exits.enter_context(opened(workload(dataset(lock), training=training)))
            assert ("in forks of this process" in " ".join(found.notes)) is (request.param == "forked")
            return found.probe

        yield make_it


@pytest.fixture(scope="module")
def probe(make: Callable[[type[Sleepy]], Any]) -> Any:
    return make(Sleepy)


@pytest.mark.parametrize("workers", [0, 2])
def test_bursts_and_ceilings_are_measurements_whose_fields_agree(probe: Any, workers: int) -> None:
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


def test_a_failing_configuration_is_an_answer_with_the_users_traceback_and_the_next_one_works(
    make: Callable[[type[Sleepy]], Any],
) -> None:
    probe = make(Failing)
    failure = failed(probe, "user_exception", ONE_WORKER)
    assert "shelf" in failure.message
    if not isinstance(probe, SimulatedProbe):
        assert failure.traceback is not None
        assert "LookupError: no sample" in failure.traceback
        assert "autotune_loader/" not in failure.traceback
    measured(probe)
