from __future__ import annotations

import dataclasses
import subprocess
import sys
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


class Failing:
    """Delivers some batches, then raises."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        yield from range(self.count)
        raise KeyError("broken sample")


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 50])
@pytest.mark.parametrize("batches", [0, 1, 2, 7])
def test_batches_come_all_and_in_order(depth: int, batches: int) -> None:
    assert list(prefetched(range(batches), FakeLane(), depth)) == list(range(batches))


def test_copies_are_depth_batches_ahead_of_the_loop() -> None:
    # GIVEN a lane that writes down what happens
    lane = FakeLane()
    # WHEN a loop takes four batches at depth 2
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
def test_an_exception_comes_after_the_batches_before_it(depth: int) -> None:
    # GIVEN a loader that raises after five batches
    batches = prefetched(Failing(5), FakeLane(), depth)
    # WHEN it is iterated THEN the loop gets those five, and then the exception
    assert [next(batches) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError, match="broken sample"):
        next(batches)


def test_leaving_early_ends_the_loader() -> None:
    # GIVEN a loader that notices when it is closed
    closed = []

    def loader() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(True)

    # WHEN the loop is left
    batches = prefetched(loader(), FakeLane(), 2)
    assert next(batches) == 0
    batches.close()  # type: ignore[attr-defined]
    # THEN the loader has ended
    assert closed == [True]


def test_a_kept_exception_does_not_hold_batches_or_the_loader() -> None:
    # GIVEN an exception out of the loop body's own prefetcher
    with pytest.raises(KeyError) as caught:
        list(prefetched(Failing(3), FakeLane(), 2))
    # WHEN its traceback is looked at
    frame = next(entry.frame for entry in caught.traceback if entry.name == "prefetched").raw
    # THEN the frame that it keeps alive holds nothing
    assert (frame.f_locals["batches"], list(frame.f_locals["ahead"])) == (None, [])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_a_dataloader_on_the_cpu_gives_the_same_batches_in_every_epoch(workers: int) -> None:
    # GIVEN a DataLoader
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=3, num_workers=workers)
    prefetcher = DevicePrefetcher(loader, "cpu", depth=2)
    # WHEN it is iterated twice, once left early in between
    epochs = []
    for _ in range(2):
        epochs.append(torch.cat([x for (x,) in prefetcher]))
        next(iter(prefetcher))
    # THEN both epochs are whole
    assert all(torch.equal(epoch, torch.arange(20)) for epoch in epochs)
    assert len(prefetcher) == len(loader) == 7


def test_on_the_cpu_nothing_is_read_ahead() -> None:
    # GIVEN a loader that counts
    asked = []

    def loader() -> Iterator[torch.Tensor]:
        for index in range(5):
            asked.append(index)
            yield torch.tensor(index)

    # WHEN one batch is taken THEN one was read
    next(iter(DevicePrefetcher(loader(), "cpu", depth=3)))
    assert asked == [0]


def test_a_cpu_tensor_passes_through_the_cpu_as_it_is() -> None:
    tensor = torch.ones(3)
    assert next(iter(DevicePrefetcher([tensor], torch.device("cpu")))) is tensor


def test_a_loader_without_a_length_has_none_here_either() -> None:
    with pytest.raises(TypeError):
        len(DevicePrefetcher(iter([]), "cpu"))


@pytest.mark.parametrize("depth", [0, -1])
def test_a_depth_below_one_is_refused_with_one_that_works(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depth={depth} is below 1; depth=1 would work"):
        DevicePrefetcher([], "cpu", depth=depth)


@pytest.mark.parametrize("depth", [1.5, "2", None, True])
def test_a_depth_of_another_type_is_refused(depth: Any) -> None:
    with pytest.raises(TypeError, match=r"is not an integer; depth=1 would work"):
        DevicePrefetcher([], "cpu", depth=depth)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match=r"device='cuda' needs CUDA"):
        DevicePrefetcher([], "cuda")


@pytest.mark.parametrize(("depth", "device"), [(0, "cpu"), (2, "cpu"), (0, "cuda")])
def test_without_tuned_prefetch_or_off_cuda_a_loader_stays_itself(depth: int, device: str) -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)))
    assert prefetched_as_tuned(loader, LoaderConfig(device_prefetch=depth), device) is loader


@pytest.mark.gpu
def test_a_tuned_depth_is_applied_on_cuda() -> None:
    loader = DataLoader(TensorDataset(torch.arange(4)))
    ahead = prefetched_as_tuned(loader, LoaderConfig(device_prefetch=2), "cuda")
    assert isinstance(ahead, DevicePrefetcher)
    assert (ahead.depth, [int(x) for (x,) in ahead]) == (2, [0, 1, 2, 3])


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        [torch.ones(2), "name", 3, None, b"raw"],
        (torch.ones(2), [torch.zeros(1)]),
        {"x": torch.ones(2), "meta": {"id": 1, "more": (torch.ones(1),)}},
        OrderedDict(b=torch.ones(1), a=torch.zeros(1)),
        defaultdict(list, x=torch.ones(1)),
        Pair(torch.ones(1), {"y": torch.ones(1)}),
        pack_sequence([torch.ones(3), torch.ones(2)]),
        "text",
        7,
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_container_keeps_its_type_and_order(batch: Any) -> None:
    # WHEN it is moved to a device on which tensors have no data
    moved = move(batch, torch.device("meta"))
    # THEN its shape is the same and every tensor is there
    assert type(moved) is type(batch)
    assert outline(moved) == outline(batch)
    # lengths of a packed sequence stay on the host
    assert {tensor.device.type for tensor in tensors_in(moved)} <= {"meta", "cpu" if is_packed(batch) else "meta"}


def is_packed(batch: Any) -> bool:
    return isinstance(batch, PackedSequence)


def outline(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return [(key, outline(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [outline(each) for each in value]
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, (list, tuple)) else []


def test_a_frozen_dataclass_is_moved_with_the_fields_its_constructor_does_not_take() -> None:
    # GIVEN one whose second field is not a constructor argument
    batch = Frozen(x=torch.ones(2))
    # WHEN moved
    moved = move(batch, "meta")
    # THEN it is another one; the first stays as it was
    assert (moved.x.device.type, moved.total, batch.x.device.type) == ("meta", 7, "cpu")


def test_an_immutable_mapping_becomes_a_dict() -> None:
    moved = move(MappingProxyType({"x": torch.ones(1)}), "meta")
    assert moved["x"].device.type == "meta"


@pytest.mark.parametrize(("batch", "where"), [(Movable(), "meta"), (Modern(), "meta False")])
def test_an_object_moves_itself_with_non_blocking_where_it_takes_it(batch: Movable, where: str) -> None:
    assert move(batch, "meta", non_blocking=False).where == where


def test_the_users_containers_stay_as_they_were() -> None:
    batch = {"x": [torch.ones(1)]}
    move(batch, "meta")
    assert batch["x"][0].device.type == "cpu"


@pytest.mark.process
def test_importing_the_module_needs_no_torch() -> None:
    # GIVEN an interpreter in which torch cannot be imported
    script = (
        "import sys; sys.modules['torch'] = None; import importlib.util as u;"
        "spec = u.find_spec('autotune_loader'); path = spec.submodule_search_locations[0] + '/pipeline/prefetch.py';"
        "m = u.spec_from_file_location('prefetch', path); module = u.module_from_spec(m); m.loader.exec_module(module)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stderr == ""


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
def test_leaving_early_and_failing_leave_the_gpu_usable() -> None:
    # GIVEN a prefetcher that is left early
    prefetcher = DevicePrefetcher([torch.full((4,), index).pin_memory() for index in range(8)], "cuda", depth=3)
    for batch in prefetcher:
        assert batch.is_cuda
        break
    # WHEN it is iterated again THEN it starts over
    assert [int(batch[0]) for batch in prefetcher] == list(range(8))


@pytest.mark.gpu
def test_sparse_batches_reach_the_gpu() -> None:
    sparse = [torch.eye(4).to_sparse() * index for index in range(1, 6)]
    sums = [float(batch.to_dense().sum()) for batch in DevicePrefetcher(sparse, "cuda", depth=2)]
    assert sums == [4.0, 8.0, 12.0, 16.0, 20.0]
