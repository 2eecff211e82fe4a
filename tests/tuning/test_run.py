"""What of workload, machine and `allow=` makes the space that is searched, and what a choice changes in training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autotune_loader.bursts.parent import OpenProbe
from autotune_loader.machine.facts import Machine, inspect_machine
from autotune_loader.pipeline.workload import DataSide, StepTime, TrainingSide, Workload
from autotune_loader.search.space import Limits, Space
from autotune_loader.tuning.options import parse_options
from autotune_loader.tuning.run import Run, common_space, make_run
from autotune_loader.values.config import LoaderConfig
from tests.support import SimulatedMachine
from tests.support.tuned import simulated_warmup

READY = simulated_warmup(SimulatedMachine())
PROBE: Any = None


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(100))


class Sharded(Stream):
    num_shards = 2


class ToldItsEpoch(TensorDataset):
    epoch = 0


def rows(length: int = 100, kind: type[TensorDataset] = TensorDataset) -> TensorDataset:
    return kind(torch.zeros(length, 3))


def data(dataset: Any = None, batch_size: int | None = 8, **parts: Any) -> DataSide:
    return DataSide.from_dataset(rows() if dataset is None else dataset, batch_size=batch_size, **parts)


def run_of(
    side: DataSide | None = None,
    *allow: str,
    training: TrainingSide | None = None,
    own: LoaderConfig | None = None,
    machine: Machine | None = None,
    max_workers: int | None = None,
    **ready: Any,
) -> Run:
    workload = Workload(data=side or data(), training=training or TrainingSide(), own_config=own)
    options = parse_options(allow=allow, max_workers=max_workers)
    return make_run(
        workload, OpenProbe(probe=PROBE, warmup=replace(READY, **ready)), machine or inspect_machine(), options
    )


@pytest.mark.parametrize(
    ("side", "sizes", "why"),
    [
        (data(), (None, 16, 32, 4), ""),
        (data(rows(20)), (None, 16, 4), ""),
        (data(Stream()), (None, 16, 32, 4), ""),
        (data(batch_size=None), (None,), "the DataLoader does not make the batches"),
        (data(rows(1), batch_size=1), (None,), "an epoch of 1 samples has room for no other than 1"),
    ],
    ids=["map-style", "a small epoch", "a stream", "no batches", "one sample"],
)
def test_batch_sizes_are_powers_of_two_around_the_users_own_or_it_is_said_why_not(
    side: DataSide, sizes: tuple[int | None, ...], why: str
) -> None:
    assert run_of(side).space.batch_sizes == (None,)
    run = run_of(side, "batch_size")
    assert run.space.batch_sizes == sizes
    assert [why in note for note in run.notes if note.startswith("batch_size is not tuned")] == ([True] if why else [])


ROOM = 800  # samples, in batches of 8: an epoch of a hundred batches


@pytest.mark.parametrize(
    ("side", "given", "most"),
    [
        (data(rows(ROOM)), {}, 64),
        (data(rows(ROOM)), {"max_workers": 3}, 3),
        (data(rows(80)), {}, 10),  # a worker beyond the batches of an epoch never gets one
        (data(Sharded()), {}, 2),
        (data(Stream()), {"most_workers": 1}, 1),
        (data(rows(ROOM)), {"most_workers": 0}, 0),
    ],
    ids=["free", "asked", "epoch", "shards", "repeats", "shared file"],
)
def test_no_more_workers_are_tried_than_are_right(side: DataSide, given: dict[str, Any], most: int) -> None:
    assert run_of(side, **given).space.max_workers == most
    # AND the user's own number is legal whatever it is
    own = LoaderConfig(num_workers=70)
    assert run_of(side, own=own, **given).space.veto(own) is None


def test_where_no_process_can_be_started_there_are_no_workers_and_it_is_said() -> None:
    daemonic = replace(inspect_machine(), why_no_workers="this process is daemonic, so it can start no workers")
    run = run_of(data(rows(ROOM)), machine=daemonic)
    assert (run.space.max_workers, run.notes) == (0, ("this process is daemonic, so it can start no workers",))


def test_order_and_start_method_are_the_users_own() -> None:
    config = LoaderConfig.from_loader(DataLoader(rows(), num_workers=1, multiprocessing_context="spawn"))
    own = run_of(own=config)
    assert (own.space.multiprocessing_context, own.space.in_order) == ("spawn", (True,))
    assert run_of(None, "in_order").space.in_order == (True, False)
    assert (own.baseline, run_of().baseline) == (config, LoaderConfig())


def test_workers_that_would_never_hear_of_the_next_epoch_are_kept_only_when_allowed() -> None:
    """`set_epoch` is called on the dataset of the main process; workers that live on keep the copy of the first epoch."""
    told = data(rows(kind=ToldItsEpoch))
    assert run_of().space.persistent_workers
    assert not run_of(told).space.persistent_workers
    assert run_of(told, "persistent_workers").space.persistent_workers


def test_pinning_and_copying_ahead_are_for_a_device() -> None:
    cuda, wait = TrainingSide(device="cuda:1"), TrainingSide(train_step=StepTime(0.05))
    on_cuda, waiting = (run_of(None, "device_prefetch", training=each).space for each in (cuda, wait))
    assert (on_cuda.pin_memory, on_cuda.device_prefetch) == ((True, False), (0, 1, 2))
    assert (waiting.pin_memory, waiting.device_prefetch) == ((False,), (0,))
    assert run_of(training=cuda).space.device_prefetch == (0,)


def test_the_tightest_limits_of_all_ranks_hold_for_each() -> None:
    one = Space(max_workers=8, limits=Limits(shm_bytes=100, memory_bytes=None, descriptors=50))
    other = Space(max_workers=6, limits=Limits(shm_bytes=200, memory_bytes=70, descriptors=20))
    assert common_space([one, other]) == replace(
        one, max_workers=6, limits=Limits(shm_bytes=100, memory_bytes=70, descriptors=20)
    )
