"""Trouble: a failing configuration is an answer of the right kind, in time; a sample that raises
ends the run and is named.

One probe process goes through all that processes can do; what kills it starts a new one.
"""

import contextlib
import ctypes
import os
import re
import resource
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import Dataset, IterableDataset, SequentialSampler, get_worker_info

from autotune_loader.bursts import bench
from autotune_loader.bursts.failures import deaths_of, failure_of, needs_new_process
from autotune_loader.bursts.parent import ProcessProbe, open_probe
from autotune_loader.bursts.protocol import Allowance, WarmupReport
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline import tracing
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.values import BurstPlan, WorkloadError
from tests.support import FakeClock
from tests.support.bursts import (
    ALONE,
    ONE_WORKER,
    TWO_WORKERS,
    Made,
    failed,
    measured,
    opened,
    run,
    workload,
)

FORKS = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
PLAN = BurstPlan(max_s=0.3, min_s=0.2, relative_error=0.01, deadline_s=60.0)
LONG = replace(PLAN, max_s=20.0, min_s=20.0)
"""However much later the second worker begins."""
FORKED = replace(TWO_WORKERS, multiprocessing_context="fork")  # the others start slowly


def of_pinning_thread(error):
    """An error as torch raises it in the main thread."""
    try:
        raise error
    except Exception:
        wrapped = ExceptionWrapper(where="in pin memory thread for device 0")
    with pytest.raises(type(error)) as caught:
        wrapped.reraise()
    return caught.value


def of_types(given):
    found = f"Input type ({given}) and weight type (torch.cuda.FloatTensor)"
    return RuntimeError(f"{found} should be the same")


def worker_that_ended(exitcode):
    return SimpleNamespace(pid=6161, exitcode=exitcode)


