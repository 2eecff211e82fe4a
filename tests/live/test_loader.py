"""What an AutoLoader does without workers, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from autotune_loader.live.budgets import Budgets
from autotune_loader.live.traces import pauses
from autotune_loader.probe.burst_loop import BatchShape
from autotune_loader.values.config import LoaderConfig
from autotune_loader.values.trace import MAIN_PROCESS, BatchTrace
from studies.live.schedules import FixedLoader as AutoLoader
from studies.live.schedules import Numbers, Stream


class Failing(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise KeyError("sample 5 is broken")
        return super().__getitem__(index)


def test_is_a_dataloader_with_its_attributes() -> None:
    data = Numbers(10)
    loader = AutoLoader(data, 4, True, drop_last=True)

    assert isinstance(loader, DataLoader)
    assert (len(loader), loader.batch_size, loader.drop_last) == (2, 4, True)
    assert loader.dataset is data
    assert loader.batch_sampler.sampler is loader.sampler  # type: ignore[union-attr]


@pytest.mark.parametrize("arguments", [{"batch_size": 3, "shuffle": True}, {"batch_size": None}, {"batch_size": 2}])
def test_takes_over_an_existing_loader(arguments: dict[str, Any]) -> None:
    plain = DataLoader(Numbers(10), **arguments)
    torch.manual_seed(0)
    expected = [batch.tolist() for batch in plain]
    torch.manual_seed(0)

    assert [batch.tolist() for batch in AutoLoader(plain)] == expected


def test_arguments_beside_an_existing_loader_win() -> None:
    loader = AutoLoader(DataLoader(Numbers(10), batch_size=3), timeout=0, num_workers=0, collate_fn=len)

    assert list(loader) == [3, 3, 3, 1]


@pytest.mark.parametrize("arguments", [{"persistent_workers": True}, {"prefetch_factor": 4}, {"num_workers": -1}])
def test_what_torch_refuses_is_refused_as_torch_does(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as plain:  # noqa: PT011 - its message is compared
        DataLoader(Numbers(4), **arguments)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        AutoLoader(Numbers(4), **arguments)

    assert str(ours.value) == str(plain.value)


def test_a_configuration_or_its_file_is_where_it_starts(tmp_path: Any) -> None:
    wanted = LoaderConfig(num_workers=3, prefetch_factor=5)

    assert AutoLoader(Numbers(4), config=wanted, num_workers=1).config == wanted


def test_tells_samplers_and_datasets_their_epoch() -> None:
    data = Numbers(8)
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    AutoLoader(data, sampler=sampler, batch_size=2).set_epoch(3)

    assert sampler.epoch == 3


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # this machine may have nothing to pin for
@pytest.mark.parametrize("pinned", [False, True])
def test_an_exception_of_the_dataset_is_raised_at_its_batch_and_the_next_follows(pinned: bool) -> None:
    iterator = iter(AutoLoader(Failing(8), batch_size=2, pin_memory=pinned))
    seen = [next(iterator), next(iterator)]
    with pytest.raises(KeyError, match="sample 5"):
        next(iterator)

    assert [batch[:, 0].tolist() for batch in [*seen, *iterator]] == [[0, 1], [2, 3], [6, 7]]


def test_two_iterators_at_once_do_not_know_of_each_other() -> None:
    loader = AutoLoader(Numbers(4))
    first, second = iter(loader), iter(loader)
    pairs = [(a[0, 0].item(), b[0, 0].item()) for a, b in zip(first, second, strict=True)]

    assert pairs == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_copy_begins_an_epoch_of_its_own() -> None:
    loader = AutoLoader(Numbers(4))
    iterator = iter(loader)
    next(iterator)
    copies = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]

    assert [len(list(each)) for each in copies] == [4, 4, 4]
    assert len(list(iterator)) == 3


def test_the_length_of_a_stream_without_one_is_torchs_error() -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(AutoLoader(Stream(4)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_workers": 2, "num_workers": 3}, "above max_workers=2; num_workers=2 would work"),
        ({"max_workers": -1}, "max_workers=-1 is below 0"),
        ({"max_host_memory": 1 << 20, "num_workers": 2}, "host memory"),
        ({"max_shm": "1 furlong"}, "max_shm='1 furlong' cannot be read .*; max_shm='8GB' would work"),
        ({"worker_seeds": "mine"}, "worker_seeds='mine' is not"),
        ({"step_threads": 2}, "step_threads=2 is not one of 'auto'; step_threads='auto' would work"),
        ({"config": LoaderConfig(batch_size=7)}, "batch_size=1 would work"),
        ({"config": LoaderConfig(drop_last=True)}, "drop_last=None would work"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AutoLoader(Numbers(4), **arguments)


def test_a_loader_with_iterators_of_its_own_is_refused_as_they_would_be_left_out() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch * 2 for batch in super().__iter__())

    with pytest.raises(TypeError, match="AutoLoader as the base class of Doubled"):
        AutoLoader(Doubled(Numbers(4)))


@pytest.mark.parametrize(("asked", "wanted"), [("auto", 1), (None, 3)])
def test_the_steps_threads_are_set_only_where_that_was_asked_for(asked: Any, wanted: int) -> None:
    # GIVEN a process that computes with three threads, and a configuration with one
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        loader = AutoLoader(Numbers(8), batch_size=4, step_threads=asked)
        # WHEN the loader changes to it in mid-epoch
        batches = iter(loader)
        next(batches)
        loader.change_to(LoaderConfig(consumer_threads=1))
        assert len(list(batches)) == 1
        # THEN
        assert torch.get_num_threads() == wanted
        # AND a configuration that does not care gives back what the process had
        loader.change_to(LoaderConfig())
        list(loader)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_argument_that_a_dataloader_does_not_have_is_a_type_error() -> None:
    for name in ("num_workers", "max_workers", "shuffle"):
        with pytest.raises(TypeError, match=rf"{name[:-1]}=2 is an argument of neither .*; {name} would work"):
            AutoLoader(Numbers(4), **{name[:-1]: 2})
    with pytest.raises(TypeError, match="tune='yes' is not a bool"):
        AutoLoader(Numbers(4), tune="yes")  # type: ignore[arg-type]


def test_a_change_above_a_budget_is_refused_and_nothing_changes() -> None:
    loader = AutoLoader(Numbers(4), max_workers=1)

    with pytest.raises(ValueError, match="above max_workers"):
        loader.change_to(LoaderConfig(num_workers=2))
    assert loader.config == LoaderConfig()


def test_batches_that_do_not_fit_into_shared_memory_are_refused_once_their_size_is_known() -> None:
    loader = AutoLoader(Numbers(64), batch_size=64, max_shm="3KB")
    assert loader.max_shm == 3000
    next(iter(loader))

    with pytest.raises(ValueError, match="max_shm"):
        loader.change_to(LoaderConfig(num_workers=2))


def test_two_pools_share_the_budgets() -> None:
    two, shape = LoaderConfig(num_workers=2), BatchShape(bytes=1000, tensors=1)

    assert Budgets().may_overlap(two, two, shape)
    assert not Budgets().may_overlap(two, two, None)
    assert not Budgets(max_workers=3).may_overlap(two, two, shape)
    assert not Budgets(max_shm=8000).may_overlap(two, two, shape)
    assert not Budgets().may_overlap(LoaderConfig(num_workers=2, pin_memory=True), two, shape)


def test_a_state_of_another_loader_is_refused() -> None:
    state = AutoLoader(Numbers(8), batch_size=2).state_dict()

    with pytest.raises(ValueError, match="8 samples, this one has 9"):
        AutoLoader(Numbers(9), batch_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size=2 would work"):
        AutoLoader(Numbers(8), batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="no state of an AutoLoader"):
        AutoLoader(Numbers(8)).load_state_dict({})


def test_every_batch_is_traced_and_pauses_can_be_told() -> None:
    loader = AutoLoader(Numbers(40), batch_size=4)
    for _ in range(2):
        list(loader)
    traces = loader.traces.block(0)

    assert len(traces) == 20
    assert {trace.worker for trace in traces} == {MAIN_PROCESS}
    assert all(t.requested <= t.fetch_start <= t.collate_end <= t.received <= t.step_end for t in traces)
    assert loader.traces.block(5, 8) == traces[5:8]
    assert [change.batch for change in loader.traces.changes] == [0, 10]


def test_a_long_time_in_which_nobody_asks_is_a_pause_and_no_step() -> None:
    def trace(step_s: float) -> BatchTrace:
        return BatchTrace(
            worker=0,
            fetch_start=0,
            fetch_end=0,
            collate_end=0,
            cpu_s=0,
            requested=0,
            received=1,
            step_end=1 + step_s,
            samples=1,
        )

    assert pauses([trace(0.1), trace(0.1), trace(60.0), trace(1.0), trace(0.1)]) == [2]
    assert pauses([]) == []
