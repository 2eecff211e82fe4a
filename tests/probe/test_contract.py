"""What every probe promises, whatever it is made of: a simulated machine, this process, or a process of its own."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe
from tests.support.bursts import ALONE, ONE_WORKER, QUICK, failed, measured, workload

# Python 3.12+ warns of fork in a process with threads; the DataLoader of the inline probe forks by default until 3.14.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Sleepy(Dataset):
    """Sample i is i, after a nap."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((4,), float(index)), index % 2


class Long(Sleepy):
    """More than the bursts of a test read."""

    def __len__(self):
        return 1 << 20


class Failing(Sleepy):
    """Works in the main process, where the probe warms up, and raises in a worker."""

    def __getitem__(self, index):
        if get_worker_info() is not None:
            raise LookupError(f"no sample {index} on this shelf")
        return super().__getitem__(index)


def simulated(dataset, **training):
    def fails(config):
        broken = Failure(kind="user_exception", phase="first_batch", message="no sample on this shelf")
        return broken if config.num_workers and isinstance(dataset, Failing) else None

    return SimulatedProbe(SimulatedMachine(fails=fails), FakeClock())


def inline(dataset, **training):
    return InlineProbe(workload(dataset, training=TrainingSide(**training)), inspect_machine())


def in_process(dataset, **training):
    payload = Payload.of(workload(dataset, training=TrainingSide(**training)), 1 << 30)
    return ProcessProbe(payload, inspect_machine())


REAL = [pytest.param(make, marks=pytest.mark.process) for make in (inline, in_process)]


@pytest.fixture(scope="module", params=[simulated, *REAL])
def make(request):
    """Makes probes of one kind; each may be closed twice."""
    made = []

    def make_it(dataset, **training):
        probe = request.param(dataset, **training)
        if request.param is not simulated:
            made.append(probe)
            probe.start()
        return probe

    yield make_it
    for probe in (*made, *made):
        probe.close()


@pytest.fixture(scope="module")
def probe(make):
    return make(Sleepy(), model=torch.nn.Linear(4, 2))


@pytest.mark.parametrize("workers", [0, 2])
def test_bursts_and_ceilings_are_measurements_whose_fields_agree(probe, workers):
    found = measured(probe, LoaderConfig(num_workers=workers))

    rate = found.samples_per_s
    assert 0 <= rate.low <= rate.value <= rate.high
    assert rate.value == pytest.approx(found.samples / found.window_s, rel=0.5)
    assert 0 <= found.wait_share <= 1
    assert found.first_batch_s > 0
    assert found.batch_bytes > 0
    assert {trace.worker for trace in found.traces} == (set(range(workers)) or {-1})
    assert all(t.fetch_start <= t.fetch_end <= t.collate_end <= t.received <= t.step_end for t in found.traces)

    ceiling = probe.step_ceiling(1, QUICK)
    assert ceiling.samples_per_s.value > 0
    assert ceiling.wait_share < 0.5


def test_a_failing_configuration_is_an_answer_with_the_users_traceback_and_the_next_one_works(make):
    probe = make(Failing())

    failure = failed(probe, "user_exception", ONE_WORKER)

    assert "shelf" in failure.message
    if not isinstance(probe, SimulatedProbe):
        assert "LookupError: no sample" in failure.traceback
        assert "autotune_loader/" not in failure.traceback
    measured(probe)


@pytest.mark.parametrize("make_real", REAL)
def test_bursts_read_what_none_before_has_read(make_real, tmp_path):
    path = tmp_path / "samples"

    def step(model, batch):
        with path.open("a") as file:
            file.writelines(f"{sample}\n" for sample in batch[0][:, 0].tolist())

    probe = make_real(Long(), train_step=step)
    try:
        probe.start()
        path.unlink()
        for config in (ALONE, ONE_WORKER, ALONE):
            measured(probe, config, BurstPlan(max_s=0.1, min_s=0.01))
    finally:
        probe.close()
    read = path.read_text().splitlines()
    assert len(set(read)) == len(read)
