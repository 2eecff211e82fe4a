"""Real processes in real trouble: a failing configuration is an answer of the right kind, in time, and the next one works.

One probe process goes through all of it; what kills it starts a new one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from trouble import Trouble

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.memory_guard import MemoryGuard
from autotune_loader.machine.processes import process_group_members
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe import runner
from autotune_loader.probe.failures import failure_of
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = pytest.mark.process

QUICK = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=30.0)
SHORT_DEADLINE = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=2.0)
TWO_WORKERS = LoaderConfig(num_workers=2)


def payload_of(dataset: Any, **training: Any) -> Payload:
    data = DataSide.from_dataset(dataset, batch_size=4, sampler=SequentialSampler(dataset))
    return Payload.of(Workload(data=data, training=TrainingSide(**training)), 1 << 30)


@pytest.fixture(scope="module")
def trouble_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trouble") / "trouble"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def shared_probe(trouble_file: Path) -> Iterator[ProcessProbe]:
    probe = ProcessProbe(payload_of(Trouble(trouble_file)), inspect_machine())
    probe.start()
    yield probe
    probe.close()


@pytest.fixture
def probe(shared_probe: ProcessProbe, trouble_file: Path) -> Iterator[ProcessProbe]:
    yield shared_probe
    trouble_file.write_text("")
    assert isinstance(shared_probe.burst(TWO_WORKERS, QUICK), Measurement), "the study must go on after any failure"


@pytest.mark.parametrize(
    ("trouble", "kind", "says"),
    [
        pytest.param("kill", "oom_killed", "OOM killer", id="a worker is killed"),
        pytest.param("exit", "crashed", "exited unexpectedly", id="a worker exits"),
        pytest.param("allocate", "out_of_memory", "allocate memory", id="an allocation fails"),
        pytest.param("segfault", "crashed", "a worker died", id="a worker segfaults"),
        pytest.param("oom", "device_memory", "smaller batch", id="out of device memory"),
        pytest.param("files", "descriptors", "ulimit -n", id="too many open files"),
        pytest.param("cuda", "user_exception", "0 workers", id="CUDA in a forked worker"),
    ],
)
def test_trouble_in_a_worker_is_classified(
    probe: ProcessProbe, trouble_file: Path, trouble: str, kind: str, says: str
) -> None:
    trouble_file.write_text(f"worker:{trouble}")

    failure = probe.burst(TWO_WORKERS, QUICK)

    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert says in failure.message


def test_a_worker_killed_below_a_fork_server_is_classified_although_torch_hears_no_signal(
    probe: ProcessProbe, trouble_file: Path
) -> None:
    trouble_file.write_text("worker:kill")

    failure = probe.burst(LoaderConfig(num_workers=2, multiprocessing_context="forkserver"), QUICK)

    assert isinstance(failure, Failure)
    assert failure.kind == "oom_killed"
    assert "OOM killer" in failure.message


@pytest.mark.parametrize(
    ("deaths", "kind"),
    [
        ([], "crashed"),
        (["worker is killed by signal: Killed"], "oom_killed"),
        (["... signal: Bus error"], "shared_memory"),
    ],
)
def test_exit_codes_tell_what_torch_lost(deaths: list[str], kind: str) -> None:
    error = RuntimeError("DataLoader worker (pid(s) 6161) exited unexpectedly")

    assert failure_of(error, "batches", deaths).kind == kind


def test_a_hang_in_a_worker_is_broken_by_the_deadline_and_leaves_no_process(
    probe: ProcessProbe, trouble_file: Path
) -> None:
    trouble_file.write_text("worker:hang")
    begun, group = time.monotonic(), probe._child.pid if probe._child is not None else 0

    failure = probe.burst(
        replace(TWO_WORKERS, multiprocessing_context="fork"), SHORT_DEADLINE
    )  # the others start slowly

    assert isinstance(failure, Failure)
    assert (failure.kind, failure.phase) == ("deadline", "batches")
    assert time.monotonic() - begun < 4 * SHORT_DEADLINE.deadline_s
    # no process outlives it
    deadline = time.monotonic() + 5
    while process_group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group
    assert process_group_members(group) == ()


def test_a_segfault_in_the_probe_process_is_a_crash_that_is_worth_another_try(
    probe: ProcessProbe, trouble_file: Path
) -> None:
    trouble_file.write_text("main:segfault")

    failure = probe.burst(LoaderConfig(), QUICK)

    assert isinstance(failure, Failure)
    assert (failure.kind, failure.retryable) == ("crashed", True)
    assert "SIGSEGV" in failure.message


def test_a_killed_probe_process_is_noticed_although_its_workers_live(probe: ProcessProbe, trouble_file: Path) -> None:
    trouble_file.write_text("main:kill")
    begun = time.monotonic()

    failure = probe.burst(LoaderConfig(), QUICK)

    assert isinstance(failure, Failure)
    assert failure.kind == "oom_killed"
    assert time.monotonic() - begun < QUICK.deadline_s / 2


@pytest.mark.parametrize("trouble", ["worker:kill", "worker:hang", "main:kill"])
def test_whatever_is_killed_leaves_no_file(
    trouble: str, trouble_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    trouble_file.write_text(trouble)
    probe = ProcessProbe(payload_of(Trouble(trouble_file)), inspect_machine())
    try:
        failure = probe.burst(LoaderConfig() if trouble.startswith("main") else TWO_WORKERS, SHORT_DEADLINE)
    finally:
        probe.close()
        trouble_file.write_text("")

    assert isinstance(failure, Failure)
    assert list(tmp_path.iterdir()) == []


def test_the_memory_guard_stops_a_burst_before_the_oom_killer(trouble_file: Path) -> None:
    trouble_file.write_text("worker:hoard")
    slow = BurstPlan(max_s=20.0, min_s=20.0, relative_error=0.0001, deadline_s=60.0)
    probe = ProcessProbe(
        payload_of(Trouble(trouble_file, nap_s=0.01)), inspect_machine(), memory_budget_bytes=1500 << 20
    )
    try:
        failure = probe.burst(LoaderConfig(num_workers=1), slow)
    finally:
        probe.close()
        trouble_file.write_text("")

    assert isinstance(failure, Failure)
    assert failure.kind == "memory_guard"
    assert "max_host_memory" in failure.message


class HangsAtOnce(Trouble):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(3600)
        raise AssertionError


def test_a_dataset_that_hangs_at_its_first_sample_is_named_after_the_start_deadline(tmp_path: Path) -> None:
    from autotune_loader.values.errors import WorkloadError

    probe = ProcessProbe(payload_of(HangsAtOnce(tmp_path)), inspect_machine(), start_deadline_s=8.0)
    try:
        with pytest.raises(WorkloadError, match="first_batch"):
            probe.start()
    finally:
        probe.close()


class AlarmAtTheEnd(MemoryGuard):
    """Finds the memory limit passed just as the burst has ended."""

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._on_limit()


def test_an_alarm_at_the_end_of_a_burst_does_not_blame_the_next(
    probe: ProcessProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_memory_budget_bytes", 1 << 40)
        patch.setattr(runner, "MemoryGuard", AlarmAtTheEnd)
        failure = probe.burst(TWO_WORKERS, QUICK)

    assert isinstance(failure, Failure)
    assert failure.kind == "memory_guard"
    assert isinstance(probe.burst(TWO_WORKERS, QUICK), Measurement)
