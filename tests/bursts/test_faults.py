"""Real processes in real trouble: a failing configuration is an answer of the right kind, in time, and the next one works.

One probe process goes through all of it; what kills it starts a new one.
"""

import contextlib
import ctypes
import os
import resource
import signal
import tempfile
import time
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler, get_worker_info

from autotune_loader.bursts.failures import deaths_of, failure_of, needs_new_process
from autotune_loader.bursts.parent import ProcessProbe, open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import BurstPlan
from tests.support.bursts import ALONE, ONE_WORKER, TWO_WORKERS, failed, measured, opened, workload

PLAN = BurstPlan(max_s=0.5, min_s=0.3, relative_error=0.01, deadline_s=30.0)
FORKED = replace(TWO_WORKERS, multiprocessing_context="fork")  # the others start slowly
SHM = "raise /dev/shm"


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


HOARD = []


def allocate_too_much():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    torch.empty(64 << 30, dtype=torch.uint8)


TROUBLES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(3600),
    "allocate": allocate_too_much,
    "hoard": lambda: HOARD.append(bytearray(os.urandom(1 << 16) * 256)),  # 16 MiB that nobody shares
    "cuda": RuntimeError("Cannot re-initialize CUDA in forked subprocess"),
    "oom": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "files": OSError(24, "Too many open files"),
}


class Trouble(Dataset):
    """In trouble after `fine` samples, in a worker or in the main process: the file says, say, "worker:kill"."""

    def __init__(self, path, nap_s, fine):
        self.path, self.nap_s, self.fine = path, nap_s, fine
        self.read, self.said = 0, ""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(self.nap_s)
        said = self.path.read_text()
        self.said, self.read = said, 0 if said != self.said else self.read + 1
        where, _, what = said.partition(":")
        if what and self.read >= self.fine and (where == "worker") == (get_worker_info() is not None):
            if isinstance(TROUBLES[what], Exception):
                raise TROUBLES[what]
            TROUBLES[what]()
        return torch.zeros(4)


def job(path, nap_s=0.001, fine=20):
    dataset = Trouble(path, nap_s, fine)
    return workload(dataset, sampler=SequentialSampler(dataset))


@pytest.fixture(scope="module")
def trouble(tmp_path_factory):
    """The file that says what trouble there is to be."""
    path = tmp_path_factory.mktemp("trouble") / "trouble"
    path.write_text("")
    return path


@pytest.fixture(scope="module")
def shared(trouble, tmp_path_factory, preloaded):  # the last has files of its own
    folder = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setenv("TMPDIR", str(folder))
        with opened(job(trouble)) as found:
            yield found.probe
    assert list(folder.iterdir()) == [], "whatever is killed leaves no file"


@pytest.fixture
def probe(shared, trouble):
    yield shared
    trouble.write_text("")
    measured(shared, TWO_WORKERS, PLAN)  # the study must go on after any failure


@pytest.mark.process
@pytest.mark.parametrize(
    ("what", "kind", "says"),
    [
        ("worker:kill", "oom_killed", "OOM killer"),
        ("worker:exit", "crashed", "exited unexpectedly"),
        ("worker:allocate", "out_of_memory", "allocate memory"),
        ("worker:segfault", "crashed", "a worker died"),
        ("worker:oom", "device_memory", "smaller batch"),
        ("worker:files", "descriptors", "ulimit -n"),
        ("worker:cuda", "user_exception", "0 workers"),
        ("main:segfault", "crashed", "SIGSEGV"),
        ("main:kill", "oom_killed", "OOM killer"),
    ],
)
def test_trouble_is_classified_at_once(probe, trouble, what, kind, says):
    trouble.write_text(what)
    begun = time.monotonic()
    failure = failed(probe, kind, ALONE if what.startswith("main") else TWO_WORKERS, PLAN)
    assert says in failure.message
    assert failure.retryable is (kind in ("crashed", "descriptors"))
    assert time.monotonic() - begun < PLAN.deadline_s / 2


def members_of(group):
    """Processes of a group, whose leader may have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if group in (os.getpgid(process.pid), os.getsid(process.pid)):
                found.append(process.pid)
    return found


@pytest.mark.process
def test_a_hang_in_a_worker_is_broken_by_the_deadline_and_leaves_no_process(probe, trouble):
    trouble.write_text("worker:hang")
    begun, group = time.monotonic(), probe._child.pid
    assert failed(probe, "deadline", FORKED, replace(PLAN, deadline_s=2.0)).phase == "batches"
    assert time.monotonic() - begun < 8.0
    deadline = time.monotonic() + 5
    while members_of(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members_of(group) == []


@pytest.mark.process
def test_the_memory_guard_stops_a_burst_before_the_oom_killer(trouble):
    trouble.write_text("worker:hoard")
    slow = BurstPlan(max_s=20.0, min_s=20.0, relative_error=0.0001, deadline_s=60.0)
    with open_probe(job(trouble, nap_s=0.01), inspect_machine(), 1500 << 20) as found:
        assert "fewer workers" in failed(found.probe, "memory_guard", ONE_WORKER, slow).message


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_dataset_that_hangs_at_its_first_sample_is_named_after_the_start_deadline(trouble):
    trouble.write_text("main:hang")
    probe = ProcessProbe(job(trouble, fine=0), start_s=5.0)
    with contextlib.closing(probe), pytest.raises(WorkloadError, match="first_batch"):
        probe.start()
