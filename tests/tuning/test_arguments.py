"""Bad input: the error names the argument, its value and one that would work, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from autotune_loader import tune
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import StepTime, TrainingSide, Workload
from autotune_loader.tuning.arguments import make_workload

SAMPLES = TensorDataset(torch.zeros(10, 2))
DEFAULTS: dict[str, Any] = {
    "batch_size": None,
    "loss_fn": None,
    "train_step": None,
    "optimizer": None,
    "device": "cpu",
    "collate_fn": None,
    "sampler": None,
    "batch_sampler": None,
    "worker_init_fn": None,
    "generator": None,
    "drop_last": None,
}


def workload_of(dataset: Any = SAMPLES, **arguments: Any) -> tuple[Workload, list[str]]:
    return make_workload(dataset, None, **{**DEFAULTS, **arguments})


@pytest.mark.parametrize(
    ("argument", "value", "error"),
    [
        ("batch_size", -1, ValueError),
        ("batch_size", 0, ValueError),
        ("batch_size", 2.5, TypeError),
        ("batch_size", True, TypeError),
        ("loss_fn", "mse", TypeError),
        ("train_step", "fast", TypeError),
        ("collate_fn", [], TypeError),
        ("worker_init_fn", "init", TypeError),
        ("device", "gpu:7", ValueError),
        ("budget", "soon", ValueError),
        ("max_trials", 0, ValueError),
        ("sampler", 3, TypeError),
        ("batch_sampler", 3, TypeError),
        ("generator", 3, TypeError),
        ("drop_last", "yes", TypeError),
    ],
)
def test_a_wrong_option_is_named_with_its_value_and_one_that_would_work(
    argument: str, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        tune(SAMPLES, **{argument: value})  # type: ignore[arg-type]

    told = str(caught.value)
    assert told.startswith(f"{argument}=")
    assert (repr(value) if not isinstance(value, tuple) else value[0]) in told
    assert "would work" in told


class Empty(Dataset[int]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError


def one_by_one() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("dataset", "error", "says"),
    [
        (Empty(), ValueError, "empty"),
        ([], ValueError, "empty"),
        (one_by_one(), TypeError, "only once"),
        (iter([1, 2]), TypeError, "only once"),
        (42, TypeError, "__getitem__"),
        (None, TypeError, "__getitem__"),
        ({1, 2, 3}, TypeError, "__getitem__"),
    ],
)
def test_what_is_no_dataset_is_refused_with_one_that_would_work(
    dataset: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        workload_of(dataset, batch_size=2)

    assert "dataset_or_loader" in str(caught.value)
    assert "would work" in str(caught.value)


def test_an_epoch_smaller_than_a_batch_is_an_error_only_where_it_would_be_dropped() -> None:
    _, notes = workload_of(batch_size=16)
    assert notes == ["an epoch has 10 samples, less than one batch of 16"]

    with pytest.raises(ValueError, match=r"batch_size=16 .* drop_last=True .* batch_size=10 would work"):
        workload_of(batch_size=16, drop_last=True)


def test_a_sampler_without_an_index_is_named() -> None:
    with pytest.raises(ValueError, match="no sample in an epoch"):
        workload_of(batch_size=2, sampler=[])


@pytest.mark.parametrize("argument", ["batch_size", "collate_fn", "sampler", "batch_sampler", "drop_last"])
def test_an_existing_loader_has_its_own_parts(argument: str) -> None:
    value: Any = {"batch_size": 8, "drop_last": True}.get(argument, len)
    with pytest.raises(ValueError, match=f"^{argument}=.*existing DataLoader.*{argument}=None would work"):
        workload_of(DataLoader(SAMPLES), **{argument: value})


@pytest.mark.parametrize("argument", [{"batch_size": 4}, {"sampler": range(3)}, {"drop_last": True}])
def test_a_batch_sampler_excludes_what_it_decides(argument: dict[str, Any]) -> None:
    (name,) = argument
    with pytest.raises(ValueError, match=f"^{name}=.*batch_sampler"):
        workload_of(batch_sampler=[[0, 1]], **argument)


def test_a_sampler_has_no_meaning_for_an_iterable_dataset() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ValueError, match=r"^sampler=.*IterableDataset.*sampler=None would work"):
        workload_of(Stream(), batch_size=2, sampler=range(3))


def test_a_dataset_without_a_length_is_enough_where_a_sampler_gives_the_indices() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    workload, _ = workload_of(Endless(), batch_size=2, sampler=range(4))
    assert workload.data.samples_per_epoch() == 4

    with pytest.raises(TypeError, match="__len__"):
        workload_of(Endless(), batch_size=2)


def test_a_missing_batch_size_is_assumed_aloud() -> None:
    workload, notes = workload_of([1, 2, 3] * 20)

    assert workload.data.batch_size == 32
    assert notes == ["batch_size was not given: measured with 32; pass the one you train with"]


class NeedsMore(nn.Module):
    """A loss that cannot be made without an argument."""

    def __init__(self, weight: float) -> None:
        super().__init__()


class Unmeasured(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2)

    def __len__(self) -> int:
        raise NotImplementedError


SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 1).parameters()), 1)


class NeverIterated(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("the user's own loader must never be iterated")


def test_an_existing_loader_is_read_and_never_iterated() -> None:
    loader = NeverIterated(SAMPLES, batch_size=3, num_workers=2, shuffle=True, prefetch_factor=4)

    workload, _ = workload_of(loader)

    assert workload.own_config is not None
    assert (workload.own_config.num_workers, workload.own_config.prefetch_factor) == (2, 4)
    assert workload.data.sampler is loader.sampler
    assert workload.data.batch_size == 3


@pytest.mark.parametrize(
    ("dataset", "model", "options", "says"),
    [
        ("data/", None, {}, r"dataset_or_loader='data/' is a path.*ImageFolder\('data/'\) would work"),
        (Path("data"), None, {}, r"dataset_or_loader=.*data.* is a path"),
        (
            nn.Sequential(nn.Linear(2, 2)),
            SAMPLES,
            {},
            r"dataset_or_loader=Sequential is a model.*tune\(dataset, model\)",
        ),
        ([1, 2], SAMPLES, {}, r"model=TensorDataset holds data.*tune\(dataset, model\) would work"),
        ([1, 2], DataLoader(SAMPLES), {}, r"model=DataLoader holds data"),
        (SAMPLES, nn.Linear, {}, r"model=Linear is a class; model=Linear\(...\) would work"),
        (SAMPLES, "resnet50", {}, r"model=str is not callable; train_step="),
        (
            SAMPLES,
            None,
            {"train_step": "fast"},
            r"'fast' is not callable; train_step=0.05 \(seconds\) or train_step=lambda",
        ),
        (SAMPLES, None, {"train_step": lambda batch: None}, r"train_step=.*train_step\(model, batch\).*would work"),
        (SAMPLES, None, {"train_step": lambda model, batch, i: None}, r"train_step=.*train_step\(model, batch\)"),
        (
            SAMPLES,
            None,
            {"sampler": RandomSampler},
            r"sampler=RandomSampler is a class; sampler=RandomSampler\(...\) would",
        ),
        (SAMPLES, None, {"batch_sampler": 4}, r"batch_sampler=4 gives no indices; batch_sampler=None would work"),
        (SAMPLES, None, {"generator": 0}, r"generator=0 is not a torch.Generator.*manual_seed\(0\) would work"),
        (Empty, None, {}, r"dataset_or_loader=Empty is a class; dataset_or_loader=Empty\(...\) would work"),
        (DataLoader(Unmeasured()), None, {}, r"Unmeasured has no length: len\(\) raises NotImplementedError"),
        (SAMPLES, None, {"optimizer": SCHEDULER}, r"optimizer=<torch.*has no step\(\) and zero_grad\(\)"),
        (SAMPLES, None, {"optimizer": [1]}, r"optimizer=\[1\] has no step\(\).*torch.optim.AdamW.*would work"),
        (SAMPLES, None, {"loss_fn": NeedsMore}, r"loss_fn=NeedsMore is a class.*loss_fn=NeedsMore\(...\) would work"),
    ],
)
def test_what_stands_in_the_wrong_place_is_named(dataset: Any, model: Any, options: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        make_workload(dataset, model, **{**DEFAULTS, **options})


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            {"shuffle": True},
            r"shuffle=True is not an argument of tune\(\); tune\(DataLoader\(dataset, shuffle=.*would work",
        ),
        (
            {"num_workers": 4},
            r"num_workers=4 is not an argument.*DataLoader\(dataset, num_workers=..., ...\), model\).* would work",
        ),
        ({"pin_memory": True}, r"pin_memory=True is not an argument"),
        ({"bugdet": "60s"}, r"bugdet='60s' is not an argument of tune\(\); budget=... would work"),
        ({"batchsize": 4}, r"batchsize=4 is not an argument of tune\(\); batch_size=... would work"),
    ],
)
def test_an_argument_of_the_loader_is_answered(option: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        tune(SAMPLES, batch_size=2, **option)


def test_a_batch_size_may_be_numpys() -> None:
    workload, _ = workload_of(batch_size=np.int64(2))

    assert type(workload.data.batch_size) is int


def test_a_few_samples_of_one_shape_are_a_dataset() -> None:
    workload, _ = workload_of([torch.rand(3)] * 4, batch_size=2)

    assert workload.data.samples_per_epoch() == 4


def test_a_loss_may_be_a_class() -> None:
    workload, _ = workload_of(batch_size=2, loss_fn=nn.CrossEntropyLoss)

    assert isinstance(workload.training.loss_fn, nn.CrossEntropyLoss)


def test_parts_that_were_compiled_are_kept_and_said() -> None:
    # GIVEN a model with a part on which compile() was called
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0]._compiled_call_impl = model[0].forward  # what compile() sets
    # WHEN it is taken up THEN it is known by name, since a copy forgets it
    workload, notes = make_workload(SAMPLES, model, **{**DEFAULTS, "batch_size": 2})
    assert workload.training.compiled == ("0",)
    assert "model.compile() is called anew" in notes[0]


class FullyShardedDataParallel(nn.Module):
    """Named as torch's own."""


