"""What is sent to another process arrives as `multiprocessing` would send it, and is known when it
would be the same."""

import copy
import os
import pickle
import random
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotune_loader.machine.elsewhere import descriptors
from autotune_loader.machine.nursery import pair
from autotune_loader.machine.parcel import LARGE, Lists, Parcel, Posted, receive, unpack


def arrived(parcel, given=(), modules=None):
    ours, theirs = pair()
    with ours, theirs:
        parcel.send(ours)
        return unpack(*receive(theirs), given, modules)


class Kept:
    """Stands for a descriptor in a pickle."""

    def __init__(self, file):
        self._file = file

    def detach(self):
        return self._file


class Paths:
    """A dataset as people write it."""

    def __init__(self):
        self.names = [f"image_{index}" for index in range(2 * LARGE)]
        self.pairs = [(name, index) for index, name in enumerate(self.names)]
        self.boxes = [[index] for index in range(2 * LARGE)]
        self.labels = np.arange(4)
        self.few = ["a", "b"]
        self.rng = random.Random(0)


@pytest.mark.parametrize("value", [
    {"a": [1, 2.5, None, b"x", "y"], "nested": {"tuple": (1, (2,))}},
    list(range(3 * LARGE)),
    tuple(str(index) for index in range(3 * LARGE)),
    [[index] for index in range(3 * LARGE)],
    [],
])  # fmt: skip
def test_a_value_arrives(value):
    found = arrived(Parcel(value, lists=Lists()))
    assert found == value
    assert type(found) is type(value)


def test_what_is_one_object_arrives_as_one():
    names, tensor = [str(index) for index in range(2 * LARGE)], torch.zeros(2).share_memory_()
    parcel = Parcel((names, {"names": names}, tensor, np.arange(9)), lists=Lists())
    modules = set()
    one, other, shared, array = arrived(parcel, modules=modules)
    assert "numpy" in modules  # what it refers to is told
    assert one is other["names"]
    shared[0] = 7
    assert tensor.tolist() == [7.0, 0.0]
    assert array.tolist() == list(range(9))


def test_more_files_than_a_packet_takes_arrive():
    tensors = [torch.full((1,), float(index)) for index in range(300)]
    assert [each.item() for each in arrived(Parcel(tensors))] == list(range(300))


def test_what_the_other_process_has_is_not_sent():
    data, stands_in = Paths(), object()
    found = arrived(Parcel({"dataset": data, "number": 3}, given=[data]), given=[stands_in])
    assert found == {"dataset": stands_in, "number": 3}


CHANGES = {
    "an item replaced": lambda data: data.names.__setitem__(5, "other"),
    "an item appended": lambda data: data.pairs.append(("more", 1)),
    "in a list of lists": lambda data: data.boxes[7].__setitem__(0, -1),
    "in an array": lambda data: data.labels.__setitem__(0, 9),
    "in a short list": lambda data: data.few.__setitem__(0, "c"),
    "a new attribute": lambda data: setattr(data, "epoch", 1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_gives_another_key(change):
    data, lists = Paths(), Lists()
    first = Parcel(data, lists=lists).key
    assert Parcel(data, lists=lists).key == first
    change(data)
    assert Parcel(data, lists=lists).key != first
    assert arrived(Parcel(data, lists=lists)).names == data.names


def test_what_is_apart_does_not_count_and_arrives():
    data, lists = Paths(), Lists()
    first = Parcel(data, lists=lists, apart=[data.rng]).key
    drawn = copy.deepcopy(data.rng).random()
    data.rng.random()
    parcel = Parcel(data, lists=lists, apart=[data.rng])
    assert parcel.key == first
    assert arrived(parcel).rng.random() != drawn


def test_a_parcel_with_a_pipe_has_no_key():
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    assert Parcel(queue).key is None
    queue.close()


def test_what_is_posted_is_pickled_once_and_small():
    class Counted:
        pickled = 0

        def __reduce__(self):
            Counted.pickled += 1
            return list, (range(100_000),)

    posted, popen = Posted(Counted()), SimpleNamespace(duplicate_for_child=os.dup, DupFd=Kept)
    set_spawning_popen(popen)
    try:
        sent = [bytes(ForkingPickler.dumps(posted)) for _ in range(2)]
    finally:
        set_spawning_popen(None)
    assert Counted.pickled == 1
    assert max(map(len, sent)) < 1000
    assert [pickle.loads(each) for each in sent] == [list(range(100_000))] * 2


@pytest.mark.parametrize(
    ("items", "can_change"),
    [(["a", ("b", 1)], False), ([("b", [1])], True), ([["b"]], True)],
)
def test_a_list_that_cannot_change_has_a_number(items, can_change):
    assert (Lists().number(items) is None) == can_change


def test_lists_that_are_gone_are_forgotten():
    lists = Lists()
    Parcel([str(index) for index in range(2 * LARGE)], lists=lists)
    Parcel(1, lists=lists)
    Parcel(1, lists=lists)
    assert lists.items() == {}


def test_an_error_leaves_nothing_open():
    before = descriptors()
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match=r"local|pickle"):
        Parcel(lambda: 1)
    assert len(descriptors()) <= len(before)


def test_the_other_end_that_is_gone_is_told():
    ours, theirs = pair()
    ours.close()
    with theirs, pytest.raises(EOFError):
        receive(theirs)


def test_global_generators_are_the_receivers_own():
    kinds = torch.default_generator, random._inst, np.random.mtrand._rand
    first = Parcel([*kinds, random.random])
    random.random()  # whose state does not count
    assert Parcel([*kinds, random.random]).key == first.key
    *others, draw = arrived(first)
    assert [id(each) for each in others] == [id(each) for each in kinds]
    assert draw.__self__ is random._inst
