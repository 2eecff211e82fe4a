"""What every probe promises, whatever it is made of: a simulated machine, this process, or a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shelves import Failing, RecordingStep, Sleepy

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import FakeClock, SimulatedMachine, SimulatedProbe

# Python 3.12+ warns of fork in a process with threads; the DataLoader of the inline probe forks by default until 3.14.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

QUICK = BurstPlan(max_s=0.2, min_s=0.1, relative_error=0.1, deadline_s=30.0)


class ProbeContract:
    """Inherit, and give the fixtures `probe` and `failing_probe`."""

    def test_a_burst_returns_a_measurement_whose_fields_agree(self, probe: Any) -> None:
        measured = probe.burst(LoaderConfig(num_workers=2), QUICK)

        assert isinstance(measured, Measurement)
        rate = measured.samples_per_s
        assert 0 <= rate.low <= rate.value <= rate.high
        assert rate.value == pytest.approx(measured.samples / measured.window_s, rel=0.5)
        assert 0 <= measured.wait_share <= 1
        assert measured.first_batch_s > 0
        assert measured.batch_bytes > 0
        assert {trace.worker for trace in measured.traces} == {0, 1}
        assert all(t.fetch_start <= t.fetch_end <= t.collate_end <= t.received <= t.step_end for t in measured.traces)

    def test_zero_workers_work(self, probe: Any) -> None:
        measured = probe.burst(LoaderConfig(), QUICK)

        assert isinstance(measured, Measurement)
        assert {trace.worker for trace in measured.traces} == {-1}

    def test_the_step_ceiling_is_a_rate_without_loading(self, probe: Any) -> None:
        measured = probe.step_ceiling(1, QUICK)

        assert isinstance(measured, Measurement)
        assert measured.samples_per_s.value > 0
        assert measured.wait_share < 0.5

    def test_a_failing_configuration_is_an_answer_and_the_next_one_works(self, failing_probe: Any) -> None:
        failure = failing_probe.burst(LoaderConfig(num_workers=1), QUICK)

        assert isinstance(failure, Failure)
        assert failure.kind == "user_exception"
        assert "shelf" in failure.message
        assert isinstance(failing_probe.burst(LoaderConfig(), QUICK), Measurement)


class TestSimulatedProbe(ProbeContract):
    @pytest.fixture
    def probe(self) -> SimulatedProbe:
        return SimulatedProbe(SimulatedMachine(), FakeClock())

    @pytest.fixture
    def failing_probe(self) -> SimulatedProbe:
        def fails(config: LoaderConfig) -> Failure | None:
            broken = Failure(kind="user_exception", phase="first_batch", message="no sample on this shelf")
            return broken if config.num_workers else None

        return SimulatedProbe(SimulatedMachine(fails=fails), FakeClock())


Open = Callable[..., Any]


class RealProbeContract(ProbeContract):
    """What only a probe of real processes can promise; also give `open_probe(dataset, **training)`."""

    def test_a_failure_carries_the_users_traceback_and_no_frame_of_ours(self, failing_probe: Any) -> None:
        failure = failing_probe.burst(LoaderConfig(num_workers=1), QUICK)

        assert isinstance(failure, Failure)
        assert failure.traceback is not None
        assert "shelves.py" in failure.traceback
        assert "LookupError: no sample" in failure.traceback
        assert "autotune_loader/" not in failure.traceback

    def test_equal_seeds_read_the_same_samples_and_closing_twice_is_fine(
        self, open_probe: Open, tmp_path: Path
    ) -> None:
        path = tmp_path / "samples"
        probe = open_probe(Sleepy(), train_step=RecordingStep(str(path)))
        probe.start()
        seen = []
        for config, seed in [(LoaderConfig(), 1), (LoaderConfig(num_workers=1), 1), (LoaderConfig(), 2)]:
            path.unlink()
            probe.burst(config, BurstPlan(max_s=0.1, min_s=0.01, seed=seed))
            seen.append(path.read_text().splitlines()[:4])

        assert seen[0] == seen[1]
        assert seen[0] != seen[2]
        probe.close()
        probe.close()


def workload(dataset: Any, **training: Any) -> Workload:
    return Workload(data=DataSide.from_dataset(dataset, batch_size=4), training=TrainingSide(**training))


def open_inline(dataset: Any, **training: Any) -> InlineProbe:
    return InlineProbe(workload(dataset, **training), inspect_machine())


def open_process(dataset: Any, **training: Any) -> ProcessProbe:
    return ProcessProbe(Payload.of(workload(dataset, **training), 1 << 30), inspect_machine())


def opener(open_one: Open) -> Iterator[Open]:
    opened: list[Any] = []

    def open_it(dataset: Any, **training: Any) -> Any:
        opened.append(open_one(dataset, **training))
        return opened[-1]

    yield open_it
    for probe in opened:
        probe.close()


def started(open_probe: Open, dataset: Any) -> Any:
    probe = open_probe(dataset, model=torch.nn.Linear(4, 2))
    probe.start()
    return probe


@pytest.mark.process
class TestInlineProbe(RealProbeContract):
    @pytest.fixture
    def open_probe(self) -> Iterator[Open]:
        yield from opener(open_inline)

    @pytest.fixture
    def probe(self, open_probe: Open) -> Any:
        return started(open_probe, Sleepy())

    @pytest.fixture
    def failing_probe(self, open_probe: Open) -> Any:
        return started(open_probe, Failing())


# One process for all tests that need no fresh one: starting it means importing torch.
@pytest.fixture(scope="module")
def shared_opener() -> Iterator[Open]:
    yield from opener(open_process)


@pytest.fixture(scope="module")
def shared_probe(shared_opener: Open) -> Any:
    return started(shared_opener, Sleepy())


@pytest.fixture(scope="module")
def shared_failing_probe(shared_opener: Open) -> Any:
    return started(shared_opener, Failing())


@pytest.mark.process
class TestProcessProbe(RealProbeContract):
    @pytest.fixture
    def open_probe(self) -> Iterator[Open]:
        yield from opener(open_process)

    @pytest.fixture
    def probe(self, shared_probe: Any) -> Any:
        return shared_probe

    @pytest.fixture
    def failing_probe(self, shared_failing_probe: Any) -> Any:
        return shared_failing_probe
