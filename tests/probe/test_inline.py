"""Trouble in inline mode, where the bursts run in the user's own process: it is never killed, and leaves nothing either."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import trouble as troubles
from preloaded import PreloadedPython
from torch.utils.data import Dataset, SequentialSampler
from trouble import Trouble

from autotune_loader import TuningResult
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.plan import BurstPlan
from tests.support.bursts import ALONE, failed, measured, workload

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]

# A worker that is not forked has a torch of its own, which no budget here would hold, and knows no flag that is set here.
FORKED = LoaderConfig(num_workers=1, multiprocessing_context="fork")
LONG = BurstPlan(max_s=30.0, min_s=30.0, relative_error=1e-6)
WITH_DEADLINE = replace(LONG, deadline_s=1.0)
WAIT_S = 30.0


def inline(dataset: Any, **limits: Any) -> InlineProbe:
    probe = InlineProbe(workload(dataset, sampler=SequentialSampler(dataset)), inspect_machine(), **limits)
    probe.start()
    return probe


@pytest.fixture
def trouble_file(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "trouble"
    path.write_text("")
    yield path
    troubles.HOARD.clear()


@pytest.mark.parametrize(("where", "config"), [("worker", FORKED), ("main", ALONE)])
def test_the_memory_guard_ends_an_inline_burst_and_spares_this_process(
    trouble_file: Path, where: str, config: LoaderConfig
) -> None:
    # GIVEN a dataset that keeps 16 MiB of each sample, in this process or its worker
    probe = inline(Trouble(trouble_file, nap_s=0.005), memory_budget_bytes=400 << 20)
    trouble_file.write_text(f"{where}:hoard")
    begun, children = time.monotonic(), psutil.Process().children()
    # WHEN it runs THEN the burst is ended, and no worker is left
    assert "max_host_memory" in failed(probe, "memory_guard", config, LONG).message
    assert time.monotonic() - begun < LONG.max_s
    assert psutil.Process().children() == children
    # AND the next one works
    trouble_file.write_text("")
    troubles.HOARD.clear()
    measured(probe, config)


def test_what_this_process_holds_anyway_is_no_part_of_the_budget(trouble_file: Path) -> None:
    held = bytearray(os.urandom(1 << 16) * 512)
    probe = inline(Trouble(trouble_file), memory_budget_bytes=len(held) * 2)

    measured(probe, plan=BurstPlan(max_s=0.8, min_s=0.8, relative_error=1e-6))


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
    assert run.wait(timeout=60) == 0, run.output


class WaitsForNobody(Dataset[Any]):
    """Where `hangs` is set it waits for what never comes, as a queue does whose workers are gone."""

    hangs = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if WaitsForNobody.hangs and index > 8:
            self.wait()
        return torch.tensor([float(index)])

    def wait(self) -> None:
        queue.Queue[Any]().get(timeout=WAIT_S)


class PollsForNobody(WaitsForNobody):
    """Asks again and again for what never comes."""

    def wait(self) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < WAIT_S:
            time.sleep(0.01)


@pytest.mark.parametrize("config", [ALONE, FORKED])
def test_a_hang_inline_ends_at_the_deadline(config: LoaderConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a dataset that hangs, in this process or in a worker
    probe = inline(WaitsForNobody())
    monkeypatch.setattr(WaitsForNobody, "hangs", True)
    begun = time.monotonic()
    # WHEN a burst has a deadline THEN it ends there, and nothing of it is left
    assert failed(probe, "deadline", config, WITH_DEADLINE).phase == "batches"
    assert time.monotonic() - begun < WAIT_S / 2
    assert multiprocessing.active_children() == []


def test_in_another_thread_a_loop_that_never_ends_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = inline(PollsForNobody())
    monkeypatch.setattr(WaitsForNobody, "hangs", True)
    # WHEN a burst in a thread has a deadline THEN it ends there, and the thread goes on
    with ThreadPoolExecutor() as pool:
        pool.submit(failed, probe, "deadline", ALONE, WITH_DEADLINE).result(timeout=WAIT_S / 2)
        assert pool.submit(sum, range(1000)).result(timeout=WAIT_S) == 499500


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
def test_whatever_ends_an_inline_run_its_workers_go_and_the_file_loads(
    tmp_path: Path, preloaded: PreloadedPython, orphaned_segments: Any, number: signal.Signals
) -> None:
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
