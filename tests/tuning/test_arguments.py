"""How `tune()` reads what it is given: wrong input is named with a value that would work, before anything runs; wrappers of
libraries, imitated, are unwrapped or answered with a call that works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from autotune_loader import cli, tune
from autotune_loader.machine.facts import inspect_machine
from autotune_loader.pipeline.workload import StepTime, TrainingSide
from autotune_loader.probe.opening import open_probe
from autotune_loader.results.loader_file import ENDED
from autotune_loader.results.result import TuningResult
from autotune_loader.tuning.arguments import make_workload
from autotune_loader.tuning.assemble import NOT_WRITTEN
from autotune_loader.tuning.study import open_database
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.errors import MissingExtraError, WorkloadError
from autotune_loader.values.measurement import Measurement
from autotune_loader.values.plan import BurstPlan
from tests.support import SimulatedMachine, on_simulated_machines

SAMPLES = TensorDataset(torch.zeros(10, 2))
PLAN = BurstPlan(max_s=0.2, min_s=0.1)


class Empty(Dataset[int]):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> int:
        raise IndexError


class Endless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class LengthRaises(Endless):
    def __len__(self) -> int:
        raise RuntimeError("index the files first")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class StreamWithoutLength(Stream):
    def __len__(self) -> int:
        raise AttributeError("_length")


class NeedsMore(nn.Module):
    """A loss that cannot be made without an argument."""

    def __init__(self, weight: float) -> None:
        super().__init__()


class FullyShardedDataParallel(nn.Module):
    """Named as torch's own."""


class NeverIterated(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("the user's own loader must never be iterated")


SCHEDULER = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(2, 1).parameters()), 1)
LOADER = DataLoader(SAMPLES)
of = "dataset_or_loader"


def one_by_one() -> Iterator[Any]:
    yield 1