@pytest.mark.parametrize("wrap", [lambda shard: shard, lambda shard: nn.Sequential(shard)])
def test_a_sharded_model_is_refused_with_what_to_pass(wrap: Any) -> None:
    with pytest.raises(TypeError, match=r"sharded over ranks.*before it is sharded, or model=None"):
        make_workload(SAMPLES, wrap(FullyShardedDataParallel()), **{**DEFAULTS, "batch_size": 2})


class OnDevice(nn.Module):
    """A model whose parameters say that they are on a device that this machine lacks."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self._said = [SimpleNamespace(device=torch.device(device)) for device in devices]

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._said)


@pytest.mark.parametrize(
    ("devices", "default", "chosen"),
    [
        (("cpu",), "cpu", "cpu"),
        (("xpu:1", "xpu:1"), "cpu", "xpu:1"),
        (("cpu", "mps"), "cpu", "mps"),
        (("cpu",), "xpu:0", "xpu:0"),
        (("meta",), "meta", "cpu"),
    ],
)
def test_auto_is_where_the_model_is_or_what_this_process_has_chosen(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], default: str, chosen: str
) -> None:
    # GIVEN a model on a device, a default device, and no CUDA
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(default))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    # WHEN the device is "auto" THEN it is the model's, or else the default
    workload, _ = make_workload(SAMPLES, OnDevice(*devices), **{**DEFAULTS, "batch_size": 2, "device": "auto"})
    assert workload.training.device == chosen


@pytest.mark.parametrize(("current", "chosen"), [(None, "cuda"), (0, "cuda"), (2, "cuda:2")])
def test_auto_is_the_device_that_was_set(monkeypatch: pytest.MonkeyPatch, current: int | None, chosen: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)

    workload, _ = workload_of(batch_size=2, device="auto")

    assert workload.training.device == chosen


def test_finding_a_gpu_does_not_open_the_driver_which_would_break_a_later_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a torch for CUDA, two GPUs by NVML, and a driver that tells when it is opened
    def opened() -> int:
        raise AssertionError("the driver was opened")

    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", opened, raising=False)
    # WHEN the machine is looked at and the arguments are read
    inspect_machine()
    found = [workload_of(batch_size=2, device=device)[0].training.device for device in ("auto", "cuda:1")]
    # THEN the GPUs are found
    assert found == ["cuda", "cuda:1"]


def test_the_seconds_of_a_step_stand_in_for_it_and_the_model_stays_at_home() -> None:
    # GIVEN a step known by its time alone WHEN the arguments are read
    workload, _ = make_workload(SAMPLES, OnDevice("cuda:0"), **{**DEFAULTS, "batch_size": 2, "train_step": 0.05})
    # THEN a wait is tuned against, which uses no core and needs no GPU
    assert (workload.training, workload.on_cpu) == (TrainingSide(train_step=StepTime(0.05)), False)
    with pytest.raises(ValueError, match=r"train_step=-1 is not the seconds of a step; train_step=0.05 would work"):
        workload_of(batch_size=2, train_step=-1)
