"""Batches on their way to a device: ahead of the loop, in order, whole, and in the containers that they came in."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from autotune_loader.pipeline.prefetch import DevicePrefetcher, move, prefetched, prefetched_as_tuned
from autotune_loader.values.config import LoaderConfig

Pair = namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    total: int = dataclasses.field(init=False, default=7)


class Movable:
    """Moves itself, in the way of old libraries."""

    def __init__(self, where: str = "here") -> None:
        self.where = where

    def to(self, device: Any) -> Movable:
        return Movable(str(device))


class Modern(Movable):
    def to(self, device: Any, **kwargs: Any) -> Modern:
        return Modern(f"{device} {kwargs['non_blocking']}")


class FakeLane:
    """Writes down what happens, in order, and brings batches back as they are."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def open(self) -> None:
        self.events.append("open")

    def send(self, batch: int) -> int:
        self.events.append(f"send {batch}")
        return batch

    def receive(self, sent: int) -> int:
        self.events.append(f"receive {sent}")
        return sent


def failing(count: int) -> Iterator[int]:
    """Delivers some batches, then raises."""
    yield from range(count)
    raise KeyError("broken sample")


@pytest.mark.parametrize("depth", [1, 2, 50])
@pytest.mark.parametrize("batches", [0, 1, 7])
def test_batches_come_all_and_in_order(depth: int, batches: int) -> None:
    assert list(prefetched(range(batches), FakeLane(), depth)) == list(range(batches))


def test_copies_are_depth_batches_ahead_of_the_loop() -> None:
    lane = FakeLane()
    for batch in prefetched(range(4), lane, 2):
        lane.events.append(f"step {batch}")
    # THEN two copies are under way during every step, until the loader ends
    assert lane.events == [
        "open",
        *("send 0", "send 1", "send 2", "receive 0", "step 0"),
        *("send 3", "receive 1", "step 1"),
        *("receive 2", "step 2", "receive 3", "step 3"),
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_an_exception_comes_after_the_batches_before_it_and_holds_none(depth: int) -> None:
    batches = prefetched(failing(5), FakeLane(), depth)
    assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="broken sample") as caught:
        next(batches)
    # THEN the frame that its traceback keeps alive holds neither batches nor the loader
    frame = next(entry.frame for entry in caught.traceback if entry.name == "prefetched").raw
    assert (frame.f_locals["batches"], list(frame.f_locals["ahead"])) == (None, [])


def test_leaving_early_ends_the_loader() -> None:
    closed = []

    def loader() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    batches = prefetched(loader(), FakeLane(), 2)
    assert next(batches) == 0
    batches.close()
    assert closed == [True]


def test_a_dataloader_on_the_cpu_gives_the_same_batches_in_every_epoch() -> None:
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=2)
    for _ in range(2):
        assert torch.equal(torch.cat([x for (x,) in prefetcher]), torch.arange(20))
        next(iter(prefetcher))  # left early
    assert len(prefetcher) == len(loader) == 7


def test_on_the_cpu_nothing_is_read_ahead() -> None:
    asked = []

    def loader() -> Iterator[torch.Tensor]:
        for index in range(5):
            asked.append(index)
            yield torch.tensor(index)

    next(iter(DevicePrefetcher(loader(), "cpu", depth=3)))
    assert asked == [0]


@pytest.mark.parametrize(
    ("depth", "error", "says"),
    [
        (0, ValueError, "depth=0 is below 1; depth=1 would work"),
        (1.5, TypeError, "is not an integer; depth=1 would work"),
        (True, TypeError, "is not an integer; depth=1 would work"),
    ],
)
def test_a_wrong_depth_is_refused_with_one_that_works(depth: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        DevicePrefetcher([], "cpu", depth=depth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"device='cuda' needs CUDA"):
        DevicePrefetcher([], "cuda")


@pytest.mark.parametrize(("depth", "device"), [(2, "cpu"), (0, "cuda")])
def test_without_tuned_prefetch_or_off_cuda_a_loader_stays_itself(depth: int, device: str) -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)))
    assert prefetched_as_tuned(loader, LoaderConfig(device_prefetch=depth), device) is loader


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(2), "name", 3, None, b"raw"],
        (torch.ones(2), [torch.zeros(1)]),
        {"x": torch.ones(2), "meta": {"id": 1, "more": (torch.ones(1),)}},
        OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
        defaultdict(list, x=torch.ones(1)),
        Pair(torch.ones(1), {"y": torch.ones(1)}),
        pack_sequence([torch.ones(3), torch.ones(2)]),
        "text",
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_container_keeps_its_type_and_order_and_the_users_stays_as_it_was(batch: Any) -> None:
    moved, before = move(batch, torch.device("meta")), outline(batch)

    assert type(moved) is type(batch)
    assert [shape for shape, _ in outline(moved)] == [shape for shape, _ in before]
    # lengths of a packed sequence stay on the host
    assert {device for _, device in outline(moved)} <= {"", "meta", "cpu" if isinstance(batch, PackedSequence) else ""}
    assert outline(batch) == before


