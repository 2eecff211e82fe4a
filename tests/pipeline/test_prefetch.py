"""Batches on their way to a device: ahead of the loop, in order, whole, and in the containers that they came in."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
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

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Its constructor does not take all fields."""

    x: torch.Tensor
    total: int = dataclasses.field(init=False, default=7)


class InPlace:
    """Moves itself, as batches of transformers and PyTorch Geometric do."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_copies_are_depth_batches_ahead_and_an_exception_comes_after_the_batches_before_it():
    events = []

    def noted(what):
        return lambda batch: events.append(f"{what} {batch}") or batch

    def loader(batches):
        yield from range(batches)
        raise KeyError("broken sample")

    lane = SimpleNamespace(send=noted("send"), receive=noted("receive"))
    with pytest.raises(KeyError, match="broken sample"):
        list(map(noted("step"), prefetched(loader(4), lane, 2)))
    # THEN two copies are under way during every step, until the loader ends
    assert events == [
        *("send 0", "send 1", "send 2", "receive 0", "step 0"),
        *("send 3", "receive 1", "step 1"),
        *("receive 2", "step 2", "receive 3", "step 3"),
    ]
    for batches, depth in ((0, 1), (7, 1), (7, 50)):
        assert list(prefetched(range(batches), lane, depth)) == list(range(batches))


def test_on_the_cpu_batches_are_the_loaders_own_in_every_epoch_and_none_is_read_ahead():
    asked = []
    loader = DataLoader(
        range(20), batch_size=3, collate_fn=lambda rows: asked.extend(rows) or torch.tensor(rows)
    )
    prefetcher = DevicePrefetcher(loader, "cpu", depth=2)
    for _ in range(2):
        assert torch.equal(torch.cat(list(prefetcher)), torch.arange(20))
        asked.clear()
        next(iter(prefetcher))  # left early
        assert asked == [0, 1, 2]
    assert len(prefetcher) == len(loader) == 7
    # AND what is tuned for an accelerator, or not tuned, leaves a loader as it is
    for depth, device in ((2, "cpu"), (0, "cuda")):
        assert prefetched_as_tuned(loader, LoaderConfig(device_prefetch=depth), device) is loader


def test_what_cannot_work_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="depth=0 must be an integer >= 1; depth=1 would work"):
        DevicePrefetcher([], "cpu", depth=0)
    with pytest.raises(
        ValueError,
        match=r"device='cuda' does not exist \(PyTorch sees 0\); device='cpu' would work",
    ):
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
def test_every_container_keeps_its_type_and_order_and_the_users_stays_as_it_was(batch):
    before, structure = tree_flatten(batch)
    moved, same_structure = tree_flatten(move(batch, torch.device("meta")))
    assert same_structure == structure
    assert [getattr(value, "device", value) for value in moved] == [
        torch.device("meta") if isinstance(own, torch.Tensor) else own for own in before
    ]
    assert all(value is own for value, own in zip(tree_flatten(batch)[0], before, strict=True))
    # AND a batch in containers of its own has the very same tensors
    again, same_structure = tree_flatten(fresh(batch))
    assert same_structure == structure
    assert fresh(batch) is not batch
    assert all(value is own for value, own in zip(again, before, strict=True))
    # AND a copy has equal ones
    copies, same_structure = tree_flatten(Copies(batch, 2).__getitems__([0, 1]))
    assert same_structure == structure
    for value, own in zip(copies, before, strict=True):
        is_tensor = isinstance(own, torch.Tensor)
        assert (
            torch.equal(value, own) and value.data_ptr() != own.data_ptr()
            if is_tensor
            else value is own
        )


def test_pinned_memory_comes_in_blocks_of_a_power_of_two_for_each_tensor():
    sizes = {0: 0, 1: 4, 3: 16, 4: 16, 5: 32, 9_625_600: 64 << 20}  # 38.5 MB
    assert {count: locked_bytes([torch.empty(count)]) for count in sizes} == sizes
    assert locked_bytes({"x": torch.empty(3), "y": (torch.empty(5), "name")}) == 48


def test_what_moves_in_its_own_way_is_moved_so():
    moved = move(Frozen(x=torch.ones(2)), "meta")
    assert (moved.x.device.type, moved.total) == ("meta", 7)
    assert move(MappingProxyType({"x": torch.ones(1)}), "meta")["x"].device.type == "meta"
    # what moves itself leaves the batch that is kept for later as it was, also where a step moves its own
    kept = {"graph": InPlace(torch.ones(1))}
    for moved in (move(kept, "meta"), {"graph": fresh(kept)["graph"].to("meta")}):
        assert (moved["graph"].x.device.type, kept["graph"].x.device.type) == ("meta", "cpu")
    # `non_blocking` is given to who takes it
    for to, told in (
        (str, "meta"),
        (lambda device, **options: f"{device} {options}", "meta {'non_blocking': True}"),
    ):
        assert move(SimpleNamespace(to=to), "meta") == told


def hidden(x):
    return SimpleNamespace(to=lambda *a, **named: x.pin_memory().to(*a, **named))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("made", [torch.Tensor.clone, torch.Tensor.pin_memory, hidden])
def test_batches_on_the_gpu_are_whole_while_steps_overlap(made, depth):
    # GIVEN batches large enough for copies to take a while, and more of them than the allocator keeps blocks
    batches = [made(torch.full((2**20,), index)) for index in range(32)]
    prefetcher = DevicePrefetcher(batches, "cuda", depth=depth)
    # WHEN a slow kernel runs before each batch is read, in two epochs, and batches are dropped at once
    for _ in range(2):
        sums = []
        for batch in prefetcher:
            torch.cuda._sleep(2_000_000)
            sums.append(batch.sum())
        # THEN no batch was overwritten by a later copy
        assert torch.stack(sums).tolist() == [index * 2**20 for index in range(32)]
