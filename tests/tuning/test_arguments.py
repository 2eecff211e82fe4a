"""How `tune()` reads what it is given, what it may search, and what a choice changes."""

import inspect
import multiprocessing
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autotune_loader import AutoLoader, tune
from autotune_loader.bursts.bench import accelerator_facts
from autotune_loader.bursts.parent import OpenProbe
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload
from autotune_loader.search.space import Limits, Space
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.run import TuneOptions, common_space, make_run
from autotune_loader.values import LoaderConfig
from tests.support import SimulatedMachine, with_workers
from tests.support.data import Stream
from tests.support.tuned import simulated_warmup

ROWS = TensorDataset(torch.zeros(10, 2))
LOADER, HELD = DataLoader(ROWS), DataLoader(ROWS, batch_size=5)
DEEP = SimpleNamespace(_iterables={"a": SimpleNamespace(held=HELD)})
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


T, V = TypeError, ValueError
WRONG = [
    ([], {}, V, "data is empty"),
    (iter([1]), {}, T, "data=.* only once.*Try an IterableDataset whose __iter__ makes a new "),
    (WithoutLength(), {}, T, r"WithoutLength object .*neither a DataLoader, "),
    (Pipeline, {}, T, r"data=Pipeline is a class. Try data=Pipeline\(...\)."),
    (pd.DataFrame({"x": [1]}), {}, T, "(?s)data=.* Try a TensorDataset of its columns"),
    ({"train": [1]}, {}, T, r"data=dict has the keys 'train', .*Try data\['train'\]"),
    ("data/", {}, T, r"data='data/' is a path.*Try .*ImageFolder\('data/'\)"),
    # what holds data somewhere else
    (SimpleNamespace(get_train_dataloader=None), {}, T, r"data=.*Try .*tune_trainer\(trainer\)"),
    (SimpleNamespace(fit_loop=None), {}, T, r"data=.*Try .*lightning.tuned\(model, "),
    (SimpleNamespace(loaders=[LOADER, HELD]), {}, T, r"2 .*\(loaders\[0\], loaders\[1\]\)\. Try"),
    (SimpleNamespace(inner=DEEP), {}, T, "is neither a DataLoader, nor .* Try a list of samples"),
    # data and model
    (nn.Linear(2, 2), {"model": ROWS}, T, r"data=Linear is a model.*tune\(data, model\)"),
    ([1, 2], {"model": ROWS}, T, r"model=TensorDataset holds data.*tune\(data, model\)"),
    (ROWS, {"model": nn.Linear}, T, r"model=Linear is a class. Try model=Linear\(...\)."),
    # the step
    (ROWS, {"train_step": -1}, V, r"train_step=-1 is not the seconds of a step. Try train_step="),
    (ROWS, {"train_step": len}, T, r"=len cannot be called as train_step\(model, batch\). Try "),
    (ROWS, {"optimizer": 3}, T, r"optimizer=3 has no step\(\) .*. Try optimizer=torch.*."),
    (ROWS, {"loss_fn": nn.AdaptiveLogSoftmaxWithLoss}, T, r"=A.* is a class .*Try .*\(...\)"),
    (ROWS, {"device": "gpu:7"}, V, r"device='gpu:7' is not a torch device. Try device='auto'"),
    (ROWS, {"device": "cuda:97"}, V, r"device='cuda:97' does not exist \(PyTorch sees \d+\)"),
    (ROWS, {"device": "meta"}, V, "device='meta' computes nothing. Try device='auto'."),
    (ROWS, {"device": "mps"}, V, r"device='mps' has no streams .*cpu.*train_step=0.05"),
    # the parts of a loader
    (ROWS, {"batch_size": 0}, V, r"batch_size=0 must be an integer >= 1. Try batch_size=1."),
    (ROWS, {"collate_fn": []}, T, r"collate_fn=\[\] is not callable"),
    (DataLoader(ROWS, sampler=iter([1])), {}, T, "^sampler=.*only once.*Try a list of it"),
    (DataLoader(ROWS, sampler=[]), {}, V, "no sample in an epoch"),
    (DataLoader(ROWS, 16, drop_last=True), {}, V, r"batch_size=16 .* Try batch_size=10"),
    (LOADER, {"batch_size": 8}, V, "^batch_size=.*a DataLoader .*Try batch_size=None"),
    # how to search
    (ROWS, {"budget": "soon"}, V, "budget='soon' cannot be read.*Try budget='60s'"),
    (ROWS, {"budget": 0.5}, V, "budget=0.5 is not at least 1 s. Try budget='60s'."),
    (ROWS, {"budget": None}, T, "budget=None is neither a number of seconds nor "),
    (ROWS, {"max_workers": -1}, V, "max_workers=-1 must be an integer >= 0. Try max_workers=1"),
    (ROWS, {"tolerance": 1}, V, "tolerance=1 must be at least 0 and below 1. Try tolerance=0.02"),
    (ROWS, {"tolerance": -1e-9}, V, "tolerance=-1e-09 must be at least 0 and below 1. Try tol"),
    (ROWS, {"progress": "on"}, T, "progress='on' is not a bool. Try progress=False."),
    (ROWS, {"allow": ("in-order",)}, V, "Try allow='in_order'"),
    (ROWS, {"allow": 3}, T, r"allow=3 is not a collection of names. Try allow=\('in_order',\)"),
    (ROWS, {"output": False}, T, "output=False is not a path. Try output='loader.json'."),
    (ROWS, {"trace": 3}, T, "trace=3 is not a path. Try trace='trace.json'."),
    (ROWS, {"study": "x.db"}, T, r"study='x.db' is not an optuna.Study. Try study=optuna.create_"),
    (ROWS, {"study": MINIMIZES}, V, r"^study= must maximise .*direction='maximize'\)"),
    (ROWS, {"sampler": "tpe"}, T, r"sampler='tpe' is not an Optuna sampler.*TPESampler"),
    # arguments that tune() does not have: a DataLoader says them
    (ROWS, {"sampler": [0, 1]}, T, r"not an Optuna sampler. Try tune\(DataLoader\(dataset, "),
    (ROWS, {"num_workers": 4}, T, r"=4 is not.*DataLoader\(dataset, num_workers=..."),
    (ROWS, {"bugdet": "60s"}, T, r"bugdet='60s' is not an argument of tune\(\). Try budget=..."),
    (ROWS, {"reuse": True}, T, r"reuse=True is not an argument of tune\(\). Try one of data, "),
]  # fmt: skip


