"""`tune()` end to end on small workloads of every form, in this process so that it is quick; one in a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

from autotune_loader import TuningResult, load_config, tune
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, TrainingSide, Workload
from autotune_loader.probe.inline import InlineProbe
from autotune_loader.results.loader_file import ENDED
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import WorkloadError
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan

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


@pytest.mark.parametrize("sharded", [True, False])
def test_the_canary_sees_whether_workers_repeat_each_other(sharded: bool) -> None:
    data = DataSide.from_dataset(Stream(sharded), batch_size=4)
    probe = InlineProbe(Workload(data=data, training=TrainingSide()), inspect_machine())

    assert probe.start().shardable is sharded


def test_an_existing_loader_is_the_baseline_and_is_never_iterated() -> None:
    loader = NeverIterated(Rows(), batch_size=8, num_workers=1, prefetch_factor=3)

    result = quick(loader, torch.nn.Linear(3, 2))

    assert (result.baseline.num_workers, result.baseline.prefetch_factor) == (1, 3)
    assert result.trials[0].role == "baseline"
    assert result.batch_size.value == 8


def test_the_result_makes_loaders_and_its_file_gives_the_same_configuration(tmp_path: Path) -> None:
    path = tmp_path / "loader.json"

    result = quick(Rows(), torch.nn.Linear(3, 2), batch_size=8, output=path)

    assert load_config(path, on_mismatch="raise") == result.best
    assert len(next(iter(result.make_loader(Rows(), shuffle=True)))[0]) == 8
    written = TuningResult.load(path)
    assert (written.best, written.status, len(written.trials)) == (result.best, result.status, len(result.trials))


@pytest.mark.skipif(inspect_machine().gpu_reason is None, reason="needs a machine without a driver")
def test_a_machine_without_a_driver_says_so_once_and_has_no_gpu_figures(capsys: pytest.CaptureFixture[str]) -> None:
    result = quick(Rows(), torch.nn.Linear(3, 2), batch_size=8, progress=True)

    assert capsys.readouterr().err.count("no GPU is watched (") == 1
    assert not any("GPU" in warning for warning in result.warnings)
    measured = result.measured
    assert (measured.gpu_util, measured.gpu_memory_bytes) == (None, None)
    assert measured.gpu_util_reason == "the step does not run on an NVIDIA GPU"


def test_the_file_is_rewritten_after_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loader.json"
    seen: list[tuple[str, int]] = []

    def save(self: TuningResult, where: Any) -> None:
        original(self, where)
        content = json.loads(path.read_text())
        seen.append((content["status"], len(content["trials"])))

    original = TuningResult.save
    monkeypatch.setattr(TuningResult, "save", save)

    quick(Rows(), batch_size=8, output=path, budget=20)

    assert seen[:2] == [("partial", 1), ("partial", 2)]
    assert seen[2][0] in ENDED
    assert seen[2][1] == 2


class Stream(IterableDataset[torch.Tensor]):
    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info() if self.sharded else None
        for index in range(info.id if info else 0, 64, info.num_workers if info else 1):
            time.sleep(0.001)
            yield torch.full((3,), float(index))


def test_an_unsharded_stream_gets_one_worker_at_most_and_is_told_why() -> None:
    result = quick(Stream(sharded=False), batch_size=4, max_workers=4, max_trials=3, budget=6)

    assert max(trial.config.num_workers for trial in result.trials) <= 1
    assert any("same samples" in warning and "get_worker_info" in warning for warning in result.warnings)


def test_a_sharded_stream_may_have_more_workers() -> None:
    result = quick(Stream(sharded=True), batch_size=4, max_workers=4, max_trials=4, budget=30)

    assert max(trial.config.num_workers for trial in result.trials) > 1
    assert not any("same samples" in warning for warning in result.warnings)


def test_workers_are_capped_at_the_number_of_shards() -> None:
    stream = Stream(sharded=True)
    stream.num_shards = 2  # type: ignore[attr-defined]

    result = quick(stream, batch_size=4, max_workers=8, max_trials=4, budget=20)

    assert max(trial.config.num_workers for trial in result.trials) <= 2


class OnDevice(Rows):
    def __getitem__(self, index: int) -> Any:
        return torch.empty(3, device="meta")


def test_tensors_on_an_accelerator_get_no_workers() -> None:
    result = quick(OnDevice(), batch_size=4, max_workers=4, max_trials=4)

    assert {trial.config.num_workers for trial in result.trials} == {0}


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


class LastsForOneBatch(Rows):
    """Works for the warm-up only: then every trial fails, in its own way, and by no fault of a sample."""

    fetched = 0

    def __getitem__(self, index: int) -> Any:
        LastsForOneBatch.fetched += 1
        if LastsForOneBatch.fetched > 24:
            place = "a worker" if get_worker_info() else "the main process"
            raise MemoryError(f"broken in {place}")
        return super().__getitem__(index)


def test_when_every_trial_fails_the_defaults_are_given_with_the_distinct_errors(tmp_path: Path) -> None:
    LastsForOneBatch.fetched = 0

    result = quick(LastsForOneBatch(), batch_size=8, max_trials=4, output=tmp_path / "loader.json")

    assert result.status == "fallback"
    assert result.best.num_workers == 0
    told = " ".join(result.summary)
    assert "broken in a worker" in told
    assert "broken in the main process" in told
    assert TuningResult.load(tmp_path / "loader.json").status == "fallback"


class BreaksInWorkers(Rows):
    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            raise LookupError("not in a worker")
        return super().__getitem__(index)


def test_a_failing_configuration_never_ends_the_study() -> None:
    result = quick(BreaksInWorkers(), batch_size=8, max_trials=3, budget=20)

    assert result.status in ENDED
    assert result.best.num_workers == 0
    assert {trial.failure.kind for trial in result.trials if trial.failure} == {"user_exception"}
    assert any("not in a worker" in warning for warning in result.warnings)


class OneIsBroken(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 40:
            raise ValueError("cannot identify image file")
        return super().__getitem__(index)


def test_a_bad_sample_is_named_first_and_is_no_property_of_a_configuration(tmp_path: Path) -> None:
    result = quick(DataLoader(OneIsBroken(), batch_size=8), max_trials=3, budget=8, output=tmp_path / "loader.json")

    assert result.warnings[0].startswith(
        "sample 40 raises ValueError: cannot identify image file; training will end there"
    )
    assert all(trial.failure is None for trial in result.trials)
    assert TuningResult.load(tmp_path / "loader.json").warnings == result.warnings


class TakesSeconds(Rows):
    def __getitem__(self, index: int) -> Any:
        time.sleep(self.nap_s)
        return super().__getitem__(index)

    def __init__(self, nap_s: float) -> None:
        super().__init__(length=256)
        self.nap_s = nap_s


@pytest.mark.parametrize("nap_s", [1.0, 0.3])
def test_samples_of_a_second_are_tuned_within_the_budget(nap_s: float) -> None:
    # GIVEN batches of 16 s, or 5 s WHEN they are tuned with a budget in which not one could be fetched, or hardly one
    begun = time.monotonic()
    result = quick(TakesSeconds(nap_s), batch_size=16, max_trials=1, max_workers=2, budget=6)
    # THEN workers are tried first, and the rate is that of smaller batches
    assert result.status == "complete"
    assert result.best.num_workers == 2
    assert all(trial.measurement is not None for trial in result.trials)
    assert any("the bursts read batches of 2" in warning for warning in result.warnings)
    assert time.monotonic() - begun < 2 * 6


def test_data_in_memory_is_tried_and_best_without_workers() -> None:
    """Samples that are there already are dearer to send from a worker than to take."""
    result = tune(TensorDataset(torch.zeros(4096, 8)), batch_size=8, budget=8, max_workers=2, progress=False)

    assert any(trial.config.num_workers == 0 for trial in result.trials)
    assert result.best.num_workers == 0
