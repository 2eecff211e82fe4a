"""Real processes in real trouble: a failing configuration is an answer of the right kind, in time, and the next one works.

One probe process goes through all of it; what kills it starts a new one.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler
from trouble import Trouble

from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.processes import process_group_members
from autotune_loader.probe.failures import deaths_of, failure_of
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ALONE, ONE_WORKER, TWO_WORKERS, failed, measured, workload

pytestmark = pytest.mark.process

PLAN = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=30.0)
SHORT_DEADLINE = replace(PLAN, deadline_s=2.0)
FORKED = replace(TWO_WORKERS, multiprocessing_context="fork")  # the others start slowly


def probe_of(dataset: Any, **limits: Any) -> ProcessProbe:
    payload = Payload.of(workload(dataset, sampler=SequentialSampler(dataset)), 1 << 30)
    return ProcessProbe(payload, inspect_machine(), **limits)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ProcessProbe, Path]]:
    path = tmp_path_factory.mktemp("trouble") / "trouble"
    path.write_text("")
    probe = probe_of(Trouble(path))
    probe.start()
    yield probe, path
    probe.close()


@pytest.fixture
def probe(shared: tuple[ProcessProbe, Path]) -> Iterator[ProcessProbe]:
    probe, path = shared
    yield probe
    path.write_text("")
    measured(probe, TWO_WORKERS, PLAN)  # the study must go on after any failure


@pytest.fixture
def make(shared: tuple[ProcessProbe, Path]) -> Callable[[str], None]:
    """Makes trouble, such as "worker:kill"."""
    return shared[1].write_text


@pytest.mark.parametrize(
    ("trouble", "kind", "says"),
    [
        ("kill", "oom_killed", "OOM killer"),
        ("exit", "crashed", "exited unexpectedly"),
        ("allocate", "out_of_memory", "allocate memory"),
        ("segfault", "crashed", "a worker died"),
        ("oom", "device_memory", "smaller batch"),
        ("files", "descriptors", "ulimit -n"),
        ("cuda", "user_exception", "0 workers"),
    ],
)
def test_trouble_in_a_worker_is_classified(probe: ProcessProbe, make: Any, trouble: str, kind: Any, says: str) -> None:
    make(f"worker:{trouble}")

    assert says in failed(probe, kind, TWO_WORKERS, PLAN).message


@pytest.mark.parametrize(("code", "kind"), [(3, "crashed"), (-9, "oom_killed"), (-7, "shared_memory")])
def test_exit_codes_tell_what_torch_does_not_hear_below_a_fork_server(code: int, kind: str) -> None:
    worker: Any = SimpleNamespace(pid=6161, exitcode=code)
    error = RuntimeError("DataLoader worker (pid(s) 6161) exited unexpectedly")

    assert failure_of(error, "batches", deaths_of([worker])).kind == kind


def test_a_hang_in_a_worker_is_broken_by_the_deadline_and_leaves_no_process(probe: ProcessProbe, make: Any) -> None:
    make("worker:hang")
    begun, group = time.monotonic(), probe._child.pid if probe._child is not None else 0

    assert failed(probe, "deadline", FORKED, SHORT_DEADLINE).phase == "batches"

    assert time.monotonic() - begun < 4 * SHORT_DEADLINE.deadline_s
    deadline = time.monotonic() + 5
    while process_group_members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert group
    assert process_group_members(group) == ()


@pytest.mark.parametrize(
    ("trouble", "kind", "says"), [("segfault", "crashed", "SIGSEGV"), ("kill", "oom_killed", "OOM killer")]
)
def test_the_death_of_the_probe_process_is_noticed_at_once(
    probe: ProcessProbe, make: Any, trouble: str, kind: Any, says: str
) -> None:
    make(f"main:{trouble}")
    begun = time.monotonic()

    failure = failed(probe, kind, ALONE, PLAN)

    assert says in failure.message
    assert failure.retryable is (kind == "crashed")
    assert time.monotonic() - begun < PLAN.deadline_s / 2


def test_whatever_is_killed_leaves_no_file(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    probe = probe_of(Trouble(shared[1]))
    try:
        for trouble, kind, config in (("worker:hang", "deadline", FORKED), ("main:kill", "oom_killed", ALONE)):
            make(trouble)
            failed(probe, kind, config, SHORT_DEADLINE)
    finally:
        probe.close()
        make("")

    assert list(tmp_path.iterdir()) == []


def test_the_memory_guard_stops_a_burst_before_the_oom_killer(make: Any, shared: Any) -> None:
    make("worker:hoard")
    slow = BurstPlan(max_s=20.0, min_s=20.0, relative_error=0.0001, deadline_s=60.0)
    probe = probe_of(Trouble(shared[1], nap_s=0.01), memory_budget_bytes=1500 << 20)
    try:
        failure = failed(probe, "memory_guard", ONE_WORKER, slow)
    finally:
        probe.close()
        make("")

    assert "max_host_memory" in failure.message


class HangsAtOnce(Trouble):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(3600)
        raise AssertionError


def test_a_dataset_that_hangs_at_its_first_sample_is_named_after_the_start_deadline(tmp_path: Path) -> None:
    probe = probe_of(HangsAtOnce(tmp_path), start_deadline_s=5.0)
    try:
        with pytest.raises(WorkloadError, match="first_batch"):
            probe.start()
    finally:
        probe.close()
