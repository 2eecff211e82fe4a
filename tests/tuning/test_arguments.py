"""How `tune()` reads what it is given: what is wrong is named with what would work; wrappers are unwrapped or answered."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from autotune_loader import AutoLoader, tune
from autotune_loader.bursts.parent import open_probe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.study import open_database
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import MissingExtraError
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import SimulatedMachine, on_simulated_machines

SAMPLES = TensorDataset(torch.zeros(10, 2))
PLAN = BurstPlan(max_s=0.2, min_s=0.1)


class LengthRaises(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise RuntimeError("index the files first")


class Stream(IterableDataset[int]):
    """With attributes of its own, as libraries' streams have."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class NeedsMore(nn.Module):
    """A loss that cannot be made without an argument."""

    def __init__(self, weight: float) -> None:
        super().__init__()


class FullyShardedDataParallel(nn.Module):
    """Named as torch's own."""


SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 1).parameters()), 1)
LOADER = DataLoader(SAMPLES)
TWO = [LOADER, DataLoader(SAMPLES)]
of = "dataset_or_loader"


def one_by_one() -> Iterator[Any]:
    yield 1


@pytest.mark.parametrize(
    ("dataset", "model", "options", "error", "says"),
    [
        # what is no dataset
        ([], None, {}, ValueError, f"{of} is empty"),
        (one_by_one(), None, {}, TypeError, f"{of}=.* only once"),
        (42, None, {}, TypeError, f"{of}=42 .*__getitem__"),
        (LengthRaises(), None, {}, TypeError, r"LengthRaises has no length: len\(\) raises RuntimeError: index the files"),
        (Stream, None, {}, TypeError, rf"{of}=Stream is a class; {of}=Stream\(...\) would work"),
        ("data/", None, {}, TypeError, rf"{of}='data/' is a path.*ImageFolder\('data/'\) would work"),
        (pd.DataFrame({"x": [1.0]}), None, {}, TypeError, r"DataFrame looks up columns.*TensorDataset\(.*would work"),
        ({"train": SAMPLES}, None, {}, TypeError, r"looks up 'train', .*data\['train'\] would work"),
        # what holds data somewhere else
        (SimpleNamespace(get_train_dataloader=None), None, {}, TypeError, rf"{of}=.*tune_trainer\(trainer\) would work"),
        (SimpleNamespace(fit_loop=None), None, {}, TypeError, rf"{of}=.*lightning.tuned\(model, .*would work"),
        (SimpleNamespace(train_dataloader=None), None, {}, TypeError, r"tune\(datamodule.train_dataloader\(\), model\)"),
        (SimpleNamespace(dataset=SAMPLES), None, {}, TypeError, rf"{of}=.*tune\(simplenamespace.dataset, .*would work"),
        (SimpleNamespace(loaders=TWO), None, {}, TypeError, r"2 DataLoaders .*; one at a time, tune\(loader, model\), would"),
        (TWO, None, {}, TypeError, r"2 DataLoaders .*; one at a time, tune\(loader, model\), would work"),
        # data and model
        (nn.Sequential(nn.Linear(2, 2)), SAMPLES, {}, TypeError, rf"{of}=Sequential is a model.*tune\(dataset, model\)"),
        ([1, 2], SAMPLES, {}, TypeError, r"model=TensorDataset holds data.*tune\(dataset, model\) would work"),
        (SAMPLES, nn.Linear, {}, TypeError, r"model=Linear is a class; model=Linear\(...\) would work"),
        (SAMPLES, FullyShardedDataParallel(), {}, TypeError, r"sharded over ranks.*before it is sharded, or model=None"),
        # the step
        (SAMPLES, None, {"train_step": lambda batch: None}, TypeError, r"train_step=.*train_step\(model, batch\)"),
        (SAMPLES, None, {"train_step": -1}, ValueError, r"train_step=-1 is not the seconds of a step; train_step=0.05 would"),
        (SAMPLES, None, {"loss_fn": NeedsMore}, TypeError, r"loss_fn=NeedsMore is a class.*loss_fn=NeedsMore\(...\) would"),
        (SAMPLES, None, {"optimizer": SCHEDULER}, TypeError, r"optimizer=<torch.*has no step\(\) and zero_grad\(\)"),
        (SAMPLES, None, {"optimizer": torch.optim.LBFGS}, TypeError, "optimizer=LBFGS steps with a closure.*train_step"),
        (SAMPLES, None, {"device": "gpu:7"}, ValueError, r"device='gpu:7' is not a torch device; device='auto' would work"),
        (SAMPLES, None, {"device": "cuda:97"}, ValueError, r"device='cuda:97' is not there \(torch sees \d+ CUDA device"),
        # the parts of a loader
        (SAMPLES, None, {"batch_size": -1}, ValueError, r"batch_size=-1 .* would work"),
        (SAMPLES, None, {"batch_size": 2.5}, TypeError, r"batch_size=2.5 .* would work"),
        (SAMPLES, None, {"collate_fn": []}, TypeError, r"collate_fn=\[\] is not callable"),
        (SAMPLES, None, {"sampler": 3}, TypeError, r"sampler=3 gives no indices; sampler=None would work"),
        (DataLoader(SAMPLES, sampler=one_by_one()), None, {}, TypeError, "^sampler=.*only once.*a list of it would work"),
        (SAMPLES, None, {"sampler": []}, ValueError, "no sample in an epoch"),
        (SAMPLES, None, {"generator": 0}, TypeError, r"generator=0 is not a torch.Generator.*manual_seed\(0\) would work"),
        (SAMPLES, None, {"batch_size": 16, "drop_last": True}, ValueError, r"batch_size=16 .* batch_size=10 would work"),
        # what excludes each other
        (Stream(), None, {"sampler": range(3)}, ValueError, r"^sampler=.*IterableDataset.*sampler=None would work"),
        (SAMPLES, None, {"batch_sampler": [[0]], "batch_size": 4}, ValueError, "^batch_size=.*batch_sampler"),
        (LOADER, None, {"batch_size": 8}, ValueError, "^batch_size=.*existing DataLoader.*batch_size=None would work"),
        # arguments that tune() does not have
        (SAMPLES, None, {"num_workers": 4}, TypeError, r"=4 is not.*DataLoader\(dataset, num_workers=..., ...\), model\)"),
        (SAMPLES, None, {"bugdet": "60s"}, TypeError, r"bugdet='60s' is not an argument of tune\(\); budget=... would work"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_would_work(
    dataset: Any, model: Any, options: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        tune(dataset, model, **options)
    assert "would work" in str(caught.value)


def batched(samples: Any) -> Any: ...
def unbatched(samples: Any) -> Any: ...


class ThreadLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


HELD = DataLoader(SAMPLES, batch_size=5)


@pytest.mark.parametrize(
    ("given", "options", "size", "samples", "says"),
    [
        ([1, 2, 3] * 20, {}, 32, 60, "batch_size was not given: measured with 32; pass the one you train with"),
        (SAMPLES, {"batch_size": 16}, 16, 10, "an epoch has 10 samples, less than one batch of 16"),
        (SAMPLES, {"batch_size": np.int64(2)}, 2, 10, None),
        (LengthRaises(), {"batch_size": 2, "sampler": range(4)}, 2, 4, None),
        (LOADER, {}, 1, 10, None),
        (AutoLoader(SAMPLES), {}, 1, 10, None),
        (ThreadLoader(SAMPLES), {}, 1, 10, "ThreadLoader has an __iter__ of its own"),
        # a wrapper around one loader: webdataset's, timm's, Lightning's
        (Stream(pipeline=[HELD]), {}, 5, 10, f"{of}=Stream holds a DataLoader (pipeline[0]), which is what was tuned"),
        (SimpleNamespace(loader=HELD), {}, 5, 10, f"{of}=SimpleNamespace holds a DataLoader (loader)"),
        (SimpleNamespace(_iterables={"a": HELD}), {}, 5, 10, f"{of}=SimpleNamespace holds a DataLoader (_iterables['a'])"),
        # a pipeline that makes batches, and one that takes them apart again
        (Stream(pipeline=[len, batched]), {}, None, None, "the dataset makes its own batches, so the DataLoader makes none"),
        (Stream(pipeline=[batched, unbatched]), {"batch_size": 4}, 4, None, None),
    ],
)  # fmt: skip
def test_what_is_right_is_read_and_what_is_assumed_or_left_out_is_said(
    given: Any, options: Any, size: int | None, samples: int | None, says: str | None
) -> None:
    workload = make_workload(given, **options)
    assert (workload.data.batch_size, workload.data.samples_per_epoch()) == (size, samples)
    assert type(workload.data.batch_size) is type(size)
    assert len(workload.notes) == (says is not None)
    assert says is None or workload.notes[0].startswith(says)


# The step and its device


@pytest.mark.parametrize(
    ("device", "default", "cuda", "chosen"),
    [
        ("xpu:1", "cpu", None, "xpu:1"),
        ("cpu", "xpu:0", None, "xpu:0"),
        ("meta", "meta", None, "cpu"),
        ("cpu", "cpu", 0, "cuda"),
        ("cpu", "cpu", 2, "cuda:2"),
    ],
)
def test_auto_is_where_the_model_is_or_what_this_process_has_chosen(
    monkeypatch: pytest.MonkeyPatch, device: str, default: str, cuda: int | None, chosen: str
) -> None:
    model = nn.Linear(2, 2)
    monkeypatch.setattr(model, "parameters", lambda recurse=True: iter([SimpleNamespace(device=torch.device(device))]))
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(default))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if cuda is None else 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(cuda))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda)
    workload = make_workload(SAMPLES, model, batch_size=2, device="auto")
    assert workload.training.device == chosen
    if cuda:  # AND "cuda" is the one that this process has set
        assert make_workload(SAMPLES, batch_size=2, device="cuda").training.device == chosen


def test_finding_a_gpu_does_not_open_the_driver_which_would_break_a_later_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> int:
        raise AssertionError("the driver was opened")

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", opened, raising=False)
    inspect_machine()
    found = [make_workload(SAMPLES, batch_size=2, device=device).training.device for device in ("auto", "cuda:1")]
    assert found == ["cuda", "cuda:1"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loader: Stream(pipeline=[loader]),  # webdataset
        lambda loader: SimpleNamespace(loader=loader),  # timm
        lambda loader: SimpleNamespace(_iterables={"a": loader}),  # Lightning
    ],
)
def test_a_wrapper_around_one_loader_is_unwrapped_and_the_note_says_what_is_left_out(wrap: Any) -> None:
    wrapped = wrap(DataLoader(SAMPLES, batch_size=5))
    workload = make_workload(wrapped)
    assert (workload.data.dataset, workload.data.batch_size) == (SAMPLES, 5)
    assert any(type(wrapped).__name__ in note and "holds a DataLoader" in note for note in workload.notes)