@pytest.mark.parametrize(("data", "options", "error", "says"), WRONG)
def test_what_is_wrong_is_named_with_what_works(data, options, error, says):
    with pytest.raises(error, match=says) as caught:
        tune(data, **options)
    assert ". Try " in str(caught.value)


def test_tune_has_the_arguments_that_are_promised():
    parts = "data model batch_size collate_fn worker_init_fn train_step loss_fn optimizer device"
    search = "budget max_workers allow tolerance study sampler output trace progress"
    assert " ".join(inspect.signature(tune).parameters) == f"{parts} {search}"


def test_options_are_read_as_people_write_them():
    budgets = [TuneOptions(budget=given).budget_s for given in (60, " 60 s ", "1.5min", "5m")]
    assert budgets == [60, 60, 90, 300]
    assert TuneOptions(tolerance=0).tolerance == 0
    assert TuneOptions(allow="in_order").allow == TuneOptions(allow={"in_order"}).allow


ASSUMED = "batch_size was not given: trials use 32; pass the batch size you train with"
SMALL = "an epoch has 10 samples, less than one batch of 16"
WRAPPED = "data=Pipeline holds a DataLoader (pipeline[0]), which was tuned: apply the config"
RIGHT = [
    ([1, 2, 3] * 20, {}, 32, 60, ASSUMED),
    (ROWS, {"batch_size": 16}, 16, 10, SMALL),
    (ROWS, {"batch_size": np.int64(10)}, 10, 10, ""),
    (DataLoader(WithoutLength(), batch_size=2, sampler=range(4)), {}, 2, 4, ""),
    (AutoLoader(ROWS), {}, 1, 10, ""),
    (ThreadLoader(ROWS), {}, 1, 10, "ThreadLoader has its own __iter__, which the trials"),
    # a wrapper around one loader: webdataset's, Lightning's
    (Pipeline(), {}, 5, 10, WRAPPED),
    (DEEP, {}, 5, 10, "data=SimpleNamespace holds a DataLoader (_iterables['a'].held), which was"),
    ({"a": HELD}, {}, 5, 10, "data=dict holds a DataLoader (['a']), which was tuned"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "options", "size", "samples", "says"), RIGHT)
