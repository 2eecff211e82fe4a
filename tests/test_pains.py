"""Pains of PAINS.md that no other test reproduces, and traps: on real workers, asserting shapes, never rates."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from autotune_loader import LoaderConfig, tune
from autotune_loader.advice.steps import LEAKING_BYTES_PER_S
from autotune_loader.machine.comparison import differences
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.probe.bench import Readiness
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.probe.workload import DataSide, Payload, TrainingSide, Workload
from autotune_loader.settings import Settings
from autotune_loader.space import Space
from autotune_loader.trial import BurstPlan, Measurement
from autotune_loader.tuner import make_space

ROOT = Path(__file__).resolve().parents[1]
SHORT = BurstPlan(min_s=0.3, max_s=0.3, relative_error=0.01, deadline_s=30.0)
LONG = BurstPlan(min_s=3.0, max_s=3.0, relative_error=1e-6, deadline_s=60.0)
START_NAP_S = 0.5


class Rows(Dataset[torch.Tensor]):
    def __init__(self, length: int = 256) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.zeros(64)


def slow_start(worker: int) -> None:
    time.sleep(START_NAP_S)


def threaded_step(model: Any, batch: torch.Tensor) -> None:
    torch.rand(400, 400) @ torch.rand(400, 400)


def measured(
    dataset: Any, config: LoaderConfig, plan: BurstPlan = SHORT, step: Any = None, **parts: Any
) -> Measurement:
    """One burst in a probe process of its own."""
    data = DataSide.from_dataset(dataset, batch_size=8, **parts)
    payload = Payload.of(Workload(data=data, training=TrainingSide(train_step=step)), 1 << 30)
    probe = ProcessProbe(payload, inspect_machine())
    try:
        probe.start()
        outcome = probe.burst(config, plan)
    finally:
        probe.close()
    assert isinstance(outcome, Measurement), outcome
    return outcome


class Words(Rows):
    """Touches many small Python objects per sample: each touch writes a reference count into a shared page."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.words = [f"word {number:06d} " * 4 for number in range(1_200_000)]

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        first = index * 12 % 1_190_000
        return torch.tensor([len(word) for word in self.words[first : first + 300]])


@pytest.mark.slow
def test_pain_3_memory_that_grows_by_reference_counts_has_a_slope_and_warming_up_has_none() -> None:
    growing = measured(Words(), LoaderConfig(num_workers=2), LONG).memory
    even = measured(Rows(), LoaderConfig(num_workers=2), LONG).memory

    assert growing is not None
    assert even is not None
    assert growing.pss_slope_bytes_per_s is not None
    assert even.pss_slope_bytes_per_s is not None
    assert even.pss_slope_bytes_per_s < LEAKING_BYTES_PER_S < growing.pss_slope_bytes_per_s


@pytest.mark.slow
def test_pain_8_data_in_memory_is_tried_and_best_without_workers() -> None:
    result = tune(TensorDataset(torch.zeros(4096, 8)), batch_size=8, budget=8, max_workers=2, progress=False)

    assert any(trial.config.num_workers == 0 for trial in result.trials)
    assert result.best.num_workers == 0


def test_pain_9_the_thread_environment_is_recorded_and_a_change_is_told() -> None:
    # GIVEN a machine that was tuned under torchrun, which sets one thread
    tuned = inspect_machine(environ={"OMP_NUM_THREADS": "1"}).fingerprint()
    here = inspect_machine(environ={}).fingerprint()
    # WHEN its file is used without, THEN that is a difference
    assert tuned.thread_env == {"OMP_NUM_THREADS": "1"}
    assert any("OMP_NUM_THREADS" in difference.sentence for difference in differences(tuned, here))


READY = Readiness(
    step="nothing",
    samples=8,
    batch_bytes=2048,
    batch_tensors=1,
    on_accelerator=False,
    first_fetch_s=0.01,
    first_fetch_cpu_s=0.001,
    default_threads=1,
)


def space_of(dataset: Any, *allow: str) -> Space:
    data = DataSide.from_dataset(dataset, batch_size=8)
    workload = Workload(data=data, training=TrainingSide())
    return make_space(workload, READY, inspect_machine(), Settings(allow=frozenset(allow)))


class Epochs(Rows):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_pain_16_workers_that_would_never_hear_of_the_next_epoch_are_kept_only_when_allowed() -> None:
    assert space_of(Rows()).persistent_workers
    assert not space_of(Epochs()).persistent_workers
    assert space_of(Epochs(), "persistent_workers").persistent_workers


