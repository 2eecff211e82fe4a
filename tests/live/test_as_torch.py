"""Whatever a script does with a loader, it sees what `DataLoader` shows it: each scenario runs with both."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from autotune_loader import AutoLoader
from studies.live.schedules import Numbers, Stream

pytestmark = pytest.mark.process
WORKERS = pytest.mark.parametrize("workers", [0, 2])


class Timed(Dataset[Any]):
    """Slow enough that whatever is tuned is tuned here, too."""

    def __init__(self, samples: int = 64, seconds: float = 0.002) -> None:
        self.samples, self.seconds = samples, seconds
        self.labels = np.zeros(samples, dtype=np.int64)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.tensor([index, int(self.labels[index])])


def rows(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


# ---- lives of workers and iterators -------------------------------------------------------------------------------------


def labels_between_epochs(base: Any, workers: int) -> Any:
    data = Timed()
    loader, seen = base(data, batch_size=8, num_workers=workers), []
    for epoch in range(6):
        data.labels[:] = epoch
        seen.append(rows(loader))
    return seen


def attribute_between_epochs(base: Any, workers: int) -> Any:
    class Rescaled(Timed):
        scale = 1

        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) * self.scale

    data = Rescaled()
    loader, seen = base(data, batch_size=8, num_workers=workers), []
    for epoch in range(4):
        data.scale = epoch
        seen.append(rows(loader))
    return seen


def kept_workers_see_the_first_epoch(base: Any, workers: int) -> Any:
    data = Timed()
    kept = {"persistent_workers": True} if workers else {}
    loader, seen = base(data, batch_size=8, num_workers=workers, **kept), []
    for epoch in range(3):
        data.labels[:] = epoch
        seen.append(rows(loader))
    return seen, (iter(loader) is iter(loader)) == bool(workers)


def zipped(base: Any, workers: int) -> Any:
    loader = base(Timed(), batch_size=8, num_workers=workers)
    return [(a.tolist(), b.tolist()) for _ in range(3) for a, b in zip(loader, loader, strict=True)]


def inside_its_own_loop(base: Any, workers: int) -> Any:
    loader, seen = base(Timed(), batch_size=8, num_workers=workers), []
    for batch in loader:
        seen += [batch.tolist(), *rows(itertools.islice(loader, 2))]
    return seen


def two_iterators_one_unused(base: Any, workers: int) -> Any:
    loader = base(Timed(), batch_size=8, num_workers=workers)
    first, unused = iter(loader), iter(loader)
    seen = [next(first).tolist(), *rows(loader), next(first).tolist()]
    del unused
    return seen + rows(first)


def sliced_and_gone_on(base: Any, workers: int) -> Any:
    iterator = iter(base(Timed(), batch_size=8, num_workers=workers))
    return rows(itertools.islice(iterator, 3)) + rows(iterator)


def closed_generators(base: Any, workers: int) -> Any:
    loader, seen = base(Timed(), batch_size=8, num_workers=workers), []
    for most in range(4):
        generator = (batch.tolist() for batch in loader)
        seen += list(itertools.islice(generator, most))
        generator.close()
    return seen + rows(loader)


def asked_again_after_the_end(base: Any, workers: int) -> Any:
    iterator = iter(base(Timed(), batch_size=8, num_workers=workers))
    return rows(iterator), rows(iterator)


def in_a_thread(base: Any, workers: int) -> Any:
    seen: list[Any] = []
    loader = base(Timed(), batch_size=8, num_workers=workers)

    def read() -> None:
        for epoch in range(3):
            for number, batch in enumerate(loader):
                seen.append(batch.tolist())
                if epoch == 1 and number == 2:
                    break

    thread = threading.Thread(target=read)
    thread.start()
    thread.join(60)
    return seen, thread.is_alive()


def made_in_one_thread_read_in_another(base: Any, workers: int) -> Any:
    iterator, seen = iter(base(Timed(), batch_size=8, num_workers=workers)), []
    thread = threading.Thread(target=lambda: seen.extend(rows(iterator)))
    thread.start()
    thread.join(60)
    return seen


def infinite(base: Any, workers: int) -> Any:
    class Forever:
        def __init__(self, inner: Any) -> None:
            self.sampler = inner

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from iter(self.sampler)

    class Endless(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **arguments: Any) -> None:
            super().__init__(*args, **arguments)
            object.__setattr__(self, "batch_sampler", Forever(self.batch_sampler))
            self.iterator = super().__iter__()

        def __len__(self) -> int:
            return len(self.batch_sampler.sampler)

        def __iter__(self) -> Iterator[Any]:
            for _ in range(len(self)):
                yield next(self.iterator)

        def reset(self) -> None:
            self.iterator = self._get_iterator()

    data = Timed()
    loader = Endless(data, batch_size=8, num_workers=workers)
    seen = [*rows(loader), *rows(loader)]
    data.labels[:] = 7
    loader.reset()
    return seen + rows(loader)


class SelfIterating:
    """A batch sampler that is its own iterator, as Lightning's; `iter` begins anew."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        self.iterator = iter(self.inner)
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def __len__(self) -> int:
        return len(self.inner)


