"""What a burst in a process of its own tells of real workers, which are as in training: shapes, never rates."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.worker_checks import workers_repeat_each_other
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ONE_WORKER, TWO_WORKERS, measured, opened, workload

pytestmark = pytest.mark.process

SHORT = BurstPlan(min_s=0.3, max_s=0.3, relative_error=0.01, deadline_s=60.0)
START_NAP_S = 0.5
MIB = 1 << 20
HELD = []


class Rows(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.zeros(64)


def hold_50_mib(worker):
    HELD.append(b"x" * (50 * MIB))


def nap(worker):
    time.sleep(START_NAP_S)


def test_workers_of_50_mib_each_are_reported_to_10_percent_and_their_start_apart():
    # GIVEN bursts of a third of a second, with workers that hold 50 MiB each, and with such that start slowly
    with (
        opened(workload(Rows(), 8, worker_init_fn=hold_50_mib)) as holding,
        # opened before either is measured: what is in both, such as torch's libraries, counts by halves in each
        opened(workload(Rows(), 8, worker_init_fn=nap)) as plain,
    ):
        for config, plan in (
            (ONE_WORKER, SHORT),
            (TWO_WORKERS, SHORT),
            (TWO_WORKERS, replace(SHORT, whole_epochs=True)),
        ):
            large, small = (measured(each.probe, config, plan) for each in (holding, plain))
            # THEN memory is that of the workers, which live while it is read, with shared pages counted once each too
            for name in ("pss_bytes", "rss_bytes"):
                more = getattr(large.memory, name) - getattr(small.memory, name)
                assert more == pytest.approx(config.num_workers * 50 * MIB, rel=0.1)
            assert small.memory.pss_bytes < 0.8 * small.memory.rss_bytes
            # THEN the start of workers, which is once an epoch, is no part of the rate
            assert small.first_batch_s > START_NAP_S
            assert plan.whole_epochs or small.samples / small.samples_per_s.value < START_NAP_S


class AsInTraining(Rows):
    """Works in workers of the fork server alone, which hand over by the file system, and whose dataset is its own."""

    def __init__(self):
        self._epoch, self._inner, self._ends = 0, "mine", "mine too"

    def __getitem__(self, index):
        if get_worker_info() is not None:
            assert b"forkserver" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
            assert torch.multiprocessing.get_sharing_strategy() == "file_system"
            dataset = get_worker_info().dataset
            dataset._epoch += 1
            assert dataset._epoch > 0
            assert (dataset._inner, dataset._ends) == ("mine", "mine too")
        return super().__getitem__(index)


@pytest.fixture
def _threads_and_a_fork_server():
    """Python 3.14 starts workers through a fork server unless told otherwise."""
    before = multiprocessing.get_start_method(allow_none=True), torch.get_num_threads()
    multiprocessing.set_start_method("forkserver", force=True)
    torch.set_num_threads(4)
    yield
    multiprocessing.set_start_method(before[0], force=True)
    torch.set_num_threads(before[1])


@pytest.mark.usefixtures("_threads_and_a_fork_server")
def test_threads_start_method_and_workers_of_the_program_are_what_is_measured():
    # GIVEN a process that has run a multi-threaded step, after which a forked child's first one would hang
    def threaded_step(model, batch):
        torch.rand(400, 400) @ torch.rand(400, 400)

    threaded_step(None, None)
    # THEN one in the probe comes back, and its workers come from a fork server
    with opened(workload(AsInTraining(), 8, TrainingSide(train_step=threaded_step))) as probe:
        found = measured(probe.probe, LoaderConfig(num_workers=1, sharing_strategy="file_system"), SHORT)
    assert found.step_s > 0
    assert found.bad_samples == ()


class Shuffled(IterableDataset):
    """In an order of its own, a bit changed; shared out by worker where it is asked to."""

    def __init__(self, is_sharded):
        self.is_sharded = is_sharded

    def __iter__(self):
        info = get_worker_info()
        own = np.random.default_rng(info.seed if info else 0)
        for number in own.permutation(range(info.id if self.is_sharded and info else 0, 20, 2)):
            yield torch.tensor(number + random.random() + np.random.rand()) + torch.rand(())  # noqa: NPY002


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_stream_that_shuffles_and_augments_is_no_less_repeated(is_sharded):
    data = DataSide(dataset=Shuffled(is_sharded), batch_size=4, worker_init_fn=torch.manual_seed)
    assert workers_repeat_each_other(data, 0.01) is not is_sharded


# Limits of the machine, made small. Two workers with two batches of 8 MiB each cannot be held by 16 MiB of shared memory;
# containers have little. Batches that are kept hold a descriptor for each of their tensors.
BURST = """
import resource, sys
import torch
from autotune_loader.pipeline.workload import TrainingSide
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ALONE, TWO_WORKERS, measured, opened, workload

KEPT = []

def apart(samples):
    return [sample.clone() for sample in samples]

def keep(model, batch):
    KEPT.append(batch)

if sys.argv[1] == "descriptors":
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    what = workload(torch.zeros(256, 4), collate_fn=apart, training=TrainingSide(train_step=keep))
else:
    what = workload(torch.zeros(1 << 19).expand(256, -1))
with opened(what, "inline" if sys.argv[1] == "descriptors" else "process") as probe:
    failure = probe.probe.burst(TWO_WORKERS, BurstPlan(max_s=2.0, min_s=2.0, relative_error=0.0001, deadline_s=10.0))
    print(failure.kind, failure.message)
    if failure.kind == "shared_memory":
        measured(probe.probe, ALONE)
"""
SMALL_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh")


def can_mount():
    return shutil.which("unshare") and not subprocess.run([*SMALL_SHM, "true"], capture_output=True).returncode


@pytest.mark.skipif(not can_mount(), reason="mounting a small /dev/shm (unshare -m) is not permitted here")
def test_full_shared_memory_is_named_and_the_fix_is_given():
    command = [*SMALL_SHM, sys.executable, "-c", BURST, "shared memory"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("shared_memory")
    assert "--shm-size" in done.stdout


def test_too_few_descriptors_are_named(tmp_path, preloaded):
    (tmp_path / "burst.py").write_text(BURST)
    run = preloaded.start("burst.py", "descriptors", folder=tmp_path)

    assert run.wait(timeout=90) == 0, run.output
    assert run.output.startswith("descriptors")
    assert "ulimit -n" in run.output


def test_a_process_that_cannot_start_leaves_nothing(monkeypatch, tmp_path):
    def no_more(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", no_more)
    descriptors = set(Path("/proc/self/fd").iterdir())

    with pytest.raises(BlockingIOError), opened(workload(torch.zeros(8, 4)), "process"):
        pass

    assert not list(tmp_path.iterdir())
    assert set(Path("/proc/self/fd").iterdir()) == descriptors