def test_what_is_assumed_or_left_out_is_said(given, options, size, samples, says):
    workload = make_workload(given, **options)
    assert workload.data.batch_size == size
    assert type(workload.data.batch_size) is int
    assert workload.data.samples_per_epoch() == samples
    assert len(workload.notes) == bool(says)
    assert all(note.startswith(says) for note in workload.notes)


DEVICES = {
    # asked for, where the model is, torch's default, current device (None: no GPU), rank: chosen
    "no GPU": ("auto", "meta", "meta", None, "0", "cpu"),
    "torch's default": ("auto", "cpu", "cuda:1", 0, "0", "cuda:1"),
    "a GPU": ("auto", "cpu", "cpu", 0, "0", "cuda"),
    "what is set": ("auto", "cpu", "cpu", 2, "0", "cuda:2"),
    "cuda is what is set": ("cuda", "cpu", "cpu", 2, "0", "cuda:2"),
    "a rank of a job": ("auto", "cpu", "cpu", 0, "2", "cuda:2"),
}


@pytest.mark.parametrize("case", DEVICES.values(), ids=DEVICES)
def test_auto_is_the_models_device_or_chosen(monkeypatch, case):
    asked, used, default, cuda, rank, chosen = case
    model, placed = nn.Linear(2, 2), SimpleNamespace(device=torch.device(used))
    monkeypatch.setattr(model, "parameters", lambda recurse=True: iter([placed]))
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(default))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if cuda is None else 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(cuda))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda)
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert make_workload(ROWS, model, batch_size=2, device=asked).training.device == chosen


def test_a_model_is_trained_without_its_ranks_wrapper():
    wrapper = type("DistributedDataParallel", (nn.Module,), {"module": nn.Linear(2, 2)})
    assert make_workload(ROWS, wrapper(), batch_size=2).training.model is wrapper.module


def test_finding_a_gpu_does_not_open_the_driver(monkeypatch):
    # GIVEN that no child could use it once it is open, which this process forks
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    opened = Mock(side_effect=lambda: pytest.fail("it was opened"))
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", opened, raising=False)
    assert make_workload(ROWS, batch_size=2).training.device == "cuda"