def sampler_that_is_its_own_iterator(base: Any, workers: int) -> Any:
    batches = SelfIterating(BatchSampler(SequentialSampler(range(40)), 4, False))
    return rows(base(Timed(40), batch_sampler=batches, num_workers=workers))


def asked_how_far_ahead(base: Any, workers: int) -> Any:
    drawn: list[int] = []

    class Noting:
        def __iter__(self) -> Iterator[list[int]]:
            for number in range(30):
                drawn.append(number)
                yield [number]

        def __len__(self) -> int:
            return 30

    ahead = []
    for number, _ in enumerate(base(Timed(30), batch_sampler=Noting(), num_workers=workers)):
        ahead.append(len(drawn) - number)
    return max(ahead)


# ---- errors -------------------------------------------------------------------------------------------------------------


class NotDecodedError(Exception):
    def __init__(self, path: str, code: int) -> None:
        super().__init__(f"{path}: {code}")


class Failing(Timed):
    def __init__(self, make: Callable[[], BaseException]) -> None:
        super().__init__(40, 0.0)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise self.make()
        return super().__getitem__(index)


def events(iterator: Any) -> list[Any]:
    """All batches and exceptions until the end."""
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(iterator).tolist())
        except StopIteration:
            return seen
        except Exception as error:
            seen.append((type(error).__name__, "DataLoader worker process" in str(error), "sample" in str(error)))


def failing(make: Callable[[], BaseException]) -> Callable[[Any, int], Any]:
    def scenario(base: Any, workers: int) -> Any:
        loader, seen = base(Failing(make), batch_size=4, num_workers=workers), []
        for _ in range(2):
            iterator = iter(loader)
            seen += [events(iterator), events(iterator)]  # a StopIteration of the dataset's own is no end
        return seen

    return scenario


def init_fails(base: Any, workers: int) -> Any:
    def init(worker: int) -> None:
        raise KeyError(f"sample of {worker}")

    loader = base(Timed(8), batch_size=4, num_workers=workers, worker_init_fn=init)
    return events(iter(loader))[:1]


def collate_fails(base: Any, workers: int) -> Any:
    def collate(samples: list[Any]) -> Any:
        if int(samples[0][0]) == 8:
            raise ValueError("sample 8")
        return torch.stack(samples)

    return events(iter(base(Timed(40), batch_size=4, num_workers=workers, collate_fn=collate)))


def out_of_order_failure(base: Any, workers: int) -> Any:
    loader = base(Failing(lambda: ValueError("sample")), batch_size=4, num_workers=workers, in_order=False)
    return sorted(map(str, events(iter(loader))))


class Interrupting(Timed):
    """A worker sends the training process a signal while that surely waits: what interrupts torch in the midst of receiving
    a batch loses it, and torch then waits for ever."""

    def __getitem__(self, index: int) -> Any:
        if index == 16 and get_worker_info() is not None:
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(0.3)
        return super().__getitem__(index)


def interrupted(handler: Any) -> Callable[[Any, int], Any]:
    def scenario(base: Any, workers: int) -> Any:
        old = signal.signal(signal.SIGUSR1, handler)
        try:
            iterator = iter(base(Interrupting(40, 0.02), batch_size=4, num_workers=workers))
            seen, caught = [next(iterator).tolist()], 0
            if not workers:
                timer = threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGUSR1))
                timer.start()
            while True:
                try:
                    seen.append(next(iterator).tolist())
                except StopIteration:
                    break
                except (KeyboardInterrupt, TimeoutError):
                    caught += 1
        finally:
            signal.signal(signal.SIGUSR1, old)
        # Without workers torch loses the batch in hand; nothing more may be lost.
        return caught, len(seen) >= 9, len(seen) == 10 or not workers

    return scenario


def raise_timeout(*_: Any) -> None:
    raise TimeoutError


