"""What travels between the loop and a worker: batches and jobs of any kind, as torch sends them."""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import random
from collections import namedtuple
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from autotune_loader import AutoLoader
from autotune_loader.autoloader import segments, torchs
from autotune_loader.autoloader.channel import Channel, Come, Results, WorkerGone
from autotune_loader.autoloader.segments import SMALL_BYTES, JobPickler, Mapped, Pool, Segment
from autotune_loader.machine.elsewhere import descriptors
from tests.support.bursts import Made

pytestmark = pytest.mark.process

Pair = namedtuple("Pair", ["x", "y"])


class Tagged(torch.Tensor):
    """A class of tensors of somebody's own."""


def with_attribute() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.lengths = [1, 2]  # type: ignore[attr-defined]
    return tensor


READ_ONLY = np.arange(30_000)
READ_ONLY.setflags(write=False)
IMAGE = torch.arange(4 * 6 * 5 * 300).reshape(4, 6, 5, 300)
LARGE = torch.randn(300, 300)
NESTED = torch.nested.nested_tensor
BATCHES: dict[str, Any] = {
    "small tensors": [torch.arange(5), torch.tensor(3.5), torch.empty(0, 3)],
    "bfloat16": torch.ones(2).bfloat16(),
    "large": torch.randn(200, 300),
    "transposed": [torch.randn(200, 300).t(), torch.randn(3, 4).t()],
    "channels last": IMAGE.contiguous(memory_format=torch.channels_last),
    "a view of more": [LARGE[10:200], LARGE[:, ::2], torch.randn(9)[1:3]],
    "one tensor twice": [IMAGE, IMAGE],
    "sparse": [torch.eye(3).to_sparse(), torch.eye(99).to_sparse()],
    "nested": lambda: NESTED([torch.ones(2), torch.ones(40_000)]),
    "jagged": lambda: NESTED([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged),
    "with an attribute": with_attribute(),
    "of another class": torch.randn(30_000).as_subclass(Tagged),
    "requires grad": [torch.zeros(3, requires_grad=True), torch.nn.Parameter(torch.ones(30_000))],
    "conjugate": torch.randn(30_000, dtype=torch.cfloat).conj(),
    "arrays": [np.zeros((300, 300)), np.arange(3), READ_ONLY],
    "Fortran's order": np.asfortranarray(np.ones((99, 200))),
    "structs": np.zeros(9_000, dtype=[("x", "f4"), ("y", "i8")]),
    "objects": np.array([{"a": 1}, None], dtype=object),
    "strings": Pair(["x" * 100] * 10, {"n": None, "b": b"x" * 10**6, "t": "x" * 100_000}),
    "300 tensors": [torch.full((2,), number) for number in range(300)],
    "40 large tensors": [torch.full((20_000,), float(number)) for number in range(40)],
    "nothing": None,
}  # fmt: skip


def shown(value: Any) -> Any:
    """All that can be told of a value but where it lies, and what it leaves out of memory there."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return type(value), value.layout, [shown(each) for each in value.unbind()]
    if isinstance(value, torch.Tensor):
        own = getattr(value, "lengths", None)
        about, stride = (type(value), value.dtype, value.layout, value.requires_grad, own), None
        if value.layout is torch.strided:
            spans = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
            stride = (value if spans == value.numel() else value.contiguous()).stride()
        flat = value.detach().resolve_conj().to_dense().flatten().contiguous()
        return *about, stride, value.shape, flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype == object else value.tobytes()
        return value.dtype, value.shape, value.flags.writeable, content
    if isinstance(value, dict):
        return {name: shown(each) for name, each in value.items()}
    return [type(value), *map(shown, value)] if isinstance(value, (list, tuple)) else value


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:The PyTorch API of nested tensors")
def test_any_batch_arrives_as_from_dataloader() -> None:
    batches = [each() if callable(each) else each for each in BATCHES.values()]
    how: Any = {"batch_size": None, "collate_fn": as_it_is, "num_workers": 2}
    loader = AutoLoader(Made(batches.__getitem__, len(batches)), **how, tune=False)
    seen = [[shown(each) for each in kind] for kind in (DataLoader(loader.dataset, **how), loader)]
    both = zip(BATCHES, *seen, strict=True)
    assert [kind for kind, theirs, ours in both if theirs != ours] == []
    # AND an epoch holds no descriptor
    held = [descriptors_after(loader) for _ in range(2)]
    assert held[0] == held[1]


def descriptors_after(loader: Any) -> int:
    list(loader)
    gc.collect()
    return len(descriptors())


class Way:
    """Between a worker and the loop, in one process."""

    def __init__(self) -> None:
        self.pool, self.mapped = Pool(), Mapped(None)

    def sent(self, message: Any) -> tuple[Any, int]:
        """The message as it arrives, and how many bytes it was lent."""
        body = self.pool.pickled(message)
        for number, size, file in self.pool.news()[0]:
            self.mapped.all[number] = Segment(number, file, size)
            os.close(file)
        return self.mapped.unpickled(body)


SIZES = pytest.mark.parametrize("size", [5, 90_000], ids=["small", "large"])


def parts_of(size: int) -> list[torch.Tensor]:
    flat = torch.arange(6 * size, dtype=torch.float64)
    return [flat, *flat.split([size, 2 * size, 3 * size])]


@SIZES
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)], ids=["flat first", "part first"])
def test_parts_of_a_tensor_arrive_as_its_parts(size: int, order: tuple[int, ...]) -> None:
    loader: Any = AutoLoader(
        [parts_of(size)] * 4, None, collate_fn=itemgetter(*order), num_workers=2
    )
    for batch in loader:
        batch[order.index(0)].neg_()
        assert len({each.untyped_storage().data_ptr() for each in batch}) == 1
        for number, part in zip(order, batch, strict=True):
            assert torch.equal(part, -parts_of(size)[number])


def test_parts_of_several_dtypes_share_memory() -> None:
    numbers = torch.arange(100_000, dtype=torch.int32)
    parts = [numbers.view(torch.uint8)[3:], numbers[1:], numbers[2:].view(torch.int64)]
    came, lent = Way().sent(parts)
    came[1].zero_()
    assert not came[2].any()
    assert not came[0][1:].any()
    assert lent == 400_000 - 3 + 3  # from where elements of each are aligned


@SIZES
def test_an_expanded_tensor_stays_expanded(size: int) -> None:
    row = torch.arange(float(size))
    came, lent = Way().sent(row.expand(1000, size))
    assert torch.equal(came, row.expand(1000, size))
    assert came.stride() == (0, 1)
    assert came.untyped_storage().nbytes() == 4 * size
    assert lent == (4 * size if 4 * size > SMALL_BYTES else 0)


def test_a_view_comes_without_what_it_views() -> None:
    table = torch.arange(4_000_000.0).view(2000, 2000)
    views = [table[7:60], table[1000:1200], table[:, 5], table[:, 6:9], table[9:9]]
    came, lent = Way().sent(views)
    assert all(map(torch.equal, came, views))
    assert lent == 4 * (53 + 200) * 2000


def test_parts_of_a_view_share_what_it_has() -> None:
    table = torch.zeros(2_000_000)
    came, lent = Way().sent([*table[500_000:600_000].split(25_000), table[500_000:600_000]])
    came[-1].fill_(7)
    assert all((each == 7).all() for each in came)
    assert lent == 400_000


def test_lengths_that_differ_make_no_types() -> None:
    way, rng = Way(), random.Random(0)
    gc.collect()
    before = len(ctypes.Array.__subclasses__())
    for _ in range(100):
        assert way.sent(torch.zeros(rng.randrange(29_000, 32_000)))[1] > SMALL_BYTES
        for number in way.mapped.back():
            way.pool.back(number)
    assert len(ctypes.Array.__subclasses__()) - before <= 4


def test_a_tensor_sent_twice_is_not_overwritten() -> None:
    way = Way()
    kept = way.pool.flat(90_000).fill_(7)  # GIVEN that a worker sends what it still has
    first, second = (way.sent(kept)[0] for _ in range(2))
    del second
    for number in way.mapped.back():
        way.pool.back(number)
    del kept
    assert way.sent(torch.zeros(90_000, dtype=torch.uint8))[0].sum() == 0
    assert (first == 7).all()


class Refusing:
    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> Any:
    raise ValueError("no")


def test_what_cannot_be_unpickled_gives_all_back() -> None:
    way = Way()
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            way.sent([torch.zeros(50_000), "x" * SMALL_BYTES, Refusing(), torch.zeros(90_000)])
        returned = way.mapped.back()
        assert sorted(returned) == sorted(way.mapped.all)
        for number in returned:
            way.pool.back(number)
    assert len(way.mapped.all) == 3


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_segments_too_small_for_what_comes_are_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "FREE_BYTES", 1 << 20)
    # GIVEN batches that grow, so that no segment is used again
    rows = Made(lambda index: torch.zeros(30_000 * (index + 1)), 40)
    how: Any = {"num_workers": 1, "multiprocessing_context": "fork"}
    seen = [count_mapped() for _ in AutoLoader(rows, batch_size=None, **how)]
    assert max(seen) < 20


def test_a_slice_of_indices_is_a_small_job() -> None:
    order = torch.randperm(1_000_000)
    job = [order[7:9], order[:6:2], order[9:9], order[3]]
    data = JobPickler.dumps(job, pickle.HIGHEST_PROTOCOL)
    assert len(data) < 2000
    assert all(map(torch.equal, pickle.loads(data), job))


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_keeps_its_batch_whatever_comes() -> None:
    ours, theirs = os.pipe()
    loader = AutoLoader(
        Made(lambda index: torch.full((9_000,), float(index)), 400), 8, num_workers=2, tune=False
    )
    batches, answers, mapped = iter(loader), os.pipe(), list[int]()
    batch = next(batches)
    if (pid := os.fork()) == 0:
        os.read(ours, 1)  # until the loop is at its end
        same = batch.numpy() == np.arange(8)[:, None]  # torch's threads are not in a fork
        os.write(answers[1], pickle.dumps((bool(same.all()), count_mapped())))
        os._exit(0)
    del batch
    for _ in batches:
        mapped.append(count_mapped())
    os.write(theirs, b"!")
    assert pickle.loads(os.read(answers[0], 100)) == (True, 1)
    os.waitpid(pid, 0)
    assert max(mapped) <= 2 * (2 * 2 + 2)  # what the fork has is unmapped here
    for each in (ours, theirs, *answers):
        os.close(each)


def count_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:batch")


def test_workers_of_another_loader_inherit_no_segment() -> None:
    beside: Any = iter(
        AutoLoader(Made(lambda index: torch.zeros(40_000), 40), 2, num_workers=2, tune=False)
    )
    for _ in range(6):
        next(beside)
    gc.collect()
    are_waiting = [
        each.is_lent for channel in beside._index_queues for each in channel.mapped.all.values()
    ]
    waiting = sum(are_waiting)
    assert waiting < len(are_waiting) == count_mapped()
    forked = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = AutoLoader(Made(lambda index: count_mapped(), 8), None, tune=False, **forked)
    assert list(loader) == [waiting] * 8


def test_the_record_of_a_message_passes_torchs_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: self + 1)
    channel, gone = Channel(None), WorkerGone()
    number, data, fetch, *rest = torchs.pin(
        Come(3, {"x": torch.zeros(2)}, (0, 1.0, 2.0, 2.0, 0.5), "told", channel, 9)
    )
    assert (number, data["x"].tolist(), list(fetch), rest) == (
        3,
        [1, 1],
        [0, 1, 2, 2, 0.5],
        ["told", channel, 9],
    )
    assert torchs.pin(Come(None, gone, channel=channel)) == (None, gone, None, None, channel, 0)


def test_results_are_ready_once_something_has_come() -> None:
    results, channel = Results(pins=False), Channel(None)
    results.add(channel)
    assert not results.is_ready()
    channel.end.socket.close()
    assert results.is_ready()
    number, come = results.get()
    assert number is come.number is None
    assert isinstance(come.data, WorkerGone)
    assert come.channel is channel
    assert not results.is_ready()