@pytest.mark.parametrize(
    ("dataset", "model", "options", "error", "says"),
    [
        # what is no dataset
        (Empty(), None, {}, ValueError, f"{of} is empty"),
        ([], None, {}, ValueError, f"{of} is empty"),
        (one_by_one(), None, {}, TypeError, f"{of}=.* only once"),
        (iter([1, 2]), None, {}, TypeError, f"{of}=.* only once"),
        (42, None, {}, TypeError, f"{of}=42 .*__getitem__"),
        (None, None, {}, TypeError, f"{of}=None .*__getitem__"),
        ({1, 2, 3}, None, {}, TypeError, f"{of}=.*__getitem__"),
        (Endless(), None, {}, TypeError, "__len__"),
        (LengthRaises(), None, {}, TypeError, r"LengthRaises has no length: len\(\) raises RuntimeError: index the files"),
        (DataLoader(LengthRaises()), None, {}, TypeError, r"LengthRaises has no length"),
        (Empty, None, {}, TypeError, rf"{of}=Empty is a class; {of}=Empty\(...\) would work"),
        ("data/", None, {}, TypeError, rf"{of}='data/' is a path.*ImageFolder\('data/'\) would work"),
        (Path("data"), None, {}, TypeError, rf"{of}=.*data.* is a path"),
        (pd.DataFrame({"x": [1.0]}), None, {}, TypeError, r"DataFrame looks up columns.*TensorDataset\(.*would work"),
        ({"train": SAMPLES}, None, {}, TypeError, r"looks up 'train', .*data\['train'\] would work"),
        # data and model
        (nn.Sequential(nn.Linear(2, 2)), SAMPLES, {}, TypeError, rf"{of}=Sequential is a model.*tune\(dataset, model\)"),
        ([1, 2], SAMPLES, {}, TypeError, r"model=TensorDataset holds data.*tune\(dataset, model\) would work"),
        ([1, 2], LOADER, {}, TypeError, r"model=DataLoader holds data"),
        (SAMPLES, nn.Linear, {}, TypeError, r"model=Linear is a class; model=Linear\(...\) would work"),
        (SAMPLES, "resnet50", {}, TypeError, r"model=str is not callable; train_step="),
        (SAMPLES, FullyShardedDataParallel(), {}, TypeError, r"sharded over ranks.*before it is sharded, or model=None"),
        (SAMPLES, nn.Sequential(FullyShardedDataParallel()), {}, TypeError, r"sharded over ranks"),
        # the step
        (SAMPLES, None, {"train_step": lambda batch: None}, TypeError, r"train_step=.*train_step\(model, batch\)"),
        (SAMPLES, None, {"train_step": lambda a, b, c: None}, TypeError, r"train_step=.*train_step\(model, batch\)"),
        (SAMPLES, None, {"train_step": "fast"}, TypeError, "'fast' is not callable; train_step=0.05 .*or train_step"),
        (SAMPLES, None, {"train_step": -1}, ValueError, r"train_step=-1 is not the seconds of a step; train_step=0.05 would"),
        (SAMPLES, None, {"loss_fn": "mse"}, TypeError, r"loss_fn='mse' is not callable"),
        (SAMPLES, None, {"loss_fn": NeedsMore}, TypeError, r"loss_fn=NeedsMore is a class.*loss_fn=NeedsMore\(...\) would"),
        (SAMPLES, None, {"optimizer": SCHEDULER}, TypeError, r"optimizer=<torch.*has no step\(\) and zero_grad\(\)"),
        (SAMPLES, None, {"optimizer": torch.optim.LBFGS}, TypeError, "optimizer=LBFGS steps with a closure.*train_step"),
        (SAMPLES, None, {"optimizer": [1]}, TypeError, r"optimizer=\[1\] has no step\(\).*torch.optim.AdamW.*would work"),
        (SAMPLES, None, {"device": "gpu:7"}, ValueError, r"device='gpu:7' is not a torch device; device='auto' would work"),
        (SAMPLES, None, {"device": "cuda:97"}, ValueError, r"device='cuda:97' is not there \(torch sees \d+ CUDA device"),
        # the parts of a loader
        (SAMPLES, None, {"batch_size": -1}, ValueError, r"batch_size=-1 .* would work"),
        (SAMPLES, None, {"batch_size": 0}, ValueError, r"batch_size=0 .* would work"),
        (SAMPLES, None, {"batch_size": 2.5}, TypeError, r"batch_size=2.5 .* would work"),
        (SAMPLES, None, {"batch_size": True}, TypeError, r"batch_size=True .* would work"),
        (SAMPLES, None, {"collate_fn": []}, TypeError, r"collate_fn=\[\] is not callable"),
        (SAMPLES, None, {"worker_init_fn": "init"}, TypeError, r"worker_init_fn='init' is not callable"),
        (SAMPLES, None, {"sampler": RandomSampler}, TypeError, r"sampler=RandomSampler is a class; sampler=RandomSampler\("),
        (SAMPLES, None, {"sampler": 3}, TypeError, r"sampler=3 gives no indices; sampler=None would work"),
        (SAMPLES, None, {"batch_sampler": 4}, TypeError, r"batch_sampler=4 gives no indices; batch_sampler=None would work"),
        (SAMPLES, None, {"sampler": one_by_one()}, TypeError, "^sampler=.*only once.*a list of it would work"),
        (DataLoader(SAMPLES, sampler=one_by_one()), None, {}, TypeError, "^sampler=.*only once.*a list of it would work"),
        (DataLoader(SAMPLES, batch_sampler=one_by_one()), None, {}, TypeError, "^batch_sampler=.*only once"),
        (SAMPLES, None, {"sampler": []}, ValueError, "no sample in an epoch"),
        (SAMPLES, None, {"generator": 0}, TypeError, r"generator=0 is not a torch.Generator.*manual_seed\(0\) would work"),
        (SAMPLES, None, {"drop_last": "yes"}, TypeError, r"drop_last='yes' is not a bool"),
        (SAMPLES, None, {"batch_size": 16, "drop_last": True}, ValueError, r"batch_size=16 .* batch_size=10 would work"),
        # what excludes each other
        (Stream(), None, {"sampler": range(3)}, ValueError, r"^sampler=.*IterableDataset.*sampler=None would work"),
        (SAMPLES, None, {"batch_sampler": [[0]], "batch_size": 4}, ValueError, "^batch_size=.*batch_sampler"),
        (SAMPLES, None, {"batch_sampler": [[0]], "sampler": range(3)}, ValueError, "^sampler=.*batch_sampler"),
        (SAMPLES, None, {"batch_sampler": [[0]], "drop_last": True}, ValueError, "^drop_last=.*batch_sampler"),
        (LOADER, None, {"batch_size": 8}, ValueError, "^batch_size=.*existing DataLoader.*batch_size=None would work"),
        (LOADER, None, {"collate_fn": len}, ValueError, "^collate_fn=.*existing DataLoader.*collate_fn=None would work"),
        (LOADER, None, {"sampler": len}, ValueError, "^sampler=.*existing DataLoader"),
        (LOADER, None, {"drop_last": True}, ValueError, "^drop_last=.*existing DataLoader"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_what_would_work(
    dataset: Any, model: Any, options: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        tune(dataset, model, **options)
    assert "would work" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (
            {"shuffle": True},
            r"shuffle=True is not an argument of tune\(\); tune\(DataLoader\(dataset, shuffle=.*would work",
        ),
        (
            {"num_workers": 4},
            r"num_workers=4 is not an .*DataLoader\(dataset, num_workers=..., ...\), model\).* would work",
        ),
        ({"pin_memory": True}, r"pin_memory=True is not an argument"),
        ({"bugdet": "60s"}, r"bugdet='60s' is not an argument of tune\(\); budget=... would work"),
        ({"batchsize": 4}, r"batchsize=4 is not an argument of tune\(\); batch_size=... would work"),
        ({"nonsense": 4}, r"nonsense"),
    ],
)
def test_an_argument_that_does_not_exist_is_answered(option: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        tune(SAMPLES, batch_size=2, **option)


@pytest.mark.parametrize(
    ("dataset", "options", "size", "samples", "says"),
    [
        ([1, 2, 3] * 20, {}, 32, 60, ["batch_size was not given: measured with 32; pass the one you train with"]),
        (SAMPLES, {"batch_size": 16}, 16, 10, ["an epoch has 10 samples, less than one batch of 16"]),
        (SAMPLES, {"batch_size": np.int64(2)}, 2, 10, []),
        ([torch.rand(3)] * 4, {"batch_size": 2}, 2, 4, []),
        (Endless(), {"batch_size": 2, "sampler": range(4)}, 2, 4, []),
        (LengthRaises(), {"batch_size": 2, "sampler": range(4)}, 2, 4, []),
        (StreamWithoutLength(), {"batch_size": 2}, 2, None, []),
    ],
)
def test_what_is_right_is_read_and_what_is_assumed_is_said(
    dataset: Any, options: Any, size: int, samples: int | None, says: list[str]
) -> None:
    workload, notes = make_workload(dataset, **options)
    assert (workload.data.batch_size, workload.data.samples_per_epoch(), notes) == (size, samples, says)
    assert type(workload.data.batch_size) is int


def test_an_existing_loader_is_read_and_never_iterated() -> None:
    loader = NeverIterated(SAMPLES, batch_size=3, num_workers=2, shuffle=True, prefetch_factor=4)

    workload, _ = make_workload(loader)

    assert workload.own_config is not None
    assert (workload.own_config.num_workers, workload.own_config.prefetch_factor) == (2, 4)
    assert workload.data.sampler is loader.sampler
    assert workload.data.batch_size == 3


# The step and its device


def test_a_loss_may_be_a_class_and_parts_that_were_compiled_are_kept_and_said() -> None:
    # GIVEN a model with a part on which compile() was called
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model[0]._compiled_call_impl = model[0].forward  # what compile() sets
    # WHEN it is taken up THEN it is known by name, since a copy forgets it
    workload, notes = make_workload(SAMPLES, model, batch_size=2, loss_fn=nn.CrossEntropyLoss)
    assert workload.training.compiled == ("0",)
    assert "model.compile() is called anew" in notes[0]
    assert isinstance(workload.training.loss_fn, nn.CrossEntropyLoss)


class OnDevice(nn.Module):
    """A model whose parameters say that they are on a device that this machine lacks."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self._said = [SimpleNamespace(device=torch.device(device)) for device in devices]

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._said)


@pytest.mark.parametrize(
    ("devices", "default", "cuda", "chosen"),
    [
        (("cpu",), "cpu", None, "cpu"),
        (("xpu:1", "xpu:1"), "cpu", None, "xpu:1"),
        (("cpu", "mps"), "cpu", None, "mps"),
        (("cpu",), "xpu:0", None, "xpu:0"),
        (("meta",), "meta", None, "cpu"),
        (("cpu",), "cpu", 0, "cuda"),
        (("cpu",), "cpu", 2, "cuda:2"),
    ],
)
def test_auto_is_where_the_model_is_or_what_this_process_has_chosen(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], default: str, cuda: int | None, chosen: str
) -> None:
    # GIVEN a model on a device, a default device, and perhaps CUDA
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device(default))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if cuda is None else 3)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(cuda))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda)
    # WHEN the device is "auto" THEN it is the model's, or else the default, or the GPU that was set
    workload, _ = make_workload(SAMPLES, OnDevice(*devices), batch_size=2, device="auto")
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
    found = [make_workload(SAMPLES, batch_size=2, device=device)[0].training.device for device in ("auto", "cuda:1")]
    # THEN the GPUs are found
    assert found == ["cuda", "cuda:1"]


def test_the_seconds_of_a_step_stand_in_for_it_and_the_model_stays_at_home() -> None:
    # GIVEN a step known by its time alone WHEN the arguments are read
    workload, _ = make_workload(SAMPLES, OnDevice("cuda:0"), batch_size=2, train_step=0.05)
    # THEN a wait is tuned against, which uses no core and needs no GPU
    assert (workload.training, workload.on_cpu) == (TrainingSide(train_step=StepTime(0.05)), False)


# What libraries hand out


class WebLoader(IterableDataset[Any]):
    """A pipeline whose first stage is a DataLoader."""

    def __init__(self, loader: DataLoader[Any], *stages: Callable[[Any], Any]) -> None:
        self.pipeline = [loader, *stages]

    def __iter__(self) -> Iterator[Any]:
        yield from self.pipeline[0]


class Normalising:
    """As timm's PrefetchLoader: the workers make bytes, and it makes numbers of them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for x, y in self.loader:
            yield x.float() / 255, y


class CombinedLoader:
    def __init__(self, iterables: Any) -> None:
        self._iterables, self._flat = iterables, [iterables["a"]] if isinstance(iterables, dict) else iterables

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError

    def __next__(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("wrapper", [WebLoader, Normalising, lambda loader: CombinedLoader({"a": loader})])
def test_a_wrapper_around_one_loader_is_unwrapped_and_the_note_says_what_is_left_out(wrapper: Any) -> None:
    # GIVEN what a library made of a DataLoader
    wrapped = wrapper(DataLoader(SAMPLES, batch_size=5))
    # WHEN it is tuned
    workload, notes = make_workload(wrapped)
    # THEN it is that DataLoader which is tuned, in its own batches
    assert (workload.data.dataset, workload.data.batch_size) == (SAMPLES, 5)
    assert any(type(wrapped).__name__ in note and "holds a DataLoader" in note for note in notes)


class HuggingFaceTrainer:
    def get_train_dataloader(self) -> Any: ...


class LightningTrainer:
    fit_loop = None


class DataModule:
    def train_dataloader(self) -> Any: ...


class ForeignLoader:
    dataset = SAMPLES

    def __iter__(self) -> Iterator[Any]: ...


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (HuggingFaceTrainer(), r"tune_trainer\(trainer\) would work"),
        (LightningTrainer(), r"lightning.tuned\(model, .*would work"),
        (DataModule(), r"tune\(datamodule.train_dataloader\(\), model\).* would work"),
        (ForeignLoader(), r"tune\(foreignloader.dataset, .*would work"),
        (
            CombinedLoader([LOADER, DataLoader(SAMPLES)]),
            r"2 DataLoaders .*; one at a time, tune\(loader, model\), would work",
        ),
        ([LOADER, DataLoader(SAMPLES)], r"2 DataLoaders .*; one at a time, tune\(loader, model\), would work"),
    ],
)
def test_what_is_neither_dataset_nor_loader_is_answered_with_the_call_that_works(given: Any, answer: str) -> None:
    with pytest.raises(TypeError, match=f"{of}=.*{answer}"):
        make_workload(given)


class Coordinated(IterableDataset[int]):
    """A stream whose copies tell each other what comes next, as MosaicML's do."""

    def __init__(self, memory: SharedMemory) -> None:
        self.shared = {"epoch": memory}

    def __iter__(self) -> Iterator[int]: ...


class Cached(Dataset[torch.Tensor]):
    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(self.memory.buf[index])])