ASSERT = """CUDA error: device-side assert triggered
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below
might be incorrect.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
BUSY = "CUDA error: all CUDA devices are busy or unavailable"
SHM, NO_FILES, USER = "raise /dev/shm", "nvidia-modprobe -u -c 0", "user_exception"
NEW, SAME = True, False
"""Whether the next burst needs another process."""


@pytest.mark.parametrize(("error", "kind", "says", "process"), [
    (OSError(28, "No space left on device", "/tmp/x"), USER, " (a disk is full", SAME),
    (OSError(28, "No space left on device", "/dev/shm/torch_1"), "shared_memory", SHM, SAME),
    # a second process does not fit the GPU
    (torch.OutOfMemoryError("Allocation on device 0 ..."), "device_memory", "train_step=0.05", NEW),
    (RuntimeError(BUSY), USER, "train_step=0.05", NEW),
    (RuntimeError("CUDA unknown error - this may be due to ..."), USER, NO_FILES, SAME),
    (RuntimeError("No CUDA GPUs are available"), USER, NO_FILES, SAME),
    # the device is lost
    (RuntimeError(ASSERT), USER, "", NEW),
    (of_pinning_thread(RuntimeError(ASSERT)), USER, "", NEW),
    (of_pinning_thread(getattr(torch, "AcceleratorError", RuntimeError)(ASSERT)), USER, "", NEW),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access"), USER, "", NEW),
    # of a convolution: a batch that was not moved, and one in another precision
    (of_types("torch.FloatTensor"), USER, "moves it to the device", SAME),
    (of_types("torch.cuda.HalfTensor"), USER, "should be the same", SAME),
    # the exit codes of workers tell what torch does not hear below a fork server
    (worker_that_ended(3), "crashed", "a worker died", SAME),
    (worker_that_ended(-signal.SIGBUS), "shared_memory", SHM, SAME),
])  # fmt: skip
def test_an_error_says_what_helps(error, kind, says, process):
    deaths = []
    if not isinstance(error, Exception):
        deaths = deaths_of([error])
        error = RuntimeError("DataLoader worker (pid(s) 6161) exited unexpectedly")
    failure = failure_of(error, "batches", deaths)
    assert failure.kind == kind
    assert says in failure.message
    assert kind == "shared_memory" or SHM not in failure.message
    assert ("moves it" in failure.message) is (says == "moves it to the device")
    assert needs_new_process(failure) is process
    assert failure.retryable is (kind == "crashed")


FRAMES = '  File "a.py", line 1\n    a()\n' * 2


@pytest.mark.parametrize(("text", "message"), [
    ("x" * 591, "OSError: " + "x" * 591),
    ("x" * 592, "OSError: " + "x" * 590 + "…"),
    ("Caught in a folder \nand more", "OSError: Caught in a folder"),
    (f"Caught KeyError in worker\nOriginal Traceback\n{FRAMES}KeyError: 7\nmore", "KeyError: 7"),
])  # fmt: skip
def test_a_message_is_one_line_that_fits(text, message):
    assert failure_of(OSError(text), "batches").message == message


HOARD = []


def allocate_too_much():
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    torch.empty(64 << 30, dtype=torch.uint8)


def hoard():
    """16 MiB that nobody shares."""
    HOARD.append(bytearray(os.urandom(1 << 16) * 256))


def fail(error):
    raise error


TROUBLES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: ctypes.string_at(0),
    "hang": lambda: time.sleep(3600),
    "allocate": allocate_too_much,
    "hoard": hoard,
    "cuda": lambda: fail(RuntimeError("Cannot re-initialize CUDA in forked subprocess")),
    "files": lambda: fail(OSError(24, "Too many open files")),
}


class Trouble(Dataset):
    """In trouble after `fine` samples, in a worker or in the main process: the file says, say,
    "worker:kill"."""

    def __init__(self, path, nap_s, fine):
        self.path, self.nap_s, self.fine = path, nap_s, fine
        self.read, self.said = 0, ""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(self.nap_s)
        said = self.path.read_text()
        self.read = self.read + 1 if said == self.said else 0
        self.said = said
        where, _, what = said.partition(":")
        is_here = (where == "worker") == (get_worker_info() is not None)
        if what and is_here and self.read >= self.fine:
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
    # Torch's compiler may make its cache there, of this process.
    left = [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]
    assert left == [], "whatever is killed leaves no file"


@pytest.fixture
def probe(shared, trouble):
    yield shared
    trouble.write_text("")
    measured(shared, TWO_WORKERS, PLAN)  # the study must go on after any failure


@pytest.mark.process
@pytest.mark.parametrize(("what", "kind", "says"), [
    ("worker:kill", "oom_killed", "OOM killer"),
    ("worker:allocate", "out_of_memory", "allocate memory"),
    ("worker:segfault", "crashed", "a worker died"),
    ("worker:files", "descriptors", "ulimit -n"),
    ("worker:cuda", "user_exception", "0 workers"),
    ("main:segfault", "crashed", "SIGSEGV"),
    ("main:kill", "oom_killed", "OOM killer"),
])  # fmt: skip
def test_trouble_is_classified_at_once(probe, trouble, what, kind, says):
    trouble.write_text(what)
    begun = time.monotonic()
    config = ALONE if what.startswith("main") else TWO_WORKERS
    failure = failed(probe, kind, config, LONG)
    assert says in failure.message
    assert failure.retryable is (kind in ("crashed", "descriptors"))
    assert time.monotonic() - begun < PLAN.deadline_s / 2


def has_members(group):
    """Whether there is a process of a group, whose leader may have ended."""
    with contextlib.suppress(ProcessLookupError):
        return os.killpg(group, 0) is None
    return False


@pytest.mark.process
def test_a_hang_in_a_worker_leaves_no_process(probe, trouble):
    trouble.write_text("worker:hang")
    begun, group = time.monotonic(), probe._child.pid
    # WHEN it is broken by the deadline
    assert failed(probe, "deadline", FORKED, replace(PLAN, deadline_s=3.0)).phase == "batches"
    while has_members(group):
        assert time.monotonic() - begun < 10.0
        time.sleep(0.05)


@pytest.mark.process
def test_the_memory_guard_stops_a_burst(trouble):
    trouble.write_text("worker:hoard")
    with open_probe(job(trouble, nap_s=0.01), inspect_machine(), 1500 << 20) as found:
        assert "fewer workers" in failed(found.probe, "memory_guard", ONE_WORKER, LONG).message


@pytest.mark.process
@FORKS
def test_a_hang_at_the_first_sample_is_named(trouble):
    trouble.write_text("main:hang")
    probe = ProcessProbe(job(trouble, fine=0), None, start_s=3.0)
    with contextlib.closing(probe), pytest.raises(WorkloadError, match="first_batch"):
        probe.start()


ALL = BurstPlan(max_s=0.6, min_s=0.6, relative_error=1e-6, deadline_s=60.0)


def broken(bad, only_in_workers=False):
    def make(key):
        if key == bad and (get_worker_info() is not None or not only_in_workers):
            raise ValueError(f"broken image {key}\nand more of it")
        return torch.zeros(1)

    return Made(make)


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(10.0)
        raise OSError("connection lost")


EXITS = Made(lambda key: sys.exit(3) if key == 21 else key)
UNLIKE = Made(lambda key: torch.zeros(2 if key == 42 else 1))
FIRST = {"sampler": range(64)}


@pytest.mark.process
@pytest.mark.parametrize(("dataset", "parts", "config", "says"), [
    (broken(3), FIRST, ALONE, "sample 3 raises ValueError: broken image 3"),  # in the first batch
    (broken(33), {}, ONE_WORKER, "sample 33 raises ValueError: broken image 33"),
    (EXITS, {}, ALONE, "sample 21 raises SystemExit: 3"),
    pytest.param(UNLIKE, {}, ALONE, "RuntimeError: stack expects each", marks=pytest.mark.system),
    (Stream(), {}, ALONE, "the sample after 10 of a process's stream raises OSError"),
], ids=("first batch", "in a worker", "exit", "another shape", "stream"))  # fmt: skip
def test_a_sample_that_raises_is_named(dataset, parts, config, says):
    with pytest.raises(WorkloadError) as caught:
        run(workload(dataset, **parts), config, plan=ALL)
    assert says in caught.value.message
    to_do = "; training would fail there too: fix that sample, or leave it out of the dataset"
    assert caught.value.message.endswith(to_do)
    assert "autotune_loader/" not in caught.value.user_traceback


@pytest.mark.process
def test_what_raises_in_workers_is_their_failure():
    with opened(workload(broken(9, only_in_workers=True))) as probe:
        failure = failed(probe.probe, "user_exception", ONE_WORKER, ALL)
        assert "broken image 9, in a worker, and not when it is read again alone" in failure.message
        measured(probe.probe)


@pytest.mark.process
def test_no_burst_reads_what_another_has_cached():
    cache = {}

    def remembered(key):
        time.sleep(0.0 if key in cache else 0.005)
        return cache.setdefault(key, torch.zeros(1))

    plan = BurstPlan(max_s=0.2, min_s=0.1, relative_error=1e-6)
    _, bursts = run(workload(Made(remembered)), *[ALONE] * 3, plan=plan)
    # THEN samples are slow in each, but the first, which the probe itself has read: later on a
    # burst may come back to what it has read itself
    for each in bursts:
        took = sum(trace.fetch_end - trace.fetch_start for trace in each.traces[:4])
        assert took >= 15 * 0.005


class Shuffled(IterableDataset):
    """In an order of its own, a bit changed; shared out by worker where it is asked to."""

    def __init__(self, is_sharded):
        self.is_sharded = is_sharded

    def __iter__(self):
        info = get_worker_info()
        own = np.random.default_rng(info.seed if info else 0)
        for number in own.permutation(range(info.id if self.is_sharded and info else 0, 20, 2)):
            yield torch.tensor(number + np.random.rand()) + torch.rand(())  # noqa: NPY002


class Shared(IterableDataset):
    """Shares its rows out among workers, and has none without."""

    def __init__(self, raises):
        self.raises = raises

    def __iter__(self):
        info = get_worker_info()
        if info is None and not self.raises:
            return
        yield from map(float, range(info.id, 64, info.num_workers))


SEEDED = {"worker_init_fn": torch.manual_seed}
NOT_SENT = {"collate_fn": lambda samples: 0, "multiprocessing_context": "spawn"}
NEEDS_ONE = "cannot be read without workers"


@pytest.mark.process
@FORKS
@pytest.mark.parametrize(("dataset", "parts", "says", "workers"), [
    (Shuffled(False), SEEDED, "delivers the same samples", (0, 1)),
    (Shuffled(True), SEEDED, "", (0, None)),
    (Shared(raises=True), {}, NEEDS_ONE, (1, None)),
    pytest.param(Shared(raises=False), {}, NEEDS_ONE, (1, None), marks=pytest.mark.system),
    (Made(float), NOT_SENT, "sent the collate_fn", (0, 0)),
], ids=("repeated", "sharded", "raises", "is empty", "not sent"))  # fmt: skip
def test_what_the_first_batch_tells_is_noted(dataset, parts, says, workers):
    configs = [ONE_WORKER, TWO_WORKERS] if says == NEEDS_ONE else []
    probe, _ = run(workload(dataset, **parts), *configs)
    assert re.search(says, " ".join(probe.notes))
    assert (probe.warmup.least_workers, probe.warmup.most_workers) == workers


@pytest.fixture
def opened_before():
    """A file and a handle."""
    handle = contextlib.closing(sqlite3.connect(":memory:"))
    with Path(__file__).open("rb", buffering=0) as file, handle as index:
        yield file, index


ONE = {"batch_size": None}  # at a time
NO_TENSOR = {"batch_bytes": 0, "batch_tensors": 0}
IS_ON = {"on_accelerator": True, "most_workers": 0}
TELLS = {
    # a sample, parts of the loader: fields of the report, and what its note says
    "numbers": (float, {}, {}, ""),
    "pairs": (lambda key: (torch.zeros(3), 0.0), {}, {"batch_bytes": 80, "batch_tensors": 2}, ""),
    "a batch": (lambda key: torch.ones(3, 2), ONE, {"samples": 3, "batch_bytes": 24}, ""),
    "texts": (str, ONE, {"samples": 1, **NO_TENSOR, "counts_batches": True}, "rates are batches/s"),
    "lists": (lambda key: ["a"], ONE, {"samples": 1, **NO_TENSOR}, ""),
    "a device": (lambda key: torch.ones(2, device="meta"), {}, IS_ON, ""),
    "an open file": (None, {}, {"most_workers": 0}, rf"Timed reads from {__file__}, which"),
    "a handle": (float, {"index": 1}, {"most_workers": 0}, "^dataset.index is an open Connec"),
    "a lock": (lambda key: threading.Lock(), {"collate_fn": list}, {**NO_TENSOR, "most_workers": 0},
        "^A batch cannot be pickled .TypeError: .*and none are tried"),
}  # fmt: skip


@pytest.mark.parametrize(("sample", "parts", "told", "says"), TELLS.values(), ids=TELLS)
@pytest.mark.parametrize(("sample_s", "more_s"), [(0.5, 9.0), (0.6, 9.0), (0.5, 28.0), (0.5, 30.0)])
def test_what_the_first_batch_tells_is_exact(
    sample, parts, told, says, sample_s, more_s, opened_before, monkeypatch
):
    file, handle = opened_before

    class Timed(Made):
        """The first sample takes so many seconds longer than others."""

        def __getitem__(self, key):
            clock.sleep(sample_s + (left.pop() if left else 0.0))
            return float(len(file.read(1))) if sample is None else sample(key)

    clock, left, rows = FakeClock(1000.0), [more_s], Timed(sample)
    for module in (bench, tracing):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    # Other processes may write to files of the test runner's.
    monkeypatch.setattr(bench, "descriptors", lambda first: [file.fileno()])
    parts = {"batch_size": 4, "multiprocessing_context": "fork", **parts}
    rows.index = handle if parts.pop("index", False) else None
    side = DataSide.from_dataset(rows, **parts)
    own = bench.Bench(side, TrainingSide, lambda: side, lambda message: None, 0, Allowance())
    seen, usual_s = own.look()[0].ready, sample_s * (side.batch_size or 1)
    fetch_s = usual_s + (more_s if usual_s + more_s > 30.0 else 0.0)  # then no other is looked at
    assert 0 <= seen.first_fetch_cpu_s < 1
    told = {"samples": 4, "batch_bytes": 32, "batch_tensors": 1, "on_accelerator": False, **told}
    known = WarmupReport(**told, first_fetch_s=0, first_fetch_cpu_s=0, first_batch_s=0)
    times = {name: getattr(known, name) for name in ("first_fetch_s", "first_batch_s")}
    assert replace(seen, first_fetch_cpu_s=0, notes=(), **times) == known
    assert (seen.first_fetch_s, seen.first_batch_s) == pytest.approx((fetch_s, more_s + usual_s))
    is_slow = f"A batch takes {fetch_s:.0f} s to load" in " ".join(seen.notes)
    assert is_slow == (fetch_s > 2.0)
    assert len(seen.notes) == is_slow + bool(says)
    assert re.search(says, "\n".join(seen.notes), re.MULTILINE)


class OfLostDevice:
    """As memory of a device, or pinned memory, after a kernel has failed."""

    def __del__(self):
        os.abort()


@pytest.mark.process
@FORKS
def test_a_lost_device_costs_one_process(tmp_path):
    demand = tmp_path / "demand"

    def step(model, batch):
        held = OfLostDevice() if demand.exists() else None
        if held is not None:
            raise RuntimeError(ASSERT)

    job = workload([1.0] * 64, training=TrainingSide(train_step=step))
    says = "device-side assert triggered"
    with opened(job) as found:
        demand.touch()
        # THEN it is answered before anything is dropped
        with pytest.raises(WorkloadError, match=says):
            found.probe.burst(ONE_WORKER, PLAN)
        demand.unlink()
        measured(found.probe, ONE_WORKER, PLAN)
    # AND in the warm-up, too
    demand.touch()
    with pytest.raises(WorkloadError, match=says), opened(job):
        pass
