"""What an AutoLoader does without workers, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader.live.budgets import Budgets
from autotune_loader.pipeline.batches import BatchShape
from autotune_loader.values.config import LoaderConfig
from tests.support.schedules import FixedLoader as AutoLoader
from tests.support.schedules import Numbers


@pytest.mark.parametrize("arguments", [{"batch_size": 3, "shuffle": True}, {"batch_size": None}])
def test_takes_over_an_existing_loader(arguments: dict[str, Any]) -> None:
    plain, runs = DataLoader(Numbers(10), **arguments), []
    for loader in (plain, AutoLoader(plain)):
        torch.manual_seed(0)
        runs.append([batch.tolist() for batch in loader])

    assert runs[0] == runs[1]


def test_arguments_beside_an_existing_loader_win_and_a_configuration_beside_arguments() -> None:
    loader = AutoLoader(DataLoader(Numbers(10), batch_size=3), timeout=0, num_workers=0, collate_fn=len)
    wanted = LoaderConfig(num_workers=3, prefetch_factor=5)

    assert list(loader) == [3, 3, 3, 1]
    assert AutoLoader(Numbers(4), config=wanted, num_workers=1).config == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prefetch_factor": 4}, "prefetch_factor option could only be specified in multiprocessing"),  # as torch
        ({"max_workers": 2, "num_workers": 3}, "above max_workers=2; num_workers=2 would work"),
        ({"max_workers": -1}, "max_workers=-1 is below 0"),
        ({"max_host_memory": 1 << 20, "num_workers": 2}, "host memory"),
        ({"max_shm": "1 furlong"}, "max_shm='1 furlong' cannot be read .*; max_shm='8GB' would work"),
        ({"step_threads": 2}, "step_threads=2 is not one of 'auto'; step_threads='auto' would work"),
        ({"config": LoaderConfig(batch_size=7)}, "batch_size=1 would work"),
        ({"config": LoaderConfig(drop_last=True)}, "drop_last=None would work"),
        ({"num_worker": 2}, "num_worker=2 is an argument of neither .*; num_workers would work"),
        ({"tune": "yes"}, "tune='yes' is not a bool"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        AutoLoader(Numbers(4), **arguments)


def test_a_loader_with_iterators_of_its_own_is_refused_as_they_would_be_left_out() -> None:
    class Doubled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return (batch * 2 for batch in super().__iter__())

    with pytest.raises(TypeError, match="AutoLoader as the base class of Doubled"):
        AutoLoader(Doubled(Numbers(4)))


def test_a_change_above_a_budget_is_refused_and_nothing_changes() -> None:
    loader = AutoLoader(Numbers(64), batch_size=64, max_workers=2, max_shm="3KB")
    with pytest.raises(ValueError, match="above max_workers"):
        loader.change_to(LoaderConfig(num_workers=3))
    next(iter(loader))  # now the size of a batch is known
    with pytest.raises(ValueError, match="max_shm"):
        loader.change_to(LoaderConfig(num_workers=2))

    assert loader.config == LoaderConfig()


def test_two_pools_share_the_budgets() -> None:
    two, shape = LoaderConfig(num_workers=2), BatchShape(bytes=1000, tensors=1)

    assert Budgets().may_overlap(two, two, shape)
    assert not Budgets().may_overlap(two, two, None)
    assert not Budgets(max_workers=3).may_overlap(two, two, shape)
    assert not Budgets(max_shm=8000).may_overlap(two, two, shape)
    assert not Budgets().may_overlap(LoaderConfig(num_workers=2, pin_memory=True), two, shape)


@pytest.mark.parametrize(("asked", "wanted"), [("auto", 1), (None, 3)])
def test_the_steps_threads_are_set_only_where_that_was_asked_for(asked: Any, wanted: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        loader = AutoLoader(Numbers(8), batch_size=4, step_threads=asked)
        batches, found = iter(loader), []
        for config in (LoaderConfig(consumer_threads=1), LoaderConfig()):
            next(batches)
            loader.change_to(config)  # takes place with the next batch
            next(batches, None)
            found.append(torch.get_num_threads())
            batches = iter(loader)
        assert found == [wanted, 3]  # a configuration that does not care gives back what the process had
    finally:
        torch.set_num_threads(before)


def test_a_state_of_another_loader_is_refused() -> None:
    state = AutoLoader(Numbers(8), batch_size=2).state_dict()

    with pytest.raises(ValueError, match="8 samples, this one has 9"):
        AutoLoader(Numbers(9), batch_size=2).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size=2 would work"):
        AutoLoader(Numbers(8), batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="no state of an AutoLoader"):
        AutoLoader(Numbers(8)).load_state_dict({})