def outline(value: Any) -> list[tuple[Any, str]]:
    """Keys and shapes, and where tensors are."""
    if isinstance(value, torch.Tensor):
        return [(tuple(value.shape), value.device.type)]
    if isinstance(value, dict):
        return [part for key, each in value.items() for part in ((key, ""), *outline(each))]
    if isinstance(value, (list, tuple)):
        return [part for each in value for part in outline(each)]
    return [(value, "")]


def test_what_moves_in_its_own_way_is_moved_so() -> None:
    # a frozen dataclass with a field that its constructor does not take
    batch = Frozen(x=torch.ones(2))
    moved = move(batch, "meta")
    assert (moved.x.device.type, moved.total, batch.x.device.type) == ("meta", 7, "cpu")
    # an immutable mapping becomes a dict
    assert move(MappingProxyType({"x": torch.ones(1)}), "meta")["x"].device.type == "meta"
    # an object moves itself, with `non_blocking` where it takes it
    assert move(Movable(), "meta", non_blocking=False).where == "meta"
    assert move(Modern(), "meta", non_blocking=False).where == "meta False"


@pytest.mark.gpu
def test_a_tuned_depth_is_applied_on_cuda() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)))
    ahead = prefetched_as_tuned(loader, LoaderConfig(device_prefetch=2), "cuda")
    assert isinstance(ahead, DevicePrefetcher)
    assert (ahead.depth, [int(x) for (x,) in ahead]) == (2, [0, 1, 2, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("pinned", [True, False])
def test_batches_on_the_gpu_are_equal_while_steps_overlap(depth: int, pinned: bool) -> None:
    # GIVEN batches large enough for copies to take a while, and more of them than the allocator keeps blocks
    data = torch.arange(64 * 2**18, dtype=torch.int64).reshape(64, -1)
    loader = DataLoader(TensorDataset(data), batch_size=2, pin_memory=pinned)
    prefetcher = DevicePrefetcher(loader, "cuda", depth=depth)
    # WHEN a slow kernel runs before each batch is read, in two epochs, and batches are dropped at once
    for _ in range(2):
        sums = []
        for (x,) in prefetcher:
            torch.cuda._sleep(2_000_000)
            sums.append(x.sum())
        # THEN no batch was overwritten by a later copy
        assert torch.equal(torch.stack(sums).cpu(), data.reshape(32, -1).sum(1))


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 4])
def test_objects_that_hide_their_tensors_are_safe_on_the_gpu(depth: int) -> None:
    # GIVEN batches whose tensors the allocator cannot be told about
    class Hidden:
        def __init__(self, x: torch.Tensor) -> None:
            self._hidden = (x,)

        def to(self, device: Any, non_blocking: bool = False) -> Hidden:
            return Hidden(self._hidden[0].to(device, non_blocking=non_blocking))

    batches = [Hidden(torch.full((2**20,), index).pin_memory()) for index in range(24)]
    # WHEN slow steps read them
    sums = []
    for batch in DevicePrefetcher(batches, "cuda", depth=depth):
        torch.cuda._sleep(2_000_000)
        sums.append(batch._hidden[0].sum())
    # THEN each is whole
    assert torch.stack(sums).tolist() == [index * 2**20 for index in range(24)]


@pytest.mark.gpu
def test_leaving_early_and_sparse_batches_leave_the_gpu_usable() -> None:
    prefetcher = DevicePrefetcher([torch.full((4,), index).pin_memory() for index in range(8)], "cuda", depth=3)
    assert next(iter(prefetcher)).is_cuda
    assert [int(batch[0]) for batch in prefetcher] == list(range(8))
    sparse = [torch.eye(4).to_sparse() * index for index in range(1, 6)]
    sums = [float(batch.to_dense().sum()) for batch in DevicePrefetcher(sparse, "cuda", depth=2)]
    assert sums == [4.0, 8.0, 12.0, 16.0, 20.0]
