"""`tune()` end to end on small workloads of every form, in this process so that it is quick; one in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autotune_loader import TuningResult, load_config, tune
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.probe.opening import open_probe
from autotune_loader.tuning.options import TuneOptions
from autotune_loader.tuning.state import make_space
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import SimulatedMachine, on_simulated_machines

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")]


class Rows(Dataset[Any]):
    """Row i in any form."""

    def __init__(self, form: str = "pair", length: int = 64) -> None:
        self.form = form
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.0005)
        x, y = torch.full((3,), float(index)), index % 2
        return {"pair": (x, y), "dict": {"x": x, "labels": torch.tensor(y)}, "plain": x}[self.form]


class NeverIterated(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("the user's own loader must never be iterated")


class WithLoss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"loss": torch.nn.functional.cross_entropy(self.layer(x), labels)}


def own_step(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def quick(dataset: Any, model: Any = None, **options: Any) -> TuningResult:
    return tune(dataset, model, **{"budget": 4, "max_trials": 2, "max_workers": 1, "isolation": "inline", **options})


OWN_LOSS = torch.nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("form", "model", "options", "step"),
    [
        ("pair", torch.nn.Linear(3, 2), {}, "cross_entropy(model(batch[0]), batch[1])"),
        ("pair", torch.nn.Linear(3, 2), {"loss_fn": OWN_LOSS}, "CrossEntropyLoss(model(batch[0]), batch[1])"),
        ("pair", torch.nn.Linear(3, 2), {"train_step": own_step}, "train_step(model, batch)"),
        ("dict", WithLoss(), {}, "model(**batch)['loss']"),
        ("plain", torch.nn.Linear(3, 2), {}, "model(batch).float().mean()"),
        ("pair", None, {}, "no model"),
    ],
)
def test_the_step_is_inferred_or_given_and_said(form: str, model: Any, options: dict[str, Any], step: str) -> None:
    data = DataSide.from_dataset(Rows(form), batch_size=8)
    probe = InlineProbe(Workload(data=data, training=TrainingSide(model=model, **options)), inspect_machine())

    assert probe.start().step.startswith(step)
    assert isinstance(probe.burst(LoaderConfig(), BurstPlan(max_s=0.1, min_s=0.05)), Measurement)


@pytest.mark.parametrize(("sharded", "shards", "most"), [(False, None, 1), (True, None, 4), (True, 2, 2)])
def test_a_stream_gets_as_many_workers_as_share_its_samples(sharded: bool, shards: int | None, most: int) -> None:
    stream = Stream(sharded)
    if shards is not None:
        stream.num_shards = shards  # type: ignore[attr-defined]
    workload = Workload(data=DataSide.from_dataset(stream, batch_size=4), training=TrainingSide())
    machine = inspect_machine()
    with open_probe(workload, machine, "inline", None) as opened:
        space = make_space(workload, opened.warmup, machine, TuneOptions(max_workers=4))
    assert space.max_workers == most
    assert any("same samples" in note and "get_worker_info" in note for note in opened.notes) is not sharded


def test_a_loader_is_the_baseline_and_result_and_file_make_the_same_one_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a loader that must not be iterated
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine(batch_size=8))
    loader, path = NeverIterated(Rows(), batch_size=8, num_workers=1, prefetch_factor=3), tmp_path / "loader.json"
    # WHEN it is tuned
    result = tune(loader, torch.nn.Linear(3, 2), max_workers=1, output=path, reuse=False, progress=False)
    # THEN it is what the choice is compared with
    assert (result.baseline.num_workers, result.baseline.prefetch_factor) == (1, 3)
    assert (result.trials[0].role, result.batch_size.value) == ("baseline", 8)
    # AND result and file say the same
    assert load_config(path, on_mismatch="raise") == result.best
    assert len(next(iter(result.make_loader(Rows(), shuffle=True, num_workers=0)))[0]) == 8
    written = TuningResult.load(path)
    assert (written.best, written.status, len(written.trials)) == (result.best, result.status, len(result.trials))


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info() if self.sharded else None
        for index in range(info.id if info else 0, 64, info.num_workers if info else 1):
            time.sleep(0.001)
            yield torch.full((3,), float(index))


@pytest.mark.parametrize("isolation", ["inline", "process"])
def test_a_model_that_does_not_fit_the_batch_shows_the_users_own_traceback(isolation: str) -> None:
    with pytest.raises(WorkloadError, match="mat1 and mat2 shapes cannot be multiplied") as caught:
        quick(Rows(), torch.nn.Linear(99, 2), batch_size=8, isolation=isolation)

    assert "nn/modules/linear.py" in caught.value.user_traceback
    assert "autotune_loader/" not in caught.value.user_traceback


def out_of_memory(model: Any, batch: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_step_that_runs_out_of_memory_on_the_first_batch_is_a_workload_error() -> None:
    with pytest.raises(WorkloadError, match="smaller batch"):
        quick(Rows(), batch_size=8, train_step=out_of_memory)


class OneIsBroken(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 40:
            raise ValueError("cannot identify image file")
        return super().__getitem__(index)


def test_a_bad_sample_is_named_first_and_is_no_property_of_a_configuration(
    tmp_path: Path,
) -> None:
    result = quick(
        DataLoader(OneIsBroken(), batch_size=8),
        max_trials=3,
        output=tmp_path / "loader.json",
        reuse=False,
    )

    assert result.warnings[0].startswith(
        "sample 40 raises ValueError: cannot identify image file; training will end there"
    )
    assert all(trial.failure is None for trial in result.trials)
    assert TuningResult.load(tmp_path / "loader.json").warnings == result.warnings
    # AND off a GPU there are no figures of one
    assert not any("GPU" in warning for warning in result.warnings)
    assert (result.measured.gpu_busy_share, result.measured.gpu_memory_bytes) == (None, None)
