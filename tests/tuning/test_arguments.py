"""How `tune()` reads what it is given: what is wrong is named with what would work; wrappers are unwrapped or answered."""

import inspect
import multiprocessing
from types import SimpleNamespace

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autotune_loader import AutoLoader, tune
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.run import parse_options

SAMPLES = TensorDataset(torch.zeros(10, 2))
LOADER, HELD = DataLoader(SAMPLES), DataLoader(SAMPLES, batch_size=5)
MINIMIZES = optuna.create_study(direction="minimize")


class WithoutLength:
    def __getitem__(self, index):
        return index


class Pipeline(IterableDataset):
    """A library's wrapper, which is a stream."""

    def __init__(self):
        self.pipeline = [HELD]

    def __iter__(self):
        return iter(range(8))


class ThreadLoader(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.parametrize(
    ("data", "model", "options", "error", "says"),
    [
        ([], None, {}, ValueError, "data is empty"),
        (iter([1]), None, {}, TypeError, "data=.* only once"),
        (WithoutLength(), None, {}, TypeError, r"WithoutLength object .*neither a DataLoader, .* would work"),
        (Pipeline, None, {}, TypeError, r"data=Pipeline is a class; data=Pipeline\(...\) would work"),
        (pd.DataFrame({"x": [1]}), None, {}, TypeError, "(?s)data=.* a TensorDataset of its columns would work"),
        ({"train": [1]}, None, {}, TypeError, r"data=dict has the keys 'train', and .*; data\['train'\] would work"),
        ("data/", None, {}, TypeError, r"data='data/' is a path.*ImageFolder\('data/'\) would work"),
        # what holds data somewhere else
        (SimpleNamespace(get_train_dataloader=None), None, {}, TypeError, r"data=.*tune_trainer\(trainer\) would work"),
        (SimpleNamespace(fit_loop=None), None, {}, TypeError, r"data=.*lightning.tuned\(model, .*would work"),
        (SimpleNamespace(loaders=[LOADER, HELD]), None, {}, TypeError, r"2 DataLoaders .*one at a time, tune\(loader"),
        # data and model
        (nn.Linear(2, 2), SAMPLES, {}, TypeError, r"data=Linear is a model.*tune\(data, model\)"),
        ([1, 2], SAMPLES, {}, TypeError, r"model=TensorDataset holds data.*tune\(data, model\) would work"),
        (SAMPLES, nn.Linear, {}, TypeError, r"model=Linear is a class; model=Linear\(...\) would work"),
        # the step
        (SAMPLES, None, {"train_step": -1}, ValueError, r"train_step=-1 is not the seconds of a step; train_step=0.05 would"),
        (SAMPLES, None, {"train_step": len}, TypeError, r"=len cannot be called as train_step\(model, batch\); train_step=la"),
        (SAMPLES, None, {"optimizer": 3}, TypeError, r"optimizer=3 has no step\(\) .*; optimizer=torch.* would work"),
        (SAMPLES, None, {"loss_fn": nn.AdaptiveLogSoftmaxWithLoss}, TypeError, r"loss_fn=A.* is a class .*\(...\) would work"),
        (SAMPLES, None, {"device": "gpu:7"}, ValueError, r"device='gpu:7' is not a torch device; device='auto' would work"),
        (SAMPLES, None, {"device": "cuda:97"}, ValueError, r"device='cuda:97' does not exist \(PyTorch sees \d+\)"),
        (SAMPLES, None, {"device": "meta"}, ValueError, "device='meta' computes nothing; device='auto' would work"),
        (SAMPLES, None, {"device": "mps"}, ValueError, r"device='mps' has no streams .*cpu.*train_step=0.05.*would work"),
        # the parts of a loader
        (SAMPLES, None, {"batch_size": -1}, ValueError, r"batch_size=-1 .* would work"),
        (SAMPLES, None, {"collate_fn": []}, TypeError, r"collate_fn=\[\] is not callable"),
        (DataLoader(SAMPLES, sampler=iter([1])), None, {}, TypeError, "^sampler=.*only once.*a list of it would work"),
        (DataLoader(SAMPLES, sampler=[]), None, {}, ValueError, "no sample in an epoch"),
        (DataLoader(SAMPLES, 16, drop_last=True), None, {}, ValueError, r"batch_size=16 .* batch_size=10 would work"),
        (LOADER, None, {"batch_size": 8}, ValueError, "^batch_size=.*a DataLoader .*batch_size=None would work"),
        # how to search
        (SAMPLES, None, {"budget": "soon"}, ValueError, "budget='soon' cannot be read.*budget='60s' would work"),
        (SAMPLES, None, {"budget": 0.5}, ValueError, "budget=0.5 is not at least 1 s; budget='60s' would work"),
        (SAMPLES, None, {"budget": None}, TypeError, "budget=None is neither a number of seconds nor .*would work"),
        (SAMPLES, None, {"max_workers": -1}, ValueError, "max_workers=-1 must be an integer >= 0; max_workers=1 would work"),
        (SAMPLES, None, {"tolerance": 1}, ValueError, "tolerance=1 must be at least 0 and below 1; tolerance=0.02 would work"),
        (SAMPLES, None, {"progress": "on"}, TypeError, "progress='on' is not a bool; progress=False would work"),
        (SAMPLES, None, {"allow": ("batch-size",)}, ValueError, "allow='batch_size' would work"),
        (SAMPLES, None, {"allow": 3}, TypeError, r"allow=3 is not a collection of names; allow=\('in_order',\) would work"),
        (SAMPLES, None, {"output": False}, TypeError, "output=False is not a path; output='loader.json' would work"),
        (SAMPLES, None, {"study": "x.db"}, TypeError, r"study='x.db' is not an optuna.Study; study=optuna.create_.*would work"),
        (SAMPLES, None, {"study": MINIMIZES}, ValueError, r"^study= must maximise .*direction='maximize'\) would work"),
        (SAMPLES, None, {"sampler": "tpe"}, TypeError, r"sampler='tpe' is not an Optuna sampler; .*TPESampler\(\) would w"),
        # arguments that tune() does not have: a DataLoader says them
        (SAMPLES, None, {"sampler": [0, 1]}, TypeError, r"not an Optuna sampler; tune\(DataLoader\(dataset, sampler=..., ..."),
        (SAMPLES, None, {"num_workers": 4}, TypeError, r"=4 is not.*DataLoader\(dataset, num_workers=..., ...\), model\)"),
        (SAMPLES, None, {"bugdet": "60s"}, TypeError, r"bugdet='60s' is not an argument of tune\(\); budget=... would work"),
        (SAMPLES, None, {"reuse": True}, TypeError, r"reuse=True is not an argument of tune\(\); one of data, .* would work"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_would_work(data, model, options, error, says):
    with pytest.raises(error, match=says) as caught:
        tune(data, model, **options)
    assert "would work" in str(caught.value)


def test_tune_has_the_arguments_that_are_promised_and_reads_each_way_to_write_them():
    parts = "data model batch_size collate_fn worker_init_fn train_step loss_fn optimizer device"
    search = "budget max_workers allow tolerance study sampler output progress"
    assert " ".join(inspect.signature(tune).parameters) == f"{parts} {search}"
    budgets = [parse_options(budget=given).budget_s for given in (60, " 60 s ", "1.5min", "5m")]
    assert budgets == [60, 60, 90, 300]
    assert parse_options(allow="in_order") == parse_options(allow={"in_order"})


@pytest.mark.parametrize(
    ("given", "options", "size", "samples", "says"),
    [
        ([1, 2, 3] * 20, {}, 32, 60, "batch_size was not given: trials use 32; pass the batch size you train with"),
        (SAMPLES, {"batch_size": 16}, 16, 10, "an epoch has 10 samples, less than one batch of 16"),
        (SAMPLES, {"batch_size": np.int64(2)}, 2, 10, ""),
        (DataLoader(WithoutLength(), batch_size=2, sampler=range(4)), {}, 2, 4, ""),
        (AutoLoader(SAMPLES), {}, 1, 10, ""),
        (ThreadLoader(SAMPLES), {}, 1, 10, "ThreadLoader has its own __iter__, which the trials do not run"),
        # a wrapper around one loader: webdataset's, Lightning's
        (Pipeline(), {}, 5, 10, "data=Pipeline holds a DataLoader (pipeline[0]), which was tuned: apply the config"),
        (SimpleNamespace(_iterables={"a": HELD}), {}, 5, 10, "data=SimpleNamespace holds a DataLoader (_iterables['a'])"),
    ],
)  # fmt: skip
def test_what_is_right_is_read_and_what_is_assumed_or_left_out_is_said(given, options, size, samples, says):
    workload = make_workload(given, **options)
    assert (workload.data.batch_size, workload.data.samples_per_epoch()) == (size, samples)
    assert type(workload.data.batch_size) is int
    assert len(workload.notes) == bool(says)
    assert all(note.startswith(says) for note in workload.notes)


DEVICES = {
    "no GPU": ("auto", "meta", "meta", None, "0", "cpu"),
    "torch's default": ("auto", "cpu", "cuda:1", 0, "0", "cuda:1"),
    "a GPU": ("auto", "cpu", "cpu", 0, "0", "cuda"),
    "what is set": ("auto", "cpu", "cpu", 2, "0", "cuda:2"),
    "cuda is what is set": ("cuda", "cpu", "cpu", 2, "0", "cuda:2"),
    "a rank of a job": ("auto", "cpu", "cpu", 0, "2", "cuda:2"),
}


@pytest.mark.parametrize(("asked", "used", "default", "cuda", "rank", "chosen"), DEVICES.values(), ids=DEVICES)
def test_auto_is_where_the_model_is_or_what_is_chosen(monkeypatch, asked, used, default, cuda, rank, chosen):
    model = nn.Linear(2, 2)
    monkeypatch.setattr(model, "parameters", lambda recurse=True: iter([SimpleNamespace(device=torch.device(used))]))
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(default))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if cuda is None else 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(cuda))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert make_workload(SAMPLES, model, batch_size=2, device=asked).training.device == chosen


def test_a_model_is_trained_without_the_wrapper_of_its_ranks():
    wrapper = type("DistributedDataParallel", (nn.Module,), {"module": nn.Linear(2, 2)})
    assert make_workload(SAMPLES, wrapper(), batch_size=2).training.model is wrapper.module


def test_finding_a_gpu_does_not_open_the_driver_which_would_break_a_later_fork(monkeypatch):
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: pytest.fail("it was opened"), raising=False)
    assert make_workload(SAMPLES, batch_size=2).training.device == "cuda"


def test_a_spawned_process_that_imports_the_script_does_not_tune_again(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match=r"imports it, and tunes once more; .*__main__.*would work"):
        make_workload(SAMPLES)
