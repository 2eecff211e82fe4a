"""Trouble in inline mode, where the bursts run in the user's own process: it is never killed, and leaves nothing either."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import trouble as troubles
from preloaded import PreloadedPython, Run
from torch.utils.data import Dataset, SequentialSampler
from trouble import Trouble

from autotune_loader import TuningResult
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe, _Stop
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure, Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

DEADLINE_S = 60
BUDGET_BYTES = 400 << 20
QUICK = BurstPlan(max_s=0.3, min_s=0.1, relative_error=0.1)
LONG = BurstPlan(max_s=30.0, min_s=30.0, relative_error=1e-6)


@pytest.fixture
def trouble_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "trouble"
    path.write_text("")
    yield path
    troubles.HOARD.clear()


@pytest.mark.parametrize(("where", "workers"), [("worker", 2), ("main", 0)])
def test_the_memory_guard_ends_an_inline_burst_and_spares_this_process(
    trouble_file: Path, where: str, workers: int
) -> None:
    # GIVEN a dataset that keeps 16 MiB of each sample, in this process or its workers
    dataset = Trouble(trouble_file, nap_s=0.005)
    data = DataSide.from_dataset(dataset, batch_size=4, sampler=SequentialSampler(dataset))
    workload = Workload(data=data, training=TrainingSide())
    probe = InlineProbe(workload, inspect_machine(), memory_budget_bytes=BUDGET_BYTES)
    probe.start()
    trouble_file.write_text(f"{where}:hoard")
    begun, children = time.monotonic(), psutil.Process().children()
    # a worker that is not forked has a torch of its own, which the budget would not hold
    config = LoaderConfig(num_workers=workers, multiprocessing_context="fork" if workers else None)
    # WHEN it runs
    failure = probe.burst(config, LONG)
    # THEN the burst is ended, and no worker is left
    assert isinstance(failure, Failure)
    assert failure.kind == "memory_guard"
    assert "max_host_memory" in failure.message
    assert time.monotonic() - begun < LONG.max_s
    assert psutil.Process().children() == children
    # AND the next one works
    trouble_file.write_text("")
    troubles.HOARD.clear()
    assert isinstance(probe.burst(config, QUICK), Measurement)


class WaitsForNobody(Dataset[Any]):
    """Where `hangs` is set it waits for what never comes, as a queue does whose workers are gone."""

    hangs = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if WaitsForNobody.hangs and index > 8:
            queue.Queue().get(timeout=WAIT_S)
        return torch.tensor([float(index)])


WAIT_S = 30.0


UNDER_A_PROFILER = """
import sys, torch
from autotune_loader import tune

