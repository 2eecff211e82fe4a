"""`tune()` end to end on small workloads of every form, in this process so that it is quick; one in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from autotune_loader import TuningResult, load_config, tune
from autotune_loader.bursts.parent import open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.state import make_space
from autotune_loader.values.errors import WorkloadError
from tests.support import SimulatedMachine, on_simulated_machines

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


ROWS = TensorDataset(torch.zeros(64, 3), torch.zeros(64, dtype=torch.long))


class NeverIterated(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("the user's own loader must never be iterated")


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info() if self.sharded else None
        for index in range(info.id if info else 0, 64, info.num_workers if info else 1):
            yield torch.full((3,), float(index))


@pytest.mark.parametrize(("sharded", "shards", "most"), [(False, None, 1), (True, None, 4), (True, 2, 2)])
def test_a_stream_gets_as_many_workers_as_share_its_samples(sharded: bool, shards: int | None, most: int) -> None:
    stream = Stream(sharded)
    if shards is not None:
        stream.num_shards = shards  # type: ignore[attr-defined]
    workload = Workload(data=DataSide.from_dataset(stream, batch_size=4), training=TrainingSide())
    machine = inspect_machine()
    with open_probe(workload, machine, None) as opened:
        space = make_space(workload, opened.warmup, machine, TuneOptions(max_workers=4))
    assert space.max_workers == most
    assert any("same samples" in note and "get_worker_info" in note for note in opened.notes) is not sharded


def test_a_loader_is_the_baseline_and_result_and_file_make_the_same_one_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a loader that must not be iterated
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine(batch_size=8))
    loader, path = NeverIterated(ROWS, batch_size=8, num_workers=1, prefetch_factor=3), tmp_path / "loader.json"
    # WHEN it is tuned
    result = tune(loader, torch.nn.Linear(3, 2), max_workers=1, output=path, progress=False)
    # THEN it is what the choice is compared with
    assert (result.baseline.num_workers, result.baseline.prefetch_factor) == (1, 3)
    assert (result.trials[0].role, result.batch_size) == ("baseline", 8)
    # AND result and file say the same
    assert load_config(path, on_mismatch="strict") == result.best
    assert len(next(iter(result.make_loader(ROWS, shuffle=True, num_workers=0)))[0]) == 8
    written = TuningResult.load(path)
    assert (written.best, written.status, len(written.trials)) == (result.best, result.status, len(result.trials))


def out_of_memory(model: Any, batch: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("model", "options", "says", "where"),
    [
        (torch.nn.Linear(99, 2), {}, "mat1 and mat2 shapes cannot be multiplied", "nn/modules/linear.py"),
        (None, {"train_step": out_of_memory}, "smaller batch", "test_tuner.py"),
    ],
)
def test_a_model_that_does_not_fit_the_batch_shows_the_users_own_traceback(
    model: Any, options: dict[str, Any], says: str, where: str
) -> None:
    with pytest.raises(WorkloadError, match=says) as caught:
        tune(ROWS, model, batch_size=8, **options)
    assert where in caught.value.user_traceback
    assert "autotune_loader/" not in caught.value.user_traceback
