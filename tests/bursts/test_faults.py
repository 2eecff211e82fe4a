"""Real processes in real trouble: a failing configuration is an answer of the right kind, in time, and the next one works.

One probe process goes through all of it; what kills it starts a new one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils.data import SequentialSampler
from trouble import Trouble

from autotune_loader.bursts.failures import deaths_of, failure_of, needs_new_process
from autotune_loader.bursts.packing import Payload
from autotune_loader.bursts.parent import ProcessProbe
from autotune_loader.bursts.settings import Settings
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BurstPlan
from tests.support.bursts import ALONE, ONE_WORKER, TWO_WORKERS, failed, measured, workload

PLAN = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=30.0)
SHORT_DEADLINE = replace(PLAN, deadline_s=2.0)
FORKED = replace(TWO_WORKERS, multiprocessing_context="fork")  # the others start slowly
SHM = "raise /dev/shm"


def members_of(group):
    """Processes of a group, whose leader may have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if group in (os.getpgid(process.pid), os.getsid(process.pid)):
                found.append(process.pid)
    return found


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (OSError(28, "No space left on device", "/tmp/cache/x"), "user_exception", "a disk is full"),
        (OSError(28, "No space left on device", "/dev/shm/torch_1"), "shared_memory", SHM),
        # a second process does not fit the GPU
        (torch.OutOfMemoryError("Allocation on device 0 would exceed ..."), "device_memory", "train_step=0.05"),
        (RuntimeError("CUDA error: all CUDA devices are busy or unavailable"), "user_exception", "train_step=0.05"),
        (RuntimeError("CUDA error: device-side assert triggered"), "user_exception", "device-side assert"),
        # the exit codes of workers tell what torch does not hear below a fork server
        (3, "crashed", "a worker died"),
        (-signal.SIGKILL, "oom_killed", "OOM killer"),
        (-signal.SIGBUS, "shared_memory", SHM),
    ],
)
def test_an_error_is_taken_for_what_it_is_and_says_what_helps(error, kind, says):
    deaths = []
    if isinstance(error, int):
        deaths = deaths_of([SimpleNamespace(pid=6161, exitcode=error)])
        error = RuntimeError("DataLoader worker (pid(s) 6161) exited unexpectedly")
    failure = failure_of(error, "batches", deaths)
    assert failure.kind == kind
    assert says in failure.message
    assert kind == "shared_memory" or SHM not in failure.message
    assert needs_new_process(failure) is ("CUDA error" in str(error) or kind == "device_memory")


def probe_of(dataset, **limits):
    payload = Payload(workload(dataset, sampler=SequentialSampler(dataset)), Settings.read(), 1 << 30)
    return ProcessProbe(payload, **limits)


@pytest.fixture(scope="module")
def trouble_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("trouble") / "trouble"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def shared(trouble_file, tmp_path_factory, preloaded):  # the last has files of its own
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        probe = probe_of(Trouble(trouble_file))
        probe.start()
        yield probe
        probe.close()
    assert list(folder.iterdir()) == [], "whatever is killed leaves no file"


@pytest.fixture
def probe(shared, trouble_file):
    yield shared
    trouble_file.write_text("")
    measured(shared, TWO_WORKERS, PLAN)  # the study must go on after any failure


@pytest.mark.process
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
def test_trouble_in_a_worker_is_classified(probe, trouble_file, trouble, kind, says):
    trouble_file.write_text(f"worker:{trouble}")
    assert says in failed(probe, kind, TWO_WORKERS, PLAN).message


@pytest.mark.process
def test_a_hang_in_a_worker_is_broken_by_the_deadline_and_leaves_no_process(probe, trouble_file):
    trouble_file.write_text("worker:hang")
    begun, group = time.monotonic(), probe._child.pid
    assert failed(probe, "deadline", FORKED, SHORT_DEADLINE).phase == "batches"
    assert time.monotonic() - begun < 4 * SHORT_DEADLINE.deadline_s
    deadline = time.monotonic() + 5
    while members_of(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members_of(group) == []


@pytest.mark.process
@pytest.mark.parametrize(
    ("trouble", "kind", "says"), [("segfault", "crashed", "SIGSEGV"), ("kill", "oom_killed", "OOM killer")]
)
def test_the_death_of_the_probe_process_is_noticed_at_once(probe, trouble_file, trouble, kind, says):
    trouble_file.write_text(f"main:{trouble}")
    begun = time.monotonic()
    failure = failed(probe, kind, ALONE, PLAN)
    assert says in failure.message
    assert failure.retryable is (kind == "crashed")
    assert time.monotonic() - begun < PLAN.deadline_s / 2


@pytest.mark.process
def test_the_memory_guard_stops_a_burst_before_the_oom_killer(trouble_file):
    trouble_file.write_text("worker:hoard")
    slow = BurstPlan(max_s=20.0, min_s=20.0, relative_error=0.0001, deadline_s=60.0)
    with contextlib.closing(probe_of(Trouble(trouble_file, nap_s=0.01), memory_budget_bytes=1500 << 20)) as probe:
        assert "fewer workers" in failed(probe, "memory_guard", ONE_WORKER, slow).message


@pytest.mark.process
def test_a_dataset_that_hangs_at_its_first_sample_is_named_after_the_start_deadline(trouble_file):
    trouble_file.write_text("main:hang")
    named = pytest.raises(WorkloadError, match="first_batch")
    with contextlib.closing(probe_of(Trouble(trouble_file, fine=0), start_s=5.0)) as probe, named:
        probe.start()
