"""Inline, where the bursts run in the user's own process: it is never killed, nothing of it is changed, and nothing is left."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
import trouble as troubles
from torch.utils.data import Dataset, SequentialSampler, Subset, get_worker_info
from trouble import Trouble

from autotune_loader import TuningResult
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide
from autotune_loader.probe.burst import run_burst
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.step import build_step
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ALONE, ONE_WORKER, QUICK, failed, measured, opened, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

# A worker that is not forked has a torch of its own, which no budget here would hold.
FORKED = LoaderConfig(num_workers=1, multiprocessing_context="fork")
LONG = BurstPlan(max_s=30.0, min_s=30.0, relative_error=1e-6)
UNDISTURBED = BurstPlan(max_s=0.8, min_s=0.8, relative_error=1e-6)
WITH_DEADLINE = BurstPlan(max_s=30.0, min_s=30.0, relative_error=1e-6, deadline_s=1.0)


@pytest.fixture
def trouble_file(tmp_path):
    path = tmp_path / "trouble"
    path.write_text("")
    yield path
    troubles.HOARD.clear()


def inline(dataset, **limits):
    probe = InlineProbe(workload(dataset, sampler=SequentialSampler(dataset)), inspect_machine(), **limits)
    probe.start()
    return probe


@pytest.mark.parametrize(("where", "config"), [("worker", FORKED), ("main", ALONE)])
def test_the_memory_guard_ends_an_inline_burst_and_spares_this_process(trouble_file, where, config):
    # GIVEN a process that holds more than the budget anyway, which is no part of it
    budget = 200 << 20
    assert psutil.Process().memory_info().rss > budget
    probe = inline(Trouble(trouble_file, nap_s=0.005), memory_budget_bytes=budget)
    measured(probe, config, UNDISTURBED)
    # WHEN the dataset keeps 16 MiB of each sample, in this process or its worker
    trouble_file.write_text(f"{where}:hoard")
    begun, children = time.monotonic(), psutil.Process().children()
    # THEN the burst is ended, no worker is left, and the next one works
    assert "max_host_memory" in failed(probe, "memory_guard", config, LONG).message
    assert time.monotonic() - begun < LONG.max_s
    assert psutil.Process().children() == children
    trouble_file.write_text("")
    troubles.HOARD.clear()
    measured(probe, config)


@pytest.mark.parametrize(("trouble", "config"), [("main:wait", ALONE), ("worker:wait", FORKED), ("main:poll", ALONE)])
def test_a_hang_inline_ends_at_the_deadline(trouble_file, trouble, config):
    # GIVEN a dataset that hangs in this process or in a worker, and one that polls, in another thread
    probe = inline(Trouble(trouble_file))
    trouble_file.write_text(trouble)
    begun = time.monotonic()
    # WHEN a burst has a deadline THEN it ends there, nothing of it is left, and the thread goes on
    if trouble == "main:poll":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(failed, probe, "deadline", config, WITH_DEADLINE).result(timeout=troubles.HANG_S)
            assert pool.submit(sum, range(1000)).result(timeout=5) == 499500
    else:
        assert failed(probe, "deadline", config, WITH_DEADLINE).phase == "batches"
    assert time.monotonic() - begun < troubles.HANG_S / 4
    assert multiprocessing.active_children() == []


class WithHelper(Dataset):
    """As dataset and as sampler it starts a process on first use, in the main process alone."""

    process = None

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.use()
        return torch.tensor([float(index)])

    def __iter__(self):
        self.use()
        return iter(range(16))

    def use(self):
        if self.process is None and get_worker_info() is None:
            self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
            self.process.start()


# fork also where it is no default: the helper must not be started by a server of multiprocessing's
@pytest.mark.parametrize("whole_epochs", [False, True])
@pytest.mark.parametrize("config", [ALONE, FORKED])
def test_a_process_of_the_users_outlives_a_burst_and_the_workers_do_not(config, whole_epochs):
    helped = WithHelper()
    data, step = DataSide.from_dataset(helped, batch_size=4, sampler=helped), build_step(TrainingSide(), None)
    try:
        outcome = run_burst(data, step, config, replace(QUICK, whole_epochs=whole_epochs))
        assert isinstance(outcome, Measurement)
        assert helped.process.is_alive()
        assert multiprocessing.active_children() == [helped.process]
    finally:
        helped.process.kill()
        helped.process.join()


class Drawing(Dataset):
    """Draws from every kind of generator that it can hold, and from the global ones; also as a sampler of batches."""

    def __init__(self):
        self.torch, self.numpy = torch.Generator().manual_seed(11), np.random.default_rng(12)
        self.legacy, self.python = np.random.RandomState(13), random.Random(14)

    def __len__(self):
        return 16

    def __iter__(self):
        for first in range(0, 64, 4):
            self[first]
            yield list(range(first, first + 4))

    def __getitem__(self, index):
        own = self.numpy.random() + self.legacy.rand() + self.python.random()
        drawn = torch.rand((), generator=self.torch) + torch.rand(())
        return float(drawn) + own + np.random.rand() + random.random()  # noqa: NPY002

    def states(self):
        own = [
            self.torch.get_state().tolist(),
            self.numpy.bit_generator.state,
            self.legacy.get_state(),
            self.python.getstate(),
        ]
        return repr([own, torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()])  # noqa: NPY002


def test_every_random_state_is_as_it_was():
    # GIVEN generators wherever a user may keep them
    dataset, order = Drawing(), Drawing()
    before = dataset.states(), order.states()
    # WHEN bursts run without and with a worker THEN
    with opened(workload(Subset(dataset, range(64)), None, batch_sampler=order), "inline") as probe:
        for config in (ALONE, ONE_WORKER):
            measured(probe.probe, config)
    assert (dataset.states(), order.states()) == before


# Python 3.11 goes round and round under a profiler where an exception is taken back that was never sent.
WATCHED = """
import faulthandler, os, signal, sys, torch
from autotune_loader import tune