@pytest.mark.process
def test_named_shared_memory_of_the_users_outlives_tuning() -> None:
    memory = SharedMemory(create=True, size=16)
    try:
        # WHEN a stream coordinates its workers through it THEN it is refused
        with pytest.raises(TypeError, match=r"Coordinated .* shared memory \(shared\['epoch'\]\).* would work"):
            make_workload(Coordinated(memory))
        # WHEN it is a cache THEN no other process attaches to it, which would remove it at its end
        workload, _ = make_workload(Cached(memory), batch_size=2)
        with open_probe(workload, inspect_machine(), "auto", None) as opened:
            assert isinstance(opened.probe.burst(LoaderConfig(), PLAN), Measurement)
        assert any("dataset.memory" in note and "remove at its end" in note for note in opened.notes)
        assert Path("/dev/shm", memory.name).exists()
    finally:
        memory.close()
        memory.unlink()


def batched(samples: Any) -> Any: ...
def unbatched(samples: Any) -> Any: ...
def decode(samples: Any) -> Any: ...


class Pipeline(IterableDataset[Any]):
    def __init__(self, *stages: Any) -> None:
        self.pipeline = list(stages)

    def __iter__(self) -> Iterator[Any]: ...


def test_a_pipeline_that_makes_batches_is_not_batched_again() -> None:
    workload, notes = make_workload(Pipeline(decode, batched))
    assert workload.data.batch_size is None
    assert notes == ["the dataset makes its own batches, so the DataLoader makes none (batch_size=None)"]
    for stages in ([decode], [decode, batched, unbatched]):
        workload, _ = make_workload(Pipeline(*stages), batch_size=4)
        assert workload.data.batch_size == 4


class ThreadLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_a_loader_that_does_something_of_its_own_with_batches_is_told() -> None:
    _, notes = make_workload(ThreadLoader(SAMPLES))
    assert any(note.startswith("ThreadLoader has an __iter__ of its own") for note in notes)
    assert make_workload(DataLoader(SAMPLES))[1] == []


@pytest.mark.process
def test_a_step_that_fails_for_what_the_bursts_leave_out_is_told_so() -> None:
    data = TensorDataset(torch.zeros(16, 4, dtype=torch.uint8), torch.zeros(16, dtype=torch.long))
    with pytest.raises(WorkloadError) as caught:
        tune(Normalising(DataLoader(data, 4)), torch.nn.Linear(4, 2), budget=2, isolation="inline", progress=False)
    told = str(caught.value).splitlines()[0]
    assert "pass train_step=lambda model, batch: cross_entropy(model(batch[0]), batch[1])" in told
    assert "What Normalising itself does to batches is no part of the measurement" in told


class OwnIterator(IterableDataset[Any]):
    """Its own iterator, as litdata's datasets are; `restarts` tells whether `iter()` begins again."""

    def __init__(self, restarts: bool) -> None:
        self.restarts, self.next = restarts, 0

    def __iter__(self) -> OwnIterator:
        if self.restarts:
            self.next = 0
        return self

    def __next__(self) -> Any:
        if self.next == 64:
            raise StopIteration
        self.next += 1
        return torch.tensor([float(self.next)])