def stream_longer_than_it_says(base: Any, workers: int) -> Any:
    class Liar(Stream):
        def __len__(self) -> int:
            return 6

    loader = base(Liar(12), batch_size=2, num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = (len(loader), len(rows(loader)))
    return before, sorted({str(each.message)[:30] for each in caught})


def lengths(base: Any, workers: int) -> Any:
    loader = base(Timed(), batch_size=6, num_workers=workers)
    found: list[Any] = [len(loader), len(iter(loader))]
    try:
        len(base(Stream(9), num_workers=workers))
    except TypeError as error:
        found.append(str(error))
    return found


# ---- what is looked at --------------------------------------------------------------------------------------------------


def attributes(base: Any, workers: int) -> Any:
    kept = {"persistent_workers": True} if workers else {}
    loader = base(TensorDataset(torch.arange(40)), batch_size=4, shuffle=True, num_workers=workers, **kept)
    iterator = iter(loader)
    next(iterator), next(iterator)
    owners = (
        (
            loader,
            "batch_size num_workers prefetch_factor pin_memory drop_last timeout dataset persistent_workers in_order",
        ),
        (loader, "multiprocessing_context _index_sampler _auto_collation _dataset_kind collate_fn generator"),
        (iterator, "_num_yielded _num_workers _dataset _index_sampler _persistent_workers"),
    )
    shown = [repr(getattr(owner, name)).split(" at 0x")[0] for owner, names in owners for name in names.split()]
    shown += [str(isinstance(iterator, _BaseDataLoaderIter)), str(loader._iterator is iterator), str(len(iterator))]
    if workers:
        shown.append(str(len(iterator._workers)))
        iterator._shutdown_workers()
        shown.append(str(len(multiprocessing.active_children())))
    return shown


def made_anew(base: Any, workers: int) -> Any:
    loader = base(TensorDataset(torch.arange(40)), batch_size=4, num_workers=workers)
    left_out = {"batch_size", "sampler", "drop_last", "batch_sampler"}
    public = {name: value for name, value in vars(loader).items() if not name.startswith("_") and name not in left_out}
    other = type(loader)(**public, batch_sampler=BatchSampler(SequentialSampler(range(10)), 5, False))
    return other.num_workers, [batch[0].tolist() for batch in other]


def copies(base: Any, workers: int) -> Any:
    loader = base(Numbers(12), batch_size=4, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    others = [copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
    return [rows(each) for each in others] + rows(iterator)


# ---- workers and what they are sent -------------------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """Notes while it is read what its collate function needs."""

    __slots__ = ("longest",)

    def __init__(self) -> None:
        self.longest = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.longest = max(self.longest, index % 7)
        return index

    def collate(self, samples: list[int]) -> Any:
        longest, self.longest = self.longest, 0
        return torch.tensor([*samples, longest])


def bound_collate(base: Any, workers: int) -> Any:
    data = Texts()
    return rows(base(data, batch_size=4, num_workers=workers, collate_fn=data.collate))


@dataclass
class Fields:
    x: torch.Tensor


Pair = namedtuple("Pair", ["x", "y"])


def as_fields(samples: list[Any]) -> Fields:
    return Fields(torch.stack(samples))


def as_pair(samples: list[Any]) -> Pair:
    return Pair(torch.stack(samples), None)


def batch_types(base: Any, workers: int) -> Any:
    makes = [as_fields, as_pair]
    made = [batch for make in makes for batch in base(Timed(8), batch_size=4, num_workers=workers, collate_fn=make)]
    return [(type(batch), batch.x.tolist()) for batch in made]


class Asking(Timed):
    epoch = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is not None:
            info.dataset.epoch += 1
            return torch.tensor([index, info.num_workers, info.id, int(info.dataset is self)])
        return torch.tensor([index])


def worker_info(base: Any, workers: int) -> Any:
    return rows(base(Asking(16), batch_size=4, num_workers=workers))


class Shared(Timed):
    def __init__(self) -> None:
        super().__init__(32)
        self.counts = torch.zeros(32).share_memory_()

    def __getitem__(self, index: int) -> Any:
        self.counts[index] += 1
        return super().__getitem__(index)


def shared_memory(base: Any, workers: int) -> Any:
    data = Shared()
    for _ in range(2):
        rows(base(data, batch_size=4, num_workers=workers))
    return data.counts.tolist()


def daemonic(base: Any, workers: int) -> Any:
    answer: Any = multiprocessing.Queue()

    def read() -> None:
        try:
            answer.put(rows(base(Numbers(8), batch_size=4, num_workers=workers)))
        except Exception as error:
            answer.put(type(error).__name__)

    child = multiprocessing.Process(target=read, daemon=True)
    child.start()
    told = answer.get(timeout=60)
    child.join(10)
    return told


def attributes_set_later(base: Any, workers: int) -> Any:
    loader = base(Asking(16), batch_size=4, num_workers=workers)
    seen = rows(loader)
    loader.num_workers, loader.prefetch_factor = (0, None) if workers else (2, 2)
    seen += rows(loader)
    loader.collate_fn = lambda samples: torch.stack(samples) + 1
    loader._DataLoader__initialized = False
    loader.dataset = Asking(8)
    loader.batch_sampler = BatchSampler(SequentialSampler(range(8)), 2, False)
    loader._DataLoader__initialized = True
    return seen + rows(loader)


def handler_of_children(base: Any, workers: int) -> Any:
    def own(*_: Any) -> None: ...

    old = signal.signal(signal.SIGCHLD, own)
    try:
        seen = rows(base(Timed(16), batch_size=4, num_workers=workers))
        return seen, workers > 0 or signal.getsignal(signal.SIGCHLD) is own
    finally:
        signal.signal(signal.SIGCHLD, old)


def timeout(base: Any, workers: int) -> Any:
    loader = base(Timed(8, 0.5), batch_size=8, num_workers=workers, timeout=1)
    try:
        next(iter(loader))
    except Exception as error:
        return type(error), str(error)


SCENARIOS = [
    labels_between_epochs,
    attribute_between_epochs,
    kept_workers_see_the_first_epoch,
    zipped,
    inside_its_own_loop,
    two_iterators_one_unused,
    sliced_and_gone_on,
    closed_generators,
    asked_again_after_the_end,
    in_a_thread,
    made_in_one_thread_read_in_another,
    infinite,
    sampler_that_is_its_own_iterator,
    asked_how_far_ahead,
    failing(lambda: NotDecodedError("sample", 7)),
    failing(lambda: KeyError("sample")),
    failing(lambda: IndexError("sample")),
    failing(StopIteration),
    failing(lambda: FileNotFoundError("sample")),
    collate_fails,
    interrupted(signal.default_int_handler),
    interrupted(raise_timeout),
    stream_longer_than_it_says,
    lengths,
    attributes,
    made_anew,
    copies,
    bound_collate,
    batch_types,
    worker_info,
    shared_memory,
    daemonic,
    attributes_set_later,
    handler_of_children,
    timeout,
]


@WORKERS
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__qualname__.split(".")[0])
def test_a_scenario_goes_as_with_dataloader(scenario: Callable[[Any, int], Any], workers: int) -> None:
    torch.manual_seed(0)
    plain = scenario(DataLoader, workers)
    torch.manual_seed(0)

    assert scenario(AutoLoader, workers) == plain


@pytest.mark.parametrize("scenario", [init_fails, out_of_order_failure], ids=["init", "in_order=False"])
def test_with_workers_a_scenario_goes_as_with_dataloader(scenario: Callable[[Any, int], Any]) -> None:
    assert scenario(AutoLoader, 2) == scenario(DataLoader, 2)


class Everything(Shared):
    """What the four scenarios above ask for one by one; a worker that is not forked takes seconds to start."""

    longest = 0

    def __getitem__(self, index: int) -> Any:
        self.longest = max(self.longest, index % 7)
        info: Any = get_worker_info()
        about_worker = [info.num_workers, info.id, int(info.dataset is self)]
        return torch.cat([super().__getitem__(index), torch.tensor(about_worker)])

    def collate(self, samples: list[Any]) -> Pair:
        longest, self.longest = self.longest, 0
        return Pair(Fields(torch.stack(samples)), longest)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_get_what_dataloader_sends(method: str) -> None:
    def seen(base: Any) -> Any:
        data = Everything()
        loader = base(data, batch_size=4, num_workers=1, collate_fn=data.collate, multiprocessing_context=method)
        batches = [(type(batch), type(batch.x), batch.x.x.tolist(), batch.y) for batch in loader]
        return batches, data.counts.tolist()

    assert seen(AutoLoader) == seen(DataLoader)


def test_what_cannot_be_sent_raises_what_dataloader_raises() -> None:
    raised = []
    for base in (DataLoader, AutoLoader):
        loader: Any = base([lambda: 0], num_workers=1, multiprocessing_context="spawn")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                iter(loader)
            except Exception as error:
                raised.append((type(error), str(error)))
                sys.last_exc = None

    assert len(raised) == 2
    assert raised[0] == raised[1]


def test_more_workers_than_cores_are_warned_of_as_torch_does() -> None:
    told = []
    for base in (DataLoader, AutoLoader):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows(base(Numbers(4), num_workers=(os.cpu_count() or 1) + 1))
        told.append([str(each.message) for each in caught])

    assert told[0] == told[1] != []


def test_iterable_datasets_are_read_by_as_many_workers_as_asked_for() -> None:
    class Counting(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            for index in range(20):
                time.sleep(0.002)
                yield torch.tensor([index, -1 if info is None else info.num_workers])

    for workers in (0, 2):
        loaders = [base(Counting(), batch_size=2, num_workers=workers) for base in (AutoLoader, DataLoader)]
        ours, plain = ([rows(loader) for _ in range(3)] for loader in loaders)
        assert ours == plain