def test_a_spawned_import_does_not_tune_again(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(RuntimeError, match=r"imports it, and tunes once more. .*__main__"):
        make_workload(ROWS)


# What is searched


class Sharded(Stream):
    num_shards = 2


class ToldItsEpoch(TensorDataset):
    epoch = 0


def data(given=100, batch_size=8, **parts):
    """A dataset, or one of so many rows."""
    dataset = TensorDataset(torch.zeros(given, 3)) if isinstance(given, int) else given
    return DataSide.from_dataset(dataset, batch_size=batch_size, **parts)


STREAM = Stream(lambda index: index, 100)
LONG, TOLD = data(800), data(ToldItsEpoch(torch.zeros(100, 3)))


def run_of(side=LONG, allow=(), training=None, own=None, max_workers=None, why=None, **ready):
    workload = Workload(data=side, training=training or TrainingSide(), own_config=own)
    opened = OpenProbe(probe=None, warmup=simulated_warmup(SimulatedMachine(), **ready))
    machine = replace(inspect_machine(), why_no_workers=why)
    return make_run(workload, opened, machine, TuneOptions(allow=allow, max_workers=max_workers))


NO_SIZE = "batch_size is not tuned: the DataLoader has no batch_size. Try one with a batch_size."
NO_ROOM = "batch_size is not tuned: an epoch of 1 samples has room for no other batch size than 1"
SIZES = {
    "map-style": (data(), (None, 16, 32, 4), []),
    "a small epoch": (data(20), (None, 16, 4), []),
    "a stream": (data(STREAM), (None, 16, 32, 4), []),
    "no batches": (data(batch_size=None), (None,), [NO_SIZE]),
    "one sample": (data(1, batch_size=1), (None,), [NO_ROOM]),
}


@pytest.mark.parametrize(("side", "sizes", "notes"), SIZES.values(), ids=SIZES)
def test_batch_sizes_are_doublings_of_ones_own(side, sizes, notes):
    assert run_of(side).space.batch_size == (None,)
    run = run_of(side, allow="batch_size")
    assert run.space.batch_size == sizes
    assert [note for note in run.notes if note.startswith("batch_size")] == notes


MOST = {
    "free": (LONG, {}, 64),
    "asked": (LONG, {"max_workers": 3}, 3),
    "epoch": (data(80), {}, 10),  # a worker beyond the batches of an epoch never gets one
    "shards": (data(Sharded(lambda index: index, 100)), {}, 2),
    "repeats": (data(STREAM), {"most_workers": 1}, 1),
    "shared file": (LONG, {"most_workers": 0}, 0),
    "no process can be started": (LONG, {"why": "this process is daemonic"}, 0),
}


@pytest.mark.parametrize(("side", "given", "most"), MOST.values(), ids=MOST)
def test_no_more_workers_are_tried_than_are_right(side, given, most):
    run = run_of(side, **given)
    assert run.space.max_workers == most
    assert [*run.notes] == [why for name, why in given.items() if name == "why"]
    # AND the user's own number is legal whatever it is
    own = with_workers(70)
    assert run_of(side, own=own, **given).space.veto(own) is None


SPAWNS = {
    "side": data(multiprocessing_context="spawn"),
    "own": with_workers(1, multiprocessing_context="spawn"),
}


@pytest.mark.parametrize(
    ("side", "start_s", "each_core"),
    [(LONG, 9.0, 64), (SPAWNS["side"], 9.0, 5), (SPAWNS["side"], 90.0, 1)],
)
def test_no_more_workers_are_tried_than_start(side, start_s, each_core):
    run, most = run_of(side, start_s=start_s), min(64, each_core * inspect_machine().usable_cores)
    assert run.space.max_workers == most
    said = [note for note in run.notes if "a budget above 60 s would try more" in note]
    assert bool(said) == (most < 64)
    # AND where those that are asked for just start, no more is said
    just = 5 * inspect_machine().usable_cores
    assert run_of(SPAWNS["side"], start_s=9.0, max_workers=just).notes == ()


KEEPS = with_workers(2, persistent_workers=True)
CUDA = {"training": TrainingSide(device="cuda:1")}
WAIT = {"training": TrainingSide(train_step=StepTime(0.05))}


@pytest.mark.parametrize(
    ("given", "knob", "unless_allowed", "allowed"),
    [
        (SPAWNS, "multiprocessing_context", "spawn", None),
        (SPAWNS, "in_order", (True,), (True, False)),
        # `set_epoch` is called on the dataset here; workers that live on keep the copy of the first
        ({}, "persistent_workers", False, True),
        ({"own": KEEPS}, "persistent_workers", True, None),
        ({"own": KEEPS, "side": TOLD}, "persistent_workers", False, True),
        ({"side": TOLD}, "persistent_workers", False, True),
        (CUDA, "pin_memory", (True, False), None),
        (CUDA, "device_prefetch", (0,), (0, 1, 2)),
        (WAIT, "pin_memory", (False,), None),
        (WAIT, "device_prefetch", (0,), (0,)),
    ],
)
def test_what_is_searched_is_safe_or_allowed(given, knob, unless_allowed, allowed):
    run = run_of(**given)
    assert getattr(run.space, knob) == unless_allowed
    assert run.baseline == given.get("own", LoaderConfig())
    assert allowed is None or getattr(run_of(allow=knob, **given).space, knob) == allowed


def test_device_memory_is_what_no_other_job_holds(monkeypatch):
    # GIVEN 80 bytes: another job has 30, the child 10, and this process, which will train, 5
    asked = {
        "mem_get_info": (35, 80),
        "get_device_properties": SimpleNamespace(name="H100 MIG 1g.10gb"),
    }
    for function, answer in asked.items():
        monkeypatch.setattr(torch.cuda, function, {torch.device("cuda:1"): answer}.get)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", Mock(side_effect=[10, 5]))
    run = run_of(**CUDA, **accelerator_facts(torch.device("cuda:1")))
    assert run.space.limits.device_bytes == 50
    assert run.fingerprint.gpu == "H100 MIG 1g.10gb"
    # AND a step on the CPU has none
    assert accelerator_facts(torch.device("cpu")) == {}
    assert run_of().space.limits.device_bytes is None


def test_the_tightest_limits_of_all_ranks_hold():
    limits = (100, None, 50), (200, 70, 20), (100, 70, 20)
    one, other, both = (
        Limits(shm_bytes=shm, memory_bytes=memory, descriptors=fds) for shm, memory, fds in limits
    )
    ranks = [Space(max_workers=8, limits=one), Space(max_workers=6, limits=other)]
    assert common_space(ranks) == Space(max_workers=6, limits=both)
