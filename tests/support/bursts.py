"""Workloads and probes, as tests of real bursts begin them."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch.utils.data import Dataset

from autotune_loader.bursts.packing import read_archive, write_archive
from autotune_loader.bursts.parent import OpenProbe, open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.machine.kernel import memfd
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.values import BurstPlan, Failure, FailureKind, LoaderConfig, Measurement
from tests.support.data import Rows

# A spawned worker imports torch.
QUICK = BurstPlan(max_s=0.2, min_s=0.05, relative_error=0.2, deadline_s=60.0)
ALONE, ONE_WORKER, TWO_WORKERS = (LoaderConfig(num_workers=workers) for workers in range(3))


class Made(Rows):
    """A worker that starts anew has a test's own function, too."""

    def __init__(self, get: Callable[[int], Any], n: int = 64) -> None:
        super().__init__(get, n)

    def __reduce__(self) -> Any:
        return _made, (cloudpickle.dumps((self.get, self.n)),)


def _made(data: bytes) -> Made:
    return Made(*cloudpickle.loads(data))


class ColdStore(Dataset[Any]):
    """Samples of a storage behind a page cache, which all processes have in common: who is first to
    read one waits for it.

    `path` is a file of zeros, a byte for each sample, where bursts may write; `decode_s` is what a
    sample takes beyond.
    """

    def __init__(self, path: Path, decode_s: float = 0.0, *, cold_s: float = 0.010) -> None:
        self.path, self.decode_s, self.cold_s = path, decode_s, cold_s

    @classmethod
    def new(cls, length: int, decode_s: float = 0.0) -> ColdStore:
        """One of which nothing was read; its owner removes the file."""
        file, name = tempfile.mkstemp(prefix="autotune-loader-cold-", dir="/dev/shm")
        os.truncate(file, length)
        os.close(file)
        return cls(Path(name), decode_s)

    def __len__(self) -> int:
        return self.path.stat().st_size

    def __getitem__(self, index: int) -> Any:
        with self.path.open("r+b", buffering=0) as file:
            file.seek(index)
            was_read = file.read(1) != b"\0"
            file.seek(index)
            file.write(b"\1")
        time.sleep(self.decode_s + (0.0 if was_read else self.cold_s))
        return torch.tensor(index)


def workload(
    dataset: Any, batch_size: int | None = 4, training: TrainingSide | None = None, **parts: Any
) -> Workload:
    """A dataset in batches, with other parts of its loader, and what is trained on it."""
    data = DataSide.from_dataset(dataset, batch_size=batch_size, **parts)
    return Workload(data=data, training=training or TrainingSide())


def opened(what: Workload) -> AbstractContextManager[OpenProbe]:
    """A warm probe of this machine."""
    return open_probe(what, inspect_machine(), None)


def measured(probe: Any, config: LoaderConfig = ALONE, plan: BurstPlan = QUICK) -> Measurement:
    """What a burst measures, which must not fail; its fields agree, in whatever process it runs."""
    found = probe.burst(config, plan)
    assert isinstance(found, Measurement), found
    rate = found.samples_per_s
    assert 0 <= rate.low <= rate.value <= rate.high
    assert 0 <= found.wait_share <= 1
    assert found.batch_bytes > 0
    assert found.first_batch_s is None or found.first_batch_s > 0
    assert found.memory is not None  # read at the first burst of a configuration, and told of each
    assert {each.worker for each in found.traces} <= (set(range(config.num_workers)) or {-1})
    for each in found.traces:
        times = each.fetch_start, each.fetch_end, each.collate_end, each.received, each.step_end
        assert list(times) == sorted(times)
    return found


def run(
    job: Workload, *configs: LoaderConfig, plan: BurstPlan = QUICK
) -> tuple[OpenProbe, list[Measurement]]:
    """A probe, which is closed again, and what bursts in it have measured."""
    with opened(job) as probe:
        return probe, [measured(probe.probe, config, plan) for config in configs]


def failed(
    probe: Any, kind: FailureKind, config: LoaderConfig = ALONE, plan: BurstPlan = QUICK
) -> Failure:
    """The failure of a burst, which must be of this kind."""
    outcome = probe.burst(config, plan)
    assert isinstance(outcome, Failure), outcome
    assert outcome.kind == kind, outcome
    return outcome


def assert_views_travel_once(device: str) -> None:
    """Views of one storage on a device are sent as one, and arrive as views of one, whatever else
    lies there."""
    base = torch.rand(1 << 20, device=device)
    layer = torch.nn.Linear(4, 4).to(device)
    held = [base[at::16] for at in range(16)], layer, base.bfloat16().requires_grad_()
    with os.fdopen(memfd("test"), "rb") as file:
        write_archive(file.fileno(), held, 8 << 20)  # 6 MiB
        views, linear, half = read_archive(file.fileno())
    (storage,) = {view.untyped_storage().data_ptr() for view in views}
    assert storage != base.data_ptr()
    there = *held[0], layer.weight, held[2]
    for own, travelled in zip(there, (*views, linear.weight, half), strict=True):
        assert torch.equal(own, travelled)
        assert own.device == travelled.device
        assert own.requires_grad == travelled.requires_grad


def segments() -> set[str]:
    """Names of torch's segments in shared memory, whoever made them."""
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def orphans_but(before: set[str]) -> set[str]:
    """Segments of processes that have ended, but those that lay there before; what else there is
    may be in use next door."""
    return {n for n in segments() - before if not Path("/proc", n.split("_")[1]).exists()}