@pytest.mark.process
def test_a_dataset_that_is_its_own_iterator_is_tuned_where_it_begins_again() -> None:
    def burst(data: OwnIterator) -> Any:
        workload, _ = make_workload(data, batch_size=4)
        with open_probe(workload, inspect_machine(), "inline", None) as opened:
            return opened.probe.burst(LoaderConfig(), PLAN)

    data = OwnIterator(restarts=True)
    assert isinstance(burst(data), Measurement)
    assert len(list(data)) == 64  # inline it is read itself, and training reads it from its begin
    once = OwnIterator(restarts=False)
    with pytest.raises(WorkloadError, match="OwnIterator can be read only once"):
        burst(once)
    assert once.next == 0


# Files and databases


@pytest.mark.parametrize("name", ["", "a-file/loader.json"])
def test_an_output_that_cannot_be_written_is_refused_before_a_probe_starts(tmp_path: Path, name: str) -> None:
    # GIVEN a folder, or a file where a folder should be
    (tmp_path / "a-file").touch()
    # WHEN the result is to be written there THEN it is refused at once, and nothing is left
    with pytest.raises(ValueError, match=r"cannot be written .*output='loader.json' would work"):
        tune(SAMPLES, batch_size=8, output=tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["a-file"]


def test_a_disk_that_fills_up_meanwhile_costs_a_warning_and_not_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a disk that is full by the time the result is written
    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TuningResult, "save", no_space)
    # WHEN tuning ends
    on_simulated_machines(monkeypatch, lambda workload: SimulatedMachine())
    result = tune(SAMPLES, batch_size=8, output=tmp_path / "x.json", reuse=False, progress=False)
    # THEN the result is there, and says that its file is not
    assert result.status in ENDED
    assert any(NOT_WRITTEN in warning for warning in result.warnings)


def test_a_database_that_cannot_be_opened_is_refused_with_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    with pytest.raises(
        ValueError, match=r"storage='nosuch://x' names no database .*storage='study.journal' would work"
    ):
        open_database("nosuch://x")
    monkeypatch.setitem(sys.modules, "psycopg2", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'autotune-loader\[postgres\]'"):
        open_database("postgresql+psycopg2://nobody@127.0.0.1:1/x")


def test_the_command_line_answers_all_of_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job_of_wrong_input.py"
    job.write_text("def make():\n    return [(1, 2)] * 8\n")
    assert cli.main(["tune", f"{job}:make", "-o", f"{job}/x.json", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith("Error: output=")