@pytest.mark.process
def test_named_shared_memory_of_the_users_outlives_tuning() -> None:
    memory = SharedMemory(create=True, size=16)
    try:
        # WHEN a stream coordinates its workers through it, as MosaicML's do, THEN it is refused
        with pytest.raises(TypeError, match=r"Stream .* shared memory \(shared\['epoch'\]\).* would work"):
            make_workload(Stream(shared={"epoch": memory}))
        # WHEN it is a cache THEN no other process attaches to it, which would remove it at its end
        cached = TensorDataset(torch.zeros(8, 1))
        cached.memory = memory  # type: ignore[attr-defined]
        workload = make_workload(cached, batch_size=2)
        with open_probe(workload, inspect_machine(), None) as opened:
            assert isinstance(opened.probe.burst(LoaderConfig(), PLAN), Measurement)
        assert any("remove at its end" in note for note in opened.notes)
        assert Path("/dev/shm", memory.name).exists()
    finally:
        memory.close()
        memory.unlink()


# Files and databases


def test_an_output_that_cannot_be_written_is_refused_at_once_and_a_disk_that_fills_up_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a-file").touch()
    for place in (tmp_path, tmp_path / "a-file" / "loader.json"):
        with pytest.raises(ValueError, match=r"cannot be written .*output='loader.json' would work"):
            tune(SAMPLES, batch_size=8, output=place)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TuningResult, "save", no_space)
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine())
    result = tune(SAMPLES, batch_size=8, output=tmp_path / "x.json", progress=False)
    assert result.status in ("complete", "undecided")
    assert [warning.kind for warning in result.warnings] == ["not_written"]


def test_a_database_that_cannot_be_opened_is_refused_with_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    names_none = r"storage='nosuch://x' names no database .*storage='study.journal' would work"
    with pytest.raises(ValueError, match=names_none):
        open_database("nosuch://x")
    with pytest.raises(MissingExtraError, match=r"pip install 'autotune-loader\[postgres\]'"):
        open_database("postgresql+psycopg2://nobody@127.0.0.1:1/x")


def test_a_spawned_process_that_imports_the_script_does_not_tune_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)

    with pytest.raises(RuntimeError, match=r"imports it, and tunes once more; .*__main__.*would work"):
        make_workload(SAMPLES)