sys.setprofile(lambda frame, event, argument: None)
options = {"isolation": "inline", "budget": 1, "max_trials": 1, "max_workers": 0, "progress": False}
print(tune([torch.zeros(3)] * 64, batch_size=4, **options).status)
"""


def test_an_inline_run_ends_under_a_profiler_too(tmp_path: Path, preloaded: PreloadedPython) -> None:
    """Python 3.11 goes round and round where an exception is taken back that was never sent."""
    (tmp_path / "profiled.py").write_text(UNDER_A_PROFILER)
    run = preloaded.start("profiled.py", folder=tmp_path)
    assert run.wait(timeout=DEADLINE_S) == 0, run.output


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hang_inline_ends_at_the_deadline(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a dataset that hangs, in this process or in a worker
    dataset = WaitsForNobody()
    data = DataSide.from_dataset(dataset, batch_size=4, sampler=SequentialSampler(dataset))
    probe = InlineProbe(Workload(data=data, training=TrainingSide()), inspect_machine())
    probe.start()
    monkeypatch.setattr(WaitsForNobody, "hangs", True)
    begun = time.monotonic()
    # WHEN a burst has a deadline
    context = "fork" if workers else None
    failure = probe.burst(
        LoaderConfig(num_workers=workers, multiprocessing_context=context), replace(LONG, deadline_s=1.0)
    )  # forked: it inherits the flag
    # THEN it ends there, and nothing of it is left
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.phase) == ("deadline", "batches")
    assert time.monotonic() - begun < WAIT_S / 2
    assert multiprocessing.active_children() == []


class PollsForNobody(WaitsForNobody):
    """Asks again and again for what never comes."""

    def __getitem__(self, index: int) -> Any:
        begun = time.monotonic()
        while WaitsForNobody.hangs and time.monotonic() - begun < WAIT_S:
            time.sleep(0.01)
        return torch.tensor([float(index)])


def test_in_another_thread_a_loop_that_never_ends_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a dataset that polls for ever
    probe = InlineProbe(
        Workload(data=DataSide.from_dataset(PollsForNobody(), batch_size=4), training=TrainingSide()), inspect_machine()
    )
    probe.start()
    monkeypatch.setattr(WaitsForNobody, "hangs", True)
    # WHEN a burst in a thread has a deadline
    with ThreadPoolExecutor() as pool:
        failure = pool.submit(probe.burst, LoaderConfig(), replace(LONG, deadline_s=1.0)).result(timeout=WAIT_S / 2)
        # THEN it ends there, and the thread goes on
        assert isinstance(failure, Failure)
        assert failure.kind == "deadline"
        assert pool.submit(sum, range(1000)).result(timeout=WAIT_S) == 499500


def test_a_deadline_that_passes_just_behind_a_burst_ends_nothing() -> None:
    # GIVEN a burst that is over WHEN its deadline passes THEN this process is neither killed nor interrupted
    with _Stop(deadline_s=0.2) as stop:
        pass
    stop._expire()
    time.sleep(0.3)
    assert not stop.was_asked


def test_what_this_process_holds_anyway_is_no_part_of_the_budget(trouble_file: Path) -> None:
    # GIVEN a program that holds more than the tuner may take
    held = bytearray(os.urandom(1 << 16) * 512)
    data = DataSide.from_dataset(Trouble(trouble_file), batch_size=4)
    probe = InlineProbe(
        Workload(data=data, training=TrainingSide()), inspect_machine(), memory_budget_bytes=len(held) * 2
    )
    probe.start()
    # WHEN a burst takes hardly anything, THEN it is measured
    assert isinstance(probe.burst(LoaderConfig(), LONG_ENOUGH_FOR_A_LOOK), Measurement)


LONG_ENOUGH_FOR_A_LOOK = BurstPlan(max_s=0.8, min_s=0.8, relative_error=1e-6)

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


def appears(path: Path, process: Run) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    return path.exists()


@pytest.fixture
def hanging(tmp_path: Path, preloaded: PreloadedPython) -> Iterator[Callable[[], Run]]:
    """Starts an inline run that has a trial on disk and a worker that hangs."""
    started: list[Run] = []

    def start() -> Run:
        (tmp_path / "train.py").write_text(SCRIPT)
        process = preloaded.start("train.py", folder=tmp_path)
        started.append(process)
        assert appears(tmp_path / "hanging", process), process.communicate()[0]
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # the whole group, should it live
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_an_inline_run_its_workers_go_and_the_file_loads(
    tmp_path: Path,
    hanging: Callable[[], Run],
    orphaned_segments: Callable[[], set[str]],
    number: signal.Signals,
) -> None:
    # GIVEN an inline run whose worker hangs
    before = orphaned_segments()
    process = hanging()
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    # WHEN it is interrupted or killed
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    # THEN Ctrl-C returns the best so far, the file loads, and nothing is left
    assert process.returncode == (0 if number == signal.SIGINT else -number), output
    assert ("STATUS partial" in output) is (number == signal.SIGINT)
    assert TuningResult.load(tmp_path / "loader.json").status == "partial"
    _, alive = psutil.wait_procs(workers, timeout=4)
    assert alive == []
    assert orphaned_segments() <= before


FAILING_SCRIPT = """
import time, torch
from torch.utils.data import Dataset, get_worker_info
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe, _Stop
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.measurement import Failure
from autotune_loader.values.plan import BurstPlan

class BreaksInWorkers(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        time.sleep(0.001)
        if get_worker_info() is not None and index % 16 == 15:
            raise MemoryError("no room for a sample")
        return torch.zeros(4)

workload = Workload(data=DataSide.from_dataset(BreaksInWorkers(), batch_size=4), training=TrainingSide(device="cpu"))
probe = InlineProbe(workload, inspect_machine())
probe.start()
outcomes = [probe.burst(LoaderConfig(num_workers=workers), BurstPlan()) for workers in (1, 2, 3, 4, 5)]
probe.close()
print(sum(isinstance(outcome, Failure) for outcome in outcomes))
"""


def test_iterators_of_failed_trials_are_closed_where_they_were_made(tmp_path: Path, preloaded: PreloadedPython) -> None:
    """A traceback that is kept keeps the iterator too; what is left of it then complains wherever it is collected."""
    (tmp_path / "train.py").write_text(FAILING_SCRIPT)
    run = preloaded.start("train.py", folder=tmp_path)

    assert run.wait(timeout=90) == 0, run.output
    assert run.output.endswith("5\n"), run.output
    assert "can only test a child process" not in run.output
    assert "Exception ignored" not in run.output
    assert "This DataLoader will create" not in run.output  # more workers than cores are tried on purpose
