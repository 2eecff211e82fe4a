"""Batches on their way to a device: ahead of the loop, in order, whole, in their own containers."""

import dataclasses
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from itertools import chain
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader

from autotune_loader.pipeline.batches import (
    Copies,
    DevicePrefetcher,
    fresh,
    locked_bytes,
    move,
    prefetched,
    prefetched_as_tuned,
)
from autotune_loader.values import LoaderConfig
from tests.support.data import Rows

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Its constructor does not take all fields."""

    x: torch.Tensor
    total: int = dataclasses.field(init=False, default=7)


class InPlace:
    """Moves itself, as batches of transformers and PyTorch Geometric do."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_copies_are_depth_batches_ahead():
    events = []

    def noted(what):
        return lambda batch: events.append(f"{what} {batch}") or batch

    def loader(batches):
        yield from range(batches)
        raise KeyError("broken sample")

    lane = SimpleNamespace(send=noted("send"), receive=noted("receive"))
    with pytest.raises(KeyError, match="broken sample"):
        list(map(noted("step"), prefetched(loader(4), lane, 2)))
    # THEN two copies are under way during every step, until the loader ends; its error comes last
    assert events == [
        *("send 0", "send 1", "send 2", "receive 0", "step 0"),
        *("send 3", "receive 1", "step 1"),
        *("receive 2", "step 2", "receive 3", "step 3"),
    ]
    for batches, depth in ((0, 1), (7, 1), (7, 50)):
        assert list(prefetched(range(batches), lane, depth)) == list(range(batches))


def test_a_batch_that_was_sent_is_let_go():
    def make(number):
        batch = Rows(int, number)
        held.add(batch)
        return batch

    held, lane = weakref.WeakSet(), SimpleNamespace(send=len, receive=lambda sent: sent)
    for _ in prefetched(map(make, range(4)), lane, 1):
        assert not held


def test_copies_in_a_worker_lie_in_shared_memory(monkeypatch):
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: 0)
    assert Copies(torch.ones(2), 1).__getitems__([0]).is_shared()


def test_on_the_cpu_none_is_read_ahead():
    asked = []
    loader = DataLoader(range(20), 3, collate_fn=lambda rows: asked.extend(rows) or rows)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=2)
    for _ in range(2):
        assert list(chain(*prefetcher)) == list(range(20))
        asked.clear()
        next(iter(prefetcher))  # left early
        assert asked == [0, 1, 2]
    assert len(prefetcher) == len(loader) == 7
    # THEN what is tuned for an accelerator, or not tuned, leaves a loader as it is
    for depth, device in ((2, "cpu"), (0, "cuda")):
        assert prefetched_as_tuned(loader, LoaderConfig(device_prefetch=depth), device) is loader


def test_what_cannot_work_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"depth=0 must be an integer >= 1. Try depth=1."):
        DevicePrefetcher([], "cpu", depth=0)
    says = r"device='cuda' does not exist \(PyTorch sees 0\). Try device='cpu'."
    with pytest.raises(ValueError, match=says):
        DevicePrefetcher([], "cuda")


@pytest.mark.parametrize(
    "batch",
    [
        {"x": torch.ones(2), "meta": {"id": 1, "more": (torch.ones(1), [torch.zeros(1)])}},
        OrderedDict(b=torch.ones(1), a="name"),
        defaultdict(list, x=torch.ones(1)),
        Pair(torch.ones(1), {"y": None}),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_container_keeps_its_type_and_order(batch):
    before, structure = tree_flatten(batch)
    others = fresh(batch), move(batch, "meta"), Copies(batch, 2).__getitems__([0, 1])
    assert others[0] is not batch
    for other in others:
        assert tree_flatten(other)[1] == structure
    # THEN a fresh one has the very same tensors, and a copy has equal ones
    values = (tree_flatten(each)[0] for each in (batch, *others))
    for own, after, same, moved, copied in zip(before, *values, strict=True):
        assert own is after is same
        if isinstance(own, torch.Tensor):
            assert moved.device.type == "meta"
            assert torch.equal(copied, own)
            assert copied.data_ptr() != own.data_ptr()
        else:
            assert moved is copied is own


def test_pinned_memory_comes_in_blocks_by_tensor():
    sizes = {0: 0, 1: 4, 3: 16, 4: 16, 5: 32, 9_625_600: 64 << 20}  # powers of two; 38.5 MB
    assert {count: locked_bytes([torch.empty(count)]) for count in sizes} == sizes
    assert locked_bytes({"x": torch.empty(3), "y": (torch.empty(5), "name")}) == 48


def test_objects_move_in_their_own_way():
    moved = move(Frozen(x=torch.ones(2)), "meta")
    assert moved.x.device.type == "meta"
    assert moved.total == 7
    assert move(MappingProxyType({"x": torch.ones(1)}), "meta")["x"].device.type == "meta"
    # `non_blocking` is given to who takes it
    told = SimpleNamespace(to=lambda device, **options: f"{device} {options}")
    assert move(told, "meta") == "meta {'non_blocking': True}"
    assert move(SimpleNamespace(to=str), "meta") == "meta"


def test_what_moves_itself_leaves_the_kept_batch():
    kept = {"graph": InPlace(torch.ones(1))}
    for moved in (move(kept, "meta"), {"graph": fresh(kept)["graph"].to("meta")}):
        assert moved["graph"].x.device.type == "meta"
        assert kept["graph"].x.device.type == "cpu"


def hidden(x):
    return SimpleNamespace(to=lambda *a, **named: x.pin_memory().to(*a, **named))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("made", [torch.Tensor.clone, torch.Tensor.pin_memory, hidden])
def test_batches_on_the_gpu_are_whole(made, depth):
    # GIVEN batches whose copies take a while, and more of them than the allocator keeps blocks
    batches = [made(torch.full((2**20,), index)) for index in range(32)]
    prefetcher = DevicePrefetcher(batches, "cuda", depth=depth)
    # WHEN a slow kernel runs before each batch is read, and batches are dropped at once
    for _ in range(2):
        sums = []
        for batch in prefetcher:
            torch.cuda._sleep(2_000_000)
            sums.append(batch.sum())
        # THEN no batch was overwritten by a later copy
        assert torch.stack(sums).tolist() == [index * 2**20 for index in range(32)]
