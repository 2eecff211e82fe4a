"""What is sent to another process arrives as `multiprocessing` would send it, and is known when it would be the same."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Callable
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from autotune_loader.machine.elsewhere import descriptors
from autotune_loader.machine.nursery import pair
from autotune_loader.machine.parcel import LARGE, Lists, Parcel, Posted, receive, unpack


def arrived(parcel: Parcel, given: Any = ()) -> Any:
    ours, theirs = pair()
    with ours, theirs:
        parcel.send(ours)
        return unpack(*receive(theirs), given)


class Kept:
    """Stands for a descriptor in a pickle."""

    def __init__(self, file: int) -> None:
        self._file = file

    def detach(self) -> int:
        return self._file


class Paths:
    """A dataset as people write it."""

    def __init__(self) -> None:
        self.names = [f"image_{index}" for index in range(2 * LARGE)]
        self.pairs = [(name, index) for index, name in enumerate(self.names)]
        self.boxes: list[list[int]] = [[index] for index in range(2 * LARGE)]
        self.labels = np.arange(4)
        self.few = ["a", "b"]
        self.rng = random.Random(0)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, b"x", "y"], "nested": {"tuple": (1, (2,))}},
        list(range(3 * LARGE)),
        tuple(str(index) for index in range(3 * LARGE)),
        [[index] for index in range(3 * LARGE)],
        [],
    ],
)
def test_a_value_arrives(value: Any) -> None:
    found = arrived(Parcel(value, lists=Lists()))
    assert found == value
    assert type(found) is type(value)


def test_what_is_one_object_arrives_as_one() -> None:
    names = [str(index) for index in range(2 * LARGE)]
    one, other, inner = arrived(Parcel((names, names, {"names": names}), lists=Lists()))
    assert one is other is inner["names"]


def test_arrays_and_tensors_arrive() -> None:
    array, tensor = arrived(Parcel((np.arange(9), torch.ones(3)), lists=Lists()))
    assert array.tolist() == list(range(9))
    assert tensor.tolist() == [1.0] * 3


def test_shared_memory_is_shared_by_both() -> None:
    tensor = torch.zeros(2).share_memory_()
    found = arrived(Parcel(tensor, lists=Lists()))
    found[0] = 7
    assert tensor.tolist() == [7.0, 0.0]


def test_more_files_than_a_packet_takes_arrive() -> None:
    tensors = [torch.full((1,), float(index)) for index in range(300)]
    assert [each.item() for each in arrived(Parcel(tensors))] == list(range(300))


def test_what_the_other_process_has_is_not_sent() -> None:
    data = Paths()
    parcel = Parcel({"dataset": data, "number": 3}, given=[data])
    stands_in = object()
    found = arrived(parcel, given=[stands_in])
    assert found == {"dataset": stands_in, "number": 3}


def replaced(data: Paths) -> None:
    data.names[5] = "other"


def appended(data: Paths) -> None:
    data.pairs.append(("more", 1))


def in_a_list_of_lists(data: Paths) -> None:
    data.boxes[7][0] = -1


def in_an_array(data: Paths) -> None:
    data.labels[0] = 9


def in_a_short_list(data: Paths) -> None:
    data.few[0] = "c"


def new_attribute(data: Paths) -> None:
    data.epoch = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change", [replaced, appended, in_a_list_of_lists, in_an_array, in_a_short_list, new_attribute]
)
def test_a_parcel_has_another_key_where_something_has_changed(
    change: Callable[[Paths], None],
) -> None:
    data, lists = Paths(), Lists()
    first = Parcel(data, lists=lists).key
    assert Parcel(data, lists=lists).key == first
    change(data)
    assert Parcel(data, lists=lists).key != first
    assert vars(arrived(Parcel(data, lists=lists)))["names"] == data.names


def test_what_is_apart_does_not_count_and_arrives() -> None:
    data, lists = Paths(), Lists()
    first = Parcel(data, lists=lists, apart=[data.rng]).key
    expected = copy.deepcopy(data.rng)
    drawn = expected.random()
    data.rng.random()
    parcel = Parcel(data, lists=lists, apart=[data.rng])
    assert parcel.key == first
    assert arrived(parcel).rng.random() != drawn


def test_a_parcel_with_a_pipe_is_never_the_same() -> None:
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    assert Parcel(queue).key is None
    queue.close()


def test_what_is_posted_is_pickled_once_and_small() -> None:
    class Counted:
        pickled = 0

        def __reduce__(self) -> Any:
            Counted.pickled += 1
            return list, (range(100_000),)

    posted, popen = Posted(Counted()), SimpleNamespace(duplicate_for_child=os.dup, DupFd=Kept)
    set_spawning_popen(popen)  # type: ignore[arg-type]
    try:
        sent = [bytes(ForkingPickler.dumps(posted)) for _ in range(2)]
    finally:
        set_spawning_popen(None)  # type: ignore[arg-type]
    assert Counted.pickled == 1
    assert max(map(len, sent)) < 1000
    assert [pickle.loads(each) for each in sent] == [list(range(100_000))] * 2


def test_lists_that_are_gone_are_forgotten() -> None:
    lists = Lists()
    Parcel([str(index) for index in range(2 * LARGE)], lists=lists)
    Parcel(1, lists=lists)
    Parcel(1, lists=lists)
    assert lists.items() == {}


def test_an_error_is_that_of_multiprocessing_and_leaves_nothing_open() -> None:
    before = descriptors()
    with pytest.raises(
        (AttributeError, TypeError, pickle.PicklingError), match=r"local object|pickle"
    ):
        Parcel(lambda: 1)
    assert len(descriptors()) <= len(before)


def test_the_other_end_that_is_gone_is_told() -> None:
    ours, theirs = pair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        receive(theirs)


def test_global_generators_are_those_of_the_process_that_receives_them() -> None:
    kinds = torch.default_generator, random._inst, np.random.mtrand._rand
    first = Parcel([*kinds, random.random])
    random.random()  # whose state does not count
    assert Parcel([*kinds, random.random]).key == first.key
    *others, draw = arrived(first)
    assert [id(each) for each in others] == [id(each) for each in kinds]
    assert draw.__self__ is random._inst