faulthandler.register(signal.SIGUSR2, file=sys.stdout)
sys.setprofile(lambda frame, event, argument: None)
options = {"isolation": "inline", "budget": 1, "max_trials": 1, "max_workers": 0, "progress": False}
print(tune([torch.zeros(3)] * 64, batch_size=4, **options).status)
os.kill(os.getpid(), signal.SIGUSR2)
print("lives")
"""


def test_a_profiler_and_a_handler_in_c_work_during_and_after_an_inline_run(tmp_path, preloaded):
    (tmp_path / "watched.py").write_text(WATCHED)
    run = preloaded.start("watched.py", folder=tmp_path)
    assert run.wait(timeout=60) == 0, run.output
    assert "File" in run.output, "the handler has printed where the process was"
    assert "lives" in run.output


# Its workers hang from their first sample on as soon as a trial is on disk: nothing ends them from inside.
SCRIPT = """
import signal, time, torch
from pathlib import Path
from torch.utils.data import DataLoader, Dataset, get_worker_info
from autotune_loader import tune

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored

class Hanging(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if get_worker_info() and Path("loader.json").exists():
            Path("hanging").touch()
            time.sleep(3600)
        time.sleep(0.001)
        return torch.tensor([float(index)])

if __name__ == "__main__":  # a fork server runs the script too
    result = tune(DataLoader(Hanging(), batch_size=4, num_workers=1), output="loader.json", max_workers=1,
                  isolation="inline", progress=False, budget=600)
    print("STATUS", result.status)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_an_inline_run_its_workers_go_and_the_file_loads(tmp_path, preloaded, orphaned_segments, number):
    # GIVEN an inline run that has a trial on disk and a worker that hangs
    before = orphaned_segments()
    (tmp_path / "train.py").write_text(SCRIPT)
    process = preloaded.start("train.py", folder=tmp_path)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "hanging").exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        # WHEN it is interrupted or killed
        process.send_signal(number)
        output, _ = process.communicate(timeout=20)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the whole group, should it live
            os.killpg(process.pid, signal.SIGKILL)
    # THEN Ctrl-C returns the best so far, the file loads, and nothing is left
    assert process.returncode == (0 if number == signal.SIGINT else -number), output
    assert ("STATUS partial" in output) is (number == signal.SIGINT)
    assert TuningResult.load(tmp_path / "loader.json").status == "partial"
    _, alive = psutil.wait_procs(workers, timeout=4)
    assert alive == []
    assert orphaned_segments() <= before
