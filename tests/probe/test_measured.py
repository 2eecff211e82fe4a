"""What a burst in a process of its own tells of real workers: shapes, never rates."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

from autotune_loader import LoaderConfig
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.payload import Payload
from autotune_loader.probe.runner import ProcessProbe
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

pytestmark = pytest.mark.process

SHORT = BurstPlan(min_s=0.3, max_s=0.3, relative_error=0.01, deadline_s=30.0)
TWO_WORKERS = LoaderConfig(num_workers=2)
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


def probe_of(dataset: Any, step: Any = None, **parts: Any) -> ProcessProbe:
    data = DataSide.from_dataset(dataset, batch_size=8, **parts)
    payload = Payload.of(Workload(data=data, training=TrainingSide(train_step=step)), 1 << 30)
    return ProcessProbe(payload, inspect_machine())


def measured(probe: ProcessProbe, config: LoaderConfig = TWO_WORKERS, plan: BurstPlan = SHORT) -> Measurement:
    outcome = probe.burst(config, plan)
    assert isinstance(outcome, Measurement), outcome
    return outcome


@pytest.fixture(scope="module")
def even_probe() -> Iterator[ProcessProbe]:
    """Small even rows, and workers that take half a second to start."""
    probe = probe_of(Rows(), worker_init_fn=slow_start)
    probe.start()
    yield probe
    probe.close()


@pytest.fixture
def open_probe() -> Iterator[Any]:
    opened: list[ProcessProbe] = []

    def open_it(*arguments: Any, **parts: Any) -> ProcessProbe:
        opened.append(probe_of(*arguments, **parts))
        return opened[-1]

    yield open_it
    for probe in opened:
        probe.close()


def test_memory_is_reported_with_shared_pages_counted_once_too(even_probe: ProcessProbe) -> None:
    """Forked workers share most of their pages: the sum of their RSS is memory that nobody needs."""
    memory = measured(even_probe).memory

    assert memory is not None
    assert memory.pss_bytes is not None
    assert memory.pss_bytes < 0.8 * memory.rss_bytes


def hold_50_mib(worker: int) -> None:
    HELD.append(b"x" * (50 * MIB))


HELD: list[bytes] = []
MIB = 1 << 20


def test_workers_of_50_mib_each_are_reported_to_10_percent(open_probe: Any) -> None:
    # GIVEN bursts of a third of a second, with workers that hold 50 MiB each, and with such that do not
    holding, plain = (open_probe(Rows(), worker_init_fn=init) for init in (hold_50_mib, None))
    for probe in (holding, plain):
        probe.start()  # before either is measured: what is in both, such as torch's libraries, counts by halves in each
    for workers, plan in ((1, SHORT), (2, SHORT), (2, replace(SHORT, whole_epochs=True))):
        config = LoaderConfig(num_workers=workers)
        # WHEN their memory is compared THEN it is that of the workers, which live while it is read
        memories = [measured(probe, config, plan).memory for probe in (holding, plain)]
        assert None not in memories
        for name in ("pss_bytes", "rss_bytes"):
            more, less = (getattr(memory, name) for memory in memories)
            assert more - less == pytest.approx(workers * 50 * MIB, rel=0.1)


def test_the_start_of_workers_is_reported_apart_and_is_no_part_of_the_rate(even_probe: ProcessProbe) -> None:
    """A burst is far shorter than an epoch: the start of workers, once an epoch, would be most of its rate."""
    slow = measured(even_probe)

    assert slow.first_batch_s > START_NAP_S
    assert slow.window_s > 0
    assert slow.samples / slow.samples_per_s.value < START_NAP_S


def test_a_multi_threaded_step_in_the_parent_does_not_hang_one_in_the_probe(open_probe: Any) -> None:
    # GIVEN a process that has run a multi-threaded step, after which a forked child's first one would hang
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        threaded_step(None, torch.zeros(1))
        # WHEN the probe runs such a step, THEN it comes back
        outcome = measured(open_probe(Rows(), threaded_step), LoaderConfig(num_workers=1))
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
def test_the_start_method_of_the_program_is_the_one_that_is_measured(open_probe: Any) -> None:
    # Python 3.14 starts workers through a fork server unless told otherwise.
    plan = replace(SHORT, deadline_s=60.0)
    assert measured(open_probe(FromForkServer()), LoaderConfig(num_workers=1), plan).samples > 0