def test_pain_24_memory_is_reported_with_shared_pages_counted_once_too() -> None:
    memory = measured(Rows(), LoaderConfig(num_workers=2)).memory

    assert memory is not None
    assert memory.pss_bytes is not None
    assert memory.pss_bytes < 0.8 * memory.rss_bytes


def test_pain_27_the_start_of_workers_is_reported_apart_and_is_no_part_of_the_rate() -> None:
    slow = measured(Rows(), LoaderConfig(num_workers=2), worker_init_fn=slow_start)

    assert slow.first_batch_s > START_NAP_S
    assert slow.window_s > 0
    assert slow.samples / slow.samples_per_s.value < START_NAP_S


def test_pain_27_workers_are_kept_where_starting_them_is_a_large_part_of_an_epoch() -> None:
    assert space_of(Rows(64)).persistent_workers
    assert not space_of(Rows(10_000_000)).persistent_workers


def test_pain_28_batches_out_of_order_are_searched_only_when_allowed() -> None:
    assert space_of(Rows()).in_order == (True,)
    assert space_of(Rows(), "in_order").in_order == (True, False)


def test_trap_10_a_multi_threaded_step_in_the_parent_does_not_hang_one_in_the_probe() -> None:
    # GIVEN a process that has run a multi-threaded step, after which a forked child's first one would hang
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        threaded_step(None, torch.zeros(1))
        # WHEN the probe runs such a step, THEN it comes back
        outcome = measured(Rows(), LoaderConfig(num_workers=1), step=threaded_step)
    finally:
        torch.set_num_threads(threads)
    assert outcome.step_s > 0


class FromForkServer(Rows):
    """Works in workers of the fork server alone."""

    def __getitem__(self, index: int) -> torch.Tensor:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
        if get_worker_info() is not None and b"forkserver" not in parent:
            raise LookupError(f"started by {parent!r}")
        return super().__getitem__(index)


@pytest.fixture
def _fork_server_by_default() -> Iterator[None]:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("_fork_server_by_default")
def test_pain_12_the_start_method_of_the_program_is_the_one_that_is_measured() -> None:
    # Python 3.14 starts workers through a fork server unless told otherwise.
    assert measured(FromForkServer(), LoaderConfig(num_workers=1), replace(SHORT, deadline_s=60.0)).samples > 0


FORK_SERVER_SCRIPT = """
import multiprocessing, torch
from autotune_loader import tune

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([float(index)])

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    result = tune(Squares(), batch_size=4, max_workers=1, budget=4, max_trials=2, progress=False)
    print(result.status, result.fingerprint.start_method, [t.failure.kind if t.failure else "ok" for t in result.trials])
"""


@pytest.mark.slow
def test_pain_12_a_program_whose_workers_come_from_a_fork_server_tunes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FORK_SERVER_SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=90, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("complete forkserver ['ok'"), done.stdout


FAILING_SCRIPT = """
import time, torch
from torch.utils.data import Dataset, get_worker_info
from autotune_loader import tune

class BreaksInWorkers(Dataset):
    def __len__(self):
        return 256
    def __getitem__(self, index):
        time.sleep(0.001)
        if get_worker_info() is not None and index % 16 == 15:
            raise LookupError("an unreadable sample")
        return torch.zeros(4)

result = tune(BreaksInWorkers(), batch_size=4, max_workers=6, max_trials=10, budget=8, isolation="inline", search="grid",
              progress=False)
print(sum(trial.failure is not None for trial in result.trials))
"""


@pytest.mark.slow
def test_pain_33_iterators_of_failed_trials_are_closed_where_they_were_made(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING_SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=90, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 5
    assert "can only test a child process" not in done.stderr
    assert "Exception ignored" not in done.stderr


DAEMON_SCRIPT = """
import multiprocessing, torch
from autotune_loader import tune

def work(queue):
    loader = torch.utils.data.DataLoader([torch.zeros(3)] * 64, batch_size=4, num_workers=1)
    first = tune(loader, budget=4, max_trials=1, max_workers=1, progress=False).trials[0]
    queue.put((first.config.num_workers, first.failure))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=work, args=(queue,), daemon=True)
    process.start()
    print(*queue.get())
"""


@pytest.mark.slow
def test_pain_35_a_daemonic_process_may_tune_with_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DAEMON_SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=90, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1 None"
